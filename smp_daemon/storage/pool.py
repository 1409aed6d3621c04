"""The slots of one shard, or of one parity: their life cycle (`SlotPool`) and their files on tmpfs (`SlotFilePool`).

``free -> writing | receiving -> sealed -> free``: a slot holds bytes of at most one snapshot. Whether a sealed snapshot
is also protected is a matter of the whole group, so that is noted in the `Store` and not in the slot.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from holdfast.smp_daemon.shared.budget import Budget, wipe
from holdfast.smp_daemon.shared.errors import ArenaTooSmall, NoFreeSlot, ProtocolError
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.records import write_json
from holdfast.smp_daemon.shared.system import MACHINE, System
from holdfast.smp_daemon.storage.numa import prefer

SHMEM_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")

log = get_log(__name__)


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


class SlotFilePool(SlotPool):
    """A slot pool and its files. Slots of other lengths may remain for as long as their snapshots are kept.

    Attributes:
        near: the NUMA node on which new files are made; None: any.
    """

    def __init__(
        self, arena: Path, name: str, suffix: str, budget: Budget, zero: bool, system: System = MACHINE
    ) -> None:
        """`zero`: what is given up is overwritten with zeros."""
        super().__init__(name)
        self.near: int | None = None
        self._budget = budget
        self._zero = zero
        self._system = system
        self.arena = arena
        self.suffix = suffix
        self._maps: dict[int, mmap.mmap] = {}
        self._abandoned: set[int] = set()

    def path(self, slot: Slot) -> Path:
        """The slot's file."""
        return self.arena / f"{self.name}.{slot.index}.{self.suffix}"

    def path_of(self, snapshot: SnapshotId) -> str:
        """Name of the file that holds `snapshot`, sealed. Raises `ProtocolError` if none does."""
        slot = self.find(snapshot, SlotState.SEALED)
        if slot is None:
            raise ProtocolError(f"{snapshot} of {self.name} is not here")
        return self.path(slot).name

    def record_path(self, slot: Slot) -> Path:
        """The slot's commit record."""
        return self.arena / f"{self.name}.{slot.index}.{self.suffix}.json"

    def view(self, slot: Slot) -> memoryview:
        """The slot's bytes, mapped."""
        mapped = self._maps.get(slot.index)
        if mapped is None:
            mapped = self._maps[slot.index] = _map(self.path(slot), slot.bytes, self._system)
        return memoryview(mapped)

    def create(self, length: int) -> Slot:
        """A new slot whose file has all its memory reserved.

        Raises:
            ArenaTooSmall: the file system is full, or more than the arena may take would be taken.
        """
        self._budget.take(length)
        slot = self.add(length)
        self.record_path(slot).unlink(missing_ok=True)  # of a file that somebody else has deleted
        try:
            _reserve(self.path(slot), length, self._system, self.near)
        except BaseException:
            self._drop(slot)
            raise
        return slot

    def commit(self, slot: Slot, record: Any) -> None:
        """Write the commit record: from here on the slot counts.

        Raises:
            ArenaTooSmall: it cannot be written; the slot is as it was.
        """
        before = slot.state
        self.seal(slot)
        try:
            write_json(self.record_path(slot), record)
        except ArenaTooSmall:
            slot.state = before
            raise

    def discard(self, slot: Slot) -> None:
        """Free the slot. Its commit record goes first, so a crash in between leaves a free slot."""
        self.record_path(slot).unlink(missing_ok=True)
        if slot.state is not SlotState.FREE:
            self._wipe(slot)
        failpoint("slot.freed", slot.snapshot.step if slot.snapshot else -1)
        slot.free()

    def abandon(self, slot: Slot) -> None:
        """Free the slot of a writer that may not have noticed. In this epoch nobody else writes; see `Arena.fence`."""
        self.discard(slot)
        self._wipe(slot)
        self._abandoned.add(slot.index)

    def is_abandoned(self, slot: Slot) -> bool:
        """Whether a writer of this epoch may still write into the slot, which is free."""
        return slot.state is SlotState.FREE and slot.index in self._abandoned

    def is_at(self, slot: Slot, view: memoryview) -> bool:
        """Whether `view` is still the slot's memory: not once somebody took the slot away."""
        return slot in self.slots and self._maps.get(slot.index) is view.obj

    def replace(self, slot: Slot) -> None:
        """Free the slot and give it a new file, so that whoever still maps the old one writes into nothing."""
        self.discard(slot)
        self._forget(slot)
        try:
            _reserve(self.path(slot), slot.bytes, self._system, self.near)
        except BaseException:  # whoever maps the old file may still hold its memory; `Arena.reserve` makes a new one
            self._drop(slot)
            raise

    def remove(self, slot: Slot) -> None:
        """Delete the slot and its file."""
        self.discard(slot)
        if self.is_abandoned(slot):
            self._wipe(slot)
        self._forget(slot)
        self._drop(slot)

    def _drop(self, slot: Slot) -> None:
        self.slots.remove(slot)
        self._budget.give(slot.bytes)

    def _wipe(self, slot: Slot) -> None:
        if self._zero and slot.bytes:
            wipe(self.view(slot))

    def _forget(self, slot: Slot) -> None:
        self._maps.pop(slot.index, None)
        self._abandoned.discard(slot.index)
        self.path(slot).unlink(missing_ok=True)
        failpoint("slot.removed")


