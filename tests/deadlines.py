"""How long tests wait, and how they wait for what nobody signals."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

DEADLINE_S = 120.0
"""Timeout for any event that a test waits for, long enough for a busy machine. Passing tests never wait this long."""


def await_that(happened: Callable[[], Any]) -> Any:
    """Ask again until it has happened; return the answer."""
    limit = time.monotonic() + DEADLINE_S
    while not (found := happened()):
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.001)
    return found
