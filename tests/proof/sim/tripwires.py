"""Catches code that uses what a seed does not determine while it runs: the machine's clock, entropy or threads.

No call reveals the use of hash order: `tests.proof.sim.campaign.again` runs seeds once more with another hash order.
"""

from __future__ import annotations

import os
import random
import secrets
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

WIRED: tuple[tuple[Any, str], ...] = (
    (time, "time"),
    (time, "monotonic"),
    (time, "perf_counter"),
    (time, "sleep"),
    (os, "urandom"),
    (random, "random"),
    (random, "randrange"),
    (random, "choice"),
    (secrets, "token_bytes"),
    (secrets, "token_hex"),
    (uuid, "uuid4"),
    (threading.Thread, "start"),
)
"""The calls that are wired: each by its owner, and the name of the attribute."""


@contextmanager
def wired() -> Iterator[None]:
    """Within the block, the calls in `WIRED` raise `AssertionError` if holdfast's code makes them in this thread."""
    here = threading.get_ident()
    before = [(owner, name, vars(owner)[name]) for owner, name in WIRED]
    try:
        for owner, name, call in before:
            setattr(owner, name, _tripwire(f"{owner.__name__}.{name}", call, here))
        yield
    finally:
        for owner, name, call in before:
            setattr(owner, name, call)


def _tripwire(name: str, call: Callable[..., Any], thread: int) -> Callable[..., Any]:
    def tripwire(*arguments: Any, **options: Any) -> Any:
        if threading.get_ident() == thread:
            caller = str(sys._getframe(1).f_globals.get("__name__", ""))
            if caller.startswith("holdfast."):
                raise AssertionError(f"{caller} calls {name}, which no seed determines")
        return call(*arguments, **options)

    return tripwire
