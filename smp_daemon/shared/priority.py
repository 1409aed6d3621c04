"""How much an SMP's work may press on the training beside it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

PRIORITIES = ("auto", "normal", "idle")
"""auto: what nobody waits for (encoding, accumulating, the scrub) gives way to others. normal: all as usual. idle:
everything runs only on cores that nobody else wants."""

SESSION_NICE = 19


def make_idle() -> None:
    """From now on the calling thread, and those that it starts, run only when nobody else wants the core.

    Where a process may not choose ``SCHED_IDLE``, the lowest nice value comes closest.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:
        os.nice(19)


def make_session_nice() -> None:
    """Have this process's session take no more of a busy processor than about 3 %.

    Where the kernel groups tasks by session (``sched_autogroup_enabled``, as on most distributions), a policy or a nice
    value orders the threads *within* a session only: an idle SMP would take a full share from the trainers' session.
    """
    try:
        Path("/proc/self/autogroup").write_text(str(SESSION_NICE))
    except OSError as error:
        log.debug("sessions are not scheduled as groups here: %s", error)


def make_background(priority: str) -> None:
    """The calling thread does what nobody waits for: it is made idle if `priority` says so."""
    if priority == "auto":
        make_idle()
