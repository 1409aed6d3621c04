"""The job's snapshots as one rank sees them: which are due, pending and protected, as all ranks have agreed.

In every step the ranks start an asynchronous minimum over the state of each pending snapshot (`report`), and apply the
result once the step has ended (`step_ended`). All ranks therefore hold the same `Ledger` and take the same snapshots,
without a leader.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.smp_daemon.shared.board import RepairState, SnapshotOutcome
from holdfast.smp_daemon.shared.errors import ConfigError, DeadlineExceeded, HoldfastError, SmpUnavailable, failure_of
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.logs import Episodes, about, get_log
from holdfast.smp_daemon.shared.plain import decode_json, encode_json
from holdfast.snapshot.collective.mesh import AgreementLost
from holdfast.snapshot.collective.reports import ALL, ANY, LEAST, MOST, SAME, reduced
from holdfast.snapshot.copy.errors import LayoutChanged
from holdfast.snapshot.copy.pace import Pace
from holdfast.snapshot.copy.witness import StateChanged
from holdfast.snapshot.interval.control import IntervalController
from holdfast.snapshot.options import Options
from holdfast.snapshot.progress import RankProgress, Statistics
from holdfast.snapshot.rank import Rank
from holdfast.snapshot.resume.arrange import coordinate_key
from holdfast.snapshot.resume.reserve import AWAY, REFUSED, Reserving, lay_out, raise_together
from holdfast.snapshot.resume.restore import Restored
from holdfast.snapshot.state.replicas import ReplicasDiffer
from holdfast.snapshot.step.capture import Capture
from holdfast.snapshot.step.copier import Copier
from holdfast.snapshot.step.ledger import Ledger, SnapshotState
from holdfast.snapshot.step.orders import CopyState, Due, SnapshotCopy

REPAIR_EVERY_S = 1.0
"""How often to look for an SMP that recomputes lost parity in place of one that went away, in seconds."""

STARVED_S = 30.0
"""How long a snapshot may stay pending while no slot is free for another, in seconds, before that is logged."""

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
    """

    states: tuple[SnapshotState, ...] = field(metadata=LEAST)
    repair: RepairState = field(metadata=LEAST)
    fits: bool = field(metadata=ALL)
    interval: int = field(metadata=MOST)
    persists: bool = field(metadata=ALL)
    usable: int = field(metadata=LEAST)


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


@dataclass(frozen=True, slots=True)
class _Standing:
    """What a rank tells the others about itself when all have met again."""

    step: int
    epoch: int
    interval: int
    ledger: Ledger


