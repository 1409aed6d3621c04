"""The simulation on nodes of real size, where work on bytes and starts of processes take time."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.smp_daemon.coding.scrub import Scrubber
from holdfast.smp_daemon.shared.settings import SCRUB
from tests.proof.sim import __main__ as command
from tests.proof.sim.campaign import again
from tests.proof.sim.checks import CHECKS
from tests.proof.sim.costs import RATES, draw_costs
from tests.proof.sim.plan import DrawnFault, SeedPlan
from tests.proof.sim.run import play, simulate
from tests.proof.sim.seams import installed
from tests.proof.sim.shrink import Case, read_case
from tests.proof.sim.sized import REFUSAL, back_s, draw_sized, reserve_s
from tests.proof.sim.turns import Deviations

PROMPT = ("calm", "serves", "connected", "said", "waits", "answered", "back")
"""The checks that only these seeds make."""


@pytest.fixture
def simulation() -> Iterator[None]:
    with installed():
        yield


def small(seed: int, *faults: DrawnFault) -> SeedPlan:
    """Two nodes of two ranks, on which these faults strike."""
    plan = replace(draw_sized(seed), nodes=2, ranks=(0, 0, 1, 1), lengths=(1500,) * 4, refused="", final="stop")
    return replace(plan, lives=(faults,))


def test_the_promise_holds_on_nodes_of_real_size_and_in_time(simulation: None) -> None:
    checks, faults = Counter[str](), Counter[str]()
    for seed in range(12):
        report = simulate(seed, sized=True)
        assert not report.violations, f"{command.replay(seed, sized=True)}: {report.violations[0]}"
        checks += report.checks
        faults += report.faults
    assert faults
    assert {name for name in PROMPT if not checks[name]} <= {"said"}


def test_a_setting_that_no_smp_starts_with_is_told_to_every_rank(simulation: None) -> None:
    report = play(replace(small(0), refused=REFUSAL))
    assert not report.violations
    assert report.checks["said"] == 1


def test_a_node_waits_for_a_peer_whose_copy_takes_minutes_longer(simulation: None) -> None:
    """It has no slot for parity until then. The snapshot was given up after half a minute."""
    for seed in range(3):
        plan = small(seed)
        assert plan.costs is not None
        costs = replace(plan.costs, scale=200_000_000, copy=2e9, digest=1e9, populate=5e9, network=20e9)
        plan = replace(
            plan, ranks=(0, 1), lengths=(1500, 700), protect="1+1", slots=3, steps=3, step_s=1.0, costs=costs
        )
        assert play(plan).violations == []


def test_a_rebuild_over_a_slow_network_is_waited_for_as_long_as_units_come(simulation: None) -> None:
    """Such a one was given up after the time that bytes were expected to take."""
    for seed in range(3):
        plan = small(seed)
        assert plan.costs is not None
        costs = replace(plan.costs, scale=25_000_000, network=0.02e9, populate=5e9, map=5e9)
        report = play(replace(plan, costs=costs, protect_every=1, final="lose", protect="1+1", slots=3))
        assert not report.violations, f"seed {seed}: {report.violations[0]}"
        assert report.hits["rebuild.middle"] == 2


def test_a_starter_that_is_killed_while_it_waits_leaves_an_smp_that_others_find(simulation: None) -> None:
    killed = 0
    for seed in range(6):
        plan = small(seed)
        assert plan.costs is not None
        at_s = plan.costs.start_s * (1.0 + random.Random(seed).random())
        report = play(replace(plan, lives=((DrawnFault("kill-trainer", at_s=at_s),),)))
        assert not report.violations, f"seed {seed}: {report.violations[0]}"
        killed += report.faults["kill-trainer"]
    assert killed >= 4


def test_an_smp_that_dies_while_memory_is_reserved_has_a_successor_in_time(simulation: None) -> None:
    for seed in range(3):
        plan = small(seed)
        report = play(replace(plan, lives=((DrawnFault("kill-smp", at_s=reserve_s(plan) / 4),),)))
        assert not report.violations, f"seed {seed}: {report.violations[0]}"
        assert report.faults["kill-smp"] == 1
        assert report.checks["serves"] > 2


def test_seeds_differ_in_size_and_rates_and_faults() -> None:
    plans = [draw_sized(seed) for seed in range(600)]
    assert {len(plan.ranks) // plan.nodes for plan in plans} >= {1, 2, 8}
    assert max(plan.nodes for plan in plans) >= 128
    assert {"kill-smp", "lose-node", "pause-smp"} <= {fault.kind for plan in plans for fault in plan.lives[0]}
    assert any(plan.refused for plan in plans) and not all(plan.lives[0] for plan in plans)
    for plan in plans:
        costs = plan.costs
        assert costs is not None
        node = costs.scale * sum(plan.lengths) / plan.nodes
        assert 70e9 < node < 660e9
        assert all(0.1 <= getattr(costs, name) / (rate * 1e9) <= 10.0 for name, rate in RATES.items())
        assert back_s(plan) > reserve_s(plan)


def test_the_first_unit_and_the_rest_take_as_long_as_the_whole() -> None:
    costs = draw_costs(random.Random(1), 10**7)
    for count in (1, 512):
        assert costs.first_s("network", count) + costs.rest_s("network", count) == pytest.approx(
            costs.whole_s("network", count)
        )
    assert costs.first_s("network", 512) < 1e-3 * costs.whole_s("network", 512)


def test_what_a_seed_does_depends_neither_on_the_process_nor_on_what_ran_before() -> None:
    assert again(range(16, 20), sized=True) == []


def test_the_scrub_reads_simulated_bytes_as_fast_as_those_that_they_stand_for(
    simulation: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, rates, close = small(0), set[float](), Scrubber.close

    def closes(scrubber: Scrubber) -> None:
        rates.add(scrubber._pacer.rate)
        close(scrubber)

    monkeypatch.setattr(Scrubber, "close", closes)
    assert not play(plan).violations
    assert rates == {SCRUB.value({}) / plan.scale} and plan.scale > 1


def test_a_case_keeps_its_costs(tmp_path: Path) -> None:
    case = Case("calm", draw_sized(3), Deviations())
    case.write(tmp_path / "case.json")
    assert read_case(tmp_path / "case.json") == case
    assert set(PROMPT) <= set(CHECKS)


def test_the_command_runs_seeds_of_real_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--sized", "--first", "11", "--seeds", "1"]) == 0
    assert "1 seeds from 11: 0 " in capsys.readouterr().out
