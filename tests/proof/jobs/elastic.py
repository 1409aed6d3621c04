"""A job that continues on fewer ranks after a loss, and on more again later: DDP or FSDP2, always with the same global
batch.

    export HOLDFAST_JOB=elastic HOLDFAST_ELASTIC=1
    torchrun --standalone --nproc-per-node 4 -m tests.proof.jobs.elastic

Kill it with ``kill -9``, and start it with ``--nproc-per-node 3``: the losses continue as they would have on four
ranks, except for the last digits, because three ranks add up their gradients in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from holdfast import InMemorySnapshot
from holdfast.chaos import drill
from holdfast.integrations.batches import GlobalBatches, portion
from tests.proof.jobs import alone
from tests.proof.jobs.plain import seed_everything

WIDTH, BATCH, SAMPLES, LARGEST = 24, 24, 100, 4


def sample(number: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng([number]).standard_normal(WIDTH, dtype=np.float32))


class Residual(nn.Sequential):
    """Adds its input to what its layers make of it."""

    def forward(self, input: Any) -> Any:
        return input + super().forward(input)  # type: ignore[no-untyped-call]


class Elastic:
    """`chaos.drill.Job`: an autoencoder under DDP or FSDP2, on any number of ranks.

    Args:
        kind: ``ddp`` or ``fsdp``.
        dropout: its probability. Each rank draws from a stream of its own, so losses then depend on the number of
            ranks.
        residual: another model, with the same tensors.
    """

    def __init__(self, seed: int, kind: str = "ddp", dropout: float = 0.0, *, residual: bool = False) -> None:
        seed_everything(seed)
        layers = (Residual if residual else nn.Sequential)(
            nn.Linear(WIDTH, 65), nn.GELU(), nn.Dropout(dropout), nn.Linear(65, 3), nn.Linear(3, WIDTH)
        )
        self.model = self._wrap(layers, kind)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optim, 40)
        self.batches = GlobalBatches(SAMPLES, BATCH, seed)
        seed_everything(seed + dist.get_rank())

    def _wrap(self, layers: nn.Sequential, kind: str) -> nn.Module:
        if kind == "ddp":
            return nn.parallel.DistributedDataParallel(layers, find_unused_parameters=dist.get_world_size() > 2)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in layers:
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(layers, mesh=mesh)
        return layers

    def protect(self, **options: Any) -> InMemorySnapshot:
        return InMemorySnapshot(
            self.model, self.optim, scheduler=self.schedule, extra={"data": self.batches}, **options
        )

    def step(self, step: int, middle: Callable[[], None]) -> float:
        """Take a step, and return the mean loss over the global batch."""
        total = torch.zeros(())
        for numbers, weight in portion(next(self.batches), dist.get_world_size(), dist.get_rank(), LARGEST):
            inputs = torch.stack([sample(number) for number in numbers])
            loss = nn.functional.mse_loss(self.model(inputs), inputs) * weight
            torch.autograd.backward(loss)
            total += loss.detach() / dist.get_world_size()
        middle()
        self.optim.step()
        self.optim.zero_grad()
        self.schedule.step()
        dist.all_reduce(total)
        return total.item()

    def state(self) -> drill.State:
        yield from drill.modules(self.model)
        yield from drill.optimizer(self.optim)
        yield "schedule", sorted(self.schedule.state_dict().items(), key=str)
        yield "data", self.batches.state_dict()
        yield from drill.generators()


if __name__ == "__main__":
    alone.main(Elastic)
