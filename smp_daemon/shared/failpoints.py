"""Named points in the code at which a test can stop or kill exactly this process.

`failpoint` does nothing unless the environment variable `HOLDFAST_POINTS` holds rules, a JSON object
``{"socket": PATH, "who": NAME, "rules": [[point, step], ...]}``; a step of null means any. At a point that a rule
names, the process reports it on the unix socket and waits until it is released, or killed.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from typing import Any

from holdfast.smp_daemon.shared.settings import POINTS

ENV = POINTS.variable
HOLD_DEADLINE_S = 120.0
"""How long a process is held at a point by a test that never lets it go on, in seconds."""

_rules: dict[str, Any] | None = None
_observer: Callable[[str, int], None] | None = None


def arm() -> None:
    """Read the rules from the environment. Runs when this module is imported; a forked process must call it again."""
    global _rules
    text = POINTS.text()
    _rules = json.loads(text) if text else None


def observe(observer: Callable[[str, int], None] | None) -> None:
    """Call ``observer(point, step)`` at every point of this process, and ignore the rules; None: stop that.

    Not thread-safe: only for the simulation, which runs a whole job in one thread.
    """
    global _observer
    _observer = observer


def failpoint(point: str, step: int = -1) -> None:
    """Mark that `point` is reached, for snapshot or training step `step`. Blocks only if a rule names it."""
    if _observer is not None:
        _observer(point, step)
        return
    rules = _rules
    if rules is None or not ([point, step] in rules["rules"] or [point, None] in rules["rules"]):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(HOLD_DEADLINE_S)
        sock.connect(rules["socket"])
        said = {"kind": "reached", "who": rules["who"], "point": point, "step": step, "pid": os.getpid()}
        sock.sendall(json.dumps(said).encode() + b"\n")
        sock.recv(1)


arm()
