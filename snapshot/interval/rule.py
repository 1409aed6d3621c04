"""The interval between snapshots, in steps, and what a snapshot costs, measured on the job. Pure: no clock.

`choose` is the rule. `IntervalRule` follows it on one rank while the job runs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.failures import NODE_MTBF_S
from holdfast.smp_daemon.shared.quantities import duration

SHORTEST, LONGEST = 2, 1000
"""Bounds in steps. The step between two snapshots shows how long steps take without one. The longest interval limits
how long changes go unnoticed."""

NEVER = 1 << 40
"""More steps than any job does: the ranks agree on a number of 64 bits."""

AT_RISK = 0.1
"""Share of the steps done so far that a crash may undo."""

YOUNG_S = 600.0
"""Age of a job from which the overhead budget holds strictly, in seconds."""

REMEMBERED = 8
"""Number of failures of the job itself that are remembered, the newest, so that a changing rate is followed."""

LEAST_EXPOSURE_S = 60.0
"""Failures within less training time than this count as if they had taken so long."""


@dataclass(frozen=True, slots=True)
class Spacing:
    """An interval in steps, and what it is limited by: ``optimum``, ``budget``, ``young``, ``longest``; or ``fixed`` by
    the user, or ``unknown`` as long as the cost of a snapshot is."""

    steps: int
    limit: str


def choose(*, step_s: float, cost_s: float, failure_rate: float, budget: float | None, done: int) -> Spacing:
    """The interval that loses least time, within the budget, and dense in a young job.

    A snapshot costs ``c`` seconds of training, and each failure loses half an interval ``T`` on average. With ``r``
    failures a second, the share of time that is lost, ``c / T + r T / 2``, is least at ``T = sqrt(2 c / r)`` (Young,
    CACM 17(9), 1974).

    In a young job that is longer than all it has done, so at most `AT_RISK` of the steps done is at risk. Each interval
    then begins 1.1 times as late as the one before, and the number of snapshots only grows with the logarithm of the
    job's age: until the optimum is reached, after `T / AT_RISK`, all of them together cost as much as ten for every
    time that the age grows e-fold.

    Snapshots never take more than ``budget`` of the time: ``T >= c / budget``, which wins over everything else. In its
    first ten minutes a job may spend what the budget allows for ten minutes: at age ``t`` the bound is
    ``c / budget * t / YOUNG_S``. Otherwise a minute might pass without any.

    Args:
        step_s, cost_s: duration of a step without snapshots, more than 0, and training time that one takes, in seconds.
        failure_rate: failures per second of the whole job, more than 0.
        budget: largest fraction of training time that snapshots may take; None: any.
        done: number of steps that the job has done, earlier starts included.
    """
    best = round(min(math.sqrt(2.0 * cost_s / failure_rate) / step_s, LONGEST + 1))
    bounds = {"optimum": best, "young": int(AT_RISK * done), "longest": LONGEST}
    limit = min(bounds, key=lambda name: bounds[name])
    steps = max(SHORTEST, bounds[limit])
    affordable = cost_s / (budget * step_s) * min(1.0, done * step_s / YOUNG_S) if budget else 0.0
    if affordable > steps:
        return Spacing(math.ceil(min(affordable - 1e-9, NEVER)), "budget")
    return Spacing(steps, limit)


class IntervalRule:
    """One rank's part in the decision. All ranks use the longest interval that any of them wants, and take snapshots
    after the same steps: that depends only on what they agreed on. Not thread-safe; nothing blocks.

    Unless the interval is fixed, no snapshot that will be encoded begins before a step has passed in which none was
    worked on. So there are always steps to compare with.

    Attributes:
        interval: steps from one snapshot to the next, as the ranks agreed.
        assumed: failures per second of the whole job, before any were seen.
        ends: the loop is being left well, so what goes on from the next snapshot follows no failure.
    """

    def __init__(self, every: int | None = None, budget: float | None = None, assumed: float = 1 / NODE_MTBF_S) -> None:
        """`every`: fixed interval; None: the interval follows the rule."""
        self.interval = every or SHORTEST
        self.assumed = assumed
        self.ends = False
        self.cost = SnapshotCost()
        self._every = every
        self._budget = budget
        self._done = 0
        self._newest: int | None = None  # step of the newest snapshot
        self._overlapped = False
        self._trained_s = 0.0
        self._failures: list[float] = []  # the newest ones, by the time trained until then

    @property
    def overhead(self) -> float | None:
        """Fraction of training time that snapshots take at this interval; None as long as it is unknown."""
        step_s, cost_s = self.cost.step_s, self.cost.cost_s
        return cost_s / (self.interval * step_s) if cost_s is not None and step_s else None

    @property
    def failure_rate(self) -> float:
        """Failures per second of the whole job: what is assumed, or what was seen in this job if that is more.

        It is cheaper to expect too many failures than too few, since the budget limits what snapshots cost.
        """
        count = len(self._failures)
        since_s = self._failures[0] if count == REMEMBERED else 0.0
        return max(self.assumed, (count - (since_s > 0)) / max(LEAST_EXPOSURE_S, self._trained_s - since_s))

    def is_time(self, step: int) -> bool:
        """Whether the interval is over after this step."""
        if self._every is not None:
            return step % self._every == 0
        return self._newest is None or step - self._newest >= self.interval

    def is_due(self, step: int, encodes: bool) -> bool:
        """Whether a snapshot is taken after this step; the same on every rank. `encodes`: it would be encoded."""
        waits = self._every is None and encodes and self._overlapped
        return self.is_time(step) and not waits

    def begun(self, step: int, encodes: bool) -> None:
        """A snapshot is taken after this step."""
        self._newest = step
        self.cost.begun(encodes)

    def observe(self, step: int, step_s: float, stall_s: float, overlapped: bool) -> None:
        """Take note of a finished step; see `SnapshotCost.observe`."""
        self._done, self._overlapped = step, overlapped
        self._trained_s += step_s
        self.cost.observe(step_s, stall_s, overlapped)

    def wanted(self) -> Spacing:
        """The interval that this rank asks for. Changes nothing."""
        if self._every is not None:
            return Spacing(self._every, "fixed")
        step_s, cost_s = self.cost.step_s, self.cost.cost_s
        if cost_s is None or not step_s:
            return Spacing(SHORTEST, "unknown")
        rate = self.failure_rate
        return choose(step_s=step_s, cost_s=cost_s, failure_rate=rate, budget=self._budget, done=self._done)

    def why(self) -> str:
        """The reason for the interval, in words."""
        wish, cost_s = self.wanted(), self.cost.cost_s
        reason = {
            "fixed": "as asked for",
            "unknown": "what one costs is measured first",
            "young": f"the job is young, and at most {AT_RISK:.0%} of what it has done is to be at risk",
            "longest": "more is never at risk",
            "budget": f"more would take over {self._budget or 0:.1%} of the time",
            "optimum": f"with a failure every {duration(1 / self.failure_rate)} that loses least",
        }[wish.limit]
        costs = f"one costs {duration(cost_s)} of training; " if cost_s is not None else ""
        return costs + ("another rank asked for it" if wish.steps < self.interval else reason)

    def notes(self) -> dict[str, Any]:
        """What the next start of the job must know, as plain values."""
        return {"trained_s": self._trained_s, "failures": list(self._failures), "ends": int(self.ends)}

    def resume(self, step: int, notes: Mapping[str, Any]) -> None:
        """Go on from the snapshot of `step`, and from its notes. Counts a failure, unless that was the last of a loop
        that was left well: the job has failed since.

        Raises:
            ConfigError: the notes are malformed.
        """
        self._newest = self._done = step
        try:
            if notes:
                self._trained_s = float(notes["trained_s"])
                self._failures = [float(at) for at in notes["failures"]]
        except (LookupError, TypeError, ValueError) as error:
            raise ConfigError(f"the snapshot's notes on failures are {notes!r}: {error!r}") from error
        if not (notes and notes.get("ends")):
            self._failures = [*self._failures, self._trained_s][-REMEMBERED:]

    def met(self, interval: int) -> None:
        """All ranks have met again after they lost each other. A snapshot is due, whatever each had seen."""
        self.interval, self._newest, self._overlapped = interval, None, False


WINDOW = 16
"""Number of newest samples that count. Of these the median does, so half of them may be outliers, and a lasting change
is followed after eight."""

EVIDENCE = 4
"""Minimum number of samples for a conclusion."""


class SnapshotCost:
    """Compares *baseline* steps, during which no snapshot was worked on, with all others, the *overlapped* ones. Not
    thread-safe; nothing blocks.

    A snapshot costs the time of its overlapped steps beyond that of as many baseline steps, which is stall and
    interference, whether copying, sealing or encoding cause it; and at least the time it held up the loop.

    Attributes:
        step_s: duration of a baseline step in seconds; None as long as it is unknown.
        cost_s: training time that a snapshot takes, in seconds; None as long as it is unknown.
    """

    def __init__(self) -> None:
        self.step_s: float | None = None
        self.cost_s: float | None = None
        self._baseline: deque[float] = deque(maxlen=WINDOW)
        self._excess: deque[float] = deque(maxlen=WINDOW)
        self._stalls: deque[float] = deque(maxlen=WINDOW)
        self._clear()

    def begun(self, encodes: bool) -> None:
        """A snapshot begins. If it is to be encoded, those before it are a sample: their cost is shared out equally, as
        otherwise that of encoding one in several would be taken for an outlier."""
        if encodes:
            if self._steps and self._snapshots and self._baseline:
                self._excess.append((self._took_s - self._steps * median(self._baseline)) / self._snapshots)
                self._stalls.append(self._stalled_s / self._snapshots)
            if len(self._excess) >= EVIDENCE:
                self.cost_s = max(0.0, median(self._excess), median(self._stalls))
            self._clear()
        self._snapshots += 1

    def observe(self, step_s: float, stall_s: float, overlapped: bool) -> None:
        """Take note of a finished step.

        Args:
            step_s: from boundary to boundary, stall included.
            stall_s: how long the loop was held up during the step.
            overlapped: a snapshot was taken at its start, or was copied, sealed or encoded at some time during it.
        """
        if overlapped:
            self._steps += 1
            self._took_s += step_s
            self._stalled_s += stall_s
        else:
            self._baseline.append(step_s)
            if len(self._baseline) >= EVIDENCE:
                self.step_s = median(self._baseline)

    def _clear(self) -> None:
        self._snapshots = self._steps = 0
        self._took_s = self._stalled_s = 0.0
