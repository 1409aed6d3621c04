"""The backend without native code. XOR is fast; everything else uses table lookups and is slow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from holdfast.ec.codec import Buffer, as_array
from holdfast.ec.matrix import Matrix, multiplication_table

PIECE_BYTES = 1 << 20
"""Size of the pieces for table lookups, which bounds their memory: NumPy widens every index to 8 bytes."""


class NumpyKernel:
    """`ec.codec.Kernel` with NumPy alone."""

    name = "numpy"

    def combine(self, matrix: Matrix, sources: Sequence[Buffer], outs: Sequence[Buffer]) -> None:
        for row, out in zip(matrix, outs, strict=True):
            result = as_array(out)
            operands = [(int(factor), source) for factor, source in zip(row, sources, strict=True) if factor]
            if not operands:
                result[:] = 0
                continue
            for done, (factor, source) in enumerate(operands):
                if done:
                    _add(result, factor, source)
                elif factor == 1:
                    np.copyto(result, as_array(source))
                else:
                    result[:] = 0
                    _add(result, factor, source)

    def add(self, column: Sequence[int], source: Buffer, outs: Sequence[Buffer]) -> None:
        for factor, out in zip(column, outs, strict=True):
            _add(as_array(out), factor, source)


def _add(result: Matrix, factor: int, source: Buffer) -> None:
    if factor == 0:
        return
    unit = as_array(source)
    if factor == 1:
        np.bitwise_xor(result, unit, out=result)
        return
    table = multiplication_table()[factor]
    for start in range(0, len(unit), PIECE_BYTES):
        piece = slice(start, start + PIECE_BYTES)
        np.bitwise_xor(result[piece], table[unit[piece]], out=result[piece])
