"""Which snapshots exist, and whether another may be taken. Pure; the same on every rank, since all ranks see the
same states in the same order.

Departs from reporting only "earliest next step" and "newest protected step" across ranks: with those two numbers a
snapshot that failed on one node looks like one that is slow, and would hold its slot for ever.
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
"""Every so many snapshots one is protected; ``"auto"``: the next one whenever no other is being encoded."""


def parity_slots(slots: int, protect_every: ProtectEvery, generations: int = 1) -> int:
    """Parity slots of a node with so many slots per shard: one for each protected snapshot, one for the next, and,
    where there are three slots or more, one for what was restored and is not known to be protected. As many as slots if
    every snapshot is protected."""
    return slots if protect_every == 1 else min(slots, generations + 2)


class SnapshotState(IntEnum):
    """How far a snapshot has come. Ordered so that the job's is the minimum over its ranks."""

    FAILED = 0
    """It will not be sealed."""
    PENDING = 1
    """It is not sealed yet."""
    SEALED = 2
    """And will not be protected: nobody wants that, or to encode it has failed."""
    ENCODING = 3
    """It is sealed, and not protected yet."""
    PROTECTED = 4


@dataclass(frozen=True, slots=True)
class Ledger:
    """The snapshots that hold slots.

    Attributes:
        slots: slots per shard, at least `MIN_SLOTS`; `ValueError` if there are fewer.
        protect_every: which snapshots are protected.
        protected: the newest snapshot that is known to be protected on every node; never overwritten.
        restored: what the job went back to, if that is younger and not known to be protected. It may be, and lack
            parity since: it is kept as `protected` is, until it has all of it again or a younger one is protected.
        sealed: the newest that is sealed on every node, if that is younger than both.
        pending: snapshots that may still be sealed or protected, oldest first. `encoded`: those of them that are to be
            protected.
        until: so many snapshots are only sealed before the next that is to be protected.
        generations: how many protected snapshots are kept, once there are as many. `earlier`: those before
            `protected`, oldest first.
        abandoned: newer than `protected`, which was chosen in their place. They are kept until a younger one is
            protected.
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

        Where all slots are taken, and nothing is pending that may free one, what is only sealed gives up its own.
        """
        named = (*self.earlier, *self.abandoned, self.protected, self.restored, self.sealed, *self.pending)
        held = {snapshot for snapshot in named if snapshot is not None}
        if len(held) >= self.slots and not self.pending:
            held -= {self.sealed}
        return tuple(sorted(held))

    @property
    def with_parity(self) -> tuple[SnapshotId, ...]:
        """Those of `keep` whose parity must stay, or is being made."""
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
        """Whether the next snapshot is to be protected. Where some are not, one is encoded at a time."""
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
        """After `snapshot` was restored. Keeps what there is room for: with three slots or more one is free.

        Args:
            protected: the newest that is known to be protected: `snapshot`, or an older one.
            only_sealed: nobody can have been told that `snapshot` is protected.
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
        """What ranks go on with that had lost each other: the same on all, from what each has.

        Some may have heard of the last states and others not. What one knows to be protected, or sealed, is so on every
        node, since each has said it. What was open is given up: it may not even have begun everywhere.
        """
        newest = max(ledgers, key=lambda ledger: (ledger.protected is not None, ledger.protected or (0, 0)))
        sealed = [each.sealed for each in ledgers if each.sealed is not None]
        kept = [snapshot for snapshot in sealed if all(snapshot in ledger.keep for ledger in ledgers)]
        best = max((each for each in kept if newest.protected is None or each > newest.protected), default=None)
        restored = newest.restored if all(newest.restored in ledger.keep for ledger in ledgers) else None
        return replace(newest, restored=restored, sealed=best, pending=(), encoded=(), until=0)

    def repaired(self, state: RepairState) -> Ledger:
        """Take note of how far the parity of `restored` is, on all nodes. What cannot have it again is only sealed."""
        if self.restored is None or state is RepairState.UNDER_WAY:
            return self
        if state is RepairState.HOPELESS:
            return replace(self, restored=None, sealed=self.sealed or self.restored)
        return self._protects(self.restored, [self.protected])

    def begin(self, snapshot: SnapshotId) -> Ledger:
        """A snapshot takes a slot. Raises `ValueError` if there is none, or if it is not the newest."""
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
        """Take note of the job-wide state of each pending snapshot: the least that any rank reports.

        A newly protected snapshot replaces the one before it and every older one; one that is sealed replaces those
        before it that nobody encodes. Failed ones are dropped, but for what is sealed of them.
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
        """`snapshot` is protected, and takes the place of those before it."""
        older = {*self.earlier, *(each for each in before if each is not None)}
        earlier = tuple(sorted(older)[1 - self.generations :]) if self.generations > 1 else ()
        return replace(self, protected=snapshot, restored=None, earlier=earlier, abandoned=())
