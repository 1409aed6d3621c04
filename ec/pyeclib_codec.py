"""The reference backend: pyeclib's own API, which every other backend is tested against.

It frames each fragment with a header and copies its input, holds the GIL through every call and asserts on
unexpected input in C, so it is handed `bytes` of equal length, of at most `MAX_UNIT_BYTES`, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ec.codec import Buffer, check_enough, check_equal_lengths, check_numbers

FRAGMENT_HEADER_BYTES = 80
MAX_UNIT_BYTES = 64 << 20
"""Far below the gigabyte at which the C library starts to lose data."""


class PyECLibCodec:
    """XOR (m = 1) or Reed-Solomon with a Cauchy matrix (m >= 2), by pyeclib."""

    name = "pyeclib"

    def __init__(self, k: int, m: int) -> None:
        from pyeclib.ec_iface import ECDriver

        self.k = k
        self.m = m
        # The one parity row of the Vandermonde code is all ones: plain XOR. From m = 2 on Vandermonde is not
        # MDS for every k and m, Cauchy is.
        self._driver = ECDriver(k=k, m=m, ec_type="isa_l_rs_vand" if m == 1 else "isa_l_rs_cauchy")

    def encode(self, data: Sequence[Buffer], parity: Sequence[Buffer]) -> None:
        if len(data) != self.k or len(parity) != self.m:
            raise ValueError(f"{self.k}+{self.m} code called with {len(data)} data and {len(parity)} parity units")
        length = check_equal_lengths([*data, *parity])
        for out, fragment in zip(parity, self._fragments(data, length)[self.k :], strict=True):
            out[:] = fragment[FRAGMENT_HEADER_BYTES : FRAGMENT_HEADER_BYTES + length]

    def accumulate(self, index: int, unit: Buffer, parity: Mapping[int, Buffer]) -> None:
        if not 0 <= index < self.k or not parity or not parity.keys() <= set(range(self.m)):
            raise ValueError(f"{self.k}+{self.m} has data units 0..{self.k - 1} and parity rows 0..{self.m - 1}")
        check_equal_lengths([unit, *parity.values()])
        # The code is linear: the parities of one unit among zeros are what that unit adds to them.
        zeros = memoryview(bytes(unit.nbytes))
        alone = [bytearray(unit.nbytes) for _ in range(self.m)]
        self.encode(
            [unit if i == index else zeros for i in range(self.k)],
            [memoryview(part) for part in alone],
        )
        for row, out in parity.items():
            mixed = int.from_bytes(out, "little") ^ int.from_bytes(alone[row], "little")
            out[:] = mixed.to_bytes(out.nbytes, "little")

    def reconstruct(self, units: Mapping[int, Buffer], wanted: Mapping[int, Buffer]) -> None:
        check_numbers([*units, *wanted], self.k, self.m)
        check_enough(units, self.k)
        length = check_equal_lengths([*units.values(), *wanted.values()])
        if length == 0:
            return
        framed = self._fragments([memoryview(bytes(length))] * self.k, length)
        survivors = [
            framed[i][:FRAGMENT_HEADER_BYTES] + bytes(unit) + framed[i][FRAGMENT_HEADER_BYTES + length :]
            for i, unit in sorted(units.items())
        ][: self.k]
        wanted_indices = sorted(wanted)
        rebuilt = self._driver.reconstruct(survivors, wanted_indices)
        for index, fragment in zip(wanted_indices, rebuilt, strict=True):
            wanted[index][:] = fragment[FRAGMENT_HEADER_BYTES : FRAGMENT_HEADER_BYTES + length]

    def _fragments(self, data: Sequence[Buffer], length: int) -> list[bytes]:
        if length > MAX_UNIT_BYTES:
            raise ValueError(f"unit of {length} bytes: pyeclib is used up to {MAX_UNIT_BYTES} bytes")
        if length == 0:
            return [bytes(FRAGMENT_HEADER_BYTES)] * (self.k + self.m)
        # pyeclib pads each of k equal parts to its word size: hand it whole words, so that part i is unit i.
        padded = -(-length // 64) * 64
        joined = b"".join(bytes(unit).ljust(padded, b"\0") for unit in data)
        fragments: list[bytes] = self._driver.encode(joined)
        return fragments
