"""Every call into CUDA for capture and restore, in `Runtime`, so that tests can stand in for a device."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol, cast

import torch

from holdfast.smp_daemon.shared.errors import ConfigError, DeadlineExceeded
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.snapshot.copy import cuda_driver
from holdfast.snapshot.copy.runs import Runs

DEADLINE_S = 60.0
POLL_S = 1e-4
LONGEST_POLL_S = 1e-3
"""Each query takes the GIL from the training thread: how long to sleep between two, at first and later, in seconds."""

FIRST = -1
"""Priority of our stream: its kernels compute next to nothing, and must not wait behind the blocks of a step."""

NOT_SUPPORTED = 801
"""CUDA's error code for what a device cannot do."""

log = get_log(__name__)


def uses_cuda() -> bool:
    """Whether this process has anything on a CUDA device. Always false where there is none, whatever torch was built
    for, even if something stands in for CUDA, as when Megatron trains on CPUs."""
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_available()


class DeviceEvent(Protocol):
    """A point in a stream's work. `query`: whether the device has passed it."""

    def query(self) -> bool: ...


class DeviceStream(Protocol):
    """Work of the device, done in the order in which it is queued. No method blocks the host."""

    def record_event(self) -> DeviceEvent: ...
    def wait_event(self, event: DeviceEvent) -> None: ...


@contextmanager
def _context_of(device: torch.device) -> Iterator[None]:
    """Make a device this thread's current one, and its context too: the driver needs one. ``torch.cuda.device`` makes
    none if the device is the current one already."""
    with torch.cuda.device(device):
        torch.cuda.set_device(device)
        yield


@cache
def _own_stream(device: torch.device, name: str) -> DeviceStream:
    """A stream of our own: torch has only 32, and another library may have been given the same one. It lives as long as
    the process, since torch keeps memory for it."""
    with _context_of(device):
        handle = cuda_driver.new_stream(FIRST)
    return cast(DeviceStream, torch.cuda.ExternalStream(handle, device))  # type: ignore[no-untyped-call]


class Runtime:
    """What capture and restore need of CUDA, on one device. Any call may raise RuntimeError for an error of the device.

    Raises `ConfigError` if `device` is not a CUDA device, or if CUDA cannot be used here.

    `enter_thread` is called first in each of holdfast's threads: from then on the thread uses the device. `capturing`:
    whether work that is queued on the current stream is being recorded instead of done. `own_stream` gives a stream
    that nobody else is given, the same for the same name. `one_queue`: whether the device takes the kernels of all
    streams in the order in which they were launched, so that one that waits holds up all that follow.
    `on` makes a stream, and its device, the calling thread's current one; within it the thread breaks no capture of a
    CUDA graph. On the current stream `copy` queues a copy between tensors of the device, and `copy_runs` queues rows of
    source, target and bytes, each on the device or pinned, and within one allocation: `allocation_of` tells which one a
    tensor of the device is in. Sources and targets must stay until the copy is done. `copy_parts` does the same for
    several tables, and copies of other streams may go between two of them, unless the device has `one_queue`.
    `scratch` is device memory that, once dropped, only work queued later on that stream gets.
    `wait` blocks until an event, or raises `DeadlineExceeded` once the device has taken 60 s for it since `begun`,
    however long it takes to get there: work of training comes before. `register` page-locks host memory and gives every
    device access to it, `unregister` undoes that; both return 0 or CUDA's error code, and may block for seconds.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda" or not torch.cuda.is_available():
            raise ConfigError(f"{device} is not a usable CUDA device: torch.cuda.is_available() must be true")
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self.one_queue = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
        self._speck: torch.Tensor | None = None
        self._takes_host_addresses: bool | None = None  # None: not asked yet

    def enter_thread(self) -> None:
        torch.cuda.set_device(self.device)  # else the first call would make a context of hundreds of MB on device 0

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def current_stream(self) -> DeviceStream:
        return cast(DeviceStream, torch.cuda.current_stream(self.device))

    def own_stream(self, name: str) -> DeviceStream:
        return _own_stream(self.device, name)

    @contextmanager
    def on(self, stream: DeviceStream) -> Iterator[None]:
        # The device first: leaving a stream makes the device current that was current when it was entered.
        with (
            _context_of(self.device),
            torch.cuda.stream(cast(torch.cuda.Stream, stream)),
            cuda_driver.relaxed(),
        ):
            yield

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def copy_runs(self, table: Runs) -> None:
        cuda_driver.queue_copies([table], torch.cuda.current_stream(self.device).cuda_stream)

    def copy_parts(self, parts: Sequence[Runs]) -> None:
        # Copies that follow each other on a stream are one piece of work to the copy engine; a kernel separates them.
        if self._speck is None:
            self._speck = self.scratch((1,), torch.uint8)
        between = 0 if self.one_queue else self._speck.data_ptr()
        cuda_driver.queue_copies(parts, torch.cuda.current_stream(self.device).cuda_stream, between)

    def allocation_of(self, tensor: torch.Tensor) -> int:
        # A storage is always within one.
        return cuda_driver.allocation_of(tensor.data_ptr()) or tensor.untyped_storage().data_ptr()

    def scratch(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def pinned(self, count: int) -> torch.Tensor:
        # The device is named, as a job may have set another default.
        return torch.empty(count, dtype=torch.uint8, device="cpu", pin_memory=True)

    def wait(self, event: DeviceEvent, begun: DeviceEvent | None = None) -> None:
        pause_s, limit = POLL_S, None
        while not event.query():
            if limit is None and (begun is None or begun.query()):
                limit = time.monotonic() + DEADLINE_S
            if limit is not None and time.monotonic() >= limit:
                raise DeadlineExceeded(f"{self.device} did not get on with a transfer for {DEADLINE_S:.0f} s")
            time.sleep(pause_s)  # CUDA's own waits have no deadline
            pause_s = min(2 * pause_s, LONGEST_POLL_S)

    def register(self, address: int, count: int) -> int:
        if self._takes_host_addresses is None:
            self._takes_host_addresses = cuda_driver.takes_host_addresses(self.device.index)
        if not self._takes_host_addresses:
            return NOT_SUPPORTED
        portable = 1  # page-locked for every device
        return self._reported(torch.cuda.cudart().cudaHostRegister(address, count, portable))  # type: ignore[no-untyped-call]

    def unregister(self, address: int) -> int:
        return self._reported(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]

    def _reported(self, code: Any) -> int:
        """CUDA reports a refused call once more at the thread's next kernel launch. Launch one here to clear that."""
        if int(code):
            try:
                torch.empty(1, device=self.device).fill_(1)
            except RuntimeError as error:
                log.debug("cleared: %s", error)
        return int(code)
