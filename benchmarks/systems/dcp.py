"""torch.distributed.checkpoint (DCP) into tmpfs: `Sync`, `AsyncThread` and `AsyncProcess`.

The version is torch's. Each rank's tensors are the local parts of DTensors, sharded over all ranks as with FSDP2, so
that DCP writes all of them; Adam's step counters, equal on all ranks, are plain tensors. The asynchronous classes use
`async_save` with the best available stager, which stages in a thread into reused buffers. Staging the next save before
the last one is written would overwrite the last one, so `save` waits until it is written; `before_step` waits for
staging. `AsyncProcess` stages into shared memory, from which DCP's daemon process writes.

If the state is on a GPU, pinned memory and non-blocking copies are on, and both classes use shared memory, which is
DCP's own choice there. Everything else is at its default: the planner (a plan is made for each save; caching it would
halve that), one file and one writing thread per rank, and fsync, which tmpfs ignores.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.systems.common import DEADLINE_S, FolderSystem, live_state


class Sync(FolderSystem):
    """`dcp.save`: training waits until everything is written."""

    name = "DCP save"
    version = torch.__version__

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int, folder: Path) -> None:
        super().__init__(rank, folder)
        self._device = next(model.parameters()).device
        mesh = init_device_mesh(self._device.type, (world,))
        self._state: dict[str, dict[str, Any]] = {
            part: {
                name: DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False) if tensor.ndim else tensor
                for name, tensor in tensors.items()
            }
            for part, tensors in live_state(model, optimizer).items()
        }

    def save(self, step: int) -> None:
        save(self._state, checkpoint_id=self._folders.begin(step))
        self._folders.finish()

    def restore(self) -> None:
        load(self._state, checkpoint_id=self._folders.newest)


class _Async(Sync):
    _kind: AsyncCheckpointerType
    _shared: bool

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int, folder: Path) -> None:
        super().__init__(model, optimizer, rank, world, folder)
        there = self._device.type == "cuda"
        options = StagingOptions(
            use_pinned_memory=there,
            use_shared_memory=there or self._shared,
            use_async_staging=True,
            use_non_blocking_copy=there,
        )
        self._stager = DefaultStager(options)
        self._staged: Future[None] | None = None
        self._written: Future[Any] | None = None

    def save(self, step: int) -> None:
        if self._written is not None:
            self._written.result(DEADLINE_S)
            self.poll()
        response = async_save(
            self._state,
            checkpoint_id=self._folders.begin(step),
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
        )
        assert isinstance(response, AsyncSaveResponse)
        self._staged, self._written = response.staging_completion, response.upload_completion

    def before_step(self) -> None:
        if self._staged is not None:
            self._staged.result(DEADLINE_S)
            self._staged = None

    def poll(self) -> None:
        if self._written is not None and self._written.done():
            self._written.result()
            self._written = None
            self._folders.finish()

    def close(self) -> None:
        super().close()
        self._stager.close()


class AsyncThread(_Async):
    """`dcp.async_save`, written by a thread of the trainer."""

    name = "DCP async_save, thread"
    _kind = AsyncCheckpointerType.THREAD
    _shared = False


class AsyncProcess(_Async):
    """`dcp.async_save`, written by a separate process."""

    name = "DCP async_save, process"
    _kind = AsyncCheckpointerType.PROCESS
    _shared = True
