"""What an SMP takes from the machine in order to run: threads, what these wait on, and the clock.

Whatever starts threads or waits is given a `System` by who makes it, so that a simulation can hand in another, in which
threads take turns in an order of its choice and hours pass in a moment.
"""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor


class System:
    """Threads and clock of this machine. What is here behaves as in `threading`, `queue`, `concurrent.futures`, `time`.

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


MACHINE = System()
"""Stateless, so that one is enough for all."""
