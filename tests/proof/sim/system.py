"""The machine that simulated processes run on, as a `smp_daemon.shared.system.System`."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sized
from typing import Any

from holdfast.smp_daemon.shared.credentials import Credentials
from holdfast.smp_daemon.shared.system import System
from tests.proof.sim import threads
from tests.proof.sim.memory import ROOM_BYTES, USER, File, MemoryMmap, MemoryOs, MemoryShutil, OpenDirectory
from tests.proof.sim.network import SimSocket
from tests.proof.sim.rpc import SimGrpc
from tests.proof.sim.scheduler import active
from tests.proof.sim.tasks import SimProcess


class SimOs(MemoryOs):
    """`os`, with the ids of simulated processes, and arenas in memory."""

    O_CLOEXEC, O_CREAT, O_EXCL, O_NOFOLLOW, O_RDWR = os.O_CLOEXEC, os.O_CREAT, os.O_EXCL, os.O_NOFOLLOW, os.O_RDWR
    O_RDONLY, O_NONBLOCK, O_DIRECTORY = os.O_RDONLY, os.O_NONBLOCK, os.O_DIRECTORY

    @staticmethod
    def getuid() -> int:
        return USER

    def __init__(self, locks: dict[str, SimProcess]) -> None:
        """`locks`: which process has locked which arena. Every SMP locks one."""
        self._locks = locks

    def getpid(self) -> int:
        return id(active().current.process)

    def pidfd_open(self, pid: int) -> SimProcess:
        for process in self._locks.values():
            if id(process) == pid and process.alive:
                return process
        raise ProcessLookupError("no such process")

    def close(self, fd: object) -> None:
        """Does nothing: descriptors are the files and processes themselves."""


class SimSystem(System):
    """The one instance is shared by all processes of all runs. The scheduler knows which process calls."""

    Thread: Any = threads.Thread
    Lock: Any = threads.Lock
    RLock: Any = threads.RLock
    Condition: Any = threads.Condition
    Event: Any = threads.Event
    SimpleQueue: Any = threads.SimpleQueue
    Pool: Any = threads.ThreadPoolExecutor
    monotonic = staticmethod(threads.monotonic)
    time = staticmethod(threads.monotonic)
    randbits = staticmethod(lambda k: active().random.getrandbits(k))

    socket: Any = SimSocket

    mmap: Any = MemoryMmap
    available_bytes = staticmethod(lambda: ROOM_BYTES)
    rmtree: Any = staticmethod(MemoryShutil.rmtree)

    def __init__(self) -> None:
        self._locks: dict[str, SimProcess] = {}
        self.os = SimOs(self._locks)

    def begin_run(self) -> None:
        """Release the locks of all arenas."""
        self._locks.clear()

    def populate(self, mapped: Sized, start: int = 0, count: int | None = None) -> None:
        """All memory is there. A trainer that maps a slot touches all of it, as whoever reserves one has (`seams`)."""
        if count is None:
            active().work("map", len(mapped))

    def flock(self, opened: OpenDirectory | File, how: int) -> None:
        """Lock an arena, or a file. A simulated process releases its locks when it dies. A lock that is shared is only
        asked for to see whether anybody has the other one."""
        process = active().current.process
        name = opened.name if isinstance(opened, OpenDirectory) else f"file {opened.number}"
        if how & fcntl.LOCK_UN:
            self._locks.pop(name, None)
            return
        owner = self._locks.get(name)
        if owner is not None and owner.alive and owner is not process:
            raise BlockingIOError("the lock is held")
        if not how & fcntl.LOCK_SH:
            self._locks[name] = process

    def await_end(self, process: SimProcess, deadline_s: float) -> bool:
        """Wait until a process, which is its own descriptor, has ended. Returns whether it has."""
        ended = threads.Event()
        process.on_death[id(ended)] = ended.set
        ended.wait(deadline_s)
        process.on_death.pop(id(ended), None)
        return not process.alive

    def credentials(self) -> Credentials:
        return Credentials()

    def start_ticks(self) -> int:
        return 0

    def grpc(self) -> Any:
        return SimGrpc


class SimFcntl:
    """The module `fcntl`, for `spawn.start_smp`."""

    LOCK_EX, LOCK_NB, LOCK_SH, LOCK_UN = fcntl.LOCK_EX, fcntl.LOCK_NB, fcntl.LOCK_SH, fcntl.LOCK_UN

    @staticmethod
    def flock(opened: OpenDirectory | File, how: int) -> None:
        active().point()
        SYSTEM.flock(opened, how)


class SimTime:
    """The module `time`, for `spawn.start_smp`."""

    monotonic = staticmethod(threads.monotonic)
    sleep = staticmethod(threads.sleep)


SYSTEM = SimSystem()
