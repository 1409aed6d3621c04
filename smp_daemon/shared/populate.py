"""The pages of a mapping: touched ahead of time, so that no later copy waits for the kernel, and on which NUMA node."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from collections.abc import Iterator

SLICE_BYTES = 64 << 20
"""Bytes touched by one call. Other threads of this process that map or unmap memory wait until a call ends."""

_POPULATE_WRITE = 23
"""``MADV_POPULATE_WRITE``, since Linux 5.14."""

_PREFERRED = 1
"""``MPOL_PREFERRED``: pages come from that node while it has free memory, else from another."""

_CALLS = {"x86_64": 237, "aarch64": 235}
"""System call number of ``mbind`` by machine; libc has no wrapper for it."""


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
    libc, place = ctypes.CDLL(None, use_errno=True), _address(mapped) + start
    for offset, length in slices(len(mapped) - start if count is None else count):
        _check(libc.madvise(ctypes.c_void_p(place + offset), ctypes.c_size_t(length), _POPULATE_WRITE))


def prefer(mapped: mmap.mmap, node: int) -> None:
    """Allocate the missing pages of a mapped file on a NUMA node, whichever thread touches them first. The file keeps
    this policy.

    Raises:
        OSError: this machine does not support it, or has no such node.
    """
    call = _CALLS.get(platform.machine())
    if call is None:
        raise OSError(f"mbind is not known on {platform.machine()}")
    libc, words = ctypes.CDLL(None, use_errno=True), node // 64 + 1
    mask = (ctypes.c_uint64 * words)()
    mask[node // 64] = 1 << node % 64
    place, count = ctypes.c_void_p(_address(mapped)), ctypes.c_ulong(len(mapped))
    bits = ctypes.c_ulong(words * 64 + 1)  # the kernel reads one bit fewer
    _check(libc.syscall(call, place, count, ctypes.c_int(_PREFERRED), mask, bits, ctypes.c_uint(0)))


def _address(mapped: mmap.mmap) -> int:
    """Where a mapping begins. Refers to it no longer, or it could not be closed: the caller holds it."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def _check(failed: int) -> None:
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
