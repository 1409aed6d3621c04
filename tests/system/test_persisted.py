"""Snapshots on storage, end to end: real trainers and SMPs lose all memory, and the same bits come back."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.chaos.cluster import TARGET, History, JobFailed
from holdfast.chaos.differences import compare
from holdfast.chaos.launcher import Launcher
from holdfast.chaos.runner import Event
from holdfast.smp_daemon.persist.manifest import folder, shard_name
from holdfast.smp_daemon.persist.place import Directory
from holdfast.smp_daemon.persist.reading import find_runs
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.paths import arena_base
from tests.proof.chaos.cluster import ChaosCluster
from tests.smp_kit import flip_a_byte

pytestmark = pytest.mark.cluster
STEPS, SEED, NODES = 20, 5, 3
JOB = "persisted"
WAITS = [[6, 1], [10, 2], [14, 3]]
"""Pairs of a step and a count: in the middle of the step the job waits until that many snapshots are persisted and none
is being persisted."""
LOST_AT = 14


@pytest.fixture
def place() -> Iterator[Path]:
    """A place on tmpfs, so that the cluster still writes nothing to disk."""
    base = arena_base()
    base.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = Path(tempfile.mkdtemp(prefix="place-", dir=base))
    yield path
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()  # a test put a file in its place


@pytest.fixture(scope="module")
def undisturbed(launcher: Launcher) -> History:
    return make(launcher, None).run()


def make(
    launcher: Launcher,
    place: Path | None,
    *,
    on_event: Callable[[Event], None] = lambda event: None,
    keep: int = 2,
    waits: list[list[int]] = WAITS,
) -> ChaosCluster:
    """A job on three nodes; without a place it is the undisturbed one, and takes no snapshots."""
    args = {"job": "tests.jobs:Persisting", "seed": SEED, "steps": STEPS, "snapshots": place is not None}
    tier = {"HOLDFAST_PERSIST": str(place), "HOLDFAST_PERSIST_EVERY": "100ms", "HOLDFAST_PERSIST_KEEP": str(keep)}
    return ChaosCluster(
        launcher,
        nodes=NODES,
        ranks_per_node=1,
        target=TARGET,
        args={**args, "options": {"waits": waits}, "drain": True},
        job=JOB,
        smps=place is not None,
        deadline_s=90,
        on_event=on_event,
        environment=tier if place else None,
    )


def whole(place: Path) -> list[SnapshotId]:
    """The persisted snapshots, newest first."""
    runs = find_runs(Directory(place), JOB)
    return [found.snapshot for run in runs for found in run.snapshots if found.manifest is not None]


def shard(place: Path, snapshot: SnapshotId, rank: int) -> Path:
    (run,) = find_runs(Directory(place), JOB)
    return place / folder(JOB, run.run.id, snapshot) / shard_name(f"dp{rank}")


def starts(history: History, generation: int = 1) -> set[tuple[int, str, str]]:
    """The step, tier and source from which each rank started."""
    return {(e["step"], e["tier"], e["how"]) for e in history.of("started", generation=generation)}


@pytest.mark.proves("storage")
def test_a_job_that_loses_every_node_goes_on_from_what_was_persisted(
    launcher: Launcher, place: Path, undisturbed: History
) -> None:
    there: list[SnapshotId] = []

    def look(event: Event) -> None:
        if event["kind"] == "fault":
            there.extend(whole(place))

    cluster = make(launcher, place, on_event=look)
    cluster.kill_node(0, 1, 2, at="train.step", step=LOST_AT)
    history = cluster.run()
    assert len(there) == 2  # of three, and the newest are kept
    assert starts(history) == {(there[0].step, "persisted", "persisted")}
    assert compare(undisturbed, history) == ""
    assert history.leaks == []
    assert history.tracebacks == []
    assert history.disk_bytes_written == 0
    assert whole(place)[0] > there[0]  # it continued to persist, in a newer epoch


def test_damaged_ones_are_passed_over_down_to_one_that_is_whole(
    launcher: Launcher, place: Path, undisturbed: History
) -> None:
    there: list[SnapshotId] = []

    def damage(event: Event) -> None:
        if event["kind"] == "fault":
            there.extend(whole(place))
            newest, second = shard(place, there[0], 1), shard(place, there[1], 2)
            newest.write_bytes(newest.read_bytes()[:-1])
            flip_a_byte(second, at=second.stat().st_size // 2)

    cluster = make(launcher, place, on_event=damage, keep=3)
    cluster.kill_node(0, 1, 2, at="train.step", step=LOST_AT)
    history = cluster.run()
    assert starts(history) == {(there[2].step, "persisted", "persisted")}
    (reasons,) = {tuple(sorted(e["passed_over"])) for e in history.of("started", generation=1) if e["rank"] == 2}
    assert any(str(there[0]) in reason and "dp1.safetensors has" in reason for reason in reasons)
    assert any(str(there[1]) in reason and "is damaged: unit" in reason for reason in reasons)
    assert compare(undisturbed, history) == ""


@pytest.mark.proves("memory-before-storage")
def test_more_than_parity_covers_is_made_up_for(launcher: Launcher, place: Path, undisturbed: History) -> None:
    cluster = make(launcher, place)
    cluster.kill_node(1, 2, at="train.step", step=LOST_AT)
    history = cluster.run()
    restored = starts(history)
    assert {tier for _, tier, _ in restored} == {"persisted"}
    assert "persisted" in {how for _, _, how in restored}  # the remaining node may still hold its shard
    ((step, *_), *_) = restored
    assert {each for each, _, _ in restored} == {step}
    assert step < LOST_AT
    for event in history.of("started", generation=1):
        assert "was protected, and too much of it is lost" in event["passed_over"][0]
    assert compare(undisturbed, history) == ""
    assert history.leaks == []


@pytest.mark.proves("memory-before-storage")
def test_what_memory_still_has_is_taken_first(launcher: Launcher, place: Path, undisturbed: History) -> None:
    cluster = make(launcher, place)
    cluster.kill_node(1, at="train.step", step=LOST_AT)
    cluster.kill_trainer(0, at="train.step", step=LOST_AT + 2)
    history = cluster.run()
    assert {(e["tier"], e["passed_over"] == []) for e in history.of("started", generation=1)} == {("group", True)}
    assert {(e["tier"], e["how"]) for e in history.of("started", generation=2)} == {("local", "held")}
    assert compare(undisturbed, history) == ""


def test_storage_that_cannot_be_seen_is_no_reason_to_begin_anew(launcher: Launcher, place: Path) -> None:
    def break_it(event: Event) -> None:
        if event["kind"] == "fault":
            shutil.rmtree(place)
            place.write_text("in the way")

    cluster = make(launcher, place, on_event=break_it)
    cluster.kill_node(0, 1, 2, at="train.step", step=LOST_AT)
    with pytest.raises(JobFailed, match=r"PlaceError: .*nothing to go back to"):
        cluster.run()
