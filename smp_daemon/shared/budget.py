"""How much memory the slots of one arena may take, from its first second to its last."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

import numpy as np

from holdfast.smp_daemon.shared.errors import ArenaTooSmall

RESERVE = "reserve"
"""Name of the file that holds the memory of slots that are not made yet."""


def pages(length: int) -> int:
    """`length` bytes, in whole pages."""
    return -(-length // mmap.PAGESIZE) * mmap.PAGESIZE


class Budget:
    """Not thread-safe: the arena's owner holds a lock.

    What is not taken yet is held in a file, so that nobody else on the file system gets it. A slot that is made takes
    its memory from there, piece by piece if need be; one that is deleted gives it back at the next `top_up`.

    Attributes:
        limit: 0: none.
        used: what slots take, or have claimed.
        owed: what they have claimed of that, and not taken yet.
    """

    def __init__(self, arena: Path, limit: int) -> None:
        """`limit`: in bytes; 0: none, and nothing is reserved. `top_up` reserves."""
        self.limit = limit
        self.used = 0
        self.owed = 0
        self._arena = arena
        self._path = arena / RESERVE
        self._held = 0
        if not limit:
            self._path.unlink(missing_ok=True)
        elif self._path.exists():
            self._held = self._path.stat().st_size  # a predecessor's

    @property
    def left(self) -> int:
        """How much more may be taken."""
        return max(0, self.limit - self.used)

    @property
    def held(self) -> int:
        """How much of that is reserved."""
        return self._held

    def note(self, length: int) -> None:
        """A slot of `length` bytes is there already."""
        self.used += pages(length)

    def check(self, need: int) -> None:
        """Raises `ArenaTooSmall` if `need` bytes more are more than may be taken."""
        if self.limit and need > self.left:
            raise ArenaTooSmall(
                f"the arena {self._arena} needs {need:,} bytes beside the {self.used:,} that it holds, and "
                f"--memory (HOLDFAST_MEMORY) allows {self.limit:,}: allow {self.used + need:,} or more, or use fewer "
                "slots or generations (HOLDFAST_GENERATIONS). `holdfast plan` tells what a model takes"
            )

    def claim(self, length: int) -> None:
        """A slot of `length` bytes will be made: nobody else may take its memory. Raises `ArenaTooSmall`."""
        self.check(pages(length))
        self.used += pages(length)
        self.owed += pages(length)

    def take(self, length: int) -> None:
        """`length` bytes of what was claimed are about to be taken."""
        self.owed -= pages(length)
        if self._held > self.left + self.owed:
            self._held = self.left + self.owed
            os.truncate(self._path, self._held)

    def give(self, length: int, owed: int = 0) -> None:
        """A slot of `length` bytes is no more; so many of them it had claimed and not taken."""
        self.used -= pages(length)
        self.owed -= pages(owed)

    def top_up(self) -> None:
        """Reserve all that may still be taken, unless slots are being made. Blocks for as long as the kernel takes to
        zero that much memory.

        Raises:
            ArenaTooSmall: the file system has no room for it; as much as before is reserved.
        """
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
                f"--memory (HOLDFAST_MEMORY) allows the arena {self._arena} {self.limit:,} bytes, and its file system "
                f"has {status.f_bavail * status.f_frsize + self.used:,} for it: enlarge it (mount -o remount,size=... "
                "/dev/shm; docker run --shm-size=...; Kubernetes: sizeLimit of an emptyDir with medium Memory), or "
                "allow less"
            ) from error
        finally:
            os.close(fd)


def wipe(view: memoryview) -> None:
    """Overwrite memory with zeros, the GIL released. Blocks at about the speed of memset."""
    if view.nbytes:
        ctypes.memset(np.frombuffer(view, np.uint8).ctypes.data, 0, view.nbytes)


def wipe_file(path: Path) -> None:
    """Overwrite a file with zeros. Harmless if it is not there."""
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
