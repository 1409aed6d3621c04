"""What whoever starts the job wants done with what earlier starts left; the same on every rank. Pure, but for the
environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from holdfast.smp_daemon.shared.crash_loop import newest_start, streak_of
from holdfast.smp_daemon.shared.errors import ConfigError, ProtocolError, Repeated
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.plan import whole_snapshots
from holdfast.smp_daemon.shared.starts import Choice, Streak

MAX_REPEATS_ENV = "HOLDFAST_MAX_REPEATS"
MAX_REPEATS = 5
RESTORE_STEP_ENV = "HOLDFAST_RESTORE_STEP"
GENERATIONS_ENV = "HOLDFAST_GENERATIONS"
MAX_GENERATIONS = 8


N = TypeVar("N", int, None)


@dataclass(frozen=True, slots=True)
class Wishes:
    """
    Attributes:
        max_repeats: so many starts in a row may end at the same step in the same way; the next is refused. 0: any.
        generations: how many protected snapshots are kept, beside those that are under way.
        restore_step: the step to go back to; None: the newest.
    """

    max_repeats: int = MAX_REPEATS
    generations: int = 1
    restore_step: int | None = None

    def __post_init__(self) -> None:
        if self.max_repeats < 0:
            raise ConfigError(f"{MAX_REPEATS_ENV}={self.max_repeats}: give a number of starts, or 0 for no limit")
        if not 1 <= self.generations <= MAX_GENERATIONS:
            raise ConfigError(f"{GENERATIONS_ENV}={self.generations}: keep 1 to {MAX_GENERATIONS} protected snapshots")
        if self.restore_step is not None and self.restore_step < 1:
            raise ConfigError(f"{RESTORE_STEP_ENV}={self.restore_step}: give the step of a snapshot, 1 or more")

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Wishes:
        """Raises `ProtocolError` if `data` is not what `to_json` makes."""
        try:
            return cls(**data)
        except (TypeError, ConfigError) as error:
            raise ProtocolError(f"not a rank's wishes: {error}") from error


def wishes_from_environment(
    *, max_repeats: int | None = None, generations: int | None = None, restore_step: int | None = None
) -> Wishes:
    """What is given, else what the environment says. Raises `ConfigError`."""
    return Wishes(
        whole_number(MAX_REPEATS_ENV, MAX_REPEATS) if max_repeats is None else max_repeats,
        whole_number(GENERATIONS_ENV, 1) if generations is None else generations,
        whole_number(RESTORE_STEP_ENV, None) if restore_step is None else restore_step,
    )


def whole_number(variable: str, default: N) -> int | N:
    """A variable of the environment. Raises `ConfigError` if it is no whole number from 0 on."""
    text = os.environ.get(variable, "").strip()
    if not text:
        return default
    if not text.isascii() or not text.isdecimal():
        raise ConfigError(f"{variable}={text!r}: give a whole number, 0 or more")
    return int(text)


def agree(wishes: Sequence[Wishes]) -> Wishes:
    """The wishes of all ranks. Raises `ConfigError`, on every rank, if they are not alike."""
    if len(set(wishes)) > 1:
        others = next(rank for rank, wish in enumerate(wishes) if wish != wishes[0])
        raise ConfigError(
            f"ranks were started with different {MAX_REPEATS_ENV}, {GENERATIONS_ENV} or {RESTORE_STEP_ENV} "
            f"(rank 0: {wishes[0]}; rank {others}: {wishes[others]}): set them alike on all"
        )
    return wishes[0]


def choose(inventories: Sequence[Inventory], wishes: Wishes) -> Choice | None:
    """What to go back to, if not to the newest. Once a start has made a choice, and the same is wished again, the job
    goes on from what was taken since: a launcher that starts it once more says the same.

    Raises:
        ConfigError: there is no whole snapshot of that step.
    """
    if wishes.restore_step is None:
        return None
    start = newest_start(inventories)
    if start is not None and start.choice is not None and start.choice.snapshot.step == wishes.restore_step:
        return start.choice
    held = whole_snapshots(inventories)
    for snapshot in held:
        if snapshot.step == wishes.restore_step:
            return Choice(snapshot, max(inventory.epoch for inventory in inventories) + 1)
    raise ConfigError(
        f"{RESTORE_STEP_ENV}={wishes.restore_step}: memory holds no whole snapshot of that step; it holds "
        f"{steps_in_words(held)}. Choose one of them, or start without it; {GENERATIONS_ENV} keeps more"
    )


def steps_in_words(snapshots: Sequence[SnapshotId]) -> str:
    """``steps 12, 10 and 8``, as they come."""
    steps = [str(step) for step in dict.fromkeys(snapshot.step for snapshot in snapshots)]
    if len(steps) < 2:
        return f"step {steps[0]}" if steps else "none"
    return f"steps {', '.join(steps[:-1])} and {steps[-1]}"


def check_repeats(inventories: Sequence[Inventory], wishes: Wishes) -> Streak | None:
    """How the starts before this one ended; None if there is nothing to tell, or if this one goes back to another step
    than they by choice.

    Raises:
        Repeated: too many of them, at the same step, in the same way.
    """
    streak, start = streak_of(inventories), newest_start(inventories)
    before = start.choice.snapshot.step if start is not None and start.choice is not None else None
    if wishes.restore_step is not None and wishes.restore_step != before:
        return None
    if streak is not None and 0 < wishes.max_repeats <= streak.times:
        raise Repeated(
            f"the job is not started again: {streak}. It would go back to where it was and end there once more. See "
            f"to what fails; then start once with {MAX_REPEATS_ENV}=0, or with a number above {streak.times}. "
            + _way_back(whole_snapshots(inventories))
        )
    return streak


def _way_back(held: Sequence[SnapshotId]) -> str:
    if len(held) < 2:
        return f"No older snapshot is held; {GENERATIONS_ENV}=2 would keep one from then on"
    return (
        f"Or go back further: {RESTORE_STEP_ENV}={held[1].step} takes the snapshot before the newest; held are "
        f"{steps_in_words(held)}"
    )
