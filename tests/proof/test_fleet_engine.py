"""From one failure to the next: what is kept, what is lost, and where every second went."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from benchmarks.fleet.engine import FleetOutcome, simulate
from benchmarks.fleet.failures import Failure, FailureProcess
from benchmarks.fleet.groups import Groups, place
from benchmarks.fleet.job import FleetJob, Site
from benchmarks.fleet.progress import Save
from benchmarks.fleet.strategies import (
    PERSIST_S,
    Design,
    DiskAsync,
    DiskSync,
    InMemoryCode,
    Nothing,
    PairReplication,
    Strategy,
)
from benchmarks.fleet.sweep import SeedMean, Sweep, run
from holdfast import ConfigError
from holdfast.planner.failures import DAY_S
from holdfast.planner.profiles import PROFILES

JOB = FleetJob(8, step_s=10.0, state_bytes=0.0, detect_s=5.0, restart_s=25.0)
SITE = Site(spares=2, replace_s=100.0, repair_s=5000.0)
LOADS = {"sealed": 1.0, "protected": 10.0, "persisted": 100.0, "start": 0.0}
DESIGN = Design(
    (Save(10, 0.0, sealed_s=2.0, protected_s=8.0), Save(100, 0.0, persisted_s=50.0)),
    Groups((0, 0, 0, 0, 1, 1, 1, 1), 1),
    LOADS,
    group_repair_s=40.0,
)
"""A snapshot every 100 s, protected after 8 s; one in 1,000 s is also persisted, after 50 s."""

STRATEGIES: tuple[Strategy, ...] = (
    InMemoryCode(7, 1),
    InMemoryCode(6, 2, every=10),
    InMemoryCode(1, 2, persist_s=math.inf),
    PairReplication(),
    PairReplication(3),
    DiskSync(),
    DiskAsync(),
    Nothing(),
)


def go(*failures: Failure, design: Design = DESIGN, site: Site = SITE, seconds: float = 10_000.0) -> FleetOutcome:
    outcome = simulate(JOB, site, design, failures, seconds)
    assert accounted(outcome) == pytest.approx(seconds, rel=1e-12)
    return outcome


def accounted(outcome: FleetOutcome) -> float:
    return outcome.useful_s + outcome.save_s + outcome.lost_s + outcome.recovery_s + outcome.waiting_s


def process(at_s: float, node: int = 0) -> Failure:
    return Failure(at_s, "process", (node,))


def memory(at_s: float, *nodes: int) -> Failure:
    return Failure(at_s, "memory", nodes)


def test_a_job_that_never_fails_trains_all_the_time() -> None:
    outcome = go()
    assert (outcome.steps, outcome.useful_s, outcome.ettr) == (1000, 10_000.0, 1.0)
    assert not outcome.failures and not outcome.restores


def test_a_process_that_dies_goes_on_from_the_newest_sealed_snapshot() -> None:
    outcome = go(process(2103.0))  # step 210 is sealed at 2,102 s
    assert outcome.restores == {"sealed": 1}
    assert outcome.lost_steps == 0
    assert outcome.lost_s == pytest.approx(3.0 + 6.0)  # the unfinished step is lost as well
    assert outcome.recovery_s == 5 + 25 + 1
    earlier = go(process(2101.0))
    assert earlier.lost_steps == 10


def test_a_node_that_is_lost_takes_what_was_sealed_and_not_protected() -> None:
    assert go(memory(2107.0, 3)).lost_steps == 10
    outcome = go(memory(2108.0, 3))
    assert outcome.lost_steps == 0
    assert outcome.restores == {"protected": 1}
    assert outcome.recovery_s == 5 + 25 + 10
    assert outcome.waiting_s == 100


def test_the_smps_finish_protecting_while_the_trainers_are_dead() -> None:
    """Sealed at 2,102 s; processes die at 2,103 s; protected at 2,108 s; a node dies while they start again."""
    assert go(process(2103.0), memory(2107.0, 3)).lost_steps == 10
    outcome = go(process(2103.0), memory(2120.0, 3))
    assert outcome.lost_steps == 0
    assert outcome.restores == {"protected": 1}


def test_more_than_the_parity_falls_back_to_what_was_persisted() -> None:
    outcome = go(memory(2_130.0, 0, 1))
    assert outcome.restores == {"persisted": 1}
    assert outcome.beyond == 1
    assert outcome.lost_steps == 213 - 200
    assert outcome.recovery_s == 5 + 25 + 100


def test_before_anything_was_persisted_it_falls_back_to_the_start() -> None:
    outcome = go(memory(1_040.0, 0, 1))  # step 100 would be persisted at 1,050 s
    assert outcome.restores == {"start": 1}
    assert outcome.lost_steps == 104


def test_one_node_of_each_group_may_go_at_once() -> None:
    assert go(memory(2_130.0, 0, 4)).restores == {"protected": 1}


def test_a_second_loss_counts_until_the_group_is_repaired() -> None:
    """Lost at 2,130 s, replaced at 2,235 s, training again at 2,270 s, whole at 2,310 s."""
    assert go(memory(2_130.0, 0), memory(2_305.0, 1)).restores == {"protected": 1, "persisted": 1}
    assert go(memory(2_130.0, 0), memory(2_311.0, 1)).restores == {"protected": 2}
    assert go(memory(2_130.0, 0), memory(2_305.0, 0)).restores == {"protected": 2}, "the same node once more"


def test_survivors_that_regroup_may_lose_another_while_a_machine_is_awaited() -> None:
    slow = replace(SITE, spares=0)
    regrouping = replace(DESIGN, regroup_after_s=30.0, regroup_s=20.0)  # they regroup from 2,165 to 2,185 s
    assert go(memory(2_130.0, 0), memory(2_184.0, 1), design=regrouping, site=slow).restores == {"persisted": 1}
    assert go(memory(2_130.0, 0), memory(2_186.0, 1), design=regrouping, site=slow).restores == {"protected": 1}
    assert go(memory(2_130.0, 0), memory(2_186.0, 1), site=slow).restores == {"persisted": 1}, "they do not re-form"


def test_survivors_regroup_though_another_failure_came_between() -> None:
    """A GPU fails at 2,162 s, while they wait; they wait 30 s again from 2,167 s, and are done at 2,217 s."""
    slow = replace(SITE, spares=0)
    regrouping = replace(DESIGN, regroup_after_s=30.0, regroup_s=20.0)
    first, drain = memory(2_130.0, 0), Failure(2_162.0, "drain", (5,))
    assert go(first, drain, memory(2_216.0, 1), design=regrouping, site=slow).restores == {"persisted": 1}
    assert go(first, drain, memory(2_218.0, 1), design=regrouping, site=slow).restores == {"protected": 1}


def test_what_was_persisted_survives_until_a_newer_one() -> None:
    late = replace(DESIGN, groups=None)
    outcome = go(memory(2_130.0, 0), memory(2_500.0, 0), design=late)
    assert outcome.restores == {"persisted": 2}
    assert outcome.steps > 700


def test_a_drained_host_is_read_once_more_and_loses_nothing() -> None:
    outcome = go(Failure(2_130.0, "drain", (2,)))
    assert outcome.restores == {"sealed": 1}
    assert outcome.lost_steps == 3
    assert (outcome.waiting_s, outcome.recovery_s) == (100, 5 + 25 + 10), "its shard comes over the network"


def test_without_a_spare_the_job_waits_for_the_repair() -> None:
    outcome = go(Failure(2_130.0, "drain", (2,)), site=replace(SITE, spares=0))
    assert outcome.waiting_s == 5000 - 5 + 100
    assert outcome.longest_s == 5000 + 100 + 25 + 10


def test_a_repaired_machine_stands_by_for_the_next() -> None:
    one = replace(SITE, spares=1, repair_s=1000.0)
    outcome = go(*(Failure(at_s, "drain", (2,)) for at_s in (2_000.0, 4_000.0, 4_500.0)), site=one)
    assert outcome.waiting_s == 100 + 100 + (1000 - 500 - 5) + 100


def test_a_failure_while_recovering_begins_again() -> None:
    outcome = go(process(2_130.0), process(2_150.0))
    assert outcome.recovery_s == 20 + 5 + 25 + 1
    assert outcome.restores == {"sealed": 1}
    assert outcome.failures == {"process": 2}


def test_nobody_is_hit_where_no_machine_is_and_no_process_runs() -> None:
    alone = replace(SITE, spares=0)
    first = memory(2_130.0, 0)
    hit = go(first, memory(2_500.0, 0), process(2_600.0, 5), site=alone)
    assert hit.failures == {"memory": 1}
    assert hit == go(first, site=alone)


def test_a_run_that_ends_while_it_stands_still_counts_what_could_be_restored() -> None:
    outcome = go(process(9_990.0))
    assert outcome.steps == 990
    assert outcome.recovery_s == 10
    assert outcome.restores.total() == 0


def test_a_rack_loses_all_its_nodes_at_once() -> None:
    groups = place(8, 4, 1, 2, spread=True)
    spread = replace(DESIGN, groups=groups)
    shock = Failure(2_130.0, "shock", (0, 1))
    assert go(shock, design=spread).restores == {"protected": 1}
    assert go(shock).restores == {"persisted": 1}, "neighbours are in one group there"


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
@pytest.mark.parametrize("profile", PROFILES)
def test_every_second_is_accounted_for(strategy: Strategy, profile: str) -> None:
    failures = FailureProcess.of(PROFILES[profile], shape=0.7)
    random = Random(f"{strategy.name}/{profile}")
    for spares in (0, 1, 20):
        job = FleetJob(
            random.randrange(9, 400), state_bytes=10 ** random.uniform(9, 13), restart_s=random.uniform(0, 900)
        )
        site = Site(spares=spares, rack=random.randrange(1, 5), repair_s=random.uniform(600, 40_000))
        busy = replace(failures, rate=failures.rate * random.uniform(1, 40))
        design = strategy.design(job, site, busy.mtbf_s(job.nodes))
        seconds = 30 * DAY_S
        outcome = simulate(job, site, design, busy.trace(job.nodes, site.rack, seconds, f"all/{spares}"), seconds)
        assert accounted(outcome) == pytest.approx(seconds, rel=1e-9)
        parts = (outcome.useful_s, outcome.save_s, outcome.lost_s, outcome.recovery_s, outcome.waiting_s)
        assert min(parts) >= -1e-6
        assert outcome.steps * job.step_s == pytest.approx(outcome.useful_s, abs=1e-3)
        assert outcome.restores.total() <= outcome.failures.total()


def sweep(seed: int = 1, strategies: Sequence[Strategy] = STRATEGIES[:4]) -> Sweep:
    process = FailureProcess.of(PROFILES["rsc-1"])
    return Sweep((2048, 4096), tuple(strategies), process, days=20, spares=(None, 0), seeds=3, seed=seed)


def test_the_same_seed_gives_the_same_rows_and_another_gives_others() -> None:
    assert run(sweep()) == run(sweep())
    assert run(sweep()) != run(sweep(2))


def test_a_row_is_the_mean_over_seeds_and_its_error() -> None:
    three = SeedMean.of([1.0, 2.0, 3.0])
    assert three.mean == 2.0
    assert three.error == pytest.approx(1 / math.sqrt(3))
    assert SeedMean.of([4.0]) == SeedMean(4.0, None)


def test_rows_say_what_storage_gets_and_gives() -> None:
    plan = sweep(strategies=(InMemoryCode(7, 1), DiskSync(), Nothing()))
    ours, disk, nothing = run(plan)[:3]
    assert ours.stored.mean == 0 < ours.restarts.mean
    assert disk.stored == disk.restarts and nothing.stored == nothing.restarts
    assert disk.storage_rate == pytest.approx(plan.job.state_bytes / (disk.every * plan.job.step_s))
    assert ours.storage_rate == pytest.approx(plan.job.state_bytes / PERSIST_S, rel=0.2)
    assert (nothing.storage_rate, nothing.network_rate, nothing.every) == (0, 0, 0)
    assert ours.network_rate == pytest.approx(ours.network_bytes / (ours.every * plan.job.step_s))


def test_every_strategy_meets_the_same_failures() -> None:
    alone = run(sweep(strategies=STRATEGIES[3:4]))
    assert alone == [row for row in run(sweep()) if row.strategy.startswith("gemini")]


def test_a_quarter_of_a_year_of_131072_gpus_takes_seconds() -> None:
    rows = run(Sweep((131_072,), STRATEGIES[1:4], FailureProcess.of(PROFILES["rsc-1"]), days=90, seeds=1))
    assert all(0 <= row.ettr.mean < 1 for row in rows)
    assert rows[0].restarts.mean > 1000
    assert rows[0].ettr.error is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FleetJob(0), "0 nodes of 8"),
        (lambda: FleetJob(8, 0), "8 nodes of 0"),
        (lambda: FleetJob(8, step_s=0.0), "step of 0.0 s"),
        (lambda: FleetJob(8, state_bytes=-1.0), "state_bytes -1.0"),
        (lambda: FleetJob(8, restart_s=math.nan), "restart_s nan"),
        (lambda: Site(storage_rate=0.0), "storage_rate 0.0"),
        (lambda: Site(rack=0), "racks of 0 nodes"),
        (lambda: Site(spares=-1), "-1 spares"),
        (lambda: Site(repair_s=-1.0), "repair_s -1.0"),
        (lambda: FailureProcess(-1.0), "a rate of -1.0"),
        (lambda: FailureProcess(math.inf), "rate of inf"),
        (lambda: FailureProcess(1.0, memory=-0.1), "may be less"),
        (lambda: FailureProcess(1.0, memory=0.6, drain=0.6), "no more than 1"),
        (lambda: FailureProcess(1.0, shape=0.0), "shape of 0.0"),
        (lambda: InMemoryCode(6, 2, every=0), "every 0 steps"),
        (lambda: InMemoryCode(6, 0), "at least 1"),
        (lambda: InMemoryCode(6, 2, slots=1), "2 to 16 slots"),
        (lambda: InMemoryCode(6, 2, slots=3, protect_every=8), "use 4 or more"),
        (lambda: InMemoryCode(6, 2, protect_every=0), "of 0 snapshots"),
        (lambda: InMemoryCode(6, 2, persist_s=0.0), "every 0.0 s"),
        (lambda: PairReplication(1), "1 copies"),
        (lambda: DiskSync(0), "every 0 steps"),
        (lambda: DiskAsync(-1), "every -1 steps"),
        (lambda: Save(0, 1.0), "every 0 steps"),
        (lambda: Save(1, -1.0), "takes -1.0 s"),
        (lambda: InMemoryCode(6, 2).design(FleetJob(7), Site(), 1.0), "groups of 8 nodes.* 7"),
        (lambda: simulate(JOB, SITE, DESIGN, [], 0.0), "0.0 s to simulate"),
        (lambda: simulate(JOB, SITE, DESIGN, [process(1.0, 8)], 9.0), "the job has 8"),
        (lambda: replace(sweep(), gpus=(1001,)), "1001 GPUs"),
        (lambda: replace(sweep(), days=0.0), "0.0 days"),
        (lambda: replace(sweep(), seeds=0), "nothing to simulate"),
    ],
)
def test_what_cannot_be_is_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigError, match=message):
        make()
