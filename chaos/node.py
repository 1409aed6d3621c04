"""A virtual node: an SMP process, an arena directory and an address of its own, on loopback or in a namespace."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import IO

from holdfast.chaos.accounting import disk_bytes_written, wait_until_dead
from holdfast.chaos.network import clocks
from holdfast.chaos.network.namespaces import DEVICE, inside
from holdfast.chaos.runner import LocalNode, Wiring
from holdfast.smp_daemon.shared.errors import DeadlineExceeded
from holdfast.smp_daemon.shared.paths import Owner
from holdfast.smp_daemon.shared.spawn import START_DEADLINE_S, parse_report, smp_command

END_DEADLINE_S = 15.0
SIGNAL_DEADLINE_S = 5.0


class VirtualNode(LocalNode):
    """One node. Its SMP is a child of this process, and goes when this process goes.

    Attributes:
        namespace: path of the network namespace that its processes are to be in; None: this machine's.
        clock: the file that sets its processes' wall clock (`chaos.network.clocks`); None: it is this machine's.
    """

    def __init__(
        self, index: int, life: int, host: str, base: Path, job: str, smp_module: str = "holdfast.smp_daemon"
    ) -> None:
        """
        Args:
            life: counts the machines that stood in this place; a replacement starts with nothing.
            smp_module: what is run as the SMP.
        """
        name = f"node{index}" if life == 0 else f"node{index}-{life}"
        super().__init__(name, base / name, job)
        self.index = index
        self.host = host
        self.namespace: str | None = None
        self.clock: Path | None = None
        self._smp_module = smp_module
        self.alive = False
        self.disk_bytes_written = 0
        self._written_before = 0
        self._process: subprocess.Popen[str] | None = None

    @property
    def who(self) -> str:
        """How its SMP calls itself at a named point."""
        return f"smp{self.index}"

    def launch(self, wiring: Wiring, settings: dict[str, str] | None = None, log: Path | None = None) -> None:
        """Start the SMP, with more environment variables if given; returns at once. `log`: where its words go."""
        self.memory.mkdir(parents=True, mode=0o700, exist_ok=True)
        command = smp_command(self.job, self.name, self.arena, self.host, self._smp_module)
        command += ["--owner-pid", str(os.getpid()), *(["--insecure"] if self.namespace else [])]
        environment = (
            {"HOLDFAST_PRIORITY": "normal"}  # the nodes share this machine's cores: none would ever be to spare
            | {"HOLDFAST_GRACE": "0"}  # a signal is a fault here, and no notice that a node is taken away
            | os.environ
            | {"PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(self.memory)}
            | self._clock()
            | wiring.environment(self.who)
            | (settings or {})
        )
        errors = log.open("a") if log is not None else None
        try:
            with inside(self.namespace):
                self._process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    start_new_session=True,  # Ctrl-C is not for it
                )
        finally:
            if errors is not None:
                errors.close()
        self.alive = True

    def wait_ready(self) -> Owner:
        """Block until the SMP serves. Raises what it could not do."""
        assert self._process is not None and self._process.stdout is not None
        owner = parse_report(_line(self._process.stdout, START_DEADLINE_S))
        # The first read of a freshly installed module updates its access time, and that is a write: not counted.
        self._written_before = disk_bytes_written(self._process.pid)
        return owner

    def environment(self) -> dict[str, str]:
        """What a trainer on this node needs to find its SMP, and the others."""
        return super().environment() | ({"GLOO_SOCKET_IFNAME": DEVICE} if self.namespace else {}) | self._clock()

    def _clock(self) -> dict[str, str]:
        return {clocks.ENV: str(self.clock)} if self.clock else {}

    @property
    def pid(self) -> int:
        """The SMP's process."""
        assert self._process is not None
        return self._process.pid

    def kill_smp(self) -> None:
        """SIGKILL the SMP, if it lives; what it held in shared memory stays."""
        self.end_smp(signal.SIGKILL)

    def end_smp(self, by: signal.Signals) -> int | None:
        """End the SMP by a signal, or by SIGKILL if it outlives that; blocks until it is gone.

        Returns its exit status, which says by which signal it ended; None if it was not alive.
        """
        assert self._process is not None
        if not self.alive:
            return None
        # Not Popen.send_signal: that reaps a process that has ended, and with it the kernel's account of it.
        os.kill(self._process.pid, by)
        try:
            wait_until_dead(self._process.pid, SIGNAL_DEADLINE_S)
        except DeadlineExceeded:
            os.kill(self._process.pid, signal.SIGKILL)
        return self.wait_end()

    def ended(self) -> int | None:
        """The exit status of an SMP that has ended by itself; None if it serves, or was ended here."""
        if not self.alive or self._process is None:
            return None
        # Not Popen.poll: that reaps it, see `end_smp`.
        found = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def power_cut(self) -> None:
        """SIGKILL the SMP and wipe the node's memory, other jobs' arenas too; these may be wiping it as well."""
        self.kill_smp()
        shutil.rmtree(self.memory, ignore_errors=True)

    def wait_end(self) -> int:
        """Block until the SMP has ended by itself; its exit status. Raises `DeadlineExceeded`."""
        assert self._process is not None
        wait_until_dead(self._process.pid, END_DEADLINE_S)
        self.disk_bytes_written += disk_bytes_written(self._process.pid) - self._written_before
        self.alive = False
        return self._process.wait(END_DEADLINE_S)

    def close(self) -> None:
        """Remove all that is left of this job, if its SMP was started here; and the node, if no other job is on it."""
        if self.alive:
            self.kill_smp()
        if self._process is not None:
            if self._process.stdout is not None:
                self._process.stdout.close()
            shutil.rmtree(self.arena, ignore_errors=True)
        with suppress(OSError):  # another job's arena is there
            self.memory.rmdir()


def _line(stream: IO[str], deadline_s: float) -> str:
    if not select.select([stream], [], [], deadline_s)[0]:
        raise DeadlineExceeded(f"an SMP said nothing for {deadline_s:.0f} s")
    return stream.readline()
