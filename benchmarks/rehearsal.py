"""Simulated months of a job with changing steps, costs and failures, with fixed intervals and with `IntervalRule`.

Results depend only on the seed. Every way to choose the interval meets the same *weather*: regimes of a few days, each
with its own step time, snapshot cost and latency, and failure rate, and the same failures at the same times. There are
no snapshots on storage: when a process dies the job falls back to the newest sealed snapshot, and when a node's memory
is lost, to the newest protected one.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.exact_interval import daly
from holdfast.planner.failures import DAY_S
from holdfast.snapshot.interval.rule import IntervalRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Climate:
    """Usual values, and how far regimes deviate from them. Times are in seconds.

    Attributes:
        cost_s: training time that a snapshot costs.
        commit_s, encode_s: time until a snapshot is sealed, and from then until it is protected.
        mtbf_s: mean time between failures of the job.
        memory: share of failures that lose a node's memory.
        restart_s: restart time after a process died, and after a node's memory was lost.
        regime_s: mean length of a regime.
        steps, costs, failures: the largest factor by which a regime raises or lowers a quantity; log-uniform. Costs
            and latencies share one factor, as both depend on bandwidth.
        noise: standard deviation of a step's time, relative to that time.
    """

    step_s: float = 10.0
    cost_s: float = 0.5
    commit_s: float = 10.0
    encode_s: float = 15.0
    mtbf_s: float = 6 * 3600.0
    memory: float = 0.12
    restart_s: tuple[float, float] = (60.0, 180.0)
    regime_s: float = 3 * DAY_S
    steps: float = 3.0
    costs: float = 3.0
    failures: float = 3.0
    noise: float = 0.02
    slots: int = 3
    month_s: float = 30 * DAY_S


@dataclass(frozen=True, slots=True)
class Regime:
    """The conditions from `start_s` on."""

    start_s: float
    step_s: float
    cost_s: float
    commit_s: float
    encode_s: float
    mtbf_s: float


@dataclass(frozen=True, slots=True)
class Weather:
    """The weather of one month. `failures`: times, and whether a node's memory is lost."""

    climate: Climate
    regimes: tuple[Regime, ...]
    starts: tuple[float, ...]
    failures: tuple[tuple[float, bool], ...]

    def at(self, now_s: float) -> Regime:
        """The regime at `now_s`."""
        return self.regimes[bisect_right(self.starts, now_s) - 1]


@dataclass(frozen=True, slots=True)
class Wasted:
    """The time of a month that was not useful work, in seconds.

    Attributes:
        snapshots, lost, restarts: time spent on snapshots, on steps that were lost, and on restarts.
    """

    snapshots: float
    lost: float
    restarts: float

    @property
    def total(self) -> float:
        """The sum of all three."""
        return self.snapshots + self.lost + self.restarts


def draw(climate: Climate, seed: int) -> Weather:
    """Draw a month's weather from a seed."""
    source = random.Random(seed)

    def times(most: float) -> float:
        return float(most ** source.uniform(-1.0, 1.0))

    regimes, failures, now = [], [], 0.0
    while now < climate.month_s:
        slow = times(climate.costs)
        regime = Regime(
            now,
            climate.step_s * times(climate.steps),
            climate.cost_s * slow,
            climate.commit_s * slow,
            climate.encode_s * slow,
            climate.mtbf_s / times(climate.failures),
        )
        regimes.append(regime)
        end = now + source.expovariate(1.0 / climate.regime_s)
        at = now + source.expovariate(1.0 / regime.mtbf_s)
        while at < min(end, climate.month_s):
            failures.append((at, source.random() < climate.memory))
            at += source.expovariate(1.0 / regime.mtbf_s)
        now = end
    return Weather(climate, tuple(regimes), tuple(regime.start_s for regime in regimes), tuple(failures))


def by_daly(weather: Weather, *, whole: bool) -> int:
    """Steps between snapshots by Daly's formula, for the first regime.

    Args:
        whole: use the time until a snapshot is protected as its cost, as for checkpoints that block training;
            otherwise, the training time that it costs.
    """
    first = weather.regimes[0]
    cost_s = first.commit_s + first.encode_s if whole else first.cost_s
    return max(1, round(daly(cost_s, first.mtbf_s) / first.step_s))


def play_fixed(weather: Weather, interval: int) -> Wasted:
    """Simulate a month with a snapshot every `interval` steps."""
    return _Month(weather).run_fixed(interval)


