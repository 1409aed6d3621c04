"""Processes that need not be children: waiting for the end of one, and whether it still runs."""

from __future__ import annotations

import select
import signal
from pathlib import Path

OVER = "TZXx"
"""States in ``/proc``: stopped by a signal, a zombie, dead."""

PF_EXITING = 0x4


def await_end(pidfd: int, deadline_s: float) -> bool:
    """Block until the process of `pidfd` has ended, or until the deadline; whether it has.

    By ``poll``, as ``select`` takes no descriptor above 1,023, and a trainer may well have more.
    """
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, deadline_s) * 1000))


def is_running(pid: int, pidfd: int) -> bool:
    """Whether a process goes on with its work: it is not stopped, has not ended, and is not ending.

    One that has been killed may take seconds to give its memory back.
    """
    try:
        signal.pidfd_send_signal(pidfd, 0)
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        pending = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line[3:6] == "Pnd"]
    except OSError:
        return False
    killed = any(int(line.split()[1], 16) >> (signal.SIGKILL - 1) & 1 for line in pending)
    return not (after_name[0] in OVER or int(after_name[6]) & PF_EXITING or killed)
