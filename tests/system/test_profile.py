"""``holdfast profile``: a real job under torchrun records what its snapshots cost, and ``holdfast plan`` takes it."""

from __future__ import annotations

import json
import os
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast import ConfigError, HoldfastError
from holdfast.cli.main import main
from holdfast.cli.profile import ProfilePlan, run
from holdfast.planner.measured import Measured
from holdfast.planner.recorder import merge
from holdfast.smp_daemon.shared.board import SnapshotOutcome
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.paths import arena_base
from holdfast.smp_daemon.shared.plain import decode_json, encode_json
from holdfast.snapshot.interval.control import IntervalController
from holdfast.snapshot.interval.recording import (
    LEAST,
    Location,
    RankRecording,
    Recording,
    RecordingOrders,
    Timing,
)
from holdfast.snapshot.step.orders import Due
from tests.deadlines import DEADLINE_S

SCRIPT = """
import os, sys
import torch, torch.distributed as dist
from holdfast import InMemorySnapshot

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
os.environ["HOLDFAST_NODE"] = f"node{rank}"
os.environ["HOLDFAST_ARENA"] += f"/node{rank}"
torch.manual_seed(rank)
model = torch.nn.Linear(256, 512)
optim = torch.optim.Adam(model.parameters())
with InMemorySnapshot(model, optim, protect="copies:1") as snap:
    assert snap.step == 0
    for step in range(int(sys.argv[1])):
        loss = model(torch.randn(64, 256)).square().mean()
        optim.zero_grad(); loss.backward(); dist.all_reduce(loss.detach()); optim.step()
print("trained to the end", flush=True)
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    return (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script))


@pytest.mark.needs("torch")
@pytest.mark.cluster
def test_a_job_of_two_nodes_is_profiled_ended_and_tuned(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "profile.json"
    assert main(["profile", "-o", str(file), "--steps", "12", "--deadline", "2min", "--", *command, "1000000"]) == 0
    printed = capsys.readouterr().out
    assert "on 2 nodes, protect 1+1" in printed
    measured = Measured.from_json(json.loads(file.read_text()))
    state = 3 * (256 * 512 + 512) * 4  # weights and two moments
    assert state <= measured.state_bytes <= state + 65536
    assert measured.quiet_steps + measured.busy_steps >= 12
    assert min(measured.quiet_steps, measured.busy_steps, measured.snapshots) >= 2
    assert measured.snapshots <= measured.busy_steps
    assert 0 < measured.step_s < 10
    assert min(measured.stall_s, measured.copy_s, measured.seal_s, measured.encode_s) > 0
    assert measured.step_sd_s is not None
    assert measured.interference is not None and f"{measured.interference:.1%}" in printed
    assert not list(arena_base().glob(f".profile-{os.getpid()}-*"))
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []
    tuned = tmp_path / "tune.json"
    assert main(["plan", "--profile", str(file), "--json", str(tuned)]) == 0
    assert json.loads(tuned.read_text())["interval_steps"] >= 1


@pytest.mark.needs("torch")
@pytest.mark.cluster
def test_a_job_that_is_too_short_is_told(command: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(HoldfastError, match=r"before 40 steps"):
        run(ProfilePlan((*command, "10"), tmp_path / "profile.json", deadline_s=120))
    assert not (tmp_path / "profile.json").exists()
    assert not list(arena_base().glob(f".profile-{os.getpid()}-*"))


def test_a_job_that_fails_is_reported_with_what_it_said(tmp_path: Path) -> None:
    failing = (sys.executable, "-c", "import sys; print('no such corpus'); sys.exit(3)")
    with pytest.raises(HoldfastError, match=r"(?s)status 3.*such corpus"):
        run(ProfilePlan(failing, tmp_path / "profile.json"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"command": ()}, "no command given"),
        ({"steps": 3}, "--steps 3: record 4 or more"),
    ],
)
def test_an_impossible_profile_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options: dict[str, Any] = {"command": ("true",), "output": Path("profile.json")}
        ProfilePlan(**(options | arguments))


# ---------------------------------------------------------------------- what is recorded


def record(steps: int, span: int, slots: int = 3) -> tuple[Recording, list[int]]:
    """Record a simulated job whose snapshots keep `span` steps busy; also return after which steps they were taken."""
    recording = Recording(RecordingOrders("", 1), slots, lambda snapshot: SnapshotOutcome.PROTECTED)
    intervals = IntervalController("auto", 0.01, 1, recording, step=None, notes={})
    taken: list[int] = []
    left, now_s, stalled_s = 0, 0.0, 0.0
    for step in range(1, steps + 1):
        now_s += 1.5 if left else 1.0
        stalled_s += 0.25 if left else 0.0
        intervals.observe(step, now_s, stalled_s, bool(left))
        left = max(0, left - 1)
        intervals.agree(intervals.wanted())
        if intervals.rule.is_due(step, True):
            intervals.begun(step, True)
            taken.append(step)
            left = span
    recording.close(DEADLINE_S)
    return recording, taken


@pytest.mark.parametrize("span", [1, 3])
def test_snapshots_alternate_with_quiet_steps(span: int) -> None:
    recording, taken = record(60, span)
    assert {later - earlier for earlier, later in pairwise(taken)} == {span + 1}
    assert set(recording.baseline) == {1.0}
    assert set(recording.overlapped) == {1.5}
    assert abs(len(recording.overlapped) - span * len(recording.baseline)) <= span
    assert next(iter(recording.stalls)) > taken[3]  # by then every slot had been written once
    assert set(list(recording.stalls.values())[:-1]) == {0.25 * span}


def test_where_snapshots_keep_many_steps_busy_enough_of_them_are_waited_for() -> None:
    first = next(found for steps in range(1, 120) if (found := record(steps, 9, slots=2)[0]).over)
    assert len(first.baseline) + len(first.overlapped) == LEAST * 10


def test_only_what_becomes_protected_is_timed() -> None:
    outcomes = {SnapshotId(1, 4): SnapshotOutcome.PROTECTED, SnapshotId(1, 6): SnapshotOutcome.FAILED}
    recording = Recording(RecordingOrders("", 1), 3, outcomes.__getitem__)
    for due in (Due(SnapshotId(1, 4)), Due(SnapshotId(1, 6)), Due(SnapshotId(1, 8), encode=False)):
        copy: Any = SimpleNamespace(
            snapshot=due.snapshot, order=SimpleNamespace(due=due), error=None, begun_s=1.0, filled_s=1.5, sealed_s=1.75
        )
        recording.sealed(copy)
    recording.close(DEADLINE_S)
    [timing] = recording.timings
    assert (timing.step, timing.copy_s, timing.seal_s) == (4, 0.5, 0.25) and timing.encode_s > 0


def part(node: str, shard: int, copy_s: float, more: tuple[int, ...] = ()) -> RankRecording:
    timings = [Timing(step, copy_s, 0.1, 0.4) for step in (4, 6, *more)]
    return RankRecording(Location(node, shard, 3, 1, 1), [1.0, 1.2], [1.5, 1.7, 1.6], {4: 0.1, 6: 0.3, 8: 0.2}, timings)


def test_parts_are_merged_by_the_slowest_rank_and_the_largest_node() -> None:
    measured = merge([part("a", 100, 0.2, (8,)), part("a", 50, 0.3), part("b", 120, 0.1)])
    assert (measured.state_bytes, measured.nodes) == (150, 2)
    assert (measured.step_s, measured.snapshot_step_s) == pytest.approx((1.1, 1.6))
    assert (measured.copy_s, measured.seal_s, measured.encode_s) == pytest.approx((0.3, 0.1, 0.4))
    assert (measured.quiet_steps, measured.busy_steps, measured.snapshots) == (2, 3, 3)
    assert measured.visible_s() == pytest.approx(0.5)


def test_too_little_is_no_profile() -> None:
    nothing = RankRecording(Location("a", 1, 3, 0, 0))
    with pytest.raises(ConfigError, match="0 baseline steps"):
        merge([nothing])


def test_a_part_survives_json() -> None:
    one = part("a", 100, 0.2)
    assert decode_json(RankRecording, encode_json(one), "") == one
