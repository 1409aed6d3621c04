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

RECORDS = ("node", "layout", "shard", "parity", "smp")
"""Kinds of JSON files in an arena."""

TRAINER_FAILPOINTS = ("copy.before", "copy.middle", "copy.done", "restore.before", "restore.middle")
"""Points that trainers reach."""

PERSIST_FAILPOINTS = ("persist.middle", "persist.written", "persist.done")

SMP_FAILPOINTS = (
    # an SMP starts, and takes over what a predecessor left
    *("arena.made", "adopt.before", "adopt.board", "adopt.slot", "adopt.done"),
    *("start.adopted", "start.bound", "start.serving", "adopt.verify", "rejoin.before", "rejoin.done"),
    # a start of the job, or a change of its layout
    *(
        "fence.marked",
        "join.fenced",
        "join.noted",
        "join.done",
        "configure.reserved",
        "configure.done",
        "slot.opened",
        "slot.made",
    ),
    "reserve.slice",
    # a snapshot
    *("seal.released", "seal.before", "seal.digested", "seal.committed", "seal.done"),
    *("encode.before", "encode.middle", "encode.done", "parity.taken", "parity.accumulated", "parity.complete"),
    *("parity.committed", "parity.announced", "parity.told", "outcome.protected", "outcome.failed"),
    *("slot.freed", "slot.removed", "layout.removed"),
    # bytes are recovered and repaired
    *("receive.taken", "receive.checked", "receive.done", "rebuild.middle", "drop.done"),
    *("repair.before", "repair.done", "repair_parity.taken", "repair_parity.accumulated", "repair_parity.done"),
    *("regroup.declined", "regroup.planned", "regroup.adopt", "regroup.encode", "regroup.release", "regroup.done"),
    # a snapshot is written to storage
    *PERSIST_FAILPOINTS,
    # the end
    *("finish.told", "finish.closing", "arena.emptied", "arena.removed"),
    # JSON records: before the write, once written beside the old file, and once renamed over it
    *(f"record.{kind}.{when}" for kind in RECORDS for when in ("before", "part", "done")),
)
"""Points that SMPs reach: before and after every change to files that outlive the process."""

FAILPOINTS = (*TRAINER_FAILPOINTS, *SMP_FAILPOINTS)
"""Every point inside holdfast. Jobs may add their own, such as ``train.step``."""


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
