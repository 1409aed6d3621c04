"""A job that shares its host with others (SJF-BSBF, arXiv 2407.13088). It accumulates gradients over sub-batches. When
another job arrives, it halves the sub-batches so that both jobs fit into memory; when that job leaves, they grow again.

Why it is hard to protect: no ``state_dict`` contains the size of a sub-batch. The size depends on what the scheduler
said earlier, not on the step, and decides every bit from then on: what batch norm sees at once, which masks dropout
draws, in which order gradients are added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from holdfast import InMemorySnapshot
from holdfast.chaos import drill
from tests.proof.jobs import alone
from tests.proof.jobs.plain import Plain

BATCH, LEAST = 12, 3
"""Rows of a batch, whose size never changes, and of the smallest sub-batch."""

TOLD = {"1": "share", "3": "share", "6": "alone"}
"""The scheduler's messages by default: two other jobs arrive, and one of them leaves."""


class SharedHost(Plain):
    """`chaos.drill.Job`: data parallel, Adam, gradients accumulated over sub-batches and reduced once for all of them.

    Args:
        told: the scheduler's messages, ``share`` or ``alone``, each by the step that it precedes.
        without: the state to leave untracked, for an audit to find: ``rows`` (of a sub-batch).
    """

    def __init__(self, seed: int, told: Mapping[str, str] | None = None, without: str = "") -> None:
        super().__init__(seed)
        self.rows = BATCH
        self._told = TOLD if told is None else told
        self._without = without

    def protect(self, **options: object) -> InMemorySnapshot:
        snap = super().protect(**options)
        if self._without != "rows":
            # Ask at the end of each step: the scheduler may send a message before the next forward, and sends it again
            # after a restart.
            snap.track("rows", lambda: self.rows, self._set_rows, when="step")
        return snap

    def _set_rows(self, rows: int) -> None:
        self.rows = rows

    def share(self) -> None:
        """Another job arrives: leave it half of the memory for activations."""
        self.rows = max(LEAST, self.rows // 2)

    def alone(self) -> None:
        """The other job has left."""
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
    alone.main(SharedHost)
