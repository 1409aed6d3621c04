"""Which snapshots exist, and whether another may be taken. Pure; the same on every rank, since all ranks see the
same states in the same order.

Ranks report more than "earliest next step" and "newest protected step": with those two numbers alone a snapshot that
failed on one node would look like one that is slow, and would hold its slot for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Literal

from holdfast.smp_daemon.shared.board import RepairState
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.limits import MIN_SLOTS

ProtectEvery = int | Literal["auto"]
"""One of this many snapshots is protected; ``"auto"``: the next one whenever no other is being encoded."""


def parity_slots(slots: int, protect_every: ProtectEvery, generations: int = 1) -> int:
    """Parity slots of a node with `slots` slots per shard: one for each protected snapshot, one for the next, and, with
    three slots or more, one for what was restored and is not known to be protected. As many as slots if every snapshot
    is protected."""
    return slots if protect_every == 1 else min(slots, generations + 2)


class SnapshotState(IntEnum):
    """How far a snapshot has come. Ordered so that the job's is the minimum over its ranks."""

    FAILED = 0
    """It will not be sealed."""
    PENDING = 1
    """It is not sealed yet."""
    SEALED = 2
    """It is sealed and will not be protected, either because it need not be or because encoding it failed."""
    ENCODING = 3
    """It is sealed, and not protected yet."""
    PROTECTED = 4


