"""A job that goes on with fewer ranks after a loss, and with more again: DDP or FSDP2, the same global batch always.

    export HOLDFAST_JOB=elastic HOLDFAST_ELASTIC=1
    torchrun --standalone --nproc-per-node 4 -m holdfast.examples.elastic

Kill it with ``kill -9``, and start it with ``--nproc-per-node 3``: the losses go on as they would have with four, but
for the last digits. What is added up by three ranks is added up in another order.
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
from holdfast.examples.plain import seed_everything
from holdfast.integrations.batches import GlobalBatches, portion

WIDTH, BATCH, SAMPLES, LARGEST = 24, 24, 100, 4


def sample(number: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng([number]).standard_normal(WIDTH, dtype=np.float32))


class Elastic:
    """`chaos.drill.Job`.

    Args:
        kind: ``ddp`` or ``fsdp``. dropout: draws from each rank's own stream, so losses depend on how many there are.
    """

    def __init__(self, seed: int, kind: str = "ddp", dropout: float = 0.0) -> None:
        seed_everything(seed)
        layers = nn.Sequential(
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
        """The mean loss over the global batch."""
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
    drill.main(Elastic)
