"""Which snapshots exist, and whether another may be taken. Pure; the same on every rank, since all ranks see the
same outcomes in the same order.

Departs from reporting only "earliest next step" and "newest protected step" across ranks: with those two numbers a
snapshot that failed on one node looks like one that is slow, and would hold its slot for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from holdfast.smp_daemon.shared.board import SnapshotOutcome
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.limits import MIN_SLOTS


@dataclass(frozen=True, slots=True)
class Ledger:
    """The snapshots that hold slots.

    Attributes:
        slots: slots per shard, at least `MIN_SLOTS`; `ValueError` if there are fewer.
        protected: the newest snapshot that is protected on every node, or was restored; never overwritten.
        older: the one that was known to be protected when `protected`, which may not be, was restored. It is kept too,
            until a younger one is protected.
        pending: younger ones whose outcome is open, oldest first.
        generations: how many protected snapshots are kept, once there are as many. `earlier`: those before
            `protected`, oldest first.
        abandoned: newer than `protected`, which was chosen in their place. They are kept until a younger one is
            protected.
        known: whether `protected` is known to be protected: what was restored may still lack parity.
    """

    slots: int
    protected: SnapshotId | None = None
    older: SnapshotId | None = None
    pending: tuple[SnapshotId, ...] = ()
    known: bool = True
    generations: int = 1
    earlier: tuple[SnapshotId, ...] = ()
    abandoned: tuple[SnapshotId, ...] = ()

    def __post_init__(self) -> None:
        if self.slots < MIN_SLOTS:
            raise ValueError(f"{self.slots} slots cannot keep what a restart may need: give {MIN_SLOTS} or more")

    @property
    def keep(self) -> tuple[SnapshotId, ...]:
        """Every snapshot whose bytes must stay."""
        held = [*self.earlier, self.older, *self.abandoned, self.protected, *self.pending]
        return tuple(dict.fromkeys(snapshot for snapshot in held if snapshot is not None))

    @property
    def sure(self) -> SnapshotId | None:
        """The newest snapshot that is known to be protected on every node."""
        return self.older or (self.protected if self.known else None)

    @property
    def may_begin(self) -> bool:
        """Whether a slot is free."""
        return len(self.keep) < self.slots

    @classmethod
    def restored(
        cls,
        slots: int,
        snapshot: SnapshotId | None,
        older: SnapshotId | None,
        *,
        known: bool,
        generations: int = 1,
        earlier: Sequence[SnapshotId] = (),
        abandoned: Sequence[SnapshotId] = (),
    ) -> Ledger:
        """After `snapshot` was restored. Keeps what there is room for: one slot must be free.

        Args:
            older, known: see the attributes. earlier, abandoned: as well; all that are held, oldest first.
        """
        room = slots - 1 - (snapshot is not None)
        apart = tuple(abandoned)[max(0, len(abandoned) - room) :] if room else ()
        room -= len(apart)
        kept = older if room and not apart else None
        others = [each for each in earlier if each != kept]
        count = min(room - (kept is not None), generations - 1)
        return cls(
            slots,
            snapshot,
            kept,
            known=known,
            generations=generations,
            earlier=tuple(others[max(0, len(others) - count) :]) if count > 0 else (),
            abandoned=apart,
        )

    @classmethod
    def together(cls, ledgers: Sequence[Ledger]) -> Ledger:
        """What ranks go on with that had lost each other: the same on all, from what each has.

        Some may have heard of the last outcomes and others not. What one knows to be protected is so on every node,
        since each has said it. What was open is given up: it may not even have begun everywhere.
        """
        newest = max(ledgers, key=lambda ledger: (ledger.sure is not None, ledger.sure or (0, 0)))
        return replace(newest, pending=())

    def begin(self, snapshot: SnapshotId) -> Ledger:
        """A snapshot takes a slot. Raises `ValueError` if there is none, or if it is not the newest."""
        if not self.may_begin or (self.keep and snapshot <= self.keep[-1]):
            raise ValueError(f"{snapshot} cannot begin: {self.keep} are held in {self.slots} slots")
        return replace(self, pending=(*self.pending, snapshot))

    def settle(self, outcomes: Sequence[SnapshotOutcome]) -> Ledger:
        """Take note of the job-wide outcome of each pending snapshot: the worst that any node reports.

        A newly protected snapshot replaces the one before it and every older pending one; failed ones are
        dropped.
        """
        if len(outcomes) != len(self.pending):
            raise ValueError(f"{len(outcomes)} outcomes for {len(self.pending)} pending snapshots")
        pairs = list(zip(self.pending, outcomes, strict=True))
        done = [snapshot for snapshot, outcome in pairs if outcome is SnapshotOutcome.PROTECTED]
        protected = done[-1] if done else None
        pending = tuple(
            snapshot
            for snapshot, outcome in pairs
            if outcome is SnapshotOutcome.PENDING and (not done or snapshot > done[-1])
        )
        if not done:
            return replace(self, pending=pending)
        before = {*self.earlier, *(s for s in (self.older, self.protected) if s is not None), *done[:-1]}
        earlier = tuple(sorted(before)[1 - self.generations :]) if self.generations > 1 else ()
        return replace(
            self, protected=protected, older=None, pending=pending, known=True, earlier=earlier, abandoned=()
        )
