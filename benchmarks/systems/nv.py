"""NVRx (nvidia-resiliency-ext) 0.4.1: its local checkpoint manager into tmpfs, asynchronously, without replication.

`LocalCheckpointManager.save` makes a request that an `AsyncCallsQueue` runs in a forked process, which writes one file
per rank with ``torch.save``. The fork isolates the saved state from the live one: every page that training changes
meanwhile is copied. Local checkpoints need a queue that forks a process for each save (``persistent=False``). In each
iteration, all ranks check with collectives whether a save is finished; the manager then deletes the older one. `save`
waits until the previous one is finished, as Megatron does. A restore loads with a new manager, as after a restart, and
copies into the live tensors.

NVRx is made for GPUs: it asks `torch.cuda` for a current device and waits for copies there, and its state dict takes
CUDA tensors only. Here the current device is replaced by the CPU, synchronisation by a no-op, and the state dict by one
for CPU tensors, on which ``.to("cpu")`` is free. Replication to other ranks is off, as by default.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

import torch
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
from torch import nn

from benchmarks.systems.common import Memory, State, copy_into, files_below, live_state, until


class CpuState(TensorAwareStateDict):  # type: ignore[misc]
    """A state dict of CPU tensors, with only the methods that the manager uses without replication."""

    def __init__(self, state: State) -> None:
        self.state = state

    @property
    def tensors(self) -> Iterable[torch.Tensor]:
        return [tensor for part in self.state.values() for tensor in part.values()]

    @property
    def is_hollow(self) -> bool:
        return False

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None: ...

    def restore_tensor_device(self, non_blocking: bool = True) -> None: ...

    def pop_tensors(self) -> NoReturn:
        raise NotImplementedError("for replication only")

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> NoReturn:
        raise NotImplementedError("for replication only")

    def init_tensors(self) -> NoReturn:
        raise NotImplementedError("for replication only")


def use_cpu() -> None:
    """Replace the calls to `torch.cuda` that NVRx makes, so that it works on the CPU."""
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda device=None: None


class Local:
    """`LocalCheckpointManager` with an `AsyncCallsQueue`."""

    name = "NVRx local checkpoints"
    version = version("nvidia-resiliency-ext")

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int, folder: Path) -> None:
        use_cpu()
        self._folder = folder
        self._own = folder / str(rank)
        self._world = world
        self._memory = Memory(lambda: files_below(self._own))
        self._state = live_state(model, optimizer)
        self._manager = LocalCheckpointManager(folder)
        self._queue = AsyncCallsQueue(persistent=False)
        self._step = 0

    def save(self, step: int) -> None:
        until(self._finalized, "the save before")
        self._step = step
        self._queue.schedule_async_request(self._manager.save(CpuState(self._state), step, is_async=True))

    def accepted(self) -> bool:
        return True

    def before_step(self) -> None: ...

    def poll(self) -> None:
        self._queue.maybe_finalize_async_calls(blocking=False)

    def survives_kill(self) -> bool:
        return len(list(self._folder.glob(f"*/iter_{self._step:07}_*_local.pt"))) == self._world

    def done(self) -> bool:
        return not self._queue.get_num_unfinalized_calls() and len(files_below(self._own)) <= 1

    def wait(self) -> None:
        until(self._finalized, "a save")
        until(self.done, "deleting the save before")

    def _finalized(self) -> bool:
        """Whether the newest save is finished. A collective: call it equally often on all ranks."""
        self.poll()
        return not self._queue.get_num_unfinalized_calls()

    def restore(self) -> None:
        manager = LocalCheckpointManager(self._folder)
        if manager.find_latest() != self._step:
            raise RuntimeError(f"the newest save that was found is not that of step {self._step}")
        loaded, _ = manager.load()
        copy_into(self._state, loaded.state)

    def extra_bytes(self) -> int:
        return self._memory.extra_bytes()

    def processor_s(self) -> float:
        return self._memory.processor_s()

    def close(self) -> None:
        self.wait()
        self._queue.close()
