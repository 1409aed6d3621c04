"""A virtual node: an SMP process, an arena directory, and its own address."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from holdfast.chaos.accounting import disk_bytes_written, wait_until_dead
from holdfast.chaos.runner import LocalNode, Wiring, within
from holdfast.sessions import trial_environment
from holdfast.smp_daemon.shared.errors import DeadlineExceeded
from holdfast.smp_daemon.shared.paths import Owner
from holdfast.smp_daemon.shared.processes import own_environment
from holdfast.smp_daemon.shared.spawn import START_DEADLINE_S, parse_report, smp_command

END_DEADLINE_S = 15.0
SIGNAL_DEADLINE_S = 5.0


class VirtualNode(LocalNode):
    """One node. Its SMP is a child of this process, and ends when this process ends.

    Attributes:
        place: where its processes start, see `runner.within`; its address is off loopback there.
        alive: whether an SMP was started here, and neither `end_smp` nor `wait_end` has ended it since.
        disk_bytes_written: bytes that the SMPs that have ended here wrote to disk.
    """

    def __init__(
        self, index: int, life: int, host: str, base: Path, job: str, smp_module: str = "holdfast.smp_daemon"
    ) -> None:
        """
        Args:
            life: number of earlier machines in this node's position; a replacement starts with no memory contents.
            smp_module: the module to run as the SMP.
        """
        name = f"node{index}" if life == 0 else f"node{index}-{life}"
        super().__init__(name, base / name, job)
        self.index = index
        self.host = host
        self.place: Sequence[str] = ()
        self._smp_module = smp_module
        self.alive = False
        self.disk_bytes_written = 0
        self._written_before = 0
        self._process: subprocess.Popen[str] | None = None

    @property
    def who(self) -> str:
        """The name that the node's SMP reports at a named point."""
        return f"smp{self.index}"

    def launch(self, wiring: Wiring, settings: dict[str, str] | None = None, log: Path | None = None) -> None:
        """Start the SMP; returns at once. `settings`: more environment variables; `log`: file for its stderr."""
        self.memory.mkdir(parents=True, mode=0o700, exist_ok=True)
        command = smp_command(self.job, self.name, self.arena, self.host, self._smp_module)
        command += ["--owner-pid", str(os.getpid()), *(["--insecure"] if self.place else [])]
        environment = (
            {"HOLDFAST_PRIORITY": "normal"}  # all nodes share this machine's cores, which are never idle
            | {"HOLDFAST_GRACE": "0"}  # here a signal is a fault, not the notice that a node goes away
            | trial_environment()
            | {"PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(self.memory)}
            | wiring.environment(self.who)
            | (settings or {})
        )
        errors = log.open("a") if log is not None else None
        try:
            with within(self.place):
                self._process = subprocess.Popen(
                    command,
                    env=own_environment(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    start_new_session=True,  # keeps Ctrl-C from it
                )
        finally:
            if errors is not None:
                errors.close()
        self.alive = True

    def wait_ready(self) -> Owner:
        """Block until the SMP serves. Raises the error that it reports if it cannot."""
        assert self._process is not None and self._process.stdout is not None
        owner = parse_report(_line(self._process.stdout, START_DEADLINE_S))
        # The first read of a freshly installed module updates its access time, which is a write: do not count that.
        self._written_before = disk_bytes_written(self._process.pid)
        return owner

    @property
    def pid(self) -> int:
        """The pid of the SMP."""
        assert self._process is not None
        return self._process.pid

    def kill_smp(self) -> None:
        """SIGKILL the SMP if it is alive; its shared memory stays."""
        self.end_smp(signal.SIGKILL)

    def end_smp(self, by: signal.Signals) -> int | None:
        """End the SMP with a signal, or with SIGKILL if it survives that; blocks until it is gone.

        Returns its exit status, negative if a signal ended it; None if it was not alive.
        """
        assert self._process is not None
        if not self.alive:
            return None
        # Not Popen.send_signal: it reaps a process that has ended, which loses the kernel's account of its writes.
        os.kill(self._process.pid, by)
        try:
            wait_until_dead(self._process.pid, SIGNAL_DEADLINE_S)
        except DeadlineExceeded:
            os.kill(self._process.pid, signal.SIGKILL)
        return self.wait_end()

    def ended(self) -> int | None:
        """The exit status of an SMP that ended on its own; None if it runs, or was ended here."""
        if not self.alive or self._process is None:
            return None
        # Not Popen.poll: it reaps the process, see `end_smp`.
        found = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def power_cut(self) -> None:
        """SIGKILL the SMP and wipe the node's memory, with all jobs' arenas. Other jobs' clusters may do so, too."""
        self.kill_smp()
        shutil.rmtree(self.memory, ignore_errors=True)

    def wait_end(self) -> int:
        """Block until the SMP has ended, and return its exit status. Raises `DeadlineExceeded`."""
        assert self._process is not None
        wait_until_dead(self._process.pid, END_DEADLINE_S)
        self.disk_bytes_written += disk_bytes_written(self._process.pid) - self._written_before
        self.alive = False
        return self._process.wait(END_DEADLINE_S)

    def close(self) -> None:
        """Kill the SMP and remove its arena, if it was started here; remove the memory if no other job has an arena."""
        if self.alive:
            self.kill_smp()
        if self._process is not None:
            if self._process.stdout is not None:
                self._process.stdout.close()
            shutil.rmtree(self.arena, ignore_errors=True)
        with suppress(OSError):  # it holds another job's arena
            self.memory.rmdir()


def _line(stream: IO[str], deadline_s: float) -> str:
    if not select.select([stream], [], [], deadline_s)[0]:
        raise DeadlineExceeded(f"an SMP said nothing for {deadline_s:.0f} s")
    return stream.readline()
