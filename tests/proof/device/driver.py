"""A device behind a driver of our own, `libcuda.c`: streams, events and captures as threads meet them on a real one.

It does its work in a thread, after delays that a seed draws, so holdfast's own `Runtime` and `cuda_driver` run on
it, through ctypes. What torch would call is called here.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.proof.device.queues import EAGER, LAZY, Work

SOURCE = Path(__file__).with_name("libcuda.c")

POLL_S = 1e-4

LONGEST_US = 300
"""Longest delay before a piece of work, in microseconds."""

OUT_OF_MEMORY, NOT_READY = 2, 600
RELAXED = 2

_ORDERS = {LAZY: 1, EAGER: 2}

_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_uint64)
_kept: list[Any] = []


@cache
def library() -> ctypes.CDLL:
    """Build the driver, and load it as ``libcuda.so.1``. Raises `RuntimeError` if there is no compiler, or if torch is
    built with CUDA: it would take this for a real driver, and crash."""
    if shutil.which("cc") is None:
        raise RuntimeError("there is no compiler here")
    if torch.version.cuda is not None:
        raise RuntimeError("torch is built with CUDA")
    with tempfile.TemporaryDirectory(prefix="holdfast-libcuda-") as folder:
        built = Path(folder) / "libcuda.so.1"
        options = ["-O2", "-shared", "-fPIC", "-pthread", "-Wl,-soname,libcuda.so.1"]
        subprocess.run(["cc", *options, "-o", str(built), str(SOURCE)], check=True, timeout=60)
        found = ctypes.CDLL(str(built), os.RTLD_GLOBAL | os.RTLD_NOW)
    found.testGet.restype = ctypes.c_long
    return found


class Driver:
    """The driver, with devices that begin anew. Only one is used at a time.

    Args:
        order: `LAZY`, kernels come before copies; `EAGER`, copies before kernels; or a seed.
        connections: number of hardware queues, as ``CUDA_DEVICE_MAX_CONNECTIONS``.

    Attributes:
        number: the calling thread's current device.
    """

    def __init__(self, order: str | int, devices: int = 1, connections: int = 8) -> None:
        self._library = library()
        handles = (ctypes.c_void_p * devices)()
        seed, wanted = (order, 0) if isinstance(order, int) else (1, _ORDERS[order])
        self._library.testReset(ctypes.c_uint64(seed), wanted, connections, LONGEST_US, devices, handles)
        self.defaults = [DriverStream(self, number, handle or 0, 0) for number, handle in enumerate(handles)]
        self._local = threading.local()
        self._lock = threading.Lock()  # guards `_works` and `_next`
        self._works: dict[int, Work] = {}
        self._next = 0
        self._kernel = _KERNEL(self._work)
        _kept.append(self._kernel)  # the device may still call it when this is gone
        self.failure: BaseException | None = None

    @property
    def number(self) -> int:
        return getattr(self._local, "number", 0)

    @number.setter
    def number(self, number: int) -> None:
        self._local.number = number

    def bind(self, number: int | None = None) -> None:
        """Make the context of a device, by default of the current one, this thread's, as calls of the runtime do."""
        self.number = self.number if number is None else number
        self._library.cuCtxSetCurrent(self.number)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver as the runtime would. Raises what torch would raise."""
        self.bind()
        check(getattr(self._library, name)(*arguments))

    def call_on(self, device: int, name: str, *arguments: Any) -> None:
        """As `call`, with a device as the current one meanwhile: torch does so for work on a stream of it."""
        before, self.number = self.number, device
        try:
            self.call(name, *arguments)
        finally:
            self.bind(before)

    def launch(self, device: int, handle: int, work: Work) -> None:
        """Queue a kernel."""
        with self._lock:
            self._next += 1
            number = self._next
            self._works[number] = work
        self.call_on(device, "testLaunch", ctypes.c_void_p(handle), self._kernel, ctypes.c_uint64(number))

    def stream(self, device: int, *, training: bool = True) -> DriverStream:
        """Make a stream."""
        handle = ctypes.c_void_p()
        self.bind(device)
        check(self._library.cuStreamCreateWithPriority(ctypes.byref(handle), 1, 0))
        return DriverStream(self, device, handle.value or 0)

    def rest(self) -> None:
        """Let the device finish what it can, whatever state it is in."""
        self.set("stuck", 0)
        with suppress(RuntimeError):
            self.run()

    def run(self, until: DriverEvent | None = None) -> None:
        """Block until `until` has passed, or all work is done."""
        if until is None:
            self.call("cuCtxSynchronize")
        while until is not None and not until.query():
            time.sleep(POLL_S)

    def fail_if_broken(self) -> None:
        """Raise what a kernel raised."""
        if self.failure is not None:
            raise self.failure

    def step(self) -> None:
        """The device has a thread of its own."""

    def memory(self, name: str, count: int) -> int:
        """The address of new memory, by ``cuMemAlloc_v2`` or ``cuMemHostAlloc``. It is never given back."""
        place = ctypes.c_void_p()
        if name == "cuMemHostAlloc":
            self.call(name, ctypes.byref(place), ctypes.c_size_t(count), 0)
        else:
            with self.relaxed():  # as in torch, which allocates memory during captures
                self.call(name, ctypes.byref(place), ctypes.c_size_t(count))
        return place.value or 0

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        """In this block nothing that this thread does invalidates a capture."""
        mode = ctypes.c_int(RELAXED)
        self._library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        yield
        self._library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    def set(self, name: str, value: int) -> None:
        """Set how the device is: ``fail_copy`` (the nth from now on fails), ``refuse_from`` (registrations from the nth
        on), ``sees_host`` (0: no host addresses of registered memory), ``memory_left`` and ``pinned_left`` in bytes,
        ``stuck``."""
        self._library.testSet(name.encode(), ctypes.c_int64(value))

    def get(self, name: str) -> int:
        """How many ``copies`` were done, ranges are ``registered``, or kernels were queued behind a copy
        (``waited_kernels``)."""
        return int(self._library.testGet(name.encode()))

    def touch(self, what: str) -> None:
        """Called before `what` CUDA forbids during a capture. Raises `RuntimeError` if it is forbidden now."""
        check(self._library.testUnsafe())

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """``torch.cuda.device``: it makes no context for the device that is the current one already."""
        before, number = self.number, torch.device(device).index or 0
        if number != before:
            self.bind(number)
        yield
        if number != before:
            self.bind(before)

    def cudart(self) -> Any:
        """``torch.cuda.cudart``."""

        def register(address: int, count: int, flags: int) -> int:
            self.bind()
            return int(self._library.cuMemHostRegister_v2(ctypes.c_void_p(address), ctypes.c_size_t(count), flags))

        def unregister(address: int) -> int:
            self.bind()
            return int(self._library.cuMemHostUnregister(ctypes.c_void_p(address)))

        return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)

    def _work(self, number: int) -> None:
        """Called in the device's thread. A replay calls it again, so works are kept."""
        try:
            self._works[number]()
        except BaseException as error:
            self.failure = error


