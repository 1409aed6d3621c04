"""Streams, events and captures: what is queued, and when it is done.

Work is done by whoever waits for it, and by whoever queues more, in an order that a seed draws. What has been queued on
one stream stays in order; what has been queued on several does not, but for the events between them. The device is
slow: who waits for it in a thread of its own may find that nothing is done before all others have run as far ahead as
they can.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

Work = Callable[[], object]

QUIET_S = 0.01
"""When nobody has queued anything for so long, all have run as far ahead as they can."""

LAZY = "lazy"
"""Work is done when nobody queues any more: what the training thread queued first, and copies of state last."""

EAGER = "copies first"
"""Work is done when somebody waits, and what others than the training thread queued goes first."""


@dataclass(eq=False)
class DeviceQueueEvent:
    """A point in the work of a stream.

    Attributes:
        captured: it was recorded into a graph, and is no point in time.
    """

    queues: Queues
    passed: bool = False
    captured: bool = False

    def query(self) -> bool:
        """Whether it has been passed."""
        self.queues.step()
        return self.passed


@dataclass(eq=False)
class DeviceQueue:
    """Work in order, each piece of it behind an event if there is one.

    Attributes:
        device: of which it is. training: not one of holdfast's own.
        graph: what is queued is recorded there instead; None: it is done.
    """

    queues: Queues
    device: int
    training: bool = True
    work: deque[tuple[DeviceQueueEvent | None, Work]] = field(default_factory=deque)
    graph: RecordedGraph | None = None

    def queue(self, work: Work, after: DeviceQueueEvent | None = None) -> None:
        """Do it once everything before it is done, and `after` has passed."""
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
        """A point behind all that is queued by now."""
        event = DeviceQueueEvent(self.queues, captured=self.graph is not None)
        self.queue(lambda: setattr(event, "passed", True))
        return event

    def wait_event(self, event: DeviceQueueEvent) -> None:
        """What is queued from now on waits for it."""
        if event.captured != (self.graph is not None):
            self.queues.ruin("an event ties a stream that is captured to one that is not")
        self.queue(lambda: None, event)

    @property
    def ready(self) -> bool:
        return bool(self.work) and (self.work[0][0] is None or self.work[0][0].passed)


class RecordedGraph:
    """What was captured, as of ``torch.cuda.CUDAGraph``. `current`: gives the calling thread's current stream."""

    def __init__(self, queues: Queues, current: Callable[[], DeviceQueue]) -> None:
        self._queues = queues
        self._current = current
        self._stream: DeviceQueue | None = None
        self.work: list[Work] = []
        self.ruined = ""

    def capture_begin(self) -> None:
        """From now on what is queued on the current stream is recorded, and not done."""
        self._stream = self._current()
        self._queues.graph = self._stream.graph = self

    def capture_end(self) -> None:
        """Raises `RuntimeError` if something has ruined it."""
        if self._stream is not None:
            self._queues.graph = self._stream.graph = None
        if self.ruined:
            raise RuntimeError(f"the capture was invalidated: {self.ruined}")

    def replay(self) -> None:
        """Queue what was recorded on the current stream."""
        for work in self.work:
            self._current().queue(work)


class Queues:
    """All streams of all devices.

    Attributes:
        lock: held while one piece of work is done: by any thread, which takes no other lock under it. more: of it;
            notified when there is more to do. count: of all that was ever queued.
        fault: what the device answers to everything, once something has gone wrong.
        stuck: nothing is done any more. graph: that is captured just now.
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
        """A new one."""
        with self.lock:
            self.streams.append(DeviceQueue(self, device, training))
            return self.streams[-1]

    def step(self) -> None:
        """Somebody has done something: with an order that is drawn, some work may have been done by now."""
        if isinstance(self.order, int):
            for _ in range(self._random.choice((0, 0, 1, 4))):
                self.work_one()

    def let_others_run(self) -> None:
        """A thread that only copies is about to wait: the device has something else to do first, or not."""
        if self.order == EAGER or (self.order != LAZY and self._random.random() < 0.5):
            return
        with self.lock:
            while True:
                before = self.count
                self.more.wait(QUIET_S)
                if self.count == before:
                    return

    def run(self, until: DeviceQueueEvent | None = None) -> None:
        """Work until `until` has passed, or nothing can be done."""
        while not (until is not None and until.passed) and self.work_one():
            pass

    def work_one(self) -> bool:
        """Do one piece of work; False: there is none that can be done."""
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
        """Raises `RuntimeError` if the device has met an error, whoever has made it."""
        if self.fault:
            raise RuntimeError(self.fault)

    # ------------------------------------------------------------------ captures

    def relax(self) -> None:
        """This thread does nothing that could ruin a capture of another."""
        self._relaxed.on = True

    def touch(self, what: str) -> None:
        """This thread does what must not be done during a capture, unless it is relaxed."""
        self.fail_if_broken()
        if self.graph is not None and not getattr(self._relaxed, "on", False):
            self.ruin(f"{what} during a capture")

    def ruin(self, why: str) -> None:
        """Raises `RuntimeError`; a capture that is under way fails, too."""
        if self.graph is not None:
            self.graph.ruined = why
        raise RuntimeError(f"operation not permitted when stream is capturing: {why}")
