"""Simulated processes and their tasks. Each task is a greenlet: it has its own stack, and goes on where it left off."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from greenlet import greenlet


class Killed(BaseException):
    """Ends a task once the run is over. Nothing in holdfast catches it."""


class Violated(NamedTuple):
    """Something happened that must never happen. `check`: which of `tests.proof.sim.checks` found it."""

    check: str
    message: str

    def __str__(self) -> str:
        return f"{self.check!r}: {self.message.splitlines()[0]}"


class Violation(Exception):
    """Ends a run that has broken the promise. Its arguments are those of `Violated`."""

    def __init__(self, check: str, message: str) -> None:
        super().__init__(check, message)
        self.violated = Violated(check, message)


class SimProcess:
    """Tasks that die together. The callbacks in `on_death` are called when they do. `stood`: it has been frozen."""

    def __init__(self, name: str, host: str) -> None:
        self.name = name
        self.host = host
        self.alive = True
        self.frozen = self.stood = False
        self.slow_s = 0.0
        self.on_death: dict[int, Callable[[], None]] = {}
        self.frozen_tasks: list[Task] = []

    def __repr__(self) -> str:
        return self.name


class Task:
    """One thread of a process.

    Attributes:
        number: its number within the run.
        on_turn: called when the task goes on after others had their turn; may be None.
        stack: the greenlet that it runs on; None before its first turn. Stacks of ended tasks are reused.
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

    def __repr__(self) -> str:
        return f"{self.process.name}/{self.name}"
