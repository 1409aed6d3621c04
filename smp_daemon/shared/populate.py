"""Touching all pages of a mapping at once, so that no later copy waits for the kernel."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator

SLICE_BYTES = 64 << 20
"""As much is touched by one call: whoever else maps or unmaps memory of this process waits for its end."""

_POPULATE_WRITE = 23
"""``MADV_POPULATE_WRITE``, since Linux 5.14."""


def slices(length: int) -> Iterator[tuple[int, int]]:
    """Where each slice of so many bytes begins, and its length."""
    for start in range(0, length, SLICE_BYTES):
        yield start, min(SLICE_BYTES, length - start)


def populate(mapped: mmap.mmap, start: int = 0, count: int | None = None) -> None:
    """Touch all pages of a writable mapping, or `count` bytes of it from `start` on, which is a page's. Blocks for
    seconds with a large one; other Python threads go on, as they would not beside ``MAP_POPULATE`` or `mmap.madvise`.

    Raises:
        OSError: this kernel cannot, or there is no memory.
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
        del begin  # or the mapping could not be closed
