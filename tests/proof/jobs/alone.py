"""Trains a job without a virtual cluster."""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from holdfast.chaos.drill import Job


def main(job: type[Job]) -> None:
    """Train a job in one process, or under torchrun: ``--steps 20 --seed 1 --option without=residual``."""
    parser = argparse.ArgumentParser(description=job.__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--option", action="append", default=[], metavar="NAME=TEXT", help="of the job")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    training = job(args.seed, **dict(option.split("=", 1) for option in args.option))
    with training.protect() as snap:
        for step in range(snap.step, args.steps):
            loss = training.step(step, lambda: None)
            if dist.get_rank() == 0:
                print(f"step {step + 1} loss {loss}", flush=True)
    dist.destroy_process_group()
