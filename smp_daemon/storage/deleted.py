"""Large files that were deleted, and whose memory is still to be given back.

The kernel takes a quarter of a second for each gigabyte, and overwriting it with zeros before takes longer. So a file
loses its name under the store's lock, at once, and its memory without the lock.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holdfast.smp_daemon.shared.budget import wipe_file
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.paths import GONE
from holdfast.smp_daemon.shared.records import PART
from holdfast.smp_daemon.shared.system import Files

log = get_log(__name__)


@dataclass(slots=True, eq=False)
class _File:
    path: Path
    bytes: int
    unwiped: int
    mapped: mmap.mmap | None


class Deleted:
    """The deleted files of an arena. Not thread-safe: the store's lock guards it, and `free` takes it.

    Attributes:
        bytes: memory that is not given back yet. Who needs memory may count on it, and calls `free` first.
    """

    def __init__(self, files: Files) -> None:
        self.bytes = 0
        self._waiting: deque[_File] = deque()
        self._files = files

    def add(self, path: Path, mapped: mmap.mmap | None = None, unwiped: int = 0) -> None:
        """Take a file's name away. Harmless if it does not exist.

        Its new name is that of an unfinished file: a successor deletes what is left of these.

        Args:
            mapped: this process's mapping of it; no thread may ask for it any more.
            unwiped: bytes at its beginning to overwrite with zeros.
        """
        try:
            status = path.lstat()
            suffix = path.name.removesuffix(PART).rpartition(".")[2]
            gone = path.with_name(f"{GONE}{status.st_ino}.{suffix}{PART}")
            if gone != path:
                path.replace(gone)
        except FileNotFoundError:
            return
        self.bytes += status.st_size
        self._waiting.append(_File(gone, status.st_size, unwiped, mapped))

    @property
    def is_waiting(self) -> bool:
        """Whether there are files that no thread is freeing."""
        return bool(self._waiting)

    def free(self, lock: threading.Condition, is_over: Callable[[], bool] = bool) -> None:
        """Give the memory of all files back, one after another. Files whose mapping a thread still reads stay.

        The caller does not hold `lock`, the store's. Blocks for as long as the kernel takes. Memory that another
        process maps stays until that process lets it go.

        Args:
            is_over: called with the lock held; True: the rest stays.
        """
        with lock:
            count = len(self._waiting)
        for _ in range(count):
            with lock:
                if not self._waiting or is_over():
                    return
                file = self._waiting.popleft()
            is_free = self._free(file)
            with lock:
                if is_free:
                    self.bytes -= file.bytes
                    lock.notify_all()
                else:
                    self._waiting.append(file)

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
