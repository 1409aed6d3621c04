"""Judges whether a trainer is alive by its heartbeats, and a peer by its lease, and sets the deadlines. Pure.

A trainer's heartbeat is a change of a word of the board (`shared.board`); `watchdog.watchdog` watches for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from statistics import median

from holdfast.smp_daemon.shared.board import TrainerPhase
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.quantities import parse_time

DEADLINES = "--deadlines (HOLDFAST_DEADLINES)"

LATE_AT = 0.5
"""Fraction of a deadline after which a trainer or a peer is late."""


class Health(StrEnum):
    """The health of a trainer or a peer, from best to worst."""

    ALIVE = "alive"
    LATE = "late"
    HUNG = "hung"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long a trainer may be quiet in each phase, in seconds; 0: for ever.

    Attributes:
        start: from connecting to the end of the first step, which includes building and compiling the model.
        restore: from the call to restore until the state is loaded.
        step: between two forwards or optimizer steps.
        copy: from the start of a snapshot's copy until the snapshot is sealed.
        factor: a step may also take `factor` times the median step, if that is longer than `step`.
    """

    start: float = 900.0
    restore: float = 900.0
    step: float = 60.0
    copy: float = 120.0
    factor: float = 10.0

    def of(self, phase: str, step_s: float | None) -> float:
        """The deadline of a phase. `step_s`: duration of the median step, if known. A trainer that has said goodbye has
        no deadline."""
        if phase == "gone":
            return 0.0
        if phase == "step" and self.step and step_s is not None:
            return max(self.step, self.factor * step_s)
        return float(getattr(self, phase))

    @property
    def shortest(self) -> float:
        """The shortest deadline; 0 if there is none."""
        return min((s for s in (self.start, self.restore, self.step, self.copy) if s), default=0.0)


def parse_deadlines(text: str) -> Deadlines:
    """Parse deadlines such as ``"step=2min,copy=5min"``; the others keep their defaults. Raises `ConfigError`."""
    known = {field.name for field in fields(Deadlines)}
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.strip().partition("=")
        if name not in known:
            raise ConfigError(f"{DEADLINES}: {part!r}: use NAME=TIME, where NAME is one of {', '.join(sorted(known))}")
        found[name] = _factor(value) if name == "factor" else parse_time(value, f"{DEADLINES}: {name}")
    return Deadlines(**found)


def _factor(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = -1.0
    if not 0 <= factor <= 1e9:
        raise ConfigError(f"{DEADLINES}: factor: {text!r} is not a factor: use a number of median steps, such as 10")
    return factor


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Observations of a trainer.

    Attributes:
        phase: what its training thread is doing.
        quiet_s: time since that thread's last heartbeat.
        copying_s: how long the current snapshot has been copied and sealed so far; None: there is none.
        ended: whether its process has ended.
    """

    phase: TrainerPhase
    quiet_s: float
    copying_s: float | None = None
    ended: bool = False


@dataclass(frozen=True, slots=True)
class HealthVerdict:
    """The health of a trainer, its phase, how long it has been quiet, and how long it may be (0: for ever)."""

    health: Health
    phase: str
    quiet_s: float
    deadline_s: float


def judge(heartbeat: Heartbeat, deadlines: Deadlines, step_s: float | None) -> HealthVerdict:
    """Judge a trainer by the worse of its threads. `step_s`: duration of its median step, if known."""
    main = heartbeat.phase.name.lower()
    verdict = _verdict(main, heartbeat.quiet_s, deadlines.of(main, step_s))
    if heartbeat.ended:
        return HealthVerdict(Health.DEAD, verdict.phase, verdict.quiet_s, verdict.deadline_s)
    if heartbeat.copying_s is not None:
        copying = _verdict("copy", heartbeat.copying_s, deadlines.of("copy", step_s))
        order = list(Health)
        if order.index(copying.health) > order.index(verdict.health):
            return copying
    return verdict


def judge_lease(age_s: float, lease_s: float) -> Health:
    """Judge a peer that was last heard from `age_s` ago and is given up after `lease_s`; 0: it never is."""
    if not lease_s or age_s <= LATE_AT * lease_s:
        return Health.ALIVE
    return Health.LATE if age_s <= lease_s else Health.DEAD


def median_step(durations_s: Sequence[float]) -> float | None:
    """The median duration of the steps seen so far; None if there are none."""
    return median(durations_s) if durations_s else None


def _verdict(phase: str, quiet_s: float, deadline_s: float) -> HealthVerdict:
    health = Health.ALIVE
    if deadline_s and quiet_s > LATE_AT * deadline_s:
        health = Health.LATE if quiet_s <= deadline_s else Health.HUNG
    return HealthVerdict(health, phase, quiet_s, deadline_s)


_DOING = {
    "start": "while it started",
    "restore": "while its state was restored",
    "step": "in the step after {step:,}",
    "copy": "while step {step:,} was copied",
    "gone": "after it had said goodbye",
}
"""What a trainer was doing in each phase, for messages."""


@dataclass(frozen=True, slots=True)
class WatchedTrainer:
    """One trainer, as its node's SMP sees it.

    Attributes:
        step: the last step that it has finished.
        health, phase, quiet_s, deadline_s: see `HealthVerdict`.
    """

    coord: str
    pid: int
    step: int
    health: Health
    phase: str
    quiet_s: float
    deadline_s: float

    def __str__(self) -> str:
        trainer = f"trainer {self.coord} (pid {self.pid})"
        doing = _DOING.get(self.phase, f"in phase {self.phase!r}").format(step=self.step)
        if self.health == Health.DEAD:
            return f"{trainer} died {doing}"
        return f"{trainer} is {self.health} {doing}: quiet for {self.quiet_s:,.1f} s ({self.deadline_s:,g} allowed)"
