"""Snapshots on storage, end to end: real trainers and SMPs, every memory lost, and the same bits come back."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.cluster import Event, History, VirtualCluster
from chaos.drill import TARGET, compare
from chaos.launcher import Launcher
from smp_daemon.paths import arena_base
from smp_daemon.persist.place import Directory
from smp_daemon.persist.reading import find

pytestmark = pytest.mark.cluster
STEPS, SEED, NODES = 40, 5, 3
JOB = "persisted"


@pytest.fixture
def place() -> Iterator[Path]:
    """On tmpfs, so that what the cluster writes to disk is still nothing."""
    base = arena_base()
    base.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = Path(tempfile.mkdtemp(prefix="place-", dir=base))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def undisturbed(launcher: Launcher) -> History:
    return make(launcher, snapshots=False).run()


def make(
    launcher: Launcher,
    place: Path | None = None,
    *,
    snapshots: bool = True,
    on_event: Callable[[Event], None] | None = None,
    keep: int = 2,
    **hook: Any,
) -> VirtualCluster:
    args = {"job": "holdfast.workload:Workload", "seed": SEED, "steps": STEPS, "snapshots": snapshots}
    tier = {"HOLDFAST_PERSIST": str(place), "HOLDFAST_PERSIST_EVERY": "0.1", "HOLDFAST_PERSIST_KEEP": str(keep)}
    return VirtualCluster(
        launcher,
        nodes=NODES,
        ranks_per_node=1,
        target=TARGET,
        args={**args, "hook": hook, "drain": True},
        job=JOB,
        smps=snapshots,
        deadline_s=90,
        on_event=on_event,
        environment=tier if place else None,
    )


def whole(place: Path) -> list[int]:
    """The steps that are persisted, the newest first."""
    return [found.snapshot.step for found in find(Directory(place), JOB) if found.manifest is not None]


def test_a_job_that_loses_every_node_goes_on_from_what_was_persisted(
    launcher: Launcher, place: Path, undisturbed: History
) -> None:
    cluster = make(launcher, place)
    cluster.kill_node(0, 1, 2, at="persist.done", by="smp0")
    history = cluster.run()
    started = history.of("started", generation=1)
    (persisted,) = {event["step"] for event in history.of("fault")}
    assert [(e["step"], e["tier"], e["how"]) for e in started] == [(persisted, "persisted", "persisted")] * NODES
    assert compare(undisturbed, history) == ""
    assert history.leaks == []
    assert history.tracebacks == []


def test_without_the_tier_it_begins_anew(launcher: Launcher, undisturbed: History) -> None:
    cluster = make(launcher)
    cluster.kill_node(0, 1, 2, at="train.step", step=6)
    history = cluster.run()
    assert [(e["step"], e["tier"]) for e in history.of("started", generation=1)] == [(0, "")] * NODES
    assert compare(undisturbed, history) == ""


def test_more_than_parity_covers_is_made_up_for_loudly(launcher: Launcher, place: Path, undisturbed: History) -> None:
    cluster = make(launcher, place)
    cluster.kill_node(1, 2, at="persist.done", by="smp0")
    history = cluster.run()
    started = history.of("started", generation=1)
    (persisted,) = {event["step"] for event in history.of("fault")}
    assert [(e["step"], e["tier"]) for e in started] == [(persisted, "persisted")] * NODES
    assert all("was protected, and too much of it is lost" in e["passed_over"][0] for e in started)
    assert compare(undisturbed, history) == ""
    assert history.leaks == []
