"""DLRover 0.6.1, Flash Checkpoint to memory: `DdpCheckpointer` with `StorageType.MEMORY`, one shard per rank.

`save_checkpoint` copies the state into POSIX shared memory while training waits. There is one buffer per rank, so a
trainer that is killed during a save loses the previous save too. Only an agent process knows the layout of the tensors.
As ``dlrover-run`` also needs a master and does not start on torch 2.13, rank 0 starts only the agent's saver, as a
process that outlives the trainers. The master and the rest of the agent do not run, and are not counted as memory.

Nothing is written to disk, and replicas on other nodes are off (`replica_count=0`), as by default. Loading returns
views of the shared memory; they are copied into the live tensors, since training on them would change the saved state.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer
from torch import nn

from benchmarks.systems.common import DEADLINE_S, Memory, copy_into, live_state

AGENT = Path(__file__).with_name("flash_agent.py")


class Flash:
    """`DdpCheckpointer`, saving to memory."""

    name = "DLRover Flash Checkpoint"
    version = version("dlrover")

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int, folder: Path) -> None:
        os.environ |= {"TORCHELASTIC_RUN_ID": folder.name, "ROLE_NAME": "dlrover-trainer"}  # uses the agent's saver
        segment = Path(f"/dev/shm/{folder.name}_ckpt_shm_{rank}")
        self._memory = Memory(lambda: [segment])
        self._state = live_state(model, optimizer)
        self._agent = (
            subprocess.Popen([sys.executable, str(AGENT)], stdin=subprocess.PIPE, start_new_session=True)
            if rank == 0
            else None
        )
        self._checkpointer = DdpCheckpointer(str(folder), local_shard_num=world, global_shard_num=world)

    def save(self, step: int) -> None:
        self._checkpointer.save_checkpoint(step, dict(self._state), storage_type=StorageType.MEMORY)
        if self._checkpointer._engine._cached_step != step:
            raise RuntimeError(f"the save of step {step} was skipped")  # DLRover only logs it

    def accepted(self) -> bool:
        return True

    def before_step(self) -> None: ...

    def poll(self) -> None: ...

    def survives_kill(self) -> bool:
        return True

    def done(self) -> bool:
        return True

    def wait(self) -> None: ...

    def restore(self) -> None:
        copy_into(self._state, self._checkpointer.load_checkpoint())

    def extra_bytes(self) -> int:
        return self._memory.extra_bytes()

    def processor_s(self) -> float:
        return self._memory.processor_s()

    def close(self) -> None:
        if self._agent is not None:
            self._agent.communicate(b"end", timeout=DEADLINE_S)
