"""The machine that simulated processes run on, in place of a `smp_daemon.shared.system.System`."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.smp_daemon.shared.credentials import Credentials
from holdfast.smp_daemon.shared.errors import HoldfastError, SmpUnavailable
from holdfast.smp_daemon.shared.paths import Owner
from holdfast.smp_daemon.shared.plain import to_plain
from tests.proof.sim import threads
from tests.proof.sim.memory import MemoryFiles, OpenDirectory
from tests.proof.sim.network import SimSocket
from tests.proof.sim.rpc import SimGrpc
from tests.proof.sim.scheduler import active
from tests.proof.sim.tasks import SimProcess


class SimSystem(MemoryFiles):
    """The one instance is shared by all processes of all runs. The scheduler knows which process calls."""

    Thread: Any = threads.Thread
    Lock: Any = threads.Lock
    RLock: Any = threads.RLock
    Condition: Any = threads.Condition
    Event: Any = threads.Event
    SimpleQueue: Any = threads.SimpleQueue
    Pool: Any = threads.ThreadPoolExecutor
    ReadyPool: Any = Pool
    monotonic = staticmethod(threads.monotonic)
    time = staticmethod(threads.monotonic)
    sleep = staticmethod(threads.sleep)
    randbits = staticmethod(lambda k: active().random.getrandbits(k))

    socket: Any = SimSocket
    shutdown: Any = staticmethod(SimSocket.shutdown)

    def __init__(self) -> None:
        self._locks: dict[str, SimProcess] = {}
        """Which process has locked which arena. Every SMP locks one."""
        self._launch: Callable[[str, float], Owner]

    def getpid(self) -> int:
        return id(active().current.process)

    def run(self, command: Sequence[str], deadline_s: float) -> tuple[str, str]:
        """Run the command line that starts an SMP: its process is a simulated one. Returns its report."""
        try:
            owner = self._launch(command[command.index("--arena") + 1], deadline_s)
        except SmpUnavailable:
            return "", "killed"  # without a report
        except HoldfastError as error:
            return json.dumps({"error": type(error).__name__, "message": str(error)}), ""
        return json.dumps({"ready": to_plain(owner)}), ""

    def pidfd_open(self, pid: int) -> Any:
        for process in self._locks.values():
            if id(process) == pid and process.alive:
                return process
        raise ProcessLookupError("no such process")

    def begin_run(self, launch: Callable[[str, float], Owner]) -> None:
        """Release the locks of all arenas. `launch`: starts an SMP on an arena, and returns once it serves."""
        self._locks.clear()
        self._launch = launch

    def populate(self, mapped: Any, start: int = 0, count: int | None = None) -> None:
        """All memory is there. A trainer that maps a slot touches all of it, as whoever reserves one has (`seams`)."""
        if count is None:
            active().work("map", len(mapped))

    def flock(self, opened: Any, how: int) -> None:
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

    def await_end(self, process: Any, deadline_s: float) -> bool:
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

    def ran_s(self) -> float:
        return 0.0

    def grpc(self) -> Any:
        return SimGrpc


SYSTEM: Any = SimSystem()
