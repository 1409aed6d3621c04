"""The cost of failures: every second of a run with kills is accounted for."""

from __future__ import annotations

from statistics import fmean

import pytest

from holdfast.chaos.cluster import History, Restart
from holdfast.chaos.faults import Fault
from holdfast.chaos.launcher import Launcher
from holdfast.smp_daemon.shared.errors import ConfigError
from tests.proof.overhead import TimedJob, account, baseline_step, kills, run


def history() -> History:
    """20 steps of a second, a snapshot every 4; killed in the middle of step 11, 3 s to restart, from step 8."""
    found = History()

    def steps(generation: int, first: int, last: int, start_s: float) -> None:
        for number, step in enumerate(range(first, last + 1), 1):
            at = start_s + number
            found.events.append({"kind": "step", "rank": 0, "generation": generation, "step": step, "at": at})

    found.events.append({"kind": "started", "rank": 0, "generation": 0, "step": 0, "at": 99.0})
    steps(0, 1, 10, 100.0)
    found.events.append({"kind": "started", "rank": 0, "generation": 1, "step": 8, "at": 112.5})
    steps(1, 9, 20, 113.5)
    found.restarts.append(Restart([Fault("rank0", "train.step", 11, "lose-node", (0,))], 110.5, 110.6, 111.0))
    return found


def test_each_second_is_useful_lost_or_waited_for() -> None:
    took = account(history(), 1.0)
    assert took.useful == 20.0
    assert took.losses == (2.5,)  # steps 9 and 10, and half of 11
    assert took.restarts == pytest.approx((3.0,))
    assert took.copying == pytest.approx(0.0)
    assert took.nodes == (True,)
    assert took.wasted == pytest.approx(5.5 / 20)
    slower = account(history(), 0.9)
    assert slower.copying == pytest.approx(20 * 0.1 + 2 * 0.1 - 0.1, abs=0.11)


def test_kills_are_as_many_as_was_asked_for_and_never_in_the_same_step() -> None:
    counts = [len(kills(seed, 2000, 50.0)) for seed in range(20)]
    assert fmean(counts) == pytest.approx(40, rel=0.15)
    found = kills(3, 2000, 3.0)
    assert len(set(found)) == len(found)
    assert kills(3, 2000, 3.0) == found != kills(4, 2000, 3.0)


def test_without_baseline_steps_there_is_no_baseline_step() -> None:
    with pytest.raises(ConfigError, match="no baseline step"):
        baseline_step(history(), 2)
    assert baseline_step(history(), 0) == pytest.approx(1.0)


@pytest.mark.cluster
def test_a_job_that_is_really_killed_is_accounted_for(launcher: Launcher) -> None:
    job = TimedJob(compute_s=0.02, width=64)
    found = run(launcher, job, steps=40, every=4, strikes=(15, 26), lose_every=2)
    took = account(found, baseline_step(found, 4))
    assert took.nodes == (False, True)
    assert len(took.losses) == len(took.restarts) == 2
    assert all(0 < loss <= 9 * max(0.02, took.useful / 40) + 1 for loss in took.losses)
    assert all(0 < restart < 60 for restart in took.restarts)
    assert not found.leaks
