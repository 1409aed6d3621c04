"""The memory that the slots of one arena may take, reserved for as long as the arena exists."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

import numpy as np

from holdfast.smp_daemon.shared.errors import ArenaTooSmall

RESERVE = "reserve"
"""Name of the file that holds memory for slots that do not exist yet."""


def pages(length: int) -> int:
    """`length` rounded up to whole pages, in bytes."""
    return -(-length // mmap.PAGESIZE) * mmap.PAGESIZE


class Budget:
    """The memory budget of one arena. Not thread-safe: the arena's owner holds a lock.

    A file holds the memory that slots have not taken yet, so that nothing else on the file system gets it. A new slot
    takes its memory from that file, piece by piece if necessary. Memory of a deleted slot returns to it at the next
    `top_up`.

    Attributes:
        limit: most bytes that slots may take; 0: no limit.
        used: bytes that slots have taken or claimed.
        owed: bytes of `used` that slots have claimed but not taken yet.
    """

    def __init__(self, arena: Path, limit: int) -> None:
        """`limit`: in bytes; 0: no limit, and nothing is reserved. Memory is not reserved before `top_up`."""
        self.limit = limit
        self.used = 0
        self.owed = 0
        self._arena = arena
        self._path = arena / RESERVE
        self._held = 0
        if not limit:
            self._path.unlink(missing_ok=True)
        elif self._path.exists():  # left by a predecessor; a file that was made longer since holds no more memory
            status = self._path.stat()
            self._held = min(status.st_size, status.st_blocks * 512)

    @property
    def left(self) -> int:
        """Bytes that may still be claimed."""
        return max(0, self.limit - self.used)

    @property
    def held(self) -> int:
        """Bytes that the file holds in reserve."""
        return self._held

    def note(self, length: int) -> None:
        """Account for a slot of `length` bytes that exists already."""
        self.used += pages(length)

    def check(self, need: int) -> None:
        """Raises `ArenaTooSmall` if `need` more bytes would exceed the limit."""
        if self.limit and need > self.left:
            raise ArenaTooSmall(
                f"the arena {self._arena} needs {need:,} bytes beside the {self.used:,} that it holds, and "
                f"--memory (HOLDFAST_MEMORY) allows {self.limit:,}: allow {self.used + need:,} or more, or use fewer "
                "slots or generations (HOLDFAST_GENERATIONS). `holdfast plan` tells what a model takes"
            )

    def claim(self, length: int) -> None:
        """Claim memory for a slot of `length` bytes that will be made. Raises `ArenaTooSmall`."""
        self.check(pages(length))
        self.used += pages(length)
        self.owed += pages(length)

    def take(self, length: int) -> None:
        """Release `length` claimed bytes from the file, because a slot is about to take them."""
        self.owed -= pages(length)
        if self._held > self.left + self.owed:
            self._held = self.left + self.owed
            os.truncate(self._path, self._held)

    def give(self, length: int, owed: int = 0) -> None:
        """Account for the removal of a slot of `length` bytes. `owed`: bytes that it had claimed but not taken."""
        self.used -= pages(length)
        self.owed -= pages(owed)

    def top_up(self) -> None:
        """Reserve all memory that may still be claimed, unless slots are being made. Blocks while the kernel zeroes it.

        Raises:
            ArenaTooSmall: a predecessor's slots take more than the limit, or the file system has no room for the rest;
                the reserve stays as it was.
        """
        if self.limit and self.used > self.limit:
            raise ArenaTooSmall(
                f"the arena {self._arena} holds {self.used:,} bytes, and --memory (HOLDFAST_MEMORY) allows "
                f"{self.limit:,}: allow {self.used:,} or more, or remove the arena with `holdfast gc`"
            )
        if not self.limit or self.owed or self._held >= self.left:
            return
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(fd, min(os.fstat(fd).st_size, self.left))
            os.posix_fallocate(fd, 0, self.left)
            self._held = self.left
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            os.ftruncate(fd, self._held)
            status = os.statvfs(self._arena)
            raise ArenaTooSmall(
                f"--memory (HOLDFAST_MEMORY) allows the arena {self._arena} {self.limit:,} bytes, but its file "
                f"system has room for {status.f_bavail * status.f_frsize + self.used:,}: enlarge it (mount -o "
                "remount,size=... /dev/shm; docker run --shm-size=...; Kubernetes: sizeLimit of an emptyDir with "
                "medium Memory), or allow less"
            ) from error
        finally:
            os.close(fd)


def wipe(view: memoryview) -> None:
    """Overwrite memory with zeros, with the GIL released. Runs at about the speed of memset."""
    if view.nbytes:
        ctypes.memset(np.frombuffer(view, np.uint8).ctypes.data, 0, view.nbytes)


def wipe_file(path: Path) -> None:
    """Overwrite a file with zeros. Harmless if it does not exist."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    try:
        length = os.fstat(fd).st_size
        if length:
            with mmap.mmap(fd, length) as mapped:
                wipe(memoryview(mapped))
    finally:
        os.close(fd)
