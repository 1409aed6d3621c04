"""Breaks a job under Ray, on a real cluster on this machine, and checks that the results are the same to the last bit:
``python -m tests.proof.ray.drill [NAME ...]``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from holdfast.chaos.cluster import TARGET, History, VirtualCluster
from holdfast.chaos.differences import compare
from holdfast.chaos.launcher import Launcher
from holdfast.chaos.runner import Event
from holdfast.smp_daemon.shared.errors import ConfigError
from tests.proof.ray.cluster import RayFault, VirtualRay

JOB = "tests.proof.jobs.plain:Replicas"
SEED, STEPS = 7, 10


@dataclass(frozen=True, slots=True)
class RayScenario:
    """One job, and the faults that strike it.

    Attributes:
        by: what runs the ranks, see `chaos.ray.job`.
        attempts: how often all ranks must begin again.
        config: settings of Ray's GCS.
    """

    what: str
    faults: tuple[RayFault, ...]
    by: str = "worker group"
    nodes: int = 3
    attempts: int = 1
    protect: str = "auto"
    config: Mapping[str, Any] = field(default_factory=dict)


SCENARIOS = {
    "actor": RayScenario("an actor is killed", (RayFault("node1", 5, "kill-trainer"),)),
    "raylet": RayScenario(
        "a raylet is killed, and comes back on the same host", (RayFault("node1", 5, "kill-raylet"),)
    ),
    "node": RayScenario("a node is lost, raylet, SMP and memory; a spare joins", (RayFault("node1", 5, "lose-node"),)),
    "two-nodes": RayScenario(
        "two nodes are lost at once; two spares join",
        (RayFault("node1", 5, "lose-node", ("node1", "node2")),),
        nodes=4,
        protect="2+2",
    ),
    "frozen": RayScenario(
        "a node's raylet and actor freeze; a spare joins; they wake up when it has taken over",
        (RayFault("node1", 5, "freeze-node"), RayFault("node1-spare", 8, "thaw-node")),
    ),
    "head": RayScenario(
        "the head is lost, and all of Ray with it; all is started again", (RayFault("node1", 5, "lose-head"),)
    ),
    "gcs": RayScenario(
        "the head's GCS is killed and comes back; an actor is killed after that",
        (RayFault("node1", 4, "kill-gcs"), RayFault("node1", 6, "kill-trainer")),
        config={"gcs_storage": "rocksdb"},
    ),
    "again": RayScenario(
        "an actor is killed, a node is lost after that",
        (RayFault("node1", 4, "kill-trainer"), RayFault("node1", 7, "lose-node")),
        attempts=2,
    ),
    "train-worker": RayScenario("a worker of Ray Train is killed", (RayFault("node1", 5, "kill-trainer"),), by="train"),
    "train-node": RayScenario(
        "a node is lost under Ray Train; a spare joins", (RayFault("node1", 5, "lose-node"),), by="train"
    ),
    "train-controller": RayScenario(
        "Ray Train's controller is killed, and the job is submitted again",
        (RayFault("node0", 5, "kill-controller"),),
        by="train",
    ),
    "train-head": RayScenario(
        "the head is lost under Ray Train, and all of Ray with it; all is started again",
        (RayFault("node1", 5, "lose-head"),),
        by="train",
    ),
    "train-again": RayScenario(
        "a worker of Ray Train is killed, a node is lost after that",
        (RayFault("node1", 4, "kill-trainer"), RayFault("node1", 7, "lose-node")),
        by="train",
        attempts=2,
    ),
}


@dataclass(frozen=True, slots=True)
class RayVerdict:
    """The verdict on a scenario.

    Attributes:
        difference: how a loss or final state differs from the undisturbed run, or what else is wrong; empty if nothing.
        restored: for each attempt but the first, the step from which it resumed, and how its ranks got their state.
        again: for each attempt but the first, the number of finished steps that had to be done again.
        same: for each attempt but the first, how many ranks were in the same process as in the attempt before.
        gaps_s: for each attempt but the first, seconds from the last event of the attempt before to its start.
    """

    name: str
    difference: str
    restored: tuple[tuple[int, tuple[str, ...]], ...]
    again: tuple[int, ...]
    same: tuple[int, ...]
    gaps_s: tuple[float, ...]
    seconds: float

    def line(self) -> str:
        """The verdict in one line, for people."""
        if self.difference:
            return f"{self.name}: DIFFERS: {self.difference}"
        attempts = [
            f"step {step} ({', '.join(how)}; {same} in the same process, {gap:.1f} s, {again} steps again)"
            for (step, how), again, same, gap in zip(self.restored, self.again, self.same, self.gaps_s, strict=True)
        ]
        return f"{self.name}: identical; went on from {' and '.join(attempts)}"


def undisturbed(launcher: Launcher, nodes: int) -> History:
    """Run the same job on virtual nodes, without Ray and without snapshots. Blocks."""
    args = {"job": JOB, "seed": SEED, "steps": STEPS, "snapshots": False, "drain": True}
    return VirtualCluster(launcher, nodes=nodes, ranks_per_node=1, target=TARGET, args=args, smps=False).run()


def plan(nodes: int, protect: str = "auto", by: str = "worker group") -> dict[str, Any]:
    """The plan of the same job for `VirtualRay.run`."""
    args = {"job": JOB, "seed": SEED, "steps": STEPS, "snapshots": True, "drain": True, "hook": {"protect": protect}}
    return {"nodes": nodes, "by": by, "args": args}


def run(name: str, expected: History, folder: Path) -> RayVerdict:
    """Run a scenario. Blocks; raises what `VirtualRay.run` does."""
    scenario = SCENARIOS[name]
    config = dict(scenario.config)
    if "gcs_storage" in config:
        config["gcs_storage_path"] = str(folder / "gcs")
    began = time.monotonic()
    faults = [replace(fault) for fault in scenario.faults]
    with VirtualRay(scenario.nodes, folder, config=config) as cluster:
        history = cluster.run(plan(scenario.nodes, scenario.protect, scenario.by), faults)
    return judge(name, expected, history, time.monotonic() - began)


def judge(name: str, expected: History, history: History, seconds: float) -> RayVerdict:
    """The verdict on one run. Pure."""
    keys = sorted({_attempt(event) for event in history.of("started")})
    attempts = [[event for event in history.events if _attempt(event) == key] for key in keys]
    restored, again, same, gaps = [], [], [], []
    for number, (before, after) in enumerate(pairwise(attempts), 1):
        starts = [event for event in after if event["kind"] == "started"]
        done = max(event["step"] for events in attempts[:number] for event in events if event["kind"] != "end")
        restored.append((starts[0]["step"], tuple(sorted({event["how"] for event in starts}))))
        again.append(max(0, done - starts[0]["step"]))
        same.append(len({event["pid"] for event in before} & {event["pid"] for event in after}))
        gaps.append(max(event["wall"] for event in starts) - max(event["wall"] for event in before))
    difference = compare(expected, history)
    if not difference and len(restored) != SCENARIOS[name].attempts:
        difference = f"all began again {len(restored)} times, not {SCENARIOS[name].attempts}"
    return RayVerdict(name, difference, tuple(restored), tuple(again), tuple(same), tuple(gaps), seconds)


def _attempt(event: Event) -> tuple[float, int]:
    return event["life"], event["generation"]


def main(names: Sequence[str]) -> int:
    """Run scenarios, by default all. Returns 0 if all results are the same as undisturbed, else 1. Blocks."""
    if unknown := set(names) - SCENARIOS.keys():
        raise ConfigError(f"there is no scenario {min(unknown)!r}: choose from {', '.join(SCENARIOS)}")
    os.environ["HOLDFAST_EVERY"] = "1"
    failed = 0
    expected: dict[int, History] = {}
    for name in names or SCENARIOS:
        scenario = SCENARIOS[name]
        print(f"{name}: {scenario.what}", flush=True)
        if scenario.nodes not in expected:
            with Launcher([JOB.partition(":")[0]]) as launcher:
                expected[scenario.nodes] = undisturbed(launcher, scenario.nodes)
        verdict = run(name, expected[scenario.nodes], Path(f"/dev/shm/hf-ray-{os.getpid()}"))
        failed += bool(verdict.difference)
        print(f"  {verdict.line()} ({verdict.seconds:.0f} s)", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SCENARIOS)}; default all")
    sys.exit(main(parser.parse_args().names))
