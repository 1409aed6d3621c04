"""A pool of unequal stages, each owned by one node: one quits, bytes are damaged, links are slow."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.chaos.cluster import TARGET, History, JobFailed, VirtualCluster
from holdfast.chaos.differences import compare
from holdfast.chaos.launcher import Launcher
from holdfast.chaos.runner import Event
from holdfast.smp_daemon.shared.paths import arena_base
from tests.proof.matrix.cells import Cell, drill

JOB = "tests.proof.jobs.pool:Pool"
NODES, SEED, STEPS, MANY_STEPS = 3, 1234, 8, 200
KILLED = 195
PAGE_BYTES = 4096


def make(
    launcher: Launcher,
    *,
    snapshots: bool = True,
    steps: int = STEPS,
    drain: bool = True,
    on_event: Callable[[Event], None] = lambda event: None,
) -> VirtualCluster:
    return VirtualCluster(
        launcher,
        nodes=NODES,
        ranks_per_node=1,
        target=TARGET,
        args={"job": JOB, "seed": SEED, "steps": steps, "snapshots": snapshots, "drain": drain},
        smps=snapshots,
        deadline_s=90,
        on_event=on_event,
    )


@pytest.fixture(scope="module")
def undisturbed(launcher: Launcher) -> History:
    return make(launcher, snapshots=False).run()


def restored(history: History) -> dict[int, str]:
    return {event["rank"]: event["how"] for event in history.of("started", generation=1)}


@pytest.mark.cluster
@pytest.mark.parametrize("node", [0, *(pytest.param(node, marks=pytest.mark.slow) for node in range(1, NODES))])
def test_whoever_quits_unannounced_is_replaced(launcher: Launcher, undisturbed: History, node: int) -> None:
    cluster = make(launcher)
    cluster.kill_node(node, at="train.step", step=5)
    history = cluster.run()
    assert compare(undisturbed, history) == ""
    assert restored(history) == {rank: "rebuilt" if rank == node else "held" for rank in range(NODES)}
    assert history.leaks == []
    assert history.disk_bytes_written == 0


class Damage:
    """Flips a bit in every page of every slot of some nodes, once all trainers of the first generation have ended."""

    def __init__(self, *nodes: int) -> None:
        self.flipped = 0
        self._nodes = nodes
        self._gone = 0
        self._source = random.Random(SEED)

    def __call__(self, event: Event) -> None:
        self._gone += event["kind"] == "exit" and event["generation"] == 0
        if self._gone == NODES and not self.flipped:
            for node in self._nodes:
                for path in sorted(
                    arena_base().glob(f".virtual-{os.getpid()}-*/node{node}/job/dp{node}.*.safetensors")
                ):
                    self._flip(path)

    def _flip(self, path: Path) -> None:
        with path.open("r+b") as slot:
            content = bytearray(slot.read())
            for start in range(0, len(content), PAGE_BYTES):
                place = self._source.randrange(start, min(start + PAGE_BYTES, len(content)))
                content[place] ^= 1 << self._source.randrange(8)
            slot.seek(0)
            slot.write(content)
        self.flipped += 1


@pytest.mark.cluster
@pytest.mark.parametrize("node", [0, *(pytest.param(node, marks=pytest.mark.slow) for node in range(1, NODES))])
def test_damaged_bytes_are_mended_from_parity(launcher: Launcher, undisturbed: History, node: int) -> None:
    damage = Damage(node)
    cluster = make(launcher, on_event=damage)
    cluster.kill_trainer(0, at="train.step", step=5)
    history = cluster.run()
    assert damage.flipped >= 2
    assert compare(undisturbed, history) == ""
    assert restored(history) == {rank: "repaired" if rank == node else "held" for rank in range(NODES)}


@pytest.mark.cluster
def test_bytes_damaged_on_more_nodes_than_parity_makes_up_for_are_never_restored(launcher: Launcher) -> None:
    cluster = make(launcher, on_event=Damage(1, 2))
    cluster.kill_trainer(0, at="train.step", step=5)
    with pytest.raises(JobFailed, match="Unrecoverable"):
        cluster.run()


@pytest.mark.slow
@pytest.mark.cluster
def test_over_slow_links_encoding_takes_steps_and_what_is_restored_is_whole(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = make(launcher, snapshots=False, steps=MANY_STEPS).run()
    monkeypatch.setenv("HOLDFAST_BANDWIDTH", "4MB/s")  # 0.2 s for the bytes that the largest stage's owner sends
    cluster = make(launcher, steps=MANY_STEPS, drain=False)
    cluster.kill_node(1, at="train.step", step=KILLED)
    history = cluster.run()
    assert compare(undisturbed, history) == ""
    steps = {event["step"] for event in history.of("started", generation=1)}
    assert len(steps) == 1
    assert 0 < steps.pop() < KILLED - 2  # with fast links it is one of the two steps before the kill
    assert restored(history)[1] == "rebuilt"


@pytest.mark.cluster
def test_a_generator_that_is_left_out_is_found_in_a_variable(launcher: Launcher) -> None:
    assert drill(launcher, Cell("left out", JOB, NODES, {"without": "order"}, drain=True), seed=SEED).difference == ""


@pytest.mark.cluster
def test_a_piece_that_is_left_out_is_missed(launcher: Launcher) -> None:
    cell = Cell("left out", JOB, NODES, {"without": "lost"}, drain=True)
    difference = drill(launcher, cell, seed=SEED).difference
    wrong = difference.startswith(("loss of rank", "the final state"))
    assert wrong or "given another batch" in difference
