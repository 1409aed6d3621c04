"""The default interval in real jobs: all ranks have one, which follows the steps; restarts know of failures."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from holdfast.chaos.cluster import History, VirtualCluster
from holdfast.chaos.launcher import Launcher
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.settings import EVERY, MTBF
from holdfast.snapshot.interval.rule import SHORTEST
from holdfast.snapshot.options import Options

BUDGET = 0.06
COST_S = 0.1
"""With these, a job of ten minutes may take one snapshot in 1.7 s; a younger one takes more."""


def run(
    launcher: Launcher, steps: int, slower_at: int, mtbf: str, budget: float = BUDGET, kill: int | None = None
) -> History:
    args: dict[str, Any] = {"steps": steps, "slower_at": slower_at, "quick_s": 0.05, "slow_s": 0.15, "cost_s": COST_S}
    args |= {"budget": budget, "mtbf": mtbf}
    cluster = VirtualCluster(launcher, nodes=2, ranks_per_node=1, target="tests.jobs:paced", args=args)
    if kill is not None:
        cluster.kill_trainer(1, at="train.step", step=kill)
    return cluster.run()


@pytest.mark.cluster
@pytest.mark.slow  # trains until the interval has followed; `test_interval` tests this without waiting
def test_the_interval_follows_steps_that_take_three_times_as_long(launcher: Launcher) -> None:
    """Young's interval for 0.1 s and two nodes that fail once in 20 s is 1.4 s: 28 steps of 50 ms, 9 of 150 ms."""
    first, second = sorted(run(launcher, 500, 380, "20s", 0).of("end"), key=lambda end: end["rank"])
    assert first["taken"] == second["taken"]  # although each rank measured for itself
    assert first["taken"][0] == 1
    assert first["before"] == pytest.approx(28, rel=0.35)
    assert first["after"] <= 0.6 * first["before"]  # ideally a third; other load on the machine disturbs it
    assert any(f"every {SHORTEST} steps" in line for line in first["logged"])
    assert not second["logged"]  # logged once for the job
    assert "loses least" in first["why"]
    (said,) = first["shown"]
    assert said.startswith("a snapshot every ") and "one costs" in said


@pytest.mark.proves("young")
@pytest.mark.cluster
def test_a_young_job_is_dense_until_its_budget_and_a_restart_counts_as_a_failure(launcher: Launcher) -> None:
    history = run(launcher, 120, 1000, "1000d", kill=110)
    taken = [event["step"] for event in history.of("step", generation=0, rank=0) if event["taken"]]
    assert taken[0] == 1
    assert all(later - earlier <= max(4, 0.25 * later) for earlier, later in pairwise(taken))
    assert taken[-1] - taken[-2] >= 6  # a tenth of what was done
    starts = history.of("started", generation=1)
    assert len(starts) == 2
    for start in starts:
        assert start["failures"] == 1
        assert start["step"] >= taken[-2]
    assert not history.leaks


def test_a_wrong_mtbf_is_refused_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MTBF.variable, "0s")
    with pytest.raises(ConfigError, match="HOLDFAST_MTBF: '0s': give 1 s or more"):
        Options(job="job", every="auto")


def test_the_environment_sets_the_interval_and_an_argument_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EVERY.variable, "7")
    assert (Options(job="job").every, Options(job="job", every=3).every) == (7, 3)
    monkeypatch.delenv(EVERY.variable)
    assert Options(job="job").every == "auto"
