"""Crash loops: whether a job that is started again and again makes progress, judged from the SMPs' records. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.starts import KILLED, WELL, CrashLoop, Start, TrainerEnd

SLACK_STEPS = 1
"""How far apart ranks that fail in the same step may end: each counts only the steps it has finished itself."""

_CHANGING = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)


def newest_start(inventories: Collection[Inventory]) -> Start | None:
    """The newest start that any SMP was told of."""
    starts = [inventory.record.start for inventory in inventories if inventory.record.start is not None]
    return max(starts, key=lambda start: start.epoch, default=None)


def crash_loop_of(inventories: Collection[Inventory]) -> CrashLoop | None:
    """How the newest start ended, and how often the same happened before it; None if it ended well, or there was none.

    A trainer that raised an exception says more about the cause than one that was killed, and that one says more than
    trainers that only noticed the loss of another. If no end was recorded, all trainers are taken for killed.
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
    """The crash loop to show to operators. It includes the newest start if that has ended. Otherwise it is the loop
    before it, or None if the newest start went back to a later step."""
    start = newest_start(inventories)
    if start is None:
        return None
    if _ends(inventories, start):
        return crash_loop_of(inventories)
    return start.before if start.before is not None and start.base <= start.before.base else None


def steps_finished(inventories: Collection[Inventory]) -> int | None:
    """How many steps the newest start had finished, as far as the SMPs know; None if none of them does."""
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
    """The failure without the parts that differ between processes: addresses, ports, values."""
    return _CHANGING.sub("#", failure)
