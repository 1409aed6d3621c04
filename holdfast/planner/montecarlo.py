"""Monte Carlo simulation of the share of useful time, failure by failure. Shares no formula with `waste`.

Many independent runs are simulated side by side with numpy, because a plan is played with 50,000 failures while a user
waits. Times between failures are exponential. Results depend only on the seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.planner.checks import positive, within
from holdfast.planner.waste import Level

COUNTABLE = 1 << 53
"""Steps up to which floating-point numbers tell each from the next."""

Floats = NDArray[np.float64]
Steps = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Played:
    """A mean over runs, its standard error, and the number of failures in them."""

    mean: float
    error: float
    events: int


def play(
    levels: Sequence[Level],
    periods: Sequence[int],
    step_s: float,
    *,
    seed: int,
    runs: int = 256,
    failures: int = 200,
) -> Played:
    """Effective training time ratio of runs that fail, fall back, and go on, in whole steps.

    Each run lasts for the time in which `failures` failures are expected. A step takes `step_s`. At the boundary after
    step s every level whose period divides s starts a snapshot. It holds up training for the level's cost, and counts
    once its latency is over, if no failure comes first. A failure of class i ends the step in progress. After its
    restart, which may itself fail, the run goes on from the youngest snapshot that counts, of level i or above. Younger
    snapshots of lower levels are lost.

    Args:
        periods: steps between snapshots of each level, which count step numbers.

    Raises:
        ConfigError: a run has more than `COUNTABLE` steps.
    """
    positive("the time of a step", step_s, " s")
    rates = np.array([level.rate for level in levels])
    if not rates.sum():
        spent = sum(level.cost_s / period for level, period in zip(levels, periods, strict=True))
        return Played(step_s / (step_s + spent), 0.0, 0)
    generator = np.random.default_rng(seed)
    horizon = failures / float(rates.sum())
    within(f"the number of steps in which {failures} failures are expected", horizon / step_s, 0, COUNTABLE)
    costs = np.array([level.cost_s for level in levels])
    clock = _Clock(step_s, costs, np.array(periods, dtype=np.int64))
    state = _Runs(len(levels), runs, horizon)
    count = 0
    while state.running.any():
        gap = generator.exponential(1.0 / rates.sum(), runs)
        kind = generator.choice(len(levels), runs, p=rates / rates.sum())
        count += state.fail(levels, clock, gap, kind)
    share = state.done * step_s / horizon
    return Played(float(share.mean()), float(share.std(ddof=1) / math.sqrt(runs)), count)


class _Clock:
    """When each step is reached if nothing fails: the sum of the steps' times and the snapshots' costs."""

    def __init__(self, step_s: float, costs: Floats, periods: Steps) -> None:
        self._step_s, self._costs, self.periods = step_s, costs, periods
        self._pace = step_s + float((costs / periods).sum())
        self._slack = int(costs.sum() / self._pace) + 2

    def at(self, step: Steps, *, before: bool = False) -> Floats:
        """Seconds from step 0 until `step` and its snapshots' costs are over; if `before`, without those costs."""
        counted = np.maximum(step - before, 0)[:, None] // self.periods
        return np.asarray(step * self._step_s + counted @ self._costs)

    def reached(self, seconds: Floats, *, before: bool = False) -> Steps:
        """The last step that is over after `seconds`, as `at` defines it; 0 if there is none."""
        low = np.maximum(seconds / self._pace, 0.0).astype(np.int64)
        low -= np.minimum(low, 1)
        high = low + self._slack + 2
        while (high - low > 1).any():
            middle = (low + high) // 2
            over = self.at(middle, before=before) <= seconds
            low, high = np.where(over, middle, low), np.where(over, high, middle)
        return low


class _Runs:
    """The state of all runs, one array element per run."""

    def __init__(self, levels: int, runs: int, horizon: float) -> None:
        self._horizon = horizon
        self._now = np.zeros(runs)
        self._restart = np.zeros(runs)
        self._step = np.zeros(runs, dtype=np.int64)
        self._counts = np.zeros((levels, runs), dtype=np.int64)  # step of the youngest snapshot that counts
        self.running = np.ones(runs, dtype=bool)
        self.done = np.zeros(runs, dtype=np.int64)

    def fail(self, levels: Sequence[Level], clock: _Clock, gap: Floats, kind: NDArray[Any]) -> int:
        """Advance each run to its next failure or to its end. Returns the number of runs that failed."""
        ends = self._now + gap >= self._horizon
        busy = np.where(ends, self._horizon - self._now, gap) - self._restart
        elapsed = clock.at(self._step) + np.maximum(busy, 0.0)
        works = self.running & (busy > 0)
        at_end = np.where(works, np.maximum(clock.reached(elapsed), self._step), self._step)
        self.done = np.where(self.running & ends, at_end, self.done)
        for index, level in enumerate(levels):
            last = clock.reached(elapsed - level.latency_s, before=True)
            last -= last % clock.periods[index]
            fresh = works & (last > self._step)
            self._counts[index] = np.where(fresh, np.maximum(self._counts[index], last), self._counts[index])
        fails = self.running & ~ends
        self._fall_back(fails, kind, np.array([level.restart_s for level in levels]))
        self._now = np.where(fails, self._now + gap, self._now)
        self.running = fails
        return int(fails.sum())

    def _fall_back(self, fails: NDArray[np.bool_], kind: NDArray[Any], restarts: Floats) -> None:
        usable = np.where(np.arange(len(restarts))[:, None] >= kind, self._counts, 0).max(axis=0)
        below = np.arange(len(restarts))[:, None] < kind
        self._counts = np.where(fails & below, usable, self._counts)
        self._step = np.where(fails, usable, self._step)
        self._restart = np.where(fails, restarts[kind], np.where(self.running, 0.0, self._restart))
