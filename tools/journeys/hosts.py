"""Machines for newcomers: hosts with their own network, processes, name and shared memory, and shells on them.

A host is a process in its own namespaces. It ends like a power cut: all its processes and memory are lost.
"""

from __future__ import annotations

import os
import queue
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from holdfast import DeadlineExceeded
from tests.proof.chaos.network.namespaces import unavailable

COMMAND_S = 1200.0
"""Timeout for a command; the longest is an installation on a busy machine."""
NETWORK = "10.77.0"

NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
OWNED = ("setpriv", "--pdeathsig", "KILL")
"""Command prefix that kills the command when this process ends, however it ends."""


class Failed(Exception):
    """A command did not do what its page says."""


class Host:
    """One machine on a `network`."""

    def __init__(self, name: str, number: int, hub: int, folder: Path) -> None:
        """`hub`: pid of a process in the network namespace of the switch. Raises `Failed`."""
        self.name = name
        self.address = f"{NETWORK}.{number}"
        self.home = folder / f"home-{name}-{number}-{time.monotonic_ns()}"
        self.home.mkdir()
        names = folder / "hosts"
        known = (
            [line for line in names.read_text().splitlines() if not line.endswith(f" {name}")] if names.exists() else []
        )
        names.write_text("\n".join(["127.0.0.1 localhost", *known, f"{self.address} {name}"]) + "\n")
        boot = (
            f"hostname {name}; mount -t tmpfs tmpfs /dev/shm; mount --bind {shlex.quote(str(names))} /etc/hosts; "
            "ip link set lo up; echo up; exec sleep infinity"
        )
        self._process = subprocess.Popen(
            [*OWNED, "unshare", *NAMESPACES, "bash", "-ec", boot],
            stdout=subprocess.PIPE,
            stderr=(self.home / "boot.log").open("w"),
            text=True,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "up\n":
            raise Failed(f"{name} does not start: {(self.home / 'boot.log').read_text()}")
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        self.pid = int(children[0])
        port = f"h{number}"
        self._plug(hub, f"ip link add {port} type veth peer name eth0 netns {self.pid}")
        self._plug(hub, f"ip link set {port} master switch up")
        self._plug(self.pid, f"ip addr add {self.address}/24 dev eth0")
        self._plug(self.pid, "ip link set eth0 up")

    def _plug(self, where: int, command: str) -> None:
        done = subprocess.run(
            ["nsenter", "-t", str(where), "-n", *command.split()], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise Failed(f"{command}: {done.stderr.strip()}")

    @property
    def entrance(self) -> list[str]:
        """Command prefix that runs a command on this host."""
        return ["nsenter", "-t", str(self.pid), "-a"]

    def cut_power(self) -> None:
        """Kill everything on the host at once."""
        if self._process.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        self._process.wait(COMMAND_S)


@contextmanager
def network(folder: Path) -> Iterator[Network]:
    """A switch for hosts for a ``with`` block; the hosts end with it."""
    with ExitStack() as at_end:
        boot = "ip link add switch type bridge && ip link set switch up && echo up && exec sleep infinity"
        command = [*OWNED, "unshare", "--net", "bash", "-ec", boot]
        hub = at_end.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        at_end.callback(hub.kill)
        assert hub.stdout is not None
        if hub.stdout.readline() != "up\n":
            raise Failed("no bridge can be made here")
        yield Network(folder, hub.pid, at_end)


class Network:
    """A switch that `Host`s are connected to."""

    def __init__(self, folder: Path, hub: int, at_end: ExitStack) -> None:
        self._folder, self._hub, self._at_end = folder, hub, at_end

    def host(self, name: str, number: int) -> Host:
        """Start another host, whose address ends with `number`."""
        made = Host(name, number, self._hub, self._folder)
        self._at_end.callback(made.cut_power)
        return made


def why_no_hosts() -> str:
    """The reason why this machine cannot run hosts; empty if it can."""
    return unavailable()


class Running:
    """A running command and its output, which a thread reads."""

    def __init__(self, process: subprocess.Popen[str], command: str) -> None:
        self.process, self.command = process, command
        self.said: list[str] = []
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line.rstrip("\n"))
            self._lines.put(self.said[-1])
        self._lines.put(None)

    def wait_for(self, words: str, deadline_s: float = COMMAND_S) -> str:
        """Block until the command prints a line with these words; return the line.

        Raises:
            Failed: the command ended first.
            DeadlineExceeded: it did not within `deadline_s`.
        """
        limit = time.monotonic() + deadline_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, limit - time.monotonic()))
            except queue.Empty:
                raise DeadlineExceeded(f"{self.command} did not say {words!r}, but:\n{self.last()}") from None
            if line is None:
                raise Failed(f"{self.command} ended before it said {words!r}:\n{self.last()}")
            if words in line:
                return line

    def wait(self, deadline_s: float = COMMAND_S) -> int:
        """Wait for the end; return the exit status. Raises `DeadlineExceeded`."""
        self._reader.join(deadline_s)  # ends when no process has the output open
        try:
            return self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded(f"{self.command} does not end; its last words:\n{self.last()}") from None

    def interrupt(self) -> None:
        """Press Ctrl-C: send SIGINT to the whole process group, as a terminal does."""
        os.killpg(self.process.pid, signal.SIGINT)

    def last(self) -> str:
        return "\n".join(self.said[-40:])


class Shell:
    """A newcomer's terminal on a `host` or on this machine; exported variables persist between commands."""

    def __init__(self, folder: Path, python: Path, host: Host | None = None, **variables: str) -> None:
        """`folder`: the working directory. `python`: the interpreter of the activated environment."""
        home = host.home if host else folder
        self.folder, self._host = folder, host
        self._variables = {
            "PATH": f"{python.parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(home),
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            **variables,
        }
        self._kept = home / f".kept-{id(self)}"

    def run(self, command: str, *, status: int = 0) -> str:
        """Run a command; return its output, of both streams. Blocks until it has ended.

        Raises:
            Failed: the exit status is not `status`.
        """
        print(f"  {self.name}$ {command}", flush=True)
        script = f"{command}\nstatus=$?; env -0 > {self._kept}; exit $status"
        done = subprocess.run(
            self._command(script),
            cwd=self.folder,
            env=self._variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        if done.returncode != status:
            raise Failed(f"{command}: status {done.returncode}, not {status}:\n{done.stdout[-3000:]}")
        kept = dict(each.split("=", 1) for each in self._kept.read_text().split("\0") if each)
        self._variables = {name: value for name, value in kept.items() if name not in ("_", "SHLVL", "PWD", "OLDPWD")}
        return done.stdout

    def start(self, command: str) -> Running:
        """Start a command in the background."""
        print(f"  {self.name}$ {command} &", flush=True)
        process = subprocess.Popen(
            self._command(f"exec {command}" if not _assigns(command) else command),
            cwd=self.folder,
            env=self._variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        return Running(process, command)

    def _command(self, script: str) -> list[str]:
        enter = [*self._host.entrance, f"--wd={self.folder}"] if self._host else []
        return [*OWNED, *enter, "bash", "-c", script]

    @property
    def name(self) -> str:
        return self._host.name if self._host else "here"

    def set(self, variables: Mapping[str, str]) -> None:
        """Set variables that stand for the reader's own choices, such as which host is the head."""
        self._variables |= variables


def _assigns(command: str) -> bool:
    """Whether the command begins with an assignment of a variable."""
    return "=" in command.split()[0]
