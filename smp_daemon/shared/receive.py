"""Receives raw bytes from a socket and digests them as they arrive, in one call per unit, with the GIL released.

`smp_daemon/shared/receive.c` is compiled when the package is installed, and uses xxHash from the library inside the
``xxhash`` package. Where either is missing, `shared.transport` receives and digests piece by piece.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import os
import socket
from functools import cache
from typing import Any

from holdfast.smp_daemon.shared import xxh3

PIECE_BYTES = 256 << 10
"""Bytes digested at a time: fewer than a core's own cache holds."""


def is_compiled() -> bool:
    """Whether `receive` is available."""
    return _library() is not None


def receive(sock: socket.socket, payload: memoryview, timeout_s: float) -> tuple[int, int]:
    """Fill `payload` from a kernel socket. Blocks; other Python threads keep running.

    Returns:
        How many bytes arrived, and their xxh3-64. Fewer than `payload` holds if the other side closed the connection.

    Raises:
        OSError: the connection broke; `TimeoutError` if not all bytes arrived within `timeout_s`.
    """
    library = _library()
    assert library is not None
    function, hash_functions = library
    digest = ctypes.c_uint64()
    target = ctypes.c_char.from_buffer(payload) if payload.nbytes else None
    place = ctypes.addressof(target) if target is not None else None
    count = function(
        sock.fileno(), place, payload.nbytes, PIECE_BYTES, int(timeout_s * 1e3), hash_functions, ctypes.byref(digest)
    )
    if count < 0:
        raise TimeoutError if count == -errno.ETIMEDOUT else OSError(-count, os.strerror(-count))
    return count, digest.value


@cache
def _library() -> tuple[Any, Any] | None:
    """The compiled function, and the table of xxHash functions that it takes; None if either is missing."""
    found = importlib.util.find_spec("holdfast.smp_daemon.shared._receive")
    functions = xxh3.functions()
    if found is None or found.origin is None or functions is None:
        return None
    function = ctypes.CDLL(found.origin).holdfast_receive
    function.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_uint64),
    ]
    function.restype = ctypes.c_longlong
    return function, functions
