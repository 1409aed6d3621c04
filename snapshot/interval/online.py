"""How often to take snapshots while a job runs: `choose_interval`, fed with the job's measurements. Pure: no clock.

It begins with a snapshot every few steps, so that steps with and without a snapshot can be compared. From then on it
plans anew whenever a snapshot is complete, from four quantities: the time of a baseline step, the cost of a snapshot,
the time until it is protected, and the job's failure rate. If one of them has changed, only its newest samples count.
If snapshots follow each other so closely that there is no baseline step, it asks for a longer interval for a while: a
*probe*. For baseline and overlapped steps see `snapshot.interval.overlap`.

Each rank has one `Online`. All ranks use the longest interval that any of them wants.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.quantities import duration
from holdfast.snapshot.interval.overlap import STALE_STEPS, OverlapLog, Overlapped, check_budget
from holdfast.snapshot.interval.periods import Interval, choose_interval
from holdfast.snapshot.interval.rates import FailureRate
from holdfast.snapshot.interval.samples import EVIDENCE, Recent, Timing

FIRST = 4
"""Steps between snapshots until there are measurements."""

LONGEST = 1000
"""Maximum steps between snapshots. It limits how much may be lost, and how long changes go unnoticed."""

SAME = 0.2
"""A plan that differs from the interval by a smaller share is not worth a change: it gains about half the square of
that share."""

STEPS, SNAPSHOTS = 256, 128
"""Number of newest samples that count, as long as nothing changes."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The measurements that a plan is made from, in seconds.

    Attributes:
        step_s: duration of a baseline step.
        cost_s: training time that a snapshot takes.
        commit_s, encode_s: time until it is sealed, and from there until it is protected.
    """

    step_s: float
    cost_s: float
    commit_s: float
    encode_s: float


class Online:
    """One rank's plan. Not thread-safe; nothing blocks.

    Args:
        budget: largest fraction of training time that snapshots may take; None: any.
        rate: how often the job fails.
        slots: slots per shard.
        longest: maximum steps between snapshots.
        protect_every: one of this many snapshots is protected.
        lost: share of the failures that need a protected snapshot.

    Raises:
        ConfigError: the budget is not between 0 and 1, or `longest` below `FIRST`.
    """

    def __init__(
        self,
        budget: float | None,
        rate: FailureRate,
        slots: int,
        longest: int = LONGEST,
        *,
        protect_every: int = 1,
        lost: float = 0.0,
    ) -> None:
        if longest < FIRST:
            raise ConfigError(f"snapshots at most every {longest} steps: give {FIRST} or more")
        self.rate = rate
        self._budget = check_budget(budget)
        self._slots = slots
        self._longest = longest
        self._interval = FIRST
        self._protect_every = protect_every
        self._lost = lost
        self._log = OverlapLog(protect_every)  # counts baseline steps since the measurements went stale
        self._baseline, self._overlapped = Recent(STEPS), Recent(STEPS)
        self._costs, self._stalls = Recent(SNAPSHOTS), Recent(SNAPSHOTS)
        self._commits, self._encodes = Recent(SNAPSHOTS), Recent(SNAPSHOTS)
        self._seen: Seen | None = None
        self._stale = False
        self._probed = False  # this interval is a probe for baseline steps
        self._plan: Interval | None = None
        self._why = "measures first"

    @property
    def interval(self) -> int:
        """Steps from one snapshot to the next, as the ranks agreed."""
        return self._interval

    @property
    def overhead(self) -> float | None:
        """Fraction of training time that snapshots take at this interval; None as long as it is unknown."""
        return self._seen.cost_s / (self._interval * self._seen.step_s) if self._seen else None

    @property
    def why(self) -> str:
        """The reason for the interval, in words."""
        return self._why

    def takes(self, step: int) -> bool:
        """Whether a snapshot is taken after this step."""
        return step % self._interval == 0

    def observe(self, step_s: float, stall_s: float, overlapped: bool) -> None:
        """Take note of a finished training step; see `OverlapLog.observe`."""
        self.rate.trained(step_s)
        snapshot = self._log.observe(step_s, stall_s, overlapped, self._interval)
        if overlapped:
            if self._overlapped.add(step_s) or self._log.in_a_row == STALE_STEPS:
                self._go_stale()
        elif (self._baseline.add(step_s) or len(self._baseline) == EVIDENCE) and self._seen is not None:
            self._seen = replace(self._seen, step_s=self._baseline.value)
            self._replan()
        if snapshot is not None:
            self._compare(snapshot)

    def timed(self, timing: Timing) -> None:
        """Take note of how long a snapshot took to be protected."""
        self._commits.add(timing.copy_s + timing.seal_s)
        self._encodes.add(timing.encode_s)

    def wanted(self) -> int:
        """The interval this rank asks for. Depends only on what was observed, and changes nothing."""
        if self._starved:
            return min(2 * self._interval, self._longest)
        if self._plan is None or (self._stale and self._probed):
            return self._interval
        planned, now = self._plan.steps, self._interval
        if abs(planned - now) <= SAME * now and not self._over_budget(now):
            return now
        return planned

    def agree(self, interval: int) -> None:
        """All ranks use `interval` from now on: the longest that any of them `wanted`.

        Raises:
            ValueError: the interval is below 1.
        """
        if interval < 1:
            raise ValueError(f"an interval of {interval} steps")
        if interval == self._interval:
            return
        self._probed = self._starved and interval > self._interval
        self._why = self._reason(interval)
        self._interval = interval
        self._log.restart()
        self._overlapped.clear()

    def notes(self) -> dict[str, Any]:
        """What the next start of the job must know, as plain values."""
        seen = self._seen
        measured = [seen.step_s, seen.cost_s, seen.commit_s, seen.encode_s] if seen else []
        return {"interval": self._interval, "seen": measured, "failures": self.rate.notes()}

    def resume(self, notes: Mapping[str, Any]) -> None:
        """Continue from the `notes` of the restored snapshot. Counts a failure: the job has failed since.

        Raises:
            ConfigError: the notes are malformed.
        """
        try:
            interval, measured = int(notes["interval"]), [float(value) for value in notes["seen"]]
            self.rate.resume([float(value) for value in notes["failures"]])
            seen = Seen(*measured) if measured else None
        except (LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the snapshot's notes on intervals are {notes!r}: {error}; start once with a number for every="
            ) from error
        self.rate.failed()
        self._interval = min(max(1, interval), self._longest)
        self._seen = seen
        if seen is not None:
            self._replan()
            self._why = self._reason(self._interval)

    @property
    def _starved(self) -> bool:
        """Whether something must be measured, and no baseline step will come without a probe."""
        return (self._plan is None or self._stale) and self._log.starved(self._interval)

    def _over_budget(self, interval: int) -> bool:
        overhead = self._seen.cost_s / (interval * self._seen.step_s) if self._seen else 0.0
        return self._budget is not None and overhead > self._budget

    def _compare(self, snapshot: Overlapped) -> None:
        if len(self._baseline) and not (self._stale and self._log.baseline < EVIDENCE):
            self._costs.add(snapshot.took_s - snapshot.steps * self._baseline.value)
            self._stalls.add(snapshot.stall_s)
            self._measure()

    def _measure(self) -> None:
        if min(len(self._costs), len(self._baseline)) < EVIDENCE:
            return
        cost_s = max(0.0, self._costs.value, self._stalls.value)
        self._seen = Seen(self._baseline.value, cost_s, self._commits.value, self._encodes.value)
        self._stale = False
        self._replan()

    def _go_stale(self) -> None:
        """The cost of a snapshot must be measured again, against baseline steps that are still to come."""
        self._stale = True
        self._log.baseline = 0
        self._costs.clear()
        self._stalls.clear()

    def _replan(self) -> None:
        seen = self._seen
        if seen is None or seen.step_s <= 0:
            return
        # A failure loses half an interval on average; one that needs a protected snapshot, `protect_every` times that.
        weight = 1 + self._lost * (self._protect_every - 1)
        self._plan = choose_interval(
            step_s=seen.step_s,
            cost_s=seen.cost_s,
            failure_rate=self.rate.per_second * weight,
            commit_s=seen.commit_s,
            encode_s=seen.encode_s if self._protect_every == 1 else 0.0,
            slots=self._slots,
            budget=self._budget,
            longest=self._longest,
        )

    def _reason(self, interval: int) -> str:
        seen, plan = self._seen, self._plan
        if self._probed or seen is None or plan is None:
            return "every step overlapped a snapshot, so steps without one are measured first"
        bounds = {
            "optimum": "cost and loss balance",
            "step": "less than a step would be best",
            "slots": "a slot must be free and encoding keep up",
            "budget": f"the budget of {self._budget or 0:.2%} allows no less",
            "longest": "more is not allowed",
        }
        other = "" if plan.steps == interval else "; another rank asked for it"
        ideal = f"{duration(plan.ideal_s)} would be best, " if math.isfinite(plan.ideal_s) else ""
        return (
            f"a step takes {duration(seen.step_s)}, a snapshot {duration(seen.cost_s)} of training and "
            f"{duration(seen.commit_s + seen.encode_s)} until it is protected, a failure is expected every "
            f"{duration(1.0 / self.rate.per_second)}: {ideal}{bounds[plan.bound]}{other}"
        )
