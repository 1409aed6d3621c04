"""PyTorch's own ways to train: one process, DDP, FSDP2, several optimizers, an EMA copy, a data iterator with state."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from holdfast import InMemorySnapshot
from holdfast.chaos import drill
from tests.proof.jobs import alone

WIDTH, BATCH = 48, 6


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def network() -> nn.Sequential:
    """A few layers of odd sizes, with batch norm and dropout."""
    return nn.Sequential(
        nn.Linear(WIDTH, 65), nn.BatchNorm1d(65), nn.GELU(), nn.Dropout(0.2), nn.Linear(65, 31), nn.Linear(31, WIDTH)
    )


class Samples:
    """Endless batches of shuffled samples. Its state is its generator and what is left of the current order."""

    def __init__(self, seed: int, count: int = 40) -> None:
        self._generator = np.random.default_rng([seed, dist.get_rank()])
        self._count = count
        self._order: list[int] = []

    def __next__(self) -> torch.Tensor:
        rows = []
        for _ in range(BATCH):
            if not self._order:
                self._order = self._generator.permutation(self._count).tolist()
            rows.append(np.random.default_rng([self._order.pop()]).standard_normal(WIDTH, dtype=np.float32))
        return torch.from_numpy(np.stack(rows))

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.bit_generator.state, "order": self._order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.bit_generator.state = state["generator"]
        self._order = list(state["order"])


class Plain:
    """An autoencoder with Adam and a cosine schedule. Each rank trains a model of its own, on a GPU if there is one.

    Args:
        adam: the variant of Adam: ``foreach``, ``fused`` or ``amsgrad``.
        ema: keep an exponential moving average of the weights.
        optimizers: 1: Adam for all parameters; 2: Adam for matrices, and SGD with momentum for vectors.
    """

    def __init__(self, seed: int, adam: str = "foreach", ema: bool = False, optimizers: int = 1) -> None:
        seed_everything(seed)
        self.snap: InMemorySnapshot | None = None
        self.model = self._wrap(network().to(drill.place()))
        seed_everything(seed + dist.get_rank())
        self.data = Samples(seed)
        parameters = list(self.model.parameters())
        matrices = [p for p in parameters if p.dim() > 1 or optimizers == 1]
        vectors = [p for p in parameters if p.dim() == 1 and optimizers == 2]
        ways: dict[str, Any] = {adam: True}
        self.optims: list[torch.optim.Optimizer] = [torch.optim.Adam(matrices, lr=1e-2, **ways)]
        if vectors:
            self.optims.append(torch.optim.SGD(vectors, lr=1e-2, momentum=0.9))
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optims[0], 20)
        self.ema = copy.deepcopy(network()).to(drill.place()) if ema else None

    def _wrap(self, model: nn.Module) -> nn.Module:
        return model

    def protect(self, **options: Any) -> InMemorySnapshot:
        snap = InMemorySnapshot(self.model, self.optims, scheduler=self.schedule, extra={"data": self.data}, **options)
        if self.ema is not None:
            snap.track("ema", tensors=self.ema, changes="after step")
        self.snap = snap
        return snap

    def step(self, step: int, middle: Callable[[], None]) -> float:
        if self.snap is not None and len(self.optims) > 1:
            self.snap.begin()
        batch = next(self.data).to(drill.place())
        loss = nn.functional.mse_loss(self.model(batch), batch)
        torch.autograd.backward(loss)
        middle()
        for optim in self.optims:
            optim.step()
            optim.zero_grad()
        self.schedule.step()
        if self.ema is not None:
            with torch.no_grad():
                for mean, weight in zip(self.ema.parameters(), self.model.parameters(), strict=True):
                    mean.lerp_(weight, 0.1)
        return loss.item()

    def state(self) -> drill.State:
        yield from drill.modules(self.model, *([self.ema] if self.ema else []))
        for i, optim in enumerate(self.optims):
            yield from drill.optimizer(optim, f"optim{i}")
        yield "schedule", sorted(self.schedule.state_dict().items(), key=str)
        yield "data", self.data.state_dict()
        yield from drill.generators()


class Replicas(Plain):
    """DDP. With more than two ranks the order in which gloo adds gradients depends on DDP's buckets. DDP rebuilds them
    after the first step of a run, so a restart would change the order; ``find_unused_parameters`` prevents that."""

    def _wrap(self, model: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=dist.get_world_size() > 2)


class Shards(Plain):
    """FSDP2: every layer's parameters are sharded across the ranks, unevenly where there are 65 or 31 rows."""

    def _wrap(self, model: nn.Module) -> nn.Module:
        mesh = init_device_mesh(drill.place().type, (dist.get_world_size(),))
        for layer in model:  # type: ignore[attr-defined]
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh, offload_policy=self._offload())
        fully_shard(model, mesh=mesh, offload_policy=self._offload())
        return model

    def _offload(self) -> OffloadPolicy:
        return OffloadPolicy()


class Offloaded(Shards):
    """FSDP2 with parameters in host memory; each layer's are copied to the GPU when the layer runs."""

    def _offload(self) -> OffloadPolicy:
        return CPUOffloadPolicy(pin_memory=torch.cuda.is_available())


if __name__ == "__main__":
    alone.main(Plain)
