"""Shared parts of the backends that run virtual nodes on one machine: their event loop, and a node.

Virtual clusters (`chaos.cluster`), a user's own command (`chaos.user`) and Ray (`tests.proof.ray`) differ in what
runs on a node and how it is started again. They share this module's way to receive reports, hold processes at a
point, run timers, find a node's SMP and cut a node's power.
"""

from __future__ import annotations

import heapq
import importlib
import itertools
import json
import os
import selectors
import shutil
import signal
import socket
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from holdfast.smp_daemon.shared import failpoints
from holdfast.smp_daemon.shared.errors import DeadlineExceeded, HoldfastError
from holdfast.smp_daemon.shared.paths import ARENA_ENV, arena_path, read_owner

Event = dict[str, Any]

KILL_DEADLINE_S = 20.0


@dataclass(frozen=True, slots=True)
class Wiring:
    """How a process reaches the runner.

    Attributes:
        events: path of the runner's unix socket.
        rules: the points at which the process must stop, each with a step, or None for any step.
    """

    events: str
    rules: Sequence[tuple[str, int | None]]

    def environment(self, who: str) -> dict[str, str]:
        """The environment variable that arms `smp_daemon.shared.failpoints`; empty if there are no rules."""
        if not self.rules:
            return {}
        return {failpoints.ENV: json.dumps({"socket": self.events, "who": who, "rules": self.rules})}


