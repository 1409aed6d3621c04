"""What holdfast uses of the machine: a clock, threads, files in memory, processes, connections.

Whoever needs one takes it as an argument, and is typed with what it uses, not with all; `MACHINE` has them all. Names
are those of the standard library, and behave like them. A simulation passes an object of its own, in which threads take
turns in an order of its choice, hours pass in a moment, and arenas and connections are objects in memory.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import queue
import secrets
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from socket import socket as Socket
from time import monotonic, sleep, time
from typing import Any

from holdfast.smp_daemon.shared import processes
from holdfast.smp_daemon.shared.credentials import Credentials, current
from holdfast.smp_daemon.shared.memory import available_bytes
from holdfast.smp_daemon.shared.populate import populate

TRIES = 10
"""How often `remove_tree` tries: others rename a few files or delete them, and do not write new ones on and on."""


def remove_tree(path: str | os.PathLike[str]) -> None:
    """As `shutil.rmtree`, also while other processes rename or delete what is in it. Harmless if it is gone."""
    for left in reversed(range(TRIES)):
        try:
            shutil.rmtree(path)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY) or not left:
                raise
        if not os.path.lexists(path):
            return


class ReadyPool(ThreadPoolExecutor):
    """Starts all its threads as it is made. gRPC's thread that receives calls ends for good if `submit` raises because
    no thread can be started."""

    def __init__(self, max_workers: int, thread_name_prefix: str) -> None:
        super().__init__(max_workers, thread_name_prefix)
        started = threading.Event()
        try:
            for _ in range(max_workers):
                self.submit(started.wait)  # no thread is free, so it starts one
        finally:
            started.set()


class Clocks:
    """What time it is."""

    monotonic = staticmethod(monotonic)
    time = staticmethod(time)
    sleep = staticmethod(sleep)


class Threads(Clocks):
    """Threads, what they wait for, and the clock by which they wait: these have to be of one kind."""

    Thread = threading.Thread
    Pool = ThreadPoolExecutor
    ReadyPool = ReadyPool
    Lock = threading.Lock
    RLock = threading.RLock
    Condition = threading.Condition
    Event = threading.Event
    SimpleQueue = queue.SimpleQueue


class Files:
    """Files of an arena and the memory they are made of."""

    open = staticmethod(os.open)
    close = staticmethod(os.close)
    read = staticmethod(os.read)
    fstat = staticmethod(os.fstat)
    ftruncate = staticmethod(os.ftruncate)
    posix_fallocate = staticmethod(os.posix_fallocate)
    flock = staticmethod(fcntl.flock)
    statvfs = staticmethod(os.statvfs)
    rmtree = staticmethod(remove_tree)
    getuid = staticmethod(os.getuid)
    map = staticmethod(mmap.mmap)
    populate = staticmethod(populate)
    available_bytes = staticmethod(available_bytes)


class Processes:
    """Processes of this host; `start_ticks` and `ran_s` are of this one."""

    getpid = staticmethod(os.getpid)
    run = staticmethod(processes.run)
    pidfd_open = staticmethod(os.pidfd_open)
    await_end = staticmethod(processes.await_end)
    close = staticmethod(os.close)

    def start_ticks(self) -> int:
        return processes.start_ticks(os.getpid())

    def ran_s(self) -> float:
        return processes.ran_s(os.getpid())


class Network(Threads):
    """Connections, and the threads that serve them.

    Attributes:
        shutdown: ends both directions of a connection, whoever waits on it. Below TLS, which would take part otherwise.
    """

    socket = Socket
    shutdown = staticmethod(Socket.shutdown)

    def grpc(self) -> Any:
        """The module `grpc`. Never called in trainers, which may fork."""
        import grpc

        return grpc

    def credentials(self) -> Credentials:
        """The credentials that this process shows to SMPs and asks of those that connect; see `credentials.current`."""
        return current()


class System(Network, Files, Processes):
    """A whole machine, for those who hand its parts on."""

    randbits = staticmethod(secrets.randbits)


MACHINE = System()
"""This machine. The one instance needed, as it has no state."""


@contextmanager
def opened(path: str | os.PathLike[str], flags: int, files: Files = MACHINE) -> Iterator[int]:
    """The descriptor of a file or directory that is no link, as long as the block runs. A new file is closed to others.
    Raises `OSError`."""
    fd = files.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield fd
    finally:
        files.close(fd)
