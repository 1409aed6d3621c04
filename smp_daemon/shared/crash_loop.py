"""Whether a job that is started again and again comes any further: crash loops, from what the SMPs were told. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.starts import KILLED, WELL, CrashLoop, Start, TrainerEnd

SLACK_STEPS = 1
"""Ranks of one step end up to so many steps apart, as each counts only what it has finished itself."""

_CHANGING = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)


def newest_start(inventories: Collection[Inventory]) -> Start | None:
    """The newest start that any SMP was told of."""
    starts = [inventory.record.start for inventory in inventories if inventory.record.start is not None]
    return max(starts, key=lambda start: start.epoch, default=None)


def crash_loop_of(inventories: Collection[Inventory]) -> CrashLoop | None:
    """How the newest start ended, and how often the same happened before it; None if it ended well, or there was none.

    A trainer that raised tells more than one that was killed, and that more than those who only noticed. If nobody
    is left who knows, all of it was killed.
    """
    start = newest_start(inventories)
    if start is None:
        return None
    end = _cause(_ends(inventories, start), start.base)
    if end.failure == WELL:
        return None
    before = start.before
    if before is None or start.base > before.base or not _same(end, before):
        return CrashLoop(1, start.base, end.step, end.failure)
    return CrashLoop(before.times + 1, before.base, end.step, end.failure)


def current_crash_loop(inventories: Collection[Inventory]) -> CrashLoop | None:
    """What operators should know: how the last start ended if it is over, else what it is up against."""
    start = newest_start(inventories)
    if start is None:
        return None
    if _ends(inventories, start):
        return crash_loop_of(inventories)
    return start.before if start.before is not None and start.base <= start.before.base else None


def steps_finished(inventories: Collection[Inventory]) -> int | None:
    """How many steps the newest start had finished, as far as the nodes of its trainers can tell; None: none can."""
    start = newest_start(inventories)
    ends = _ends(inventories, start) if start is not None else {}
    return max((end.step for end in ends.values()), default=None)


def _ends(inventories: Collection[Inventory], start: Start) -> dict[str, TrainerEnd]:
    ends: dict[str, TrainerEnd] = {}
    for inventory in inventories:
        if inventory.record.start is not None and inventory.record.start.epoch == start.epoch:
            ends.update(inventory.record.ends)
    return ends


def _cause(ends: Mapping[str, TrainerEnd], base: int) -> TrainerEnd:
    if not ends:
        return TrainerEnd(base, KILLED)

    def weight(end: TrainerEnd) -> tuple[bool, bool, bool, str, int]:
        return end.failure == WELL, end.is_echo, end.failure == KILLED, end.failure, -end.step

    return min(ends.values(), key=weight)


def _same(end: TrainerEnd, before: CrashLoop) -> bool:
    return abs(end.step - before.step) <= SLACK_STEPS and _gist(end.failure) == _gist(before.failure)


def _gist(failure: str) -> str:
    """Without what differs from process to process: addresses, ports, values."""
    return _CHANGING.sub("#", failure)
