"""The simplest save there is: the training waits while all is copied into one buffer of this process.

From a GPU the buffer is pinned. It is the least that a save can stall a loop that waits for it; nothing survives the
death of the process.
"""

from __future__ import annotations

from pathlib import Path

import torch
from systems.common import Memory, buffered, live_state
from torch import nn


class Buffer:
    """A copy, for which the training waits."""

    name = "a copy that the loop waits for"
    version = torch.__version__

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int, folder: Path) -> None:
        self._memory = Memory(files=list)
        state = live_state(model, optimizer)
        self._pairs = buffered(tensor for part in state.values() for tensor in part.values())
        self._device = next(model.parameters()).device

    def save(self, step: int) -> None:
        for target, source in self._pairs:
            target.copy_(source, non_blocking=True)
        self._settle()

    def accepted(self) -> bool:
        return True

    def before_step(self) -> None: ...

    def poll(self) -> None: ...

    def survives_kill(self) -> bool:
        return False

    def done(self) -> bool:
        return True

    def wait(self) -> None: ...

    def restore(self) -> None:
        with torch.no_grad():
            for target, source in self._pairs:
                source.copy_(target, non_blocking=True)
        self._settle()

    def extra_bytes(self) -> int:
        return self._memory.extra_bytes()

    def close(self) -> None: ...

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
