"""The simulation agrees with theory, within its own standard error."""

from __future__ import annotations

import math
import statistics

import pytest

from benchmarks.exact_interval import expected_time
from benchmarks.fleet.engine import simulate
from benchmarks.fleet.failures import FailureProcess
from benchmarks.fleet.job import FleetJob, Site
from benchmarks.fleet.progress import Save
from benchmarks.fleet.strategies import Design, DiskAsync, DiskSync, InMemoryCode, Nothing, Strategy
from holdfast.planner.failures import DAY_S
from holdfast.planner.survival import loss_rate_first_order


def ratios(
    job: FleetJob, site: Site, process: FailureProcess, strategy: Strategy, days: float, runs: int
) -> list[float]:
    design = strategy.design(job, site, process.mtbf_s(job.nodes))
    return [
        simulate(
            job, site, design, process.trace(job.nodes, site.rack, days * DAY_S, f"theory/{run}"), days * DAY_S
        ).ettr
        for run in range(runs)
    ]


def agree(values: list[float], expected: float) -> None:
    error = statistics.stdev(values) / math.sqrt(len(values))
    assert abs(statistics.fmean(values) - expected) < 3 * error + 0.001, (statistics.fmean(values), error, expected)


@pytest.mark.parametrize("every", [60, 277, 1500])
def test_synchronous_checkpoints_waste_what_young_and_daly_expect(every: int) -> None:
    """Saving stops training, and failures come at any time: the expected time is M e^(R/M) (e^((tau+c)/M) - 1)."""
    job = FleetJob(1000, step_s=6.0, state_bytes=1.2e12, detect_s=20.0, restart_s=180.0)
    site = Site(storage_rate=2e10, gpu_rate=1e15)
    process = FailureProcess(rate=4.0)
    expected = every * 6.0 / expected_time(every * 6.0, 60.0, process.mtbf_s(1000), 200.0 + 60.0)
    agree(ratios(job, site, process, DiskSync(every), 90, 12), expected)


def test_no_other_interval_wastes_less_than_the_one_that_is_chosen() -> None:
    job, site, process = FleetJob(1000, state_bytes=1.2e12), Site(storage_rate=2e10), FailureProcess(rate=4.0)
    chosen = DiskSync().design(job, site, process.mtbf_s(1000)).saves[0].every
    best = statistics.fmean(ratios(job, site, process, DiskSync(), 60, 4))
    for other in (chosen // 3, chosen * 3):
        assert statistics.fmean(ratios(job, site, process, DiskSync(other), 60, 4)) < best


def test_snapshots_in_memory_waste_what_their_two_levels_expect() -> None:
    """c / T + lambda_S (T/2 + l1 + R1) + lambda_H (T/2 + l2 + R2), with T and the latencies long enough to matter."""
    job = FleetJob(2000, step_s=1.0, state_bytes=0.0, detect_s=0.0, restart_s=60.0)
    site = Site(rack=1, spares=10_000, replace_s=0.0)
    save = Save(100, stall_s=1.0, sealed_s=10.0, protected_s=70.0)
    groups = InMemoryCode(6, 2).design(job, site, 1.0).groups
    design = Design((save,), groups, {"sealed": 5.0, "protected": 40.0, "start": 0.0, "persisted": 0.0})
    process = FailureProcess(rate=6.0, memory=0.4)
    total = 1 / process.mtbf_s(2000)
    wasted = 1 / 100 + 0.6 * total * (50 + 10 + 65) + 0.4 * total * (50 + 70 + 100)
    values = []
    for run in range(12):
        trace = process.trace(2000, 1, 60 * DAY_S, f"levels/{run}")
        values.append(simulate(job, site, design, trace, 60 * DAY_S).ettr)
    assert 1 / statistics.fmean(values) - 1 == pytest.approx(wasted, rel=0.05)


def test_without_protection_a_job_gets_as_far_as_the_time_since_the_last_failure() -> None:
    job, process = FleetJob(1000, step_s=1.0, detect_s=0.0, restart_s=0.0), FailureProcess(rate=4.0)
    days, mtbf_s = 10, process.mtbf_s(1000)
    agree(ratios(job, Site(), process, Nothing(), days, 400), mtbf_s / (days * DAY_S))


@pytest.mark.parametrize(("parity", "share", "days", "least"), [(1, 0.01, 1300, 700), (2, 0.015, 1600, 80)])
def test_groups_are_lost_as_often_as_the_formula_says(parity: int, share: float, days: float, least: int) -> None:
    """One group of 8, of which a node fails in `share` of the windows. The others regroup after a window, just before
    the node is replaced, so windows are independent of each other, as in the formula."""
    window_s, node_rate = 600.0, share / 600.0
    job = FleetJob(8, step_s=6.0, state_bytes=0.0, detect_s=0.0, restart_s=0.0)
    site = Site(rack=1, spares=10**9, replace_s=1.01 * window_s)
    process = FailureProcess(rate=node_rate * DAY_S * 1000, memory=1.0)
    groups = InMemoryCode(8 - parity, parity).design(job, site, 1.0).groups
    save = Save(1, 0.0, sealed_s=0.0, protected_s=0.0)
    loads = dict.fromkeys(("sealed", "protected", "persisted", "start"), 0.0)
    design = Design((save,), groups, loads, group_repair_s=0.0, regroup_after_s=window_s)
    outcome = simulate(job, site, design, process.trace(8, 1, days * DAY_S, f"groups/{parity}"), days * DAY_S)
    expected = loss_rate_first_order(8, parity, node_rate, window_s) * days * DAY_S
    assert outcome.beyond > least
    assert outcome.beyond == pytest.approx(expected, rel=0.15 if parity == 1 else 0.25)


def test_asynchronous_checkpoints_are_never_closer_than_one_takes() -> None:
    job, site = FleetJob(16, state_bytes=1e12), Site(storage_rate=1e9)
    save = DiskAsync(1).design(job, site, 3600.0).saves[0]
    assert save.every * job.step_s >= save.persisted_s > 1000
    assert save.stall_s < 10


def test_the_interval_of_a_checkpoint_that_stops_training_is_the_best_there_is() -> None:
    """Daly's published optima for checkpoints that take 5 min: 117, 57 and 9.1 min."""
    job, site = FleetJob(16, step_s=1.0, state_bytes=3e11), Site(storage_rate=1e9)
    for mtbf_s, minutes in ((24 * 3600.0, 116.69), (6 * 3600.0, 56.71), (15 * 60.0, 9.167)):
        assert DiskSync().design(job, site, mtbf_s).saves[0].every / 60 == pytest.approx(minutes, abs=0.02)


def test_a_job_that_never_fails_hardly_ever_writes() -> None:
    job, site = FleetJob(16, state_bytes=3e11), Site(storage_rate=1e9)
    assert DiskSync().design(job, site, math.inf).saves[0].every * job.step_s > DAY_S
