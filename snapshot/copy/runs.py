"""Bulk copies within the memory of this process, with the GIL released: many runs of bytes in one call.

`snapshot/stream.c` is compiled when the package is installed; if there was no compiler, `memmove` is called for each
run, which takes longer.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from holdfast.smp_daemon.shared import xxh3

PIECE_BYTES = 64 << 20
"""Length of the longest run after `split`: how often a copy can be paced or stopped."""


class Driver(ctypes.Structure):
    """Addresses of C functions that queue work on a device; see ``struct driver`` in `snapshot/stream.c`."""

    _fields_ = (
        ("copy", ctypes.c_void_p),
        ("batch", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("set", ctypes.c_void_p),
    )


_COPY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_SET = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p)

Runs = NDArray[np.uint64]
"""Shape [n, 3]: source address, target address, length in bytes."""


def make_runs(rows: list[tuple[int, int, int]]) -> Runs:
    """Runs from (source, target, bytes); empty ones are left out."""
    return np.array([row for row in rows if row[2]], dtype=np.uint64).reshape(-1, 3)


def merged(runs: Runs, owners: Sequence[int] | None = None) -> Runs:
    """The same bytes in fewer runs: a run that begins where the one before ends, at both ends, is merged with it.
    `owners`: of what each run is a part; runs of different ones are not merged."""
    if len(runs) < 2:
        return runs
    ends = runs[:-1, :2] + runs[:-1, 2:]
    begins = np.concatenate([[True], (ends != runs[1:, :2]).any(axis=1)])
    if owners is not None:
        begins[1:] |= np.diff(np.array(owners, np.uint64)) != 0
    first = np.flatnonzero(begins)
    out = runs[first]
    out[:, 2] = np.add.reduceat(runs[:, 2], first)
    return out


def cut(runs: Runs, column: int, border_bytes: int) -> Runs:
    """The same bytes in the same order, cut so that no run crosses a multiple of `border_bytes` in its source (`column`
    0) or target (1)."""
    table = runs.astype(np.int64)
    place, length = table[:, column], table[:, 2]
    first = place // border_bytes
    count = (place + length - 1) // border_bytes - first + 1
    row = np.repeat(np.arange(len(table)), count)
    part = first[row] + np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    begin = np.maximum(place[row], part * border_bytes)
    end = np.minimum((place + length)[row], (part + 1) * border_bytes)
    done = (begin - place[row])[:, None]
    return np.concatenate([table[row, :2] + done, (end - begin)[:, None]], axis=1).astype(np.uint64)


def split(runs: Runs, limit: int | None = None) -> Runs:
    """The same bytes in runs of at most `limit`, by default `PIECE_BYTES`."""
    limit = limit or PIECE_BYTES
    pieces = np.maximum(1, -(-runs[:, 2].astype(np.int64) // limit))
    if (pieces == 1).all():
        return runs
    out = np.repeat(runs, pieces, axis=0)
    first = np.repeat(np.cumsum(pieces) - pieces, pieces)
    done = ((np.arange(len(out)) - first) * limit).astype(np.uint64)
    out[:, 0] += done
    out[:, 1] += done
    out[:, 2] = np.minimum(out[:, 2] - done, limit)
    return out


def batches(runs: Runs, limit: int | None = None) -> list[Runs]:
    """`runs` in order, in batches of at most `limit` bytes, by default `PIECE_BYTES`."""
    limit = limit or PIECE_BYTES
    left = split(runs, limit)
    ends = np.cumsum(left[:, 2])
    found = []
    while len(left):
        count = max(1, int(np.searchsorted(ends, ends[0] - left[0, 2] + np.uint64(limit), side="right")))
        found.append(left[:count])
        left, ends = left[count:], ends[count:]
    return found


def copy(runs: Runs) -> None:
    """Copy every run. Blocks; other Python threads go on.

    The addresses are not checked: the caller vouches for them, and keeps their owners alive.
    """
    library = _library()
    if library is not None:
        table = np.ascontiguousarray(runs)
        library.holdfast_copy(table.ctypes.data, len(table))
        return
    for source, target, length in runs.tolist():
        ctypes.memmove(target, source, length)


def digests() -> bool:
    """Whether `copy_digested` is available: not if there was no compiler, or where xxHash does not export what it
    needs."""
    return _library() is not None and xxh3.functions() is not None


def copy_digested(runs: Runs, ends: NDArray[np.uint8], digests: NDArray[np.uint64]) -> None:
    """Copy every run, and digest its bytes on their way. Blocks; other Python threads go on. As for `copy`, the caller
    vouches for the addresses.

    Args:
        ends: shape [n]: 1 at each run with which a part ends; the last run is one.
        digests: takes the xxh3-64 of each part, in order.

    Raises:
        MemoryError: nothing is copied.
    """
    library = _library()
    assert library is not None
    table = np.ascontiguousarray(runs)
    assert len(ends) == len(table) and int(ends.sum()) <= len(digests) and digests.flags.c_contiguous
    if library.holdfast_copy_digested(
        table.ctypes.data, len(table), ends.ctypes.data, xxh3.functions(), digests.ctypes.data
    ):
        raise MemoryError("no memory for the state of a digest")


def queue(driver: Driver, parts: Sequence[Runs], stream: int, between: int = 0) -> int:
    """Queue every run on a stream of a device, part by part, in one call; other Python threads go on.

    Args:
        between: address of a byte of the device that is set after each part, by a kernel; 0: none.

    Returns:
        0, or the code of the first error, after which nothing is queued.
    """
    library = _library()
    if library is None:
        return _queue_one_by_one(driver, parts, stream, between)
    sources, targets, lengths = np.ascontiguousarray(np.concatenate(parts).T)
    ends = np.cumsum([len(part) for part in parts], dtype=np.uint64)
    addresses = (array.ctypes.data for array in (targets, sources, lengths, ends))
    return int(library.holdfast_queue(ctypes.addressof(driver), *addresses, len(parts), between, stream))


def _queue_one_by_one(driver: Driver, parts: Sequence[Runs], stream: int, between: int) -> int:
    copy, set_byte = _COPY(driver.copy), _SET(driver.set)
    for part in parts:
        for source, target, length in part.tolist():
            if code := copy(target, source, length, stream):
                return int(code)
        if between and (code := set_byte(between, 0, 1, stream)):
            return int(code)
    return 0


def streams() -> bool:
    """Whether the compiled copy is used, which has streaming stores on x86-64: not if there was no compiler when
    holdfast was installed."""
    return _library() is not None


@cache
def _library() -> ctypes.CDLL | None:
    found = importlib.util.find_spec("holdfast.snapshot._stream")
    if found is None or found.origin is None:
        return None
    library = ctypes.CDLL(found.origin)
    library.holdfast_copy.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.holdfast_copy.restype = None
    library.holdfast_copy_digested.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
    ]
    library.holdfast_copy_digested.restype = ctypes.c_int
    library.holdfast_queue.argtypes = [*[ctypes.c_void_p] * 5, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p]
    library.holdfast_queue.restype = ctypes.c_int
    return library
