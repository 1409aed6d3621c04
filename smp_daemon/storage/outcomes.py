"""What becomes of the snapshots of an epoch on this node: which shards of each are sealed, and whether it is protected,
has failed, or is given up. Trainers read the outcomes on the board.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from holdfast.smp_daemon.shared.board import Board, SnapshotOutcome
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.logs import Episodes, about, get_log
from holdfast.smp_daemon.storage.job_state import JobState

log = get_log(__name__)


@dataclass(slots=True)
class SnapshotProgress:
    """The progress of one snapshot of this epoch on this node."""

    sealed: set[str] = field(default_factory=set)
    outcome: SnapshotOutcome = SnapshotOutcome.PENDING


class Outcomes:
    """The snapshots that this node takes part in. Thread-safe; `changed` is the store's lock, which guards all here.

    Attributes:
        board: of the current epoch; see `enter`.
    """

    def __init__(
        self,
        changed: threading.Condition,
        board: Board,
        state: JobState,
        on_protected: Callable[[SnapshotId], None],
    ) -> None:
        """`on_protected`: called with the lock held once a snapshot is posted as protected."""
        self.board = board
        self._changed = changed
        self._state = state
        self._on_protected = on_protected
        self._failures = Episodes(log)
        self._progress: dict[SnapshotId, SnapshotProgress] = {}
        self._given_up: Callable[[SnapshotId], bool] = lambda snapshot: False  # whose parity is not wanted any more

    def adopt(self) -> None:
        """Go on with the board of a predecessor. What it had not finished has failed."""
        self.board.post_leaving(False)  # nobody has asked this SMP yet
        if self.board.epoch == self._state.epoch:
            self.board.fail_pending()
            self.board.post_repair(None)  # trainers order again what the predecessor had not done
        else:  # the predecessor wrote a new epoch to `node.json`, and died before the board
            self.board.reset(self._state.epoch)
        failpoint("adopt.board")

    def leave(self) -> None:
        """The epoch is over: whatever is pending is given up."""
        with self._changed:
            self._progress.clear()
            self._given_up = lambda snapshot: False

    def enter(self) -> None:
        """Begin the board of the current epoch."""
        with self._changed:
            self.board = self.board.succeeded(self._state.epoch)

    def expect(self, snapshot: SnapshotId) -> None:
        """The trainers have handed over a shard of a snapshot: it is pending."""
        with self._changed:
            self._progress.setdefault(snapshot, SnapshotProgress())
            self.board.post(snapshot.step, SnapshotOutcome.PENDING)

    def note_sealed(self, snapshot: SnapshotId, coord: str) -> None:
        """A shard of a snapshot is sealed."""
        with self._changed:
            self._progress.setdefault(snapshot, SnapshotProgress()).sealed.add(coord)

    def is_sealed(self, snapshot: SnapshotId, coords: Collection[str]) -> bool:
        """Whether these shards of a snapshot are sealed, and no others."""
        with self._changed:
            progress = self._progress.get(snapshot)
            return progress is not None and progress.sealed == set(coords)

    def is_wanted(self, snapshot: SnapshotId) -> bool:
        """Whether a snapshot of this epoch may still become protected: it is pending and was not given up."""
        with self._changed:
            progress = self._progress.get(snapshot)
            pending = progress is not None and progress.outcome is SnapshotOutcome.PENDING
            return pending and snapshot.epoch == self._state.epoch

    def is_given_up(self, snapshot: SnapshotId) -> bool:
        """Whether the trainers of this epoch have said that a snapshot needs no parity any more."""
        with self._changed:
            return self._given_up(snapshot)

    def is_open(self, snapshot: SnapshotId) -> bool:
        """Whether this node took part in a snapshot of this epoch, and has not posted it as protected."""
        with self._changed:
            progress = self._progress.get(snapshot)
            outcome = progress.outcome if progress is not None else self.board.posted(snapshot.step)
            return outcome is not None and outcome is not SnapshotOutcome.PROTECTED

    def protect(self, snapshot: SnapshotId) -> None:
        """Post that a pending snapshot is protected, as far as this node's group is concerned."""
        with self._changed:
            self._post(snapshot, SnapshotOutcome.PROTECTED)
            failpoint("outcome.protected", snapshot.step)
            self._on_protected(snapshot)
            self._changed.notify_all()
            self._failures.end("snapshots", "snapshots are protected again: %s", snapshot, extra=about(snapshot))

    def fail(self, snapshot: SnapshotId, reason: str) -> None:
        """Post that `snapshot` will not be protected. The trainers will agree to give it up."""
        with self._changed:
            if not self.is_wanted(snapshot):
                return
            self._post(snapshot, SnapshotOutcome.FAILED)
            failpoint("outcome.failed", snapshot.step)
            self._changed.notify_all()
        self._failures.begin("snapshots", "%s failed: %s", snapshot, reason, extra=about(snapshot, reason=reason))

    def forget(self, gone: Callable[[SnapshotId], bool]) -> None:
        """Forget the snapshots for which `gone` is True: the trainers keep them no more."""
        with self._changed:
            self._progress = {k: v for k, v in self._progress.items() if not gone(k)}

    def give_up(self, given_up: Callable[[SnapshotId], bool]) -> None:
        """The trainers want no parity of the snapshots for which `given_up` is True: those that are pending fail."""
        with self._changed:
            self._given_up = given_up
            for snapshot, progress in self._progress.items():
                if given_up(snapshot) and progress.outcome is SnapshotOutcome.PENDING:
                    self._post(snapshot, SnapshotOutcome.FAILED)

    def _post(self, snapshot: SnapshotId, outcome: SnapshotOutcome) -> None:
        self._progress[snapshot].outcome = outcome
        self.board.post(snapshot.step, outcome)
