"""The slots of one shard, or of one parity: their life cycle, their files on tmpfs, and who owns them.

``making -> free -> writing | receiving -> sealed -> free``: a slot holds bytes of at most one snapshot. Whether a
sealed snapshot is also protected depends on the whole group, so the `Store` records that, not the slot.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, Self

from holdfast.smp_daemon.shared import owners
from holdfast.smp_daemon.shared.budget import Budget, wipe, wipe_file
from holdfast.smp_daemon.shared.errors import ArenaTooSmall, NoFreeSlot, ProtocolError, StaleEpoch
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.limits import is_at_once
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.owners import Owners
from holdfast.smp_daemon.shared.paths import GONE
from holdfast.smp_daemon.shared.populate import prefer, slices
from holdfast.smp_daemon.shared.records import PART, not_written, record_name, write
from holdfast.smp_daemon.shared.system import MACHINE, Files

SHMEM_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")

WIPE_BYTES = 16 << 20
"""Bytes that are overwritten with zeros at a time, with the store's lock held: milliseconds."""

ENLARGE = (
    "enlarge it (mount -o remount,size=... /dev/shm; docker run --shm-size=...; Kubernetes: emptyDir medium Memory), "
    "unless the machine itself has no more memory, or use fewer slots or generations (HOLDFAST_GENERATIONS)"
)

log = get_log(__name__)


class SlotState(StrEnum):
    """The life cycle of a slot."""

    MAKING = "making"
    """The slot's memory is being reserved; no file has the slot's name yet."""
    FREE = "free"
    WRITING = "writing"
    """The trainer that owns the shard has taken it, or handed it over to be sealed."""
    RECEIVING = "receiving"
    """This SMP is receiving bytes from elsewhere. Code that takes such a slot away must delete its file; otherwise two
    threads would write into one file."""
    SEALED = "sealed"


@dataclass(slots=True)
class Slot:
    """One slot of a pool. `snapshot` is None while the slot is free, being made or taken by its trainer.

    Attributes:
        held: whether the SMP keeps its trainer from taking it, although it is sealed.
        reserved: how many of the bytes are reserved so far, while the slot is being made.
        unwiped: bytes at its beginning that are to be overwritten with zeros, as it was given up.
        claimed: whether a thread makes the slot for itself: the `Reserver` does not make it, and nobody else takes or
            deletes it.
    """

    index: int
    bytes: int
    state: SlotState = SlotState.FREE
    snapshot: SnapshotId | None = None
    reserved: int = 0
    unwiped: int = 0
    claimed: bool = False
    held: bool = False

    @property
    def is_being_filled(self) -> bool:
        """Whether a trainer or this SMP is filling the slot."""
        return self.state in (SlotState.WRITING, SlotState.RECEIVING)

    @property
    def is_trainers(self) -> bool:
        """Whether its trainer has taken the slot."""
        return self.state is SlotState.WRITING and self.snapshot is None

    @property
    def owner(self) -> str:
        """Who owns the slot, if its trainer has not taken it: see `smp_daemon.shared.owners`."""
        if self.state is SlotState.SEALED and self.snapshot is not None:
            return owners.held(self.snapshot) if self.held else owners.sealed(self.snapshot)
        return owners.FREE if self.state is SlotState.FREE else owners.BUSY

    def free(self) -> None:
        """Mark the slot as free, whatever it holds."""
        self.state = SlotState.FREE
        self.snapshot = None
        self.held = False

    def lose(self) -> None:
        """Note that its trainer has taken the slot."""
        self.free()
        self.state, self.unwiped = SlotState.WRITING, 0


class _Mapped(NamedTuple):
    inode: int
    memory: mmap.mmap


@dataclass(slots=True, eq=False)
class _File:
    path: Path
    bytes: int
    unwiped: int
    mapped: mmap.mmap | None


