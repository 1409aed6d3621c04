"""Judges whether a trainer is alive by its heartbeats, and a peer by its lease, and sets the deadlines. Pure.

A trainer's heartbeat is a change of a word of the board (`shared.board`); `watchdog.watchdog` watches for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from holdfast.smp_daemon.shared.board import TrainerPhase
from holdfast.smp_daemon.shared.deadlines import Deadlines
from holdfast.smp_daemon.shared.stragglers import UNKNOWN, Own

LATE_AT = 0.5
"""Fraction of a deadline after which a trainer or a peer is late."""


class Health(StrEnum):
    """The health of a trainer or a peer, from best to worst."""

    ALIVE = "alive"
    LATE = "late"
    HUNG = "hung"
    DEAD = "dead"


class HealthVerdict(NamedTuple):
    """The health of a trainer, its phase, how long it has been quiet, and how long it may be (0: for ever)."""

    health: Health
    phase: str
    quiet_s: float
    deadline_s: float


def judge(
    phase: TrainerPhase,
    quiet_s: float,
    deadlines: Deadlines,
    step_s: float | None,
    *,
    copying_s: float | None = None,
    copy_bytes: int = 0,
    ended: bool = False,
) -> HealthVerdict:
    """Judge a trainer by the worse of its threads.

    Args:
        phase: what its training thread is doing.
        quiet_s: time since that thread's last heartbeat; in a restore, since it or its SMP last moved anything.
        step_s: duration of its median step, if known.
        copying_s: how long the current snapshot has been copied and sealed so far; None: there is none.
        copy_bytes: the bytes of that snapshot, as far as they are known.
        ended: whether its process has ended.
    """
    main = phase.name.lower()
    verdict = _verdict(main, quiet_s, deadlines.of(main, step_s))
    if ended:
        return verdict._replace(health=Health.DEAD)
    if copying_s is not None:
        copying = _verdict("copy", copying_s, deadlines.of("copy", step_s, copy_bytes))
        order = list(Health)
        if order.index(copying.health) > order.index(verdict.health):
            return copying
    return verdict


def judge_lease(age_s: float, lease_s: float) -> Health:
    """Judge a peer that was last heard from `age_s` ago and is given up after `lease_s`; 0: it never is."""
    if not lease_s or age_s <= LATE_AT * lease_s:
        return Health.ALIVE
    return Health.LATE if age_s <= lease_s else Health.DEAD


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
        own: what of a step it does by itself.
    """

    coord: str
    pid: int
    step: int
    health: Health
    phase: str
    quiet_s: float
    deadline_s: float
    own: Own = UNKNOWN

    def __str__(self) -> str:
        trainer = f"trainer {self.coord} (pid {self.pid})"
        doing = _DOING.get(self.phase, f"in phase {self.phase!r}").format(step=self.step)
        if self.health == Health.DEAD:
            return f"{trainer} died {doing}"
        return f"{trainer} is {self.health} {doing}: quiet for {self.quiet_s:,.1f} s ({self.deadline_s:,g} allowed)"
