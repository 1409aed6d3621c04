"""An interval that plans itself while a job runs, in simulated jobs whose true costs are known."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.snapshot.interval.online import FIRST, LONGEST, Online
from holdfast.snapshot.interval.overlap import STALE_STEPS
from holdfast.snapshot.interval.periods import choose_interval
from holdfast.snapshot.interval.rates import REMEMBERED, FailureRate
from holdfast.snapshot.interval.samples import EVIDENCE, Recent, Timing


class Job:
    """Ranks that train in step, take snapshots after the steps they agreed on, and agree while one is in progress.

    Attributes:
        step_s, cost_s, protect_s: seconds per step, and seconds that a snapshot costs and takes to be protected; they
            may be changed between runs.
        taken: after which steps each rank took a snapshot.
    """

    def __init__(
        self,
        ranks: int = 2,
        *,
        step_s: float = 10.0,
        cost_s: float = 0.5,
        protect_s: float = 8.0,
        mtbf_s: float = 20_000.0,
        budget: float | None = None,
        noise: float = 0.0,
        seed: int = 1,
    ) -> None:
        self.step_s, self.cost_s, self.protect_s = step_s, cost_s, protect_s
        self.mtbf_s, self.budget, self.noise = mtbf_s, budget, noise
        self.ranks = [Online(budget, FailureRate(1 / mtbf_s), 3) for _ in range(ranks)]
        self.taken: list[list[int]] = [[] for _ in range(ranks)]
        self.step = 0
        self._busy_until_s = self._now_s = 0.0
        self._random = random.Random(seed)
        self._extra_s = 0.0

    @property
    def interval(self) -> int:
        intervals = {rank.interval for rank in self.ranks}
        assert len(intervals) == 1
        return intervals.pop()

    def best(self) -> int:
        return choose_interval(
            step_s=self.step_s,
            cost_s=self.cost_s,
            failure_rate=self.ranks[0].rate.per_second,
            commit_s=self.protect_s / 2,
            encode_s=self.protect_s / 2,
            budget=self.budget,
            longest=LONGEST,
        ).steps

    def run(self, steps: int) -> None:
        for _ in range(steps):
            busy = self._busy_until_s > self._now_s
            common_s = self.step_s * self._random.gauss(1, self.noise)
            took_s = common_s + self._extra_s
            for rank in self.ranks:
                rank.observe(took_s * self._random.gauss(1, self.noise / 4), self._extra_s / 4, busy)
            self._now_s += took_s
            self._extra_s = 0.0
            self.step += 1
            if busy:
                agreed = max(rank.wanted() for rank in self.ranks)
                for rank in self.ranks:
                    rank.agree(agreed)
            for rank, taken in zip(self.ranks, self.taken, strict=True):
                if rank.takes(self.step):
                    taken.append(self.step)
                    rank.timed(Timing(self.step, self.protect_s / 4, self.protect_s / 4, self.protect_s / 2))
            if self.taken[0] and self.taken[0][-1] == self.step:
                self._busy_until_s = self._now_s + self.protect_s
                self._extra_s = self.cost_s


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "options",
    [
        {"noise": 0.01},
        {"noise": 0.01, "budget": 0.01, "mtbf_s": 2000.0},
        {"step_s": 2.0, "protect_s": 30.0, "mtbf_s": 2000.0},
        {"cost_s": 5.0, "step_s": 30.0, "mtbf_s": 500_000.0},
        {"cost_s": 0.0, "noise": 0.01},
    ],
)
def test_it_finds_the_best_interval(options: dict[str, float], seed: int) -> None:
    job = Job(seed=seed, **options)  # type: ignore[arg-type]
    job.run(4000)
    assert job.interval == pytest.approx(job.best(), rel=0.25, abs=1)
    assert job.taken[0] == job.taken[1]


def test_it_measures_before_it_plans() -> None:
    job = Job()
    job.run(FIRST * EVIDENCE)
    assert job.interval == FIRST
    job.run(3 * FIRST)
    assert job.interval != FIRST
    assert "a failure is expected every 5." in job.ranks[0].why


@pytest.mark.parametrize("change", [{"step_s": 30.0}, {"cost_s": 4.0}, {"step_s": 3.0, "cost_s": 0.05}])
def test_it_follows_what_changes(change: dict[str, float]) -> None:
    job = Job(noise=0.003)
    job.run(3000)
    before = job.interval
    for name, value in change.items():
        setattr(job, name, value)
    job.run(2000)
    assert job.interval == pytest.approx(job.best(), rel=0.25, abs=1)
    assert job.interval != before


def test_a_step_that_takes_three_times_as_long_is_followed_by_the_next_snapshot_but_one() -> None:
    job = Job(noise=0.01)
    job.run(3000)
    before = job.interval
    job.step_s *= 3
    job.run(2 * before + 2)
    assert job.interval == pytest.approx(before / 3, rel=0.25)


def test_more_failures_make_it_shorter_and_the_next_start_knows_of_them() -> None:
    job = Job(1)
    job.run(2000)
    first = job.ranks[0]
    for _ in range(REMEMBERED):
        notes = json.loads(json.dumps(first.notes()))
        second = Online(None, FailureRate(1 / job.mtbf_s), 3)
        second.resume(notes)
        assert second.interval == first.interval
        first = second
    assert first.rate.per_second > 3 / job.mtbf_s
    assert first.wanted() < 0.6 * job.interval


def test_it_keeps_within_the_budget() -> None:
    job = Job(budget=0.01, cost_s=4.0, mtbf_s=10.0, noise=0.005)
    job.run(4000)
    assert (job.ranks[0].overhead or 1.0) <= 0.0101
    assert job.cost_s / (job.interval * job.step_s) <= 0.0115
    assert "the budget of 1.00% allows no less" in job.ranks[0].why


def test_where_no_step_is_quiet_it_looks_for_some_and_comes_back() -> None:
    job = Job(step_s=1.0, protect_s=18.0, cost_s=0.0, mtbf_s=1e5)
    job.run(2000)
    assert job.interval == 9  # two slots must be free, in turn
    wide = [later - earlier for earlier, later in pairwise(job.taken[0]) if later < 400]
    assert max(wide) >= 32
    job.run(3 * STALE_STEPS)
    assert job.interval == 9


def test_without_quiet_steps_a_slower_step_is_noticed() -> None:
    job = Job(step_s=1.0, protect_s=18.0, cost_s=0.0, mtbf_s=1e5)
    job.run(1200)
    job.step_s = 3.0
    job.run(600)
    assert job.interval == 3


def test_ranks_that_measure_differently_still_agree() -> None:
    job = Job(3, noise=0.2, seed=5)
    for _ in range(30):
        job.run(100)
        assert job.interval >= 1
    assert job.taken[0] == job.taken[1] == job.taken[2]


def test_noise_alone_does_not_move_it_much() -> None:
    job = Job(noise=0.03, cost_s=1.0, seed=2)
    job.run(6000)
    seen = set()
    for _ in range(40):
        job.run(100)
        seen.add(job.interval)
    assert max(seen) <= 1.6 * min(seen)


@pytest.mark.parametrize("notes", [{}, {"interval": "soon"}, {"interval": 3, "seen": [1], "failures": [0, 0]}, []])
def test_notes_that_are_none_are_refused(notes: Sequence[object]) -> None:
    with pytest.raises(ConfigError, match="notes on intervals"):
        Online(None, FailureRate(1.0), 3).resume(notes)  # type: ignore[arg-type]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="overhead budget 2"):
        Online(2.0, FailureRate(1.0), 3)
    with pytest.raises(ConfigError, match="at most every 1 steps"):
        Online(None, FailureRate(1.0), 3, longest=1)
    with pytest.raises(ConfigError, match="failure rate is 0"):
        FailureRate(0.0)
    with pytest.raises(ValueError, match="interval of 0"):
        Online(None, FailureRate(1.0), 3).agree(0)


# ---------------------------------------------------------------------- rates and samples


def test_a_rate_begins_with_what_is_published_and_ends_with_what_was_seen() -> None:
    rate = FailureRate(1e-4)
    assert rate.per_second == pytest.approx(1e-4)
    for _ in range(100):
        rate.trained(1000.0)
        rate.failed()
    assert rate.per_second == pytest.approx(1e-3, rel=0.8)
    assert rate.per_second > 3e-4


def test_a_rate_that_falls_is_followed_although_nothing_happens() -> None:
    rate = FailureRate(1e-3)
    for _ in range(30):
        rate.trained(1000.0)
        rate.failed()
    before = rate.per_second
    rate.trained(1e6)
    assert rate.per_second < 0.05 * before


def test_old_samples_are_forgotten_where_something_has_changed() -> None:
    draw = random.Random(3)
    recent = Recent(64)
    for _ in range(64):
        assert not recent.add(draw.gauss(1.0, 0.05))
    forgot = [recent.add(draw.gauss(2.0, 0.05)) for _ in range(2 * EVIDENCE)]
    assert any(forgot)
    assert recent.value == pytest.approx(2.0, rel=0.1)
    assert Recent(8).value == 0.0
