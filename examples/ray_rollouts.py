"""Reinforcement learning under Ray: stateless players generate experience; a worker group of trainers learns from it
and keeps its state in memory: ``HOLDFAST_JOB=rollouts python -m holdfast.examples.ray_rollouts``; on a cluster, with
``RAY_ADDRESS=auto`` and ``--nodes 2``.

If a trainer or its node dies, Ray restarts the trainer, and training resumes where it was. If a player dies, Ray
restarts it and repeats the call. Its result depends only on its arguments, so nothing changes.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from torch import nn

import holdfast.integrations.ray
from holdfast import InMemorySnapshot

CHOICES, WIDTH, BATCH = 4, 8, 64

Experience = tuple[np.ndarray, np.ndarray, np.ndarray]


class Player:
    """Sees random numbers, and is rewarded for choosing the position of the largest among the first `CHOICES`."""

    def play(self, weights: np.ndarray, bias: np.ndarray, seed: int) -> Experience:
        """Play a batch, and return what was seen, what was chosen, and the rewards."""
        source = np.random.default_rng(seed)
        seen = source.standard_normal((BATCH, WIDTH), np.float32)
        chances = np.exp(seen @ weights.T + bias)
        chances /= chances.sum(axis=1, keepdims=True)
        chosen = (chances.cumsum(axis=1) < source.random((BATCH, 1))).sum(axis=1).clip(max=CHOICES - 1)
        return seen, chosen, (chosen == seen[:, :CHOICES].argmax(axis=1)).astype(np.float32)


def train(players: list[Any], steps: int) -> list[float]:
    """Run one trainer, and return its player's mean reward at each step since it started or resumed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    policy = nn.Linear(WIDTH, CHOICES)
    optim = torch.optim.Adam(policy.parameters(), lr=0.05)
    earned = []
    with InMemorySnapshot(policy, optim) as snap:
        for step in snap.steps(steps):
            weights, bias = (parameter.detach().numpy().copy() for parameter in policy.parameters())
            experience: Experience = ray.get(players[rank].play.remote(weights, bias, step * world + rank))
            seen, chosen, worth = (torch.from_numpy(part.copy()) for part in experience)
            chances = torch.log_softmax(policy(seen), dim=1).gather(1, chosen[:, None])[:, 0]
            loss = -(chances * (worth - worth.mean())).mean()
            optim.zero_grad()
            torch.autograd.backward(loss)
            for parameter in policy.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
            optim.step()
            earned.append(worth.mean().item())
    return earned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--per-node", type=int, default=2)
    args = parser.parse_args()
    ray.init(**({} if "RAY_ADDRESS" in os.environ else {"num_cpus": args.per_node, "include_dashboard": False}))
    holdfast.integrations.ray.start()
    player = ray.remote(Player).options(num_cpus=0, max_restarts=-1, max_task_retries=-1)
    players = [player.remote() for _ in range(args.nodes * args.per_node)]
    with holdfast.integrations.ray.WorkerGroup(args.nodes, args.per_node) as workers:
        for rank, earned in enumerate(workers.run(train, players, args.steps)):
            if earned:
                print(f"trainer {rank}: its player earned {earned[0]:.2f} at first, {earned[-1]:.2f} in the end")
    holdfast.integrations.ray.stop(remove=True)


if __name__ == "__main__":
    from holdfast.examples import ray_rollouts  # Ray's workers import this module by name, not __main__

    ray_rollouts.main()
