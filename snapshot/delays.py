"""Says, once each time, why snapshots are taken or protected less often than was asked."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.limits import slowest_s
from holdfast.smp_daemon.shared.logs import Episodes
from holdfast.snapshot.step.ledger import Ledger, ProtectEvery
from holdfast.snapshot.step.orders import SnapshotCopy

STARVED_S = 30.0
"""How long a snapshot may stay pending while no slot is free for another, in seconds, before that is logged;
longer for one of many bytes."""


@dataclass(eq=False)
class Delays:
    """Used by the training thread."""

    _episodes: Episodes
    _protect_every: ProtectEvery
    _behind: bool = False  # a snapshot was due to be protected while another was being encoded

    def note_settled(self, ledger: Ledger, *, protected: bool, unprotected: Collection[SnapshotId]) -> None:
        """All ranks have reported. Log if what was to be protected could not be, and if it can be again.

        Args:
            ledger: what they know now. protected: a snapshot has just become protected.
            unprotected: those that were to be protected, and are only sealed.
        """
        if protected:
            for key in ("starved", "unprotected"):
                self._episodes.end(key, "snapshots are protected again: %s", ledger.protected)
        elif unprotected:
            text = (
                "%s is sealed, and could not be protected: until one is, a node that is lost takes the steps since %s "
                "with it; `holdfast status` and the logs of the SMPs say why"
            )
            self._episodes.begin("unprotected", text, max(unprotected), ledger.protected or "the start")

    def note_due(self, ledger: Ledger) -> None:
        """A snapshot is due. If one of `protect_every` is to be protected, log when encoding one takes longer than
        that."""
        every = self._protect_every
        if every in (1, "auto") or ledger.until:
            return
        if not ledger.protects_next:
            self._behind = True
            text = (
                "%s is still being encoded although %s more snapshots were taken: until encoding keeps up again, fewer "
                "than one in %s is protected"
            )
            self._episodes.begin("behind", text, ledger.encoded[0], every, every)
        elif self._behind:
            self._behind = False  # the next snapshot decides
        else:
            self._episodes.end("behind", "one of %s snapshots is protected again", every)

    def note_skipped(self, ledger: Ledger, oldest: SnapshotCopy | None, moved_bytes: int, now_s: float) -> None:
        """None is taken although one is due: a snapshot before it is kept, or has been on its way for long.

        Args:
            oldest: the oldest copy that is pending. moved_bytes: what a node copies or sends for a snapshot, at most.
            now_s: the time.
        """
        if ledger.restored is not None and not ledger.pending:
            text = (
                "no snapshot is taken until %s, which was restored, is protected again: it and the one that was "
                "protected before take all slots; with slots=3 or more, one more is free"
            )
            self._episodes.begin("repaired", text, ledger.restored)
        if oldest is not None and now_s - oldest.begun_s > STARVED_S + slowest_s(moved_bytes):
            text = (
                "no snapshot is taken: %s has been waiting for %.0f s to be sealed and protected; is the SMP of a node "
                "slow or stopped? `holdfast status` tells"
            )
            self._episodes.begin("starved", text, oldest.snapshot, now_s - oldest.begun_s)
