"""How a rank leaves the job: together with the others, once all have left their loops."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from holdfast.smp_daemon.shared.logs import get_log
from holdfast.snapshot.collective.mesh import AgreementLost
from holdfast.snapshot.collective.reports import ALL, ANY, SAME, reduced
from holdfast.snapshot.options import Options
from holdfast.snapshot.protecting import Protecting
from holdfast.snapshot.rank import Rank
from holdfast.snapshot.resume.arrange import coordinate_key
from holdfast.snapshot.step.orders import CopyState

log = get_log(__name__)


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


class Ending:
    """Used by the training thread, once the loop was left. What it is told of the snapshots is `protecting`'s."""

    def __init__(self, options: Options, rank: Rank, protecting: Protecting) -> None:
        self._options = options
        self._rank = rank
        self._protecting = protecting

    def agree(self, *, keeps: bool, takes: bool, stepped: bool) -> tuple[bool, bool]:
        """All ranks have left their loops well: whether the snapshots are kept, as they are if any rank keeps them; and
        whether a last one can be taken, as all have left after the same step. A collective call; blocks.

        Args:
            keeps, takes: what this rank wants.
            stepped: whether its last step has not been ended yet.
        """
        if not self._protecting.is_together:
            return keeps, False
        try:
            everywhere = reduced(self._rank.agreement, _Leaving(keeps, takes, stepped, self._rank.progress.step))()
        except AgreementLost:
            self._protecting.part()
            return keeps, False
        left_together = everywhere.stepped is not None and everywhere.step is not None
        return everywhere.keeps, everywhere.takes and left_together

    def finish(self, keeps: bool) -> bool:
        """End the job here once all ranks have ended well, even if they lost each other, unless one of them keeps its
        snapshots. A collective call. Returns whether they are kept.

        Raises:
            HoldfastError: the job cannot be ended here, and this node's SMP goes on running.
        """
        lost: AgreementLost | None = None
        if self._protecting.is_together:
            try:
                return self._finish(keeps)
            except AgreementLost as error:
                lost = error
        if keeps:
            return True
        self._protecting.part()
        if not self._rank.agreement.meet_at_end(self._options.deadline_s):
            raise lost or AgreementLost("not all ranks have ended well")
        return self._finish(keeps)

    def _finish(self, keeps: bool) -> bool:
        rank, deadline_s = self._rank, self._options.deadline_s
        copy, ledger = self._protecting.newest, self._protecting.ledger
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

    def say_what_is_kept(self) -> None:
        """Log, on one rank, that the snapshots stay although the loop raised nothing."""
        if self._rank.agreement.rank:
            return
        copy, ledger = self._protecting.newest, self._protecting.ledger
        is_sealed = copy is not None and copy.state is CopyState.SEALED
        newest = copy.snapshot if copy is not None and is_sealed else ledger.sealed or ledger.protected
        log.warning(
            "the loop was left before its end, so the job's snapshots stay in memory for the next start (the newest: "
            "%s). If training is over, say snap.finish() before the block ends",
            newest or "none",
        )
