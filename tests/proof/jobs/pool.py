"""A decentralised pool (FusionAI, arXiv 2309.01172): each participant owns one stage of a pipeline, as large as its
machine can hold. Activations go down the pipeline and gradients up, over slow links. So gradients are sent in half
precision, and the rounding error is kept and added to the next gradient.

Why it is hard to protect: only its owner has a copy of a stage, and stages differ widely in size. No ``state_dict``
contains the rounding error, or the position in the data, which the first and the last stage each read on their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from holdfast import InMemorySnapshot
from holdfast.chaos import drill
from tests.proof.jobs import alone
from tests.proof.jobs.plain import BATCH, WIDTH, seed_everything

STAGES = ((1, 24), (4, 160), (2, 64), (1, 40))
"""Number of blocks and their inner width, for each stage in turn."""

MICRO_BATCHES = 2


def block(inner: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, inner), nn.GELU(), nn.Dropout(0.1), nn.Linear(inner, WIDTH))


class Pool:
    """`chaos.drill.Job`: rank r owns stage r. Only the last rank has a loss.

    Args:
        without: the state to leave untracked: ``lost`` (the rounding error), which is lost then, or ``order`` (the
            generator of the samples), which is found in a variable.
    """

    def __init__(self, seed: int, without: str = "") -> None:
        self._rank, self._last = dist.get_rank(), dist.get_world_size() - 1
        seed_everything(seed + self._rank)
        blocks, inner = STAGES[self._rank % len(STAGES)]
        self.stage = nn.Sequential(*(block(inner) for _ in range(blocks)))
        self.optim = torch.optim.AdamW(self.stage.parameters(), lr=1e-2)
        self.order = np.random.default_rng(seed)  # the first and the last stage draw the same samples
        self.lost = {"up": torch.zeros(BATCH, WIDTH)} if self._rank > 0 else {}
        self._without = without

    def protect(self, **options: Any) -> InMemorySnapshot:
        snap = InMemorySnapshot(self.stage, self.optim, **options)
        if self._without != "lost":
            snap.track("lost", tensors=self.lost)
        if self._without != "order":
            # Ask at the end of each step, because the first stage reads data before its next forward.
            snap.track("order", lambda: self.order.bit_generator.state, self._set_order, when="step")
        return snap

    def _set_order(self, state: dict[str, Any]) -> None:
        self.order.bit_generator.state = state

    def step(self, step: int, middle: Callable[[], None]) -> float | None:
        samples = [
            torch.from_numpy(self.order.standard_normal((BATCH, WIDTH), np.float32)) for _ in range(MICRO_BATCHES)
        ]
        passed = [self._down(micro_batch) for micro_batch in samples]
        losses = [self._up(*pair, micro_batch) for pair, micro_batch in zip(passed, samples, strict=True)]
        middle()
        self.optim.step()
        self.optim.zero_grad()
        return sum(losses) / MICRO_BATCHES if self._rank == self._last else None

    def _down(self, samples: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one micro-batch through the stage, and return its input and output."""
        inputs = samples
        if self._rank > 0:
            inputs = torch.empty(BATCH, WIDTH)
            dist.recv(inputs, self._rank - 1)
            inputs.requires_grad_()
        outputs = inputs + self.stage(inputs)
        if self._rank < self._last:
            dist.send(outputs.detach(), self._rank + 1)
        return inputs, outputs

    def _up(self, inputs: torch.Tensor, outputs: torch.Tensor, samples: torch.Tensor) -> float:
        """Take a micro-batch's gradient back through the stage. Returns its loss on the last rank, 0 on others."""
        if self._rank == self._last:
            loss = nn.functional.mse_loss(outputs, samples.roll(1, dims=1))
            torch.autograd.backward(loss / MICRO_BATCHES)
        else:
            gradient = torch.empty(BATCH, WIDTH, dtype=torch.half)
            dist.recv(gradient, self._rank + 1)
            torch.autograd.backward(outputs, gradient.float())
        if self._rank > 0:
            assert inputs.grad is not None
            wanted = inputs.grad + self.lost["up"]
            rounded = wanted.half()
            self.lost["up"].copy_(wanted - rounded.float())
            dist.send(rounded, self._rank - 1)
        return loss.item() if self._rank == self._last else 0.0

    def state(self) -> Iterator[tuple[str, Any]]:
        yield from drill.modules(self.stage)
        yield from drill.optimizer(self.optim)
        yield from self.lost.items()
        yield "order", self.order.bit_generator.state
        yield from drill.generators()


if __name__ == "__main__":
    alone.main(Pool)
