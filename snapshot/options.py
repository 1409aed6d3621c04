"""The options of a job's snapshots, complete and checked before anything is done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypedDict, get_args, get_type_hints

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.limits import MAX_SLOTS, MIN_SLOTS, SLOTS_RULE
from holdfast.smp_daemon.shared.paths import arena_path
from holdfast.smp_daemon.shared.settings import (
    AUDIT,
    DOMAINS,
    DRIFT,
    ELASTIC,
    EVERY,
    GENERATIONS,
    GIVE_UP,
    LEAVE_ON,
    MAX_REPEATS,
    MTBF,
    OVERHEAD_BUDGET,
    PROFILE,
    REQUIRE,
    RESTORE_STEP,
    RUN,
)
from holdfast.snapshot.connect import job_from_environment
from holdfast.snapshot.interval.control import Every
from holdfast.snapshot.resume.arrange import Protection, parse_protect
from holdfast.snapshot.resume.choice import StartOptions
from holdfast.snapshot.step.ledger import ProtectEvery, parity_slots

KINDS: Mapping[type, tuple[type, str]] = {
    Path: (Path, "a path"),
    str: (str, "a string"),
    bool: (bool, "True or False"),
    int: (int, "a whole number"),
    float: (Real, "a number"),
}
"""What is taken for a value of a type, and what to call it; a text is taken for a path, too."""

TRIED = ("arena", "every", "restore_step", "require")
"""What a command that only tries a job says itself, in the environment, whatever the script says."""

MAX_DEADLINE_S = 1e9
"""Threads cannot be told to wait for ten times as long."""


class OptionsGiven(TypedDict, total=False):
    """`Options` as a caller of `holdfast.InMemorySnapshot` may give them; None is the same as left out."""

    job: str | None
    every: int | Literal["auto"] | None
    protect_every: ProtectEvery
    protect: str
    domains: str | None
    slots: int
    start: bool
    keep: bool
    strict: bool
    arena: str | Path | None
    deadline_s: float
    overhead_budget: float | None
    max_repeats: int | None
    generations: int | None
    restore_step: int | None
    require: int | Literal["snapshot"] | None
    elastic: bool | None
    block: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`holdfast.InMemorySnapshot` explains each. Options that are left out come from the environment, where it sets
    them.

    Raises:
        ConfigError: an option, or a variable of the environment, is invalid; the message names it.
    """

    job: str = field(default_factory=job_from_environment)
    every: Every = field(default_factory=EVERY.value)
    protect_every: ProtectEvery = 1
    protect: str = "auto"
    domains: str = field(default_factory=DOMAINS.value)
    slots: int = 3
    start: bool = True
    keep: bool = False
    strict: bool = False
    arena: str | Path | None = None
    deadline_s: float = 60.0
    overhead_budget: float = field(default_factory=OVERHEAD_BUDGET.value)
    max_repeats: int = field(default_factory=MAX_REPEATS.value)
    generations: int = field(default_factory=GENERATIONS.value)
    restore_step: int | None = field(default_factory=RESTORE_STEP.value)
    require: int | Literal["snapshot"] = field(default_factory=REQUIRE.value)
    run: str = field(default_factory=RUN.value)
    give_up: tuple[str, ...] = field(default_factory=GIVE_UP.value)
    elastic: bool = field(default_factory=ELASTIC.value)
    block: int | None = None

    @classmethod
    def given(cls, **values: Any) -> Options:
        """Options from values by name; None is the same as left out."""
        kept = {name: _plain(value) for name, value in values.items() if value is not None}
        for name, kind in get_type_hints(OptionsGiven).items():
            taken = [KINDS.get(each) for each in get_args(kind) or (kind,) if each is not NoneType]
            known = [each for each in taken if each is not None]
            if (value := kept.get(name)) is None or len(known) < len(taken):
                continue  # it was left out, or is one of several literals: that is checked with the values
            kinds = tuple(each for each, _ in known)
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                raise ConfigError(f"{name}={value!r}: give {known[-1][1]}")
        tried = AUDIT.text() or PROFILE.text()
        return cls(**{name: value for name, value in kept.items() if not tried or name not in TRIED})

    def __post_init__(self) -> None:
        if not MIN_SLOTS <= self.slots <= MAX_SLOTS:
            raise ConfigError(f"slots={self.slots}: {SLOTS_RULE}")
        if self.every == "auto":
            MTBF.value()
        elif not _is_count(self.every):
            raise ConfigError(f"every={self.every!r}: a snapshot is taken every 1 or more steps, or 'auto'")
        if self.protect_every != "auto" and not _is_count(self.protect_every):
            raise ConfigError(
                f"protect_every={self.protect_every!r}: of every 1 or more snapshots one is protected, or 'auto'"
            )
        if self.block is not None and not _is_count(self.block):
            raise ConfigError(f"block={self.block!r}: the trainings of a script are numbered from 1")
        if not 0 < self.deadline_s <= MAX_DEADLINE_S:
            raise ConfigError(
                f"deadline_s={self.deadline_s}: give the seconds that a copy may take, more than 0, and at most "
                f"{MAX_DEADLINE_S:g}"
            )
        if self.budget is not None and not 0 < self.budget < 1:
            raise ConfigError(f"overhead budget {self.budget}: give a fraction between 0 and 1, such as 0.01, or None")
        if self.for_start.generations + self.slots - 1 > MAX_SLOTS:
            raise ConfigError(
                f"slots={self.slots} and {self.generations} generations: together at most {MAX_SLOTS + 1}"
            )
        if self.elastic and self.slots == MIN_SLOTS:
            raise ConfigError(
                f"slots={self.slots} and elastic: when the number of ranks has changed, two older snapshots may have "
                "to be held while a new one is written: give 3 slots or more"
            )
        parse_protect(self.protect)
        # What is relative is so to the directory of now: a script may change it.
        object.__setattr__(self, "arena", arena_path(self.job, self.arena).parent)
        DRIFT.value()
        LEAVE_ON.value()

    @property
    def budget(self) -> float | None:
        """Largest fraction of training time that snapshots may take; None: no limit."""
        return self.overhead_budget or None

    @property
    def for_start(self) -> StartOptions:
        """How to treat what earlier starts left behind."""
        given = {each.name: getattr(self, each.name) for each in fields(StartOptions)}
        require = 1 if self.require == "snapshot" else self.require
        return StartOptions(**given | {"require": require, "block": self.block or 1})

    @property
    def slots_with_generations(self) -> int:
        """Slots per shard: one more for each generation beyond the first."""
        return self.slots + self.generations - 1

    @property
    def parity_slots(self) -> int | None:
        """See `Layout`. None if every snapshot is protected: then there are as many as slots."""
        if self.protect_every == 1:
            return None
        return parity_slots(self.slots_with_generations, self.protect_every, self.generations)

    @property
    def protection(self) -> Protection:
        """The option `protect`, parsed."""
        return parse_protect(self.protect)

    @property
    def job_arena(self) -> Path:
        """The arena of this job on this node."""
        return arena_path(self.job, self.arena)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _plain(value: Any) -> Any:
    """A number of NumPy's as one of Python's: neither JSON nor a wait for a lock takes it."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)
