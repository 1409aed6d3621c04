"""torchsnapshot 0.1.0, the last release, into tmpfs: `Snapshot.async_take`.

`async_take` copies the state before it returns, so the next step need not wait. A thread writes the copies, and the
ranks synchronise over a store before rank 0 writes the metadata that completes the snapshot. Each rank saves its
tensors as its own, not as shards.

torchsnapshot could write several snapshots at the same time, with memory for each; here, `save` waits for the last one
first, as is usual. All options have their defaults: tensors below 128 MiB are batched into slabs, and the copies of all
ranks may take 60 % of the free memory.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torchsnapshot import Snapshot, StateDict, __version__
from torchsnapshot.snapshot import PendingSnapshot

from benchmarks.systems.common import FolderSystem, live_state, until


class AsyncTake(FolderSystem):
    """`Snapshot.async_take` and `Snapshot.restore`."""

    name = "torchsnapshot async_take"
    version = __version__

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int, folder: Path) -> None:
        super().__init__(rank, folder)
        self._state = {part: StateDict(**tensors) for part, tensors in live_state(model, optimizer).items()}
        self._pending: PendingSnapshot | None = None

    def save(self, step: int) -> None:
        if self._folders.saving:
            until(self.survives_kill, "the save before")
        self._pending = Snapshot.async_take(str(self._folders.begin(step)), self._state)

    def poll(self) -> None:
        if self._pending is not None and self._pending.done():
            self._pending.wait()  # raises if it failed
            self._pending = None
            self._folders.finish()

    def restore(self) -> None:
        Snapshot(str(self._folders.newest)).restore(self._state)
