"""No saves at all: measures the noise of the loop itself.

Nothing can be restored, and its rows say so.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from benchmarks.systems.common import Memory


class Nothing:
    """Saves nothing."""

    name = "nothing"
    version = torch.__version__

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int, folder: Path) -> None:
        self._memory = Memory(files=list)

    def save(self, step: int) -> None: ...

    def accepted(self) -> bool:
        return True

    def before_step(self) -> None: ...

    def poll(self) -> None: ...

    def survives_kill(self) -> bool:
        return False

    def done(self) -> bool:
        return True

    def wait(self) -> None: ...

    def restore(self) -> None: ...

    def extra_bytes(self) -> int:
        return self._memory.extra_bytes()

    def processor_s(self) -> float:
        return self._memory.processor_s()

    def close(self) -> None: ...
