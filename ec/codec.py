"""The interface of an erasure code, and the choice of a backend.

Units of one stripe are numbered 0..k-1 (data) and k..k+m-1 (parity). Every buffer belongs to the caller and all
buffers of one call have the same length; results are written into buffers that are passed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

Buffer = memoryview
"""A C-contiguous view of bytes (``format == "B"``)."""


class TooManyErasures(ValueError):
    """Fewer than k units of a stripe are left, so its lost units cannot be computed."""


class Codec(Protocol):
    """k data units and m parity units per stripe; any k of the k + m give back the others.

    Implementations keep no state between calls and may be called from several threads at once.
    """

    k: int
    m: int
    name: str

    def encode(self, data: Sequence[Buffer], parity: Sequence[Buffer]) -> None:
        """Write the m parity units of k data units into `parity`."""
        ...

    def accumulate(self, index: int, unit: Buffer, parity: Mapping[int, Buffer]) -> None:
        """Fold data unit `index` into those parities that are at hand, in place.

        Args:
            parity: by row 0..m-1; parities of one stripe stand on different nodes, so it may be one of them only.

        Parities start as zeros; after each of the k units was folded in once, in any order, they equal what
        `encode` writes. Folding a unit in twice is an error that this call cannot see.
        """
        ...

    def reconstruct(self, units: Mapping[int, Buffer], wanted: Mapping[int, Buffer]) -> None:
        """Compute the units named by `wanted` from any k surviving `units`, into the given buffers.

        Raises:
            TooManyErasures: fewer than k units were given.
            ValueError: a number is not one of 0..k+m-1, or lengths differ.
        """
        ...


def check_equal_lengths(buffers: Sequence[Buffer]) -> int:
    """The common length of `buffers` in bytes.

    Raises:
        ValueError: their lengths differ.
    """
    lengths = {b.nbytes for b in buffers}
    if len(lengths) > 1:
        raise ValueError(f"units of one stripe must have one length, not {sorted(lengths)}")
    return lengths.pop() if lengths else 0


def check_enough(units: Mapping[int, Buffer], k: int) -> None:
    """Raises `TooManyErasures` if `units` holds fewer than k."""
    if len(units) < k:
        raise TooManyErasures(f"{len(units)} units of a stripe are left, and {k} are needed")


def check_numbers(numbers: Iterable[int], k: int, m: int) -> None:
    """Raises `ValueError` unless each of `numbers` names a unit of a stripe of k + m."""
    unknown = sorted(i for i in numbers if not 0 <= i < k + m)
    if unknown:
        raise ValueError(f"{k}+{m} code has units 0..{k + m - 1}, not {unknown}")
