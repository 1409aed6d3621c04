"""ZeRO-1 as PyTorch implements it: under DDP each rank keeps the optimizer state of some parameters, steps these, and
sends them to the others. It trains LoRA factors, the second of which start at zero.

Why it is hard to protect: a `ZeroRedundancyOptimizer` has no state of its own; the optimizer inside it has, and
holdfast finds it. Unlike elsewhere under DDP, the ranks' optimizer states are not replicas but moments of different
parameters. After the first step they even look the same, because the gradients of all first factors have been zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from holdfast import InMemorySnapshot
from holdfast.chaos import drill
from tests.proof.jobs import alone
from tests.proof.jobs.plain import BATCH, WIDTH, seed_everything

HIDDEN, RANK, LAYERS = 32, 4, 4


class AdaptedBlock(nn.Module):
    """Two frozen matrices. The product of two trained factors is added to the first; the second factor starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.requires_grad_(False)
        self.first = nn.Parameter(torch.randn(RANK, WIDTH) / WIDTH)
        self.second = nn.Parameter(torch.zeros(HIDDEN, RANK))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.up(inputs) + inputs @ self.first.T @ self.second.T
        return inputs + nn.functional.dropout(self.down(nn.functional.gelu(hidden)), 0.1)


class Zero:
    """`chaos.drill.Job`: data-parallel training with the optimizer state divided among the ranks."""

    def __init__(self, seed: int) -> None:
        seed_everything(seed)
        blocks = nn.Sequential(*(AdaptedBlock() for _ in range(LAYERS)))
        self.model = nn.parallel.DistributedDataParallel(blocks, find_unused_parameters=dist.get_world_size() > 2)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.zero = ZeroRedundancyOptimizer(trained, torch.optim.Adam, lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.zero, 20)
        seed_everything(seed + dist.get_rank())

    def protect(self, **options: Any) -> InMemorySnapshot:
        return InMemorySnapshot(self.model, self.zero, scheduler=self.schedule, **options)

    def step(self, step: int, middle: Callable[[], None]) -> float:
        inputs = torch.randn(BATCH, WIDTH)
        loss = nn.functional.mse_loss(self.model(inputs), inputs.roll(1, dims=1))
        torch.autograd.backward(loss)
        middle()
        self.zero.step()
        self.zero.zero_grad()
        self.schedule.step()
        return loss.item()

    def state(self) -> Iterator[tuple[str, Any]]:
        yield from drill.modules(self.model)
        yield from drill.optimizer(self.zero, "zero")
        yield from drill.optimizer(self.zero.optim, f"part{dist.get_rank()}")
        yield "schedule", sorted(self.schedule.state_dict().items(), key=str)
        yield from drill.generators()


if __name__ == "__main__":
    alone.main(Zero)
