"""The job's snapshots as one rank sees them: which are due, pending and protected, as all ranks have agreed.

In every step the ranks start an asynchronous minimum over the state of each pending snapshot (`report`), and apply the
result once the step has ended (`step_ended`). All ranks therefore hold the same `Ledger` and take the same snapshots,
without a leader.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from holdfast.smp_daemon.shared.board import RepairState, SnapshotOutcome
from holdfast.smp_daemon.shared.errors import (
    ConfigError,
    DeadlineExceeded,
    HoldfastError,
    NodeLeaves,
    SmpUnavailable,
)
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.limits import slowest_s
from holdfast.smp_daemon.shared.logs import Episodes, about, get_log
from holdfast.smp_daemon.shared.plain import decode_json, encode_json
from holdfast.snapshot.collective.mesh import AgreementLost
from holdfast.snapshot.collective.reports import ALL, ANY, LEAST, MOST, reduced
from holdfast.snapshot.copy.errors import LayoutChanged
from holdfast.snapshot.copy.pace import Pace
from holdfast.snapshot.copy.witness import StateChanged
from holdfast.snapshot.delays import Delays
from holdfast.snapshot.interval.control import IntervalController
from holdfast.snapshot.layouts import Layouts
from holdfast.snapshot.options import Options
from holdfast.snapshot.progress import Statistics
from holdfast.snapshot.rank import Rank
from holdfast.snapshot.repairs import Repairs
from holdfast.snapshot.resume.restore import Restored
from holdfast.snapshot.state.replicas import ReplicasDiffer
from holdfast.snapshot.step.capture import Capture
from holdfast.snapshot.step.copier import Copier
from holdfast.snapshot.step.ledger import Ledger, SnapshotState
from holdfast.snapshot.step.orders import CopyState, Due, SnapshotCopy

REPORTS = 8
"""How often ranks report in an interval at least, however little is pending, so that all hear soon of a node that is to
be taken away."""

LEAVE_DEADLINE_S = 600.0
"""How long the ranks hold still at most while a node that leaves hands over what it holds, beside what its bytes may
take."""

log = get_log(__name__)


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a rank tells the others in each step while anything is pending, and what they then know of all.

    Attributes:
        states: how far each pending snapshot has come, oldest first.
        repair: how far the restored snapshot's parity is repaired.
        fits: the layout still fits the state.
        interval: the steps between snapshots that a rank wants: the longest wins.
        persists: the rank's node is ready to persist a snapshot.
        usable: how many slots a rank may use; `AWAY` or `REFUSED` if they could not be reserved.
        ends: a rank's node is to be taken away, so the job ends at this boundary.
    """

    states: tuple[SnapshotState, ...] = field(metadata=LEAST)
    repair: RepairState = field(metadata=LEAST)
    fits: bool = field(metadata=ALL)
    interval: int = field(metadata=MOST)
    persists: bool = field(metadata=ALL)
    usable: int = field(metadata=LEAST)
    ends: bool = field(metadata=ANY)


@dataclass(frozen=True, slots=True)
class _Met:
    """What a rank tells the others about itself when all have met again."""

    step: int
    epoch: int
    interval: int
    ledger: Ledger


class Standing(Enum):
    """How a rank stands to the others. TOGETHER: it agrees with them. PARTED: it has left them, until all meet again.
    OVER: it takes no more snapshots."""

    TOGETHER = auto()
    PARTED = auto()
    OVER = auto()


