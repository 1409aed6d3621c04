"""Waiting for the end of a process that may not be a child."""

from __future__ import annotations

import select


def await_end(pidfd: int, deadline_s: float) -> bool:
    """Block until the process of `pidfd` has ended, or until the deadline; whether it has.

    By ``poll``, as ``select`` takes no descriptor above 1,023, and a trainer may well have more.
    """
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, deadline_s) * 1000))
