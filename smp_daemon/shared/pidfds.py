"""Processes that need not be children: which one is meant, waiting for its end, and whether it still runs."""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path

NOT_RUNNING = "TZXx"
"""States in ``/proc`` of a process that does not run: stopped by a signal, zombie, dead."""

PF_EXITING = 0x4


def await_end(pidfd: int, deadline_s: float) -> bool:
    """Block until the process of `pidfd` has ended, or until the deadline. Returns whether it has ended.

    Uses ``poll``: ``select`` takes no descriptor above 1,023, and a trainer may have more.
    """
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, deadline_s) * 1000))


def start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since the machine's boot.

    With the pid this identifies a process, since pids are reused. Times of day would not: they change when the clock is
    set. Arenas are on tmpfs, so no file in one is older than the boot.

    Raises:
        ProcessLookupError: there is no such process.
    """
    try:
        return int(_fields(pid)[19])
    except FileNotFoundError as error:
        raise ProcessLookupError(f"there is no process {pid}") from error


def ran_s(pid: int) -> float:
    """For how many seconds a process has run. Raises as `start_ticks`."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks(pid) / os.sysconf("SC_CLK_TCK")


def _fields(pid: int) -> list[str]:
    """The fields of ``/proc/<pid>/stat`` after the name, see ``proc_pid_stat(5)``. The first is the state."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def is_running(pid: int, pidfd: int) -> bool:
    """Whether a process is not stopped, has not ended, and is not ending.

    A killed process may take seconds to give its memory back.
    """
    try:
        signal.pidfd_send_signal(pidfd, 0)
        after_name = _fields(pid)
        pending = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line[3:6] == "Pnd"]
    except OSError:
        return False
    killed = any(int(line.split()[1], 16) >> (signal.SIGKILL - 1) & 1 for line in pending)
    return not (after_name[0] in NOT_RUNNING or int(after_name[6]) & PF_EXITING or killed)
