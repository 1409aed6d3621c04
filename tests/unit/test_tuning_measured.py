"""The measured profile, and the costs that follow from it and from assumptions."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from holdfast.planner.costs import Assumptions, Costs, assume, from_measured
from holdfast.planner.measured import Measured
from holdfast.smp_daemon.shared.errors import ConfigError

RUN = Measured(
    step_s=2.0,
    snapshot_step_s=2.1,
    stall_s=0.01,
    copy_s=0.4,
    seal_s=0.2,
    encode_s=1.8,
    state_bytes=10_000_000_000,
    slots=3,
    parity=2,
    data=6,
    interval_steps=4,
    quiet_steps=50,
    busy_steps=100,
    snapshots=50,
    nodes=16,
)
FULL = replace(RUN, persist_s=30.0, restart_s=20.0, rebuild_s=90.0, persists=2, restarts=1, rebuilds=1, step_sd_s=0.1)


@pytest.mark.parametrize("measured", [RUN, FULL])
def test_a_profile_survives_json(measured: Measured) -> None:
    assert Measured.from_json(json.loads(json.dumps(measured.to_json()))) == measured


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step_s": -1.0}, "step_s is -1: .* more than 0"),
        ({"step_s": "2 s"}, "float.*got .str.*step_s"),
        ({"step_s": True}, "float.*got .bool.*step_s"),
        ({"slots": 2.5}, "int.*got .float.*slots"),
        ({"slots": 1}, "slots is 1: .*2 to 16"),
        ({"quiet_steps": 0}, "quiet_steps is 0: at least 1"),
        ({"encode_s": float("nan")}, "float.*got .null.*encode_s"),
        ({"data": 0}, "parity is 2 .*data 0"),
        ({"nodes": None}, "int.*got .null.*nodes"),
        ({"colour": 1}, r"unknown keys \['colour'\]"),
        ({"format": 7}, "format is 7"),
    ],
)
def test_a_damaged_profile_is_refused_with_its_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Measured.from_json({**RUN.to_json(), **change})


def test_what_is_no_profile_is_refused() -> None:
    with pytest.raises(ConfigError, match="list is not"):
        Measured.from_json([])
    data = RUN.to_json()
    del data["copy_s"]
    with pytest.raises(ConfigError, match=r"missing .*copy_s"):
        Measured.from_json(data)


def test_a_snapshot_costs_what_its_busy_steps_take_beyond_quiet_ones() -> None:
    assert RUN.visible_s() == pytest.approx(0.2)  # two busy steps a snapshot, 0.1 s each
    assert replace(RUN, snapshot_step_s=1.9).visible_s() == 0.01  # noise; only the stall is certain
    assert RUN.visible_error_s() is None
    spread = replace(RUN, step_sd_s=0.1, snapshot_step_sd_s=0.2)
    assert spread.visible_error_s() == pytest.approx(2 * (0.01 / 50 + 0.04 / 100) ** 0.5)


def test_measured_costs_are_shared_out_by_time_and_go_with_the_parity() -> None:
    costs = from_measured(FULL, Assumptions(interference=0.1))
    assert FULL.interference == pytest.approx(0.2 / 2.4), "so nothing of the 10 % that were assumed is left"
    assert costs.snapshot_cost_s == pytest.approx(0.2 * 0.6 / 2.4)
    assert costs.encode_cost_s == pytest.approx(0.2 * 1.8 / 2.4 / 2)
    assert costs.encode_s == pytest.approx(0.9)
    assert (costs.commit_s, costs.persist_s, costs.persist_cost_s) == pytest.approx((0.6, 30.0, 30.0 * 0.2 / 2.4))
    assert (costs.restart_s, costs.rebuild_s) == (20.0, 90.0)
    for parity in (1, 2, 4):
        total = sum(level.cost_s for level in costs.levels(parity, 1e-5, 1e-6, 1e-7)[:2])
        assert total == pytest.approx(0.2 * (0.6 + 0.9 * parity) / 2.4)


def test_what_was_not_measured_is_assumed_and_said() -> None:
    costs = from_measured(replace(RUN, parity=0, data=0, encode_s=0.0), Assumptions(network_rate=5e9, persist_rate=1e9))
    assert costs.encode_s == 2.0
    said = " ".join(costs.assumed)
    assert all(word in said for word in ("encoding", "persisting", "restart of 5 min", "10 min to replace"))
    assert not from_measured(FULL, Assumptions(persist_rate=0)).assumed


def test_assumed_costs_follow_from_rates() -> None:
    given = Assumptions(step_s=1.0, state_bytes=400e9, interference=0.1, copy_rate=10e9, network_rate=25e9)
    costs = assume(replace(given, persist_rate=2e9))
    assert costs.commit_s == pytest.approx(2.0 + 40.0)
    assert costs.snapshot_cost_s == pytest.approx(2.0 - 0.9 + 0.1 * 42.0)  # what does not fit in a step stalls training
    assert (costs.encode_s, costs.encode_cost_s, costs.persist_s) == pytest.approx((16.0, 1.6, 200.0))


def levels_of(costs: Costs, parity: int) -> list[str]:
    return [level.name for level in costs.levels(parity, 1e-5, 2e-6, 3e-7)]


def test_there_is_a_level_for_each_class_that_can_be_served() -> None:
    stored, not_stored = (assume(Assumptions(step_s=1.0, state_bytes=1e9, persist_rate=r)) for r in (1e9, 0.0))
    assert levels_of(stored, 1) == ["process", "memory", "beyond"]
    assert levels_of(not_stored, 2) == ["process", "memory"]
    assert levels_of(stored, 0) == ["process", "beyond"]
    assert stored.levels(0, 1e-5, 2e-6, 3e-7)[1].rate == pytest.approx(2.3e-6)  # without parity memory is beyond it
    latencies = [level.latency_s for level in stored.levels(2, 1e-5, 2e-6, 3e-7)]
    assert latencies == sorted(latencies)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step_s": -12.0}, "a step is -12"),
        ({"state_bytes": 0.0}, "a node is 0"),
        ({"gpus_per_node": 0}, "0 GPUs a node"),
        ({"network_rate": 0.0}, "network rate is 0"),
        ({"persist_rate": -1.0}, "persist rate is -1"),
        ({"interference": 1.5}, "interference is 1.5"),
        ({}, "needs --step.* or --profile"),
        ({"step_s": 1.0}, "needs --state.* or --model or --profile"),
    ],
)
def test_impossible_assumptions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assume(Assumptions(**options))