class Protecting:
    """Decides with the other ranks which snapshots to take, and follows each until it is sealed or protected.

    Used by the training thread, except `_over`, which the copier's threads call.

    Attributes:
        ledger: which snapshots hold slots; the same on every rank.
        copies: those of pending snapshots that are, or were, made here.
        newest: the one that was begun last; None if the one that is due now could not be.
    """

    def __init__(
        self,
        options: Options,
        rank: Rank,
        restored: Restored,
        capture: Capture,
        intervals: IntervalController,
        statistics: Statistics,
    ) -> None:
        self._options = options
        self._rank = rank
        self._capture = capture
        self._intervals = intervals
        self._progress = rank.progress
        self._statistics = statistics
        self.ledger = _first_ledger(options, restored)
        self.copies: dict[SnapshotId, SnapshotCopy] = {}
        self.newest: SnapshotCopy | None = None
        self.pace = Pace(rank.system)
        self.episodes = Episodes(log)
        self._reported: Callable[[], StepReport] | None = None  # waits for what all ranks report
        self._persist_due = False
        self._ends = False
        self._last: Due | None = None  # after this snapshot the job ends, because a node leaves
        self._standing = Standing.TOGETHER
        self._delays = Delays(self.episodes, options.protect_every)
        self.layouts = Layouts(
            options,
            rank,
            restored.run,
            capture,
            intervals,
            self.episodes,
            lambda text: self.copier.say(text),
            self._wait_for_copies,
        )
        self._repairs = Repairs(rank, restored.order_repairs, self.episodes, self._wait_for_copies)
        self.copier = Copier(
            rank.client, rank.smp.sealing, rank.engine, self.pace, self.layouts.attach_again, self._over, rank.system
        )

    @property
    def is_together(self) -> bool:
        """Whether this rank agrees with the others."""
        return self._standing is Standing.TOGETHER

    # ------------------------------------------------------------------ in every step

    def report(self) -> None:
        """Tell the other ranks how things stand here, if anything is pending, and now and then if nothing is. A
        collective call; does not wait."""
        is_time = self._progress.step % max(1, self._intervals.rule.interval // REPORTS) == 0
        open_ones = self.ledger.pending or self.ledger.restored or self.layouts.is_reserving or is_time
        if self.is_together and open_ones and self._reported is None:
            self._reported = reduced(self._rank.agreement, self._report_of_this_rank())

    def step_ended(self, began_s: float, *, is_last: bool) -> Due | None:
        """Apply the ranks' reports, and decide whether a snapshot is due: returns the one to take when the next step
        begins. A collective call; blocks.

        Args:
            began_s: the time of the boundary.
            is_last: it was the last step of a loop whose snapshots are kept: its snapshot is due at any interval, and
                waits for a slot.

        Raises:
            HoldfastError: what went wrong, if the hook is strict; also, except for `AgreementLost`, if no slot was ever
                usable. Otherwise it is logged, and snapshots pause or stop.
        """
        step = self._progress.step
        self._intervals.observe(step, began_s, self._statistics.stall_s, bool(self.ledger.pending))
        self._statistics.step_ended(self._rank.system.time())
        try:
            if self._standing is Standing.PARTED and self._rank.agreement.meet(step):
                self._go_on()
            if self.is_together:
                self.apply_reports()
                ends = self._ends
                if is_last or ends:
                    self._catch_up()
                if is_last or ends or self._intervals.rule.is_due(step, self.ledger.protects_next):
                    due = self._prepare()
                    self._last = due if ends else None
                    return due
                if self.ledger.pending and self._intervals.rule.is_time(step):
                    self._note_skipped()
        except AgreementLost as error:
            self.part()
            if self._options.strict:
                raise
            text = "no snapshots are taken after step %d, until all ranks have met again: %s"
            self.episodes.begin("ranks", text, step, error, level=logging.ERROR)
        except HoldfastError as error:
            self.part()
            if self._options.strict or not self.layouts.was_usable:
                raise
            self._standing = Standing.OVER
            log.error("no more snapshots are taken: %s", error)
        except BaseException:  # a signal handler may raise while ranks agree: the others must not wait for this one
            self.part()
            raise
        return None

    def take(self, due: Due, *, declared: bool) -> SnapshotCopy | None:
        """Capture the state as it is now and start its copy; None if the state cannot be captured. A collective call.

        Args:
            declared: see `Capture.begin`.

        Raises:
            HoldfastError: why the state cannot be captured, if the hook is strict and no new layout helps.
        """
        snapshot, step = due.snapshot, self._progress.step
        try:
            copy = self._capture.begin(due, declared=declared)
        except LayoutChanged as error:
            self.episodes.begin("layout", "no snapshot of step %d, a new layout is made: %s", step, error)
            self.layouts.outgrow()
            return None
        except HoldfastError as error:
            if self._options.strict:
                raise
            text, extra = "no snapshot of step %d: %s", about(snapshot, error=type(error).__name__)
            self.episodes.begin("capture", text, step, error, level=logging.ERROR, extra=extra)
            return None
        self.episodes.end("capture", "state is captured again: step %d", step, extra=about(snapshot))
        self.newest = self.copies[snapshot] = copy
        self.pace.boundary(self._rank.system.monotonic())
        self._rank.client.copying(step)
        self.copier.submit(copy)
        return copy

    def apply_reports(self) -> None:
        """Apply the ranks' reports, if any were requested. Blocks until all of them are there."""
        if self._reported is None:
            return
        everywhere = self._reported()
        self._reported, self._persist_due, self._ends = None, everywhere.persists, everywhere.ends
        if saying := self._intervals.agree(everywhere.interval):
            self.copier.say(saying)
        statistics, states = self._statistics, everywhere.states
        statistics.interval = self._intervals.rule.interval
        sealed = {s for s, state in zip(self.ledger.pending, states, strict=True) if state is SnapshotState.SEALED}
        unprotected = sealed.intersection(self.ledger.encoded)
        protected = states.count(SnapshotState.PROTECTED)
        statistics.protected += protected
        statistics.failed += states.count(SnapshotState.FAILED) + len(unprotected)
        self.ledger = self.ledger.settle(states).repaired(everywhere.repair)
        self._delays.note_settled(self.ledger, protected=protected > 0, unprotected=unprotected)
        if self.ledger.restored is None:
            self.episodes.end("repaired", "snapshots are taken again: step %d", self._progress.step)
            self.episodes.end("repair", "the parity of the restored snapshot is repaired, or not needed any more")
        over = [copy.error for snapshot, copy in self.copies.items() if snapshot not in self.ledger.pending]
        self.copies = {s: copy for s, copy in self.copies.items() if s in self.ledger.pending}
        for error in over:
            if isinstance(error, StateChanged):
                self._capture.copy_at_once(error)
            elif isinstance(error, ReplicasDiffer):
                text = "%s"  # logged once, however many snapshots were pending
                self.episodes.begin("replicas", text, error)
            elif error is not None and self._options.strict and not isinstance(error, LayoutChanged):
                raise error
        self.layouts.apply(fits=everywhere.fits, usable=everywhere.usable)

    def _catch_up(self) -> None:
        """Wait until pending snapshots are protected here, and tell the other ranks, so that one more finds a slot. A
        collective call; blocks. It is to be protected, whatever `protect_every` says."""
        self.drain(self._protected_by_s())
        self.report()
        self.apply_reports()
        self.ledger = replace(self.ledger, until=0)

    def _report_of_this_rank(self) -> StepReport:
        # Only copies of this epoch count: what did not fit an earlier epoch's layout was the reason for this one.
        present = [copy for snapshot, copy in self.copies.items() if snapshot.epoch == self._progress.epoch]
        return StepReport(
            states=tuple(self._state(snapshot) for snapshot in self.ledger.pending),
            repair=RepairState.UNDER_WAY if self.ledger.restored is None else self._repairs.state(),
            fits=self.layouts.fits and not any(isinstance(copy.error, LayoutChanged) for copy in present),
            interval=self._intervals.wanted(),
            persists=self._rank.client.persist_due,
            usable=self.layouts.standing(),
            ends=self._rank.leaves,
        )

    def _state(self, snapshot: SnapshotId) -> SnapshotState:
        """How far the snapshot is on this rank, which knows itself whether it is sealed; the SMP knows the rest."""
        copy = self.copies.get(snapshot)
        # Ask this first: an error or outcome that is read after it belongs to a finished copy.
        is_over = copy is not None and copy.is_over
        if copy is None or copy.error is not None:
            return SnapshotState.FAILED
        if not is_over:
            return SnapshotState.PENDING  # even if it is protected by now: it may still be read back, in vain
        outcome = self._rank.client.outcome(snapshot) if snapshot in self.ledger.encoded else SnapshotOutcome.FAILED
        if outcome is SnapshotOutcome.PROTECTED:
            return SnapshotState.PROTECTED
        return SnapshotState.ENCODING if outcome is SnapshotOutcome.PENDING else SnapshotState.SEALED

    def _prepare(self) -> Due | None:
        """Plan a snapshot for the beginning of the next step, if a slot is free. A collective call."""
        self.newest = None  # if `take` fails here, this rank reports the snapshot as failed; the others carry on
        layouts, may_begin = self.layouts, self.ledger.may_begin
        if not may_begin:
            self._note_skipped()
        is_ready = may_begin and (layouts.is_planned or layouts.configure()) and layouts.has_room(len(self.ledger.keep))
        if not is_ready:
            self._statistics.skipped += 1
            return None
        assert layouts.layout is not None  # `is_planned`, or just configured
        snapshot, ledger = SnapshotId(self._progress.epoch, self._progress.step), self.ledger
        persist = ledger.protected if self._persist_due else None
        due = Due(
            snapshot,
            ledger.keep,
            ledger.protected,
            ledger.with_parity,
            ledger.protects_next,
            self._intervals.protected_every_s,
            self._statistics.spent,
            persist if persist is not None and persist.epoch == snapshot.epoch else None,
            layouts.layout.unit_bytes,
        )
        self._delays.note_due(ledger)
        self._intervals.begun(snapshot.step, ledger.protects_next)
        self.ledger = ledger.begin(snapshot)
        self._statistics.taken += 1
        return due

    def _note_skipped(self) -> None:
        oldest = next((self.copies[each] for each in self.ledger.pending if each in self.copies), None)
        self._delays.note_skipped(self.ledger, oldest, self.layouts.moved_bytes, self._rank.system.monotonic())

    # ------------------------------------------------------------------ copies

    def _wait_for_copies(self) -> None:
        limit = self._rank.system.monotonic() + self._options.deadline_s
        for copy in self.copies.values():
            copy.reached(CopyState.SEALED, max(0.0, limit - self._rank.system.monotonic()))

    def _over(self, copy: SnapshotCopy) -> None:
        """A copy is sealed, or was given up. Called by one of the copier's threads."""
        if copy is self.newest:
            self._rank.client.copying(None)
        self._intervals.sealed(copy)

    # ------------------------------------------------------------------ ranks that lose each other

    def part(self) -> None:
        """Stop agreeing with the other ranks, so that they do not wait for this one."""
        if self._standing is Standing.TOGETHER:
            self._standing = Standing.PARTED
        self._reported = None
        self._rank.agreement.leave()

    def _go_on(self) -> None:
        """All ranks have met again: agree on a common state, in a new epoch. A collective call."""
        progress = self._progress
        mine = _Met(progress.step, progress.epoch, self._intervals.rule.interval, self.ledger)
        texts = self._rank.agreement.gather(encode_json(mine))
        said = [decode_json(_Met, text, "where a rank stands") for text in texts]
        steps = [each.step for each in said]
        if len(set(steps)) > 1:
            raise ConfigError(f"ranks are at different steps, {steps}: each must call optim.step() equally often")
        progress.enter(max(each.epoch for each in said))
        self._persist_due = False
        self.layouts.begin_anew()
        self._statistics.failed += len(self.ledger.pending)
        self.ledger = Ledger.together([each.ledger for each in said])
        self.copies = {}
        self._intervals.rule.met(max(each.interval for each in said))
        self._standing = Standing.TOGETHER
        self.episodes.end("ranks", "all ranks have met again, and snapshots are taken after step %d", progress.step)

    # ------------------------------------------------------------------ ends

    def drain(self, limit_s: float) -> bool:
        """Block until this node has sealed every snapshot that was copied here, and protected those that are to be
        protected; returns whether it has, by `limit_s` of `time.monotonic`, and whether all their steps have begun."""
        self.pace.fence()
        outcomes = []
        for snapshot, copy in list(self.copies.items()):
            if not (copy.order.declared or copy.is_confirmed):
                return False
            copy.confirm()
            left_s = limit_s - self._rank.system.monotonic()
            if not copy.reached(CopyState.SEALED, left_s) or copy.error is not None:
                return False
            if not copy.order.due.encode:
                continue
            try:
                outcomes.append(
                    self._rank.client.await_outcome(snapshot, max(0.0, limit_s - self._rank.system.monotonic()))
                )
            except (SmpUnavailable, DeadlineExceeded):
                return False
        return all(outcome is SnapshotOutcome.PROTECTED for outcome in outcomes)

    def _protected_by_s(self) -> float:
        """When what is pending is protected at the latest, by `time.monotonic`, unless something is wrong."""
        patience_s = self._options.deadline_s + slowest_s(self.layouts.moved_bytes)
        return self._rank.system.monotonic() + patience_s

    def end_if_agreed(self) -> None:
        """If the job is to end for a node that leaves, and this is the first step after the last snapshot: wait until
        that is protected on all ranks, and until the leaving node has handed over what it holds. Then end the job. A
        collective call; blocks.

        Raises:
            NodeLeaves: on every rank, before any of them changes its state.
        """
        due, self._last = self._last, None
        if due is None:
            return
        rank, step = self._rank, due.snapshot.step
        leaves = rank.leaves
        try:
            done = due.snapshot in self.copies and self.drain(self._protected_by_s())
            if rank.agreement.minimum([done])() != [True]:
                log.warning("a node is to be taken away, but step %d is not protected: a later one is tried", step)
                return
            rank.agreement.patiently(lambda: rank.client.leave(LEAVE_DEADLINE_S) if leaves else None)
        except AgreementLost as error:
            self.part()
            log.warning("a node is to be taken away, but not all ranks have ended at step %d: %s", step, error)
            return
        except HoldfastError as error:  # the snapshot is protected, so what is not handed over can be computed
            log.warning("not all that this node holds is held by others: %s", error)
        raise NodeLeaves(
            f"{'this' if leaves else 'another'} node of the job is to be taken away: start the job again without it, "
            f"and it goes on from step {step}"
        )

    def let_go(self) -> None:
        """Drop all slots, so that whoever still refers to this hook does not keep them mapped: a process may enter
        many."""
        self.newest = None
        self.copies.clear()


def _first_ledger(options: Options, restored: Restored) -> Ledger:
    """What the ranks know as they enter."""
    return Ledger.after(
        options.slots_with_generations,
        restored.snapshot,
        restored.protected,
        only_sealed=restored.only_sealed,
        protect_every=options.protect_every,
        generations=options.generations,
        earlier=restored.earlier,
        abandoned=restored.abandoned,
    )
