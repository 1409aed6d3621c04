"""Waiting for the end of processes that need not be children, and whether one still runs."""

from __future__ import annotations

import select
import signal
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


def is_running(pid: int, pidfd: int) -> bool:
    """Whether a process is not stopped, has not ended, and is not ending.

    A killed process may take seconds to give its memory back.
    """
    try:
        signal.pidfd_send_signal(pidfd, 0)
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        pending = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line[3:6] == "Pnd"]
    except OSError:
        return False
    killed = any(int(line.split()[1], 16) >> (signal.SIGKILL - 1) & 1 for line in pending)
    return not (after_name[0] in NOT_RUNNING or int(after_name[6]) & PF_EXITING or killed)