def play_rule(
    weather: Weather,
    seed: int,
    budget: float | None = None,
    on_change: Callable[[float, int], None] = lambda now_s, steps: None,
) -> Wasted:
    """Simulate a month with `IntervalRule`, which at first knows only the usual failure rate.

    Args:
        seed: seed of the noise of step times.
        on_change: called with the time and the new interval after every change.
    """
    return _Month(weather).run_rule(random.Random(seed), budget, on_change)


@dataclass(slots=True)
class _Snapshot:
    """A snapshot that holds a slot. `done_s`: useful work that it contains, in seconds."""

    step: int
    done_s: float
    sealed_s: float
    protected_s: float
    notes: dict[str, Any] | None = None


class _Month:
    """One simulation of a month."""

    def __init__(self, weather: Weather) -> None:
        self._weather = weather
        self._climate = weather.climate
        self._now_s = self._done_s = self._spent_s = self._restarts_s = 0.0
        self._step = 0
        self._held = [_Snapshot(0, 0.0, 0.0, 0.0)]  # newest last
        self._next = 0

    def run_fixed(self, interval: int) -> Wasted:
        owed_s = 0.0  # cost of the last snapshot, paid by the following steps
        while self._now_s < self._climate.month_s:
            regime = self._weather.at(self._now_s)
            work_s = interval * regime.step_s
            if self._fails_within(owed_s + work_s):
                self._fail()
                owed_s = 0.0
                continue
            self._advance(interval, work_s, owed_s)
            owed_s = regime.cost_s if self._snap(regime, None) else 0.0
        return self._end()

    def run_rule(self, noise: random.Random, budget: float | None, on_change: Callable[[float, int], None]) -> Wasted:
        rule = self._start(budget)
        owed_s = 0.0
        while self._now_s < self._climate.month_s:
            regime = self._weather.at(self._now_s)
            work_s = regime.step_s * max(0.1, noise.gauss(1.0, self._climate.noise))
            if self._fails_within(owed_s + work_s):
                newest = self._fail()
                rule = self._start(budget)
                rule.resume(newest.step, newest.notes or {})
                owed_s = 0.0
                continue
            busy = self._held[-1].protected_s > self._now_s
            self._advance(1, work_s, owed_s)
            rule.observe(self._step, work_s + owed_s, owed_s / 4.0, busy)
            owed_s = 0.0
            if busy and (wanted := rule.wanted().steps) != rule.interval:
                rule.interval = wanted
                on_change(self._now_s, wanted)
            if rule.is_due(self._step, True) and self._snap(regime, rule):
                rule.begun(self._step, True)
                owed_s = regime.cost_s
        return self._end()

    def _start(self, budget: float | None) -> IntervalRule:
        return IntervalRule(None, budget, 1.0 / self._climate.mtbf_s)

    def _fails_within(self, seconds: float) -> bool:
        failures = self._weather.failures
        return self._next < len(failures) and failures[self._next][0] <= self._now_s + seconds

    def _advance(self, steps: int, work_s: float, owed_s: float) -> None:
        self._step += steps
        self._done_s += work_s
        self._now_s += work_s + owed_s
        self._spent_s += owed_s

    def _snap(self, regime: Regime, rule: IntervalRule | None) -> bool:
        """Take a snapshot if a slot is free. The newest protected snapshot and all later ones hold their slots."""
        newest = max(i for i, held in enumerate(self._held) if held.protected_s <= self._now_s)
        del self._held[:newest]
        if len(self._held) >= self._climate.slots:
            return False
        sealed_s = self._now_s + regime.commit_s
        notes = rule.notes() if rule else None
        self._held.append(_Snapshot(self._step, self._done_s, sealed_s, sealed_s + regime.encode_s, notes))
        return True

    def _fail(self) -> _Snapshot:
        """Go back to the newest snapshot that survives the next failure. Failures during the restart prolong it."""
        at_s, memory = self._weather.failures[self._next]
        kept = [i for i, held in enumerate(self._held) if (held.protected_s if memory else held.sealed_s) <= at_s][-1]
        self._now_s = max(self._now_s, at_s)
        while self._fails_within(0.0):
            again_s, loses = self._weather.failures[self._next]
            self._next += 1
            until_s = again_s + self._climate.restart_s[loses]
            self._restarts_s += max(0.0, until_s - self._now_s)
            self._now_s = max(self._now_s, until_s)
        del self._held[kept + 1 :]
        newest = self._held[-1]
        newest.protected_s = min(newest.protected_s, self._now_s)
        self._step, self._done_s = newest.step, newest.done_s
        return newest

    def _end(self) -> Wasted:
        return Wasted(self._spent_s, self._now_s - self._done_s - self._spent_s - self._restarts_s, self._restarts_s)
