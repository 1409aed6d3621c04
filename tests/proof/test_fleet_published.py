"""The simulation agrees with published results."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from statistics import fmean, stdev

import pytest

from benchmarks.fleet.failures import FailureProcess
from benchmarks.fleet.groups import place
from benchmarks.fleet.job import restart_s
from benchmarks.fleet.published import POINTS, PublishedPoint
from holdfast.planner.failures import DAY_S
from holdfast.planner.profiles import PROFILES
from holdfast.planner.survival import simultaneous


@pytest.mark.parametrize("point", POINTS, ids=[point.name for point in POINTS])
def test_what_studies_have_published_is_reproduced(point: PublishedPoint) -> None:
    value = point.simulated(1234)
    assert point.holds(value), f"{point.name}: {value}, published {point.published}"


@pytest.mark.parametrize(
    ("size", "parity", "lost", "published"),
    [
        (2, 1, 2, 0.933),
        (2, 1, 3, 0.800),
        (2, 1, 4, 0.615),
        (8, 1, 2, 0.533),
        (8, 2, 3, 0.800),
        (8, 2, 4, 0.431),
        (4, 2, 4, 0.892),
    ],
)
def test_random_losses_of_16_nodes_are_survived_as_often_as_the_formula_says(
    size: int, parity: int, lost: int, published: float
) -> None:
    """The first row is GEMINI's 93.3 %; the others follow from the same sum."""
    assert simultaneous([size] * (16 // size), parity, lost) == pytest.approx(published, abs=0.0006)
    groups, random, trials = place(16, size, parity, 1, spread=False), Random(7), 6000
    survived = sum(groups.survives(random.sample(range(16), lost)) for _ in range(trials))
    assert survived / trials == pytest.approx(published, abs=0.02)


def test_a_job_of_124_nodes_with_the_rate_of_opt_fails_110_times_in_two_months() -> None:
    process = FailureProcess(rate=1000 * 110 / (124 * 60))
    counts = [len(process.trace(124, 2, 60 * DAY_S, f"opt/{seed}")) for seed in range(40)]
    assert sum(counts) / len(counts) == pytest.approx(110, abs=5)


def test_kinds_of_failures_come_in_the_shares_of_their_study() -> None:
    trace = FailureProcess.of(PROFILES["ft-hsdp"]).trace(12_288, 2, 90 * DAY_S, "shares")
    shares = {kind: sum(f.kind == kind for f in trace) / len(trace) for kind in ("process", "drain", "memory", "shock")}
    assert shares["memory"] == pytest.approx(81 / 678, abs=0.02)
    assert shares["drain"] == pytest.approx(0.30, abs=0.03)
    assert shares["shock"] == pytest.approx(0.01, abs=0.006)


@pytest.mark.parametrize("shape", [0.6, 1.0, 3.0])
def test_bursts_change_when_failures_come_and_not_how_many(shape: float) -> None:
    process = FailureProcess(rate=6.0, shape=shape)
    trace = process.trace(1000, 2, 2000 * DAY_S, "bursts")
    gaps = [later.at_s - earlier.at_s for earlier, later in pairwise(trace)]
    mean = fmean(gaps)
    assert mean == pytest.approx(process.mtbf_s(1000), rel=0.05)
    assert stdev(gaps) / mean == pytest.approx({0.6: 1.76, 1.0: 1.0, 3.0: 0.363}[shape], rel=0.08)


@pytest.mark.parametrize(("gpus", "seconds"), [(16_384, 200), (22_528, 300), (65_536, 600), (98_304, 900)])
def test_cold_restarts_take_what_was_measured_at_scale(gpus: int, seconds: float) -> None:
    assert restart_s(gpus) == seconds


def test_between_and_beyond_what_was_measured_restarts_grow() -> None:
    assert restart_s(8) == restart_s(1024) == 60
    assert 60 < restart_s(8192) < 200
    assert 900 < restart_s(131_072) < 1300
