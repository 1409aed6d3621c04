"""Pinned buffers between a device and memory that the device cannot access directly."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from holdfast.smp_daemon.shared.records import Unit
from holdfast.snapshot.copy import runs
from holdfast.snapshot.copy.cuda_runtime import DeviceEvent, DeviceStream, Runtime
from holdfast.snapshot.copy.engines import address_of
from holdfast.snapshot.copy.runs import Runs

LINE = 64
"""Bytes of a cache line, with which what is copied next begins."""


class Ring:
    """A fixed number of buffers of one length, made when they are first needed, and used in turn.

    One thread calls `store` and `land`. Any thread may enter `uploading`; as many are within at a time as there are
    buffers. The caller's current stream must be `stream`.
    """

    def __init__(self, runtime: Runtime, stream: DeviceStream, buffers: int, buffer_bytes: int) -> None:
        self._runtime = runtime
        self._stream = stream
        self.buffer_bytes = buffer_bytes
        self._turns = threading.Semaphore(buffers)
        # Guards `_free` and `_made`; held briefly. A thread that has taken a buffer waits for its transfer without the
        # lock.
        self._lock = threading.Lock()
        self._made = 0
        self._most = buffers
        self._free: deque[tuple[torch.Tensor, DeviceEvent | None]] = deque()
        self._stored: deque[tuple[torch.Tensor, DeviceEvent, Runs]] = deque()

    def store(self, table: Runs, begun: DeviceEvent | None = None) -> None:
        """Queue runs from the device to memory. `land` waits until they are there. `begun`: see `Runtime.wait`; what
        this may wait for was queued after it."""
        for part in runs.batches(table, self.buffer_bytes):
            while len(self._stored) >= self._most:
                self._land_first(begun)
            buffer = self.free_buffer()
            try:
                target = np.uint64(buffer.data_ptr()) + _starts(part)
                self._runtime.copy_parts([_with(part, target=target)])
                event = self._stream.record_event()
            except BaseException:  # what was queued nevertheless comes before all that the buffer is used for next
                self._give(buffer, None)
                raise
            self._stored.append((buffer, event, _with(part, source=target)))

    def land(self, begun: DeviceEvent | None = None) -> None:
        """Block until everything stored is where it belongs. `begun`: as in `store`."""
        while self._stored:
            self._land_first(begun)

    @contextmanager
    def uploading(self) -> Iterator[Upload]:
        """A block in which the calling thread fills the device. All that it took is queued when the block ends."""
        with self._turns:
            upload = Upload(self)
            try:
                yield upload
            finally:
                upload.send()

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

    def send(self, buffer: torch.Tensor, rows: Sequence[Runs]) -> None:
        """Queue runs from a buffer to the device. The buffer is used again once they are there."""
        event = None
        try:
            if rows:
                self._runtime.copy_runs(np.concatenate(rows))
                event = self._stream.record_event()
        finally:
            self._give(buffer, event)

    def free_buffer(self) -> torch.Tensor:
        """A buffer without a transfer in progress."""
        with self._lock:
            known = self._free.popleft() if self._made == self._most else None
            self._made += known is None
        if known is None:
            try:
                return self._runtime.pinned(self.buffer_bytes)
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


class Upload:
    """Takes bytes from memory to the device for one thread. A buffer is sent when it is full: a transfer of little
    takes as much of Python's time as one of much, and Python serves one thread at a time."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._rows: list[Runs] = []
        self._buffer: torch.Tensor | None = None
        self._used = 0

    def copy(self, table: Runs) -> None:
        """Take runs. Their sources may go when it returns."""
        for part in runs.batches(table, self._ring.buffer_bytes):
            held = np.uint64(self._place(int(part[:, 2].sum()))) + _starts(part)
            runs.copy(_with(part, target=held))
            self._rows.append(_with(part, source=held))

    def take(self, units: Sequence[tuple[Unit, Runs]]) -> list[bool]:
        """See `snapshot.copy.engines.Take`. Units are digested on their way to the buffer, all by one call, and nothing
        of a damaged one goes on."""
        places = [(address_of(unit.view), unit.view.nbytes) for unit, _ in units]
        length = sum(count for _, count in places)
        if length > self._ring.buffer_bytes or not runs.digests():
            return [self._take_after_its_digest(unit, table) for unit, table in units]
        held, rows = self._place(length), []
        for start, count in places:
            rows.append((start, held, count))
            held += count
        digests = np.empty(len(rows), np.uint64)
        runs.copy_digested(runs.make_runs(rows), np.ones(len(rows), np.uint8), digests)
        whole = [unit.digest == found for (unit, _), found in zip(units, digests.tolist(), strict=True)]
        for (_, table), (start, target, _), is_whole in zip(units, rows, whole, strict=True):
            if is_whole:
                self._rows.append(_with(table, source=table[:, 0] - np.uint64(start) + np.uint64(target)))
        return whole

    def _take_after_its_digest(self, unit: Unit, table: Runs) -> bool:
        is_whole = unit.matches()
        if is_whole:
            self.copy(table)
        return is_whole

    def send(self) -> None:
        """Queue what was taken."""
        if self._buffer is not None:
            buffer, rows = self._buffer, self._rows
            self._buffer, self._rows, self._used = None, [], 0
            self._ring.send(buffer, rows)

    def _place(self, count: int) -> int:
        """The address of so many bytes of a buffer."""
        if self._used + count > self._ring.buffer_bytes:
            self.send()
        if self._buffer is None:
            self._buffer = self._ring.free_buffer()
        at = self._buffer.data_ptr() + self._used
        self._used += -(-count // LINE) * LINE
        return at


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
