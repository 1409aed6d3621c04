"""A training script for ckpt-chaos (github.com/rkb32/ckpt-chaos), which kills the script whenever it opens, creates,
renames or removes a file, restarts it, and compares the final weights.

``pip install ckpt-chaos==0.1.8``, then::

    ckpt-chaos run --work /dev/shm/ckpt-chaos --modes before,torn,term,unsynced --result-file '{out}/weights' \\
        -- python -m benchmarks.ckpt_chaos_target {out}

The arena is in the folder that ckpt-chaos watches, so the SMP, which the trainer starts, is also killed at its files.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn

from holdfast import InMemorySnapshot

STEPS = 8
DRAIN_S = 10.0


def main() -> None:
    out = Path(sys.argv[1])
    os.environ |= {"HOLDFAST_ARENA": str(out / "arena"), "HOLDFAST_JOB": "ckpt-chaos"}
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.BatchNorm1d(16), nn.Linear(16, 1))
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    with InMemorySnapshot(model, optim, overhead_budget=0) as snap:
        print(f"begins at step {snap.step}", flush=True)
        for _ in snap.steps(STEPS):
            loss = model(torch.randn(8, 16)).square().mean()
            optim.zero_grad()
            torch.autograd.backward(loss)
            snap.drain(DRAIN_S)
            optim.step()
    weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    (out / "weights").write_bytes(weights)


if __name__ == "__main__":
    main()