class Deleted:
    """The large deleted files of an arena, whose memory takes long to give back. Not thread-safe: the store's lock
    guards it, and `free` takes it.

    Attributes:
        zero: whether what is given up is overwritten with zeros.
        on_work: called when there is a file to free, or a slot to overwrite.
        bytes: memory that is not given back yet. Who needs memory may count on it, and calls `free` first.
        waiting: the files that no thread is freeing.
    """

    def __init__(self, files: Files = MACHINE, *, zero: bool = False) -> None:
        self.zero = zero
        self.on_work: Callable[[], None] = lambda: None
        self.bytes = 0
        self.waiting: deque[_File] = deque()
        self._files = files

    def takes(self, path: Path, mapped: mmap.mmap | None = None, unwiped: int = 0) -> bool:
        """Take a file's name away, if it is large. Returns False if it is small, or does not exist.

        Its new name is that of an unfinished file: a successor deletes what is left of these.

        Args:
            mapped: this process's mapping of it; no thread may ask for it any more.
            unwiped: bytes at its beginning to overwrite with zeros.
        """
        try:
            status = path.lstat()
            if is_at_once(status.st_size):
                return False
            suffix = path.name.removesuffix(PART).rpartition(".")[2]
            gone = path.with_name(f"{GONE}{status.st_ino}.{suffix}{PART}")
            if gone != path:
                path.replace(gone)
        except FileNotFoundError:
            return False
        self.bytes += status.st_size
        self.waiting.append(_File(gone, status.st_size, unwiped, mapped))
        self.on_work()
        return True

    def free(self, lock: threading.Condition, is_over: Callable[[], bool] = bool) -> None:
        """Give the memory of all files back, one after another. Files whose mapping a thread still reads stay.

        The caller does not hold `lock`, the store's. Blocks for as long as the kernel takes. Memory that another
        process maps stays until that process lets it go.

        Args:
            is_over: called with the lock held; True: the rest stays.
        """
        with lock:
            count = len(self.waiting)
        for _ in range(count):
            with lock:
                if not self.waiting or is_over():
                    return
                file = self.waiting.popleft()
            is_free = self._free(file)
            with lock:
                if is_free:
                    self.bytes -= file.bytes
                    lock.notify_all()
                else:
                    self.waiting.append(file)

    def _free(self, file: _File) -> bool:
        try:
            if file.unwiped:
                wipe_file(file.path, file.unwiped, self._files)
                file.unwiped = 0  # it is tried again if a thread still reads it
            if file.mapped is not None:
                file.mapped.close()
            file.path.unlink(missing_ok=True)
        except BufferError:  # a thread still reads it. If that thread freed it, all others would stand still meanwhile
            return False
        except OSError as error:
            log.warning("%s is not deleted before the next start: %s", file.path, error)
        failpoint("slot.removed")
        return True


