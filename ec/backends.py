"""The choice of a backend."""

from __future__ import annotations

from ec.codec import Codec
from ec.pyeclib_codec import PyECLibCodec
from ec.xor import XorCodec


def choose_codec(k: int, m: int, backend: str = "auto") -> Codec:
    """The codec for k data and m parity units.

    Args:
        backend: ``"numpy"`` (XOR, m = 1), ``"pyeclib"`` (reference; slow: it frames and copies), or ``"auto"``:
            numpy where it can, else pyeclib.

    Raises:
        ValueError: k or m out of range, unknown backend, or a backend that cannot do this k and m.
    """
    if k < 1 or m < 1 or k + m > 255:
        raise ValueError(f"a code needs 1 <= k, 1 <= m and k + m <= 255, not k={k}, m={m}")
    if backend == "auto":
        backend = "numpy" if m == 1 else "pyeclib"
    if backend == "numpy":
        if m != 1:
            raise ValueError(f"backend 'numpy' is XOR and has m = 1, not m={m}: use backend 'pyeclib'")
        return XorCodec(k)
    if backend == "pyeclib":
        return PyECLibCodec(k, m)
    raise ValueError(f"unknown erasure code backend {backend!r}: use 'auto', 'numpy' or 'pyeclib'")
