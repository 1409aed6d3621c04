"""The share of wall time lost to snapshots and failures, to first order, and the best plan of several levels.

A *level* is a kind of snapshot that serves one class of failures: sealed (processes), protected (memory lost),
persisted (beyond parity). It serves all classes below it, too. Level i is taken every P_i steps, each P_i a
multiple of the one before, **counted by step numbers**: if each recovery reset the count, the rare levels would starve.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdfast.planner.periods import LONGEST_STEPS, slots_needed
from holdfast.smp_daemon.shared.errors import ConfigError

ENCODE_EVERY = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
"""Candidates for n where one of n snapshots is encoded. Between these, waste hardly changes."""


@dataclass(frozen=True, slots=True)
class Level:
    """One kind of snapshot, and the failures that need it.

    Attributes:
        cost_s: training time that one snapshot takes by stopping or slowing the loop, without the levels below.
        latency_s: from the boundary until it counts; costs no training time, but ages what a failure falls back to.
        restart_s: from a failure of this class to the next step.
        rate: failures of this class per second, in the whole job.
    """

    name: str
    cost_s: float
    latency_s: float
    restart_s: float
    rate: float


def overhead(levels: Sequence[Level], periods_s: Sequence[float]) -> float:
    """Visible cost of all snapshots per second of useful work: ``sum c / T``, as a run without failures shows it."""
    return sum(level.cost_s / period for level, period in zip(levels, periods_s, strict=True))


def lost(levels: Sequence[Level], periods_s: Sequence[float]) -> tuple[float, ...]:
    """For each class, the share of time lost to its failures: ``rate (T/2 + latency + R)``."""
    return tuple(
        level.rate * (period / 2.0 + level.latency_s + level.restart_s)
        for level, period in zip(levels, periods_s, strict=True)
    )


def first_order(levels: Sequence[Level], periods_s: Sequence[float]) -> float:
    """Wasted share of wall time, ``sum c/T + sum rate (T/2 + l + R)``: on average a failure strikes half a period after
    the last snapshot, which counts only after its latency. Values above 1 have no meaning."""
    return overhead(levels, periods_s) + sum(lost(levels, periods_s))


@dataclass(frozen=True, slots=True)
class Limits:
    """Constraints on a plan.

    Attributes:
        step_s: duration of a step without snapshots.
        commit_s, encode_s, persist_s: how long each takes; they run beside training, one after the other. None:
            there is no such level.
        slots: slots per shard.
        budget: largest `overhead`; None: any.
        longest: maximum number of steps between the rarest snapshots.
        encode_every: the n that are allowed where one of n snapshots is encoded.
    """

    step_s: float
    commit_s: float
    encode_s: float | None
    persist_s: float | None
    slots: int = 3
    budget: float | None = None
    longest: int = LONGEST_STEPS
    encode_every: tuple[int, ...] = ENCODE_EVERY

    def feasible(self, periods: Sequence[int], *, persisted: bool = True) -> bool:
        """Whether each snapshot finds a free slot, and encoding and persisting keep up. `periods`: steps between
        snapshots of each level in use; without the persisted level if not `persisted`."""
        interval_s = periods[0] * self.step_s
        encode_s, persist_s = self.encode_s or 0.0, self.persist_s or 0.0
        every = periods[1] // periods[0] if self.encode_s is not None else 1
        needed = slots_needed(interval_s, self.commit_s, encode_s, encode_every=every, persist_s=persist_s)
        keeps_up = interval_s >= self.commit_s and every * interval_s >= encode_s
        lasts = persisted and periods[-1] * self.step_s < persist_s
        return keeps_up and not lasts and needed <= self.slots


def best_periods(levels: Sequence[Level], limits: Limits) -> tuple[int, ...]:
    """The feasible plan of least first-order waste: steps between snapshots of each level in use.

    Waste is a sum over levels, which only limits and whole numbers tie together. So the search takes each ratio of P2
    to P1 that `Limits.encode_every` allows, and tries P1 from the shortest feasible one to beyond its own optimum, in
    steps of 5 % or of one. For each P1 it takes the best multiple for the persisted level, which follows from that
    level's own optimum and what is left of the budget.

    Raises:
        ConfigError: no plan is feasible.
    """
    best: tuple[float, tuple[int, ...]] | None = None
    for ratios in _ratios(limits):
        for first in _firsts(levels, limits, ratios):
            for periods in _with_persisted(levels, limits, [first * n for n in ratios]):
                waste = first_order(levels, [p * limits.step_s for p in periods])
                if best is None or waste < best[0] - 1e-15:
                    best = (waste, periods)
    if best is None:
        raise ConfigError(
            f"no interval up to {limits.longest} steps of {limits.step_s:g} s is feasible with {limits.slots} slots: "
            f"copying takes {limits.commit_s:g} s, encoding {limits.encode_s or 0:g} s, persisting "
            f"{limits.persist_s or 0:g} s" + (f", the overhead budget is {limits.budget:g}" if limits.budget else "")
        )
    return best[1]


def _ratios(limits: Limits) -> list[tuple[int, ...]]:
    """The possible multiples of P1, for each level but the persisted one."""
    return [(1,)] if limits.encode_s is None else [(1, n) for n in limits.encode_every]


def _firsts(levels: Sequence[Level], limits: Limits, ratios: Sequence[int]) -> Iterable[int]:
    """Values of P1 worth trying: around the optimum without limits, or from the shortest feasible one on."""
    step = limits.step_s
    spent = sum(level.cost_s / n for level, n in zip(levels, ratios, strict=False)) / step
    hurt = 0.5 * step * sum(level.rate * n for level, n in zip(levels, ratios, strict=False))
    most = limits.longest // ratios[-1]
    ideal = math.sqrt(spent / hurt) if hurt else (most if spent else 1)
    least = math.ceil(spent / limits.budget - 1e-9) if limits.budget else 1
    shortest = _shortest(limits, ratios, max(1, least), most)
    if shortest is None:
        return
    end = min(most, 3 * math.ceil(max(ideal, shortest)))
    yield from {max(shortest, min(int(ideal) + up, most)) for up in (0, 1)}
    k = max(shortest, int(ideal / 1.5))
    while k <= end:
        yield k
        k = max(k + 1, int(k * 1.05))


def _with_persisted(levels: Sequence[Level], limits: Limits, periods: Sequence[int]) -> Iterable[tuple[int, ...]]:
    """`periods`, followed, if there is a persisted level, by each of the two multiples next to its optimum, or by the
    least multiple that the budget and the time of a persist allow."""
    if limits.persist_s is None:
        yield tuple(periods)
        return
    level, unit_s, most = levels[-1], periods[-1] * limits.step_s, limits.longest // periods[-1]
    spent = sum(x.cost_s / (p * limits.step_s) for x, p in zip(levels, periods, strict=False))
    left = limits.budget - spent if limits.budget else math.inf
    if left <= 0 and level.cost_s:
        return
    least = max(limits.persist_s, level.cost_s / left if level.cost_s else 0.0) / unit_s
    ideal = math.sqrt(2.0 * level.cost_s / level.rate) / unit_s if level.rate else (most if level.cost_s else 1)
    lowest = max(1, math.ceil(least - 1e-9))
    if lowest <= most:
        for n in {max(lowest, min(int(ideal) + up, most)) for up in (0, 1)}:
            yield *periods, n * periods[-1]


def _shortest(limits: Limits, ratios: Sequence[int], least: int, most: int) -> int | None:
    """The smallest feasible P1 from `least` to `most`, by bisection; None if there is none."""

    def feasible(k: int) -> bool:
        return limits.feasible([k * n for n in ratios], persisted=False)

    if least > most or not feasible(most):
        return None
    low, high = least, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if feasible(middle) else (middle + 1, high)
    return low
