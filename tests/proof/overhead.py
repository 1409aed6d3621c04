"""Measures what failures cost: a job on virtual nodes is killed at random, and every lost second is accounted for.

Kills are a Poisson process over progress: the gaps between the steps that they strike are exponential, and steps that
are done again are spared. So the kills do not depend on the snapshot interval, and all intervals get the same ones.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev

import torch
import torch.distributed as dist

from holdfast.chaos.cluster import History, VirtualCluster
from holdfast.chaos.launcher import Launcher
from holdfast.chaos.runner import Event
from holdfast.chaos.trainer import Trainer
from holdfast.integrations.adapters import adapter_for
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.snapshot.hook import SnapshotHook
from holdfast.snapshot.interval.recording import RecordingOrders
from holdfast.snapshot.options import Options

TARGET = "tests.proof.overhead:train"


@dataclass(frozen=True, slots=True)
class TimedJob:
    """The job, with one rank on each node.

    Attributes:
        compute_s: seconds of a step without its optimizer; the loop sleeps, as if it waited for a device.
        width: width of a square matrix; its weights and two moments are the state.
    """

    compute_s: float = 0.1
    width: int = 1024
    nodes: int = 2


@dataclass(frozen=True, slots=True)
class Overhead:
    """Where the seconds of one run went, and how many failures there were.

    Attributes:
        useful: time of the steps that were kept, at the length of baseline steps.
        copying: time that steps took beyond the length of baseline steps.
        losses: for each failure, the time of steps that were lost.
        restarts: for each failure, the time from the kill to the first step after it, without that step.
        nodes: for each failure, whether a node was lost.
    """

    useful: float
    copying: float
    losses: tuple[float, ...]
    restarts: tuple[float, ...]
    nodes: tuple[bool, ...]

    @property
    def wasted(self) -> float:
        """Seconds that were not useful, per useful second."""
        return (self.copying + sum(self.losses) + sum(self.restarts)) / self.useful

    @property
    def error(self) -> float:
        """Standard error of `wasted`, from the spread of the failures' costs."""
        each = [loss + restart for loss, restart in zip(self.losses, self.restarts, strict=True)]
        return error_of_sum(each) / self.useful

    def __add__(self, other: Overhead) -> Overhead:
        """The overhead of two runs together."""
        return Overhead(
            self.useful + other.useful,
            self.copying + other.copying,
            self.losses + other.losses,
            self.restarts + other.restarts,
            self.nodes + other.nodes,
        )


def error_of_sum(values: Sequence[float]) -> float:
    """Standard error of the sum of independent values; inf for fewer than 2."""
    return stdev(values) * math.sqrt(len(values)) if len(values) > 1 else math.inf


def train() -> None:
    """Train one rank. Arguments: ``compute_s`` and ``width`` of `TimedJob`, ``steps``, ``every`` (0: no snapshots), and
    ``profile``: a file to write, as `holdfast profile` would, instead of training to the end; empty: none."""
    trainer = Trainer.from_environment()
    args = trainer.args
    torch.set_num_threads(1)
    trainer.init_process_group()
    torch.manual_seed(trainer.rank)
    model = torch.nn.Linear(args["width"], args["width"])
    optim = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    if args["profile"]:
        os.environ |= RecordingOrders(args["profile"], 40).to_environment()

    def step(number: int) -> None:
        model(torch.ones(1, args["width"]))
        time.sleep(args["compute_s"])
        dist.barrier()
        failpoint("train.step", number)
        optim.step()
        trainer.report("step", step=number)

    if not args["every"]:
        trainer.report("started", step=0)
        for number in range(1, args["steps"] + 1):
            step(number)
        return
    adapter = adapter_for(model, optim, None, {})
    with SnapshotHook(adapter, Options(start=False, every=args["every"])) as snap:
        trainer.report("started", step=snap.step)
        for finished in snap.steps(args["steps"]):
            step(finished + 1)


def kills(seed: int, steps: int, mean_steps: float) -> list[int]:
    """The steps at which something is killed. They are at least 2 apart, so that each kill strikes a new step."""
    source = random.Random(seed)
    found: list[int] = []
    at = 1.0
    while True:
        at += max(2.0, source.expovariate(1.0 / mean_steps))
        if at >= steps:
            return found
        found.append(round(at))


def run(
    launcher: Launcher,
    job: TimedJob,
    *,
    steps: int,
    every: int,
    strikes: Sequence[int] = (),
    lose_every: int = 4,
    profile: Path | None = None,
    deadline_s: float = 300.0,
) -> History:
    """Run the job to its end. Blocks.

    Args:
        strikes: steps at which a trainer is killed, or, at every `lose_every`-th of them, a node is lost.
        profile: file to which to write a profile instead of training to the end.
    """
    args = {
        "compute_s": job.compute_s,
        "width": job.width,
        "steps": steps,
        "every": every,
        "profile": str(profile or ""),
    }
    cluster = VirtualCluster(
        launcher, nodes=job.nodes, ranks_per_node=1, target=TARGET, args=args, smps=every > 0, deadline_s=deadline_s
    )
    for number, step in enumerate(strikes, 1):
        if number % lose_every == 0:
            cluster.kill_node(number // lose_every % job.nodes, at="train.step", step=step)
        else:
            cluster.kill_trainer(number % job.nodes, at="train.step", step=step)
    return cluster.run()


def baseline_step(history: History, every: int) -> float:
    """Mean seconds of rank 0's baseline steps, beside which no snapshot is worked on: from the 4th step after each
    snapshot on, or all steps if none is taken. The first 10 of each generation are left out. Pure.

    Raises:
        ConfigError: there is no baseline step, because snapshots are too frequent.
    """
    found = []
    for number in range(len(history.restarts) + 1):
        _, steps = _generation(history, number)
        for before, after in pairwise(steps[9:]):
            if not every or (after["step"] - 1) % every >= 3:
                found.append(after["at"] - before["at"])
    if not found:
        raise ConfigError(f"there is no baseline step with a snapshot every {every} steps: give 0, or 4 or more")
    return fmean(found)


def account(history: History, step_s: float) -> Overhead:
    """Where the time of a run went, if a baseline step takes `step_s`. Pure."""
    generations = [_generation(history, number) for number in range(len(history.restarts) + 1)]
    losses, restarts = [], []
    for restart, ((_, before), (start, after)) in zip(history.restarts, pairwise(generations), strict=True):
        done = before[-1]["step"] if before else start["step"]
        since = before[-1]["at"] if before else restart.killed_at
        losses.append((done - start["step"]) * step_s + max(0.0, restart.killed_at - since))
        restarts.append(after[0]["at"] - step_s - restart.killed_at)
    _, steps = generations[0]
    useful = generations[-1][1][-1]["step"] * step_s
    wall = generations[-1][1][-1]["at"] - steps[0]["at"] + step_s
    copying = wall - useful - sum(losses) - sum(restarts)
    nodes = tuple(restart.faults[0].kind == "lose-node" for restart in history.restarts)
    return Overhead(useful, copying, tuple(losses), tuple(restarts), nodes)


def _generation(history: History, number: int) -> tuple[Event, list[Event]]:
    """The event with which rank 0 started in a generation, and the events of its steps."""
    steps = history.of("step", rank=0, generation=number)
    return history.of("started", rank=0, generation=number)[0], steps
