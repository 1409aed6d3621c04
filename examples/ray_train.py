"""Ray Train with its state in memory and without checkpoints: ``python -m holdfast.examples.ray_train``.

If a worker or its node dies, Ray Train restarts all workers, and they resume at the step that they were in.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

import ray
import ray.train.torch
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import holdfast.integrations.ray
from holdfast import InMemorySnapshot
from holdfast.integrations.ray.train import GiveUp

WIDTH, BATCH = 16, 64


def train(config: dict[str, Any]) -> float:
    """Run one worker, which learns a fixed matrix, and return its final loss. Ray Train made the process group."""
    torch.set_num_threads(1)
    rank, world = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    torch.manual_seed(0)
    wanted = torch.randn(WIDTH, WIDTH)
    model = ray.train.torch.prepare_model(nn.Linear(WIDTH, WIDTH))
    optim = torch.optim.Adam(model.parameters(), lr=0.05)
    loss = torch.tensor(torch.inf)
    with InMemorySnapshot(model, optim, job=config["job"]) as snap:
        for step in snap.steps(config["steps"]):
            seen = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step * world + rank))
            loss = nn.functional.mse_loss(model(seen), seen @ wanted)
            optim.zero_grad()
            torch.autograd.backward(loss)
            optim.step()
    ray.train.report({"loss": loss.item()})
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--spread", action="store_true", help="every worker on a node of its own")
    args = parser.parse_args()
    ray.init(**({} if "RAY_ADDRESS" in os.environ else {"num_cpus": args.workers, "include_dashboard": False}))
    job = os.environ.get("HOLDFAST_JOB", "ray")
    holdfast.integrations.ray.start(job)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        trainer = TorchTrainer(
            train,
            train_loop_config={"job": job, "steps": args.steps},
            scaling_config=ScalingConfig(
                num_workers=args.workers, placement_strategy="STRICT_SPREAD" if args.spread else "PACK"
            ),
            run_config=RunConfig(
                storage_path=folder, failure_config=FailureConfig(max_failures=10), callbacks=[GiveUp()]
            ),
        )
        print(f"the loss is {trainer.fit().return_value:.6f} in the end")
    holdfast.integrations.ray.stop(job, remove=True)


if __name__ == "__main__":
    from holdfast.examples import ray_train  # Ray's workers import this module by name, not __main__

    ray_train.main()
