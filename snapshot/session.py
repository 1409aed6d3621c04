"""What happens between entering the hook and leaving it: the training thread's way through a step.

::

    optim.step() of s ──► the step ends: settle outcomes, note generators
    code between steps: schedules, averages, evaluations, reading data
    step s+1 begins ────► capture, hand over ──────────────────────────────┐
    forward, backward of s+1                                               │ copy thread: slot, copy, check
    optim.step() of s+1 ◄─ before_step: wait for the copy, report outcomes ┘ seal thread; SMP: digest, encode, post

The state at a boundary is the state with which the next step begins. Changes by code between two steps belong to it,
unless that code undoes them. Where the loop is, and what each of its events does, says `snapshot.step.turns`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast.smp_daemon.shared.board import MAX_PAUSE_S, TrainerPhase
from holdfast.smp_daemon.shared.errors import ConfigError, HoldfastError
from holdfast.smp_daemon.shared.identity import epoch_text
from holdfast.smp_daemon.shared.logs import about, get_log, identify, log_here, some
from holdfast.smp_daemon.shared.system import MACHINE, System
from holdfast.snapshot.copy.errors import GivenUp
from holdfast.snapshot.interval.control import IntervalController
from holdfast.snapshot.interval.recording import leave, recording_from_environment
from holdfast.snapshot.options import Options
from holdfast.snapshot.protecting import Progress, Protecting, Statistics
from holdfast.snapshot.rank import Rank
from holdfast.snapshot.resume.blocks import describe, to_tree
from holdfast.snapshot.resume.comparison import (
    BY_DATA,
    Resumed,
    check_inputs,
    refuse,
    warn_of_unknown_inputs,
)
from holdfast.snapshot.resume.rehearsal import Rehearsal
from holdfast.snapshot.resume.restore import Restored, restore
from holdfast.snapshot.state.adapter import Adapter
from holdfast.snapshot.state.audit import Auditor, orders_from_environment
from holdfast.snapshot.state.inputs import sample_inputs
from holdfast.snapshot.state.reach import Theirs
from holdfast.snapshot.step.boundary import Boundary
from holdfast.snapshot.step.capture import Capture
from holdfast.snapshot.step.data import Data
from holdfast.snapshot.step.gradients import Gradients
from holdfast.snapshot.step.orders import SnapshotCopy
from holdfast.snapshot.step.position import Position
from holdfast.snapshot.step.turns import BEGIN, FIRST_TURNS, Action, Event, NotPlain, TurnState, after

PATIENCE_S = 0.5
"""How long ``optim.step()`` may wait for a copy to begin, in seconds. If the SMP gives no slot by then,
``optim.step()`` does not wait at all until a copy begins in time again."""

log = get_log(__name__)


@dataclass(frozen=True, slots=True)
class Checks:
    """Which checks of a loop are made. Trainers that restore or read state in their own way turn some off.

    Attributes:
        resumption: whether the first step after a restore must begin with the state that was restored.
        another_batch: why the first step after a restore may be given another batch, and what to do about it.
        reading: whether to warn that something was read between entering and the first step.
        restored_by_themselves: packages whose integration restores what their objects hold; see `state.reach.Theirs`.
    """

    resumption: bool = True
    another_batch: str = BY_DATA
    reading: bool = True
    restored_by_themselves: frozenset[str] = frozenset()


@dataclass(slots=True)
class _FirstStep:
    """Work that is still to be done, once, in the first step after a restore.

    Attributes:
        rewind: puts the random generators back to their restored state.
        state: compares the state as the step begins to what was restored.
        inputs: digest of what the step's first forward must be given; None: anything.
        unknown_inputs: whether it is unknown what that forward must be given.
    """

    rewind: Callable[[], None] | None = None
    state: Resumed | None = None
    inputs: str | None = None
    unknown_inputs: bool = False

    def put_generators_back(self) -> None:
        """Call this before data is read for the first time."""
        if self.rewind is not None:
            self.rewind()
            self.rewind = None

    def check_state(self, *, declared: bool) -> None:
        """Compare the state as the step begins. Raises `StateMismatch`, see `Resumed.check`."""
        if self.state is not None:
            state, self.state = self.state, None
            state.check(declared=declared)


def enter(
    adapter: Adapter, options: Options, statistics: Statistics, checks: Checks, system: System = MACHINE
) -> Session:
    """Restore if the job has a snapshot, and begin to take snapshots. A collective call; blocks.

    Raises:
        HoldfastError: as `restore`, and as making a `Rank`. Nothing stays open.
    """
    rank = Rank(adapter, options, system)
    rank.client.heartbeat(TrainerPhase.RESTORE, 0)
    log_here(job=options.job, node=rank.client.node, rank=rank.agreement.rank, coord=rank.coord, epoch=None, step=None)
    try:
        restored = restore(
            rank.client,
            rank.agreement,
            adapter,
            rank.engine,
            options.for_start,
            elastic=options.elastic,
            protect=options.protect_every == 1,
        )
    except BaseException as error:
        rank.smp.say_end(0, error)
        rank.close()
        raise
    if restored.snapshot is not None and rank.agreement.rank == 0:
        log.warning("%s", restored, extra=about(restored.snapshot, tier=restored.tier, how=restored.how))
    return Session(adapter, options, rank, restored, statistics, checks)


class Session:
    """One rank's session, from entering the hook to leaving it. Used by the training thread.

    It receives the events of the loop (`snapshot.step.boundary.Listener`). Decisions that all ranks make together are
    in `Protecting`.
    """

    def __init__(
        self,
        adapter: Adapter,
        options: Options,
        rank: Rank,
        restored: Restored,
        statistics: Statistics,
        checks: Checks,
    ) -> None:
        self.restored = restored
        self.rank = rank
        self._pid = os.getpid()
        self._options = options
        self._statistics = statistics
        self._checks = checks
        step = restored.snapshot.step if restored.snapshot else 0
        self.progress = progress = Progress(restored.epoch, step)
        # Log lines name the epoch and the step at the time of logging. These functions must not keep the state alive.
        identify(epoch=lambda: epoch_text(progress.epoch), step=lambda: progress.step)
        self.heartbeat()
        self._recording = recording_from_environment(options.slots, rank.client.outcome)
        if self._recording is not None:
            options = self._options = replace(options, protect_every=1)  # a profile measures encoding, too
        self.intervals = IntervalController(
            options.every,
            options.budget,
            options.protect_every,
            self._recording,
            step=restored.snapshot.step if restored.snapshot else None,
            notes=restored.notes,
        )
        statistics.interval = self.intervals.rule.interval
        self.position = Position(step, restored.loop, to_tree(describe(options.for_start.block, adapter)))
        self.capture = Capture(
            adapter,
            rank.agreement,
            rank.engine,
            options.job,
            rank.coord,
            self.position.tree,
            self.intervals.rule.notes,
            restored.run.id,
            rank.system,
        )
        self.protecting = Protecting(options, rank, restored, self.capture, self.intervals, progress, statistics)
        self._auditor = self._auditor_if_ordered(adapter)
        self.boundary = Boundary(adapter.optimizers(), adapter.modules(), self, adapter.scalers())
        self._gradients = Gradients(adapter.modules(), log.warning, lambda: self._hear(Event.ZEROED))
        self._steppers = adapter.steppers()
        self._first = _FirstStep()
        if restored.snapshot is not None:
            self._first.rewind = restored.rewind
        self._several = len(adapter.optimizers()) > 1
        self._where = TurnState.BETWEEN
        self._began_with = 0  # number of the forward that began the step, in a plain loop
        self._rehearsal: Rehearsal | None = None
        self._refused_at: int | None = None  # the newest step that has no snapshot because the loop was not plain in it
        self._marked = False  # data was read, or a step declared, at least once
        self._awaiting_inputs: SnapshotCopy | None = None  # a copy whose first forward's inputs are not known yet
        self._smp_is_slow = False
        self._is_over = False  # the loop says that training is over, wherever it is left

    def expect_resumption(self, adapter: Adapter) -> None:
        """Note the state and inputs that the first step after a restore must begin with, if they are checked.

        Called by the hook after it has stored this session, not by `__init__`: users' `track` getters are called here,
        and may ask the hook for its step.
        """
        restored = self.restored
        if adapter.modules():  # without any there is no forward
            self._rehearsal = Rehearsal(adapter)
            if restored.snapshot is None:
                self._rehearsal.note_values()
        if restored.snapshot is None:
            return
        self._first.inputs = restored.inputs or None
        if self._checks.resumption:
            self._first.state = Resumed(adapter, self.rank.engine, restored.began, restored.snapshot.step)
            self._first.unknown_inputs = restored.inputs is None

    def _auditor_if_ordered(self, adapter: Adapter) -> Auditor | None:
        orders = orders_from_environment()
        if orders is None:
            return None
        rank, at = self.rank.agreement.rank, self.progress
        theirs = Theirs(self._checks.restored_by_themselves)
        return Auditor(
            orders, rank, at.epoch, at.step, adapter.modules(), self.drain, lambda: self.protected_step, theirs
        )

    # ------------------------------------------------------------------ what users ask for

    @property
    def step(self) -> int:
        """See `SnapshotHook.step`."""
        return self.position.number(self.progress.step)

    @property
    def protected_step(self) -> int | None:
        """See `SnapshotHook.protected_step`."""
        protected = self.protecting.ledger.protected
        return protected.step if protected else None

    @property
    def sealed_step(self) -> int | None:
        """See `SnapshotHook.sealed_step`."""
        ledger = self.protecting.ledger
        newest = ledger.sealed or ledger.protected
        return newest.step if newest else None

    def begin_turn(self) -> None:
        """The loop says that a step begins, and counts its turns."""
        self._declare()
        self.position.turn_begins()
        self.mark()
        self.begin()

    def steps(self, count: int) -> Iterator[int]:
        """See `SnapshotHook.steps`."""
        while (turn := self._next_turn()) < count:
            self.begin_turn()
            self.position.in_steps = True
            yield turn
        self.position.steps_over()

    def _next_turn(self) -> int:
        """Number of the turn that the next `begin_turn` begins. Notes that the loop says where its steps begin."""
        self._declare()
        return self.position.next_turn

    def data(self, source: Any, name: str, ahead: int | None, exact: bool) -> Data:
        """See `SnapshotHook.data`."""
        self._declare()
        return self.position.data(
            source,
            name,
            lambda held: Data(
                source,
                name,
                held,
                self.mark,
                self._begin_with_batch,
                ahead=ahead,
                exact=exact,
                heartbeat=self.heartbeat,
                over=self._pass_over,
            ),
        )

    def _begin_with_batch(self) -> None:
        self.position.in_data = True
        knows = any(data.is_position_known for data in self.position.sources.values())
        self.position.counting.batch(knows, speaks=self.rank.agreement.rank == 0)
        self.begin()

    def _pass_over(self, resumed: bool) -> None:
        unused = self._where is TurnState.BEGUN and self._gradients.unused()
        if wrong := self.position.pass_over(resumed, unused):
            refuse(wrong)

    def finish(self) -> None:
        """See `SnapshotHook.finish`."""
        self._is_over = True

    def communicate(self, begins: bool) -> None:
        """The step begins, or stops, communicating: holdfast's copies and traffic wait meanwhile. Never blocks."""
        index = self.protecting.index
        if begins:
            self.protecting.pace.comm(True)
            self.rank.client.pause(index, self.rank.system.monotonic() + MAX_PAUSE_S)
        else:
            self.rank.client.resume(index)
            self.protecting.pace.comm(False)

    def drain(self, deadline_s: float) -> bool:
        """See `SnapshotHook.drain`."""
        done = self.protecting.drain(self.rank.system.monotonic() + deadline_s)
        return done and (self.protecting.due is None or self._where is not TurnState.BETWEEN)

    def heartbeat(self) -> None:
        """Tell the SMP that this process is alive, and where it is."""
        self.rank.client.heartbeat(self.progress.phase, self.progress.step)

    # ------------------------------------------------------------------ called by the boundary

    def before_step(self) -> None:
        """The fence: wait until nothing that is about to change is still being copied."""
        if self._auditor is not None:
            self._auditor.before_step(self.progress.step)
        began = self.rank.system.monotonic()
        if self._where is TurnState.BETWEEN:
            self._first.check_state(declared=self.position.declared)
        self._hear(Event.SEVERAL if self._several else Event.STEP)
        self.protecting.pace.fenced(began)
        if self.protecting.newest is not None:
            self._fence(self.protecting.newest)
        self.protecting.report()
        self._statistics.stall_s += self.rank.system.monotonic() - began

    def after_step(self) -> None:
        """An optimizer has stepped. Unless the loop says where its steps begin, the step is over."""
        self._first.inputs = None
        self._confirm()
        self._hear(Event.STEPPED)

    def on_forward(self, number: int, given: Any) -> None:
        """A module runs forward, in training mode and with gradients. This begins the step of a plain loop."""
        if self._where is TurnState.BETWEEN and not self.position.declared:
            self._began_with = number
            self._begins(Event.FORWARD)
        if self._first.unknown_inputs:
            self._first.unknown_inputs = False
            if not self.position.sources:  # sources compare their next batch themselves
                warn_of_unknown_inputs(self.progress.step)
        if self._where is not TurnState.BETWEEN:
            self._note_inputs(given)

    def on_evaluation(self) -> None:
        """A module has run forward without training."""
        watched = self._where is TurnState.BETWEEN and (self._is_new or self.protecting.due is not None)
        if watched and not self.position.declared and self._rehearsal and (drawn := self._rehearsal.drawn()):
            self._hear(Event.EVALUATION, drawn)

    def on_backward(self, number: int) -> None:
        """Gradients are computed for a forward that `on_forward` reported."""
        if number == self._began_with:
            self._hear(Event.BACKWARD)

    # ------------------------------------------------------------------ a step

    def mark(self) -> None:
        """Data is about to be read for the next step. If a step has ended, note the state at its boundary."""
        self._declare()
        if not self._marked:
            self._marked = True
            self._warn_of_what_was_read()
        self._first.put_generators_back()
        self._hear(Event.MARK)

    def begin(self) -> None:
        """The loop says that the next step begins here."""
        self._begins(Event.BEGIN)

    def _begins(self, event: Event) -> None:
        began = self.rank.system.monotonic()
        self.heartbeat()
        self._first.check_state(declared=self.position.declared)
        if self._auditor is not None:
            self._auditor.settled(self.progress.step)
        if not self.position.declared:
            self._rehearse()
        self._hear(event)
        self._statistics.stall_s += self.rank.system.monotonic() - began

    def _declare(self) -> None:
        """Note that the loop says where its steps begin."""
        if not self.position.declared and self._where is TurnState.BEGUN:
            self.protecting.give_up(GivenUp("the loop says for the first time where its steps begin"))
            self._where = TurnState.BETWEEN
        self.position.declare(self.progress.step)

    def _warn_of_what_was_read(self) -> None:
        """Warn, before the first step, if a batch may have been read ahead of it: after a restart it would be
        another."""
        unchecked = self.position.sources or not self._checks.reading
        drawn = self._rehearsal.drawn() if self._rehearsal and not unchecked else []
        if drawn:
            log.warning(
                "something drew from the random generators of %s between entering and the first step; if it read a "
                "batch ahead, or shuffled data, that is not captured, and a restart will read other data: go through "
                "data by `snap.data`, or `track` what was read",
                ", ".join(drawn),
            )

    def _hear(self, event: Event, names: Sequence[str] = ()) -> None:
        """Something happened: go to where the loop is now, and do what that asks for. `names`: what it happened to."""
        self._where, what = after(self._where, event, declared=self.position.declared)
        if isinstance(what, NotPlain):
            self._refuse(what, names)
        elif what is Action.TAKE:
            self._take()
        elif what is Action.CONFIRM:
            self._confirm()
        elif what is Action.END:
            self._end_step()
        if what in (Action.END, Action.NOTE) and self.protecting.due is not None:
            self.capture.mark()

    @property
    def _is_new(self) -> bool:
        """Whether the job is in its first turns, and nothing of it is protected."""
        return self.restored.snapshot is None and self.progress.step < FIRST_TURNS

    def _refuse(self, refusal: NotPlain, names: Sequence[str]) -> None:
        """The loop is not plain, and does not say where its steps begin.

        Raises:
            ConfigError: the job is new. Otherwise this step has no snapshot, and training goes on.
        """
        text = f"{refusal.value}{f' ({some(names)})' if names else ''}: {BEGIN}"
        step = self.progress.step
        if self._is_new or refusal is NotPlain.SEVERAL:
            raise ConfigError(f"it cannot be told where the steps of this loop begin. In step {step + 1}, {text}")
        self.protecting.give_up(GivenUp(text))
        if self._refused_at == step:
            return  # what follows from the first reason need not be told
        self._refused_at = step
        if self.protecting.episodes.begin(refusal, "no snapshot of step %d: %s", step, text):
            self.protecting.copier.say(f"no snapshot of step {step}, and of others like it: {text}")

    def _rehearse(self) -> None:
        """The first forward of a step of a plain loop is about to run: is everything as a restart would have it?"""
        rehearsal = self._rehearsal
        if rehearsal is None:
            return
        if self._is_new and (moved := rehearsal.moved()):
            self._hear(Event.MOVED, moved)
        if (self._is_among_first or self.protecting.due is not None) and (uneven := rehearsal.uneven()):
            self._hear(Event.UNEVEN, uneven)

    @property
    def _is_among_first(self) -> bool:
        """Whether this is one of the first turns since the loop was entered."""
        restored = self.restored.snapshot
        return self.progress.step - (0 if restored is None else restored.step) < FIRST_TURNS

    def _take(self) -> None:
        """If a snapshot is due, capture the state as it is now; see `Protecting.take`."""
        if self.protecting.due is not None:
            self._awaiting_inputs = self.protecting.take(self.protecting.due, declared=self.position.declared)

    def _confirm(self) -> None:
        """The step has begun where its snapshot was taken."""
        self._awaiting_inputs = None
        if self.protecting.newest is not None:
            self.protecting.newest.confirm()

    def _note_inputs(self, given: Any) -> None:
        """The step's forward runs on what is `given`. Raises `StateMismatch` if a restored step gets another batch."""
        copy, self._awaiting_inputs = self._awaiting_inputs, None
        expected, self._first.inputs = self._first.inputs, None
        if copy is None and expected is None:
            return
        inputs = sample_inputs(self.rank.engine, given)
        if expected is not None and all(data.exact for data in self.position.sources.values()):
            check_inputs(expected, inputs, self.progress.step, self._checks.another_batch)
        if copy is not None:
            copy.note_inputs(inputs)
            if copy.order.declared:
                copy.confirm()

    def _fence(self, copy: SnapshotCopy) -> None:
        """Wait until the tensors that are being copied may change, but at most `PATIENCE_S` for a slot from the SMP."""
        in_time = copy.fence(0.0 if self._smp_is_slow else PATIENCE_S, self._options.deadline_s)
        self._smp_is_slow = not in_time
        self.capture.let_go()

    def _end_step(self) -> None:
        """Settle earlier snapshots, and decide whether another is due."""
        began = self.rank.system.monotonic()
        self.protecting.due = None
        self._gradients.stepped()
        self._steppers.check()
        self.progress.step += 1
        self.progress.phase = TrainerPhase.STEP
        self.heartbeat()
        overlapped = bool(self.protecting.ledger.pending)
        self.intervals.observe(self.progress.step, began, self._statistics.stall_s, overlapped)
        self.protecting.step_ended()
        if self._rehearsal is not None and not self.position.declared:
            if self._is_new and self.progress.step == 1:
                self._rehearsal.note_values()
            if self._is_among_first or self.protecting.due is not None:
                self._rehearsal.note()
        self._statistics.stall_s += self.rank.system.monotonic() - began
        if self._auditor is not None:
            self._auditor.after_step(self.progress.step, lambda: self.rank.agreement.minimum([1])())
        if self._recording is not None and self._recording.over:
            self._end_recording()

    # ------------------------------------------------------------------ ends

    def leave(self, error: BaseException | None, *, early: bool = False) -> None:
        """See `SnapshotHook.__exit__`. Blocks.

        Args:
            early: the trainer says that training stopped before its end. Its loop may have moved on since the last
                step, so no snapshot is taken of where it is now.
        """
        if os.getpid() != self._pid:
            return
        well, protecting, deadline_s = error is None, self.protecting, self._options.deadline_s
        stepped = self._where is TurnState.STEPPED
        if well and not stepped:
            self._gradients.check()
        self.boundary.remove()
        self._gradients.remove()
        self._steppers.remove()
        self.rank.smp.say_end(self.progress.step, error)
        protecting.pace.fence()
        kept = well and (early or self._options.keep or self._is_left_early())
        if well:
            kept, takes = protecting.agree_on_end(keeps=kept, takes=not early, stepped=stepped)
            if kept and takes:
                self._end_last_step()
        if (copy := protecting.newest) is not None and not copy.is_confirmed:
            if copy.order.declared:
                copy.confirm()
            else:
                copy.abort(GivenUp("the loop was left before gradients of the step's forward were computed"))
        try:
            protecting.stop_reserving(deadline_s)
            protecting.copier.close(deadline_s)
            if self._recording is not None:
                self._recording.close(deadline_s)
            if well:
                kept = protecting.finish_together(kept)
                if kept and not self._options.keep:
                    protecting.say_what_is_kept()
        except HoldfastError as failure:
            if self._options.strict and well:
                raise
            log.error("the SMP of this node was left running (`holdfast gc` removes it): %s", failure)
        finally:
            self.rank.close()
            self._awaiting_inputs = None
            protecting.let_go()

    def _is_left_early(self) -> bool:
        """Whether the loop was left before its end, as far as it tells."""
        return not self._is_over and (self.position.in_steps or self.position.in_data)

    def _end_last_step(self) -> None:
        """Take the last snapshot of a loop that has ended well, as it is kept."""
        if self._where is TurnState.STEPPED:
            self.protecting.last = True
            self.position.last_turn_ended(goes_on=self._is_left_early())
            self.mark()
        if self.protecting.due is not None and self._where is TurnState.BETWEEN:
            self.protecting.take(self.protecting.due, declared=True)

    def _end_recording(self) -> None:
        """The profile is complete: write it, and end this process well. A collective call."""
        layout, recording, self._recording = self.protecting.layout, self._recording, None
        if recording is not None and layout is not None:
            recording.close(self._options.deadline_s)
            recording.write(layout, self.rank.client.node, self.rank.coord, self.rank.agreement)
        self.leave(None)
        leave()
