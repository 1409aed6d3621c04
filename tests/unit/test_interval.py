"""The interval between snapshots: properties of the rule, and simulated jobs whose true costs are known."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from holdfast.planner.profiles import PUBLISHED, profile
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.failures import NODE_LOST, NODE_MTBF_S
from holdfast.snapshot.interval.rule import (
    AT_RISK,
    EVIDENCE,
    LEAST_EXPOSURE_S,
    LONGEST,
    REMEMBERED,
    SHORTEST,
    WINDOW,
    YOUNG_S,
    IntervalRule,
    SnapshotCost,
    Spacing,
    choose,
)

BUDGET = 0.01
OLD = 10**9
"""Steps that no job ever had done."""


def cases(count: int = 500, seed: int = 7) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    return [
        {
            "step_s": 10 ** draw.uniform(-3, 2),
            "cost_s": 10 ** draw.uniform(-4, 2),
            "failure_rate": 10 ** draw.uniform(-8, -2),
            "budget": draw.choice([None, 10 ** draw.uniform(-4, -1)]),
            "done": int(10 ** draw.uniform(0, 7)),
        }
        for _ in range(count)
    ]


# ---------------------------------------------------------------- the rule


def test_where_nothing_else_limits_it_the_interval_is_youngs() -> None:
    found = [(case, choose(**case)) for case in cases()]
    best = [(case, spacing) for case, spacing in found if spacing.limit == "optimum" and spacing.steps > SHORTEST]
    assert len(best) >= 30
    for case, spacing in best:
        young = math.sqrt(2 * case["cost_s"] / case["failure_rate"]) / case["step_s"]
        assert abs(spacing.steps - young) <= 0.5


def test_it_is_never_over_the_budget_once_ten_minutes_are_done_nor_before_over_that_of_ten_minutes() -> None:
    limited = 0
    for case in cases():
        spacing = choose(**case)
        if case["budget"] is not None:
            overhead = case["cost_s"] / (spacing.steps * case["step_s"])
            age_s = case["done"] * case["step_s"]
            assert overhead <= case["budget"] * max(1.0, YOUNG_S / age_s) * (1 + 1e-6)
            limited += spacing.limit == "budget"
    assert limited >= 30


def test_at_most_a_tenth_of_what_was_done_is_at_risk_if_the_budget_allows_it() -> None:
    young = 0
    for case in cases():
        spacing = choose(**case)
        if spacing.limit != "budget":
            assert spacing.steps <= max(SHORTEST, AT_RISK * case["done"])
            young += spacing.limit == "young"
    assert young >= 30


@pytest.mark.parametrize(("name", "sign"), [("cost_s", 1), ("failure_rate", -1), ("budget", -1), ("done", 1)])
def test_it_is_monotone(name: str, sign: int) -> None:
    for case in cases():
        if case[name] is not None:
            more = case | {name: type(case[name])(2 * case[name])}
            assert sign * (choose(**more).steps - choose(**case).steps) >= 0


def test_a_budget_of_next_to_nothing_is_a_number_that_ranks_can_agree_on() -> None:
    for budget in (1e-300, 5e-324):
        assert choose(step_s=1.0, cost_s=10.0, failure_rate=1e-6, budget=budget, done=OLD).steps < 2**63


def test_slower_steps_never_make_it_longer_in_steps() -> None:
    for case in cases():
        old = case | {"done": OLD}  # before that, slower steps make the job older
        assert choose(**old | {"step_s": 2 * case["step_s"]}).steps <= choose(**old).steps


def test_a_snapshot_that_costs_nothing_is_taken_as_often_as_can_be() -> None:
    assert choose(step_s=1.0, cost_s=0.0, failure_rate=1e-9, budget=BUDGET, done=OLD) == Spacing(SHORTEST, "optimum")


def test_it_has_a_longest_but_for_the_budget() -> None:
    rare: dict[str, Any] = {"step_s": 0.01, "failure_rate": 1e-9, "done": OLD}
    assert choose(cost_s=0.01, budget=BUDGET, **rare) == Spacing(LONGEST, "longest")
    assert choose(cost_s=10.0, budget=BUDGET, **rare) == Spacing(100_000, "budget")


def test_the_assumed_rates_are_the_published_ones_that_the_planner_uses() -> None:
    published = profile(PUBLISHED)
    assert pytest.approx(published.node_mtbf_s()) == NODE_MTBF_S
    assert pytest.approx(published.memory + published.shock, abs=0.005) == NODE_LOST


# ---------------------------------------------------------------- jobs


class Job:
    """Ranks that train in step, and agree on the interval while a snapshot is in progress.

    These may be changed while it runs:

    Attributes:
        costs: seconds that a snapshot costs on each rank, as if each were alone. span: how many steps it overlaps.
        step_s: duration of a step. noise: standard deviation of it, relative; a quarter differs between the ranks.
        outliers: the probability that a step takes ten times as long.
        taken: after which steps snapshots were taken.
    """

    def __init__(
        self,
        costs: Sequence[float] = (0.5,),
        *,
        step_s: float = 10.0,
        span: int = 1,
        mtbf_s: float = 20_000.0,
        budget: float | None = None,
        noise: float = 0.0,
        outliers: float = 0.0,
        every: int | None = None,
        seed: int = 1,
    ) -> None:
        self.costs, self.step_s, self.span, self.noise, self.outliers = costs, step_s, span, noise, outliers
        self.mtbf_s = mtbf_s
        self.ranks = [IntervalRule(every, budget, 1 / mtbf_s) for _ in costs]
        self.taken: list[int] = []
        self.step = 0
        self.spent_s = self.now_s = 0.0
        self._left = 0
        self._random = random.Random(seed)

    @property
    def interval(self) -> int:
        [interval] = {rank.interval for rank in self.ranks}
        return interval

    @property
    def best(self) -> float:
        return math.sqrt(2 * max(self.costs) * self.mtbf_s) / self.step_s

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            overlapped = self._left > 0
            common_s = self.step_s * max(0.1, self._random.gauss(1, self.noise))
            common_s *= 10 if self._random.random() < self.outliers else 1
            for rank, cost_s in zip(self.ranks, self.costs, strict=True):
                extra_s = cost_s / self.span if overlapped else 0.0
                own_s = common_s * self._random.gauss(1, self.noise / 4)
                rank.observe(self.step, own_s + extra_s, 0.3 * extra_s, overlapped)
            extra_s = max(self.costs) / self.span if overlapped else 0.0
            self.now_s, self.spent_s = self.now_s + common_s + extra_s, self.spent_s + extra_s
            self._left = max(0, self._left - 1)
            if overlapped:
                agreed = max(rank.wanted().steps for rank in self.ranks)
                for rank in self.ranks:
                    rank.interval = agreed
            [due] = {rank.is_due(self.step, True) for rank in self.ranks}
            if due:
                self.taken.append(self.step)
                self._left = self.span
                for rank in self.ranks:
                    rank.begun(self.step, True)


def test_a_young_job_takes_its_first_after_its_first_step_and_loses_little_whenever_it_is_killed() -> None:
    job = Job([0.01], step_s=0.5, mtbf_s=1e6, budget=BUDGET)
    job.run(1200)
    assert job.taken[0] == 1
    for at in range(2, 121):  # the first minute
        newest = max(step for step in job.taken if step < at)
        assert at - newest <= max(SHORTEST, AT_RISK * at) + 1  # the one in progress counts only when it is over
    assert len(job.taken) <= 20 + math.log(1200 / 20) / math.log(1 + AT_RISK) + 2
    assert job.interval >= 80


def test_even_where_one_takes_three_tenths_of_a_second_the_first_minute_loses_seconds() -> None:
    job = Job([0.3], step_s=1.0, mtbf_s=1e7, budget=BUDGET)
    job.run(60)
    assert max(later - earlier for earlier, later in pairwise(job.taken)) <= 7


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "options",
    [
        {"noise": 0.01},
        {"noise": 0.01, "span": 4},
        {"costs": (5.0, 1.0), "step_s": 30.0, "mtbf_s": 500_000.0},
        {"costs": (0.001, 0.3, 0.1), "step_s": 1.0, "mtbf_s": 5_000.0, "outliers": 0.01},
    ],
)
def test_it_finds_the_best_interval(options: dict[str, Any], seed: int) -> None:
    job = Job(seed=seed, **options)
    job.run(4000)
    assert job.interval == pytest.approx(job.best, rel=0.3, abs=1)


def test_snapshots_take_no_more_than_the_budget_of_an_old_job_and_little_more_of_a_young_one() -> None:
    job = Job([0.5], step_s=1.0, mtbf_s=10.0, budget=BUDGET, noise=0.003)
    job.run(int(YOUNG_S))
    assert job.spent_s <= 0.06 * job.now_s
    spent_s, now_s = job.spent_s, job.now_s
    job.run(20_000)
    assert (job.spent_s - spent_s) / (job.now_s - now_s) <= 1.1 * BUDGET
    assert job.ranks[0].wanted().limit == "budget" and (job.ranks[0].overhead or 1.0) <= BUDGET


@pytest.mark.parametrize(
    "change", [{"step_s": 30.0}, {"costs": (4.0,)}, {"step_s": 3.0, "costs": (0.05,)}, {"span": 8}, {"costs": (0.0,)}]
)
def test_it_follows_what_changes(change: dict[str, Any]) -> None:
    job = Job(noise=0.003)
    job.run(3000)
    for name, value in change.items():
        setattr(job, name, value)
    job.run(3000)
    assert job.interval == pytest.approx(max(SHORTEST, job.best), rel=0.3, abs=1)


def test_slower_steps_are_followed_by_the_second_next_snapshot() -> None:
    job = Job(noise=0.003)
    job.run(3000)
    before = job.interval
    job.step_s *= 3
    job.run(2 * before + 2)
    assert job.interval == pytest.approx(before / 3, rel=0.25)


def test_the_rank_with_the_highest_cost_decides_for_all() -> None:
    job = Job([0.01, 2.0, 0.5])
    job.run(2000)
    assert job.interval == pytest.approx(math.sqrt(2 * 2.0 * job.mtbf_s) / job.step_s, rel=0.1)
    assert [rank.wanted().steps < job.interval for rank in job.ranks] == [True, False, True]
    assert "another rank" in job.ranks[0].why() and "another rank" not in job.ranks[1].why()


def test_there_is_always_a_step_to_compare_with_however_long_snapshots_take() -> None:
    job = Job([0.0], step_s=1.0, span=18, mtbf_s=1e5)
    job.run(2000)
    assert {later - earlier for earlier, later in pairwise(job.taken)} == {19}
    assert job.ranks[0].overhead == 0.0
    job.span = 10**6
    job.run(100)
    [rank] = job.ranks
    assert rank.is_time(job.step) and not rank.is_due(job.step, True)  # so the hook tells that nothing is taken
    assert rank.is_due(job.step, False)  # what is only to be sealed need not wait for encoding


@pytest.mark.parametrize("seed", range(3))
def test_noise_and_single_slow_steps_do_not_move_it_much(seed: int) -> None:
    job = Job([1.0], noise=0.01, outliers=0.02, seed=seed)
    job.run(4000)
    seen = set()
    for _ in range(40):
        job.run(100)
        seen.add(job.interval)
    assert max(seen) <= 2 * min(seen)


def test_a_fixed_interval_is_fixed_whatever_it_costs() -> None:
    job = Job([30.0], every=4, budget=BUDGET)
    job.run(400)
    assert job.taken == list(range(4, 401, 4))
    assert job.ranks[0].overhead == pytest.approx(30.0 / 40.0)
    job = Job([30.0], every=1, budget=BUDGET)
    job.run(100)
    assert job.taken == list(range(1, 101))


def test_clocks_that_stand_still_tell_it_nothing() -> None:
    job = Job([0.0], step_s=0.0)
    job.run(100)
    assert (job.interval, job.ranks[0].overhead, job.ranks[0].wanted().limit) == (SHORTEST, None, "unknown")


def test_ranks_that_lost_each_other_go_on_alike() -> None:
    first, second = IntervalRule(), IntervalRule()
    first.begun(7, True)
    first.observe(8, 1.0, 0.0, True)
    for rank in (first, second):
        rank.met(5)
        assert rank.is_due(9, True) and rank.interval == 5


# ---------------------------------------------------------------- what a snapshot costs


def test_the_cost_is_unknown_until_there_is_evidence() -> None:
    cost = SnapshotCost()
    for number in range(EVIDENCE + 1):
        assert cost.cost_s is None
        cost.observe(1.0, 0.0, False)
        cost.begun(True)
        cost.observe(1.2, 0.05, True)
        cost.observe(1.1, 0.0, True)
        assert number < EVIDENCE or cost.cost_s == pytest.approx(0.3)


def test_a_snapshot_costs_no_less_than_its_stall() -> None:
    cost = SnapshotCost()
    for _ in range(EVIDENCE + 1):
        cost.observe(1.0, 0.0, False)
        cost.begun(True)
        cost.observe(0.9, 0.03, True)
    assert cost.cost_s == pytest.approx(0.03)


def test_what_encoding_one_of_eight_costs_is_shared_out_over_all() -> None:
    cost = SnapshotCost()
    for number in range(8 * (EVIDENCE + 1)):
        cost.observe(1.0, 0.0, False)
        cost.begun(number % 8 == 0)
        cost.observe(1.8 if number % 8 == 0 else 1.0, 0.0, True)
    assert cost.cost_s == pytest.approx(0.1)


def test_old_samples_count_no_more_once_half_the_window_is_new() -> None:
    cost = SnapshotCost()
    for number in range(2 * WINDOW):
        cost.observe(1.0, 0.0, False)
        cost.begun(True)
        cost.observe(1.1 if number < WINDOW else 1.5, 0.0, True)
    assert cost.cost_s == pytest.approx(0.5)


# ---------------------------------------------------------------- failures


def after(notes: Any, assumed: float = 1e-6) -> IntervalRule:
    rule = IntervalRule(None, None, assumed)
    rule.resume(100, json.loads(json.dumps(notes)))
    return rule


def test_a_job_that_fails_more_often_than_assumed_is_believed_and_forgiven_again() -> None:
    rule = IntervalRule(None, None, 1e-6)
    for number in range(1, 4 * REMEMBERED):
        rule.observe(number, 1000.0, 0.0, False)
        rule = after(rule.notes())
    assert rule.failure_rate == pytest.approx(1e-3, rel=0.2)
    rule.observe(101, 1e5, 0.0, False)
    assert rule.failure_rate < 1e-4
    rule.observe(102, 1e8, 0.0, False)
    assert rule.failure_rate == 1e-6


def test_a_job_that_fails_more_rarely_than_assumed_is_not_believed() -> None:
    rule = IntervalRule(None, None, 1e-3)
    rule.observe(1, 1e9, 0.0, False)
    assert rule.failure_rate == 1e-3


def test_a_crash_before_anything_was_timed_is_no_infinite_rate() -> None:
    assert after(IntervalRule().notes()).failure_rate == pytest.approx(1 / LEAST_EXPOSURE_S)
    assert after({}).failure_rate == pytest.approx(1 / LEAST_EXPOSURE_S)


def test_a_start_after_a_loop_that_was_left_well_follows_no_failure() -> None:
    rule = IntervalRule()
    rule.observe(1, 1000.0, 0.0, False)
    rule.ends = True
    goes_on = after(rule.notes())
    assert goes_on.failure_rate == 1e-6
    assert after(goes_on.notes()).failure_rate == pytest.approx(1e-3)


def test_after_a_restart_the_next_is_due_an_interval_after_what_was_restored() -> None:
    rule = after({})
    assert [rule.is_due(step, True) for step in (101, 102)] == [False, True]


@pytest.mark.parametrize(
    "notes", [{"trained_s": "long", "failures": []}, {"trained_s": 1.0}, {"trained_s": 1.0, "failures": [None]}, [1]]
)
def test_malformed_notes_are_refused(notes: Any) -> None:
    with pytest.raises(ConfigError, match="notes on failures"):
        IntervalRule().resume(1, notes)
