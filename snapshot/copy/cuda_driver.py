"""Calls into CUDA's driver that torch does not offer.

Each is looked up at its first use in ``libcuda``, which comes with the driver of the device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.snapshot.copy.runs import Driver, Runs, queue

REGISTER_BYTES = 16 << 20
"""Most bytes for one ``cudaHostRegister``: launches of other threads and processes wait until it ends. On an H100 that
took 3.5 ms for 64 MiB, and once 12."""

RELAXED = 2
"""Capture mode in which nothing that this thread does breaks a capture of another thread."""

TAKES_HOST_ADDRESSES = 91
"""``CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM``."""

NON_BLOCKING = 1
"""Stream flag: the stream does not wait for the default stream."""

BATCHES_SINCE = 12080
"""The first version of CUDA that can queue many copies with one call."""

IN_STREAM_ORDER = 1
"""Order of a batch's reads: each source is read when the stream has come that far."""

log = get_log(__name__)


@contextmanager
def relaxed() -> Iterator[None]:
    """In this block nothing that this thread does makes a capture of another thread fail, or fails because of one."""
    mode = ctypes.c_int(RELAXED)
    _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))  # puts the earlier mode there
    try:
        yield
    finally:
        _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


def takes_host_addresses(number: int) -> bool:
    """Whether the device of that number accepts the host's addresses of registered memory. Under WSL2 and on some
    paravirtualised devices such an access is an illegal one, which ends all work of the process."""
    device, answer = ctypes.c_int(), ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(device), number)
    _call("cuDeviceGetAttribute", ctypes.byref(answer), TAKES_HOST_ADDRESSES, device)
    return bool(answer.value)


def allocation_of(address: int) -> int:
    """Where the allocation begins that an address of a device is in; 0: the driver does not know, as of memory that was
    mapped. The driver refuses a copy that goes beyond the end of one, even if another follows without a gap."""
    start, count = ctypes.c_uint64(), ctypes.c_size_t()
    code = _library().cuMemGetAddressRange_v2(ctypes.byref(start), ctypes.byref(count), ctypes.c_uint64(address))
    return 0 if code else start.value


def new_stream(priority: int) -> int:
    """The handle of a new stream of the current device that nobody else is given. Negative priorities go first."""
    stream = ctypes.c_void_p()
    _call("cuStreamCreateWithPriority", ctypes.byref(stream), NON_BLOCKING, priority)
    return int(stream.value or 0)


def queue_copies(parts: Sequence[Runs], stream: int, between: int = 0) -> None:
    """Queue copies on a stream, in parts: rows of source, target and bytes, each on the device or in pinned memory.

    One call queues each part as a whole; with an older driver, on the default stream, or if that call fails, each copy
    is queued by a call of its own. All of this is in C, and the GIL is free meanwhile.

    Args:
        between: address of a byte of the device, which a kernel sets after each part; 0: none.
    """
    if code := queue(_queueing(bool(stream)), parts, stream, between):
        raise RuntimeError(_text(code))


class _Attributes(ctypes.Structure):
    """``CUmemcpyAttributes``."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


_READ_IN_ORDER = _Attributes(order=IN_STREAM_ORDER)


@cache
def _queueing(batches: bool) -> Driver:
    """The driver's functions. `batches`: with the one for many copies in one call, if there is one."""
    batch = _batch() if batches else None
    return Driver(_address("cuMemcpyAsync"), batch, ctypes.addressof(_READ_IN_ORDER), _address("cuMemsetD8Async"))


def _batch() -> int | None:
    """The address of ``cuMemcpyBatchAsync`` as first released, which returns an error code; None: the driver is
    older."""
    version, found, status = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
    _call("cuDriverGetVersion", ctypes.byref(version))
    if version.value >= BATCHES_SINCE:
        _call(
            "cuGetProcAddress_v2",
            b"cuMemcpyBatchAsync",
            ctypes.byref(found),
            BATCHES_SINCE,
            ctypes.c_uint64(0),
            ctypes.byref(status),
        )
    if not found.value:
        log.debug("this driver has no batches of copies")
    return found.value


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the driver. Raises `RuntimeError` with the driver's own message."""
    if code := getattr(_library(), name)(*arguments):
        raise RuntimeError(f"{name}: {_text(code)}")


def _text(code: int) -> str:
    said = ctypes.c_char_p()
    _library().cuGetErrorString(code, ctypes.byref(said))
    return f"CUDA error {code}: {(said.value or b'unknown').decode()}"


def _address(name: str) -> int:
    return int(ctypes.cast(getattr(_library(), name), ctypes.c_void_p).value or 0)


@cache
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ConfigError(f"CUDA's driver cannot be used: {error}") from error
