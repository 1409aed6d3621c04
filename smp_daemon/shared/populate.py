"""Touching all pages of a mapping ahead of time, so that no later copy waits for the kernel."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator

SLICE_BYTES = 64 << 20
"""Bytes touched by one call. Other threads of this process that map or unmap memory wait until a call ends."""

_POPULATE_WRITE = 23
"""``MADV_POPULATE_WRITE``, since Linux 5.14."""


def slices(length: int) -> Iterator[tuple[int, int]]:
    """Offset and length of each slice of `length` bytes."""
    for start in range(0, length, SLICE_BYTES):
        yield start, min(SLICE_BYTES, length - start)


def populate(mapped: mmap.mmap, start: int = 0, count: int | None = None) -> None:
    """Touch all pages of a writable mapping, or of `count` bytes from `start`, which must be a page boundary.

    Blocks for seconds on a large mapping. Other Python threads keep running, unlike with ``MAP_POPULATE`` or
    `mmap.madvise`.

    Raises:
        OSError: the kernel does not support this, or there is no memory.
    """
    if not len(mapped):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    begin = ctypes.c_char.from_buffer(mapped)
    try:
        for offset, length in slices(len(mapped) - start if count is None else count):
            place = ctypes.c_void_p(ctypes.addressof(begin) + start + offset)
            if libc.madvise(place, ctypes.c_size_t(length), _POPULATE_WRITE):
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))
    finally:
        del begin  # else the mapping could not be closed
