"""The choice of a backend. All backends write the same bytes, so each SMP of a job may choose its own."""

from __future__ import annotations

import logging
from functools import cache

from holdfast.ec import isal
from holdfast.ec.codec import Codec, Kernel
from holdfast.ec.numpy_kernel import NumpyKernel

BACKENDS = ("auto", "isal", "numpy")

log = logging.getLogger(__name__)


def choose_codec(k: int, m: int, backend: str = "auto") -> Codec:
    """The codec for k data and m parity units.

    Args:
        backend: ``"isal"`` (in place, about as fast as memory), ``"numpy"`` (no native code; slow for m > 1), or
            ``"auto"``: ISA-L or, if that cannot be used, NumPy, with one line in the log.

    Raises:
        ValueError: k or m is out of range, or the backend is unknown, not installed or unable to do this k and m.
    """
    if k < 1 or m < 1 or k + m > 255:
        raise ValueError(f"a code needs 1 <= k, 1 <= m and k + m <= 255, not k={k}, m={m}")
    if backend == "auto":
        return Codec(k, m, _auto()[0])
    if backend == "isal":
        try:
            return Codec(k, m, isal.load())
        except OSError as error:
            raise ValueError(f"backend 'isal' cannot be used: {error}; install pyeclib or libisal2") from error
    if backend == "numpy":
        return Codec(k, m, NumpyKernel())
    raise ValueError(f"unknown erasure code backend {backend!r}: use one of {', '.join(BACKENDS)}")


def describe_auto() -> tuple[str, str]:
    """The name of the backend that ``"auto"`` chooses, and why it is not the fast one (empty if it is)."""
    kernel, reason = _auto()
    return kernel.name, reason


@cache
def _auto() -> tuple[Kernel, str]:
    try:
        return isal.load(), ""
    except OSError as error:
        log.warning("erasure coding is slow, by NumPy: %s; install pyeclib or libisal2", error)
        return NumpyKernel(), str(error)
