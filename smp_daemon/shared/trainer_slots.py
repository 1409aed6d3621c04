"""The slots of a trainer's shards, as the trainer has them: mapped, taken by their marks, and given back. The SMP is
not asked, see `smp_daemon.shared.owners`.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.smp_daemon.shared.errors import HoldfastError, NoFreeSlot, ProtocolError, StaleEpoch
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.messages import SlotFile
from holdfast.smp_daemon.shared.owners import BUSY, Owners, choices, in_words, taken
from holdfast.smp_daemon.shared.system import System, opened

BUSY_S = 0.2
"""How long `take` waits for a slot that the SMP writes, in seconds: it repairs a unit, or wipes a part, in
milliseconds."""

BUSY_POLL_S = 1e-3
"""Pause before the marks are looked at again, in seconds."""

log = get_log(__name__)


@dataclass(frozen=True, slots=True)
class TakenSlot:
    """A slot that a trainer has taken to write into.

    Attributes:
        file: its file in the arena. number: see `owners.taken`. view: its bytes.
    """

    file: str
    number: int
    view: memoryview


class TrainerSlots:
    """The slots in one arena that a trainer writes into. Thread-safe."""

    def __init__(self, arena: Path, system: System) -> None:
        self._arena = arena
        self._system = system
        self._owners = Owners(arena)
        # Guards `_maps`, `_taken` and `_given_back`, and is held while a file is mapped, but not while its pages are
        # touched, which takes a minute for a large slot. The threads that reserve slots, copy or seal take it. No
        # other lock is taken under it.
        self._lock = system.Lock()
        self._maps: dict[str, tuple[int, memoryview]] = {}
        self._taken = 0
        self._given_back: set[tuple[str, str]] = set()
        self._lengths: dict[str, tuple[int, int]] = {}  # the epoch and length of each shard's slots; see `learn`

    def enter(self, epoch: int) -> None:
        """Take slots of this epoch from now on: what was given back in another is not this trainer's any more."""
        if epoch != self._owners.epoch:
            with self._lock:
                self._given_back.clear()
        self._owners.epoch = epoch

    def knows(self, epoch: int, coord: str) -> bool:
        """Whether `learn` has told of the slots of that shard in that epoch."""
        return self._lengths.get(coord, (0, 0))[0] == epoch

    def learn(self, epoch: int, coord: str, there: Sequence[SlotFile]) -> list[memoryview]:
        """Map all slots of a shard. Mappings of other slots are dropped. May take as long as touching all pages."""
        names = {slot.file for slot in there}
        with self._lock:
            self._maps = {name: known for name, known in self._maps.items() if name in names}
        if there:
            self._lengths[coord] = epoch, there[0].bytes
        return [self.map(slot) for slot in there]

    def forget(self) -> None:
        """Drop all mappings."""
        with self._lock:
            self._maps.clear()

    def take(self, epoch: int, coord: str, keep: Collection[SnapshotId], is_over: Callable[[], bool]) -> TakenSlot:
        """See `SmpClient.take`. `is_over`: whether a newer epoch has begun."""
        limit_s, before = self._system.monotonic() + BUSY_S, None
        while True:
            marks = self._marks(coord, epoch)
            with self._lock:
                given_back = set(self._given_back)
            for file, owner in choices(marks, keep, given_back):
                if (slot := self._take(file, owner)) is not None:
                    return slot
            if is_over():
                raise StaleEpoch(f"epoch {epoch} of this trainer is over")
            is_steady = marks == before and BUSY not in marks.values()
            if is_steady or self._system.monotonic() > limit_s:
                raise NoFreeSlot(f"no slot of {coord} is free: {in_words(marks.values())}")
            before = marks
            self._system.Event().wait(BUSY_POLL_S)

    def _marks(self, coord: str, epoch: int) -> dict[str, str]:
        of, length = self._lengths.get(coord, (0, 0))
        marks = {}
        for file, owners in self._owners.found().items():
            mine = [owner for owner, since in owners if since == of == epoch and file.rsplit(".", 2)[0] == coord]
            with suppress(FileNotFoundError):  # it is deleted meanwhile
                if mine and (self._arena / file).stat().st_size == length:
                    marks[file] = mine[-1]
        return marks

    def _take(self, file: str, owner: str) -> TakenSlot | None:
        """Take a slot from its owner; None if somebody else was faster, or it has another file by now."""
        with self._lock:
            self._taken += 1
            number = self._taken
            self._given_back.discard((file, owner))
        if not self._owners.change(file, owner, taken(number)):
            return None
        try:
            status = (self._arena / file).stat()
            view = self.map(SlotFile(file=file, inode=status.st_ino, bytes=status.st_size))
        except (FileNotFoundError, StaleEpoch):
            return None
        except HoldfastError:  # for want of a descriptor, for example: nothing was written, and it may be taken again
            self.give_back(TakenSlot(file, number, memoryview(b"")))
            raise
        return TakenSlot(file, number, view)

    def give_back(self, slot: TakenSlot) -> None:
        """See `SmpClient.give_back`."""
        with self._lock:
            self._given_back.add((slot.file, taken(slot.number)))

    def map(self, slot: SlotFile, *, touch: bool = True) -> memoryview:
        """Map a slot file, or return the mapping that exists already.

        Args:
            touch: whether to touch its pages, so that a copy into it does not wait for the kernel. Not for a slot that
                is read first: reading maps pages, too, many at a time and in each of the threads that load.
        """
        with self._lock:
            known = self._maps.get(slot.file)
            if known is not None and known[0] == slot.inode and known[1].nbytes == slot.bytes:
                return known[1]
            mapped = self._map_file(slot)
            view = memoryview(mapped)
            self._maps[slot.file] = (slot.inode, view)
        # Without the lock, or a copy into another slot would wait for the minute that a large slot takes.
        try:
            if touch:
                self._system.populate(mapped)
        except OSError as error:
            log.debug("a slot is not touched ahead of time, and the first copy will be slower: %s", error)
        return view

    def _map_file(self, slot: SlotFile) -> mmap.mmap:
        name, inode, length = slot.file, slot.inode, slot.bytes
        files = self._system
        if Path(name).name != name:
            raise ProtocolError(f"{name!r} is not a file of the arena")
        try:
            with opened(self._arena / name, os.O_RDWR, files) as fd:
                status = files.fstat(fd)
                if status.st_ino != inode:
                    raise FileNotFoundError
                if status.st_size != length or length < 1:
                    raise ProtocolError(f"the slot {name} has {status.st_size} bytes, not {length}")
                mapped = files.map(fd, length)
        except FileNotFoundError as error:
            raise StaleEpoch(f"the slot {name} was taken away before it was opened") from error
        except OSError as error:
            raise ProtocolError(f"{name!r} is not a file of the arena that can be mapped: {error.strerror}") from error
        mapped.madvise(mmap.MADV_DONTDUMP)
        return mapped
