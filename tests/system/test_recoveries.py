"""What operators are told about recoveries and events: by one SMP, for a whole job, in words and on the page."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.cli.status import recovery_line
from holdfast.smp_daemon.ops.overview import look
from holdfast.smp_daemon.ops.status import Status
from holdfast.smp_daemon.recovery.recoveries import KEPT, Recoveries, Recovery, summarise
from holdfast.smp_daemon.shared.board import TrainerPhase
from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.logs import EVENTS_KEPT, MAX_EVENT_CHARACTERS, LogEvent, get_log, last_events, log_to
from holdfast.smp_daemon.shared.plain import decode_json, encode_json
from tests.deadlines import DEADLINE_S, await_that
from tests.proof.chaos.network import clocks
from tests.smp_kit import JOB, Ground, Trainer
from tests.system.test_regroup import come_back

NEWEST = SnapshotId(1, 8)


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float) -> Clock:
        self.now += seconds
        return self


def gone_through(found: Recoveries, clock: Clock, epoch: int = 2) -> None:
    found.lost("dp0")
    clock.after(0.5)
    found.lost("dp1")
    clock.after(1.0)
    found.joined(epoch)
    clock.after(0.25)
    found.restored(epoch, NEWEST, "dp0", "held", 0)
    clock.after(0.25)
    found.restored(epoch, NEWEST, "dp1", "rebuilt", 4000)
    clock.after(0.5)
    found.trains(NEWEST.step)
    clock.after(2.0)
    found.trains(9)
    found.sealed(SnapshotId(epoch, 9))
    clock.after(0.125)
    found.protected(SnapshotId(epoch, 9))
    clock.after(5.0)
    found.trains(10)
    found.sealed(SnapshotId(epoch, 10))
    found.protected(SnapshotId(epoch, 10))


def test_every_part_of_a_recovery_is_timed() -> None:
    clock = Clock()
    found = Recoveries(clock)
    gone_through(found, clock)
    (recovery,) = found.last()
    assert recovery.spans == [("detect", 0.5), ("restart", 1.0), ("load", 1.0), ("first step", 2.0)]
    assert (recovery.seconds, recovery.protect_s) == (4.5, 0.125)
    assert (recovery.coords, recovery.step, recovery.bytes_fetched) == (("dp0", "dp1"), 8, 4000)
    assert dict(recovery.how) == {"dp0": "held", "dp1": "rebuilt"}
    assert decode_json(Recovery, encode_json(recovery), "") == recovery


def test_a_node_that_is_silent_by_then_was_lost_when_it_was_last_heard_of() -> None:
    clock, silent = Clock(), [60.0]
    found = Recoveries(clock, lambda: silent[0])
    gone_through(found, clock)
    silent[0] = 0.0
    gone_through(found, clock, 3)
    newest, before = found.last()
    assert (before.spans[0], before.seconds) == (("detect", 60.5), 64.5)
    assert newest.seconds == 4.5


def test_a_start_that_ends_before_its_first_step_is_part_of_the_recovery() -> None:
    clock = Clock()
    found = Recoveries(clock)
    found.lost("dp0")
    clock.after(3.0)
    found.joined(2)
    found.restored(2, NEWEST, "dp0", "held", 0)
    found.trains(NEWEST.step)
    clock.after(4.0)
    gone_through(found, clock, 3)
    (recovery,) = found.last()
    assert recovery.coords == ("dp0", "dp1")
    assert recovery.seconds == 3.0 + 4.0 + 4.5


def test_a_trainer_that_only_connects_again_is_not_lost() -> None:
    clock = Clock()
    found = Recoveries(clock)
    found.lost("dp0")
    found.goes_on("dp0")
    clock.after(3600.0)
    gone_through(found, clock)
    assert found.last()[0].seconds == 4.5


def test_a_first_start_is_none_and_the_oldest_are_forgotten() -> None:
    clock = Clock()
    found = Recoveries(clock)
    found.joined(1)
    found.trains(1)
    found.sealed(SnapshotId(1, 1))
    found.protected(SnapshotId(1, 1))
    assert found.last() == []
    for epoch in range(2, 5 + KEPT):
        gone_through(found, clock, epoch)
    assert [each.epoch for each in found.last()] == list(range(4 + KEPT, 3, -1))


def test_what_is_late_is_not_taken_for_the_new_epochs() -> None:
    clock = Clock()
    found = Recoveries(clock)
    gone_through(found, clock)
    found.joined(3)
    found.restored(2, NEWEST, "dp0", "held", 0)
    found.sealed(SnapshotId(2, 11))
    assert [each.epoch for each in found.last()] == [2]
    found.restored(3, NEWEST, "dp0", "held", 0)
    found.protected(SnapshotId(2, 11))
    (now, _) = found.last()
    assert (now.epoch, now.lost, now.stepped, now.protected) == (3, 0.0, 0.0, 0.0)


def test_a_job_is_summed_up_with_the_slowest_nodes_first() -> None:
    one = Recovery(2, joined=10.0, lost=8.5, ended=9.0, coords=("dp0",), step=8, restored=11.0, stepped=12.0)
    one = replace(one, protected=12.5)
    other = replace(one, lost=0.0, ended=0.0, coords=())
    nodes = {f"node{i}": [replace(other, stepped=0.0 if i == 7 else 12.0)] for i in range(1, 12)}
    (found,) = summarise({"node0": [one], **nodes})
    assert (found["seconds"], found["done"], found["others"], len(found["nodes"])) == (3.5, False, 4, 8)
    assert found["protect_s"] is None, "not known of every node"
    assert summarise({"node0": [one], "node1": [other]})[0]["protect_s"] == 0.5
    assert found["nodes"][0] == {
        "node": "node0",
        "lost": ("dp0",),
        "how": [],
        "bytes_fetched": 0,
        "spans": [["detect", 0.5], ["restart", 1.0], ["load", 1.0], ["first step", 1.0]],
    }
    assert re.match(r"epoch 2 .*step 8.* 3.50 s .*\(node0: detect 0.50, restart 1.00,", recovery_line(found))


def test_real_smps_tell_of_a_lost_node(ground: Ground) -> None:
    smps, run = ground.job([[3000], [3001], [3002]], protect="2+1")
    run.protect(1)
    assert look(JOB, smps[0].control).recoveries == []
    smps[1].lose()
    come_back(run, smps, [1])
    found = look(JOB, smps[1].control)  # no layout names this SMP yet
    (recovery,) = found.recoveries
    assert (recovery["epoch"], recovery["step"], recovery["done"]) == (2, 1, False)
    how = {each["node"]: each["how"] for each in recovery["nodes"]}
    assert how == {"node0": ["held"], "node1": ["rebuilt"], "node2": ["held"]}
    assert recovery["bytes_fetched"] > 0
    assert all([name for name, _ in each["spans"]] == ["load"] for each in recovery["nodes"])
    for status in found.statuses:
        assert Status.read(json.loads(json.dumps(status.to_plain()))) == status
    assert found.events
    assert [event.at for _, event in found.events] == sorted((event.at for _, event in found.events), reverse=True)


@pytest.mark.parametrize("how", ["killed", "by an exception"])
def test_the_end_of_a_trainer_of_whatever_kind_begins_it(ground: Ground, how: str) -> None:
    [smp], run = ground.job([[3000]])
    run.protect(1)
    train_and_end(smp.arena, smp.job, how)
    again = Trainer(smp, "dp0", 3000)
    again.client.join(2)
    again.recover(run.plan(again.client.inventory()))
    watched = SmpClient(smp.arena, smp.job, "dp0")
    watched.join(2)
    for step in (1, 2):
        watched.heartbeat(TrainerPhase.STEP, step)
    await_that(lambda: look(JOB, smp.control).recoveries[0]["done"])
    (recovery,) = look(JOB, smp.control).recoveries
    watched.close()
    (node,) = recovery["nodes"]
    assert node["lost"] == ("dp9",)
    assert [name for name, _ in node["spans"]] == ["detect", "restart", "load", "first step"]


@pytest.mark.skipif(bool(clocks.unavailable()), reason=clocks.unavailable() or "-")
def test_a_clock_that_is_set_meanwhile_makes_it_no_longer(
    ground: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ground, "zygote", None)
    for name, value in (clocks.compile_shim(tmp_path) | {clocks.ENV: str(tmp_path / "clock")}).items():
        monkeypatch.setenv(name, value)
    clocks.set_clock(tmp_path / "clock", 0)
    [smp], run = ground.job([[3000]])
    run.protect(1)
    train_and_end(smp.arena, smp.job, "killed")
    await_that(lambda: run["dp0"].client.inventory().trainers == 1)
    clocks.set_clock(tmp_path / "clock", 3600)
    come_back(run, [smp], [])
    (recovery,) = look(JOB, smp.control).recoveries
    assert recovery["nodes"][0]["lost"] == ("dp9",)
    assert recovery["seconds"] < 3600


def train_and_end(arena: Path, job: str, how: str) -> None:
    """Run a trainer of the job's first epoch in a process of its own until it ends."""
    ends = {
        "killed": "os.kill(os.getpid(), signal.SIGKILL)",
        "by an exception": "client.ended('dp9', TrainerEnd(3, failure_text(RuntimeError('connection closed by peer'))))"
        "; client.close()",
    }
    script = (
        "import os, signal, sys; from pathlib import Path; from holdfast.smp_daemon.shared.board import TrainerPhase; "
        "from holdfast.smp_daemon.shared.client import SmpClient; "
        "from holdfast.smp_daemon.shared.starts import TrainerEnd, failure_text; "
        "client = SmpClient(Path(sys.argv[1]), sys.argv[2], 'dp9'); client.join(1); "
        f"client.heartbeat(TrainerPhase.STEP, 3); {ends[how]}"
    )
    subprocess.run([sys.executable, "-c", script, str(arena), job], check=False, timeout=DEADLINE_S)


def test_the_last_lines_of_the_log_are_kept_short(tmp_path: Path) -> None:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    root.handlers.clear()
    try:
        log_to(tmp_path / "log")
        for i in range(EVENTS_KEPT + 3):
            get_log("smp_daemon.test").warning("event %d %s", i, "x" * 1000)
        found = last_events()
        for handler in root.handlers:
            if handler not in before:
                handler.close()
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    assert [event.text.split()[1] for event in found] == [str(i) for i in range(EVENTS_KEPT + 2, 2, -1)]
    assert {len(event.text) for event in found} == {MAX_EVENT_CHARACTERS}
    assert decode_json(LogEvent, encode_json(found[0]), "") == found[0]
