"""Bulk copies between memory of this process, the GIL released: many runs of bytes in one call.

`snapshot/stream.c` is compiled when the package is installed; where there was no compiler, `memmove` is called run by
run, which takes longer.
"""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache

import numpy as np
from numpy.typing import NDArray

PIECE_BYTES = 64 << 20
"""Longest run after `split`: how often a copy can be paced or stopped."""

Runs = NDArray[np.uint64]
"""Shape [n, 3]: source address, target address, length in bytes."""


def make_runs(rows: list[tuple[int, int, int]]) -> Runs:
    """Runs from (source, target, bytes); empty ones are left out."""
    return np.array([row for row in rows if row[2]], dtype=np.uint64).reshape(-1, 3)


def split(runs: Runs) -> Runs:
    """The same bytes in runs of at most `PIECE_BYTES`."""
    pieces = np.maximum(1, -(-runs[:, 2].astype(np.int64) // PIECE_BYTES))
    if (pieces == 1).all():
        return runs
    out = np.repeat(runs, pieces, axis=0)
    first = np.repeat(np.cumsum(pieces) - pieces, pieces)
    done = ((np.arange(len(out)) - first) * PIECE_BYTES).astype(np.uint64)
    out[:, 0] += done
    out[:, 1] += done
    out[:, 2] = np.minimum(out[:, 2] - done, PIECE_BYTES)
    return out


def batches(runs: Runs) -> list[Runs]:
    """`runs` in order, in batches of about `PIECE_BYTES`."""
    pieces = split(runs)
    if not len(pieces):
        return []
    batch = (np.cumsum(pieces[:, 2]) - pieces[:, 2]) // np.uint64(PIECE_BYTES)
    return np.split(pieces, np.flatnonzero(np.diff(batch)) + 1)


def copy(runs: Runs) -> None:
    """Copy every run. Blocks; other Python threads go on.

    The caller vouches for the addresses, and holds what owns them: nothing is checked.
    """
    library = _library()
    if library is not None:
        table = np.ascontiguousarray(runs)
        library.holdfast_copy(table.ctypes.data, len(table))
        return
    for source, target, length in runs.tolist():
        ctypes.memmove(target, source, length)


def streams() -> bool:
    """Whether copies use streaming stores: not if there was no compiler when holdfast was installed."""
    return _library() is not None


@cache
def _library() -> ctypes.CDLL | None:
    found = importlib.util.find_spec("holdfast.snapshot._stream")
    if found is None or found.origin is None:
        return None
    library = ctypes.CDLL(found.origin)
    library.holdfast_copy.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.holdfast_copy.restype = None
    return library
