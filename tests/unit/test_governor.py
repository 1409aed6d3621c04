"""The interval between snapshots follows their measured overhead, in simulated jobs whose true costs are known."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.snapshot.interval.governor import PROBE_FACTOR, WINDOW, Governor
from holdfast.snapshot.interval.overlap import STALE_STEPS
from holdfast.snapshot.interval.samples import EVIDENCE

BUDGET = 0.01


class Job:
    """Ranks that train in step, take a snapshot every `interval` steps, and agree on the next one after each step.

    Times are in quiet steps. These may be changed while it runs:

    Attributes:
        costs: the cost of a snapshot on each rank. It delays only that rank, as if each were alone.
        span: how many steps a snapshot keeps busy.
        noise: standard deviation of a step's time; a quarter of it differs between the ranks.
        outliers: the probability that a step takes ten times as long.
    """

    def __init__(
        self,
        costs: Sequence[float],
        *,
        span: int = 1,
        every: int = 1,
        budget: float | None = BUDGET,
        noise: float = 0.0,
        outliers: float = 0.0,
        longest: int = 1000,
        seed: int = 0,
    ) -> None:
        self.costs = costs
        self.span = span
        self.noise = noise
        self.outliers = outliers
        self.stalled = 0.3
        self.step_s = 1.0
        self.ranks = [Governor(budget, every, longest) for _ in costs]
        self.intervals: list[int] = []
        self._random = random.Random(seed)
        self._since = 0

    @property
    def interval(self) -> int:
        return self.ranks[0].interval

    def run(self, steps: int) -> list[int]:
        """Train for `steps` steps; return the interval in force at each."""
        for _ in range(steps):
            self.intervals.append(self.interval)
            if self._since >= self.interval:
                self._since = 0
            busy = self._since < self.span
            self._since += 1
            quiet_s = self._random.gauss(1, self.noise) * (10 if self._random.random() < self.outliers else 1)
            for rank, cost in zip(self.ranks, self.costs, strict=True):
                extra = cost / self.span if busy else 0.0
                own_s = quiet_s * self._random.gauss(1, self.noise / 4) + extra
                rank.observe(own_s * self.step_s, extra * self.stalled * self.step_s, busy)
            agreed = max(rank.wanted() for rank in self.ranks)
            for rank in self.ranks:
                rank.agree(agreed)
        return self.intervals[-steps:]

    def overhead(self, intervals: Sequence[int]) -> float:
        """The true overhead of the most expensive rank at these intervals."""
        return max(self.costs) * sum(1 / interval for interval in intervals) / len(intervals)


def smallest(cost: float, budget: float = BUDGET) -> int:
    return math.ceil(cost / budget - 1e-9)


def changes(intervals: Sequence[int]) -> list[tuple[int, int]]:
    return [(old, new) for old, new in pairwise(intervals) if old != new]


# ---------------------------------------------------------------- towards the budget


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("cost", "span", "every", "noise"),
    [
        (0.1, 1, 1, 0.03),
        (0.1, 2, 5, 0.03),
        (0.3, 3, 1, 0.05),
        (0.5, 1, 10, 0.10),
        (0.5, 5, 1, 0.02),
    ],
)
def test_the_interval_converges_to_one_or_two_times_the_shortest_within_the_budget(
    cost: float, span: int, every: int, noise: float, seed: int
) -> None:
    job = Job([cost, 0.2 * cost, 0.9 * cost], span=span, every=every, noise=noise, outliers=0.005, seed=seed)
    job.run(4000)
    settled = job.run(1000)
    assert smallest(cost) <= sorted(settled)[500] <= 2 * smallest(cost)
    assert job.overhead(settled) <= 1.25 * BUDGET


@pytest.mark.parametrize(("cost", "span"), [(0.02, 1), (0.1, 2), (0.5, 3), (1.0, 5)])
def test_without_noise_it_is_exactly_the_shortest(cost: float, span: int) -> None:
    job = Job([cost], span=span)
    job.run(2500)
    assert set(job.run(500)) == {smallest(cost)}
    assert job.ranks[0].overhead == pytest.approx(cost / smallest(cost))


def test_it_gets_there_within_little_more_than_eight_snapshots_of_each_interval_on_the_way() -> None:
    job = Job([0.64], every=2)
    intervals = job.run(1200)
    assert changes(intervals) == [(2, 4), (4, 8), (8, 16), (16, 32), (32, 64)]
    assert intervals.index(64) <= (EVIDENCE + 2) * (2 + 4 + 8 + 16 + 32)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("cost", "span", "every"), [(0.02, 1, 5), (0.06, 3, 10), (0.0, 2, 3)])
def test_it_stays_where_the_user_wants_it_if_that_is_within_the_budget(
    cost: float, span: int, every: int, seed: int
) -> None:
    job = Job([cost] * 3, span=span, every=every, noise=0.02, outliers=0.005, seed=seed)
    assert set(job.run(4000)) == {every}


def test_it_shortens_when_the_cost_falls_and_lengthens_when_it_rises() -> None:
    job = Job([0.4], every=2, noise=0.01)
    job.run(2000)
    assert 40 <= job.interval <= 80
    job.costs = [0.1]
    job.run(6000)
    assert 10 <= job.interval <= 20
    job.costs = [0.8]
    job.run(4000)
    assert 80 <= job.interval <= 160
    job.costs = [0.001]
    job.run(20000)
    assert job.interval == 2


def test_it_shortens_only_when_the_cost_is_below_half_the_budget() -> None:
    job = Job([0.4], every=2)
    job.run(1500)
    job.costs = [0.21]
    job.run(5000)
    assert job.interval == 40
    job.costs = [0.19]
    job.run(5000)
    assert job.interval == 20


def test_the_rank_with_the_highest_cost_decides_for_all() -> None:
    job = Job([0.001, 0.3, 0.1], every=2)
    job.run(2000)
    assert {rank.interval for rank in job.ranks} == {30}
    job.costs = [0.001, 0.001, 0.1]
    job.run(6000)
    assert 10 <= job.interval <= 20


def test_it_is_never_longer_than_the_longest() -> None:
    job = Job([5.0], every=3, longest=50)
    job.run(2000)
    assert max(job.intervals) == job.interval == 50


def test_a_user_may_want_more_than_the_longest() -> None:
    job = Job([5.0], every=80, longest=50)
    assert set(job.run(3000)) == {80}


@pytest.mark.parametrize("seed", range(3))
def test_it_changes_by_at_most_a_factor_of_two_and_not_without_evidence(seed: int) -> None:
    job = Job([0.4, 0.2], every=4, noise=0.02, outliers=0.01, seed=seed)
    job.run(2000)
    job.costs = [0.05, 0.02]
    job.run(4000)
    held = 1
    for old, new in pairwise(job.intervals):
        if old != new:
            assert old / 2 <= new <= 2 * old
            assert held >= EVIDENCE * old
            held = 0
        held += 1
    assert len(changes(job.intervals)) >= 4


# ---------------------------------------------------------------- what must not change the interval


def test_one_slow_step_does_not_move_it_wherever_it_comes() -> None:
    for at in range(200, 205):
        job = Job([0.02], every=5)
        job.run(at)
        job.step_s = 10.0
        job.run(1)
        job.step_s = 1.0
        job.run(1000)
        assert set(job.intervals) == {5}


def test_noise_does_not_move_it_on_little_evidence() -> None:
    """Here steps vary by five times what a snapshot may cost, and eight of each kind show little."""
    jobs = [Job([0.005], every=2, noise=0.1, seed=seed) for seed in range(40)]
    moved = [job for job in jobs if set(job.run(60)) != {2}]
    assert len(moved) <= 8


def test_one_slow_step_in_twenty_does_not_move_it() -> None:
    job = Job([0.02], every=5, outliers=0.05)
    assert set(job.run(5000)) == {5}


def test_steps_that_become_slower_do_not_look_like_a_cost() -> None:
    for every in (2, 10):
        job = Job([0.008 * every], every=every)
        for step_s in (1.0, 3.0, 1.0):
            job.step_s = step_s
            job.run(1000)
        assert set(job.intervals) == {every}


def test_without_a_budget_it_never_moves_and_never_probes_but_still_measures() -> None:
    job = Job([3.0, 1.0], every=1, budget=None)
    assert set(job.run(3000)) == {1}
    job = Job([3.0], every=10, budget=None)
    assert set(job.run(1000)) == {10}
    assert job.ranks[0].overhead == pytest.approx(0.3)


def test_what_it_wants_follows_from_what_it_saw_however_often_it_is_asked() -> None:
    governor = Governor(BUDGET, 2)
    for step in range(100):
        governor.observe(1.5 if step % 2 == 0 else 1.0, 0.0, step % 2 == 0)
        assert governor.wanted() == governor.wanted()
        assert governor.interval == 2
    assert governor.wanted() == 4


# ---------------------------------------------------------------- what is measured


def test_the_overhead_is_unknown_until_there_is_evidence() -> None:
    job = Job([0.02], every=4)
    assert job.ranks[0].overhead is None
    job.run(4 * EVIDENCE)
    assert job.ranks[0].overhead is None
    job.run(8)
    assert job.ranks[0].overhead == pytest.approx(0.005)


def test_a_snapshot_costs_no_less_than_its_stall() -> None:
    """Even if its busy steps take no longer than others."""
    governor = Governor(BUDGET, 4)
    for step in range(100):
        busy = step % 4 == 0
        governor.observe(1.0, 0.03 if busy else 0.0, busy)
    assert governor.overhead == pytest.approx(0.03 / 4)


def test_snapshots_that_run_into_the_next_are_each_counted() -> None:
    """Of each two, the first keeps all its five steps busy, and the second three."""
    governor = Governor(None, 5)
    for step in range(1000):
        busy = step % 10 < 8
        governor.observe(1.1 if busy else 1.0, 0.0, busy)
    assert governor.overhead == pytest.approx(0.1 * 8 / 10, rel=0.02)


def test_snapshots_alone_are_no_evidence() -> None:
    governor = Governor(BUDGET, 2)
    for _ in range(EVIDENCE - 1):
        governor.observe(1.0, 0.0, False)
    for _ in range(2 * WINDOW):
        governor.observe(1.5, 0.1, True)
    assert governor.overhead is None


def test_clocks_that_stand_still_tell_it_nothing() -> None:
    governor = Governor(BUDGET, 2)
    for step in range(100):
        governor.observe(0.0, 0.0, step % 2 == 0)
    assert governor.overhead is None
    assert governor.wanted() == 2


# ---------------------------------------------------------------- probes


@pytest.mark.parametrize("cost", [0.002, 0.005, 0.008])
def test_where_no_step_is_quiet_it_asks_for_room_measures_and_goes_back(cost: float) -> None:
    job = Job([cost], every=1, noise=0.001)
    intervals = job.run(STALE_STEPS)
    assert changes(intervals) == [(1, 2), (2, 1)]
    assert intervals.count(2) <= 3 * EVIDENCE
    assert job.ranks[0].overhead == pytest.approx(cost, abs=0.001)


def test_a_probe_compares_with_its_own_quiet_steps_alone() -> None:
    job = Job([0.002], every=1, noise=0.001)
    job.run(500)
    job.step_s = 2.0
    intervals = job.run(STALE_STEPS)
    assert changes(intervals) == [(1, 2), (2, 1)]
    assert intervals.count(2) <= 3 * EVIDENCE


def test_a_long_snapshot_that_leaves_quiet_steps_needs_no_probe() -> None:
    job = Job([0.05], span=12, every=20)
    assert set(job.run(2000)) == {20}


def test_it_probes_at_most_once_in_a_thousand_steps() -> None:
    job = Job([0.002], every=1, noise=0.01)
    intervals = job.run(6 * STALE_STEPS)
    starts = [step for step in range(1, len(intervals)) if intervals[step - 1 : step + 1] == [1, 2]]
    assert 4 <= len(starts) <= 6
    assert all(later - sooner >= STALE_STEPS for sooner, later in pairwise(starts))
    assert set(intervals) == {1, 2}
    assert intervals.count(2) / len(intervals) < 2 * WINDOW * 1.2 / STALE_STEPS


def test_a_probe_goes_on_until_there_is_a_quiet_step_and_returns_to_where_it_began() -> None:
    job = Job([0.009], span=5)
    intervals = job.run(STALE_STEPS)
    assert changes(intervals) == [(1, 2), (2, 4), (4, 8), (8, 1)]


def test_a_probe_in_vain_is_given_up_and_the_next_one_waits() -> None:
    job = Job([0.5], span=10**6, longest=500)
    intervals = job.run(3 * STALE_STEPS)
    assert max(intervals) == PROBE_FACTOR
    assert intervals.count(1) / len(intervals) > 0.9
    assert job.ranks[0].overhead is None


def test_a_rising_cost_is_found_by_the_next_probe() -> None:
    job = Job([0.002], every=1)
    job.run(500)
    job.costs = [0.1]
    job.run(2000)
    assert job.interval == 10


def test_old_quiet_steps_do_not_count_for_ever() -> None:
    """Snapshots first leave quiet steps, and then none, so the base is measured again."""
    job = Job([0.02], every=4)
    job.run(500)
    job.span = 4
    job.run(STALE_STEPS + 200)
    assert set(job.intervals) == {4, 5}


def test_ranks_of_which_only_one_is_busy_all_the_time_still_agree() -> None:
    ranks = [Governor(BUDGET, 1), Governor(BUDGET, 1)]
    seen = set()
    since = 0
    for _ in range(3000):
        since = 0 if since >= ranks[0].interval else since
        ranks[0].observe(1.1 if since == 0 else 1.0, 0.0, since == 0)
        ranks[1].observe(1.0, 0.0, since == 0 and ranks[1].interval > 1)
        since += 1
        agreed = max(rank.wanted() for rank in ranks)
        for rank in ranks:
            rank.agree(agreed)
        seen.add(agreed)
    assert agreed == 10
    assert max(seen) == 10


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize("budget", [0.0, -0.1, 1.0, 1.5, math.nan, math.inf])
def test_a_budget_is_a_fraction(budget: float) -> None:
    with pytest.raises(ConfigError, match=r"overhead budget .*: give a fraction between 0 and 1"):
        Governor(budget, 1)


@pytest.mark.parametrize(("every", "longest"), [(0, 10), (-1, 10), (1, 0)])
def test_intervals_are_at_least_one_step(every: int, longest: int) -> None:
    with pytest.raises(ConfigError, match="intervals are 1 or more steps"):
        Governor(BUDGET, every, longest)
    with pytest.raises(ValueError, match="an interval of 0 steps"):
        Governor(BUDGET, 1).agree(0)