class SlotPool:
    """The slots of one shard, or of a node's parity, and their files on tmpfs. Slots of other lengths may remain while
    their snapshots are kept. Not thread-safe: the owner holds a lock.

    The trainer of a shard takes slots without asking, see `smp_daemon.shared.owners`: then they are ``WRITING`` here,
    without a snapshot, once `look` or an attempt to use them has found out.

    Attributes:
        near: the NUMA node on which new files are allocated; None: any.
    """

    def __init__(
        self,
        arena: Path,
        name: str,
        suffix: str,
        budget: Budget,
        owners: Owners,
        deleted: Deleted,
        files: Files = MACHINE,
    ) -> None:
        """
        Args:
            owners: the marks of the slots. Without an epoch there are none, as of parity, which no trainer takes.
            deleted: takes over the files of large slots; says whether `wipe_next` is to overwrite what is given up.
        """
        self.name = name
        self.slots: list[Slot] = []
        self.near: int | None = None
        self._budget = budget
        self._owners = owners
        self._deleted = deleted
        self._files = files
        self.arena = arena
        self.suffix = suffix
        self._maps: dict[int, _Mapped] = {}

    # ------------------------------------------------------------------ what they hold

    def add(self, length: int) -> Slot:
        """A new free slot of `length` bytes."""
        taken = {slot.index for slot in self.slots}
        slot = Slot(next(i for i in range(len(taken) + 1) if i not in taken), length)
        self.slots.append(slot)
        return slot

    def assign(self, snapshot: SnapshotId, length: int) -> Slot:
        """Take a free slot of `length` bytes to receive `snapshot` into; an earlier attempt at it is given up.

        Raises:
            NoFreeSlot: every slot of that length holds another snapshot.
        """
        earlier = self.find(snapshot)
        if earlier is not None:
            earlier.free()
        for slot in self.slots:
            fits = slot.state is SlotState.FREE and slot.bytes == length and not slot.claimed
            if fits and self._change(slot, owners.FREE, owners.BUSY):
                slot.state = SlotState.RECEIVING
                slot.snapshot = snapshot
                slot.unwiped = 0  # whoever fills it overwrites all of it, or gives it up again
                return slot
        held = ", ".join(str(slot.snapshot) for slot in self.slots if slot.snapshot)
        raise NoFreeSlot(
            f"no free slot of {length} bytes for {snapshot} of {self.name}: the slots hold {held or 'nothing'}"
        )

    def seal(self, slot: Slot) -> None:
        """Mark the slot as sealed: all bytes of its snapshot are there, with digests."""
        if not slot.is_being_filled:
            raise ValueError(f"slot {slot.index} of {self.name} is {slot.state}: nothing is being written into it")
        slot.state = SlotState.SEALED

    def find(self, snapshot: SnapshotId, state: SlotState | None = None) -> Slot | None:
        """The slot that holds `snapshot` (in `state`, if given)."""
        held = (slot for slot in self.slots if slot.snapshot == snapshot and state in (None, slot.state))
        return next(held, None)

    def outdated(self, keep: Collection[SnapshotId], before: SnapshotId) -> list[Slot]:
        """Sealed slots of snapshots older than `before` that are neither in `keep` nor held: they may be freed."""
        sealed = (slot for slot in self.slots if slot.state is SlotState.SEALED and not slot.held)
        return [slot for slot in sealed if slot.snapshot and slot.snapshot < before and slot.snapshot not in keep]

    # ------------------------------------------------------------------ their files

    def path(self, slot: Slot) -> Path:
        """The slot's file."""
        return self.arena / f"{self.name}.{slot.index}.{self.suffix}"

    def place(self, slot: Slot) -> dict[str, Any]:
        """Its file and the inode of that, as `messages.SlotFile` has them."""
        path = self.path(slot)
        return {"file": path.name, "inode": path.stat().st_ino, "bytes": slot.bytes}

    def record_path(self, slot: Slot) -> Path:
        """The file of the slot's commit record."""
        return self.arena / record_name(self.path(slot).name)

    def view(self, slot: Slot) -> memoryview:
        """The slot's bytes, mapped. Touches none of them, so it takes no longer for a large slot.

        Trainers find a slot by its name. So if somebody has given the name to another file, that one is mapped from
        then on, and what does not match its digests is damaged.
        """
        mapped = self._maps.get(slot.index)
        if mapped is None or self._inode(slot) not in (None, mapped.inode):
            mapped = self._maps[slot.index] = _map(self.path(slot), slot.bytes, self._files)
        return memoryview(mapped.memory)

    def _inode(self, slot: Slot) -> int | None:
        """That of the file that has the slot's name, None if that cannot be the slot's file."""
        try:
            status = self.path(slot).lstat()
        except FileNotFoundError:
            return None
        return status.st_ino if stat.S_ISREG(status.st_mode) and status.st_size == slot.bytes else None

    def create(self, length: int) -> Slot:
        """A new slot whose file has all its memory allocated now, so that later writes cannot fail with SIGBUS.

        Raises:
            ArenaTooSmall: the file system is full, or the slot would exceed the limit of the arena.
        """
        slot = self.plan(length)
        self.reserve(slot, length)
        try:
            if length > (left := room(self.arena, self._files)):  # else the file system is filled before the error
                raise too_small(self.arena, length, left)
            with self.open_part(slot) as memory:
                for start, count in slices(length):
                    memory.reserve(start, count)
                self.made(slot, memory)
        except BaseException as error:
            self.part_path(slot).unlink(missing_ok=True)
            self._drop(slot)
            if isinstance(error, OSError):
                raise no_room(self.arena, length, error, self._files) from error
            raise
        return slot

    def plan(self, length: int) -> Slot:
        """A new slot whose memory is not reserved yet; see `Reserver`.

        Raises:
            ArenaTooSmall: the slot would exceed the limit of the arena.
        """
        self._budget.claim(length)
        slot = self.add(length)
        slot.state = SlotState.MAKING
        self.record_path(slot).unlink(missing_ok=True)  # left over if somebody deleted a slot file
        return slot

    def part_path(self, slot: Slot) -> Path:
        """The slot's file while it is being made; no successor takes a file of this name for a slot."""
        return self.arena / f"{self.path(slot).name}{PART}"

    def being_made(self, length: int, *, claimed: bool = True) -> Slot | None:
        """A slot of that length that a thread makes for itself, or, if not `claimed`, that is planned; None if there is
        none."""
        making = (slot for slot in self.slots if slot.state is SlotState.MAKING and slot.bytes == length)
        return next((slot for slot in making if slot.claimed is claimed), None)

    def unplan(self, length: int) -> None:
        """Give up one slot of that length that is planned, or being made, if there is one."""
        if (slot := self.being_made(length, claimed=False)) is not None:
            self.remove(slot)

    def open_part(self, slot: Slot) -> SlotMemory:
        """Create the file of a slot that is being made. Raises `OSError`."""
        return SlotMemory(self.part_path(slot), slot.bytes, self._files, self.near)

    def reserve(self, slot: Slot, count: int) -> None:
        """Account for `count` more bytes of a slot that is being made, before they are reserved."""
        self._budget.draw(count)
        slot.reserved += count

    def made(self, slot: Slot, memory: SlotMemory) -> None:
        """Free a slot whose memory is all reserved, and give its file the slot's name."""
        self.part_path(slot).replace(self.path(slot))
        self._maps[slot.index] = _Mapped(memory.inode, memory.mapped)
        memory.is_kept = True
        slot.free()
        failpoint("slot.made")
        if self._owners.epoch is not None:
            self._owners.create(self.path(slot).name, owners.FREE)

    def commit(self, slot: Slot, record: bytes) -> None:
        """Write the encoded commit record: from here on the slot counts. The mark goes before it, as a record counts
        only with its mark.

        Raises:
            ArenaTooSmall: the record cannot be written; the slot keeps its state.
            StaleEpoch: somebody has removed the mark, or the file, so that nobody would find the bytes.
        """
        assert slot.snapshot is not None
        # A trainer finds its slot by the name. What this SMP has not mapped, it has not filled.
        if (mapped := self._maps.get(slot.index)) is not None and self._inode(slot) != mapped.inode:
            raise StaleEpoch(f"somebody has deleted or replaced {self.path(slot).name} while it was filled")
        before, is_sealed = slot.state, owners.sealed(slot.snapshot)
        if not self._change(slot, owners.BUSY, is_sealed):
            raise StaleEpoch(f"{self.path(slot).name} is not owned by this SMP any more")
        self.seal(slot)
        try:
            write(self.record_path(slot), record, slot.snapshot.step)
        except ArenaTooSmall:
            slot.state = before
            self._change(slot, is_sealed, owners.BUSY)
            raise

    def discard(self, slot: Slot) -> bool:
        """Free the slot. Its commit record is deleted first, so a crash in between leaves a free slot. Returns False if
        its trainer has just taken it."""
        if not self._change(slot, slot.owner, owners.FREE):
            return False
        self._empty(slot)
        return True

    def _empty(self, slot: Slot) -> None:
        self.record_path(slot).unlink(missing_ok=True)
        was_used = slot.state is not SlotState.FREE
        failpoint("slot.freed", slot.snapshot.step if slot.snapshot else -1)
        slot.free()
        if was_used and self._deleted.zero:
            slot.unwiped = slot.bytes
            self._deleted.on_work()

    def hold(self, slot: Slot, held: bool = True) -> bool:
        """Keep the trainer from taking a sealed slot, or, with False, do so no more. Returns False if it has just taken
        it."""
        before = slot.owner
        slot.held = held
        return self._change(slot, before, slot.owner)

    def is_at(self, slot: Slot, view: memoryview) -> bool:
        """Whether `view` is still the slot's memory; False once somebody has taken the slot away."""
        mapped = self._maps.get(slot.index)
        return slot in self.slots and mapped is not None and mapped.memory is view.obj

    def remove(self, slot: Slot) -> bool:
        """Delete the slot and its file. Returns False if its trainer has just taken it."""
        if slot.state is SlotState.MAKING:
            self.part_path(slot).unlink(missing_ok=True)
            self._drop(slot)
            slot.free()
            return True
        if not slot.is_being_filled and not self._change(slot, slot.owner, owners.BUSY):
            return False
        self._empty(slot)
        self._forget(slot)
        self._drop(slot)
        return True

    def _drop(self, slot: Slot) -> None:
        self.slots.remove(slot)
        self._budget.give(slot.bytes, slot.bytes - slot.reserved if slot.state is SlotState.MAKING else 0)

    def wipe_next(self, slot: Slot) -> None:
        """Overwrite the next `WIPE_BYTES` of a free slot that was given up with zeros."""
        if self._change(slot, owners.FREE, owners.BUSY):
            self._wipe_part(slot)
            self._change(slot, owners.BUSY, owners.FREE)

    def _wipe_part(self, slot: Slot) -> None:
        begin = max(0, slot.unwiped - WIPE_BYTES)
        wipe(self.view(slot)[begin : slot.unwiped])
        slot.unwiped = begin

    def _forget(self, slot: Slot) -> None:
        mapped = self._maps.get(slot.index)
        is_gone = mapped is None and self._inode(slot) is None
        if self._deleted.takes(self.path(slot), mapped and mapped.memory, slot.unwiped) or is_gone:
            slot.unwiped = 0
        while slot.unwiped:
            self._wipe_part(slot)
        self._maps.pop(slot.index, None)
        self.path(slot).unlink(missing_ok=True)
        failpoint("slot.removed")
        if self._owners.epoch is not None:
            self._owners.clear(self.path(slot).name)

    # ------------------------------------------------------------------ who owns them

    def look(self) -> None:
        """Note which slots the trainer has taken."""
        if self._owners.epoch is not None:
            for slot in self.slots:
                its_own = slot.state in (SlotState.FREE, SlotState.SEALED)
                if its_own and not self._owners.has(self.path(slot).name, slot.owner):
                    slot.lose()

    def lost(self) -> list[Slot]:
        """The slots that nobody is writing and whose files somebody has deleted or replaced: no trainer finds them."""
        its_own = (slot for slot in self.slots if slot.state in (SlotState.FREE, SlotState.SEALED))
        return [slot for slot in its_own if self._inode(slot) is None]

    def hand_over(self, file: str, number: int, snapshot: SnapshotId) -> Slot:
        """Take a slot back from the trainer, which has written `snapshot` into it.

        Raises:
            StaleEpoch: it is not the trainer's, or was taken by it another time.
        """
        slot = next((slot for slot in self.slots if self.path(slot).name == file), None)
        if slot is None or not self._owners.change(file, owners.taken(number), owners.BUSY):
            raise StaleEpoch(f"{file} is not a slot of {self.name} that is being written for {snapshot}")
        slot.state, slot.snapshot = SlotState.WRITING, snapshot
        return slot

    def fence(self, epoch: int) -> None:
        """Carry the marks of the slots into a new epoch, except those that the trainer has taken."""
        for slot in self.slots:
            stays = slot.state is SlotState.MAKING or slot.is_trainers
            if not stays and not self._owners.renew(self.path(slot).name, slot.owner, epoch):
                slot.lose()

    def adopted(self, slot: Slot, found: list[tuple[str, int]]) -> bool:
        """Mark a slot that a predecessor left. Returns False if the trainer of an epoch that is over may still write
        into it.

        Args:
            found: its marks. The trainer of this epoch may take it at any time.
        """
        file, epoch = self.path(slot).name, self._owners.epoch
        if slot.is_trainers:
            return any(owners.is_taken(owner) and of == epoch for owner, of in found)
        owner = slot.owner
        if not found:
            self._owners.create(file, owner)
        elif (owner, epoch) not in found and not any(
            self._owners.change(file, old, owner, since=of) for old, of in found
        ):
            slot.lose()
        return True

    def _change(self, slot: Slot, old: str, new: str) -> bool:
        if self._owners.epoch is None or old == new or self._owners.change(self.path(slot).name, old, new):
            return True
        slot.lose()
        return False


