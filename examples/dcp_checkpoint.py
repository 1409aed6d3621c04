"""Distributed checkpoints in memory: run it, kill it with ``kill -9``, run it again, on more or fewer ranks.

``HOLDFAST_JOB=dcp torchrun --standalone --nproc-per-node 2 -m holdfast.examples.dcp_checkpoint``
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from holdfast.integrations.dcp import MemoryReader, MemoryWriter

STEPS = 60


def main() -> None:
    os.environ.setdefault("HOLDFAST_JOB", "dcp")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def state() -> dict[str, Any]:
        return {"state": get_state_dict(model, optim), "step": step}

    step = 0
    reader = MemoryReader()
    if not reader.is_empty:
        found = state()
        load(found, storage_reader=reader)
        set_state_dict(model, optim, model_state_dict=found["state"][0], optim_state_dict=found["state"][1])
        step = found["step"]
    writer = MemoryWriter()
    while step < STEPS:
        batch = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
        model(batch[rank::world]).square().mean().backward()
        optim.step()
        optim.zero_grad()
        step += 1
        save(state(), storage_writer=writer)
        print(f"step {step} is in memory", flush=True)
    total = float(torch.cat([p.detach().full_tensor().flatten() for p in model.parameters()]).double().sum())
    writer.close(keep=False)
    reader.close()
    if rank == 0:
        print(f"{step} steps; sum of all weights {total.hex()}")


if __name__ == "__main__":
    main()