def room(path: Path, system: System = MACHINE) -> int:
    """Bytes that its file system has left."""
    status = system.os.statvfs(path)
    return int(status.f_bavail * status.f_frsize)


def too_small(path: Path, need: int, left: int) -> ArenaTooSmall:
    """The error that says what to do."""
    return ArenaTooSmall(
        f"the arena {path} needs {need:,} bytes more and its file system has {left:,} left: enlarge it "
        f"(mount -o remount,size=... /dev/shm; docker run --shm-size=...; Kubernetes: emptyDir medium Memory), "
        "or use fewer slots or generations (HOLDFAST_GENERATIONS)"
    )


def _reserve(path: Path, length: int, system: System, near: int | None) -> None:
    """A new file of `length` bytes, all of them allocated now: later writes cannot fail with SIGBUS."""
    left = room(path.parent, system)
    if length > left:  # or everything would be filled before that is noticed
        raise too_small(path.parent, length, left)
    fd = system.os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        failpoint("slot.opened")
        if near is not None:
            _bring_near(fd, length, near, system)
        _populate_huge(fd, length, system)
        system.os.posix_fallocate(fd, 0, length)
    except OSError as error:
        path.unlink()
        if error.errno == errno.ENOSPC:
            raise too_small(path.parent, length, room(path.parent, system)) from error
        raise
    finally:
        system.os.close(fd)
    failpoint("slot.made")


def _bring_near(fd: int, length: int, node: int, system: System) -> None:
    """Have a new file's pages made on a NUMA node, where they are copied to from a device of that node."""
    system.os.ftruncate(fd, length)
    with system.mmap.mmap(fd, length) as mapped:
        try:
            prefer(mapped, node)
        except OSError as error:
            log.warning("slots are not placed on NUMA node %d: %s", node, error)


def _populate_huge(fd: int, length: int, system: System) -> None:
    """Touch all of a new file in huge pages, where the kernel gives them to tmpfs on request.

    Only the first touch decides: what `posix_fallocate` has made of small pages stays so. Where they are refused, or
    there is no room, nothing is lost: the caller allocates what is missing, and sees the error.
    """
    if not _gives_huge_pages():
        return
    system.os.ftruncate(fd, length)
    with system.mmap.mmap(fd, length) as mapped:
        try:
            mapped.madvise(mmap.MADV_HUGEPAGE)
            system.populate(mapped)
        except OSError as error:
            log.debug("no huge pages: %s", error)


def _gives_huge_pages() -> bool:
    """Whether tmpfs gets huge pages if it is asked to, as Linux says it."""
    try:
        return "[advise]" in SHMEM_HUGE.read_text()
    except OSError:
        return False


def _map(path: Path, length: int, system: System) -> mmap.mmap:
    fd = system.os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        mapped: mmap.mmap = system.mmap.mmap(fd, length)
    finally:
        system.os.close(fd)
    mapped.madvise(mmap.MADV_DONTDUMP)
    try:
        system.populate(mapped)
    except OSError as error:
        log.debug("a slot is not touched ahead of time, and the first use of it will be slower: %s", error)
    return mapped
