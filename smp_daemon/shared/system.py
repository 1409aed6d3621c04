"""What holdfast uses of the machine: threads and their synchronization, the clock, sockets, the files of an arena, and
processes.

Objects that need one of these take a `System` as an argument, so that a simulation can pass another one, in which
threads take turns in an order of its choice, hours pass in a moment, and arenas and connections are objects in memory.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import queue
import secrets
import shutil
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from holdfast.smp_daemon.shared.credentials import Credentials, current
from holdfast.smp_daemon.shared.memory import available_bytes
from holdfast.smp_daemon.shared.pidfds import await_end, start_ticks
from holdfast.smp_daemon.shared.populate import populate


class System:
    """This machine. Attributes behave like their namesakes in the standard library.

    A subclass must replace all of them, since locks, threads and clock have to work together.
    """

    Thread = threading.Thread
    Lock = threading.Lock
    RLock = threading.RLock
    Condition = threading.Condition
    Event = threading.Event
    SimpleQueue = queue.SimpleQueue
    Pool = ThreadPoolExecutor
    monotonic = staticmethod(time.monotonic)
    time = staticmethod(time.time)
    randbits = staticmethod(secrets.randbits)

    socket = socket.socket

    os: Any = os
    mmap: Any = mmap
    flock: Any = staticmethod(fcntl.flock)
    rmtree: Any = staticmethod(shutil.rmtree)
    populate: Any = staticmethod(populate)

    available_bytes = staticmethod(available_bytes)

    await_end: Any = staticmethod(await_end)

    def credentials(self) -> Credentials:
        """The credentials that this process shows to SMPs and asks of those that connect; see `credentials.current`."""
        return current()

    def start_ticks(self) -> int:
        """When this process started; see `pidfds.start_ticks`."""
        return start_ticks(os.getpid())

    def grpc(self) -> Any:
        """The module `grpc`. Never called in trainers, which may fork."""
        import grpc

        return grpc


MACHINE = System()
"""The one instance needed, as it has no state."""
