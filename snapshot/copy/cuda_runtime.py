"""Every call into ``torch.cuda`` for capture and restore, behind `Runtime`, so that tests can stand in for a device."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch

from holdfast.smp_daemon.shared.errors import ConfigError, DeadlineExceeded
from holdfast.smp_daemon.shared.logs import get_log

DEADLINE_S = 60.0
POLL_S = 1e-4

log = get_log(__name__)


class DeviceEvent(Protocol):
    """A point in the work of a stream. `query`: whether it has been passed."""

    def query(self) -> bool: ...


class DeviceStream(Protocol):
    """Work of the device, done in the order in which it is queued. Nothing here blocks the host."""

    def record_event(self) -> DeviceEvent: ...
    def wait_event(self, event: DeviceEvent) -> None: ...


class Runtime(Protocol):
    """What capture and restore need of CUDA, on one device. Any call may raise an error of the device: RuntimeError.

    `on` makes a stream, and its device, the calling thread's current one: there `copy` is queued, and `scratch` is
    device memory that, once let go, only work queued later on that stream gets. What is copied must stay until it is
    done. `wait` blocks until an event, or raises `DeadlineExceeded` after 60 s. `register` page-locks host memory and
    lets the device reach it, `unregister` undoes that; both return 0 or CUDA's error code, and may block for seconds.
    """

    device: torch.device

    def current_stream(self) -> DeviceStream: ...
    def lowest_stream(self) -> DeviceStream: ...
    def on(self, stream: DeviceStream) -> AbstractContextManager[object]: ...
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None: ...
    def scratch(self, like: torch.Tensor) -> torch.Tensor: ...
    def pinned(self, count: int) -> torch.Tensor: ...
    def wait(self, event: DeviceEvent) -> None: ...
    def register(self, address: int, count: int) -> int: ...
    def unregister(self, address: int) -> int: ...


class TorchRuntime:
    """`Runtime` by ``torch.cuda``. Raises `ConfigError` if `device` is no CUDA device, or none can be used here."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda" or not torch.cuda.is_available():
            raise ConfigError(f"{device} is no usable CUDA device: torch.cuda.is_available() must be true")
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)

    def current_stream(self) -> DeviceStream:
        return cast(DeviceStream, torch.cuda.current_stream(self.device))

    def lowest_stream(self) -> DeviceStream:
        return cast(DeviceStream, torch.cuda.Stream(self.device, priority=0))  # type: ignore[no-untyped-call]  # 0 is lowest

    def on(self, stream: DeviceStream) -> AbstractContextManager[object]:
        return torch.cuda.stream(cast(torch.cuda.Stream, stream))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def scratch(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype, device=self.device)

    def pinned(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8, pin_memory=True)

    def wait(self, event: DeviceEvent) -> None:
        limit = time.monotonic() + DEADLINE_S
        while not event.query():
            if time.monotonic() >= limit:
                raise DeadlineExceeded(f"{self.device} did not get on with a transfer for {DEADLINE_S:.0f} s")
            time.sleep(POLL_S)  # CUDA's own waits know no deadline

    def register(self, address: int, count: int) -> int:
        portable = 1  # page-locked for every device
        return self._reported(torch.cuda.cudart().cudaHostRegister(address, count, portable))  # type: ignore[no-untyped-call]

    def unregister(self, address: int) -> int:
        return self._reported(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]

    def _reported(self, code: Any) -> int:
        """CUDA would report a refused call once more, by the thread's next kernel launch. Let that be ours."""
        if int(code):
            try:
                torch.empty(1, device=self.device).fill_(1)
            except RuntimeError as error:
                log.debug("cleared: %s", error)
        return int(code)
