"""Streams, events and captures of the emulated device: what is queued, and when it is done.

The device has no thread. Its work is done by threads that wait for it and, if a seed draws the order, also by threads
that queue more. Work on one stream stays in order; work on different streams is ordered only by events. The device is
slow: while a thread other than the main thread waits, nothing may be done until all others have run as far ahead as
they can.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

Work = Callable[[], object]

QUIET_S = 0.01
"""How long nothing must be queued before all threads count as having run as far ahead as they can, in seconds."""

LAZY = "lazy"
"""Work is done late, only when no thread queues more; copies of state come after the work of training."""

EAGER = "copies first"
"""Work is done as soon as a thread waits; copies of state come before the work of training."""


@dataclass(eq=False)
class DeviceQueueEvent:
    """A point in the work of a stream.

    Attributes:
        passed: whether the stream has reached it.
        captured: it was recorded into a graph, and so is not a point in time.
    """

    queues: Queues
    passed: bool = False
    captured: bool = False

    def query(self) -> bool:
        """Whether the stream has reached it."""
        self.queues.step()
        return self.passed


@dataclass(eq=False)
class DeviceQueue:
    """A stream: work that is done in order. Each piece can also wait for an event.

    Attributes:
        device: number of the device.
        training: whether training uses the stream; false for holdfast's own.
        work: pieces that are not done yet, each with its event. Guarded by `Queues.lock`.
        graph: a graph that records what is queued, during a capture; None: the work is done.
    """

    queues: Queues
    device: int
    training: bool = True
    work: deque[tuple[DeviceQueueEvent | None, Work]] = field(default_factory=deque)
    graph: RecordedGraph | None = None

    def queue(self, work: Work, after: DeviceQueueEvent | None = None) -> None:
        """Queue work, to be done once everything before it is done and `after` has passed."""
        self.queues.fail_if_broken()
        if self.graph is not None:
            self.graph.work.append(work)
            return
        with self.queues.lock:
            self.work.append((after, work))
            self.queues.count += 1
            self.queues.more.notify_all()
        self.queues.step()

    def record_event(self) -> DeviceQueueEvent:
        """An event that passes once everything that is queued by now is done."""
        event = DeviceQueueEvent(self.queues, captured=self.graph is not None)
        self.queue(lambda: setattr(event, "passed", True))
        return event

    def wait_event(self, event: DeviceQueueEvent) -> None:
        """Make everything that is queued from now on wait for an event."""
        if event.captured != (self.graph is not None):
            self.queues.ruin("an event connects a stream that is being captured with one that is not")
        self.queue(lambda: None, event)

    @property
    def ready(self) -> bool:
        return bool(self.work) and (self.work[0][0] is None or self.work[0][0].passed)


class RecordedGraph:
    """Captured work, like ``torch.cuda.CUDAGraph``. `current` returns the calling thread's current stream."""

    def __init__(self, queues: Queues, current: Callable[[], DeviceQueue]) -> None:
        self._queues = queues
        self._current = current
        self._stream: DeviceQueue | None = None
        self.work: list[Work] = []
        self.ruined = ""

    def capture_begin(self) -> None:
        """Record what is queued on the current stream from now on, instead of doing it."""
        self._stream = self._current()
        self._queues.graph = self._stream.graph = self

    def capture_end(self) -> None:
        """End the capture. Raises `RuntimeError` if it was invalidated."""
        if self._stream is not None:
            self._queues.graph = self._stream.graph = None
        if self.ruined:
            raise RuntimeError(f"the capture was invalidated: {self.ruined}")

    def replay(self) -> None:
        """Queue the recorded work on the current stream."""
        for work in self.work:
            self._current().queue(work)


class Queues:
    """All streams of all devices.

    Attributes:
        lock: guards the streams, their work, `count` and `done`. Any thread holds it while it does a piece of work, and
            takes no other lock under it.
        more: condition of `lock`; notified when work is queued.
        count: number of pieces that were ever queued.
        order: `LAZY`, `EAGER`, or a seed.
        fault: once the device has failed: the message of the error that every call raises.
        stuck: set by tests: no work is done any more.
        done: number of pieces that are done.
        graph: the graph that is being captured, if any.
    """

    def __init__(self, order: str | int) -> None:
        self.lock = threading.RLock()
        self.more = threading.Condition(self.lock)
        self.count = 0
        self.streams: list[DeviceQueue] = []
        self.order = order
        self.fault = ""
        self.stuck = False
        self.done = 0
        self._random = random.Random(f"device {order}")
        self.graph: RecordedGraph | None = None
        self._relaxed = threading.local()

    def stream(self, device: int, *, training: bool = True) -> DeviceQueue:
        """Make a stream."""
        with self.lock:
            self.streams.append(DeviceQueue(self, device, training))
            return self.streams[-1]

    def step(self) -> None:
        """Let some time pass: with an order that is drawn, do up to four pieces of work."""
        if isinstance(self.order, int):
            for _ in range(self._random.choice((0, 0, 1, 4))):
                self.work_one()

    def let_others_run(self) -> None:
        """Called before a copy thread waits: let the other threads run ahead first, depending on the order."""
        if self.order == EAGER or (self.order != LAZY and self._random.random() < 0.5):
            return
        with self.lock:
            while True:
                before = self.count
                self.more.wait(QUIET_S)
                if self.count == before:
                    return

    def run(self, until: DeviceQueueEvent | None = None) -> None:
        """Do work until `until` has passed, or nothing can be done."""
        while not (until is not None and until.passed) and self.work_one():
            pass

    def work_one(self) -> bool:
        """Do one piece of work. Return whether there was one that could be done."""
        with self.lock:
            ready = [stream for stream in self.streams if stream.ready]
            if not ready or self.stuck:
                return False
            if self.order == LAZY:
                chosen = ready[0] if ready[0].training else ready[-1]
            elif self.order == EAGER:
                chosen = ready[-1]
            else:
                chosen = self._random.choice(ready)
            _, work = chosen.work.popleft()
            if not self.fault:
                work()
            self.done += 1
            return True

    def fail_if_broken(self) -> None:
        """Raise `RuntimeError` if the device has failed, no matter which thread's work failed."""
        if self.fault:
            raise RuntimeError(self.fault)

    # ------------------------------------------------------------------ captures

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        """In this block nothing that this thread does invalidates a capture."""
        before = getattr(self._relaxed, "on", False)
        self._relaxed.on = True
        try:
            yield
        finally:
            self._relaxed.on = before

    def touch(self, what: str) -> None:
        """Called before anything that CUDA forbids during a capture. Invalidates it unless this thread is relaxed."""
        self.fail_if_broken()
        if self.graph is not None and not getattr(self._relaxed, "on", False):
            self.ruin(f"{what} during a capture")

    def ruin(self, why: str) -> None:
        """Raise `RuntimeError`. A capture in progress fails, too."""
        if self.graph is not None:
            self.graph.ruined = why
        raise RuntimeError(f"operation not permitted when stream is capturing: {why}")
