"""How far a rank is, and what was counted on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from holdfast.smp_daemon.shared.board import TrainerPhase
from holdfast.smp_daemon.shared.goodput import Spent
from holdfast.smp_daemon.shared.stragglers import UNKNOWN, Own

if TYPE_CHECKING:
    from holdfast.snapshot.interval.rule import IntervalRule


@dataclass(slots=True)
class Statistics:
    """Counters since the hook was entered.

    Attributes:
        taken, protected: snapshots begun, and protected on every node.
        failed: snapshots that failed, or were not protected although they were to be.
        skipped: snapshots that were due and not taken, as no slot was free or no memory was reserved for one.
        stall_s: seconds that the training thread spent in the hook.
        interval: steps from one snapshot to the next, as the ranks agreed.
        overhead: fraction of training time lost to snapshots at that interval; None while it is unknown.
        why: the reason for the interval, in words; empty before entering.
        rule: what chose the interval; None before entering.
        spent: where the time of the run went, earlier starts included: ``spent.scalars()`` are numbers to log.
    """

    taken: int = 0
    protected: int = 0
    failed: int = 0
    skipped: int = 0
    stall_s: float = 0.0
    interval: int = 1
    rule: IntervalRule | None = field(default=None, repr=False)
    _before: Spent = field(default_factory=Spent, repr=False)  # until the hook was entered
    _own: Callable[[], Own] = field(default=lambda: UNKNOWN, repr=False)
    _steps: int = field(default=0, repr=False)
    _ended_s: float = field(default=0.0, repr=False)  # when the last step ended
    _stalled_s: float = field(default=0.0, repr=False)  # `stall_s` when the hook was entered, maybe once more
    _stalled_until_s: float = field(default=0.0, repr=False)  # `stall_s` when the last step ended

    @property
    def overhead(self) -> float | None:
        """See the class."""
        return None if self.rule is None else self.rule.overhead

    @property
    def why(self) -> str:
        """See the class."""
        return "" if self.rule is None else self.rule.why()

    @property
    def spent(self) -> Spent:
        """See the class. Computed when it is asked for, so that no step waits for it."""
        stall_s = self._stalled_until_s - self._stalled_s
        spent = self._before.stepped(self._ended_s, stall_s, self._steps) if self._steps else self._before
        return replace(spent, own=self._own())

    def begin(self, before: Spent, own: Callable[[], Own]) -> None:
        """Training begins.

        Args:
            before: where the time of the run went until now.
            own: returns what of a step this rank does by itself.
        """
        self._before, self._own, self._steps, self._stalled_s = before, own, 0, self.stall_s

    def step_ended(self, now: float) -> None:
        """A step has ended at the time `now`, in seconds since 1970."""
        self._steps, self._ended_s, self._stalled_until_s = self._steps + 1, now, self.stall_s


@dataclass(slots=True)
class RankProgress:
    """How far this rank is. Written by the training thread only; log lines of every thread read it.

    Attributes:
        epoch: epoch of the job's layout. step: how many steps are finished. phase: where the training thread is.
    """

    epoch: int = 0
    step: int = 0
    phase: TrainerPhase = TrainerPhase.RESTORE

    def begin(self, epoch: int, step: int) -> None:
        """The state is restored, or new: training goes on in this epoch, after this step."""
        self.epoch, self.step, self.phase = epoch, step, TrainerPhase.START

    def step_ended(self) -> None:
        """One more step is finished."""
        self.step += 1
        self.phase = TrainerPhase.STEP

    def enter(self, epoch: int) -> None:
        """The job's layout is of this epoch from now on."""
        self.epoch = epoch
