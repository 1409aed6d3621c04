"""Locks, queues, threads, pools and clock for tasks.

Names and semantics are those of `threading`, `queue`, `concurrent.futures` and `time`; only what holdfast uses exists.
Each acquisition, wait and hand-over is an await of `sim.scheduler`.
"""

from __future__ import annotations

import queue as real_queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Generic, TypeVar

from tests.proof.sim.scheduler import Scheduler, active
from tests.proof.sim.tasks import Task

T = TypeVar("T")


class Lock:
    """`threading.Lock`."""

    __slots__ = ("_held", "_scheduler", "_waiting")

    def __init__(self) -> None:
        self._scheduler = active()
        self._held = False
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self._scheduler.point()
        if self._held:
            if not blocking:
                return False
            self._wait()
        self._held = True
        return True

    def release(self) -> None:
        self._held = False
        self._scheduler.wake(self._waiting)

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> bool:
        scheduler = self._scheduler
        scheduler.awaits += 1
        if scheduler.awaits >= scheduler.next_stop:
            scheduler.stop_here()
        if self._held:
            self._wait()
        self._held = True
        return True

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._held = False
        if self._waiting:
            self.release()

    def _wait(self) -> None:
        while self._held:
            self._waiting.append(self._scheduler.current)
            self._scheduler.block("a lock")


class RLock:
    """`threading.RLock`."""

    def __init__(self) -> None:
        self._scheduler = active()
        self._owner: Task | None = None
        self._count = 0
        self._waiting: list[Task] = []

    def acquire(self) -> bool:
        scheduler = self._scheduler
        if self._owner is scheduler.current:
            self._count += 1
            return True
        scheduler.awaits += 1
        if scheduler.awaits >= scheduler.next_stop:
            scheduler.stop_here()
        while self._owner is not None:
            self._waiting.append(scheduler.current)
            scheduler.block("a lock")
        self._owner = scheduler.current
        self._count = 1
        return True

    def release(self) -> None:
        if self._owner is not self._scheduler.current:
            if self._scheduler.unwinding:
                return
            raise RuntimeError("cannot release a lock of another thread")
        self._count -= 1
        if not self._count:
            self._owner = None
            if self._waiting:
                self._scheduler.wake(self._waiting)

    @property
    def is_mine(self) -> bool:
        """Whether the current thread holds the lock."""
        return self._owner is not None and self._owner is self._scheduler.current

    def give_up(self) -> int:
        """Release the lock completely, for a wait. Returns how often it was held."""
        if self._owner is not self._scheduler.current:
            raise RuntimeError("cannot wait on a condition whose lock is not held")
        count, self._count = self._count, 1
        self.release()
        return count

    def take_back(self, count: int) -> None:
        """Undo `give_up`."""
        self.acquire()
        self._count = count

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._count == 1 and not self._waiting and self._owner is self._scheduler.current:
            self._owner, self._count = None, 0  # the common case
        else:
            self.release()


class Condition(RLock):
    """`threading.Condition`. It is its own lock and ignores the one it is given, so nothing else may use that one."""

    def __init__(self, lock: RLock | None = None) -> None:
        super().__init__()
        self._waiting_here: list[Task] = []

    def wait(self, timeout: float | None = None) -> bool:
        scheduler = self._scheduler
        scheduler.point()
        self._waiting_here.append(scheduler.current)
        count = self.give_up()
        woken = scheduler.block("a condition", timeout)
        if not woken and scheduler.current in self._waiting_here:
            self._waiting_here.remove(scheduler.current)
        self.take_back(count)
        return woken

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        end = None if timeout is None else self._scheduler.now + timeout
        while not (result := predicate()):
            left = None if end is None else end - self._scheduler.now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify_all(self) -> None:
        self._scheduler.wake(self._waiting_here)


class Event:
    """`threading.Event`."""

    def __init__(self) -> None:
        self._scheduler = active()
        self._set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._scheduler.wake(self._waiting)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        scheduler = self._scheduler
        scheduler.point()
        if self._set:
            return True
        self._waiting.append(scheduler.current)
        woken = scheduler.block("an event", timeout)
        if not woken and scheduler.current in self._waiting:
            self._waiting.remove(scheduler.current)
        return self._set


