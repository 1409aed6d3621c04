"""Jobs that go on with fewer ranks, and with more again, on real processes: the same tensors, whole, bit for bit."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.cluster import History, VirtualCluster
from chaos.launcher import Launcher
from smp_daemon.spawn import find_leftovers, remove

pytestmark = pytest.mark.cluster


class Fleet:
    """Nodes whose SMPs outlive each run of the job; `run` starts one rank on each of the first so many."""

    def __init__(self, launcher: Launcher, base: Path, kind: str, **options: Any) -> None:
        self._launcher = launcher
        self._base = base
        self._args = {"kind": kind, "options": options, "arena": str(base)}

    def run(
        self, ranks: int, steps: int, *, elastic: bool = True, faults: Callable[[VirtualCluster], None] | None = None
    ) -> History:
        cluster = VirtualCluster(
            self._launcher,
            nodes=ranks,
            ranks_per_node=1,
            target="tests.elastic_jobs:train",
            args={**self._args, "steps": steps, "elastic": elastic},
            job="elastic",
            smps=False,
            deadline_s=90,
        )
        if faults is not None:
            faults(cluster)
        return cluster.run()

    def lose(self, node: int) -> None:
        (lost,) = [left for left in find_leftovers(self._base) if left.arena.parent.name == f"node{node}"]
        remove(lost)


@pytest.fixture
def fleet(launcher: Launcher) -> Iterator[Callable[..., Fleet]]:
    base = Path(f"/dev/shm/holdfast-elastic-{os.getpid()}")
    base.mkdir()
    yield lambda kind, **options: Fleet(launcher, base, kind, **options)
    for leftover in find_leftovers(base):
        remove(leftover)
    shutil.rmtree(base)


def one(events: list[dict[str, Any]], ranks: int) -> dict[str, Any]:
    """What all ranks said, which is the same, but for what is each rank's own: that by rank."""
    by_rank = sorted(events, key=lambda event: event["rank"])
    assert [event["rank"] for event in by_rank] == list(range(ranks))
    assert all((e["whole"], e["alike"]) == (by_rank[0]["whole"], by_rank[0]["alike"]) for e in by_rank)
    return {"whole": by_rank[0]["whole"], "alike": by_rank[0]["alike"], "own": [event["own"] for event in by_rank]}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_job_goes_on_with_three_of_four_ranks_and_with_four_again(fleet: Callable[..., Fleet], kind: str) -> None:
    job = fleet(kind)
    before = one(job.run(4, 4).of("end"), 4)
    job.lose(3)
    three = job.run(3, 6)
    started = one(three.of("started"), 3)
    assert {event["how"] for event in three.of("started")} == {"resharded"}
    assert {event["step"] for event in three.of("started")} == {4}
    assert (started["whole"], started["alike"]) == (before["whole"], before["alike"])
    assert started["own"] == before["own"][:3], "who stays keeps its streams"
    after = one(three.of("end"), 3)
    four = job.run(4, 8)
    again = one(four.of("started"), 4)
    assert {event["step"] for event in four.of("started")} == {6}
    assert (again["whole"], again["alike"]) == (after["whole"], after["alike"])
    assert again["own"][:3] == after["own"]
    assert again["own"][3] == before["own"][3], "the stream of the rank that was away goes on where it stopped"
    job.run(4, 9)
