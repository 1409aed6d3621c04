"""What happens between entering the hook and leaving it, together with the other ranks. For the way through a step see
`snapshot.loop`."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace

from holdfast.smp_daemon.shared.board import MAX_PAUSE_S
from holdfast.smp_daemon.shared.errors import HoldfastError
from holdfast.smp_daemon.shared.goodput import Spent
from holdfast.smp_daemon.shared.identity import epoch_text
from holdfast.smp_daemon.shared.logs import about, get_log, identify, log_here
from holdfast.smp_daemon.shared.plain import from_plain, to_plain
from holdfast.smp_daemon.shared.system import MACHINE, System
from holdfast.snapshot.collective.mesh import AgreementLost
from holdfast.snapshot.collective.reports import ALL, ANY, SAME, reduced
from holdfast.snapshot.first_turns import Checks, FirstTurns
from holdfast.snapshot.interval.control import IntervalController
from holdfast.snapshot.interval.recording import leave, recording_from_environment
from holdfast.snapshot.loop import Loop
from holdfast.snapshot.options import Options
from holdfast.snapshot.progress import Statistics
from holdfast.snapshot.protecting import Protecting
from holdfast.snapshot.rank import Rank
from holdfast.snapshot.resume.arrange import coordinate_key
from holdfast.snapshot.resume.blocks import describe, to_tree
from holdfast.snapshot.resume.restore import Restored, restore
from holdfast.snapshot.state import rng
from holdfast.snapshot.state.adapter import Adapter
from holdfast.snapshot.state.audit import Auditor, orders_from_environment
from holdfast.snapshot.step.capture import Capture
from holdfast.snapshot.step.orders import CopyState
from holdfast.snapshot.step.own_time import OwnTime
from holdfast.snapshot.step.position import Position, says_where_steps_begin

log = get_log(__name__)


SPENT = "spent"
"""Key of the account of the run's time in a snapshot's notes."""


def _spent(restored: Restored, system: System) -> Spent:
    """Where the time of the run went until now."""
    loaded = system.time()
    asked = loaded - (system.monotonic() - restored.clock["enter"])
    if SPENT not in restored.notes:
        return Spent(since=asked, until=asked).restarted(asked, asked, loaded, 0)
    account = from_plain(Spent, restored.notes[SPENT], "the account of the run's time")
    return account.restarted(loaded - system.ran_s(), asked, loaded, restored.steps_again or 0)


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


def enter(
    adapter: Adapter, options: Options, statistics: Statistics, checks: Checks, system: System = MACHINE
) -> Session:
    """Restore if the job has a snapshot, and begin to take snapshots. A collective call; blocks.

    Raises:
        HoldfastError: as `restore`, and as making a `Rank`. Nothing stays open.
    """
    rank = Rank(adapter, options, system)
    drawn = rng.capture()
    rank.heartbeat()
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
        log.info("%s", restored, extra=about(restored.snapshot, tier=restored.tier, how=restored.how))
    if restored.snapshot is not None and says_where_steps_begin(restored.loop) and checks.reading:
        # They are put back as the first step begins. What the script draws before that, such as noise that it uses in
        # all steps, it draws again as at its first start.
        rng.restore(drawn)
    return Session(adapter, options, rank, restored, statistics, checks)


class Session:
    """One rank's session. Used by the training thread.

    Attributes:
        loop: hears the events of the loop. protecting: the decisions that all ranks make together.
        position: where the loop is. first: what is checked of the script, and what the script keeps.
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
        self._adapter = adapter
        step = restored.snapshot.step if restored.snapshot else 0
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
        statistics.spent = _spent(restored, rank.system)
        self._statistics = statistics
        block = to_tree(describe(options.for_start.block, adapter))
        self.position = position = Position(step, restored.loop, block, rank.system)
        self.first = FirstTurns(restored, checks, progress, position, adapter)
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
        self._auditor = self._auditor_if_ordered(checks)
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
        self._is_over = False  # the loop says that training is over, wherever it is left

    def _auditor_if_ordered(self, checks: Checks) -> Auditor | None:
        orders = orders_from_environment()
        if orders is None:
            return None
        rank, at, modules = self.rank.agreement.rank, self.progress, self._adapter.modules()

        def protected() -> int | None:
            newest = self.protecting.ledger.protected
            return newest.step if newest else None

        return Auditor(orders, rank, at.epoch, at.step, modules, self.drain, protected, checks.restored_by_themselves)

    # ------------------------------------------------------------------ what users ask for

    def finish(self) -> None:
        """See `SnapshotHook.finish`."""
        self._is_over = True

    def communicate(self, begins: bool) -> None:
        """The step begins, or stops, communicating: holdfast's copies and traffic wait meanwhile. Never blocks."""
        index = self.protecting.layouts.index
        if begins:
            self.protecting.pace.comm(True)
            self.rank.client.board.pause(index, self.rank.system.monotonic() + MAX_PAUSE_S)
        else:
            self.rank.client.board.resume(index)
            self.protecting.pace.comm(False)

    def drain(self, deadline_s: float) -> bool:
        """See `SnapshotHook.drain`."""
        return self.protecting.drain(self.rank.system.monotonic() + deadline_s) and not self.loop.is_due

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
        self.loop.stop_watching(ended_well=well)
        self._own_time.remove()
        self.rank.smp.say_end(self.progress.step, error)
        protecting.pace.fence()
        goes_on = not self._is_over and self.position.is_under_way  # it was left before its end, as far as it tells
        kept, takes = well and (early or self._options.keep or goes_on), False
        if well:
            kept, takes = self._agree(kept, takes=not early)
        self.loop.leave(takes=kept and takes, goes_on=goes_on)
        try:
            protecting.layouts.stop_reserving(deadline_s)
            protecting.copier.close(deadline_s)
            if self._recording is not None:
                self._recording.close(deadline_s)
            if well:
                kept = self._finish(kept)
                if kept and not self._options.keep:
                    self._say_what_is_kept()
        except HoldfastError as failure:
            if self._options.strict and well:
                raise
            end = "`holdfast gc` removes it" if well else "it holds the job's snapshots"
            log.error("the SMP of this node was left running (%s): %s", end, failure)
        finally:
            if self.rank.agreement.rank == 0 and (account := self._statistics.spent.sentence()):
                log.info("the run so far: %s", account)
            self.rank.close()
            protecting.let_go()

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
        rank, deadline_s = self.rank, self._options.deadline_s
        copy, ledger = self.protecting.newest, self.protecting.ledger
        if copy is not None:
            copy.reached(CopyState.SEALED, deadline_s)
        if self._options.keep or (keeps and ledger.keep):
            if ledger.encoded:
                rank.client.await_outcome(ledger.encoded[-1], deadline_s)
            return True
        mine = json.dumps([rank.coord, rank.client.node, rank.progress.epoch])
        everyone = [json.loads(text) for text in rank.agreement.gather(mine.encode())]
        on_this_node = [coord for coord, node, _ in everyone if node == rank.client.node]
        if min(on_this_node, key=coordinate_key) == rank.coord:
            rank.smp.finish(max(epoch for _, _, epoch in everyone))
        return False

    def _say_what_is_kept(self) -> None:
        """Log, on one rank, that the snapshots stay although the loop raised nothing."""
        if self.rank.agreement.rank:
            return
        copy, ledger = self.protecting.newest, self.protecting.ledger
        is_sealed = copy is not None and copy.state is CopyState.SEALED
        newest = copy.snapshot if copy is not None and is_sealed else ledger.sealed or ledger.protected
        log.warning(
            "the loop was left before its end, so the job's snapshots stay in memory for the next start (the newest: "
            "%s). If training is over, say snap.finish() before the block ends",
            newest or "none",
        )

    def _step_ended(self) -> None:
        self._statistics.spent = replace(self._statistics.spent, own=self._own_time.step_ended())
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
