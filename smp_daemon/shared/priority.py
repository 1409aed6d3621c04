"""The scheduling priority of holdfast's threads, relative to the training on the same node."""

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


def let_waker_go_on() -> None:
    """Let the thread that wakes the calling thread keep its core, if no other core is idle, until its time slice ends.

    By default the kernel lets a thread that has slept take the core of the one that wakes it, at once and for
    milliseconds: each copy would then begin by stopping the training thread that has just handed it over. A thread
    under ``SCHED_BATCH`` gets the same share of the cores, and waits its turn. A thread that somebody gave another
    policy than the default keeps that.
    """
    try:
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError as error:
        log.debug("threads that copy take the core of the thread that wakes them: %s", error)


def take_normal_turns() -> None:
    """Undo `let_waker_go_on` in the calling thread, and in threads that it starts from now on. An SMP inherits the
    policy of the trainer's thread that has started it, which may be one that copies."""
    if os.sched_getscheduler(0) == os.SCHED_BATCH:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
