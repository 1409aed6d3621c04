"""Pinned buffers between a device and memory that the device cannot access directly."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from holdfast.snapshot.copy import runs
from holdfast.snapshot.copy.cuda_runtime import DeviceEvent, DeviceStream, Runtime
from holdfast.snapshot.copy.runs import Runs

LINE = 64
"""Bytes of a cache line, with which what is copied next begins."""


class Ring:
    """A fixed number of buffers of one length, made when they are first needed, and used in turn.

    One thread calls `store` and `land`. Any thread may enter `loading`; as many are within at a time as there are
    buffers. The caller's current stream must be `stream`.
    """

    def __init__(self, runtime: Runtime, stream: DeviceStream, buffers: int, buffer_bytes: int) -> None:
        self._runtime = runtime
        self._stream = stream
        self._bytes = buffer_bytes
        self._turns = threading.Semaphore(buffers)
        # Guards `_free` and `_made`; held briefly. A thread that has taken a buffer waits for its transfer without the
        # lock.
        self._lock = threading.Lock()
        self._made = 0
        self._most = buffers
        self._free: deque[tuple[torch.Tensor, DeviceEvent | None]] = deque()
        self._stored: deque[tuple[torch.Tensor, DeviceEvent, Runs]] = deque()

    def store(self, table: Runs, begun: DeviceEvent | None = None) -> None:
        """Queue runs from the device to memory, together at most one buffer long. `land` waits until they are there.
        `begun`: see `Runtime.wait`; what this may wait for was queued after it."""
        while len(self._stored) >= self._most:
            self._land_first(begun)
        buffer = self._take()
        try:
            target = np.uint64(buffer.data_ptr()) + _starts(table)
            self._runtime.copy_parts([_with(table, target=target)])
            event = self._stream.record_event()
        except BaseException:  # what was queued nevertheless comes before all that the buffer is used for next
            self._give(buffer, None)
            raise
        self._stored.append((buffer, event, _with(table, source=target)))

    def land(self, begun: DeviceEvent | None = None) -> None:
        """Block until everything stored is where it belongs. `begun`: as in `store`."""
        while self._stored:
            self._land_first(begun)

    @contextmanager
    def loading(self) -> Iterator[Callable[[Runs], None]]:
        """In this block, the function that this gives takes runs from memory to the device. Their sources may go when
        it returns; all of them are queued when the block ends. A buffer is sent when it is full: a transfer of little
        takes as much of Python's time as one of much, and Python serves one thread at a time."""
        rows: list[Runs] = []
        buffer: torch.Tensor | None = None
        used = 0

        def take(table: Runs) -> None:
            for part in runs.batches(table, self._bytes) if table[:, 2].sum() > self._bytes else [table]:
                stage(part)

        def stage(part: Runs) -> None:
            nonlocal buffer, used
            length = int(part[:, 2].sum())
            if used + length > self._bytes:
                send()
            if buffer is None:
                buffer = self._take()
            held = np.uint64(buffer.data_ptr() + used) + _starts(part)
            runs.copy(_with(part, target=held))
            rows.append(_with(part, source=held))
            used += -(-length // LINE) * LINE

        def send() -> None:
            nonlocal buffer, used
            if buffer is None:
                return
            full, event, buffer, used = buffer, None, None, 0
            try:
                if rows:
                    self._runtime.copy_runs(np.concatenate(rows))
                    event = self._stream.record_event()
            finally:
                rows.clear()
                self._give(full, event)

        with self._turns:
            try:
                yield take
            finally:
                send()

    def settle(self) -> None:
        """Block until no transfer to or from a buffer is in progress, and forget stored runs that have not landed."""
        with self._lock:
            events = [event for _, event in self._free if event is not None]
        for event in [*events, *(event for _, event, _ in self._stored)]:
            self._runtime.wait(event)
        while self._stored:
            self._give(self._stored.popleft()[0], None)

    def _land_first(self, begun: DeviceEvent | None) -> None:
        buffer, event, table = self._stored[0]
        self._runtime.wait(event, begun)
        runs.copy(table)
        self._stored.popleft()
        self._give(buffer, None)

    def _take(self) -> torch.Tensor:
        """A buffer without a transfer in progress."""
        with self._lock:
            known = self._free.popleft() if self._made == self._most else None
            self._made += known is None
        if known is None:
            try:
                return self._runtime.pinned(self._bytes)
            except BaseException:
                with self._lock:
                    self._made -= 1
                raise
        buffer, event = known
        if event is not None:
            self._runtime.wait(event)
        return buffer

    def _give(self, buffer: torch.Tensor, event: DeviceEvent | None) -> None:
        with self._lock:
            self._free.append((buffer, event))


def _starts(table: Runs) -> Runs:
    """Where each run begins if they are laid out one after another."""
    ends = np.cumsum(table[:, 2])
    return ends - table[:, 2]


def _with(table: Runs, *, source: Runs | None = None, target: Runs | None = None) -> Runs:
    out = table.copy()
    if source is not None:
        out[:, 0] = source
    if target is not None:
        out[:, 1] = target
    return out
