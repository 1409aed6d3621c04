"""Processes, their tasks, and the operating system threads that tasks run on."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chaos.sim.scheduler import Scheduler


class Killed(BaseException):
    """Ends a task of a process that is gone, once the run is over. Nothing of holdfast catches it."""


class Violation(Exception):
    """What must never happen has happened; the message says what."""


class Process:
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
    """One thread of a process."""

    __slots__ = ("baton", "blocked", "done", "failure", "name", "process", "started", "token", "where", "woken", "work")

    def __init__(self, process: Process, name: str, work: Callable[[], None]) -> None:
        self.process = process
        self.name = name
        self.work = work
        self.baton: Any = None
        self.started = self.done = self.blocked = self.woken = False
        self.token = 0
        self.where = ""
        self.failure: BaseException | None = None

    def __repr__(self) -> str:
        return f"{self.process.name}/{self.name}"


class Worker:
    """An operating system thread that tasks run on, one after another, also of later runs."""

    def __init__(self) -> None:
        self.baton = _thread.allocate_lock()
        self.baton.acquire()
        self.task: Task | None = None
        self.scheduler: Scheduler | None = None
        threading.Thread(target=self._serve, name="simulated", daemon=True).start()

    def _serve(self) -> None:
        while True:
            self.baton.acquire()
            mine = True
            while mine:
                assert self.task is not None and self.scheduler is not None
                task, scheduler = self.task, self.scheduler
                self.task = self.scheduler = None
                scheduler.run_task(task)
                mine = scheduler.hand_on(self)  # else look at nothing: it may be somebody else's already


IDLE: list[Worker] = []
"""Workers without a task."""
