"""``python -m tests.traced_smp``: an SMP that writes down what its threads call while they hold the store's lock.

A profiler sees every C function that Python code calls, whichever way: files, mappings, sockets, waits, digests. It
runs in a thread only while that thread has the lock. Not seen are what C code calls by itself, and slice assignments.

Each line of the file that ``HOLDFAST_TRACE`` names is a call and the function of holdfast's that made it, with a tab
between; a line ``lock`` and a function says that this function took the lock.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from holdfast.smp_daemon.shared import limits
from holdfast.smp_daemon.shared.system import System

TRACE = "HOLDFAST_TRACE"

BLOCKING = (
    *("posix", "io", "_io", "mmap", "socket", "_socket", "ssl", "_ssl", "select", "fcntl", "time", "ctypes", "_ctypes"),
    *("_posixsubprocess", "_thread", "_queue", "zlib", "_hashlib", "xxhash", "grpc", "numpy", "torch"),
)
"""Modules of C functions that may block, or that work on bytes."""

HARMLESS = (
    *("time.time", "time.monotonic", "time.perf_counter", "time.localtime", "time.strftime", "io.text_encoding"),
    *("posix.fspath", "posix.getpid", "posix.getuid", "posix.fstat"),
)
"""Exceptions: they return at once."""

THREADS = {
    "_thread.lock.acquire": "waits for a lock",
    "_thread.lock.__exit__": "waits for a lock",
    "_thread.start_new_thread": "starts a thread",
    "_thread.RLock.acquire": "waits for a lock",
}
"""What counts of `_thread`. The entry into a with block is not seen; its end is."""

FOREIGN = (
    *("holdfast.ec.backends", "holdfast.ec.codec", "holdfast.ec.matrix", "holdfast.smp_daemon.net."),
    *("holdfast.smp_daemon.shared.transport", "holdfast.smp_daemon.shared.populate", "grpc.", "subprocess", "shutil"),
)
"""Modules that work on bytes or wait for others: each call of them is noted, and none that they make."""

TOOLS = ("records", "plain", "system", "paths", "uids", "memory", "priority")
"""Modules of `smp_daemon.shared` that do what their callers ask for: the callers are noted."""

UNASKED = ("logging", "holdfast.smp_daemon.shared.failpoints", "holdfast.smp_daemon.shared.logs")
"""What these call is not noted: they write lines into a file on tmpfs, or do nothing. Nor is what destructors call,
which run wherever the garbage collector does."""


Note = Callable[[str, str], None]
"""Called with a call and its caller."""


class TracedCondition(threading.Condition):
    """A condition that notes what its holders call."""

    def __init__(self, lock: Any, note: Note) -> None:
        super().__init__(lock)
        self._note = note
        self._mine = threading.local()

    def __enter__(self) -> bool:
        taken = super().__enter__()
        self._mine.depth = getattr(self._mine, "depth", 0) + 1
        if self._mine.depth == 1:
            self._note("lock", callers_of(sys._getframe(1))[1])
            sys.setprofile(self._look)
        return taken

    def __exit__(self, *error: Any) -> None:
        self._mine.depth -= 1
        if not self._mine.depth:
            sys.setprofile(None)
        super().__exit__(*error)

    def _look(self, frame: FrameType, event: str, what: Any) -> None:
        if event == "c_call":
            call = name_of(what)
        else:
            call = "?" if event == "call" and module_of(frame).startswith(FOREIGN) else ""
        if not call or (frame.f_globals is vars(threading) and frame.f_code.co_qualname.startswith("Condition.")):
            return
        foreign, caller = callers_of(frame)
        if caller and self._is_owned():  # type: ignore[attr-defined]
            self._note(foreign or call, caller)


def module_of(frame: FrameType) -> str:
    """The module of the function that a frame runs."""
    return str(frame.f_globals.get("__name__", ""))


def name_of(function: Any) -> str:
    """The name of a C function that may block; empty if it does not."""
    module = function.__module__ or type(function.__self__).__module__
    name = f"{module}.{function.__qualname__}"
    package = module.partition(".")[0]
    if package not in BLOCKING or name in HARMLESS:
        return ""
    if package == "_thread":
        return THREADS.get(name, "")
    return "file" if package in ("_io", "io") else name


def callers_of(frame: FrameType | None) -> tuple[str, str]:
    """The outermost function of a foreign module on the way to `frame`, or nothing; and the function of holdfast's on
    whose behalf it runs, or nothing if what that calls is not noted."""
    foreign = ""
    while frame is not None:
        module = module_of(frame)
        if module.partition(".")[0] in UNASKED or module in UNASKED or frame.f_code.co_name == "__del__":
            return "", ""
        name = f"{module.removeprefix('holdfast.').removeprefix('smp_daemon.')}.{frame.f_code.co_qualname}"
        if module.startswith(FOREIGN):
            foreign = name
        elif module.startswith("holdfast.") and module.rpartition(".")[2] not in TOOLS:
            return foreign, name
        frame = frame.f_back
    return foreign, "?"


def condition_for(note: Note) -> Any:
    """What `System.Condition` is to be so that the store's lock is traced, and no other."""

    def condition(lock: Any = None) -> threading.Condition:
        is_the_stores = sys._getframe(1).f_code.co_qualname == "Store.__init__"
        return TracedCondition(lock, note) if is_the_stores else threading.Condition(lock)

    return staticmethod(condition)


def main() -> None:
    """Run the SMP."""
    from holdfast.smp_daemon.__main__ import main as serve

    fd = os.open(os.environ[TRACE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    seen: set[tuple[str, str]] = set()

    def note(call: str, caller: str) -> None:
        if (call, caller) not in seen:
            seen.add((call, caller))
            os.write(fd, f"{call}\t{caller}\n".encode())

    System.Condition = condition_for(note)
    limits.AT_ONCE_BYTES = 0  # what is done at once with few bytes is done as with many
    serve()


if __name__ == "__main__":
    main()
