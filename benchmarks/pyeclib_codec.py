"""The reference: a codec that encodes and reconstructs with pyeclib's own API. The backends are tested against it, and
measured beside it.

pyeclib frames each fragment with a header, copies its input, holds the GIL throughout every call and asserts on
unexpected input in C. So it only ever gets `bytes` of equal length, at most `MAX_UNIT_BYTES`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.ec import choose_codec
from holdfast.ec.backends import NumpyKernel
from holdfast.ec.codec import Buffer, Codec, check_equal_lengths, check_numbers

FRAGMENT_HEADER_BYTES = 80
MAX_UNIT_BYTES = 64 << 20
"""Far below the gigabyte at which the C library starts to lose data."""


class PyECLibCodec(Codec):
    """`Codec` with pyeclib. Its API cannot accumulate single units, so NumPy does that."""

    def __init__(self, k: int, m: int) -> None:
        """Raises `ValueError` for plain copies, which pyeclib lacks; `ImportError` if it or its ISA-L is missing."""
        if k == 1 and m > 1:
            raise ValueError(f"pyeclib has no plain copies (1+{m})")
        from pyeclib.ec_iface import ECDriver, ECDriverError

        super().__init__(k, m, NumpyKernel())
        # With m = 1 the Vandermonde code's only parity row is all ones: plain XOR. From m = 2 on a Vandermonde code is
        # not MDS for every k and m; a Cauchy code is.
        try:
            self._driver = ECDriver(k=k, m=m, ec_type="isa_l_rs_vand" if m == 1 else "isa_l_rs_cauchy")
        except ECDriverError as error:
            raise ImportError(f"pyeclib lacks its ISA-L: {error}") from error

    @property
    def name(self) -> str:
        return "pyeclib"

    def encode(self, data: Sequence[Buffer], parity: Sequence[Buffer]) -> None:
        if len(data) != self.k or len(parity) != self.m:
            raise ValueError(f"{self.k}+{self.m} code called with {len(data)} data and {len(parity)} parity units")
        length = check_equal_lengths([*data, *parity])
        for out, fragment in zip(parity, self._fragments(data, length)[self.k :], strict=True):
            out[:] = fragment[FRAGMENT_HEADER_BYTES : FRAGMENT_HEADER_BYTES + length]

    def reconstruct(self, units: Mapping[int, Buffer], wanted: Mapping[int, Buffer]) -> None:
        check_numbers([*units, *wanted], self.k, self.m)
        self._survivors(units)
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
        # pyeclib pads each of k equal parts to its word size: pass whole words, so that part i is unit i.
        padded = -(-length // 64) * 64
        joined = b"".join(bytes(unit).ljust(padded, b"\0") for unit in data)
        fragments: list[bytes] = self._driver.encode(joined)
        return fragments


def codec_of(k: int, m: int, backend: str) -> Codec:
    """The codec of a backend or, for ``"pyeclib"``, the reference. Raises as these."""
    return PyECLibCodec(k, m) if backend == "pyeclib" else choose_codec(k, m, backend)
