"""What whoever starts the job wants done with what earlier starts left; the same on every rank. Pure, but for the
environment."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from smp_daemon.errors import ConfigError, ProtocolError, Repeated
from smp_daemon.inventory import Inventory
from smp_daemon.starts import Streak, streak_of

MAX_REPEATS_ENV = "HOLDFAST_MAX_REPEATS"
MAX_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Wishes:
    """
    Attributes:
        max_repeats: so many starts in a row may end at the same step in the same way; the next is refused. 0: any.
    """

    max_repeats: int = MAX_REPEATS

    def __post_init__(self) -> None:
        if self.max_repeats < 0:
            raise ConfigError(f"{MAX_REPEATS_ENV}={self.max_repeats}: give a number of starts, or 0 for no limit")

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


def wishes_from_environment(*, max_repeats: int | None = None) -> Wishes:
    """What is given, else what the environment says. Raises `ConfigError`."""
    repeats = whole_number(MAX_REPEATS_ENV, MAX_REPEATS) if max_repeats is None else max_repeats
    return Wishes(repeats)


def whole_number(variable: str, default: int) -> int:
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
        different = "; ".join(f"rank {rank}: {wish.max_repeats}" for rank, wish in enumerate(wishes[:8]))
        raise ConfigError(f"ranks were started with different {MAX_REPEATS_ENV} ({different}): set it alike on all")
    return wishes[0]


def check_repeats(inventories: Collection[Inventory], wishes: Wishes) -> Streak | None:
    """How the starts before this one ended; None if there is nothing to tell.

    Raises:
        Repeated: too many of them, at the same step, in the same way.
    """
    streak = streak_of(inventories)
    if streak is not None and 0 < wishes.max_repeats <= streak.times:
        raise Repeated(
            f"the job is not started again: {streak}. It would go back to where it was and end there once more. See "
            f"to what fails; then start once with {MAX_REPEATS_ENV}=0, or with a number above {streak.times}"
        )
    return streak
