"""Is it alive? What is judged from a trainer's heartbeats and a peer's lease, and by when. Pure.

A trainer's heartbeat is a word of the board that changes (`shared.board`); `watchdog.watchdog` notices when.
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
"""What has taken more than this fraction of its deadline is late."""


class Health(StrEnum):
    """Of a trainer or a peer, the best first."""

    ALIVE = "alive"
    LATE = "late"
    HUNG = "hung"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long a trainer may be quiet in each phase, in seconds; 0: for ever.

    Attributes:
        start: from connecting to the end of the first step: building, compiling.
        restore: from the call until the state is back.
        step: between two forwards or optimizer steps; or `factor` times the median step, if that is longer.
        copy: from the end of a step until its snapshot is sealed.
    """

    start: float = 900.0
    restore: float = 900.0
    step: float = 60.0
    copy: float = 120.0
    factor: float = 10.0

    def of(self, phase: str, step_s: float | None) -> float:
        """Of one phase, where the median step takes `step_s`, if that is known. Who says goodbye may take its time."""
        if phase == "gone":
            return 0.0
        if phase == "step" and self.step and step_s is not None:
            return max(self.step, self.factor * step_s)
        return float(getattr(self, phase))

    @property
    def shortest(self) -> float:
        """Of all that there are; 0: there is none."""
        return min((s for s in (self.start, self.restore, self.step, self.copy) if s), default=0.0)


def parse_deadlines(text: str) -> Deadlines:
    """From ``"step=2min,copy=5min"``; what is not named is as it is by default. Raises `ConfigError`."""
    known = {field.name for field in fields(Deadlines)}
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.strip().partition("=")
        if name not in known:
            raise ConfigError(f"{DEADLINES}: {part!r}: say NAME=TIME, with the names {', '.join(sorted(known))}")
        found[name] = _factor(value) if name == "factor" else parse_time(value, f"{DEADLINES}: {name}")
    return Deadlines(**found)


def _factor(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = -1.0
    if not 0 <= factor <= 1e9:
        raise ConfigError(f"{DEADLINES}: factor: {text!r} is no factor: say by how much of a step, such as 10")
    return factor


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What is seen of a trainer.

    Attributes:
        phase: where its training thread is.
        quiet_s: since that thread was last heard of.
        copying_s: how long a snapshot has been copied and sealed; None: none is.
        ended: its process is gone.
    """

    phase: TrainerPhase
    quiet_s: float
    copying_s: float | None = None
    ended: bool = False


@dataclass(frozen=True, slots=True)
class HealthVerdict:
    """How a trainer is: in which phase it has been quiet for how long, and how long it may be; 0: for ever."""

    health: Health
    phase: str
    quiet_s: float
    deadline_s: float


def judge(heartbeat: Heartbeat, deadlines: Deadlines, step_s: float | None) -> HealthVerdict:
    """How a trainer is whose median step takes `step_s`, if that is known. The worst of its threads counts."""
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
    """How a peer is that was last heard of `age_s` ago and is given up after `lease_s`; 0: it never is."""
    if not lease_s or age_s <= LATE_AT * lease_s:
        return Health.ALIVE
    return Health.LATE if age_s <= lease_s else Health.DEAD


def median_step(durations_s: Sequence[float]) -> float | None:
    """Of the steps that were seen; None until there are some."""
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
"""What a trainer in each phase was about, in words."""


@dataclass(frozen=True, slots=True)
class WatchedTrainer:
    """One trainer, as its node's SMP sees it.

    Attributes:
        step: the last that it has finished.
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