class Thread:
    """`threading.Thread`. It belongs to the process that makes it."""

    def __init__(
        self, target: Callable[..., Any], name: str = "thread", args: tuple[Any, ...] = (), daemon: bool = True
    ) -> None:
        self._scheduler = active()
        self._process = self._scheduler.current.process
        self._work: Callable[[], Any] = partial(target, *args)
        self.name = name
        self._ended = Event()
        self._task: Task | None = None

    def start(self) -> None:
        self._scheduler.point()
        self._task = self._scheduler.spawn(self._process, self.name, self._run)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done and not self._ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._ended.set()


class SimpleQueue(Generic[T]):
    """`queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._scheduler = active()
        self._items: deque[T] = deque()
        self._waiting: list[Task] = []

    def put(self, item: T) -> None:
        self._scheduler.point()
        self._items.append(item)
        if self._waiting:
            self._scheduler.wake(self._waiting)

    def get(self, block: bool = True, timeout: float | None = None) -> T:
        scheduler = self._scheduler
        scheduler.point()
        end = None if timeout is None else scheduler.now + timeout
        while not self._items:
            left = None if end is None else end - scheduler.now
            if left is not None and left <= 0:
                raise real_queue.Empty
            self._waiting.append(scheduler.current)
            scheduler.block("a queue", left)
        return self._items.popleft()


class Future(Generic[T]):
    """The part of `concurrent.futures.Future` that users of a pool need."""

    def __init__(self) -> None:
        self._done = Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self, work: Callable[[], T]) -> None:
        """Do the work, and keep its result or error."""
        try:
            self._result = work()
        except Exception as error:
            self._error = error
        self._done.set()

    def result(self, timeout: float | None = None) -> T:
        if not self._done.wait(timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        result: T = self._result
        return result


class ThreadPoolExecutor:
    """`concurrent.futures.ThreadPoolExecutor`. Its threads end when there is no work."""

    def __init__(self, max_workers: int, thread_name_prefix: str = "pool") -> None:
        self._scheduler: Scheduler = active()
        self._most = max_workers
        self._name = thread_name_prefix
        self._process = self._scheduler.current.process
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._at_work = 0
        self._idle = Condition()

    def submit(self, work: Callable[..., T], *args: Any, **options: Any) -> Future[T]:
        future: Future[T] = Future()
        self._waiting.append((future, lambda: work(*args, **options)))
        if self._at_work < self._most:
            self._at_work += 1
            self._scheduler.spawn(self._process, self._name, self._work)
        return future

    def map(self, work: Callable[[Any], T], items: Iterable[Any]) -> Iterator[T]:
        futures = [self.submit(work, item) for item in items]
        return (future.result() for future in futures)

    def shutdown(self, wait: bool = True) -> None:
        if wait:
            with self._idle:
                self._idle.wait_for(lambda: not self._at_work)

    def _work(self) -> None:
        while self._waiting:
            future, work = self._waiting.popleft()
            future.run(work)
        self._at_work -= 1  # no await since the check above: nothing was submitted
        with self._idle:
            self._idle.notify_all()

    def __enter__(self) -> ThreadPoolExecutor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()


class Signal:
    """Tells tasks that something outside all processes has changed. It has no lock, so no process can die with one."""

    def __init__(self) -> None:
        self._scheduler = active()
        self._waiting: list[Task] = []

    def wait_for(self, happened: Callable[[], bool], timeout: float) -> bool:
        """Block until it has `happened`, at most `timeout` seconds. Returns whether it has."""
        end = self._scheduler.now + timeout
        while not happened() and self._scheduler.now < end:
            self._waiting.append(self._scheduler.current)
            self._scheduler.block("a signal", end - self._scheduler.now)
        return happened()

    def notify(self) -> None:
        """Let all waiting tasks look again."""
        self._scheduler.wake(self._waiting)


def monotonic() -> float:
    """`time.monotonic`."""
    return active().now


def sleep(seconds: float) -> None:
    """`time.sleep`."""
    active().sleep(seconds)
