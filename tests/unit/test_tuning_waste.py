"""Predicted waste: published points, an independent Monte Carlo simulation, and brute force over plans."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

import pytest

from benchmarks.exact_interval import expected_time
from holdfast.planner.failures import DAY_S
from holdfast.planner.montecarlo import play
from holdfast.planner.periods import young
from holdfast.planner.waste import Level, first_order, overhead
from holdfast.smp_daemon.shared.errors import ConfigError

LEVELS = (
    Level("process", 0.3, 1.0, 60.0, 1 / 7200),
    Level("memory", 0.6, 5.0, 120.0, 1 / 14400),
    Level("beyond", 20.0, 60.0, 600.0, 1 / 400000),
)


def wasted(share: float) -> float:
    """Wall time over useful time, less 1."""
    return share / (1.0 - share)


@pytest.mark.parametrize(("minutes", "published"), [(60, 0.70), (5, 0.93)])
def test_meta_rscs_training_time_ratios_come_out(minutes: float, published: float) -> None:
    """2,000 nodes, 6.5 failures per 1,000 node-days, 5 minutes to restart; snapshots are free."""
    level = Level("all", 0.0, 0.0, 300.0, 2000 * 6.5e-3 / DAY_S)
    found = 1 - first_order([level], [minutes * 60.0])
    assert found == pytest.approx({60: 0.684, 5: 0.932}[int(minutes)], abs=0.0005)
    assert found == pytest.approx(published, abs=0.02)


def test_the_three_level_example_comes_out() -> None:
    periods = [young(level.cost_s, 1 / level.rate) for level in LEVELS]
    assert periods == pytest.approx((65.727, 131.453, 4000.0), abs=0.001)
    assert wasted(first_order(LEVELS, periods)) == pytest.approx(0.0494, abs=0.00005)
    least = sum(math.sqrt(2 * x.cost_s * x.rate) + x.rate * (x.restart_s + x.latency_s) for x in LEVELS)
    assert first_order(LEVELS, periods) == pytest.approx(least)


@pytest.mark.parametrize("factors", [(1, 1, 1), (2, 1, 1), (1, 1, 4), (3, 3, 3), (8, 8, 2)])
def test_first_order_is_a_little_pessimistic_and_within_six_percent_of_what_is_played(factors: tuple[int, ...]) -> None:
    periods = [p * f for p, f in zip((66, 132, 3960), factors, strict=True)]
    periods[2] -= periods[2] % periods[1]
    predicted = wasted(first_order(LEVELS, periods))
    played = play(LEVELS, periods, 1.0, seed=11, runs=256, failures=200)
    found = 1 / played.mean - 1
    assert found - 3 * played.error <= predicted <= 1.06 * found + 3 * played.error


def test_the_published_simulation_is_met_within_its_error() -> None:
    """0.0492 for the published example; simulated here it gives 0.0484, 2 % less."""
    played = play(LEVELS, (66, 132, 3960), 1.0, seed=5, runs=256, failures=200)
    assert 1 / played.mean - 1 == pytest.approx(0.0492, rel=0.03)


@pytest.mark.parametrize(
    ("mtbf", "cost", "work", "restart"), [(1000, 20, 190, 50), (300, 20, 110, 30), (200, 5, 40, 90)]
)
def test_what_is_played_agrees_with_the_exact_time_of_one_level(mtbf: int, cost: int, work: int, restart: int) -> None:
    """A snapshot that stops training and counts once it is over is Daly's model, whose expected time is known."""
    level = Level("all", cost, cost, restart, 1 / mtbf)
    played = play([level], [work * 10], 0.1, seed=3, runs=256, failures=300)
    exact = work / expected_time(work, cost, mtbf, restart)
    assert abs(played.mean - exact) < 4 * played.error + 0.0015  # for steps of 0.1 s, and where runs end


class Run:
    """One run, step by step: an independent check, which shares nothing with `play`."""

    def __init__(self, levels: Sequence[Level], periods: Sequence[int], step_s: float, seed: int) -> None:
        self.levels, self.periods, self.step_s = levels, periods, step_s
        self.draw = random.Random(seed)
        self.rate = sum(level.rate for level in levels)
        self.now = 0.0
        self.step = self.failures = 0
        self.kept = [0] * len(levels)
        self.pending: list[tuple[float, int, int]] = []
        self.next_failure = self.draw.expovariate(self.rate)

    def until(self, failures: int) -> float:
        while self.failures < failures:
            self.advance(self.step_s)
            if self.now == self.next_failure:
                self.fail()
                continue
            self.step += 1
            boundary = self.now
            for index, level in enumerate(self.levels):
                if self.step % self.periods[index] == 0:
                    self.pending.append((boundary + level.latency_s, index, self.step))
                    self.advance(level.cost_s)
            if self.now == self.next_failure:
                self.fail()
        return self.now / (self.step * self.step_s) - 1

    def advance(self, seconds: float) -> None:
        self.now = min(self.now + seconds, self.next_failure)

    def fail(self) -> None:
        for ready, index, step in self.pending:
            if ready <= self.now:
                self.kept[index] = max(self.kept[index], step)
        self.pending.clear()
        self.failures += 1
        kind = self.draw.choices(range(len(self.levels)), [level.rate for level in self.levels])[0]
        self.step = max(self.kept[kind:])
        self.kept[:kind] = [self.step] * kind
        self.next_failure = self.now + self.draw.expovariate(self.rate)
        self.advance(self.levels[kind].restart_s)
        if self.now == self.next_failure:
            self.fail()


def test_what_is_played_agrees_with_a_run_step_by_step() -> None:
    levels = (
        Level("process", 4.0, 15.0, 60.0, 1 / 2000),
        Level("memory", 8.0, 55.0, 120.0, 1 / 4000),
        Level("beyond", 60.0, 300.0, 600.0, 1 / 20000),
    )
    periods = (10, 20, 100)
    runs = [Run(levels, periods, 10.0, seed).until(1500) for seed in range(10)]
    error = statistics.stdev(runs) / len(runs) ** 0.5
    played = play(levels, periods, 10.0, seed=2, runs=256, failures=200)
    assert abs(1 / played.mean - 1 - statistics.fmean(runs)) < 4 * (error + 2 * played.error)


def test_the_same_seed_plays_the_same_failures() -> None:
    first, second, third = (play(LEVELS, (66, 132, 3960), 1.0, seed=s, runs=16, failures=20) for s in (1, 1, 2))
    assert first == second != third


def test_without_failures_only_snapshots_cost() -> None:
    level = Level("process", 0.5, 1.0, 1.0, 0.0)
    assert play([level], [10], 1.0, seed=1).mean == pytest.approx(10 / 10.5)
    assert overhead([level], [10.0]) == 0.05


@pytest.mark.parametrize("rate", [1e-16, 1e-300])
def test_failures_too_rare_to_be_played_are_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="steps in which 200 failures are expected"):
        play([Level("all", 0.1, 1.0, 60.0, rate)], [10], 1e-6, seed=1)