@dataclass(frozen=True, slots=True)
class Ledger:
    """The snapshots that hold slots.

    Attributes:
        slots: slots per shard, at least `MIN_SLOTS`; fewer raise `ValueError`.
        protect_every: which snapshots are protected.
        protected: the newest snapshot that is known to be protected on every node; never overwritten.
        restored: the snapshot that the job went back to, if it is younger and not known to be protected. It may have
            been protected and lack parity since: it is kept as `protected` is, until its parity is whole again or a
            younger one is protected.
        sealed: the newest snapshot that is sealed on every node, if it is younger than both.
        pending: snapshots that may still be sealed or protected, oldest first. `encoded`: those of them that are to be
            protected.
        until: how many more snapshots are only sealed before the next that is to be protected.
        generations: how many protected snapshots are kept, once there are that many. `earlier`: those before
            `protected`, oldest first.
        abandoned: snapshots newer than the one that was restored, which was chosen instead of them. They are kept until
            a younger one is protected.
    """

    slots: int
    protected: SnapshotId | None = None
    restored: SnapshotId | None = None
    sealed: SnapshotId | None = None
    pending: tuple[SnapshotId, ...] = ()
    encoded: tuple[SnapshotId, ...] = ()
    protect_every: ProtectEvery = 1
    until: int = 0
    generations: int = 1
    earlier: tuple[SnapshotId, ...] = ()
    abandoned: tuple[SnapshotId, ...] = ()

    def __post_init__(self) -> None:
        if self.slots < MIN_SLOTS:
            raise ValueError(
                f"{self.slots} slots cannot hold a protected snapshot and another: give {MIN_SLOTS} or more"
            )

    @property
    def keep(self) -> tuple[SnapshotId, ...]:
        """Every snapshot whose bytes must stay when another begins, oldest first.

        If all slots are taken, and nothing is pending that may free one, a snapshot that is only sealed gives up its
        slot.
        """
        named = (*self.earlier, *self.abandoned, self.protected, self.restored, self.sealed, *self.pending)
        held = {snapshot for snapshot in named if snapshot is not None}
        if len(held) >= self.slots and not self.pending:
            held -= {self.sealed}
        return tuple(sorted(held))

    @property
    def newest(self) -> SnapshotId | None:
        """The newest snapshot that is sealed on every node."""
        return self.sealed or self.restored or self.protected

    @property
    def with_parity(self) -> tuple[SnapshotId, ...]:
        """The snapshots of `keep` whose parity must stay, or is being made."""
        if self.protect_every == 1:
            return self.keep
        wanted = {*self.earlier, self.protected, self.restored, *self.encoded}
        return tuple(snapshot for snapshot in self.keep if snapshot in wanted)

    @property
    def may_begin(self) -> bool:
        """Whether a slot is free."""
        return len(self.keep) < self.slots

    @property
    def protects_next(self) -> bool:
        """Whether the next snapshot is to be protected. Unless all are, one is encoded at a time."""
        return self.protect_every == 1 or (not self.until and not self.encoded)

    @classmethod
    def after(
        cls,
        slots: int,
        snapshot: SnapshotId | None,
        protected: SnapshotId | None,
        *,
        only_sealed: bool = False,
        protect_every: ProtectEvery = 1,
        generations: int = 1,
        earlier: Sequence[SnapshotId] = (),
        abandoned: Sequence[SnapshotId] = (),
    ) -> Ledger:
        """The ledger after `snapshot` was restored. Keeps as many snapshots as there is room for: with three slots or
        more one is free.

        Args:
            protected: the newest snapshot known to be protected: `snapshot`, or an older one.
            only_sealed: whether nobody can have been told that `snapshot` is protected.
            earlier, abandoned: see the attributes; all that are held, oldest first.
        """
        room = slots - 1 - (snapshot is not None)
        apart = tuple(abandoned)[max(0, len(abandoned) - room) :] if room else ()
        room -= len(apart)
        if protected != snapshot and apart:
            protected = None
        room -= protected not in (None, snapshot)
        others = [each for each in earlier if each != protected]
        count = min(room, generations - 1)
        younger = snapshot if snapshot != protected else None
        return cls(
            slots,
            protected,
            None if only_sealed else younger,
            younger if only_sealed else None,
            protect_every=protect_every,
            generations=generations,
            earlier=tuple(others[max(0, len(others) - count) :]) if count > 0 else (),
            abandoned=apart,
        )

    @classmethod
    def together(cls, ledgers: Sequence[Ledger]) -> Ledger:
        """The common ledger of ranks that had lost each other, made from all of theirs; the same on every rank.

        Some may have heard of the last states and others not. A snapshot that one rank knows to be protected, or
        sealed, is so on every node, since each has reported it. Pending snapshots are given up: they may not even have
        begun everywhere.
        """
        newest = max(ledgers, key=lambda ledger: (ledger.protected is not None, ledger.protected or (0, 0)))
        sealed = [each.sealed for each in ledgers if each.sealed is not None]
        kept = [snapshot for snapshot in sealed if all(snapshot in ledger.keep for ledger in ledgers)]
        best = max((each for each in kept if newest.protected is None or each > newest.protected), default=None)
        restored = newest.restored if all(newest.restored in ledger.keep for ledger in ledgers) else None
        return replace(newest, restored=restored, sealed=best, pending=(), encoded=(), until=0)

    def repaired(self, state: RepairState) -> Ledger:
        """Apply how far the parity of `restored` is repaired on all nodes. If it cannot be, the snapshot is only
        sealed."""
        if self.restored is None or state is RepairState.UNDER_WAY:
            return self
        if state is RepairState.HOPELESS:
            return replace(self, restored=None, sealed=self.sealed or self.restored)
        return self._protects(self.restored, [self.protected])

    def begin(self, snapshot: SnapshotId) -> Ledger:
        """Give a slot to `snapshot`. Raises `ValueError` if none is free, or if it is not the newest."""
        keep = self.keep
        if len(keep) >= self.slots or (keep and snapshot <= keep[-1]):
            raise ValueError(f"{snapshot} cannot begin: {keep} are held in {self.slots} slots")
        protects = self.protects_next
        every = self.protect_every if isinstance(self.protect_every, int) else 1
        return replace(
            self,
            sealed=self.sealed if self.sealed in keep else None,
            pending=(*self.pending, snapshot),
            encoded=(*self.encoded, snapshot) if protects else self.encoded,
            until=every - 1 if protects else max(0, self.until - 1),
        )

    def settle(self, states: Sequence[SnapshotState]) -> Ledger:
        """Apply the job-wide state of each pending snapshot: the minimum of what the ranks report.

        A newly protected snapshot replaces the one before it and every older one; a sealed one replaces those before it
        that are not being encoded. Failed ones are dropped; one whose encoding failed still counts as sealed.
        """
        if len(states) != len(self.pending):
            raise ValueError(f"{len(states)} states for {len(self.pending)} pending snapshots")
        known = dict(zip(self.pending, states, strict=True))
        done = [snapshot for snapshot, state in known.items() if state is SnapshotState.PROTECTED]
        sealed = [snapshot for snapshot, state in known.items() if state >= SnapshotState.SEALED]
        newest = max((each for each in (*sealed, self.sealed) if each is not None), default=None)
        floor = done[-1] if done else self.restored or self.protected
        open_states = (SnapshotState.PENDING, SnapshotState.ENCODING)
        pending = tuple(s for s, state in known.items() if state in open_states and not (done and s < done[-1]))
        failed = any(s not in pending and known[s] is not SnapshotState.PROTECTED for s in self.encoded)
        settled = replace(
            self,
            sealed=newest if newest is not None and (floor is None or newest > floor) else None,
            pending=pending,
            encoded=tuple(snapshot for snapshot in self.encoded if snapshot in pending),
            until=0 if failed else self.until,
        )
        return settled._protects(done[-1], [self.protected, self.restored, *done[:-1]]) if done else settled

    def _protects(self, snapshot: SnapshotId, before: Sequence[SnapshotId | None]) -> Ledger:
        """`snapshot` is protected, and replaces those in `before`."""
        older = {*self.earlier, *(each for each in before if each is not None)}
        earlier = tuple(sorted(older)[1 - self.generations :]) if self.generations > 1 else ()
        return replace(self, protected=snapshot, restored=None, earlier=earlier, abandoned=())
