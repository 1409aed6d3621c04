"""What holdfast takes from the machine in order to run: threads and what they wait on, the clock, sockets, the files of
an arena, and processes.

Whatever needs one of these is given a `System` by who makes it, so that a simulation can hand in another, in which
threads take turns in an order of its choice, hours pass in a moment, and arenas and connections are objects in memory.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import queue
import shutil
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from holdfast.smp_daemon.shared.credentials import Credentials, current
from holdfast.smp_daemon.shared.pidfds import await_end
from holdfast.smp_daemon.shared.populate import populate
from holdfast.smp_daemon.shared.uids import is_of_this_user


class System:
    """This machine. What is here behaves as in the modules of the standard library that it is named after.

    A subclass replaces all of it: locks, threads and clock must be of one kind.
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

    socket = socket.socket
    is_of_this_user = staticmethod(is_of_this_user)

    os: Any = os
    mmap: Any = mmap
    flock: Any = staticmethod(fcntl.flock)
    rmtree: Any = staticmethod(shutil.rmtree)
    populate: Any = staticmethod(populate)

    await_end: Any = staticmethod(await_end)

    def credentials(self) -> Credentials:
        """What this process shows to SMPs, and asks of those who come; see `credentials.current`."""
        return current()

    def created_s(self) -> float:
        """When this process was made, in seconds since 1970: its number alone may be another's by now."""
        import psutil

        return psutil.Process().create_time()

    def grpc(self) -> Any:
        """The module. Trainers, which may fork, never ask for it."""
        import grpc

        return grpc


MACHINE = System()
"""Stateless, so that one is enough for all."""
