"""Settable wall clocks for virtual nodes, which leave this machine's alone: a preloaded shim (`clock.c`) adds an offset
from a file per node. Only wall clocks jump; monotonic clocks go on, as when an administrator sets the time.

libfaketime is not used: its processes share a named semaphore. A process that is killed may leave it locked for the
others, and always leaves it behind.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import struct
import subprocess
from importlib import resources
from pathlib import Path

from holdfast.smp_daemon.shared.errors import ConfigError

ENV = "HOLDFAST_CLOCK"
"""Names the file that says by how much the wall clock of a virtual node is off."""

COMPILE_DEADLINE_S = 60.0


@functools.cache
def unavailable() -> str:
    """Why clocks cannot be set here, or an empty text."""
    return "" if shutil.which("cc") else "needs a C compiler, cc"


def compile_shim(directory: Path) -> dict[str, str]:
    """Compile the shim into a directory, which the caller removes. Returns the variables that load it into a process.

    Raises:
        ConfigError: there is no compiler, or the compiler failed.
    """
    if reason := unavailable():
        raise ConfigError(f"clocks cannot be set here: {reason}")
    shim = directory / "clock.so"
    source = resources.files(__package__).joinpath("clock.c").read_text()
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(shim), "-xc", "-", "-ldl"]
    done = subprocess.run(
        command, input=source, capture_output=True, text=True, timeout=COMPILE_DEADLINE_S, check=False
    )
    if done.returncode != 0:
        raise ConfigError(f"clocks cannot be set here: {' '.join(command)} failed: {done.stderr.strip()}")
    before = os.environ.get("LD_PRELOAD")
    return {"LD_PRELOAD": f"{shim}:{before}" if before else str(shim)}


def set_clock(clock: Path, ahead_s: int) -> None:
    """Set the clock of all processes that follow `clock` this far ahead of this machine's; behind, if negative."""
    fd = os.open(clock, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(fd, struct.pack("=q", ahead_s), 0)  # in place: others have it mapped
    finally:
        os.close(fd)


def follow(clock: str) -> None:
    """Make this process, which was started with the shim, follow another clock. Call while it has one thread.

    Raises:
        OSError: there is no such clock.
    """
    if problem := ctypes.CDLL(None).holdfast_follow_clock(clock.encode()):
        raise OSError(problem, os.strerror(problem), clock)
