"""What holdfast uses of the machine, as small interfaces: a clock, threads, files in memory, processes, connections.

Whoever needs one takes it as an argument, and is typed with what it uses, not with all. `MACHINE` has them all. A
simulation passes another `System`, in which threads take turns in an order of its choice, hours pass in a moment, and
arenas and connections are objects in memory.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import queue
import secrets
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socket import socket as Socket
from time import monotonic, sleep, time
from typing import Any, Protocol

from holdfast.smp_daemon.shared.credentials import Credentials, current
from holdfast.smp_daemon.shared.interpreter import run
from holdfast.smp_daemon.shared.memory import available_bytes
from holdfast.smp_daemon.shared.pidfds import await_end, ran_s, start_ticks
from holdfast.smp_daemon.shared.populate import populate


class Clocks(Protocol):
    """What time it is, as the module `time` gives it."""

    def monotonic(self) -> float: ...

    def time(self) -> float: ...

    def sleep(self, seconds: float, /) -> None: ...


class Threads(Clocks, Protocol):
    """Threads, what they wait for, and the clock by which they wait: these have to be of one kind."""

    def Thread(
        self, *, target: Callable[..., object], args: tuple[Any, ...] = (), name: str, daemon: bool = True
    ) -> threading.Thread: ...

    def Pool(self, max_workers: int, thread_name_prefix: str, /) -> ThreadPoolExecutor: ...

    def Lock(self) -> threading.Lock: ...

    def RLock(self) -> threading.RLock: ...

    def Condition(self, lock: Any = None) -> threading.Condition: ...

    def Event(self) -> threading.Event: ...

    def SimpleQueue(self) -> queue.SimpleQueue[Any]: ...


class Files(Protocol):
    """Files of an arena and the memory they are made of, by the functions of `os`, `fcntl`, `shutil` and `mmap`."""

    def open(self, path: Path, flags: int, mode: int = 0o600, /) -> int: ...

    def close(self, fd: int, /) -> None: ...

    def read(self, fd: int, length: int, /) -> bytes: ...

    def fstat(self, fd: int, /) -> os.stat_result: ...

    def ftruncate(self, fd: int, length: int, /) -> None: ...

    def posix_fallocate(self, fd: int, offset: int, length: int, /) -> None: ...

    def flock(self, fd: int, how: int, /) -> None: ...

    def statvfs(self, path: Path, /) -> os.statvfs_result: ...

    def rmtree(self, path: Path, /) -> None: ...

    def getuid(self) -> int:
        """Whose files they must be."""
        ...

    def map(self, fd: int, length: int, /) -> mmap.mmap:
        """Map a file, to read and to write. Touches no page."""
        ...

    def populate(self, mapped: mmap.mmap, start: int = 0, count: int | None = None, /) -> None:
        """See `populate.populate`."""
        ...

    def available_bytes(self) -> int:
        """See `memory.available_bytes`."""
        ...


class Processes(Protocol):
    """Processes of this host."""

    def getpid(self) -> int: ...

    def start_ticks(self) -> int:
        """When this process started; see `pidfds.start_ticks`."""
        ...

    def ran_s(self) -> float:
        """For how many seconds this process has run."""
        ...

    def run(self, command: Sequence[str], deadline_s: float, /) -> tuple[str, str]:
        """See `interpreter.run`."""
        ...

    def pidfd_open(self, pid: int, /) -> int: ...

    def await_end(self, pidfd: int, deadline_s: float, /) -> bool:
        """See `pidfds.await_end`."""
        ...

    def close(self, fd: int, /) -> None: ...


class Network(Threads, Protocol):
    """Connections, and the threads that serve them."""

    def socket(self, family: int, kind: int, /) -> Socket: ...

    def shutdown(self, sock: Socket, how: int, /) -> None:
        """End both directions of a connection, whoever waits on it. Below TLS, which would take part otherwise."""
        ...

    def grpc(self) -> Any:
        """The module `grpc`. Never called in trainers, which may fork."""
        ...

    def credentials(self) -> Credentials:
        """The credentials that this process shows to SMPs and asks of those that connect; see `credentials.current`."""
        ...


class System(Network, Files, Processes, Protocol):
    """A whole machine, for those who hand its parts on."""

    def randbits(self, k: int, /) -> int:
        """A number of `k` bits that nobody can guess."""
        ...


class Machine(System):
    """This machine. Attributes behave like their namesakes in the standard library."""

    Thread = threading.Thread
    Lock = threading.Lock
    RLock = threading.RLock
    Condition = threading.Condition
    Event = threading.Event
    SimpleQueue = queue.SimpleQueue
    Pool = ThreadPoolExecutor
    monotonic = staticmethod(monotonic)
    time = staticmethod(time)
    sleep = staticmethod(sleep)
    randbits = staticmethod(secrets.randbits)

    open = staticmethod(os.open)
    close = staticmethod(os.close)
    read = staticmethod(os.read)
    fstat = staticmethod(os.fstat)
    ftruncate = staticmethod(os.ftruncate)
    posix_fallocate = staticmethod(os.posix_fallocate)
    flock = staticmethod(fcntl.flock)
    statvfs = staticmethod(os.statvfs)
    rmtree = staticmethod(shutil.rmtree)
    getuid = staticmethod(os.getuid)
    map = staticmethod(mmap.mmap)
    populate = staticmethod(populate)
    available_bytes = staticmethod(available_bytes)

    getpid = staticmethod(os.getpid)
    run = staticmethod(run)
    pidfd_open = staticmethod(os.pidfd_open)
    await_end = staticmethod(await_end)

    socket = Socket
    shutdown = staticmethod(Socket.shutdown)

    def credentials(self) -> Credentials:
        return current()

    def start_ticks(self) -> int:
        return start_ticks(os.getpid())

    def ran_s(self) -> float:
        return ran_s(os.getpid())

    def grpc(self) -> Any:
        import grpc

        return grpc


MACHINE = Machine()
"""The one instance needed, as it has no state."""
