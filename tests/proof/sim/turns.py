"""Whose turn it is: decides at which awaits a task gives way, and which of the tasks that can run goes on.

The plain order has no choices: a task runs until it blocks, and the one that has waited longest goes on. Every other
order is the plain one with *deviations*. Those of a run can be recorded and replayed. Usually a few of them, at the
right places, are enough to make a run fail; see `tests.proof.sim.shrink`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tests.proof.sim.tasks import Task

NEVER = 1 << 62
"""An await that no run reaches."""

CHANGES = 3
"""How often a run lowers a priority, at most: most known races need one or two such changes."""

ORDERS = ("uniform", "priorities")


class Turns(Protocol):
    """Decides the order of turns of one run. Not thread-safe.

    Attributes:
        eager: whether a task that can run again may be preferred to the one that is running.
    """

    eager: bool

    def next_switch(self, awaits: int) -> int:
        """The first await after number `awaits` at which the running task gives way."""
        ...

    def gave_way(self, task: Task, await_: int) -> None:
        """The task gave way at this await, as `next_switch` said, or because one that may be preferred can run."""
        ...

    def pick(self, ready: Sequence[Task]) -> int:
        """The index of the task that goes on, of at least two. The first one has waited longest."""
        ...


class Uniform:
    """Draws all choices: a task gives way at each await with probability `chance`, and all tasks are equally likely."""

    eager = False

    def __init__(self, seed: str, chance: float) -> None:
        self._random = random.Random(seed)
        self._chance = chance

    def next_switch(self, awaits: int) -> int:
        if not self._chance:
            return NEVER
        return awaits + 1 + int(-math.log(1.0 - self._random.random()) / self._chance)

    def gave_way(self, task: Task, await_: int) -> None:
        """Does nothing: all tasks are equal."""

    def pick(self, ready: Sequence[Task]) -> int:
        return int(self._random.random() * len(ready))


class Priorities:
    """Draws a priority for each task. The task that can run and has the highest priority runs. At a few awaits, drawn
    from the first `span`, the current task gets the lowest priority of all.

    That finds failures that need a certain task to be late for long, which uniform draws hardly do (PCT: Burckhardt et
    al., "A randomized scheduler with probabilistic guarantees of finding bugs", ASPLOS 2010).
    """

    eager = True

    def __init__(self, seed: str, span: int) -> None:
        self._random = random.Random(seed)
        self._changes = sorted(self._random.randrange(1, span) for _ in range(self._random.randint(0, CHANGES)))
        self._of: dict[int, float] = {}
        self._lowest = 0.0

    def next_switch(self, awaits: int) -> int:
        return next((change for change in self._changes if change > awaits), NEVER)

    def gave_way(self, task: Task, await_: int) -> None:
        if await_ in self._changes:
            self._lowest -= 1.0
            self._of[task.number] = self._lowest

    def pick(self, ready: Sequence[Task]) -> int:
        return max(range(len(ready)), key=lambda index: self._priority(ready[index].number))

    def _priority(self, number: int) -> float:
        known = self._of.get(number)
        if known is None:
            known = self._of[number] = self._random.random()
        return known


@dataclass(frozen=True, slots=True)
class Deviations:
    """How the turns of a run deviate from the plain order.

    Attributes:
        delays: awaits at which the current task gives way, and from which on it runs only while no other task can.
        switches: awaits at which the current task gives way, ascending.
        picks: (number, index): which task goes on at that pick among several, if not the first.
    """

    delays: tuple[int, ...] = ()
    switches: tuple[int, ...] = ()
    picks: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return len(self.delays) + len(self.switches) + len(self.picks)


class Replayed:
    """The plain order with these deviations."""

    eager = False

    def __init__(self, deviations: Deviations) -> None:
        self._delays = frozenset(deviations.delays)
        self._switches = sorted((*deviations.switches, *deviations.delays), reverse=True)
        self._picks = dict(deviations.picks)
        self._delayed: set[int] = set()
        self._number = 0

    def next_switch(self, awaits: int) -> int:
        while self._switches and self._switches[-1] <= awaits:
            self._switches.pop()
        return self._switches[-1] if self._switches else NEVER

    def gave_way(self, task: Task, await_: int) -> None:
        if await_ in self._delays:
            self._delayed.add(task.number)

    def pick(self, ready: Sequence[Task]) -> int:
        self._number += 1
        if self._delayed:
            return next((index for index, task in enumerate(ready) if task.number not in self._delayed), 0)
        return min(self._picks.get(self._number, 0), len(ready) - 1)


class Recorder:
    """Another order, with a record of what it decides."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._switches: list[int] = []
        self._picks: list[tuple[int, int]] = []
        self._number = 0
        self.eager = turns.eager

    def next_switch(self, awaits: int) -> int:
        return self._turns.next_switch(awaits)

    def gave_way(self, task: Task, await_: int) -> None:
        self._turns.gave_way(task, await_)
        self._switches.append(await_)

    def pick(self, ready: Sequence[Task]) -> int:
        index = self._turns.pick(ready)
        self._number += 1
        if index:
            self._picks.append((self._number, index))
        return index

    @property
    def deviations(self) -> Deviations:
        return Deviations((), tuple(self._switches), tuple(self._picks))
