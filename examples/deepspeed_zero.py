"""A DeepSpeed run that may be killed at any moment: run it, kill it with ``kill -9``, run it again.

``HOLDFAST_JOB=deepspeed torchrun --standalone --nproc-per-node 2 -m holdfast.examples.deepspeed_zero``. It needs
``pip install 'holdfast-train[deepspeed]'`` and, on a machine without GPUs, ``DS_ACCELERATOR=cpu``.
"""

from __future__ import annotations

import os

import deepspeed
import torch

from holdfast.integrations.deepspeed import MemoryCheckpointEngine

STEPS = 60
FOLDER = os.environ.get("FOLDER", "/dev/shm/deepspeed-files")  # has only placeholders; the SMP has the data


def main() -> None:
    os.environ.setdefault("HOLDFAST_JOB", "deepspeed")
    deepspeed.init_distributed()
    rank, world = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
    config = {
        "train_batch_size": 8 * world,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    memory = engine.checkpoint_engine = MemoryCheckpointEngine()
    engine.load_checkpoint(FOLDER)
    while engine.global_steps < STEPS:
        step = engine.global_steps
        batch = torch.randn(8, 32, generator=torch.Generator().manual_seed(step * world + rank)).bfloat16()
        loss = engine(batch).float().square().mean()
        engine.backward(loss)
        engine.step()
        engine.save_checkpoint(FOLDER, tag=f"step{engine.global_steps}")
        if rank == 0:
            print(f"step {engine.global_steps} loss {loss.item():.6f}", flush=True)
    total = float(torch.cat([p.detach().flatten() for p in engine.parameters()]).double().sum())
    memory.close(keep=False)
    if rank == 0:
        print(f"{engine.global_steps} steps; sum of all weights {total.hex()}")


if __name__ == "__main__":
    main()
