"""Processes, and their tasks, each a greenlet: it has a stack of its own, and goes on where it left off."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from greenlet import greenlet


class Killed(BaseException):
    """Ends a task of a process that is gone, once the run is over. Nothing of holdfast catches it."""


class Violated(NamedTuple):
    """What must never happen has happened; `check`: which of `holdfast.chaos.sim.checks` says so."""

    check: str
    message: str

    def __str__(self) -> str:
        return f"{self.check!r}: {self.message.splitlines()[0]}"


class Violation(Exception):
    """Ends a run that has broken the promise; its arguments are those of `Violated`."""

    def __init__(self, check: str, message: str) -> None:
        super().__init__(check, message)
        self.violated = Violated(check, message)


class SimProcess:
    """What dies together: tasks, and whatever registered an `on_death`."""

    def __init__(self, name: str, host: str) -> None:
        self.name = name
        self.host = host
        self.alive = True
        self.frozen = False
        self.slow_s = 0.0
        self.live_tasks = 0
        self.on_death: dict[int, Callable[[], None]] = {}
        self.frozen_tasks: list[Task] = []

    def __repr__(self) -> str:
        return self.name


class Task:
    """One thread of a process.

    Attributes:
        number: which of the run's tasks it is.
        on_turn: called when it goes on after others had their turn; None: nothing is.
        stack: where it runs; None until it is first its turn. Those of tasks that have ended are used again.
    """

    __slots__ = (
        "blocked",
        "done",
        "failure",
        "name",
        "number",
        "on_turn",
        "process",
        "stack",
        "token",
        "where",
        "woken",
        "work",
    )

    def __init__(self, process: SimProcess, name: str, number: int, work: Callable[[], None]) -> None:
        self.process = process
        self.name = name
        self.number = number
        self.work = work
        self.on_turn: Callable[[], None] | None = None
        self.stack: greenlet | None = None
        self.done = self.blocked = self.woken = False
        self.token = 0
        self.where = ""
        self.failure: BaseException | None = None

    def __repr__(self) -> str:
        return f"{self.process.name}/{self.name}"
