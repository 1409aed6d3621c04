"""The hook in the training process: takes a snapshot as a step begins, copies it while the step runs.

::

    optim.step() of s ──► the step ends: settle outcomes, note generators
    code between steps: schedules, averages, evaluations, reading data
    step s+1 begins ────► capture, hand over ──────────────────────────────┐
    forward, backward of s+1                                               │ copy thread: slot, copy, check
    optim.step() of s+1 ◄─ before_step: wait for the copy, report outcomes ┘ seal thread; SMP: digest, encode, post

The state at a boundary is the state with which the next step begins. What code between two steps leaves behind belongs
to it, what that borrows and gives back does not. The loop says where a step begins (`begin`, `steps`, `data`); or it is
taken to be the first forward in training mode and with gradients, see `snapshot.step.beginning`.

Calls into `SnapshotHook` come from the training thread only.
"""

from __future__ import annotations

import json
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch

from holdfast.smp_daemon.shared.board import MAX_PAUSE_S, Outcome, Phase
from holdfast.smp_daemon.shared.errors import ConfigError, DeadlineExceeded, HoldfastError, SmpUnavailable, failure_of
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.limits import MAX_SLOTS, MIN_SLOTS, SLOTS_RULE
from holdfast.smp_daemon.shared.logs import Episodes, about, get_log, log_here
from holdfast.smp_daemon.shared.paths import arena_path
from holdfast.snapshot.collective.agreement import Agreement, AgreementLost, Result, default_agreement
from holdfast.snapshot.connect import job_from_environment, warn_of_stale_store
from holdfast.snapshot.copy.devices import choose_mover
from holdfast.snapshot.copy.errors import LayoutChanged
from holdfast.snapshot.copy.pace import Pace
from holdfast.snapshot.copy.witness import StateChanged
from holdfast.snapshot.interval.policy import IntervalController, budget_from_environment
from holdfast.snapshot.interval.profile import leave, recording_from_environment
from holdfast.snapshot.own_smp import OwnSmp
from holdfast.snapshot.resume.arrange import coordinate_key, parse_domains, parse_protect
from holdfast.snapshot.resume.choice import start_options_from_environment
from holdfast.snapshot.resume.comparison import Resumed, check_environment, check_inputs
from holdfast.snapshot.resume.elastic import ELSEWHERE, elastic_from_environment
from holdfast.snapshot.resume.reserve import reserve
from holdfast.snapshot.resume.restore import Restored, restore
from holdfast.snapshot.state.adapter import Adapter
from holdfast.snapshot.state.audit import Auditor, orders_from_environment
from holdfast.snapshot.state.hidden import registered, untracked
from holdfast.snapshot.state.inputs import Batch
from holdfast.snapshot.state.replicas import ReplicasDiffer
from holdfast.snapshot.state.tracked import make
from holdfast.snapshot.step.beginning import Beginning, Doubtful
from holdfast.snapshot.step.boundary import BEGIN, Boundary
from holdfast.snapshot.step.capture import Capture
from holdfast.snapshot.step.copier import Copier, CopyJob, Retaken
from holdfast.snapshot.step.data import Data
from holdfast.snapshot.step.gradients import Gradients
from holdfast.snapshot.step.ledger import Ledger

PATIENCE_S = 0.5
"""How long ``optim.step()`` may wait for a copy to begin. If the SMP gives no slot by then, it does not wait at all
until one begins by itself again."""

STARVED_S = 30.0
"""If a snapshot is not protected for so long, and there is no slot for another, that is worth a warning."""

DATA = "data"
"""How a source of batches is called if nobody says."""

log = get_log(__name__)


@dataclass(slots=True)
class Statistics:
    """Counters since the hook was entered.

    Attributes:
        taken, protected, failed, skipped: snapshots begun, protected job-wide, failed; steps without a free slot.
        stall_s: time that the training thread spent in the hook.
        interval: steps from one snapshot to the next, as the ranks agreed.
        overhead: fraction of training time lost to snapshots at that interval; None while it is unknown.
        why: with ``every="auto"``, what the interval follows from, in words.
    """

    taken: int = 0
    protected: int = 0
    failed: int = 0
    skipped: int = 0
    stall_s: float = 0.0
    interval: int = 1
    overhead: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class _Due:
    """A snapshot that is taken when the next step begins."""

    snapshot: SnapshotId
    keep: tuple[SnapshotId, ...]
    protected: SnapshotId | None


