"""Replicas that come and go under torchft: one that returns gets its state from another node's memory.

It needs ``pip install 'holdfast-train[torchft]'``. On each of two nodes, with R = 0 and R = 1, once they
have an address and a token (docs/start.md)::

    torchft_lighthouse --min_replicas 1 &          # on one node; set TORCHFT_LIGHTHOUSE to its address
    HOLDFAST_JOB=ft REPLICA_GROUP_ID=R torchrun --standalone --max-restarts 9 -m holdfast.examples.torchft_replicas
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from holdfast.integrations.torchft import MemoryTransport

TIMEOUT = timedelta(seconds=20)


def main() -> None:
    replica = int(os.environ["REPLICA_GROUP_ID"])
    print(f"replica {replica} is up", flush=True)
    torch.manual_seed(replica)  # initial weights differ; torchft makes them equal through the transport
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optim": inner.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optim"])

    transport = MemoryTransport[Any]()
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"replica{replica}",
        timeout=TIMEOUT,
        checkpoint_transport=transport,
    )
    ddp, optim = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    while (step := manager.current_step()) < int(os.environ.get("STEPS", "200")):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + replica))
        optim.zero_grad()
        ddp(x).square().mean().backward()
        optim.step()
        total = float(torch.cat([p.detach().flatten() for p in model.parameters()]).double().sum())
        print(f"step {manager.current_step()} participants {manager.num_participants()} sum {total.hex()}", flush=True)
    manager.shutdown()


if __name__ == "__main__":
    main()
