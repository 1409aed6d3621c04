"""The nodes on which a user's command runs in ``holdfast chaos run -- COMMAND``. Each has an arena, and so an SMP, of
its own."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path

from holdfast import sessions
from holdfast.chaos.runner import LocalNode, loopback_of
from holdfast.chaos.user.command import CommandPlan
from holdfast.smp_daemon.shared.errors import HoldfastError
from holdfast.snapshot.state.audit import AuditOrders

JOB = "chaos"
END_DEADLINE_S = 10.0


class CommandNode(LocalNode):
    """One node, and the command that was started there."""

    def __init__(self, name: str, folder: Path) -> None:
        """`folder`: of the run; nodes whose names differ share nothing in it but notes and log."""
        super().__init__(name, folder / "nodes" / name, JOB)
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, plan: CommandPlan, extra: dict[str, str]) -> None:
        """Start the command. `extra`: what stands in its environment besides."""
        ours = self.environment() | {"HOLDFAST_OVERHEAD_BUDGET": "0"}
        if plan.nodes == 1:
            ours.pop("HOLDFAST_NODE")
        else:
            ours["HOLDFAST_HOST"] = loopback_of(self.name)
        orders = AuditOrders(str(self._folder / "notes"), plan.steps)
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

    def end(self) -> None:
        """Kill all of the command that is left here, and wait until it is gone. The SMP stays."""
        self.kill()
        self.kill_processes()
        if self._process is not None:
            sessions.end(self._process)

    def power_cut(self) -> None:
        self.end()
        super().power_cut()

    def smp(self) -> int:
        try:
            return super().smp()
        except HoldfastError as error:
            raise HoldfastError(f"{error}\n{sessions.tail(self._folder / 'log')}") from None