def room(path: Path, files: Files = MACHINE) -> int:
    """Bytes that files in `path`, which is on tmpfs, can still take. Its file system may be larger than the memory that
    is left, and whoever fills it then has processes killed."""
    status = files.statvfs(path)
    return min(int(status.f_bavail * status.f_frsize), files.available_bytes())


def too_small(path: Path, need: int, left: int) -> ArenaTooSmall:
    """The error for an arena that does not fit on its file system; it names the fix."""
    return ArenaTooSmall(f"the arena {path} needs {need:,} bytes more and its file system has {left:,} left: {ENLARGE}")


def no_room(path: Path, need: int, error: OSError, files: Files) -> Exception:
    """What to raise for an error that occurred while memory was reserved: `ArenaTooSmall` if there is none left or a
    limit is reached, `ProtocolError` if the arena is gone, as the job has ended meanwhile."""
    if error.errno == errno.ENOENT:
        return ProtocolError(f"{path} is gone: the job has ended")
    if error.errno == errno.EFBIG:
        return not_written(path, error)
    return too_small(path, need, room(path, files)) if error.errno == errno.ENOSPC else error


def ran_out(path: Path, need: int, got: int, left: int) -> str:
    """The message for memory that was free when it was counted, and taken by the time it was reserved."""
    return (
        f"the arena {path} needs {need:,} bytes more, and memory ran out at {got:,} of them: other processes took it, "
        f"and its file system has {left:,} left. The reserved bytes are given back: {ENLARGE}"
    )