class Protecting:
    """Decides with the other ranks which snapshots to take, and follows each until it is sealed or protected.

    Used by the training thread, except `_attach_again` and `_over` (the copier's threads) and `_pin` (the thread that
    prepares slots).

    Attributes:
        ledger: which snapshots hold slots; the same on every rank.
        copies: the jobs of those pending snapshots that are, or were, copied here.
        newest: the job of the snapshot that is copied beside the current step; None if there is none.
        index: this rank's index among the ranks of its node.
    """

    def __init__(
        self,
        options: Options,
        rank: Rank,
        restored: Restored,
        capture: Capture,
        intervals: IntervalController,
        progress: RankProgress,
        statistics: Statistics,
    ) -> None:
        self._options = options
        self._rank = rank
        self._capture = capture
        self._intervals = intervals
        self._progress = progress
        self._statistics = statistics
        self._run = restored.run
        self._order_repairs = restored.order_repairs
        self._ordered: tuple[int | None, int | None] | None = None  # in which epoch, and on which connection
        self._has_part = False  # whether this rank has ordered any repair
        self._attach_s = -math.inf  # when an SMP was last looked for to order them of
        self.ledger = Ledger.after(
            options.slots_with_generations,
            restored.snapshot,
            restored.protected,
            only_sealed=restored.only_sealed,
            protect_every=options.protect_every,
            generations=options.generations,
            earlier=restored.earlier,
            abandoned=restored.abandoned,
        )
        self.copies: dict[SnapshotId, SnapshotCopy] = {}
        self.newest: SnapshotCopy | None = None
        self.layout: Layout | None = None
        self.index = 0
        self.pace = Pace(system=rank.system)
        self.episodes = Episodes(log)
        self._reported: Callable[[], StepReport] | None = None  # waits for what all ranks report
        self._planned = False  # the layout fits the state
        self._attempted = False  # in this epoch: the next attempt begins another
        self._layout_changed = False
        self._reserving: Reserving | None = None  # set until every rank may use all slots
        self._usable = 0  # number of slots that every rank may use
        self._ever = False  # slots were usable at some time: since then no failure here ends the job
        self._persist_due = False
        self._enabled = True
        self._parted = False  # this rank has left the others, until all meet again
        self._behind = False  # a snapshot was due to be protected while another was being encoded
        self.copier = Copier(
            rank.client, rank.smp.sealing, rank.engine, self.pace, self._attach_again, self._over, rank.system
        )

    @property
    def is_reserving(self) -> bool:
        """Whether memory is still being reserved: so far there is none, or less than planned."""
        return self._reserving is not None

    # ------------------------------------------------------------------ in every step

    def report(self) -> None:
        """Tell the other ranks how things stand here, if anything is pending. A collective call; does not wait."""
        open_ones = self.ledger.pending or self.ledger.restored or self.is_reserving
        if self._enabled and not self._parted and open_ones and self._reported is None:
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
        try:
            if self._enabled and self._parted and self._rank.agreement.meet(step):
                self._go_on()
            if self._enabled and not self._parted:
                self.apply_reports()
                if is_last:
                    self._catch_up()
                if is_last or self._intervals.rule.is_due(step, self.ledger.protects_next):
                    return self._prepare()
                if self.ledger.pending and self._intervals.rule.is_time(step):
                    self._starve()
        except AgreementLost as error:
            self._part()
            if self._options.strict:
                raise
            text = "no snapshots are taken after step %d, until all ranks have met again: %s"
            self.episodes.begin("ranks", text, step, error, level=logging.ERROR)
        except HoldfastError as error:
            self._part()
            if self._options.strict or not self._ever:
                raise
            self._enabled = False
            log.error("no more snapshots are taken: %s", error)
        except BaseException:  # a signal handler may raise while ranks agree: the others must not wait for this one
            self._part()
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
            self._layout_changed = True
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
        self._reported, self._persist_due = None, everywhere.persists
        if saying := self._intervals.agree(everywhere.interval):
            self.copier.say(saying)
        statistics, rule = self._statistics, self._intervals.rule
        statistics.interval, statistics.overhead, statistics.why = rule.interval, rule.overhead, rule.why()
        states = everywhere.states
        missed = {s for s, state in zip(self.ledger.pending, states, strict=True) if state is SnapshotState.SEALED}
        statistics.protected += states.count(SnapshotState.PROTECTED)
        statistics.failed += states.count(SnapshotState.FAILED) + len(missed.intersection(self.ledger.encoded))
        if SnapshotState.PROTECTED in states:
            self.episodes.end("starved", "snapshots are protected again: step %d", self._progress.step)
        self.ledger = self.ledger.settle(states).repaired(everywhere.repair)
        if self.ledger.restored is None:
            self.episodes.end("repaired", "snapshots are taken again: step %d", self._progress.step)
            self.episodes.end("repair", "the parity of the restored snapshot is repaired, or not needed any more")
        over = [copy.error for snapshot, copy in self.copies.items() if snapshot not in self.ledger.pending]
        self.copies = {s: copy for s, copy in self.copies.items() if s in self.ledger.pending}
        for error in over:
            if isinstance(error, StateChanged):
                self._hear_of(error)
            elif isinstance(error, ReplicasDiffer):
                text = "%s"  # logged once, however many snapshots were pending
                self.episodes.begin("replicas", text, error)
            elif error is not None and self._options.strict and not isinstance(error, LayoutChanged):
                raise error
        if not everywhere.fits:
            self._planned = False
            self._layout_changed = False
        if (reserving := self._reserving) is not None:
            failure = failure_of(lambda: self._note_usable(reserving, everywhere.usable), SmpUnavailable)
            if failure is not None:
                self._without_smp(failure)

    def _catch_up(self) -> None:
        """Wait until pending snapshots are protected here, and tell the other ranks, so that one more finds a slot. A
        collective call; blocks, for `deadline_s` at most."""
        limit_s = self._rank.system.monotonic() + self._options.deadline_s
        self.drain(limit_s)
        self.report()
        self.apply_reports()

    def _report_of_this_rank(self) -> StepReport:
        # Only copies of this epoch count: what did not fit an earlier epoch's layout was the reason for this one.
        present = [copy for snapshot, copy in self.copies.items() if snapshot.epoch == self._progress.epoch]
        return StepReport(
            states=tuple(self._state(snapshot) for snapshot in self.ledger.pending),
            repair=self._repair(),
            fits=not (self._layout_changed or any(isinstance(copy.error, LayoutChanged) for copy in present)),
            interval=self._intervals.wanted(),
            persists=self._rank.client.persist_due,
            usable=self.ledger.slots if self._reserving is None else self._reserving.look(),
        )

    def _repair(self) -> RepairState:
        """The repair of this rank's part of the restored snapshot's parity, as its SMP has posted. It is ordered anew
        in a new epoch, and of an SMP that takes another's place."""
        client, order = self._rank.client, self._order_repairs
        if self.ledger.restored is None or order is None:
            return RepairState.UNDER_WAY
        now = self._rank.system.monotonic()
        if client.connection is None and now - self._attach_s >= REPAIR_EVERY_S:
            self._attach_s = now
            failure_of(lambda: self._rank.smp.attach(self._progress.epoch, self._wait_for_copies), HoldfastError)
        if (place := (client.epoch, client.connection)) != self._ordered:
            try:
                self._has_part, self._ordered = order(), place
            except HoldfastError as error:
                self.episodes.begin("repair", "the parity of the restored snapshot is not being repaired: %s", error)
                return RepairState.UNDER_WAY
        return client.repaired() if self._has_part else RepairState.WHOLE

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

    def _hear_of(self, error: StateChanged) -> None:
        """Have tensors that changed during their copy copied at once from now on, and log it."""
        length = self._capture.copy_at_once(error.names)
        log.warning(
            "%s: from now on such tensors are copied at once as a step begins, which takes %.1f MB more memory and "
            "holds up the loop for that copy",
            error,
            length / 1e6,
        )

    def _prepare(self) -> Due | None:
        """Plan a snapshot for the beginning of the next step, if a slot is free. A collective call."""
        self.newest = None  # if `take` fails here, this rank reports the snapshot as failed; the others carry on
        if not self.ledger.may_begin:
            self._starve()
        if not self.ledger.may_begin or not (self._planned or self._configure()) or not self._has_room():
            self._statistics.skipped += 1
            return None
        assert self.layout is not None  # `_planned`, or just configured
        snapshot, ledger = SnapshotId(self._progress.epoch, self._progress.step), self.ledger
        persist = ledger.protected if self._persist_due else None
        due = Due(
            snapshot,
            ledger.keep,
            ledger.protected,
            ledger.with_parity,
            ledger.protects_next,
            self._intervals.protected_every_s,
            persist if persist is not None and persist.epoch == snapshot.epoch else None,
            self.layout.unit_bytes,
        )
        self._say_whether_it_keeps_up()
        self._intervals.begun(snapshot.step, ledger.protects_next)
        self.ledger = ledger.begin(snapshot)
        self._statistics.taken += 1
        return due

    def _say_whether_it_keeps_up(self) -> None:
        """If one of `protect_every` snapshots is to be protected, log when encoding one takes longer than that."""
        every, ledger = self._options.protect_every, self.ledger
        if every in (1, "auto") or ledger.until:
            return
        if not ledger.protects_next:
            self._behind = True
            text = (
                "%s is still being encoded although %s more snapshots were taken: until encoding keeps up again, fewer "
                "than one in %s is protected"
            )
            self.episodes.begin("behind", text, ledger.encoded[0], every, every)
        elif self._behind:
            self._behind = False  # the next snapshot decides
        else:
            self.episodes.end("behind", "one of %s snapshots is protected again", every)

    def _has_room(self) -> bool:
        """Whether a usable slot is free. Snapshots in slots of an earlier layout are counted, too, so after a change of
        layout it may take until more slots are usable."""
        return len(self.ledger.keep) < self._usable

    def _starve(self) -> None:
        """Log why no snapshot is taken: one before it is kept, or has been on its way for long."""
        if self.ledger.restored is not None and not self.ledger.pending:
            text = (
                "no snapshot is taken until %s, which was restored, is protected again: it and the one that was "
                "protected before take all slots; with slots=3 or more, one more is free"
            )
            self.episodes.begin("repaired", text, self.ledger.restored)
        oldest = next((self.copies[each] for each in self.ledger.pending if each in self.copies), None)
        if oldest is not None and self._rank.system.monotonic() - oldest.begun_s > STARVED_S:
            text = (
                "no snapshot is taken: %s has been waiting for %.0f s to be sealed and protected; is the SMP of a node "
                "slow or stopped? `holdfast status` tells"
            )
            self.episodes.begin("starved", text, oldest.snapshot, self._rank.system.monotonic() - oldest.begun_s)

    # ------------------------------------------------------------------ layouts

    def _configure(self) -> bool:
        """Agree on a layout for the state as it is now, and reserve it. A collective call.

        Every change of layout, and every attempt at one, is an epoch of its own; earlier snapshots stay until a new one
        is protected. Returns False, on every rank, if an SMP is away: then it must be tried again.
        """
        progress = self._progress
        failure = failure_of(lambda: self._rank.smp.attach(progress.epoch, self._wait_for_copies), SmpUnavailable)
        if self._rank.agreement.minimum([int(failure is None)])() == [1]:
            form = self._capture.plan(SnapshotId(progress.epoch, progress.step))
            if self._attempted:
                progress.enter(progress.epoch + 1)
            self._attempted = True
            failure = failure_of(lambda: self._reserve(form.total_bytes), SmpUnavailable)
            if failure is None:
                self._planned = True
                return True
        self._without_smp(failure or SmpUnavailable("the SMP of another node is away"))
        return False

    def _without_smp(self, failure: SmpUnavailable) -> None:
        """Log that there is no layout for now. Raises `failure` if the hook is strict."""
        if self._options.strict:
            raise failure
        text = "no snapshots are taken from step %d on, until the SMPs of all nodes answer: %s"
        self.episodes.begin("layout", text, self._progress.step, failure)

    def _wait_for_copies(self) -> None:
        limit = self._rank.system.monotonic() + self._options.deadline_s
        for copy in self.copies.values():
            copy.reached(CopyState.SEALED, max(0.0, limit - self._rank.system.monotonic()))

    def _reserve(self, slot_bytes: int) -> None:
        """Lay out slots and reserve them, beside the training if that takes long. A collective call."""
        rank = self._rank
        self.stop_reserving()
        self.layout, there = lay_out(
            rank.client,
            rank.agreement,
            self._options.job,
            self._progress.epoch,
            rank.coord,
            slot_bytes,
            self._options.protection,
            self._options.slots_with_generations,
            rank.domains,
            run=self._run,
            parity_slots=self._options.parity_slots,
            protect_every=self._options.protect_every,
        )
        reserving = Reserving(rank.client, self.layout, rank.coord, there, lambda slots: self._pin(reserving, slots))
        self._usable, self._reserving = 0, reserving
        self._intervals.placed(len(self.layout.nodes))
        self.index = [shard.coord for shard in self.layout.node(rank.client.node).shards].index(rank.coord)
        if self.layout.coords[0] == rank.coord:
            self.copier.say(self._intervals.say_plan())
        [usable] = rank.agreement.minimum([reserving.look()])()
        self._note_usable(reserving, usable)
        if not self._usable:
            self._say(
                "memory for snapshots is being reserved beside the training: the first is taken once its slot is there"
            )

    def _note_usable(self, reserving: Reserving, usable: int) -> None:
        """Note how many slots every rank may use; `AWAY` or `REFUSED` if reserving failed on one.

        Raises:
            HoldfastError: memory cannot be reserved, here or for another rank; raised on every rank.
        """
        if usable == AWAY:
            self._planned = False
        if usable in (AWAY, REFUSED):
            self.stop_reserving()
            raise_together(usable, reserving.failure)
        step = self._progress.step
        if usable and not self._usable:
            self._ever = True
            self.episodes.end("layout", "memory is reserved again: snapshots are taken from step %d on", step)
            if not reserving.is_small:
                self._say("memory for the first slot is reserved: snapshots are taken from step %d on", step)
        self._usable = usable
        if usable >= self.ledger.slots:
            self._reserving = None

    def _say(self, text: str, *values: object) -> None:
        """Log, on one rank only, a text that is the same on all."""
        if self.layout is not None and self.layout.coords[0] == self._rank.coord:
            log.warning(text, *values)

    def _pin(self, reserving: Reserving, slots: list[memoryview]) -> None:
        """Have the copy engine register slots, in turns with the other ranks of this node. Runs in the thread that
        reserves slots, or, if they are small, in the training thread."""
        if not reserving.is_small:  # otherwise the training thread runs this, and uses its device anyway
            self._rank.engine.enter_thread()
        self._rank.engine.prepare(slots, reserving.turn)

    def stop_reserving(self, deadline_s: float | None = None) -> None:
        """Stop reserving slots of this layout. With a deadline, block until the reserving thread has ended.

        Raises:
            DeadlineExceeded: it has not ended by then.
        """
        reserving, self._reserving = self._reserving, None
        if reserving is None:
            return
        reserving.close()
        if deadline_s is not None:
            reserving.join(deadline_s)
            if not self._ever:
                self._say("the job ends without a snapshot: memory for the first was still being reserved")

    # ------------------------------------------------------------------ the copier's threads

    def _attach_again(self) -> None:
        """Called by the copy thread before the first copy after the SMP went away."""
        self._rank.smp.attach_again(self._progress.epoch, self.layout)

    def _over(self, copy: SnapshotCopy) -> None:
        """A copy is sealed, or was given up. Called by one of the copier's threads."""
        if copy is self.newest:
            self._rank.client.copying(None)
        self._intervals.sealed(copy)

    # ------------------------------------------------------------------ ranks that lose each other

    def _part(self) -> None:
        """Stop agreeing with the other ranks, so that they do not wait for this one."""
        self._parted = True
        self._reported = None
        self._rank.agreement.leave()

    def _go_on(self) -> None:
        """All ranks have met again: agree on a common state, in a new epoch. A collective call."""
        progress = self._progress
        mine = _Standing(progress.step, progress.epoch, self._intervals.rule.interval, self.ledger)
        texts = self._rank.agreement.gather(encode_json(mine))
        said = [decode_json(_Standing, text, "where a rank stands") for text in texts]
        steps = [each.step for each in said]
        if len(set(steps)) > 1:
            raise ConfigError(f"ranks are at different steps, {steps}: each must call optim.step() equally often")
        progress.enter(max(each.epoch for each in said))
        self._attempted, self._planned, self._layout_changed, self._persist_due = True, False, False, False
        self.stop_reserving()
        self._statistics.failed += len(self.ledger.pending)
        self.ledger = Ledger.together([each.ledger for each in said])
        self.copies = {}
        self._intervals.rule.met(max(each.interval for each in said))
        self._parted = False
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

    def agree_on_end(self, *, keeps: bool, takes: bool, stepped: bool) -> tuple[bool, bool]:
        """All ranks have left their loops well: whether the snapshots are kept, as they are if any rank keeps them; and
        whether a last one can be taken, as all have left after the same step. A collective call; blocks.

        Args:
            keeps, takes: what this rank wants.
            stepped: whether its last step has not been ended yet.
        """
        if not self._enabled or self._parted:
            return keeps, False
        try:
            everywhere = reduced(self._rank.agreement, _Leaving(keeps, takes, stepped, self._progress.step))()
        except AgreementLost:
            self._part()
            return keeps, False
        left_together = everywhere.stepped is not None and everywhere.step is not None
        return everywhere.keeps, everywhere.takes and left_together

    def finish_together(self, keeps: bool) -> bool:
        """End the job here once all ranks have ended well, even if they lost each other, unless one of them keeps its
        snapshots. A collective call. Returns whether they are kept.

        Raises:
            HoldfastError: the job cannot be ended here, and this node's SMP goes on running.
        """
        lost: AgreementLost | None = None
        if self._enabled and not self._parted:
            try:
                return self._finish(keeps)
            except AgreementLost as error:
                lost = error
        if keeps:
            return True
        self._part()
        if not self._rank.agreement.meet_at_end(self._options.deadline_s):
            raise lost or AgreementLost("not all ranks have ended well")
        return self._finish(keeps)

    def _finish(self, keeps: bool) -> bool:
        rank, deadline_s = self._rank, self._options.deadline_s
        if self.newest is not None:
            self.newest.reached(CopyState.SEALED, deadline_s)
        if self._options.keep or (keeps and self.ledger.keep):
            if self.ledger.encoded:
                rank.client.await_outcome(self.ledger.encoded[-1], deadline_s)
            return True
        mine = json.dumps([rank.coord, rank.client.node, self._progress.epoch])
        everyone = [json.loads(text) for text in rank.agreement.gather(mine.encode())]
        on_this_node = [coord for coord, node, _ in everyone if node == rank.client.node]
        if min(on_this_node, key=coordinate_key) == rank.coord:
            rank.smp.finish(max(epoch for _, _, epoch in everyone))
        return False

    def say_what_is_kept(self) -> None:
        """Log, on one rank, that the snapshots stay although the loop raised nothing."""
        if self._rank.agreement.rank:
            return
        copy, ledger = self.newest, self.ledger
        is_sealed = copy is not None and copy.state is CopyState.SEALED
        newest = copy.snapshot if copy is not None and is_sealed else ledger.sealed or ledger.protected
        log.warning(
            "the loop was left before its end, so the job's snapshots stay in memory for the next start (the newest: "
            "%s). If training is over, say snap.finish() before the block ends",
            newest or "none",
        )

    def let_go(self) -> None:
        """Drop all slots, so that whoever still refers to this hook does not keep them mapped: a process may enter
        many."""
        self.newest = None
        self.copies.clear()
        self.copier.let_go()
