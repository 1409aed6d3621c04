"""The simplest save: training waits while the whole state is copied into one buffer of this process.

For a GPU the buffer is pinned. This is the lower limit for the stall of a blocking save; nothing survives the death of
the process.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from benchmarks.systems.common import buffered, live_state, settle
from benchmarks.systems.none import Nothing


class Buffer(Nothing):
    """A blocking copy: nothing is in progress afterwards."""

    name = "a copy that the loop waits for"

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int, folder: Path) -> None:
        super().__init__(model, optimizer, rank, world, folder)
        state = live_state(model, optimizer)
        self._pairs = buffered(tensor for part in state.values() for tensor in part.values())
        self._device = next(model.parameters()).device

    def save(self, step: int) -> None:
        for target, source in self._pairs:
            target.copy_(source, non_blocking=True)
        settle(self._device)

    def restore(self) -> None:
        with torch.no_grad():
            for target, source in self._pairs:
                source.copy_(target, non_blocking=True)
        settle(self._device)