class DriverEvent:
    """An event, as torch makes them."""

    def __init__(self, driver: Driver, device: int) -> None:
        self._driver = driver
        self.handle = ctypes.c_void_p()
        driver.call_on(device, "cuEventCreate", ctypes.byref(self.handle), 2)

    def query(self) -> bool:
        self._driver.bind()
        code = library().cuEventQuery(self.handle)
        if code != NOT_READY:
            check(code)
        return bool(code != NOT_READY)

    @property
    def passed(self) -> bool:
        return self.query()


class DriverStream:
    """A stream: what `DeviceQueue` is for the emulated device, and ``torch.cuda.Stream`` for a real one."""

    def __init__(self, driver: Driver, device: int, handle: int, cuda_stream: int | None = None) -> None:
        """`cuda_stream`: how torch calls it; the default stream is 0 there."""
        self._driver = driver
        self.device = device
        self.handle = handle
        self.cuda_stream = handle if cuda_stream is None else cuda_stream

    def queue(self, work: Work) -> None:
        self._driver.launch(self.device, self.handle, work)

    def record_event(self) -> DriverEvent:
        event = DriverEvent(self._driver, self.device)
        self._driver.call_on(self.device, "cuEventRecord", event.handle, ctypes.c_void_p(self.handle))
        return event

    def wait_event(self, event: DriverEvent) -> None:
        self._driver.call_on(self.device, "cuStreamWaitEvent", ctypes.c_void_p(self.handle), event.handle, 0)

    def hold(self, seconds: float) -> None:
        """Let the stream rest before its next work."""
        self._driver.call_on(self.device, "testHold", ctypes.c_void_p(self.handle), ctypes.c_uint64(int(1e6 * seconds)))

    @property
    def graph(self) -> object:
        """What is queued is recorded into a graph; None: it is not."""
        found = ctypes.c_int()
        library().cuStreamIsCapturing(ctypes.c_void_p(self.handle), ctypes.byref(found))
        return found.value or None


class DriverGraph:
    """Captured work, like ``torch.cuda.CUDAGraph``. `current` returns the calling thread's current stream."""

    current: Callable[[], DriverStream]

    def __init__(self) -> None:
        self._stream: DriverStream | None = None
        self._handle = ctypes.c_void_p()

    def capture_begin(self, capture_error_mode: str = "global") -> None:
        self._stream = type(self).current()
        mode = ("global", "thread_local", "relaxed").index(capture_error_mode)
        check(library().cuStreamBeginCapture_v2(ctypes.c_void_p(self._stream.handle), mode))

    def capture_end(self) -> None:
        assert self._stream is not None
        check(library().cuStreamEndCapture(ctypes.c_void_p(self._stream.handle), ctypes.byref(self._handle)))

    def replay(self) -> None:
        check(library().cuGraphLaunch(self._handle, ctypes.c_void_p(type(self).current().handle)))


def check(code: int) -> None:
    """Raise what torch raises for an error code."""
    if code:
        text = ctypes.c_char_p()
        library().cuGetErrorString(code, ctypes.byref(text))
        kind = torch.OutOfMemoryError if code == OUT_OF_MEMORY else RuntimeError
        raise kind(f"CUDA error: {(text.value or b'').decode()}")
