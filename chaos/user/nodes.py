"""The nodes on which a user's command runs in ``holdfast chaos run -- COMMAND``. Each has its own arena, and so its own
SMP."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path

from holdfast import sessions
from holdfast.chaos.runner import LocalNode, loopback_of
from holdfast.chaos.user.command import CommandPlan
from holdfast.smp_daemon.shared.errors import HoldfastError
from holdfast.snapshot.state.audit import AuditOrders

JOB = "chaos"


class CommandNode(LocalNode):
    """One node, and the command that was started on it."""

    def __init__(self, name: str, folder: Path) -> None:
        """`folder`: the folder of the run; nodes of different names share only notes and log in it."""
        super().__init__(name, folder / "nodes" / name, JOB)
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, plan: CommandPlan, extra: dict[str, str]) -> None:
        """Start the command. `extra`: more environment variables."""
        ours = self.environment() | {"HOLDFAST_EVERY": "1"}
        if plan.nodes == 1:
            ours.pop("HOLDFAST_NODE")
        else:
            ours["HOLDFAST_HOST"] = loopback_of(self.name)
        orders = AuditOrders(str(self._folder / "notes"), plan.steps)
        environment = sessions.trial_environment() | orders.to_environment() | ours | extra
        self._process = sessions.start(plan.command, environment, self._folder / "log")

    @property
    def runs(self) -> bool:
        """Whether the command was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def status(self) -> int | None:
        """The exit status of the command; None before it is started and while it runs."""
        return self._process.poll() if self._process is not None else None

    def wait(self, deadline_s: float) -> int | None:
        """Block until the command ends, at most `deadline_s`; returns its status, or None if it still runs."""
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, deadline_s))
        return self.status

    def kill(self) -> None:
        """SIGKILL only the process that was started, not its children."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()  # without a deadline: it gives back all that it has mapped first

    @property
    def pid(self) -> int:
        """The pid of the process that was started last. Raises `HoldfastError` if there is none."""
        if self._process is None:
            raise HoldfastError(f"nothing was started on {self.name} yet")
        return self._process.pid

    def end(self) -> None:
        """Kill all processes of the command that are left here, and wait until they are gone. The SMP stays."""
        if self._process is not None:
            sessions.end(self._process)
        self.kill_processes()

    def power_cut(self) -> None:
        self.end()
        super().power_cut()

    def smp(self) -> int:
        try:
            return super().smp()
        except HoldfastError as error:
            raise HoldfastError(f"{error}\n{sessions.tail(self._folder / 'log')}") from None
