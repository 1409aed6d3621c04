"""What each way to protect a job amounts to: intervals, bytes, seconds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.fleet.job import FleetJob, Site
from benchmarks.fleet.strategies import (
    COPY_COST,
    ENTERING_S,
    HELD_S,
    ROUND_S,
    DiskAsync,
    DiskSync,
    InMemoryCode,
    Nothing,
    PairReplication,
)
from holdfast.smp_daemon.shared.settings import OVERHEAD_BUDGET
from holdfast.snapshot.interval.rule import choose

JOB = FleetJob(64, gpus_per_node=8, step_s=10.0, state_bytes=64 * 2e11)
"""200 GB per node: 1 s from its GPUs, 2 s to digest, 8 s over its network."""
SITE = Site(gpu_rate=25e9, network_rate=25e9, storage_rate=64e9, rack=4, digest_rate=100e9)

BUDGET = OVERHEAD_BUDGET.value({})


def test_a_code_sends_a_copy_for_each_parity_and_keeps_a_share_of_one() -> None:
    design = InMemoryCode(6, 2).design(JOB, SITE, 1e5)
    assert design.network_bytes == 2 * 2e11
    assert design.memory_bytes == pytest.approx(3 * 2e11 * (1 + 2 / 6))
    assert design.group_repair_s == 16
    assert design.regroup_s == 8 + 16, "each lost shard is computed once, and all is encoded again"
    assert (design.regroup_after_s, design.storage_bytes) == (30, 2e11)


def test_copies_send_and_keep_a_whole_copy_for_each() -> None:
    design = PairReplication(3).design(JOB, SITE, 1e5)
    assert design.network_bytes == 2 * 2e11
    assert design.memory_bytes == 2 * 3 * 2e11
    assert design.group_repair_s == 16
    assert design.regroup_after_s == math.inf


def test_a_snapshot_is_sealed_when_it_is_digested_and_protected_when_it_is_sent() -> None:
    save = InMemoryCode(6, 2).design(JOB, SITE, 1e5).saves[0]
    agreed_s = math.log2(JOB.gpus) * ROUND_S
    assert (save.sealed_s, save.persisted_s) == (1 + 2, math.inf)
    assert save.protected_s == pytest.approx(19 + agreed_s)
    assert save.stall_s == pytest.approx(COPY_COST * 1 + SITE.interference * 16 + HELD_S)


def test_the_default_interval_is_the_one_that_trainers_choose() -> None:
    for mtbf_s in (1.0, 1e4, 1e6):
        save = InMemoryCode(6, 2).design(JOB, SITE, mtbf_s).saves[0]
        rule = choose(
            step_s=JOB.step_s,
            cost_s=save.stall_s,
            failure_rate=1 / mtbf_s,
            budget=BUDGET,
            done=10**9,
        )
        assert save.every == rule.steps > math.ceil(save.protected_s / JOB.step_s)
        assert save.stall_s / (save.every * JOB.step_s) <= BUDGET
    never = InMemoryCode(6, 2).design(JOB, SITE, math.inf).saves[0]
    assert never.every > save.every


def test_a_given_interval_is_kept_if_snapshots_are_done_in_time() -> None:
    for every in (5, 500):
        assert InMemoryCode(6, 2, every=every).design(JOB, SITE, 1e5).saves[0].every == every


def test_a_snapshot_is_done_before_its_slot_is_needed() -> None:
    """If nothing costs training time, only durations count: 1 s to copy, 2 s to digest and 16 s to send."""
    quick = replace(JOB, step_s=1.0)
    free, quiet = {"COPY_COST": 0.0}, replace(SITE, interference=0.0)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in free.items():
            patch.setattr(f"benchmarks.fleet.strategies.{name}", value)
        assert InMemoryCode(6, 2, every=1).design(quick, quiet, 1e5).saves[0].every == 16
        assert InMemoryCode(6, 2, every=1).design(JOB, quiet, 1e5).saves[0].every == 2


def test_snapshots_go_to_storage_as_often_as_asked_and_as_it_can_take() -> None:
    seldom, saves = (InMemoryCode(6, 2, persist_s=s).design(JOB, SITE, 1e5).saves for s in (7200.0, 60.0))
    assert seldom[1].every * JOB.step_s == pytest.approx(7200, rel=0.1)
    assert seldom[1].every % seldom[0].every == 0
    assert saves[1].every * JOB.step_s >= saves[1].persisted_s > 200
    assert len(InMemoryCode(6, 2, persist_s=math.inf).design(JOB, SITE, 1e5).saves) == 1


@pytest.mark.parametrize("strategy", [InMemoryCode(6, 2), PairReplication(), DiskSync(), DiskAsync(), Nothing()])
def test_loading_takes_longer_the_further_away_it_is(strategy: InMemoryCode) -> None:
    loads = strategy.design(JOB, SITE, 1e5).load_s
    entering_s = ENTERING_S * JOB.gpus if isinstance(strategy, InMemoryCode) else 0.0
    far = {"sealed": 1, "protected": 9, "persisted": 201, "start": 0}
    assert loads == pytest.approx({source: load_s + entering_s for source, load_s in far.items()})


def test_this_system_keeps_racks_apart_and_published_pairs_do_not() -> None:
    rack = range(4)
    for strategy, survives in ((InMemoryCode(7, 1), True), (InMemoryCode(14, 2), True), (PairReplication(), False)):
        groups = strategy.design(JOB, SITE, 1e5).groups
        assert groups is not None
        assert groups.survives(rack) == survives, strategy.name


def test_published_pairs_save_each_step_or_as_often_as_they_can_send() -> None:
    """Sending takes 8 s, and the copy from the GPUs 1 s; there are two buffers."""
    slow, quick = (PairReplication().design(replace(JOB, step_s=s), SITE, 1e5).saves[0] for s in (10.0, 1.0))
    assert (slow.every, quick.every) == (1, 9)


def test_what_is_on_storage_alone_takes_no_memory_of_other_nodes() -> None:
    sync, parallel, nothing = (s.design(JOB, SITE, 1e5) for s in (DiskSync(), DiskAsync(), Nothing()))
    assert sync.groups is parallel.groups is nothing.groups is None
    assert (sync.memory_bytes, parallel.memory_bytes, nothing.memory_bytes) == (0, 2e11, 0)
    assert sync.saves[0].stall_s == 200
    assert parallel.saves[0].stall_s < 10 < parallel.saves[0].persisted_s
    assert nothing.saves == ()
