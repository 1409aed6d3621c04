"""Erasure codes over buffers that belong to the caller.

Units of one stripe are numbered 0..k-1 (data) and k..k+m-1 (parity). All buffers of one call have the same length;
results are written into buffers that are passed in, and nothing else is written or copied.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from holdfast.ec.matrix import Matrix, decode_matrix, parity_matrix

Buffer = memoryview
"""A C-contiguous view of bytes (``format == "B"``)."""


class TooManyErasures(ValueError):
    """Fewer than k units of a stripe are left, so its lost units cannot be computed."""


class Kernel(Protocol):
    """The operations of a backend: linear combinations of buffers in GF(2^8).

    The buffers of one call have the same length and do not overlap. Thread-safe; releases the GIL during a pass over
    the bytes.
    """

    name: str

    def combine(self, matrix: Matrix, sources: Sequence[Buffer], outs: Sequence[Buffer]) -> None:
        """``outs[i] = sum over j of matrix[i, j] * sources[j]``; reads nothing beyond the ends of the buffers."""
        ...

    def add(self, column: Sequence[int], source: Buffer, outs: Sequence[Buffer]) -> None:
        """``outs[i] += column[i] * source``."""
        ...


class Codec:
    """k data units and m parity units per stripe; any k of these k + m units determine the others.

    m = 1 is XOR, k = 1 keeps plain copies, anything else is Reed-Solomon with a Cauchy matrix. Keeps no state between
    calls and may be called from several threads at once. A call takes about as long as reading the units.
    """

    def __init__(self, k: int, m: int, kernel: Kernel) -> None:
        self.k = k
        self.m = m
        self._kernel = kernel

    @property
    def name(self) -> str:
        """The backend's name."""
        return self._kernel.name

    def encode(self, data: Sequence[Buffer], parity: Sequence[Buffer]) -> None:
        """Write the m parity units of k data units into `parity`.

        Raises:
            ValueError: not k data and m parity units, or lengths differ.
        """
        if len(data) != self.k or len(parity) != self.m:
            raise ValueError(f"{self.k}+{self.m} code called with {len(data)} data and {len(parity)} parity units")
        if check_equal_lengths([*data, *parity]):
            self._kernel.combine(parity_matrix(self.k, self.m), data, parity)

    def factor(self, index: int, row: int) -> int:
        """The factor of data unit `index` in parity unit `row`."""
        return int(parity_matrix(self.k, self.m)[row, index])

    def begin(self, index: int, unit: Buffer, parity: Mapping[int, Buffer]) -> None:
        """`accumulate` the first of k units, overwriting whatever the parities contain. Raises the same errors."""
        column = self._column(index, unit, parity)
        for factor, out in zip(column, parity.values(), strict=True):
            if factor == 1:
                np.copyto(as_array(out), as_array(unit))
            elif unit.nbytes:
                self._kernel.combine(np.array([[factor]], np.uint8), [unit], [out])

    def accumulate(self, index: int, unit: Buffer, parity: Mapping[int, Buffer]) -> None:
        """Add data unit `index` to the given parity units, in place.

        Parities start as zeros. Once each of the k units has been added, in any order, they equal what `encode` writes.
        Adding a unit twice is an error that this call cannot detect.

        Args:
            parity: parity units by row 0..m-1. Those of one stripe are on different nodes, so often only one is given.

        Raises:
            ValueError: no such data unit or parity row, or lengths differ.
        """
        column = self._column(index, unit, parity)
        if unit.nbytes:
            self._kernel.add(column, unit, list(parity.values()))

    def reconstruct(self, units: Mapping[int, Buffer], wanted: Mapping[int, Buffer]) -> None:
        """Compute the units named by `wanted` from any k surviving `units`, into the given buffers.

        Raises:
            TooManyErasures: fewer than k units were given.
            ValueError: a number is not one of 0..k+m-1, or lengths differ.
        """
        check_numbers([*units, *wanted], self.k, self.m)
        survivors = self._survivors(units)
        if not check_equal_lengths([*units.values(), *wanted.values()]):
            return
        for index in wanted.keys() & units.keys():
            np.copyto(as_array(wanted[index]), as_array(units[index]))
        lost = tuple(index for index in wanted if index not in units)
        if lost:
            matrix = decode_matrix(self.k, self.m, survivors, lost)
            self._kernel.combine(matrix, [units[i] for i in survivors], [wanted[i] for i in lost])

    def coefficients(self, survivors: Collection[int], wanted: int) -> dict[int, int]:
        """The factors with which unit `wanted` is a sum of k of the `survivors`; those with factor 0 are left out.

        For partial sums: start from zeros and call `add_scaled` for each of them, in any order and on any node.

        Raises:
            TooManyErasures: fewer than k survivors.
            ValueError: a number is not one of 0..k+m-1.
        """
        check_numbers([*survivors, wanted], self.k, self.m)
        chosen = self._survivors(survivors)
        row = decode_matrix(self.k, self.m, chosen, (wanted,))[0]
        return {index: int(factor) for index, factor in zip(chosen, row, strict=True) if factor}

    def add_scaled(self, factor: int, unit: Buffer, out: Buffer) -> None:
        """``out += factor * unit``."""
        if not 0 <= factor <= 255:
            raise ValueError(f"a factor is a byte, not {factor}")
        if check_equal_lengths([unit, out]):
            self._kernel.add([factor], unit, [out])

    def _column(self, index: int, unit: Buffer, parity: Mapping[int, Buffer]) -> list[int]:
        """The factor of data unit `index` in each of the parities. Raises `ValueError`."""
        if not 0 <= index < self.k or not parity or not parity.keys() <= set(range(self.m)):
            raise ValueError(
                f"{self.k}+{self.m} has data units 0..{self.k - 1} and parity rows 0..{self.m - 1}, "
                f"not unit {index} and rows {sorted(parity)}"
            )
        check_equal_lengths([unit, *parity.values()])
        return [self.factor(index, row) for row in parity]

    def _survivors(self, units: Collection[int]) -> tuple[int, ...]:
        if len(units) < self.k:
            raise TooManyErasures(f"{len(units)} units of a stripe are left, and {self.k} are needed")
        return tuple(sorted(units)[: self.k])


def as_array(buffer: Buffer) -> Matrix:
    """The buffer as a NumPy array, without a copy."""
    return np.frombuffer(buffer, dtype=np.uint8)


def check_equal_lengths(buffers: Sequence[Buffer]) -> int:
    """The common length of `buffers` in bytes.

    Raises:
        ValueError: their lengths differ.
    """
    lengths = {b.nbytes for b in buffers}
    if len(lengths) > 1:
        raise ValueError(f"units of one stripe must have one length, not {sorted(lengths)}")
    return lengths.pop() if lengths else 0


def check_numbers(numbers: Iterable[int], k: int, m: int) -> None:
    """Raises `ValueError` unless each of `numbers` names a unit of a stripe of k + m."""
    unknown = sorted(i for i in numbers if not 0 <= i < k + m)
    if unknown:
        raise ValueError(f"{k}+{m} code has units 0..{k + m - 1}, not {unknown}")
