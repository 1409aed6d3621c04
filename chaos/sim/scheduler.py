"""Who runs next, and what time it is: tasks take turns, one at a time, in an order that is decided elsewhere (`turns`).

A task is a thread of the code under test. It runs until it blocks, or until it comes to an *await*, a place where
threads could take turns, and the order says so. When nobody can run, the clock jumps to the next timer; so an hour of
deadlines takes a moment.

A process that is killed stops where it stands: none of its tasks ever goes on, as after SIGKILL, and no ``finally`` of
it touches an arena. Only when the run is over, and judged, are they unwound, so that what they hold is free.
"""

from __future__ import annotations

import heapq
import itertools
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from greenlet import getcurrent, greenlet

from holdfast.chaos.sim.tasks import Killed, SimProcess, Task, Violated, Violation
from holdfast.chaos.sim.turns import Turns

BEGAN_S = 1_000.0
"""What the clock shows when a run begins."""

DEFAULT_TURNS = 400_000
"""A run that takes more turns than this does not come to rest."""

WORD = (1 << 64) - 1
SIMULATION = str(Path(__file__).parent)
HOLDFAST = str(Path(__file__).parent.parent.parent)

_active: Scheduler | None = None


class Moment(NamedTuple):
    """What happened; `at_s`: of simulated time."""

    at_s: float
    who: str
    what: str


def active() -> Scheduler:
    """The scheduler of the run at hand."""
    assert _active is not None
    return _active


