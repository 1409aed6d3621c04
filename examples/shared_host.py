"""A job that shares its host with others (SJF-BSBF, arXiv 2407.13088): it accumulates gradients over sub-batches, and
when another job comes it halves them, so that both fit into memory; when that is gone they grow again.

What makes it hard: how many rows a sub-batch has is in no ``state_dict``. It follows from what the scheduler said in
the past, not from the step, and decides every bit that comes after: what batch norm sees at once, which masks
dropout draws, in which order gradients are added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from holdfast import InMemorySnapshot
from holdfast.chaos import drill
from holdfast.examples.plain import Plain

BATCH, LEAST = 12, 3
"""Rows of a batch, which never changes, and of the smallest sub-batch."""

TOLD = {"1": "share", "3": "share", "6": "alone"}
"""What the scheduler says by default: two more jobs come, and one of them goes."""


class SharedHost(Plain):
    """`chaos.drill.Job`: data parallel, Adam, gradients accumulated over sub-batches and reduced once for all of them.

    Args:
        told: ``share`` or ``alone`` by step: what the scheduler says before it.
        without: what is not tracked: ``rows`` (of a sub-batch).
    """

    def __init__(self, seed: int, told: Mapping[str, str] | None = None, without: str = "") -> None:
        super().__init__(seed)
        self.rows = BATCH
        self._told = TOLD if told is None else told
        self._without = without

    def protect(self, **options: object) -> InMemorySnapshot:
        snap = super().protect(**options)
        if self._without != "rows":
            # Of the step that ended: the scheduler may speak before the next forward, and would be heard twice.
            snap.track("rows", lambda: self.rows, self._set_rows, when="step")
        return snap

    def _set_rows(self, rows: int) -> None:
        self.rows = rows

    def share(self) -> None:
        """Another job comes: half the memory for activations is its."""
        self.rows = max(LEAST, self.rows // 2)

    def alone(self) -> None:
        """It is gone."""
        self.rows = min(BATCH, self.rows * 2)

    def step(self, step: int, middle: Callable[[], None]) -> float:
        said = self._told.get(str(step))
        if said is not None:
            {"share": self.share, "alone": self.alone}[said]()
        batch = torch.cat([next(self.data), next(self.data)])
        assert len(batch) == BATCH
        loss = 0.0
        parts = torch.split(batch, self.rows)
        for rows in parts:
            part = nn.functional.mse_loss(self.model(rows), rows) / len(parts)
            torch.autograd.backward(part)
            loss += part.item()
            middle()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        for optim in self.optims:
            optim.step()
            optim.zero_grad()
        self.schedule.step()
        return loss

    def state(self) -> drill.State:
        yield from super().state()
        yield "rows", self.rows


if __name__ == "__main__":
    drill.main(SharedHost)