class SnapshotHook:
    """Protects one rank's state; see `holdfast.InMemorySnapshot` for the options.

    Attributes:
        checks_resumption: whether the first step after a restore must begin with what was restored.
    """

    checks_resumption = True

    def __init__(
        self,
        adapter: Adapter,
        *,
        job: str | None = None,
        every: int | Literal["auto"] = 1,
        protect: str = "auto",
        domains: str | None = None,
        slots: int = 3,
        start: bool = True,
        keep: bool = False,
        strict: bool = False,
        arena: Path | None = None,
        deadline_s: float = 60.0,
        overhead_budget: float | None = None,
        max_repeats: int | None = None,
        generations: int | None = None,
        restore_step: int | None = None,
        elastic: bool | None = None,
    ) -> None:
        if not MIN_SLOTS <= slots <= MAX_SLOTS:
            raise ConfigError(f"slots={slots}: {SLOTS_RULE}")
        self._adapter = adapter
        self._job = job or job_from_environment()
        self._start_options = start_options_from_environment(
            max_repeats=max_repeats, generations=generations, restore_step=restore_step
        )
        budget = budget_from_environment() if overhead_budget is None else overhead_budget
        self._recording = recording_from_environment(slots)
        self._intervals = IntervalController(every, budget or None, slots, self._recording)
        self._protection = parse_protect(protect)
        self._domain_text = os.environ.get("HOLDFAST_DOMAINS", "") if domains is None else domains
        self._start = start
        self._keep = keep
        self._strict = strict
        self._arena = arena_path(self._job, arena)
        self._deadline_s = deadline_s
        self._elastic = elastic_from_environment() if elastic is None else elastic
        self._slots = slots + self._start_options.generations - 1
        if self._slots > MAX_SLOTS:
            raise ConfigError(
                f"slots={slots} and {self._start_options.generations} generations: together at most {MAX_SLOTS + 1}"
            )
        self._ledger = Ledger(self._slots, generations=self._start_options.generations)
        self._copy: CopyJob | None = None
        self._outcomes: Result | None = None
        self._copies: dict[SnapshotId, CopyJob] = {}
        self._layout: Layout | None = None
        self._index = 0
        self._entered = False
        self._auditor: Auditor | None = None
        self._misfit = False
        self._persist_due = 0
        self._planned = False
        self._attempted = False
        self._episodes = Episodes(log)
        self._enabled = True
        self._parted = False
        self._pace = Pace()
        self._open: _Due | None = None
        self._beginning = Beginning()
        self._forward = self._began_with = 0
        self._declared = False
        self._stepped = False
        self._rewind: Callable[[], None] | None = None
        self._resumed: Resumed | None = None
        self._expected: str | None = None
        self._batch = Batch()
        self._stepping = False
        self._unheard: CopyJob | None = None
        self._marked = False
        self._turn: int | None = None
        self._next_turn = 0
        self._data: dict[str, Data] = {}
        self._held_data: dict[str, Any] = {}
        self._smp_is_slow = False
        check_environment()
        self.statistics = Statistics(interval=self._intervals.policy.interval)

    # ------------------------------------------------------------------ for the user

    @property
    def step(self) -> int:
        """Where the loop goes on: how many steps, or turns of a loop with `begin` or `steps`, the state has behind it.
        0 on a cold start."""
        return self._step if self._turn is None else self._turn

    @property
    def epoch(self) -> int:
        """How many passes `data` has finished: in which the loop goes on; 0 on a cold start."""
        if DATA in self._data:
            return self._data[DATA].epoch()
        return int(self._held_data.get(DATA, {}).get("epoch", 0))

    def begin(self) -> None:
        """The next step begins: call it at the top of the loop. Returns at once.

        From the first call on, a step is all from one call to the next between which an optimizer stepped, whatever
        the number and order of optimizers, and `step` counts the calls. The first call after a restore puts the random
        generators back.

        Raises:
            StateMismatch: the first step does not begin with what was restored.
        """
        self._declare()
        self._turn = self._next_turn
        self._next_turn += 1
        self._mark()
        self._begin()

    def steps(self, count: int) -> Iterator[int]:
        """The loop's own numbers from where it goes on up to `count`; each turn begins a step, as `begin` does.

        ::

            for step in snap.steps(1000):
                loss = train_step(...)
        """
        self._declare()
        while self._next_turn < count:
            self.begin()
            yield self._next_turn - 1

    def data(self, source: Any, *, name: str = DATA, ahead: int | None = None, exact: bool = True) -> Data:
        """A `DataLoader`, or another source of batches, that goes on where it was; each batch begins a step, as `begin`
        does. Each loop over it is one pass; `epoch` says how many are over.

        ::

            for epoch in range(snap.epoch, epochs):
                for x, y in snap.data(loader):
                    ...

        Args:
            source, ahead, exact: see `snapshot.step.data.Data`.
            name: which source it is, if there are several.

        Raises:
            ConfigError: the source cannot be read again; or what is known of its place holds for another number of
                ranks.
        """
        self._declare()
        known = self._data.get(name)
        if known is None:
            held = self._held_data.pop(name, None)
            if held == ELSEWHERE:
                raise ConfigError(
                    f"data({name!r}) was read by another number of ranks, so its place cannot be found again: cut "
                    "batches with `holdfast.integrations.batches.GlobalBatches` where the number of ranks may change"
                )
            known = Data(source, name, held, self._mark, self._begin, ahead=ahead, exact=exact, beat=self._beat)
            self._data[name] = known
        elif known.source is not source:
            known.source = source
        return known

    @property
    def restored(self) -> Restored:
        """How this rank started."""
        return self._restored

    @property
    def protected_step(self) -> int | None:
        """The newest step whose snapshot is protected on every node, as far as the ranks have agreed."""
        return self._ledger.sure.step if self._ledger.sure else None

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
        """Keep state that is in no ``state_dict``: attributes, buffers of a compressor, an EMA copy. Before entering.

        Args:
            name: the same in every run of the job.
            get, set: ``get()`` gives plain values (numbers, texts, bytes, arrays, small tensors, and lists, tuples,
                sets and dicts of them), and ``set(values)`` takes them over when the job is restored.
            tensors: a module, or a dict of tensors by name; copied and restored in place, of any size.
            changes: what changes `tensors`. ``"any"``: anything, backward hooks for example; they are copied at once
                when the next forward begins. ``"after step"``: only ``optim.step()`` and code between it and the next
                forward, as an EMA's; they are copied while that step runs. ``"step"``: only ``optim.step()``.
                ``"never"``: nothing; they are copied once.
            when: when `get` is asked: as the next forward begins, or (``"step"``) at the return of ``optim.step()``,
                for what changes before that forward: by reading data, or at the top of a step.

        Raises:
            ConfigError: the arguments do not fit, the name is taken, or the hook was entered.
        """
        if self._entered:
            raise ConfigError(f"track({name!r}): the state is restored on entering; say what there is before that")
        self._adapter.track(make(name, get, set, tensors, changes, when))

    @property
    def untracked(self) -> list[str]:
        """Names of tensors, arrays and generators in attributes of modules and optimizers that are not captured.

        Most are no state, such as tables of positions; what is, `track`. `holdfast audit` tells which matter.
        """
        return untracked(self._roots(), (item.tensor for item in self._adapter.tensors()))

    def _roots(self) -> list[tuple[str, Any]]:
        modules = [(f"model{i}", module) for i, module in enumerate(self._adapter.modules())]
        return [*modules, *((f"optim{i}", optimizer) for i, optimizer in enumerate(self._adapter.optimizers()))]

    @contextmanager
    def phase(self, kind: Literal["comm"]) -> Iterator[None]:
        """Say that the step communicates while the block runs: our copies and traffic wait, for at most a second.

        Optional; costs a few microseconds and never blocks.
        """
        if kind != "comm":
            raise ConfigError(f"phase {kind!r}: the only kind there is is 'comm'")
        self._pace.comm(True)
        self._client.pause(self._index, time.monotonic() + MAX_PAUSE_S)
        try:
            yield
        finally:
            self._client.resume(self._index)
            self._pace.comm(False)

    def drain(self, deadline_s: float) -> bool:
        """Block until this node has protected every snapshot taken so far, at most `deadline_s`; some seconds more if
        its SMP stands still.

        Not needed in a training loop; for planned stops, after `begin`. True if all are protected as far as this node
        can tell; the other ranks learn of it with the next step. False if some failed, are not done yet, or the SMP is
        gone; if a step has ended whose snapshot is only taken as the next one begins; and if it cannot be told whether
        that has begun. Never raises for that.
        """
        limit = time.monotonic() + deadline_s
        self._pace.fence()
        outcomes = []
        for snapshot, copy in list(self._copies.items()):
            if self._is_doubtful(copy):
                return False
            copy.sure.set()
            if not copy.done.wait(limit - time.monotonic()) or copy.error is not None:
                return False
            try:
                outcomes.append(self._client.await_outcome(snapshot, max(0.0, limit - time.monotonic())))
            except (SmpUnavailable, DeadlineExceeded):
                return False
        taken = self._open is None or self._beginning.seen
        return taken and all(outcome is Outcome.PROTECTED for outcome in outcomes)

    def __enter__(self) -> Self:
        """Restore if the job has a snapshot, and begin to take snapshots. A collective call.

        Raises:
            HoldfastError: set-up errors always raise, whatever `strict` says.
        """
        for piece in registered(self._roots()):
            self._adapter.track(piece)
        self._entered = True
        self._pid = os.getpid()
        self._agreement: Agreement = default_agreement()
        if self._agreement.rank == 0:
            warn_of_stale_store()
        self._coord = self._adapter.coordinate()
        self._domains = parse_domains(self._domain_text, self._coord)
        self._smp = OwnSmp(self._arena, self._job, self._coord, start=self._start)
        self._client = self._smp.client
        self._client.beat(Phase.RESTORE, 0)
        self._identify()
        self._mover = choose_mover({item.tensor.device for item in self._adapter.tensors()})
        try:
            self._restored = restore(
                self._client, self._agreement, self._adapter, self._mover, self._start_options, elastic=self._elastic
            )
        except BaseException as error:
            self._smp.say_end(0, error)
            self._close()
            raise
        self._epoch = self._restored.epoch
        self._step = self._restored.snapshot.step if self._restored.snapshot else 0
        self._phase = Phase.START
        self._beat()
        self._ledger = Ledger.restored(
            self._slots,
            self._restored.snapshot,
            self._restored.protected,
            known=self._restored.whole,
            generations=self._start_options.generations,
            earlier=self._restored.earlier,
            abandoned=self._restored.abandoned,
        )
        self._capture = Capture(self._adapter, self._agreement, self._mover, self._job, self._coord)
        self._copier = Copier(self._client, self._smp.sealing, self._mover, self._pace, self._attach_again, self._over)
        self._capture.notes = self._intervals.notes
        self._capture.loop = self._loop
        self._intervals.enter(self._smp.another, self._agreement, self._restored.notes)
        orders = orders_from_environment()
        if orders is not None:
            self._auditor = Auditor(
                orders,
                self._agreement.rank,
                self._epoch,
                self._step,
                self._adapter.modules(),
                self.drain,
                lambda: self.protected_step,
            )
        self._boundary = Boundary(self._adapter.optimizers(), self._adapter.modules(), self, self._adapter.scalers())
        self._gradients = Gradients(self._adapter.modules(), log.warning)
        self._steppers = self._adapter.steppers()
        self._capture.entered()
        if self._restored.snapshot is not None:
            self._rewind = self._restored.rewind
            self._turn = self._restored.loop.get("turn")
            self._next_turn = self.step
            self._held_data = dict(self._restored.loop.get("data", {}))
            if self.checks_resumption:
                self._resumed = Resumed(self._adapter, self._mover, self._restored.began, self._step)
                self._expected = self._restored.inputs
        return self

    def _identify(self) -> None:
        """Have every line of this process's log say who it is, and where it is by then."""
        me = weakref.ref(self)  # whoever logs must not keep the state alive
        log_here(
            job=self._job,
            node=self._client.node,
            rank=self._agreement.rank,
            coord=self._coord,
            epoch=lambda: getattr(me(), "_epoch", None),
            step=lambda: getattr(me(), "_step", None),
        )

    def close(self) -> None:
        """Leave without a ``with`` block, when training has ended well."""
        self.__exit__(None, None, None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """If the block ended well, finish the job: SMPs end and their memory is free (unless ``keep``).

        After an exception everything stays, for the restart. In a process that was forked inside the block nothing
        happens: the job is its parent's.
        """
        if os.getpid() != self._pid:
            return
        if kind is None and not self._stepped:
            self._gradients.check()
        self._boundary.remove()
        self._gradients.remove()
        self._steppers.remove()
        self._smp.say_end(self._step, error)
        self._pace.fence()
        if kind is None and self._keep:
            self._end_last_step()
        if self._copy is not None:
            if self._copy.begins or (kind is None and not self._is_doubtful(self._copy)):
                self._copy.sure.set()
            elif not self._copy.sure.is_set():
                self._copy.abort(Retaken("the loop was left before it was certain that the step had begun"))
        try:
            self._copier.close(self._deadline_s)
            self._intervals.close(self._deadline_s)
            if kind is None:
                self._finish_together()
        except HoldfastError as failure:
            if self._strict and kind is None:
                raise
            log.error("the SMP of this node was left running (`holdfast gc` removes it): %s", failure)
        finally:
            self._close()

    # ------------------------------------------------------------------ the boundary

    def before_step(self) -> None:
        """The fence: nothing that is still being copied may change."""
        if self._auditor is not None:
            self._auditor.before_step(self._step)
        began = time.monotonic()
        if not self._beginning.seen:
            self._begin_unseen()
        self._stepping = True
        self._check_inputs()
        self._pace.fenced(began)
        if self._copy is not None:
            self._fence(self._copy)
        if self._enabled and not self._parted and self._ledger.pending and self._outcomes is None:
            self._outcomes = self._agreement.minimum(self._report())
        self.statistics.stall_s += time.monotonic() - began

    def after_step(self) -> None:
        """An optimizer has stepped. Unless the loop says where its steps begin, the step is over."""
        self._stepped = True
        self._stepping, self._expected = False, None
        if self._unheard is not None:
            self._be_sure(self._unheard)
        if not self._declared:
            self._end_step()
            self._capture.mark(buffers=self._beginning.blind)

    def on_forward(self, number: int, given: Any) -> None:
        """A module runs forward, in training mode and with gradients: the step begins, if the loop does not say so."""
        if not self._declared:
            if not self._forward:
                self._capture.first_began()
            self._forward = number
            self._begin()
        if self._unheard is not None or self._expected is not None:
            self._batch.forward(number, given)
            if self._declared or self._stepping:
                self._batch.settle(number)
                self._hear()

    def on_backward(self, number: int) -> None:
        """Gradients are computed of a forward that `on_forward` told of, or (0) of one that nobody saw."""
        self._batch.settle(number)
        if self._beginning.backward(own=number == self._began_with) and self._copy is not None:
            self._be_sure(self._copy)

    # ------------------------------------------------------------------ inside

    def _hear(self) -> None:
        """It is certain what the step is given."""
        if self._unheard is not None and self._unheard.begins:
            self._be_sure(self._unheard)
        if self._stepping:
            self._check_inputs()

    def _be_sure(self, copy: CopyJob) -> None:
        """The step began where `copy` was made, and what its first forward is given is known, if it ever will be."""
        if copy is self._unheard:
            copy.inputs, self._unheard = self._batch.inputs, None
        copy.sure.set()

    def _check_inputs(self) -> None:
        """No optimizer has changed anything yet. Is the first step after a restore given what it was before?"""
        if self._expected is None or not self._batch.known:
            return
        expected, self._expected = self._expected, None
        if all(data.exact for data in self._data.values()):
            check_inputs(expected, self._batch.inputs, self._step)

    def _declare(self) -> None:
        """The loop says where its steps begin, if it did not before."""
        if not self._declared:
            self._declared = self._boundary.declared = True
            self._next_turn = max(self._next_turn, self._step)

    def _mark(self) -> None:
        """Data is about to be read for the next step. If one has ended, this is what belongs to its boundary."""
        self._declare()
        if not self._marked:
            self._marked = True
            self._warn_of_what_was_read()
        if self._rewind is not None:
            self._rewind()
            self._rewind = None
        if self._stepped:
            self._end_step()
        if self._open is not None and not self._beginning.seen:
            self._capture.mark()

    def _warn_of_what_was_read(self) -> None:
        """The first step is about to begin. A batch that was read ahead of it would be another after a restart."""
        drawn = [] if self._data or not self.checks_resumption else self._capture.drawn()
        if drawn:
            log.warning(
                "something drew from the random generators of %s between entering and the first step; if it read a "
                "batch ahead, or made an order of data, that is not captured, and a restart makes another: go through "
                "data by `snap.data`, or `track` what was read",
                ", ".join(drawn),
            )

    def _end_step(self) -> None:
        """Settle what became of earlier snapshots, and see whether another is due."""
        began = time.monotonic()
        self._stepped = False
        self._open = None
        self._beginning.over()
        self._batch.over()
        self._gradients.stepped()
        self._steppers.check()
        self._step += 1
        self._phase = Phase.STEP
        self._beat()
        self._intervals.observe(began, self.statistics.stall_s, overlapped=bool(self._ledger.pending))
        try:
            if self._enabled and self._parted and self._agreement.meet(self._step):
                self._go_on()
            if self._enabled and not self._parted:
                self._settle()
                if self._intervals.policy.takes(self._step):
                    self._prepare()
        except AgreementLost as error:
            self._part()
            if self._strict:
                raise
            text = "no snapshots are taken after step %d, until all ranks have met again: %s"
            self._episodes.begin("ranks", text, self._step, error, level=logging.ERROR)
        except HoldfastError as error:
            self._part()
            if self._strict or self._layout is None:
                raise
            self._enabled = False
            log.error("no more snapshots are taken: %s", error)
        except BaseException:  # the handler of a signal may raise while ranks agree: the others must not wait for this
            self._part()
            raise
        self.statistics.stall_s += time.monotonic() - began
        if self._auditor is not None:
            self._auditor.after_step(self._step, lambda: self._agreement.minimum([1])())
        if self._recording is not None and self._recording.over:
            self._end_recording()

    def _begin(self) -> None:
        """The next step begins here, as far as can be told."""
        began = time.monotonic()
        self._beat()
        if self._resumed is not None:
            resumed, self._resumed = self._resumed, None
            resumed.check(declared=self._declared)
        if self._auditor is not None:
            self._auditor.settled(self._step)
        if self._beginning.seen:
            self._begin_again()
        else:
            self._began_with = self._forward
            if self._open is not None:
                self._take(self._open)
        self._beginning.seen = True
        self.statistics.stall_s += time.monotonic() - began

    def _begin_again(self) -> None:
        """One more forward before any backward: was the one before it an evaluation?"""
        due, copy = self._open, self._copy
        if due is None or copy is None or copy.sure.is_set() or self._declared:
            return
        if self._beginning.was_another(self._capture, copy):
            self._began_with = self._forward
            self._copy = None
            copy.abort(Retaken("an evaluation, which did not begin the step"))
            self._take(due, instead=copy)

    def _begin_unseen(self) -> None:
        """``optim.step()`` is about to be called, and no step was seen to begin since the last one."""
        unseen = self._beginning.has_backward and not self._declared
        if unseen and not self._beginning.blind:
            self._beginning.blind = True
            log.warning(
                "no forward of the model was seen in step %d, as if it were compiled: copies cannot run beside the "
                "step, and what code between two steps does to buffers is not captured: %s",
                self._step,
                BEGIN,
            )
        if self._resumed is not None:
            resumed, self._resumed = self._resumed, None
            resumed.check(declared=True, forward_ran=unseen)
        if self._open is not None:
            self._take(self._open, marked=unseen, begins=True)
        self._beginning.certain()

    def _fence(self, copy: CopyJob) -> None:
        """Wait until what is being copied may change; not for an SMP."""
        if self._is_doubtful(copy):
            copy.abort(Doubtful(self._step))
            text = "no snapshot of step %d: %s"
            self._episodes.begin("doubtful", text, self._step, copy.error, extra=about(copy.snapshot))
        if self._batch.known or self._beginning.has_backward:
            self._be_sure(copy)
        in_time = copy.fence(0.0 if self._smp_is_slow else PATIENCE_S, self._deadline_s)
        if in_time:
            self._mover.fence()
        self._smp_is_slow = not in_time
        self._capture.let_go()

    def _is_doubtful(self, copy: CopyJob) -> bool:
        """Whether the step may not have begun where the copy was made."""
        if self._declared or copy is not self._copy or copy.sure.is_set():
            return False
        return self._beginning.is_doubtful(self._capture, copy)

    def _attach_again(self) -> None:
        self._smp.attach_again(self._epoch, self._layout)

    def _report(self) -> list[int]:
        """What the ranks take the minimum of: what became of each pending snapshot, whether the layout holds, the
        interval that each wants, negative so that the longest wins, and whether its node is ready to persist one."""
        outcomes = [self._outcome(snapshot) for snapshot in self._ledger.pending]
        # What does not fit an earlier epoch's layout was the reason for this one.
        present = [copy for snapshot, copy in self._copies.items() if snapshot.epoch == self._epoch]
        misfit = self._misfit or any(isinstance(copy.error, LayoutChanged) for copy in present)
        return [*outcomes, int(not misfit), -self._intervals.policy.wanted(), int(self._client.persist_due)]

    def _outcome(self, snapshot: SnapshotId) -> Outcome:
        copy = self._copies.get(snapshot)
        return self._client.outcome(snapshot) if copy and copy.error is None else Outcome.FAILED

    def _settle(self) -> None:
        if self._outcomes is None:
            return
        *outcomes, fits_everywhere, interval, self._persist_due = self._outcomes()
        self._outcomes = None
        if saying := self._intervals.agree(-interval):
            self._copier.say(saying)
        policy, self.statistics.why = self._intervals.policy, self._intervals.why
        self.statistics.interval, self.statistics.overhead = policy.interval, policy.overhead
        results = [Outcome(value) for value in outcomes]
        self.statistics.protected += results.count(Outcome.PROTECTED)
        if Outcome.PROTECTED in results:
            self._episodes.end("starved", "snapshots are protected again: step %d", self._step)
        self.statistics.failed += results.count(Outcome.FAILED)
        self._ledger = self._ledger.settle(results)
        over = [copy.error for snapshot, copy in self._copies.items() if snapshot not in self._ledger.pending]
        self._copies = {s: copy for s, copy in self._copies.items() if s in self._ledger.pending}
        for error in over:
            if isinstance(error, StateChanged):
                self._hear_of(error)
            elif isinstance(error, ReplicasDiffer):
                text = "%s"  # once, however many snapshots were under way
                self._episodes.begin("replicas", text, error)
            elif error is not None and self._strict and not isinstance(error, LayoutChanged):
                raise error
        if not fits_everywhere:
            self._planned = False
            self._misfit = False

    def _hear_of(self, error: StateChanged) -> None:
        """Tensors changed while they were copied: see that it does not happen again, and say so."""
        length = self._capture.copy_at_once(error.names)
        log.warning(
            "%s: from now on such tensors are copied at once as a step begins, which takes %.1f MB more memory and "
            "holds up the loop for that copy",
            error,
            length / 1e6,
        )

    def _prepare(self) -> None:
        """A snapshot is due when the next step begins, if there is a slot for it. A collective call."""
        self._open = self._copy = None  # without a copy a snapshot counts as failed: the others go on taking part
        if not self._ledger.may_begin:
            self._starve()
        if not self._ledger.may_begin or not (self._planned or self._configure()):
            self.statistics.skipped += 1
            return
        snapshot = SnapshotId(self._epoch, self._step)
        self._open = _Due(snapshot, self._ledger.keep, self._ledger.sure)
        self._ledger = self._ledger.begin(snapshot)
        self.statistics.taken += 1

    def _starve(self) -> None:
        """Every slot holds a snapshot that is kept or still being protected. If that lasts, it is said."""
        oldest = next((self._copies[each] for each in self._ledger.pending if each in self._copies), None)
        if oldest is not None and time.monotonic() - oldest.begun_s > STARVED_S:
            text = (
                "no snapshot is taken: %s has been waiting for %.0f s to be sealed and protected; is the SMP of a node "
                "slow or stopped? `holdfast status` tells"
            )
            self._episodes.begin("starved", text, oldest.snapshot, time.monotonic() - oldest.begun_s)

    def _take(
        self,
        due: _Due,
        *,
        marked: bool = False,
        instead: CopyJob | None = None,
        ended: bool = False,
        begins: bool = False,
    ) -> None:
        """Capture the state as it is now.

        Args:
            marked, instead: see `Capture.begin` and `CopyJob`.
            ended: nothing was read for a next step; what reading draws is unknown.
            begins: it is certain that the step begins.
        """
        snapshot = due.snapshot
        alike = self._capture.compare_replicas(snapshot) if instead is None else instead.alike
        try:
            declared = self._declared or ended
            copy = self._capture.begin(snapshot, due.keep, due.protected, declared=declared, marked=marked)
        except LayoutChanged as error:
            self._episodes.begin("layout", "no snapshot of step %d, a new layout is made: %s", self._step, error)
            self._misfit = True
        except HoldfastError as error:
            if self._strict:
                raise
            text, extra = "no snapshot of step %d: %s", about(snapshot, error=type(error).__name__)
            self._episodes.begin("capture", text, self._step, error, level=logging.ERROR, extra=extra)
        else:
            copy.alike, copy.instead = alike, instead
            copy.begins = self._declared or begins
            if ended:
                copy.sure.set()
            if self._persist_due and due.protected is not None and due.protected.epoch == self._epoch:
                copy.persist = due.protected
            self._episodes.end("capture", "state is captured again: step %d", self._step, extra=about(snapshot))
            self._copy = self._unheard = self._copies[snapshot] = copy
            self._pace.boundary(time.monotonic())
            self._client.copying(self._step)
            self._copier.submit(copy)

    def _end_last_step(self) -> None:
        """The loop has ended well, and its last snapshot is kept."""
        if self._stepped:
            self._turn = None if self._turn is None else self._next_turn  # what is kept goes on with the next one
            self._mark()
        if self._open is not None and not self._beginning.seen:
            self._take(self._open, ended=True)

    def _beat(self) -> None:
        """This process is alive, and where."""
        self._client.beat(self._phase, self._step)

    def _loop(self) -> dict[str, Any]:
        """Where the loop is, for `steps` and `data`."""
        held = {name: state for name, state in self._held_data.items() if name not in self._data}
        return {"turn": self._turn, "data": held | {name: d.state() for name, d in self._data.items()}}

    def _configure(self) -> bool:
        """Agree on a layout for the state as it is now, and reserve it. A collective call.

        Every change of layout, and every attempt at one, is an epoch of its own; what was snapshot before stays until
        the new is protected. False, on every rank: some SMP is away, and it must be tried again.
        """
        failure = failure_of(lambda: self._smp.attach(self._epoch, self._wait_for_copies), SmpUnavailable)
        if self._agreement.minimum([int(failure is None)])() == [1]:
            form = self._capture.plan(SnapshotId(self._epoch, self._step))
            if self._attempted:
                self._epoch += 1
            self._attempted = True
            failure = failure_of(lambda: self._reserve(form.total_bytes), SmpUnavailable)
            if failure is None:
                self._planned = True
                return True
        if self._strict:
            raise failure or SmpUnavailable("the SMP of another node is away")
        text = "no snapshot of step %d, nor until all SMPs are back: %s"
        self._episodes.begin("layout", text, self._step, failure or "one is away")
        return False

    def _wait_for_copies(self) -> None:
        limit = time.monotonic() + self._deadline_s
        for copy in self._copies.values():
            copy.done.wait(max(0.0, limit - time.monotonic()))

    def _reserve(self, slot_bytes: int) -> None:
        self._layout = reserve(
            self._client,
            self._agreement,
            self._job,
            self._epoch,
            self._coord,
            slot_bytes,
            self._protection,
            self._slots,
            self._domains,
        )
        self._intervals.placed(self._layout)
        self._index = [shard.coord for shard in self._layout.node(self._client.node).shards].index(self._coord)
        self._episodes.end("layout", "memory is reserved anew: snapshots are taken from step %d on", self._step)
        if self._layout.coords[0] == self._coord:
            self._copier.say(self._intervals.plan_in_words())

    def _over(self, job: CopyJob) -> None:
        """A copy is sealed, or was given up. Called in one of the copy threads."""
        if job is self._copy:
            self._client.copying(None)
        self._capture.over(job)
        self._intervals.sealed(job)

    def _end_recording(self) -> None:
        """The profile is complete: it is written, and this process ends well. A collective call."""
        self._intervals.close(self._deadline_s)
        if self._recording is not None and self._layout is not None:
            self._recording.write(self._layout, self._client.node, self._coord, self._agreement)
        self.close()
        leave()

    def _close(self) -> None:
        self._mover.close()
        self._smp.close()
        self._let_go()
        self._agreement.close()

    def _let_go(self) -> None:
        """Whoever still refers to this hook shall not keep slots mapped: a process may enter many."""
        self._copy = self._unheard = None
        self._copies.clear()
        if hasattr(self, "_copier"):
            self._copier.let_go()

    def _part(self) -> None:
        """This rank does not agree with the others any more, and they shall not wait for it."""
        self._parted = True
        self._outcomes = None
        self._agreement.leave()

    def _go_on(self) -> None:
        """All ranks have met again: they agree on where they stand, in a new epoch. A collective call."""
        mine = {
            "step": self._step,
            "epoch": self._epoch,
            "interval": self._intervals.policy.interval,
            "ledger": self._ledger.to_json(),
        }
        said = [json.loads(text) for text in self._agreement.gather(json.dumps(mine).encode())]
        steps = [each["step"] for each in said]
        if len(set(steps)) > 1:
            raise ConfigError(f"ranks are at different steps, {steps}: each must call optim.step() equally often")
        self._epoch = max(each["epoch"] for each in said)
        self._attempted, self._planned, self._misfit, self._persist_due = True, False, False, 0
        self.statistics.failed += len(self._ledger.pending)
        self._ledger = Ledger.together([Ledger.from_json(each["ledger"]) for each in said])
        self._copies = {}
        self._intervals.agree(max(each["interval"] for each in said))
        self._parted = False
        self._episodes.end("ranks", "all ranks have met again, and snapshots are taken after step %d", self._step)

    def _finish_together(self) -> None:
        """`_finish`, once all ranks have ended well, though they may have lost each other."""
        lost: AgreementLost | None = None
        if self._enabled and not self._parted:
            try:
                self._finish()
                return
            except AgreementLost as error:
                lost = error
        if self._keep:
            return
        self._part()
        if not self._agreement.meet_at_end(self._deadline_s):
            raise lost or AgreementLost("not all ranks have ended well")
        self._finish()

    def _finish(self) -> None:
        if self._copy is not None:
            self._copy.done.wait(self._deadline_s)
        if self._keep:
            if self._ledger.pending:
                self._client.await_outcome(self._ledger.pending[-1], self._deadline_s)
            return
        mine = json.dumps([self._coord, self._client.node, self._epoch])
        ranks = [json.loads(text) for text in self._agreement.gather(mine.encode())]
        on_this_node = [coord for coord, node, _ in ranks if node == self._client.node]
        if min(on_this_node, key=coordinate_key) == self._coord:
            self._smp.finish(max(epoch for _, _, epoch in ranks))