class Scheduler:
    """One run.

    Args:
        seed: what machines and networks do is drawn from it.
        order: decides whose turn it is.

    Attributes:
        fingerprint: of all turns so far: who took each, and at which await. Two runs of a seed have the same.
        history: what matters of what happened, in words, if `telling`.
    """

    def __init__(self, seed: str, order: Turns, most_turns: int = DEFAULT_TURNS) -> None:
        global _active
        _active = self
        self.random = random.Random(seed)
        self.now = BEGAN_S
        self.awaits = 0
        self.turns = 0
        self.fingerprint = 0
        self.violations: list[Violated] = []
        self.trace: Callable[[str], None] | None = None
        self.telling = False
        self.history: list[Moment] = []
        self.unwinding = False
        self._unbroken = False
        self._most_turns = most_turns
        self._order = order
        self._ready: list[Task] = []
        self._timers: list[tuple[float, int, Task | None, int, Callable[[], None] | None]] = []
        self._numbers = itertools.count()
        self._tasks: list[Task] = []
        self._planned: list[tuple[int, Callable[[], None]]] = []
        self.root = SimProcess("driver", "driver")
        self._main = Task(self.root, "main", 0, lambda: None)
        self._main.stack = getcurrent()
        self.current = self._main
        self.next_stop = 0
        """The await at which something is to be done; `point` is spelled out where it is passed most often."""
        self._draw_stop()

    # ------------------------------------------------------------------ for the simulated primitives

    def point(self) -> None:
        """An await: the task may have to give way, and a fault may strike here."""
        self.awaits += 1
        if self.awaits >= self.next_stop:
            self.stop_here()

    def block(self, where: str, timeout: float | None = None) -> bool:
        """Wait until `wake`, at most `timeout` seconds; whether it was woken."""
        if self.unwinding:
            raise Killed
        assert not self._unbroken, "a task blocks where it must not give way"
        task = self.current
        task.token += 1
        task.blocked = True
        task.where = where
        if timeout is not None:
            time_s = self.now + timeout if timeout > 0 else self.now
            heapq.heappush(self._timers, (time_s, next(self._numbers), task, task.token, None))
        self._give_way(task)
        return task.woken

    def wake(self, tasks: list[Task]) -> None:
        """Those of `tasks` that are blocked may go on; the list is empty then."""
        for task in tasks:
            if task.blocked:
                task.blocked = False
                task.woken = True
                task.token += 1
                self._ready.append(task)
        tasks.clear()
        if self._order.eager:
            self._switch_at = self.next_stop = self.awaits + 1

    def sleep(self, seconds: float) -> None:
        """Wait so long."""
        self.block("sleep", seconds)

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Call `action`, which must not block, when the clock shows `time_s`."""
        heapq.heappush(self._timers, (time_s, next(self._numbers), None, 0, action))

    def spawn(self, process: SimProcess, name: str, work: Callable[[], None]) -> Task:
        """Start a task."""
        if self.unwinding:
            raise Killed
        task = Task(process, name, len(self._tasks) + 1, work)
        process.live_tasks += 1
        self._tasks.append(task)
        self._ready.append(task)
        if self._order.eager:
            self._switch_at = self.next_stop = self.awaits + 1
        return task

    @contextmanager
    def without_awaits(self) -> Iterator[None]:
        """Within the block the task goes on, whatever it passes; it must not block."""
        self._unbroken = True
        try:
            yield
        finally:
            self._unbroken = False

    # ------------------------------------------------------------------ for the driver and its faults

    def call_at(self, awaits: int, action: Callable[[], None]) -> None:
        """Call `action`, which must not block, at the await of that number."""
        self._planned.append((awaits, action))
        self._planned.sort(key=lambda item: -item[0])
        self.next_stop = min(self.next_stop, awaits)

    def kill(self, process: SimProcess, *, ends: bool = False) -> None:
        """SIGKILL; `ends`: or its end."""
        if not process.alive:
            return
        if ends:
            self.note(f"{process} ends")
        else:
            self.tell(process, "is killed")
        process.alive = False
        process.frozen = False
        for action in list(process.on_death.values()):
            action()
        process.on_death.clear()

    def freeze(self, process: SimProcess) -> None:
        """SIGSTOP."""
        self.tell(process, "stands still")
        process.frozen = True

    def thaw(self, process: SimProcess) -> None:
        """SIGCONT."""
        self.tell(process, "goes on")
        process.frozen = False
        self._ready += process.frozen_tasks
        process.frozen_tasks = []

    def yield_if_dead(self) -> None:
        """After a fault that may have killed the caller: it then goes no further."""
        if not self.current.process.alive or self.current.process.frozen:
            self._ready.append(self.current)
            self._give_way(self.current)

    def violate(self, check: str, message: str) -> None:
        """Note what must not happen, and which of `holdfast.chaos.sim.checks` says so; the driver ends the run."""
        self.tell(f"VIOLATION of {check!r}:", message.splitlines()[0])
        self.violations.append(Violated(check, message))

    def note(self, message: str) -> None:
        """A line of the trace."""
        if self.trace is not None:
            self.trace(f"{self.now - BEGAN_S:10.4f} #{self.awaits:<6} {self.current!r:24} {message}")

    def tell(self, who: object, what: str) -> None:
        """A line of the trace, and of the history."""
        self.note(f"{who} {what}")
        if self.telling:
            self.history.append(Moment(self.now - BEGAN_S, str(who), what))

    def blocked_tasks(self, process: SimProcess | None = None) -> list[str]:
        """Where tasks that have not ended wait."""
        return [
            f"{task!r} at {task.where or 'its start'}"
            for task in self._tasks
            if not task.done and task.process.alive and (process is None or task.process is process)
        ]

    def unwind(self) -> None:
        """The run is over: end every task. Called by the driver."""
        self.unwinding = True
        self.next_stop = 0
        for task in self._tasks:
            if task.stack is not None and not task.done:
                self.current = task
                task.stack.throw(Killed)
        self._tasks.clear()
        self._ready.clear()
        self._timers.clear()
        self.current = self._main

    # ------------------------------------------------------------------ inside

    def run_task(self, task: Task) -> None:
        """The whole life of a task, on the current stack."""
        try:
            task.work()
        except Killed:
            pass
        except BaseException as error:
            if not self.unwinding:
                task.failure = error
                last = "".join(traceback.format_exception(error))
                self.violate("bug", f"{task!r} ended by {type(error).__name__}: {error}\n{last}")
        task.done = True
        task.process.live_tasks -= 1

    def hand_on(self, stack: greenlet) -> tuple[Scheduler, Task]:
        """The task on the current stack has ended, and somebody else goes on; returns whom the stack is to run next."""
        following = self._main if self.unwinding else self._pick()
        self.current = following
        if following.stack is None:
            following.stack = stack
            return self, following
        IDLE.append(stack)
        scheduler, task = following.stack.switch()
        return scheduler, task

    def _draw_stop(self) -> None:
        self._switch_at = self._order.next_switch(self.awaits)
        self.next_stop = min(self._switch_at, self._planned[-1][0]) if self._planned else self._switch_at

    def stop_here(self) -> None:
        """The rest of `point`, where something is to be done."""
        if self.unwinding:
            raise Killed
        if self._unbroken:
            return
        while self._planned and self._planned[-1][0] <= self.awaits:
            _, action = self._planned.pop()
            action()
        task = self.current
        process = task.process
        switch = self.awaits >= self._switch_at
        self._draw_stop()
        if process.alive and not process.frozen:
            if switch:
                self._order.gave_way(task, self.awaits)
                if self.telling:
                    self.tell(task, f"{'is slow' if process.slow_s else 'gives way'} in {_place()}")
            if process.slow_s:
                self.block("a slow node", self.random.random() * process.slow_s)
                return
            if not switch:
                return
        self._ready.append(task)
        self._give_way(task)

    def _give_way(self, task: Task) -> None:
        """Let others run; returns when it is this task's turn again."""
        following = self._pick()
        if following is not task:
            self.current = following
            if following.stack is not None:
                following.stack.switch()
            else:
                following.stack = IDLE.pop() if IDLE else greenlet(_serve, self._main.stack)
                following.stack.switch(self, following)
        if self.unwinding:
            raise Killed
        if task.on_turn is not None:
            task.on_turn()
        if task is self._main and self.violations:
            raise Violation(*self.violations[0])

    def _pick(self) -> Task:
        """Whose turn it is. Fires timers, and moves the clock, while nobody can run."""
        self.turns += 1
        if self.turns > self._most_turns or self.violations:
            return self._end_early()
        ready = self._ready
        while True:
            while ready:
                index = self._order.pick(ready) if len(ready) > 1 else 0
                if index and self.telling:
                    self.tell(ready[index], f"goes on before {ready[0]}")
                task = ready.pop(index)
                process = task.process
                if not process.alive:
                    continue
                if process.frozen:
                    process.frozen_tasks.append(task)
                    continue
                self.fingerprint = (self.fingerprint * 1_000_003 + task.number * 65_537 + self.awaits) & WORD
                return task
            if not self._timers:
                return self._end_early()
            time_s, _, waiting, token, action = heapq.heappop(self._timers)
            if time_s > self.now:
                self.now = time_s
            if action is not None:
                action()
            elif waiting is not None and waiting.blocked and waiting.token == token:
                waiting.blocked = waiting.woken = False
                waiting.token += 1
                ready.append(waiting)

    def _end_early(self) -> Task:
        """The driver is to give up: it is woken where it waits, and finds the violation."""
        if not self.violations:
            what = "nobody can ever go on" if self.turns <= self._most_turns else "no rest after so many turns"
            self.violations.append(Violated("rest", f"{what} ({self.turns}): " + "; ".join(self.blocked_tasks())))
        self._main.blocked = False
        self._main.token += 1
        return self._main


IDLE: list[greenlet] = []
"""Stacks without a task, also of earlier runs: a new one costs as much as some turns."""


def _place() -> str:
    """Where in the code under test the current task is."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and (SIMULATION in frame.f_code.co_filename or HOLDFAST not in frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_qualname if frame is not None else "its end"


def _serve(scheduler: Scheduler, task: Task) -> None:
    """A stack runs tasks, one after another, also of later runs."""
    stack = getcurrent()
    while True:
        scheduler.run_task(task)
        scheduler, task = scheduler.hand_on(stack)
