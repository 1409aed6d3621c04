"""A job that trains until it is told to stop, and then repeats everything without snapshots, to compare.

Orders are in a file, which the first rank reads before every step: how many times the state must have grown, or `END`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from holdfast import InMemorySnapshot
from holdfast.chaos.trainer import Trainer
from holdfast.smp_daemon.shared.failpoints import failpoint

DRAIN_DEADLINE_S = 0.2
STEP_S = 0.002
END = -1


class Training:
    """One rank's state; a step depends only on the state, the step number and the other ranks."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(7 + rank)
        self.rank = rank
        self.model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(5000 + 500 * rank))])
        self.optim = torch.optim.Adam(self.model.parameters(), lr=1e-2)

    def grow(self) -> None:
        """Add a parameter."""
        added = torch.nn.Parameter(torch.full((700 + 10 * len(self.model),), 0.5))
        self.model.append(added)
        self.optim.add_param_group({"params": [added]})

    def backward(self, step: int) -> None:
        loss = torch.full((1,), float(step))
        dist.all_reduce(loss)
        for parameter in self.model:
            parameter.grad = torch.sin(parameter.detach() * loss + self.rank)

    def tensors(self) -> list[torch.Tensor]:
        state = [self.optim.state[parameter] for parameter in self.model]
        moments = [each[name] for each in state for name in sorted(each)]
        return [tensor.detach() for tensor in (*self.model, *moments)]


def endure() -> None:
    """Run one rank; report ``started``, ``step``, and ``end`` with whether the state is that of undisturbed
    training."""
    trainer = Trainer.from_environment()
    args = trainer.args
    torch.set_num_threads(1)
    trainer.init_process_group()
    training = Training(trainer.rank)
    grown: list[int] = list(args.get("grown", []))  # steps after which the state grew
    for _ in grown:
        training.grow()
    with InMemorySnapshot(training.model, training.optim, start=args.get("start", False)) as snap:
        trainer.report("started", step=snap.step, how=snap.restored.how)
        step = snap.step
        while (order := _order(args["orders"])) != END:
            if order > len(grown):
                training.grow()
                grown.append(step)
            step += 1
            snap.begin()
            training.backward(step)
            failpoint("train.step", step)
            snap.drain(DRAIN_DEADLINE_S)
            dist.barrier()
            training.optim.step()
            time.sleep(STEP_S)
            trainer.report("step", step=step, protected=snap.protected_step, grown=grown)
    trainer.report("end", step=step, same=_again(trainer.rank, step, grown, training), left=_left(snap))


def _order(path: str) -> int:
    word = torch.zeros(1, dtype=torch.int64)
    if dist.get_rank() == 0:
        word[0] = int(Path(path).read_text() or 0)
    dist.broadcast(word, 0)
    return int(word)


def _again(rank: int, steps: int, grown: list[int], found: Training) -> bool:
    """Whether undisturbed training produces the same state."""
    training = Training(rank)
    for step in range(steps):
        for _ in range(grown.count(step)):
            training.grow()
        training.backward(step + 1)
        training.optim.step()
    pairs = zip(training.tensors(), found.tensors(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def _left(snap: Any) -> bool:
    return bool(snap._options.job_arena.exists())
