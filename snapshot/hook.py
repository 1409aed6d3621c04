"""The hook in the training process: `SnapshotHook` as users see it, and the `Session` while it is entered.

Call it from the training thread only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Self

import torch

from holdfast.smp_daemon.shared.board import MAX_PAUSE_S
from holdfast.smp_daemon.shared.errors import ConfigError, HoldfastError, StaleEpoch, failure_of
from holdfast.smp_daemon.shared.goodput import Spent
from holdfast.smp_daemon.shared.identity import epoch_text
from holdfast.smp_daemon.shared.logs import about, get_log, identify, log_here
from holdfast.smp_daemon.shared.plain import from_plain, to_plain
from holdfast.smp_daemon.shared.system import MACHINE, System
from holdfast.snapshot.collective.mesh import AgreementLost
from holdfast.snapshot.collective.reports import ALL, ANY, SAME, reduced
from holdfast.snapshot.copy.tensors import memory_of
from holdfast.snapshot.first_turns import Checks, FirstTurns
from holdfast.snapshot.interval.control import IntervalController
from holdfast.snapshot.interval.recording import leave, recording_from_environment
from holdfast.snapshot.loop import Loop
from holdfast.snapshot.options import Options
from holdfast.snapshot.progress import Statistics
from holdfast.snapshot.protecting import Protecting
from holdfast.snapshot.rank import Rank
from holdfast.snapshot.resume.arrange import coordinate_key
from holdfast.snapshot.resume.blocks import check_not_entered, describe, warn_of_order
from holdfast.snapshot.resume.restore import Restored, restore
from holdfast.snapshot.state import rng
from holdfast.snapshot.state.adapter import Adapter
from holdfast.snapshot.state.audit import Auditor, orders_from_environment
from holdfast.snapshot.state.hidden import registered, untracked
from holdfast.snapshot.state.live import At
from holdfast.snapshot.state.tracked import make
from holdfast.snapshot.step.capture import Capture
from holdfast.snapshot.step.data import Data
from holdfast.snapshot.step.orders import CopyState
from holdfast.snapshot.step.own_time import OwnTime
from holdfast.snapshot.step.position import DATA, Position, says_where_steps_begin


class SnapshotHook:
    """Protects one rank's state; see `holdfast.InMemorySnapshot` for the options.

    Attributes:
        checks: which checks of the loop are made.
        tracked: names that were given to `track`.
        system: the threads, clock, files and sockets to use.
        blocks: number of the block of the script that is entered next, by arena, once one of that job was left well;
            shared by all hooks of this process.
    """

    checks = Checks()
    system: System = MACHINE
    blocks: ClassVar[dict[Path, int]] = {}

    def __init__(self, adapter: Adapter, options: Options) -> None:
        self._adapter = adapter
        self._options = options
        self._entered: Session | None = None  # kept after leaving, for `step` and others
        self._statistics = Statistics()
        self._was_begun = False
        self.tracked: set[str] = set()

    @property
    def _session(self) -> Session:
        if self._entered is None:
            raise ConfigError("the hook was not entered: do this inside `with InMemorySnapshot(...) as snap:`")
        return self._entered

    @property
    def step(self) -> int:
        """How many steps, or turns of a loop with `begin` or `steps`, the state has behind it: where the loop goes on.
        0 on a cold start.

        Raises:
            ConfigError: before entering. So do all other members except `protected_step`, `sealed_step`, `track`,
                `untracked` and `statistics`.
        """
        session = self._session
        session.first.asked = session.first.asked_for_step = True
        return session.position.number(session.progress.step)

    @property
    def epoch(self) -> int:
        """How many passes over `data` are finished: the pass in which the loop goes on. 0 on a cold start. Of several
        sources with names of their own, that counts which the loop names first."""
        self._session.first.asked = True
        return self._session.position.epoch

    def begin(self) -> None:
        """Say that the next step begins: call it at the top of the loop. Returns at once.

        From the first call on, a step lasts from one call to the next if an optimizer stepped in between, and `step`
        counts the calls. The first call after a restore puts the random generators back. In a loop over `steps`, whose
        turn has begun already, it does nothing.

        Raises:
            StateMismatch: the first step does not begin with the state that was restored.
        """
        self._session.loop.begin_turn()

    def steps(self, count: int) -> Iterator[int]:
        """The loop's own step numbers, from where it goes on up to `count`; each turn begins a step, as `begin` does.

        ::

            for step in snap.steps(1000):
                loss = train_step(...)

        Raises:
            ConfigError: an earlier loop has counted as far already, so this one would make no turn.
        """
        self._session.position.counts_to(count)
        return self._session.loop.steps(count)

    def data(self, source: Any, *, name: str = DATA, ahead: int | None = None, exact: bool = True) -> Data:
        """Wrap a `DataLoader`, or another source of batches, so that it goes on where it was; each batch begins a step,
        as `begin` does. Each loop over it is one pass; `epoch` says how many are finished.

        ::

            for epoch in range(snap.epoch, epochs):
                for x, y in snap.data(loader):
                    ...

        ``for i, (x, y) in snap.data(loader).enumerate():`` numbers the batches of a pass.

        Args:
            source, ahead, exact: see `snapshot.step.data.Data`.
            name: tells sources apart, if there are several.

        Raises:
            ConfigError: the source cannot be read again, or its saved place is that of another number of ranks.
        """
        return self._session.loop.data(source, name, ahead, exact)

    def finish(self) -> None:
        """Say that training is over although its loop, over `steps` or `data`, is left before its end. The job then
        ends with the block, as if the loop had reached its end. Returns at once.

        Call it on every rank. Without it such a block keeps its snapshots for the next start.
        """
        self._session.is_over = True

    @property
    def restored(self) -> Restored:
        """How this rank started: see `snapshot.resume.attempt.Restored`."""
        return self._session.restored

    @property
    def statistics(self) -> Statistics:
        """Counters, and how often snapshots are taken and why: see `snapshot.progress.Statistics`."""
        return self._statistics

    @property
    def protected_step(self) -> int | None:
        """The newest step whose snapshot is protected on every node, as far as the ranks have agreed. None if there is
        none, and before entering."""
        return self._entered.protected_step if self._entered is not None else None

    @property
    def sealed_step(self) -> int | None:
        """The newest step whose snapshot is sealed on every node, as far as the ranks have agreed: where a restart goes
        back to if only processes crashed. None if there is none, and before entering."""
        newest = self._entered.protecting.ledger.newest if self._entered is not None else None
        return newest.step if newest else None

    def track(
        self,
        name: str,
        get: Callable[[], Any] | None = None,
        set: Callable[[Any], Any] | None = None,
        *,
        tensors: torch.nn.Module | dict[str, torch.Tensor] | None = None,
        changes: Literal["any", "after step", "step", "never"] = "any",
        when: Literal["forward", "step"] = "forward",
    ) -> None:
        """Keep state that is in no ``state_dict``: attributes, buffers of a compressor, an EMA copy. Call it before
        entering.

        Args:
            name: the same in every run of the job.
            get, set: ``get()`` returns plain values (numbers, texts, bytes, arrays, small tensors, and lists, tuples,
                sets, deques and dicts of them), and ``set(values)`` puts them back when the job is restored.
            tensors: a module, or a dict of tensors by name; copied and restored in place, of any size.
            changes: when `tensors` change. ``"any"``: at any time; they are copied as the next forward begins.
                ``"after step"``: only in ``optim.step()`` and in code between it and the next forward, as an EMA does;
                they are copied while the next step runs, as with ``"step"`` (only in ``optim.step()``) and
                ``"never"``.
            when: when to call `get`: as the next forward begins, or (``"step"``) when ``optim.step()`` returns, for
                values that change before that forward: by reading data, or at the top of a step.

        Raises:
            ConfigError: the arguments do not fit together, the name is taken, or the hook was entered before.
        """
        if self._entered is not None:
            raise ConfigError(f"track({name!r}): the state is restored on entering: call it before that")
        self._adapter.track(make(name, get, set, tensors, changes, when))
        self.tracked.add(name)

    def rebuild(self, make: Callable[[At], object]) -> None:
        """Say how a restart makes what the job has added to the model or the optimizer in training: new layers, new
        parameters. Call it before entering.

        ::

            snap.rebuild(lambda at: add_layer() if at.step > 1000 else None)

        Args:
            make: called with the place where the job goes on, ``step`` and ``epoch``, before the state is loaded; on
                each rank, and once more if an older snapshot has to be restored instead. Not called on a cold start.

        Raises:
            ConfigError: the hook was entered before.
        """
        if self._entered is not None:
            raise ConfigError("rebuild: the state is restored on entering: call it before that")
        self._adapter.rebuilds.append(make)

    @property
    def untracked(self) -> list[str]:
        """Names of tensors, arrays and generators in attributes of modules and optimizers that are not captured.

        Most are not state, such as tables of positions; `track` those that are. `holdfast audit` tells which matter.
        """
        tensors = (item.tensor for item in self._adapter.tensors())
        return untracked(self._roots(), set(map(memory_of, chain(tensors, self._adapter.generators().values()))))

    def _roots(self) -> list[tuple[str, Any]]:
        modules = [(f"model{i}", module) for i, module in enumerate(self._adapter.modules())]
        return [*modules, *((f"optim{i or ''}", optimizer) for i, optimizer in enumerate(self._adapter.optimizers()))]

    @contextmanager
    def phase(self, kind: Literal["comm"]) -> Iterator[None]:
        """Say that the step communicates while the block runs: holdfast's traffic waits, for at most a second. So do
        copies of state on the host; those from a GPU do not. Optional; never blocks.
        """
        if kind != "comm":
            raise ConfigError(f"phase({kind!r}): the only kind is 'comm'")
        protecting, rank = self._session.protecting, self._session.rank
        protecting.pace.comm(True)
        rank.client.board.pause(protecting.layouts.index, rank.system.monotonic() + MAX_PAUSE_S)
        try:
            yield
        finally:
            rank.client.board.resume(protecting.layouts.index)
            protecting.pace.comm(False)

    def drain(self, deadline_s: float) -> bool:
        """Block until this node has sealed every snapshot taken so far, and protected those that are to be protected;
        for at most `deadline_s`, or some seconds longer if its SMP does not respond.

        For planned stops, after `begin`, or in a plain loop after the backward of a step. A snapshot that is sealed
        before its step's first forward does not record what that was given, so a restart cannot compare it.

        Returns:
            True if all are sealed and protected, as far as this node can tell. False if some failed, are not done
            yet, or the SMP is gone; if steps have ended, and there is no snapshot yet; if a step has ended whose
            snapshot is only taken as the next one begins; or if gradients of a plain loop's step are still to be
            computed.
        """
        return self._session.drain(deadline_s)

    def __enter__(self) -> Self:
        """Restore if the job has a snapshot, and begin to take snapshots. A collective call.

        Raises:
            HoldfastError: set-up errors always raise, whatever `strict` says.
        """
        if not self._was_begun:  # one whose start has failed may be entered again
            for piece in registered(self._roots()):
                self._adapter.track(piece)
            self._was_begun = True
        options, arena = self._options, self._options.job_arena
        if self.checks.reading:  # a thread that plays several ranks enters one hook for each
            check_not_entered(arena / self._adapter.coordinate())
        self._block = options.block or self.blocks.get(arena, 1)
        # The trainings after the first one begin from nothing by design.
        require = options.require if arena not in self.blocks else 0
        numbered = replace(options, block=self._block, require=require)
        self._entered = Session(self._adapter, numbered, self._statistics, self.checks, self.system)
        if options.block is None and self._entered.rank.agreement.rank == 0:
            warn_of_order(self._block)
        try:
            self._entered.first.look(self._entered.rank.engine, arena / self._entered.rank.coord)
        except BaseException as error:  # of a user's getter: nobody calls `__exit__` then
            self.leave(error)
            raise
        return self

    def close(self, *, early: bool = False) -> None:
        """Leave the hook without a ``with`` block, when training has ended well.

        Args:
            early: training has stopped before its end, and goes on at the next start: the snapshots taken so far stay.
        """
        self.leave(None, early=early)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """If the block ended well, finish the job: SMPs exit and their memory is freed (unless ``keep``). A collective
        call then; blocks.

        After an exception everything stays, for the restart. So it does if a loop over `steps` or `data` was left
        before its end on any rank, unless all have said `finish`: the state after the last step is protected first, and
        one line says so. A loop that goes through neither cannot be seen, and ends the job. In a process that was
        forked inside the block nothing happens: the job belongs to its parent.
        """
        self.leave(error)

    def leave(self, error: BaseException | None, *, early: bool = False) -> None:
        """For trainers that learn of errors by themselves: leave the hook as `__exit__` does after `error`, or, without
        one, as `close` does."""
        self._session.leave(error, early=early)
        if error is None and not self._options.keep:
            self.blocks[self._options.job_arena] = self._block + 1

    # ------------------------------------------------------------------ for trainers that report every step themselves

    def before_step(self) -> None:
        """``optim.step()`` is about to be called; see `Loop.before_step`."""
        self._session.loop.before_step()

    def after_step(self) -> None:
        """``optim.step()`` has returned; see `Loop.after_step`."""
        self._session.loop.after_step()


log = get_log(__name__)


SPENT = "spent"
"""Key of the account of the run's time in a snapshot's notes."""


def _spent(restored: Restored, system: System) -> Spent:
    loaded = system.time()
    asked = loaded - (system.monotonic() - restored.clock["enter"])
    if SPENT not in restored.notes:
        return Spent(since=asked, until=asked).restarted(asked, asked, loaded, 0)
    account = from_plain(Spent, restored.notes[SPENT], "the account of the run's time")
    return account.restarted(loaded - system.ran_s(), asked, loaded, restored.steps_again or 0)


LEFT_ALONE = (
    "for %.0f s this rank, which left its loop after step %d, has waited for others that are still in theirs. If they "
    "wait for it in a collective call, they do so until the timeout of its process group: ranks have to leave after "
    "the same step"
)


@dataclass(frozen=True, slots=True)
class _Leaving:
    """What ranks tell each other as they leave the loop well.

    Attributes:
        keeps: the snapshots are kept, as they are if any rank keeps them.
        takes: a last snapshot is to be taken.
        stepped: an optimizer has stepped, and that step has not been ended yet.
        step: the number of steps that were ended.
    """

    keeps: bool = field(metadata=ANY)
    takes: bool = field(metadata=ALL)
    stepped: bool | None = field(metadata=SAME)
    step: int | None = field(metadata=SAME)


class Session:
    """One rank's session: what happens between entering the hook and leaving it, together with the other ranks. For the
    way through a step see `snapshot.loop`. Used by the training thread.

    Attributes:
        restored: how this rank started. rank: its connections.
        loop: hears the events of the loop. protecting: the decisions that all ranks make together.
        position: where the loop is. first: what is checked of the script, and what the script keeps.
        is_over: the loop says that training is over, wherever it is left.
    """

    def __init__(
        self, adapter: Adapter, options: Options, statistics: Statistics, checks: Checks, system: System
    ) -> None:
        """Restore if the job has a snapshot, and begin to take snapshots. A collective call; blocks.

        Raises:
            HoldfastError: as `restore`, and as making a `Rank`. Nothing stays open.
        """
        self.rank = Rank(adapter, options, system)
        try:
            self._begin(adapter, options, statistics, checks)
        except BaseException as error:
            self.rank.smp.say_end(self.rank.progress.step, error)
            self.rank.close()
            raise

    def _begin(self, adapter: Adapter, options: Options, statistics: Statistics, checks: Checks) -> None:
        rank, drawn = self.rank, rng.capture()
        rank.heartbeat()
        names = {"job": options.job, "node": rank.client.node, "rank": rank.agreement.rank, "coord": rank.coord}
        log_here(**names, epoch=None, step=None)
        self.restored = restored = restore(
            rank.client,
            rank.agreement,
            adapter,
            rank.engine,
            options.for_start,
            elastic=options.elastic,
            protect=options.protect_every == 1,
        )
        step = restored.snapshot.step if restored.snapshot else 0
        if restored.snapshot is not None and rank.agreement.rank == 0:
            log.info("%s", restored, extra=about(restored.snapshot, tier=restored.tier, how=restored.how))
        if restored.snapshot is not None and says_where_steps_begin(restored.loop) and checks.reading:
            # They are put back as the first step begins. What the script draws before that, such as noise that it uses
            # in all steps, it draws again as at its first start.
            rng.restore(drawn)
        self._pid = os.getpid()
        self._adapter = adapter
        self.progress = progress = rank.progress
        progress.begin(restored.epoch, step)
        rank.heartbeat()
        # Log lines name the epoch and the step at the time of logging. These functions must not keep the state alive.
        identify(epoch=lambda: epoch_text(progress.epoch), step=lambda: progress.step)
        self._recording = recording_from_environment(options.slots, rank.client.outcome)
        if self._recording is not None:
            options = replace(options, protect_every=1)  # a profile measures encoding, too
        self._options = options
        self.intervals = IntervalController(
            options.every,
            options.budget,
            options.protect_every,
            self._recording,
            step=restored.snapshot.step if restored.snapshot else None,
            notes=restored.notes,
        )
        statistics.rule = self.intervals.rule
        statistics.interval = statistics.rule.interval
        self._statistics = statistics
        spent, self._auditor = _spent(restored, rank.system), self._auditor_if_ordered(checks)
        # From here on there are threads and hooks, and nothing fails.
        block = to_plain(describe(options.for_start.block, adapter))
        self.position = position = Position(step, restored.loop, block, rank.system)
        self.first = FirstTurns(restored, checks, progress, self.position, adapter)
        self.capture = Capture(
            adapter,
            rank.agreement,
            rank.engine,
            options.job,
            rank.coord,
            lambda: self.position.tree() | self.first.tree(),
            lambda: self.intervals.rule.notes() | {SPENT: to_plain(statistics.spent)},
            restored.run.id,
            rank.system,
        )
        self.protecting = Protecting(options, rank, restored, self.capture, self.intervals, statistics)
        self.loop = Loop(
            adapter,
            rank,
            self.position,
            self.first,
            self.capture,
            self.protecting,
            statistics,
            self._auditor,
            options.deadline_s,
            self._step_ended,
        )
        self._own_time = OwnTime(
            adapter.modules(),
            lambda: rank.system.monotonic() - statistics.stall_s,
            lambda: sum(data.read_s for data in position.sources.values()),
        )
        statistics.begin(spent, self._own_time.own)
        self.is_over = self._is_left = False

    def _auditor_if_ordered(self, checks: Checks) -> Auditor | None:
        orders = orders_from_environment()
        if orders is None:
            return None
        rank, at, modules = self.rank.agreement.rank, self.progress, self._adapter.modules()
        theirs = checks.restored_by_themselves
        return Auditor(orders, rank, at.epoch, at.step, modules, self.drain, lambda: self.protected_step, theirs)

    # ------------------------------------------------------------------ what users ask for

    @property
    def protected_step(self) -> int | None:
        """See `SnapshotHook.protected_step`."""
        protected = self.protecting.ledger.protected
        return protected.step if protected else None

    def drain(self, deadline_s: float) -> bool:
        """See `SnapshotHook.drain`."""
        is_done = self.protecting.drain(self.rank.system.monotonic() + deadline_s) and not self.loop.is_due
        return is_done and bool(self.protecting.copies or self.protecting.ledger.newest or not self.progress.step)

    # ------------------------------------------------------------------ ends

    def leave(self, error: BaseException | None, *, early: bool = False) -> None:
        """See `SnapshotHook.__exit__`. Blocks.

        Args:
            early: the trainer says that training stopped before its end. Its loop may have moved on since the last
                step, so no snapshot is taken of where it is now.
        """
        if os.getpid() != self._pid or self._is_left:
            return
        self._is_left = True
        try:
            self._leave(error, early)
        finally:
            if self.rank.agreement.rank == 0 and (account := self._statistics.spent.sentence()):
                log.info("the run so far: %s", account)
            self.rank.close()
            self.protecting.let_go()

    def _leave(self, error: BaseException | None, early: bool) -> None:
        well, options = error is None, self._options
        self.loop.stop_watching(ended_well=well)
        self._own_time.remove()
        if not well:
            self.rank.smp.say_end(self.progress.step, error)
        self.protecting.pace.fence()
        goes_on = not self.is_over and self.position.is_under_way  # it was left before its end, as far as it tells
        kept, takes = well and (early or options.keep or goes_on), False
        try:
            if well:
                kept, takes = self._agree(kept, takes=not early)
            self.intervals.rule.ends = well
            self.loop.leave(takes=kept and takes, goes_on=goes_on)
        except BaseException as failure:
            self._end_copies(well=False)
            self.rank.smp.say_end(self.progress.step, failure)
            raise
        try:
            late = self._end_copies(well)  # if they do not end, the other ranks wait for this one all the same
            if well:  # not earlier: the last snapshot may still have failed
                self.rank.smp.say_end(self.progress.step, late if options.strict else None)
            if well and (kept := self._finish(kept)) and not options.keep:
                self._say_what_is_kept()
            if late is not None and well and options.strict:
                raise late
        except HoldfastError as failure:
            if options.strict:
                raise
            end = "it holds the job's snapshots"
            if isinstance(failure, StaleEpoch):
                end = "a newer start of the job uses it"
            elif not kept:
                end = f"`holdfast gc --job {options.job} --arena {options.job_arena.parent}` here removes it"
            log.error("the SMP of this node was left running (%s): %s", end, failure)

    def _end_copies(self, well: bool) -> HoldfastError | None:
        """Block until the snapshots that were begun are sealed or have failed. Returns why they are not, and logs it if
        it is not going to be raised.

        Args:
            well: the block ends well, so the newest one counts.
        """
        protecting, deadline_s = self.protecting, self._options.deadline_s
        late = failure_of(lambda: self._await_copies(well), HoldfastError)
        # Last: touching the pages of large slots may take minutes, and copies need not wait for that.
        unready = failure_of(lambda: protecting.layouts.stop_reserving(deadline_s), HoldfastError)
        for what, failure in (("snapshots were not sealed", late), ("slots were still being made ready", unready)):
            if failure is not None and not (well and self._options.strict):
                log.error("%s by the end: %s", what, failure)
        return late or unready

    def _await_copies(self, well: bool) -> None:
        protecting, deadline_s = self.protecting, self._options.deadline_s
        protecting.copier.close(deadline_s)
        if self._recording is not None:
            self._recording.close(deadline_s)
        if well and protecting.newest is not None:
            protecting.newest.reached(CopyState.SEALED, deadline_s)

    def _agree(self, keeps: bool, *, takes: bool) -> tuple[bool, bool]:
        """All ranks have left their loops well: whether the snapshots are kept, as they are if any rank keeps them; and
        whether a last one can be taken, as all have left after the same step. A collective call; blocks.

        Args:
            keeps, takes: what this rank wants.
        """
        if not self.protecting.is_together:
            return keeps, False
        try:
            mine = _Leaving(keeps, takes, self.loop.has_stepped, self.progress.step)
            with self.rank.agreement.warn_if_slow(LEFT_ALONE, self.progress.step + self.loop.has_stepped):
                everywhere = reduced(self.rank.agreement, mine)()
        except AgreementLost:
            self.protecting.part()
            return keeps, False
        left_together = everywhere.stepped is not None and everywhere.step is not None
        return everywhere.keeps, everywhere.takes and left_together

    def _finish(self, keeps: bool) -> bool:
        """End the job here once all ranks have ended well, even if they lost each other, unless one of them keeps its
        snapshots. A collective call. Returns whether they are kept.

        Raises:
            HoldfastError: the job cannot be ended here, and this node's SMP goes on running.
        """
        lost: AgreementLost | None = None
        if self.protecting.is_together:
            try:
                return self._finish_together(keeps)
            except AgreementLost as error:
                lost = error
        if keeps:
            return True
        self.protecting.part()
        if not self.rank.agreement.meet_at_end(self._options.deadline_s):
            raise lost or AgreementLost("not all ranks have ended well")
        return self._finish_together(keeps)

    def _finish_together(self, keeps: bool) -> bool:
        rank, ledger = self.rank, self.protecting.ledger
        if self._options.keep or (keeps and ledger.keep):
            if ledger.encoded:
                rank.client.await_outcome(ledger.encoded[-1], self._options.deadline_s)
            return True
        mine = json.dumps([rank.coord, rank.client.node, rank.progress.epoch])
        everyone = [json.loads(text) for text in rank.agreement.gather(mine.encode())]
        on_this_node = [coord for coord, node, _ in everyone if node == rank.client.node]
        if min(on_this_node, key=coordinate_key) == rank.coord:
            rank.smp.finish(max(epoch for _, _, epoch in everyone))
        return False

    def _say_what_is_kept(self) -> None:
        if self.rank.agreement.rank:
            return
        copy, newest = self.protecting.newest, self.protecting.ledger.newest
        if copy is not None and copy.state is CopyState.SEALED:
            newest = copy.snapshot
        log.warning(
            "the loop was left before its end, so the job's snapshots stay in memory for the next start (the newest: "
            "%s). If training is over, say snap.finish() before the block ends",
            newest or "none",
        )

    def _step_ended(self) -> None:
        self._own_time.step_ended()
        if self._auditor is not None:
            self._auditor.after_step(self.progress.step, self.rank.agreement.everywhere)
        if self._recording is not None and self._recording.over:
            self._end_recording()

    def _end_recording(self) -> None:
        """The profile is complete: write it, and end this process well. A collective call."""
        layout, recording, self._recording = self.protecting.layouts.layout, self._recording, None
        if recording is not None and layout is not None:
            recording.close(self._options.deadline_s)
            recording.write(layout, self.rank.client.node, self.rank.coord, self.rank.agreement)
        self.leave(None)
        leave()
