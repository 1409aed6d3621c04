"""The machine that simulated processes run on, as a `smp_daemon.shared.system.System`."""

from __future__ import annotations

import os
from typing import Any

from holdfast.smp_daemon.shared.credentials import Credentials
from holdfast.smp_daemon.shared.system import System
from tests.proof.sim import threads
from tests.proof.sim.memory import ROOM_BYTES, USER, MemoryMmap, MemoryOs, MemoryShutil, OpenDirectory
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

    def populate(self, mapped: object, start: int = 0, count: int | None = None) -> None:
        """Does nothing: all memory is there."""

    def flock(self, directory: OpenDirectory, how: int) -> None:
        """Lock an arena. A simulated process releases its lock when it dies."""
        process = active().current.process
        owner = self._locks.get(directory.name)
        if owner is not None and owner.alive and owner is not process:
            raise BlockingIOError("the lock is held")
        self._locks[directory.name] = process

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


SYSTEM = SimSystem()
