"""The server's side of FedImpro (arXiv 2402.07011). In each round clients train on their own data and on features drawn
from class statistics that the server keeps; the server then averages the clients' updates and statistics.

Why it is hard to protect: the mean and deviation of each class, the round number and the generator that picks clients
belong to the server alone, and no ``state_dict`` contains them; clients keep nothing between rounds. A round is a step.
No forward of the server's model begins it, so the loop calls `snap.begin()`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from holdfast import InMemorySnapshot
from holdfast.chaos import drill
from tests.proof.jobs import alone
from tests.proof.jobs.plain import seed_everything

CLASSES, INPUTS, FEATURES, CLIENTS, PICKED, LOCAL_STEPS = 4, 12, 16, 10, 2, 3


class FedImpro:
    """`chaos.drill.Job`: every rank trains some of a round's clients, and then takes the server's step itself.

    Args:
        without: the state to leave untracked, for an audit to find: ``statistics``, ``round`` or ``clients`` (the
            generator that picks them).
    """

    def __init__(self, seed: int, without: str = "") -> None:
        seed_everything(seed)
        self._seed = seed
        self._without = without
        self.model = nn.Sequential(nn.Sequential(nn.Linear(INPUTS, FEATURES), nn.ReLU()), nn.Linear(FEATURES, CLASSES))
        self.client = copy.deepcopy(self.model)
        self.optim = torch.optim.SGD(
            self.model.parameters(), lr=1.0, momentum=0.5
        )  # the server's; its gradient is minus the clients' mean update
        self.statistics = {"mean": torch.zeros(CLASSES, FEATURES), "deviation": torch.ones(CLASSES, FEATURES)}
        self.round = 0
        self.snap: InMemorySnapshot | None = None
        self.picks = np.random.default_rng([seed, 99])

    def protect(self, **options: Any) -> InMemorySnapshot:
        self.snap = snap = InMemorySnapshot(self.model, self.optim, **options)
        if self._without != "statistics":
            snap.track("statistics", tensors=self.statistics)
        if self._without != "round":
            snap.track("round", lambda: self.round, lambda value: setattr(self, "round", value))
        if self._without != "clients":
            snap.track("clients", lambda: self.picks.bit_generator.state, self._set_picks)
        return snap

    def _set_picks(self, state: dict[str, Any]) -> None:
        self.picks.bit_generator.state = state

    def step(self, step: int, middle: Callable[[], None]) -> float:
        if self.snap is not None:
            self.snap.begin()
        picked = self.picks.choice(CLIENTS, PICKED * dist.get_world_size(), replace=False)
        mine = picked[dist.get_rank() :: dist.get_world_size()]
        moved = [torch.zeros_like(parameter) for parameter in self.model.parameters()]
        seen = torch.zeros(CLASSES, 1 + 2 * FEATURES)
        loss = torch.zeros(())
        for client in mine:
            loss += self._train(int(client), moved, seen)
        middle()
        for tensor in (*moved, seen, loss):
            dist.all_reduce(tensor)
        for parameter, delta in zip(self.model.parameters(), moved, strict=True):
            parameter.grad = -delta / len(picked)
        self._learn_statistics(seen)
        self.round += 1
        self.optim.step()
        return float(loss) / len(picked)

    def _train(self, client: int, moved: list[torch.Tensor], seen: torch.Tensor) -> torch.Tensor:
        """Train one client for a round, and add its update to `moved` and its feature sums to `seen`.

        It starts from the server's model and keeps nothing else. Returns its last loss.
        """
        self.client.load_state_dict(self.model.state_dict())
        low, high = self.client
        draw = torch.Generator().manual_seed(self._seed + 1000 * self.round + client)
        optim = torch.optim.SGD(self.client.parameters(), lr=0.1)
        loss = torch.zeros(())
        for _ in range(LOCAL_STEPS):
            labels = (torch.randint(0, 2, (8,), generator=draw) + client) % CLASSES  # a client has data of two classes
            inputs = torch.randn(8, INPUTS, generator=draw) + nn.functional.one_hot(labels, INPUTS) * 2
            features = low(inputs)
            others = torch.randint(0, CLASSES, (8,), generator=draw)
            noise = torch.randn(8, FEATURES, generator=draw)
            drawn = self.statistics["mean"][others] + noise * self.statistics["deviation"][others]
            logits = high(torch.cat([features, drawn]))
            loss = nn.functional.cross_entropy(logits, torch.cat([labels, others]))
            self.client.zero_grad()
            torch.autograd.backward(loss)
            optim.step()
            rows = torch.cat([torch.ones(8, 1), features.detach(), features.detach().square()], dim=1)
            seen.index_add_(0, labels, rows)
        for delta, parameter, start in zip(moved, self.client.parameters(), self.model.parameters(), strict=True):
            delta += (parameter - start).detach()
        return loss.detach()

    def _learn_statistics(self, seen: torch.Tensor) -> None:
        known = seen[:, 0] > 0
        mean, square = torch.split(seen[known, 1:] / seen[known, :1], FEATURES, dim=1)
        self.statistics["mean"][known] = self.statistics["mean"][known].lerp(mean, 0.5)
        deviation = (square - mean.square()).clamp_min(1e-4).sqrt()
        self.statistics["deviation"][known] = self.statistics["deviation"][known].lerp(deviation, 0.5)

    def state(self) -> drill.State:
        yield from drill.modules(self.model)
        yield from drill.optimizer(self.optim)
        yield from self.statistics.items()
        yield "round", self.round
        yield "clients", self.picks.bit_generator.state
        yield from drill.generators()


if __name__ == "__main__":
    alone.main(FedImpro)
