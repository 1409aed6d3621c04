"""A fixed number of buffers for arriving units, which bounds the memory for receiving however many peers send."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.smp_daemon.shared.errors import DeadlineExceeded
from holdfast.smp_daemon.shared.limits import CALL_DEADLINE_S
from holdfast.smp_daemon.shared.system import MACHINE, Threads


def buffers_for(links: int) -> int:
    """Number of buffers of an SMP whose peers each send over `links` connections."""
    return 2 * links + 1


class BufferPool:
    """Buffers, each as long as the longest unit it has held. Thread-safe: a buffer that is not in the queue belongs to
    the thread that took it."""

    def __init__(self, count: int, threads: Threads = MACHINE) -> None:
        self._free: queue.SimpleQueue[bytearray] = threads.SimpleQueue()
        for _ in range(count):
            self._free.put(bytearray())

    @contextmanager
    def borrow(self, length: int) -> Iterator[memoryview]:
        """A buffer of `length` bytes with arbitrary content. Blocks until one is free.

        The borrower must not wait for another SMP, except for the bytes that fill the buffer.

        Raises:
            DeadlineExceeded: none became free in time.
        """
        try:
            buffer = self._free.get(timeout=CALL_DEADLINE_S)
        except queue.Empty:
            raise DeadlineExceeded(f"no buffer for a unit became free in {CALL_DEADLINE_S:.0f} s") from None
        try:
            if len(buffer) < length:
                buffer = bytearray(length)
            yield memoryview(buffer)[:length]
        finally:
            self._free.put(buffer)
