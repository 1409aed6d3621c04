"""m = 1: the parity unit is the XOR of the data units. NumPy only, no native library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ec.codec import Buffer, check_enough, check_equal_lengths, check_numbers


class XorCodec:
    """XOR of k data units. Releases the GIL for the length of each pass over a unit."""

    m = 1
    name = "numpy"

    def __init__(self, k: int) -> None:
        self.k = k

    def encode(self, data: Sequence[Buffer], parity: Sequence[Buffer]) -> None:
        if len(data) != self.k or len(parity) != 1:
            raise ValueError(f"{self.k}+1 encodes {self.k} data units into 1, not {len(data)} into {len(parity)}")
        check_equal_lengths([*data, *parity])
        _xor_into(parity[0], data)

    def accumulate(self, index: int, unit: Buffer, parity: Mapping[int, Buffer]) -> None:
        if not 0 <= index < self.k or set(parity) != {0}:
            raise ValueError(f"{self.k}+1 has data units 0..{self.k - 1} and parity row 0")
        check_equal_lengths([unit, *parity.values()])
        out = _bytes_of(parity[0])
        np.bitwise_xor(out, _bytes_of(unit), out=out)

    def reconstruct(self, units: Mapping[int, Buffer], wanted: Mapping[int, Buffer]) -> None:
        check_numbers([*units, *wanted], self.k, self.m)
        check_enough(units, self.k)
        check_equal_lengths([*units.values(), *wanted.values()])
        for index, out in wanted.items():
            _xor_into(out, [units[index]] if index in units else list(units.values()))


def _bytes_of(buffer: Buffer) -> NDArray[np.uint8]:
    return np.frombuffer(buffer, dtype=np.uint8)


def _xor_into(out: Buffer, units: Sequence[Buffer]) -> None:
    result = _bytes_of(out)
    np.copyto(result, _bytes_of(units[0]))
    for unit in units[1:]:
        np.bitwise_xor(result, _bytes_of(unit), out=result)
