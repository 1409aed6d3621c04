"""A job whose ranks survive each other's death: survivors leave the block, join a new process group, and enter again.

``python -m tests.survivors ORDERS``: JSON with ``port`` (of the launcher's store), ``rank``, ``world``, ``turn``,
``out`` (a file for events as lines of JSON), ``kills`` ({turn: [rank, point, step]}).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from holdfast import InMemorySnapshot
from holdfast.integrations.inprocess import RANK_LOST, abandon_process_groups

STEPS = 8
TURNS = 6
TIMEOUT_S = 200
"""Timeout of the process group: survivors wait for the replacement's imports, even on a busy machine."""


class Rank:
    """One rank, in this process."""

    def __init__(self, orders: dict[str, Any]) -> None:
        self.rank: int = orders["rank"]
        self.world: int = orders["world"]
        self.kills: dict[str, list[Any]] = orders["kills"]
        self.turn: int = orders["turn"]
        self.out = Path(orders["out"]).open("a")  # noqa: SIM115  # for as long as the process lives
        self.store = TCPStore("127.0.0.1", orders["port"], is_master=False, timeout=timedelta(seconds=TIMEOUT_S))

    def make(self) -> None:
        """Make the initial state of the job."""
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.Dropout(0.2), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 1)
        )
        self.optim = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        torch.manual_seed(1 + self.rank)

    def say(self, kind: str, **what: Any) -> None:
        what |= {"kind": kind, "turn": self.turn, "pid": os.getpid(), "at": time.monotonic()}
        self.out.write(json.dumps(what) + "\n")
        self.out.flush()

    def reach(self, point: str, step: int) -> None:
        if self.kills.get(str(self.turn)) == [self.rank, point, step]:
            os.kill(os.getpid(), signal.SIGKILL)

    def join(self, name: str) -> torch.nn.Module:
        store = PrefixStore(name, self.store)
        timeout = timedelta(seconds=TIMEOUT_S)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world, timeout=timeout)
        return torch.nn.parallel.DistributedDataParallel(self.net, find_unused_parameters=True)

    def loss(self, model: torch.nn.Module) -> torch.Tensor:
        self.optim.zero_grad()
        loss: torch.Tensor = model(torch.randn(4, 8)).square().mean()
        return loss

    def end(self) -> dict[str, Any]:
        """A summary of the final state."""
        state = [value.double().sum().item() for value in self.net.state_dict().values()]
        return {"state": [float(value).hex() for value in state], "random": float(torch.rand(1).item()).hex()}

    def undisturbed(self) -> None:
        """Run the same steps without snapshots and kills."""
        self.make()
        model, losses = self.join("undisturbed"), []
        for _ in range(STEPS):
            loss = self.loss(model)
            torch.autograd.backward(loss)
            self.optim.step()
            losses.append(float(loss.item()).hex())
        self.say("undisturbed", losses=losses, **self.end())
        del model
        abandon_process_groups()

    def train(self) -> None:
        """Train in one turn. Raises the error of a collective when another rank has died."""
        model = self.join(f"turn{self.turn}")
        self.reach("joined", 0)
        with InMemorySnapshot(self.net, self.optim) as snap:
            self.say("entered", step=snap.step, epoch=snap.restored.epoch, how=snap.restored.how)
            for step in snap.steps(STEPS):
                self.reach("top", step)
                loss = self.loss(model)
                snap.drain(60)
                self.reach("middle", step)
                torch.autograd.backward(loss)
                self.optim.step()
                self.reach("stepped", step)
                self.say("step", step=step, loss=float(loss.item()).hex())

    def run(self) -> None:
        self.say("begun")
        if not self.turn:
            self.undisturbed()
        self.make()
        while self.turn < TURNS:
            try:
                self.train()
                break
            except RANK_LOST as error:
                self.say("lost", error=type(error).__name__)
            abandon_process_groups()
            self.turn += 1
        self.say("done", **self.end())
        abandon_process_groups()


if __name__ == "__main__":
    torch.set_num_threads(1)
    Rank(json.loads(sys.argv[1])).run()
