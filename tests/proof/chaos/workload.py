"""The job that chaos breaks: small, but with state of every kind, so that a resume that forgets any of it shows."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from holdfast.chaos import drill
from holdfast.hook import InMemorySnapshot

WIDTH, BATCH = 64, 8


class BatchSource:
    """An endless source of random rows. Its state is the generator and the number of rows that were read."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)
        self._read = 0

    def __next__(self) -> torch.Tensor:
        self._read += BATCH
        return torch.from_numpy(self._generator.standard_normal((BATCH, WIDTH), np.float32))

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.bit_generator.state, "read": self._read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.bit_generator.state = state["generator"]
        self._read = state["read"]


class Workload:
    """`chaos.drill.Job`: an autoencoder on each rank. The ranks are coupled: every loss depends on those of the others.

    It has batch norm, dropout, Adam, a schedule, a data iterator, and state tracked by name; shards differ in length.

    Args:
        width: width of the widest layer on rank 0; on rank r it is larger by `skew` times r.
        gil: [rank, step, seconds]: in the middle of that step, the rank holds the GIL for this number of seconds.
    """

    def __init__(self, seed: int, width: int = 256, skew: int = 32, gil: tuple[int, int, float] | None = None) -> None:
        rank = dist.get_rank()
        random.seed(seed + rank)
        np.random.seed(seed + rank)
        torch.manual_seed(seed + rank)
        wide = width + skew * rank
        self.model = nn.Sequential(
            nn.Linear(WIDTH, wide), nn.BatchNorm1d(wide), nn.GELU(), nn.Dropout(0.1), nn.Linear(wide, WIDTH)
        )
        self.optim = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optim, 100)
        self.data = BatchSource(seed + 1000 * rank)
        self.mean = torch.zeros(WIDTH)
        self.seen: list[float] = []
        self._gil = gil

    def protect(self, **options: Any) -> InMemorySnapshot:
        snap = InMemorySnapshot(self.model, self.optim, scheduler=self.schedule, extra={"data": self.data}, **options)
        snap.track("mean", tensors={"mean": self.mean}, changes="after step")
        snap.track("seen", lambda: list(self.seen), self._set_seen, when="step")
        return snap

    def _set_seen(self, seen: list[float]) -> None:
        self.seen = seen

    def step(self, step: int, middle: Callable[[], None]) -> float:
        batch = next(self.data)
        loss = nn.functional.mse_loss(self.model(batch), batch - self.mean)
        torch.autograd.backward(loss)
        shared = loss.detach().double()
        dist.all_reduce(shared)
        middle()
        if self._gil is not None and (dist.get_rank(), step + 1) == tuple(self._gil[:2]):
            ctypes.PyDLL(None).usleep(int(self._gil[2] * 1e6))
        for group in self.optim.param_groups:
            group["weight_decay"] = 1e-3 * float(shared) % 1e-3
        self.seen = [*self.seen[-3:], random.random() + float(shared)]
        self.optim.step()
        self.optim.zero_grad()
        self.schedule.step()
        self.mean.lerp_(batch.mean(0), 0.1)
        return float(shared)

    def state(self) -> drill.State:
        yield from drill.modules(self.model)
        yield from drill.optimizer(self.optim)
        yield "schedule", sorted(self.schedule.state_dict().items(), key=str)
        yield "data", self.data.state_dict()
        yield "mean", self.mean
        yield "seen", self.seen
        yield from drill.generators()
