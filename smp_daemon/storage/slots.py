"""The life cycle of slots, as a state machine without I/O.

``free -> writing | receiving -> sealed -> free``: a slot holds bytes of at most one snapshot. Whether a sealed snapshot
is also protected is a matter of the whole group, so it stands with the snapshot (`smp_daemon.service`), not with the
slot.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from holdfast.smp_daemon.shared.errors import NoFreeSlot
from holdfast.smp_daemon.shared.layout import SnapshotId


class SlotState(StrEnum):
    """What a slot's bytes are worth."""

    FREE = "free"
    WRITING = "writing"
    """By the trainer whose shard it is."""
    RECEIVING = "receiving"
    """By this SMP, from elsewhere. Whoever takes such a slot away gives it another file: two would write into one."""
    SEALED = "sealed"


@dataclass(slots=True)
class Slot:
    """One slot of a pool. `snapshot` is None exactly while it is free."""

    index: int
    bytes: int
    state: SlotState = SlotState.FREE
    snapshot: SnapshotId | None = None

    @property
    def is_being_filled(self) -> bool:
        """Whether somebody is at work to fill it, a trainer or this SMP."""
        return self.state in (SlotState.WRITING, SlotState.RECEIVING)

    def free(self) -> None:
        """Give the slot up, whatever it holds."""
        self.state = SlotState.FREE
        self.snapshot = None


class SlotPool:
    """The slots of one shard, or of a node's parity. Not thread-safe: the owner holds a lock."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.slots: list[Slot] = []

    def add(self, length: int) -> Slot:
        """A new free slot of `length` bytes."""
        taken = {slot.index for slot in self.slots}
        slot = Slot(next(i for i in range(len(taken) + 1) if i not in taken), length)
        self.slots.append(slot)
        return slot

    def begin(self, snapshot: SnapshotId, length: int, state: SlotState = SlotState.WRITING) -> Slot:
        """Take a free slot of `length` bytes for `snapshot`; an earlier attempt at the same snapshot is given up.

        Args:
            state: ``WRITING`` or ``RECEIVING``.

        Raises:
            NoFreeSlot: every slot of that length holds another snapshot.
        """
        earlier = self.find(snapshot)
        if earlier is not None:
            earlier.free()
        for slot in self.slots:
            if slot.state is SlotState.FREE and slot.bytes == length:
                slot.state = state
                slot.snapshot = snapshot
                return slot
        held = ", ".join(str(slot.snapshot) for slot in self.slots if slot.snapshot)
        raise NoFreeSlot(f"no free slot of {length} bytes for {snapshot} of {self.name}: held are {held or 'none'}")

    def seal(self, slot: Slot) -> None:
        """All bytes of the slot's snapshot are there, with digests."""
        if not slot.is_being_filled:
            raise ValueError(f"slot {slot.index} of {self.name} is {slot.state}: nothing is being written into it")
        slot.state = SlotState.SEALED

    def find(self, snapshot: SnapshotId, state: SlotState | None = None) -> Slot | None:
        """The slot that holds `snapshot` (in `state`, if given)."""
        for slot in self.slots:
            if slot.snapshot == snapshot and state in (None, slot.state):
                return slot
        return None

    def outdated(self, keep: Collection[SnapshotId], before: SnapshotId) -> list[Slot]:
        """Sealed slots of snapshots older than `before` that are not in `keep`: they may be freed."""
        return [
            slot
            for slot in self.slots
            if slot.state is SlotState.SEALED
            and slot.snapshot is not None
            and slot.snapshot < before
            and slot.snapshot not in keep
        ]
