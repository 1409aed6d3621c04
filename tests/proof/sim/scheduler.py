"""Which task runs next, and what time it is: tasks take turns, one at a time, in the order that `turns` decides.

A task is a thread of the code under test. It runs until it blocks, or until it comes to an *await*, a place where
threads could take turns, and the order makes it give way. When no task can run, the clock jumps to the next timer, so
an hour of deadlines takes a moment.

A killed process stops where it is, as after SIGKILL: none of its tasks ever goes on, and none of its ``finally`` blocks
touches an arena. Only when the run is over and judged are its tasks unwound, which frees what they hold.
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

from tests.proof.sim.costs import Costs
from tests.proof.sim.tasks import Killed, SimProcess, Task, Violated, Violation
from tests.proof.sim.turns import Turns

BEGAN_S = 1_000.0
"""The time that the clock shows when a run begins."""

DEFAULT_TURNS = 400_000
"""Limit on the turns of a run: one that takes more is taken not to come to rest."""

WORD = (1 << 64) - 1
SIMULATION = str(Path(__file__).parent)
HOLDFAST = str(Path(__file__).parent.parent.parent)

_active: Scheduler | None = None


class Moment(NamedTuple):
    """One event of a run. `at_s`: simulated seconds since the run began."""

    at_s: float
    who: str
    what: str


def active() -> Scheduler:
    """The scheduler of the current run."""
    assert _active is not None
    return _active


class Scheduler:
    """Runs the tasks of one run. Not thread-safe: all tasks are greenlets of the thread that made the scheduler.

    Args:
        seed: seed of everything that machines and networks draw.
        order: decides whose turn it is.
        most_turns: limit on the turns of the run.

    Attributes:
        fingerprint: hash of all turns so far: which task took each, at which await. It is equal for all runs of a seed.
        history: the events that matter, in words; recorded if `telling`.
        costs: what work on bytes costs; None: nothing.
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
        self.costs: Costs | None = None
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
        """The next await at which there is something to do. `threads.Lock` and `RLock` inline `point`, for speed."""
        self._draw_stop()

    # ------------------------------------------------------------------ for the simulated primitives

    def point(self) -> None:
        """An await: the task may have to give way, and a fault may strike here."""
        self.awaits += 1
        if self.awaits >= self.next_stop:
            self.stop_here()

    def block(self, where: str, timeout: float | None = None) -> bool:
        """Wait until `wake`, at most `timeout` seconds. Returns whether the task was woken."""
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
        """Let those of `tasks` that are blocked go on, and empty the list."""
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
        """Wait for so many simulated seconds."""
        self.block("sleep", seconds)

    def work(self, what: str, count: int) -> None:
        """Work on `count` bytes, at the rate of that name."""
        if self.costs is not None:
            self.sleep(self.costs.whole_s(what, count))

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Call `action`, which must not block, when the clock shows `time_s`."""
        heapq.heappush(self._timers, (time_s, next(self._numbers), None, 0, action))

    def spawn(self, process: SimProcess, name: str, work: Callable[[], None]) -> Task:
        """Start a task."""
        if self.unwinding:
            raise Killed
        task = Task(process, name, len(self._tasks) + 1, work)
        self._tasks.append(task)
        self._ready.append(task)
        if self._order.eager:
            self._switch_at = self.next_stop = self.awaits + 1
        return task

    @contextmanager
    def without_awaits(self) -> Iterator[None]:
        """Skip all awaits within the block: the task goes on. It must not block."""
        self._unbroken = True
        try:
            yield
        finally:
            self._unbroken = False

    # ------------------------------------------------------------------ for the driver and its faults

    def call_at(self, awaits: int, action: Callable[[], None]) -> None:
        """Call `action`, which must not block, at await number `awaits`."""
        self._planned.append((awaits, action))
        self._planned.sort(key=lambda item: -item[0])
        self.next_stop = min(self.next_stop, awaits)

    def kill(self, process: SimProcess, *, ends: bool = False) -> None:
        """Kill a process as by SIGKILL. `ends`: it ends by itself, which the history does not mention."""
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
        process.frozen = process.stood = True

    def thaw(self, process: SimProcess) -> None:
        """SIGCONT."""
        self.tell(process, "goes on")
        process.frozen = False
        self._ready += process.frozen_tasks
        process.frozen_tasks = []

    def yield_if_dead(self) -> None:
        """Let the caller go no further if a fault has just killed or frozen its process."""
        if not self.current.process.alive or self.current.process.frozen:
            self._ready.append(self.current)
            self._give_way(self.current)

    def violate(self, check: str, message: str) -> None:
        """Record a violation of one of `tests.proof.sim.checks`. The driver then ends the run."""
        self.tell(f"VIOLATION of {check!r}:", message.splitlines()[0])
        self.violations.append(Violated(check, message))

    def note(self, message: str) -> None:
        """Write a line of the trace."""
        if self.trace is not None:
            self.trace(f"{self.now - BEGAN_S:10.4f} #{self.awaits:<6} {self.current!r:24} {message}")

    def tell(self, who: object, what: str) -> None:
        """Write a line of the trace, and record it in the history."""
        self.note(f"{who} {what}")
        if self.telling:
            self.history.append(Moment(self.now - BEGAN_S, str(who), what))

    def blocked_tasks(self) -> list[str]:
        """The tasks that have not ended, with the places where they wait."""
        return [
            f"{task!r} at {task.where or 'its start'}" for task in self._tasks if not task.done and task.process.alive
        ]

    def unwind(self) -> None:
        """End every task once the run is over. Called by `sim.run.play`."""
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
        """Run a task from its beginning to its end, on the current stack."""
        try:
            task.work()
        except Killed:
            pass
        except BaseException as error:
            if not self.unwinding:
                last = "".join(traceback.format_exception(error))
                self.violate("bug", f"{task!r} ended by {type(error).__name__}: {error}\n{last}")
        task.done = True

    def hand_on(self, stack: greenlet) -> tuple[Scheduler, Task]:
        """Let another task go on, as the one on the current stack has ended. Returns the stack's next task."""
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
        """The rest of `point`, at an await where there is something to do."""
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
        """Let other tasks run. Returns when it is this task's turn again."""
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
        """Choose the task whose turn it is. Fires timers, and moves the clock, while no task can run."""
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
        """Wake the driver where it waits, so that it finds the violation and gives up."""
        if not self.violations:
            what = "no task can ever go on" if self.turns <= self._most_turns else "tasks still run"
            self.violations.append(
                Violated("rest", f"{what} after {self.turns} turns: " + "; ".join(self.blocked_tasks()))
            )
        self._main.blocked = False
        self._main.token += 1
        return self._main


IDLE: list[greenlet] = []
"""Stacks without a task, also those of earlier runs: a new stack costs as much as some turns."""


def _place() -> str:
    """Where in the code under test the current task is."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and (SIMULATION in frame.f_code.co_filename or HOLDFAST not in frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_qualname if frame is not None else "its end"


def _serve(scheduler: Scheduler, task: Task) -> None:
    """Run tasks on this stack, one after another, also those of later runs."""
    stack = getcurrent()
    while True:
        scheduler.run_task(task)
        scheduler, task = scheduler.hand_on(stack)
