"""``every="auto"`` in real jobs: all ranks have one interval, which follows the steps; restarts know of failures."""

from __future__ import annotations

import pytest

from holdfast.chaos.cluster import History, VirtualCluster
from holdfast.chaos.launcher import Launcher
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.snapshot.interval.policy import MTBF_ENV
from holdfast.snapshot.options import Options

BUDGET = 0.06
COST_S = 0.1
"""With these, one snapshot in 1.7 s is within the budget: every 33 steps of 50 ms, every 11 of 150 ms."""


def run(launcher: Launcher, steps: int, slower_at: int, kill: int | None = None) -> History:
    args = {"steps": steps, "slower_at": slower_at, "quick_s": 0.05, "slow_s": 0.15, "cost_s": COST_S, "budget": BUDGET}
    cluster = VirtualCluster(launcher, nodes=2, ranks_per_node=1, target="tests.jobs:paced", args=args)
    if kill is not None:
        cluster.kill_trainer(1, at="train.step", step=kill)
    return cluster.run()


@pytest.mark.cluster
@pytest.mark.slow  # trains until the interval has followed; `test_tuning_online` tests this without waiting
def test_the_interval_follows_steps_that_take_three_times_as_long(launcher: Launcher) -> None:
    first, second = sorted(run(launcher, 390, 260).of("end"), key=lambda end: end["rank"])
    assert first["taken"] == second["taken"]  # although each rank measured for itself
    assert first["before"] > 4  # the initial interval
    assert first["after"] <= 0.8 * first["before"]  # ideally a third; other load on the machine disturbs it
    assert max(first["overhead"], second["overhead"]) <= 1.25 * BUDGET
    assert all("snapshots every" in line for line in first["logged"])
    assert any(f"snapshots every {first['after']} steps" in line for line in first["logged"])
    assert not second["logged"]  # logged once for the job
    assert "a step takes" in first["why"]
    (said,) = first["shown"]
    assert said.startswith("a snapshot every ")
    assert "a step takes" in said


@pytest.mark.cluster
def test_a_restart_goes_on_with_the_interval_and_counts_the_failure(launcher: Launcher) -> None:
    history = run(launcher, 120, 1000, kill=110)
    starts = history.of("started", generation=1)
    assert len(starts) == 2
    for start in starts:
        (then,) = history.of("step", generation=0, rank=start["rank"], step=start["step"])
        assert start["failures"] == 1
        assert start["interval"] == then["interval"] > 4
    assert not history.leaks


def test_a_wrong_mtbf_or_interval_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="every='often': a snapshot is taken every 1 or more steps, or 'auto'"):
        Options(job="job", every="often")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="every=0"):
        Options(job="job", every=0)
    monkeypatch.setenv(MTBF_ENV, "soon")
    with pytest.raises(ConfigError, match="HOLDFAST_MTBF: 'soon' is not a time"):
        Options(job="job", every="auto")
    monkeypatch.setenv(MTBF_ENV, "0s")
    with pytest.raises(ConfigError, match="HOLDFAST_MTBF='0s': give more than 0"):
        Options(job="job", every="auto")