class Runner:
    """An event loop over messages from processes, ends of processes, and timers.

    Processes connect to a unix socket, and each line that they send is a JSON object. A process that reaches a named
    point reports it, and waits there until `release`, or until it is killed.

    Not thread-safe, and without locks: everything happens in the thread that calls `turn`, between `listen` and
    `hang_up`. A process at a point therefore stays there while `heard` runs.
    """

    _selector: selectors.BaseSelector
    _timers: list[tuple[float, int, Callable[[], None]]]

    def listen(self, path: Path) -> None:
        """Accept reports on the unix socket `path` from now on."""
        self._selector, self._timers, self._numbers = selectors.DefaultSelector(), [], itertools.count()
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.watch(self._listening, self._accept)
        self._listening.bind(str(path))
        self._listening.listen(64)

    def hang_up(self) -> None:
        """Close all connections, which releases processes at points. Timers that are not due yet are dropped."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            elif isinstance(key.fileobj, int):
                os.close(key.fileobj)
        self._selector.close()
        self._timers.clear()

    def heard(self, event: Event, sock: socket.socket) -> None:
        """Handle what a process sent over `sock`. If it ``reached`` a point, it waits there for `release`."""
        raise NotImplementedError

    def watch(self, source: Any, action: Callable[[Any], None]) -> None:
        """Call `action` with `source`, a socket or a descriptor, whenever `source` is readable."""
        self._selector.register(source, selectors.EVENT_READ, action)

    def wake_at_end(self, pid: int) -> None:
        """Make `turn` return as soon as a child has ended. Does not reap the child."""

        def ended(pidfd: int) -> None:
            self._selector.unregister(pidfd)
            os.close(pidfd)

        self.watch(os.pidfd_open(pid), ended)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Call `action` after `seconds`."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), action))

    def turn(self, until: float) -> None:
        """Block until something happens, at most until `until` (`time.monotonic`), and handle it."""
        due = min(until, self._timers[0][0] if self._timers else until)
        for key, _ in self._selector.select(max(0.0, due - time.monotonic())):
            key.data(key.fileobj)
        self.expire(time.monotonic())

    def catch_up(self) -> None:
        """Handle everything that was sent before this call. The end of a process may be seen before its last message,
        and even before its connection is accepted."""
        while self._selector.select(0):
            self.turn(time.monotonic())

    def expire(self, now: float) -> None:
        """Run the timers that are due by `now`."""
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()

    def _accept(self, listening: socket.socket) -> None:
        sock, _ = listening.accept()
        buffer = bytearray()
        self.watch(sock, lambda sock: self._read(sock, buffer))

    def _read(self, sock: socket.socket, buffer: bytearray) -> None:
        try:
            data = sock.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            self._selector.unregister(sock)
            sock.close()
            return
        buffer += data
        *lines, rest = bytes(buffer).split(b"\n")
        buffer[:] = rest
        for line in lines:
            self.heard(json.loads(line), sock)


def release(sock: socket.socket) -> None:
    """Let the process that waits at a point go on."""
    with suppress(OSError):  # it was killed
        sock.sendall(b"g")


def loopback_of(name: str) -> str:
    """A loopback address for a node, derived from its name; two names share one only by chance."""
    a, b, c, _ = zlib.crc32(name.encode()).to_bytes(4, "big")
    return f"127.{16 + a % 224}.{b}.{1 + c % 254}"


class LocalNode:
    """A node on this machine: a name, and a folder that stands for its memory.

    Attributes:
        memory: the folder, with the arenas of all jobs on the node.
    """

    def __init__(self, name: str, memory: Path, job: str) -> None:
        self.name = name
        self.memory = memory
        self.job = job

    @property
    def arena(self) -> Path:
        """The job's arena on this node."""
        return arena_path(self.job, self.memory)

    def environment(self) -> dict[str, str]:
        """The variables with which processes on this node find its SMP."""
        return {
            ARENA_ENV: str(self.memory),
            "HOLDFAST_JOB": self.job,
            "HOLDFAST_NODE": self.name,
            "HOLDFAST_MAX_REPEATS": "0",  # the kills are ours, and may repeat at one step
        }

    def smp(self) -> int:
        """The pid of the node's SMP. Raises `HoldfastError` if there is none."""
        owner = read_owner(self.arena)
        if owner is None:
            raise HoldfastError(f"no SMP serves the job on {self.name}")
        return owner.pid

    def processes(self, *, smps: bool = False) -> list[psutil.Process]:
        """Running processes whose environment names the node's memory, in any session; SMPs only if `smps`."""
        found = []
        for process in using_arenas(self.memory):
            with suppress(psutil.Error):  # it has ended
                if smps or "holdfast.smp_daemon" not in process.cmdline():
                    found.append(process)
        return found

    def kill_processes(self, *, smps: bool = False) -> None:
        """SIGKILL all of `processes`. Blocks until they have ended; raises `DeadlineExceeded`."""
        left = self.processes(smps=smps)
        for each in left:
            send_signals(each.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(left, KILL_DEADLINE_S)
        if pids := [each.pid for each in alive if not _is_zombie(each)]:
            raise DeadlineExceeded(f"processes {pids} did not end within {KILL_DEADLINE_S:.0f} s")

    def power_cut(self) -> None:
        """SIGKILL all processes on the node, SMPs too, and remove its memory. Blocks; raises `DeadlineExceeded`."""
        self.kill_processes(smps=True)
        shutil.rmtree(self.memory, ignore_errors=True)


def find(name: str) -> Any:
    """What ``module:attribute`` names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def within(place: Sequence[str]) -> AbstractContextManager[None]:
    """Where processes of a node start: ``module:function`` of a context manager, and its argument; empty: here."""
    found: AbstractContextManager[None] = find(place[0])(place[1]) if place else nullcontext()
    return found


def send_signals(pid: int | None, *signals: signal.Signals) -> None:
    """Send signals to a process, unless `pid` is None or the process has ended."""
    for each in signals if pid is not None else ():
        try:
            os.kill(pid or 0, each)
        except ProcessLookupError:
            return


def using_arenas(folder: Path) -> list[psutil.Process]:
    """Running processes whose environment names an arena in `folder` or below, in any session, SMPs too."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is another user's
            told = Path(process.environ().get(ARENA_ENV, "/"))
            if process.status() != psutil.STATUS_ZOMBIE and told.is_relative_to(folder):
                found.append(process)
    return found


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return True
