"""Data for the plot of a recommendation: waste against the interval, survival against memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.planner.costs import Costs
from holdfast.planner.montecarlo import play
from holdfast.planner.recommend import Recommendation
from holdfast.snapshot.interval.periods import daly, young
from holdfast.snapshot.interval.waste import Level, first_order

POINTS = 60
PLAYED_POINTS = 7
MOST_NINES = 20.0
MOST_WASTE = 0.9
"""Waste at which the predicted curve ends: first order means nothing where most time is lost."""


@dataclass(frozen=True, slots=True)
class IntervalPoint:
    """Waste at an interval, with its standard error; 0 if there is none."""

    interval_s: float
    waste: float
    error: float = 0.0


@dataclass(frozen=True, slots=True)
class Curves:
    """Waste against the interval.

    Attributes:
        predicted: to first order, with the recommended ratios of the levels.
        played: the same by Monte Carlo.
        chosen: the recommendation, by Monte Carlo.
        rules: the intervals of Young's and Daly's single-level rules, by name, for all levels that memory serves.
        measured: the measured cost at the measured interval, plus the predicted loss to failures; None if nothing was
            measured.
    """

    predicted: tuple[IntervalPoint, ...]
    played: tuple[IntervalPoint, ...]
    chosen: IntervalPoint
    rules: tuple[tuple[str, IntervalPoint], ...]
    measured: IntervalPoint | None


def curves(found: Recommendation, costs: Costs) -> Curves:
    """The curves around a recommendation: from a tenth of its interval, or one step, to ten times it."""
    ratios = [period // found.periods[0] for period in found.periods]
    chosen_s = found.periods[0] * costs.step_s
    low, high = max(costs.step_s, chosen_s / 10.0), chosen_s * 10.0

    def waste(interval_s: float) -> IntervalPoint:
        return IntervalPoint(interval_s, first_order(found.levels, [interval_s * n for n in ratios]))

    grid = [low * (high / low) ** (i / (POINTS - 1)) for i in range(POINTS)]
    steps = sorted(
        {max(1, round(low * (high / low) ** (i / (PLAYED_POINTS - 1)) / costs.step_s)) for i in range(PLAYED_POINTS)}
    )
    return Curves(
        predicted=tuple(point for s in grid if (point := waste(s)).waste <= MOST_WASTE),
        played=tuple(_played(found.levels, [k * n for n in ratios], costs.step_s, found.seed) for k in steps),
        chosen=IntervalPoint(chosen_s, 1.0 - found.played.mean, found.played.error),
        rules=tuple(_rules(found.levels, waste)),
        measured=_measured(found, costs, ratios),
    )


def _played(levels: Sequence[Level], periods: Sequence[int], step_s: float, seed: int) -> IntervalPoint:
    played = play(levels, periods, step_s, seed=seed, runs=128)
    return IntervalPoint(periods[0] * step_s, 1.0 - played.mean, played.error)


def _rules(levels: Sequence[Level], waste: Callable[[float], IntervalPoint]) -> list[tuple[str, IntervalPoint]]:
    kept = [level for level in levels if level.name != "beyond"]
    cost_s, rate = sum(level.cost_s for level in kept), sum(level.rate for level in kept)
    if not cost_s or not rate:
        return []
    found = {"Young": young(cost_s, 1.0 / rate), "Daly": daly(cost_s, 1.0 / rate)}
    return [(name, waste(interval_s)) for name, interval_s in found.items()]


def _measured(found: Recommendation, costs: Costs, ratios: Sequence[int]) -> IntervalPoint | None:
    """The measured cost, plus the loss to failures that is predicted at that interval."""
    if not costs.measured_interval:
        return None
    interval_s = costs.measured_interval * costs.step_s
    lost = sum(
        level.rate * (interval_s * n / 2.0 + level.latency_s + level.restart_s)
        for level, n in zip(found.levels, ratios, strict=True)
    )
    return IntervalPoint(interval_s, costs.measured_cost_s / interval_s + lost, costs.error_s / interval_s)


def nines(risk: float) -> float:
    """``-log10(risk)``: 3 is a survival of 0.999. At most `MOST_NINES`."""
    return min(MOST_NINES, -math.log10(risk)) if risk > 0 else MOST_NINES
