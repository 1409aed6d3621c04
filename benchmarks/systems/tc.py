"""torch_checkpointing 0.1.1 into tmpfs, asynchronously: `CheckpointManager` with one checkpoint process per rank.

`CheckpointManager.save` stages in a thread into shared memory, from which a separate process writes; it first waits
until the last save is written. `before_step` waits as the manager's `lock` around the optimizer's step would. Each rank
writes a file for the model and one for the optimizer; the ranks' processes synchronise over the store of the job, and
rank 0 renames the folder.

Direct I/O, the default for writes, is off: it is made for disks and fails on some file systems. Everything else is at
its default: pinned memory and non-blocking copies are on if there is a GPU. No resharder is used, as ranks do not
change.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch_checkpointing import CheckpointManager, __version__
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from benchmarks.systems.common import FolderSystem, live_state


class Manager(FolderSystem):
    """`CheckpointManager`, saving asynchronously as it does by default."""

    name = "torch_checkpointing"
    version = str(__version__)

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int, folder: Path) -> None:
        super().__init__(rank, folder)
        self._state = live_state(model, optimizer)
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = CheckpointManager(CheckpointManager.Config(storage_config=storage))
        self._written: Future[Any] | None = None

    def save(self, step: int) -> None:
        written = self._manager.save(str(self._folders.path(step)), self._state)
        self.poll()  # the manager has waited for the last save
        self._folders.begin(step)
        self._written = written

    def before_step(self) -> None:
        with self._manager.lock():
            pass

    def poll(self) -> None:
        if self._written is not None and self._written.done():
            self._written.result()
            self._written = None
            self._folders.finish()

    def restore(self) -> None:
        self._manager.load(str(self._folders.newest), into=self._state, strict=True)

    def close(self) -> None:
        super().close()
        self._manager.close()