class SlotMemory:
    """A new slot file whose memory is reserved slice by slice. The constructor and the methods raise `OSError`.

    Attributes:
        is_kept: whether the mapping stays at the end of the `with` block.
    """

    is_kept = False

    def __init__(self, path: Path, length: int, files: Files, near: int | None) -> None:
        """`near`: the NUMA node on which its pages are allocated; None: any."""
        self._files = files
        self._fd = files.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            failpoint("slot.opened")
            files.ftruncate(self._fd, length)
            self.mapped = files.map(self._fd, length)
            self.inode = files.fstat(self._fd).st_ino
        except BaseException:
            files.close(self._fd)
            raise
        self.mapped.madvise(mmap.MADV_DONTDUMP)
        self._advise(near)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Close the file, and its mapping unless a slot has it. If a slot was given up that is largely reserved, its
        memory goes now, and not in a destructor, during which no thread of this process runs."""
        self._files.close(self._fd)
        if not self.is_kept:
            self.mapped.close()

    def reserve(self, start: int, count: int) -> None:
        """Allocate and touch these bytes. Blocks for about as long as zeroing them takes.

        The first touch decides whether pages are huge: pages that `posix_fallocate` has allocated small stay small. If
        touching fails, nothing is lost: `posix_fallocate` then allocates what is missing, or raises the error.
        """
        if self._huge:
            self._touch(start, count)
        self._files.posix_fallocate(self._fd, start, count)
        if not self._huge:
            self._touch(start, count)

    def _advise(self, near: int | None) -> None:
        if near is not None:
            try:
                prefer(self.mapped, near)
            except OSError as error:
                log.warning("slots are not placed on NUMA node %d: %s", near, error)
        self._huge = gives_huge_pages()
        if self._huge:
            try:
                self.mapped.madvise(mmap.MADV_HUGEPAGE)
            except OSError as error:
                log.debug("no huge pages: %s", error)

    def _touch(self, start: int, count: int) -> None:
        try:
            self._files.populate(self.mapped, start, count)
        except OSError as error:
            log.debug("a slot is not touched ahead of time, and the first use of it will be slower: %s", error)


def gives_huge_pages() -> bool:
    """Whether Linux is set to give tmpfs huge pages on request."""
    try:
        return "[advise]" in SHMEM_HUGE.read_text()
    except OSError:
        return False


def _map(path: Path, length: int, files: Files) -> _Mapped:
    fd = files.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        mapped = _Mapped(files.fstat(fd).st_ino, files.map(fd, length))
    finally:
        files.close(fd)
    mapped.memory.madvise(mmap.MADV_DONTDUMP)
    return mapped
