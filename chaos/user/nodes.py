"""The nodes on which a user's command runs in ``holdfast chaos run -- COMMAND``. Each has an arena, and so an SMP, of
its own."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil

from holdfast import sessions
from holdfast.chaos.actions import send_signals, using_arenas
from holdfast.chaos.user.command import CommandPlan
from holdfast.smp_daemon.shared.errors import DeadlineExceeded, HoldfastError
from holdfast.smp_daemon.shared.paths import ARENA_ENV, arena_path, read_owner
from holdfast.smp_daemon.shared.spawn import find_leftovers, remove
from holdfast.snapshot.state.audit import Orders

JOB = "chaos"
END_DEADLINE_S = 10.0


class CommandNode:
    """One node: a name, an arena, and what was started there."""

    def __init__(self, name: str, folder: Path) -> None:
        """`folder`: of the run; nodes whose names differ share nothing in it but notes and log."""
        self.name = name
        self.memory = folder / "nodes" / name
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, plan: CommandPlan, extra: dict[str, str]) -> None:
        """Start the command. `extra`: what stands in its environment besides."""
        ours = {ARENA_ENV: str(self.memory), "HOLDFAST_JOB": JOB, "HOLDFAST_OVERHEAD_BUDGET": "0"}
        ours["HOLDFAST_MAX_REPEATS"] = "0"  # it is we who kill it, at one step as often as it comes
        if plan.nodes > 1:
            ours["HOLDFAST_NODE"] = self.name
        orders = Orders(str(self._folder / "notes"), plan.steps)
        environment = os.environ | orders.to_environment() | ours | extra
        self._process = sessions.start(plan.command, environment, self._folder / "log")

    @property
    def runs(self) -> bool:
        """Whether the command was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def status(self) -> int | None:
        """Of the command; None before it is started and while it runs."""
        return self._process.poll() if self._process is not None else None

    def wait(self, deadline_s: float) -> int | None:
        """Block until the command ends, at most `deadline_s`; its status, None if it runs on."""
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, deadline_s))
        return self.status

    def kill(self) -> None:
        """SIGKILL to the process that was started, alone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(END_DEADLINE_S)

    @property
    def pid(self) -> int:
        """Of the process that was started last."""
        if self._process is None:
            raise HoldfastError(f"nothing was started on {self.name} yet")
        return self._process.pid

    def processes(self) -> list[psutil.Process]:
        """All that the command has started here and that still runs, in whatever session, but for the SMP."""
        found = []
        for process in using_arenas(self.memory):
            with suppress(psutil.Error):  # it has ended
                if "holdfast.smp_daemon" not in process.cmdline():
                    found.append(process)
        return found

    def end(self) -> None:
        """Kill all of the command that is left here, and wait until it is gone. The SMP stays."""
        self.kill()
        left = self.processes()
        for each in left:
            send_signals(each.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(left, END_DEADLINE_S)
        if alive:
            pids = [each.pid for each in alive]
            raise DeadlineExceeded(f"processes {pids} did not end within {END_DEADLINE_S:.0f} s")
        if self._process is not None:
            sessions.end(self._process)

    def lose(self) -> None:
        """Cut its power: the command and the SMP are killed, and its memory is gone."""
        send_signals(self.smp(), signal.SIGKILL)
        self.end()
        self.clear()

    def clear(self) -> None:
        """End the SMP, if it runs, and free the memory. The command has ended."""
        for leftover in find_leftovers(self.memory):
            remove(leftover)

    def smp(self) -> int:
        """The pid of its SMP. Raises `HoldfastError` if there is none."""
        owner = read_owner(arena_path(JOB, self.memory))
        if owner is None:
            raise HoldfastError(f"no SMP serves the job on {self.name}\n{sessions.tail(self._folder / 'log')}")
        return owner.pid
