"""The scheduling priority of an SMP's threads, relative to the training on the same node."""

from __future__ import annotations

import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

SESSION_NICE = 19


def make_idle() -> None:
    """Let the calling thread, and threads that it starts from now on, run only when no other thread wants the core.

    Where the process may not use ``SCHED_IDLE``, the highest nice value comes closest.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:
        os.nice(19)


def make_session_nice() -> None:
    """Limit this process's session to about 3 % of a busy processor.

    Where the kernel groups tasks by session (``sched_autogroup_enabled``, as on most distributions), a policy or a nice
    value orders only the threads *within* a session: an idle SMP would take as large a share as the trainers' session.
    """
    try:
        Path("/proc/self/autogroup").write_text(str(SESSION_NICE))
    except OSError as error:
        log.debug("sessions are not scheduled as groups here: %s", error)


def make_background(priority: str) -> None:
    """For a thread whose work no trainer waits for: make the calling thread idle if `priority` is ``auto``."""
    if priority == "auto":
        make_idle()
