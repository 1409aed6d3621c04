"""Two jobs on the same nodes at once: each has an arena of its own, a lost node hits both, and one waits in memory."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from holdfast.chaos.cluster import TARGET, History
from holdfast.chaos.differences import compare
from holdfast.chaos.launcher import Launcher
from holdfast.chaos.node import VirtualNode
from holdfast.chaos.runner import Event, Wiring
from holdfast.smp_daemon.shared.paths import arena_base
from tests.deadlines import DEADLINE_S
from tests.proof.chaos.cluster import ChaosCluster
from tests.proof.matrix.cells import Cell, drill

JOB = "tests.proof.jobs.shared_host:SharedHost"
NODES, STEPS, SUSPENDED_AFTER = 2, 9, 5


@dataclass(frozen=True)
class Plan:
    """One job, a rank on each node.

    Attributes:
        memory: the nodes' memory, shared with the other job; None for an undisturbed run without snapshots.
        smps: whether the job's SMPs are the cluster's.
        trainer_lost, node_lost: the steps in the middle of which rank 1 and node 0 are killed. At the loss of the node
            the job waits for the test, or for the other job.
    """

    job: str
    seed: int
    memory: Path | None = None
    steps: int = STEPS
    smps: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    hook: dict[str, Any] = field(default_factory=dict)
    trainer_lost: int | None = None
    node_lost: int | None = None

    def undisturbed(self) -> Plan:
        return Plan(self.job, self.seed, options=self.options)


def run(launcher: Launcher, plan: Plan, meeting: Barrier) -> History:
    def on_event(event: Event) -> None:
        if event["kind"] == "fault" and event["fault"] == "lose-node":
            meeting.wait(DEADLINE_S)

    snapshots = plan.memory is not None
    args = {"job": JOB, "seed": plan.seed, "steps": plan.steps, "options": plan.options, "hook": plan.hook}
    cluster = ChaosCluster(
        launcher,
        nodes=NODES,
        ranks_per_node=1,
        target=TARGET,
        args=args | {"snapshots": snapshots, "drain": True},
        job=plan.job,
        smps=snapshots and plan.smps,
        deadline_s=DEADLINE_S,
        on_event=on_event,
        memory=plan.memory,
    )
    if plan.trainer_lost is not None:
        cluster.kill_trainer(1, at="train.step", step=plan.trainer_lost)
    if plan.node_lost is not None:
        cluster.kill_node(0, at="train.step", step=plan.node_lost)
    return cluster.run()


class Companion:
    """A process that runs the other job."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.meeting = context.Barrier(2)
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self.meeting))
        self._process.start()
        theirs.close()

    def begin(self, plan: Plan) -> None:
        self._pipe.send(plan)

    def history(self) -> History:
        """The history of the job that was begun. Raises what the job raised."""
        assert self._pipe.poll(DEADLINE_S), "the other job is not done"
        told = self._pipe.recv()
        if isinstance(told, Exception):
            raise told
        assert isinstance(told, History)
        return told

    def close(self) -> None:
        self.meeting.abort()  # the job of a failed test may be waiting there
        self._pipe.send(None)
        self._process.join(DEADLINE_S)
        assert self._process.exitcode == 0


def _serve(pipe: Connection, meeting: Barrier) -> None:
    with Launcher(["holdfast.chaos.drill", JOB.partition(":")[0]]) as launcher:
        launcher.wait_ready()
        while (plan := pipe.recv()) is not None:
            try:
                pipe.send(run(launcher, plan, meeting))
            except Exception as error:
                pipe.send(error)


@pytest.fixture(scope="module")
def companion() -> Iterator[Companion]:
    companion = Companion()
    try:
        yield companion
    finally:
        companion.close()


@pytest.fixture
def memory() -> Iterator[Path]:
    """The folder of the nodes' memory. Jobs that end well leave nothing in it."""
    path = arena_base() / f"nodes-{os.getpid()}"
    path.mkdir(parents=True, mode=0o700)
    try:
        yield path
        assert list(path.iterdir()) == []
    finally:
        shutil.rmtree(path)


def restored(history: History, generation: int) -> list[str]:
    return sorted(event["how"] for event in history.of("started", generation=generation))


@pytest.mark.cluster
def test_a_lost_node_hits_both_jobs_and_a_lost_trainer_only_its_own(
    launcher: Launcher, companion: Companion, memory: Path
) -> None:
    ours = Plan("ours", 1, memory, trainer_lost=3, node_lost=5)
    theirs = Plan("theirs", 2, memory, options={"told": {"2": "share", "5": "alone"}}, node_lost=6)
    companion.begin(theirs)
    history = run(launcher, ours, companion.meeting)
    their_history = companion.history()
    assert [restored(history, 1), restored(history, 2)] == [["held", "held"], ["held", "rebuilt"]]
    assert len(their_history.restarts) == 1
    assert restored(their_history, 1) == ["held", "rebuilt"]
    for plan, told in ((ours, history), (theirs, their_history)):
        assert compare(run(launcher, plan.undisturbed(), companion.meeting), told) == ""
        assert told.leaks == []
        assert told.disk_bytes_written == 0


@pytest.mark.cluster
@pytest.mark.parametrize("node_lost", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_job_that_is_suspended_to_memory_goes_on_after_the_other(
    launcher: Launcher, companion: Companion, memory: Path, node_lost: bool
) -> None:
    ours = Plan("ours", 1, memory, smps=False)
    theirs = Plan("theirs", 2, memory, node_lost=4) if node_lost else Plan("theirs", 2, memory, trainer_lost=4)
    nodes = [VirtualNode(index, 0, f"127.0.0.{11 + index}", memory, "ours") for index in range(NODES)]
    try:
        launch(*nodes)
        if node_lost:
            companion.begin(theirs)  # it is held at step 4 until ours is suspended
        suspending = replace(ours, steps=SUSPENDED_AFTER, hook={"keep": True})
        before = run(launcher, suspending, companion.meeting)
        if node_lost:
            companion.meeting.wait(DEADLINE_S)
        else:
            companion.begin(theirs)
        their_history = companion.history()
        if node_lost:
            nodes[0].power_cut()  # its memory is already gone; now its SMP goes, too
            launch(nodes[0])
        after = run(launcher, ours, companion.meeting)
        assert [node.wait_end() for node in nodes] == [0] * NODES
    finally:
        for node in nodes:
            node.close()
    assert {event["step"] for event in after.of("started")} == {SUSPENDED_AFTER}
    assert restored(after, 0) == ["held", "rebuilt" if node_lost else "held"]
    whole = History(before.of("step") + after.events)
    assert compare(run(launcher, ours.undisturbed(), companion.meeting), whole) == ""
    assert compare(run(launcher, theirs.undisturbed(), companion.meeting), their_history) == ""
    assert len(their_history.restarts) == 1


def launch(*nodes: VirtualNode) -> None:
    for node in nodes:
        node.launch(Wiring("", []))
    for node in nodes:
        node.wait_ready()


@pytest.mark.cluster
def test_the_rows_of_a_sub_batch_are_missed_if_left_out(launcher: Launcher) -> None:
    cell = Cell("left out", JOB, NODES, {"without": "rows"}, drain=True)
    difference = drill(launcher, cell, seed=1234).difference
    assert "given another batch" in difference
