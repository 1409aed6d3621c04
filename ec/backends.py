"""The backends that multiply, and the choice of one. All write the same bytes, so each SMP of a job may choose its own.

The fast one is Intel's ISA-L, called in place on the caller's memory with the GIL released. The library comes from the
pyeclib wheel, which bundles its own build, or from the system (``libisal2`` on Debian). Only its inner loops are used;
the matrices are ours (`ec.matrix`). The other has no native code.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path

import numpy as np

from holdfast.ec.codec import Buffer, Codec, Kernel, as_array
from holdfast.ec.matrix import Matrix, multiplication_table

BACKENDS = ("auto", "isal", "numpy")
LOOKUP_BYTES = 1 << 20
"""Size of the pieces for table lookups, which bounds their memory: NumPy widens every index to 8 bytes."""

PIECE_BYTES = 1 << 30
"""Longer buffers are processed in pieces of this size, because lengths are C ints in ISA-L."""

TABLE_BYTES = 32
"""ISA-L expands each factor to a table of this size."""

log = logging.getLogger(__name__)


class NumpyKernel:
    """`ec.codec.Kernel` with NumPy alone: XOR is fast, everything else uses table lookups and is slow."""

    name = "numpy"

    def combine(self, matrix: Matrix, sources: Sequence[Buffer], outs: Sequence[Buffer]) -> None:
        for row, out in zip(matrix, outs, strict=True):
            result = as_array(out)
            result[:] = 0
            for factor, source in zip(row, sources, strict=True):
                _add(result, int(factor), source)

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
    for start in range(0, len(unit), LOOKUP_BYTES):
        piece = slice(start, start + LOOKUP_BYTES)
        np.bitwise_xor(result[piece], table[unit[piece]], out=result[piece])


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
            return Codec(k, m, load())
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
        return load(), ""
    except OSError as error:
        log.warning("erasure coding is slow, by NumPy: %s; install pyeclib or libisal2", error)
        return NumpyKernel(), str(error)


class IsalKernel:
    """`ec.codec.Kernel` with ISA-L."""

    name = "isal"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def combine(self, matrix: Matrix, sources: Sequence[Buffer], outs: Sequence[Buffer]) -> None:
        rows, columns = matrix.shape
        length, addresses = outs[0].nbytes, _addresses(sources, outs)
        tables = self._tables(matrix.tobytes(), rows, columns)
        for start in range(0, length, PIECE_BYTES):
            self._library.ec_encode_data(
                min(PIECE_BYTES, length - start),
                columns,
                rows,
                tables,
                _pointers(addresses[:columns], start),
                _pointers(addresses[columns:], start),
            )

    def add(self, column: Sequence[int], source: Buffer, outs: Sequence[Buffer]) -> None:
        tables = self._tables(bytes(column), len(column), 1)
        addresses = _addresses([source], outs)
        for start in range(0, source.nbytes, PIECE_BYTES):
            self._library.ec_encode_data_update(
                min(PIECE_BYTES, source.nbytes - start),
                1,
                len(column),
                0,
                tables,
                addresses[0] + start,
                _pointers(addresses[1:], start),
            )

    @lru_cache(maxsize=4096)  # noqa: B019  # there is one kernel in a process
    def _tables(self, factors: bytes, rows: int, columns: int) -> ctypes.Array[ctypes.c_ubyte]:
        tables = (ctypes.c_ubyte * (TABLE_BYTES * rows * columns))()
        self._library.ec_init_tables(columns, rows, factors, tables)
        return tables


@cache
def load() -> IsalKernel:
    """The kernel of ISA-L, loaded once per process.

    Raises:
        OSError: no library was found that computes correctly; the message says what is wrong with each candidate.
    """
    tried = []
    for name in _candidates():
        try:
            kernel = IsalKernel(_bind(ctypes.CDLL(name)))
            _check(kernel)
            return kernel
        except (OSError, AttributeError) as error:
            tried.append(f"{name}: {error}")
    raise OSError(f"no usable ISA-L ({'; '.join(tried)})")


def _candidates() -> list[str]:
    """Libraries to try: the wheel's own first, then the system's."""
    found = []
    spec = importlib.util.find_spec("pyeclib")
    if spec is not None and spec.origin is not None:
        site = Path(spec.origin).parent.parent
        found = [str(path) for path in sorted((site / "pyeclib.libs").glob("libisal*.so*"))]
    return [*found, "libisal.so.2"]


def _bind(library: ctypes.CDLL) -> ctypes.CDLL:
    number, pointer = ctypes.c_int, ctypes.c_void_p
    library.ec_init_tables.argtypes = [number, number, ctypes.c_char_p, pointer]
    library.ec_init_tables.restype = None
    library.ec_encode_data.argtypes = [number, number, number, pointer, pointer, pointer]
    library.ec_encode_data.restype = None
    library.ec_encode_data_update.argtypes = [number, number, number, number, pointer, pointer, pointer]
    library.ec_encode_data_update.restype = None
    return library


def _check(kernel: IsalKernel) -> None:
    """Raises `OSError` if the library computes in another field or has another interface; fields differ in 2 * 0x80."""
    source, out = memoryview(bytes([0x80] * 100)), memoryview(bytearray(100))
    kernel.combine(np.array([[2]], dtype=np.uint8), [source], [out])
    kernel.add([1], source, [out])
    if bytes(out) != bytes([0x1D ^ 0x80] * 100):
        raise OSError("it computes in another field than GF(2^8) with polynomial 0x11d")


def _addresses(sources: Sequence[Buffer], outs: Sequence[Buffer]) -> list[int]:
    """The addresses of the buffers. They are valid while the caller holds the buffers, as every caller does."""
    for out in outs:  # the library would overwrite immutable `bytes`, and crash on a read-only mapping
        if out.readonly:
            raise ValueError("a result cannot be written into a read-only buffer: pass a view of writable memory")
    return [_address(buffer) for buffer in (*sources, *outs)]


def _address(buffer: Buffer) -> int:
    if not buffer.c_contiguous:
        raise BufferError("a unit must be contiguous: pass a view without a step")
    if buffer.readonly:
        return int(as_array(buffer).ctypes.data)
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))  # faster, but only for writable memory


def _pointers(addresses: Sequence[int], offset: int = 0) -> ctypes.Array[ctypes.c_void_p]:
    if offset:
        addresses = [address + offset for address in addresses]
    return (ctypes.c_void_p * len(addresses))(*addresses)
