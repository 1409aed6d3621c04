"""The memory that the slots of one arena may take, reserved for as long as the arena exists."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import numpy as np

from holdfast.smp_daemon.shared.errors import ArenaTooSmall
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.memory import available_bytes, memory_bytes
from holdfast.smp_daemon.shared.system import MACHINE, Files, opened

PART_BYTES = 16 << 20
"""Bytes of the reserve that are zeroed by one call. Who takes memory from the reserve meanwhile waits until it ends."""

RESERVE = "reserve"
"""Name of the file that holds memory for slots that do not exist yet."""


def pages(length: int) -> int:
    """`length` rounded up to whole pages, in bytes."""
    return -(-length // mmap.PAGESIZE) * mmap.PAGESIZE


class Budget:
    """The memory budget of one arena. Not thread-safe: the arena's owner holds a lock.

    A file holds the memory that slots have not taken yet, so that nothing else on the file system gets it. A new slot
    takes its memory from that file, piece by piece if necessary. Memory of a deleted slot returns to it, part by part:
    at once if it is little, else by the `Reserver`.

    Attributes:
        limit: most bytes that slots may take; 0: no limit.
        used: bytes that slots have taken or claimed.
        owed: bytes of `used` that slots have claimed but not taken yet. `held`: bytes that the file holds in reserve.
        ran_out: whether memory ran out before all of it was reserved.
    """

    def __init__(self, arena: Path, limit: int) -> None:
        """`limit`: in bytes; 0: no limit, and nothing is reserved. Memory is not reserved before `reserve_next`."""
        self.limit = limit
        self.used = 0
        self.owed = 0
        self._arena = arena
        self._path = arena / RESERVE
        self.held = 0
        self.ran_out = False
        if not limit:
            self._path.unlink(missing_ok=True)
        elif self._path.exists():  # left by a predecessor
            status = self._path.stat()
            if status.st_blocks * 512 >= status.st_size:
                self.held = status.st_size
            else:
                self._path.unlink()  # somebody made it longer: it has holes

    @property
    def left(self) -> int:
        """Bytes that may still be claimed."""
        return max(0, self.limit - self.used)

    def note(self, length: int) -> None:
        """Account for a slot of `length` bytes that exists already."""
        self.used += pages(length)

    def check(self, need: int) -> None:
        """Raises `ArenaTooSmall` if `need` more bytes would exceed the limit."""
        if self.limit and need > self.left:
            raise ArenaTooSmall(
                f"the arena {self._arena} needs {need:,} bytes beside the {self.used:,} that it holds, and "
                f"--memory (HOLDFAST_MEMORY) allows {self.limit:,}: allow {self.used + need:,} or more, or use fewer "
                f"slots or generations (HOLDFAST_GENERATIONS); then `holdfast smp stop`, as SMP {os.getpid()} keeps "
                "the limit that it was started with. `holdfast plan` tells what a model takes"
            )

    def claim(self, length: int) -> None:
        """Claim memory for a slot of `length` bytes that will be made. Raises `ArenaTooSmall`."""
        self.check(pages(length))
        self.used += pages(length)
        self.owed += pages(length)

    def draw(self, length: int) -> None:
        """Release `length` claimed bytes from the file, because a slot is about to take them."""
        self.owed -= pages(length)
        if self.held > self.left + self.owed:
            self.held = self.left + self.owed
            self._trim()

    def give(self, length: int, owed: int = 0) -> None:
        """Account for the removal of a slot of `length` bytes. `owed`: bytes that it had claimed but not taken."""
        self.used -= pages(length)
        self.owed -= pages(owed)

    @property
    def missing(self) -> int:
        """Bytes of the `rest` to reserve now; 0 while slots are being made, or after memory has run out."""
        return 0 if self.owed or self.ran_out else self.rest

    @property
    def rest(self) -> int:
        """Bytes that slots may still claim, and that are not in reserve."""
        return max(0, self.left - self.held)

    def check_limit(self, room: int) -> None:
        """Raises `ArenaTooSmall` if a predecessor's slots take more than the limit, the machine has less memory, or the
        file system, which has `room` bytes left, has too few for the rest. Nothing is changed."""
        if not self.limit:
            return
        if self.used > self.limit:
            raise ArenaTooSmall(
                f"the arena {self._arena} holds {self.used:,} bytes, and --memory (HOLDFAST_MEMORY) allows "
                f"{self.limit:,}: allow {self.used:,} or more, as these are the job's snapshots"
            )
        if self.limit > (memory := memory_bytes()):
            raise ArenaTooSmall(
                f"--memory (HOLDFAST_MEMORY) allows the arena {self._arena} {self.limit:,} bytes, and this machine, or "
                f"the control group of this process, has {memory:,} bytes of memory: allow less"
            )
        if not self.owed and self.rest > room:
            raise ArenaTooSmall(self.no_room())

    def reserve_next(self, free: Callable[[], int], lock: AbstractContextManager[object]) -> bool:
        """Reserve the next part of `missing`. Returns False if there is none. Blocks for tens of milliseconds, while
        the kernel zeroes it. For one thread at a time.

        Args:
            free: returns the bytes that the file system has left.
            lock: the owner's, taken for accounting only. The part counts as reserved from the beginning; what slots
                take of it meanwhile is given back at the end.

        Raises:
            ArenaTooSmall, OSError: it could not be reserved. No more is, while `ran_out` is set.
        """
        with lock:
            if not (count := min(PART_BYTES, self.missing)):
                return False
            start = self.held
            self.held += count
        failpoint("reserve.slice")
        try:
            if count > free():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.reserve_part(start, count)
        except OSError as error:
            with lock:
                self.held = min(self.held, start)
                self.ran_out = True
                self._trim()
                if error.errno != errno.ENOSPC:
                    raise
                raise ArenaTooSmall(self.no_room()) from error
        with lock:
            self._trim()
        return True

    def reserve_part(self, start: int, count: int) -> None:
        """Have the kernel zero a part of the file. The owner's lock is not needed. Raises `OSError`."""
        with opened(self._path, os.O_RDWR | os.O_CREAT) as fd:
            os.posix_fallocate(fd, start, count)

    def _trim(self) -> None:
        if self._path.exists() and self._path.stat().st_size > self.held:
            os.truncate(self._path, self.held)

    def no_room(self) -> str:
        """What to say if there is no memory for the `rest`."""
        status = os.statvfs(self._arena)
        room = min(status.f_bavail * status.f_frsize, available_bytes()) + self.held + self.used
        return (
            f"--memory (HOLDFAST_MEMORY) allows the arena {self._arena} {self.limit:,} bytes, but its file system, or "
            f"the memory of this machine, has room for {room:,}: allow less, or enlarge the file system (mount -o "
            "remount,size=... /dev/shm; docker run --shm-size=...; Kubernetes: sizeLimit of an emptyDir with medium "
            "Memory)"
        )


def wipe(view: memoryview) -> None:
    """Overwrite memory with zeros, with the GIL released. Runs at about the speed of memset."""
    if view.nbytes:
        ctypes.memset(np.frombuffer(view, np.uint8).ctypes.data, 0, view.nbytes)


def wipe_file(path: Path, count: int | None = None, files: Files = MACHINE) -> None:
    """Overwrite a file, or its first `count` bytes, with zeros. Harmless if it does not exist."""
    with suppress(FileNotFoundError), opened(path, os.O_RDWR, files) as fd:
        if length := files.fstat(fd).st_size:
            mapped = files.map(fd, length)
            with memoryview(mapped) as view:
                wipe(view[:count])
            mapped.close()
