"""A script that changed by one line, its last: ``survive(main)`` instead of ``main()``. Every rank is a node.

``python tests/survivors.py FOLDER KILLS``: each rank writes what happens as lines of JSON into the folder. KILLS is
JSON, ``[[attempt, rank, point, step], ...]``: where a trainer kills itself, as torchrun or `survive` number attempts.
Points are *entered*, *joined*, *top*, *middle* and *stepped*. In place of a point, *bug* raises in the middle of a
step, *exit* ends the process with code 7, *term* sends SIGTERM to what the launcher started, *drain* says so on
standard output and waits until this node is being drained, and *hang* says so there and sleeps. *lost* kills the node:
its SMP, its supervisor and itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from holdfast import InMemorySnapshot
from holdfast.integrations.inprocess import survive
from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.paths import arena_path, read_owner

STEPS = 10


def wait_until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


class Script:
    """What one rank does."""

    def __init__(self, folder: str, kills: str) -> None:
        self.folder = Path(folder)
        self.kills = json.loads(kills)

    @property
    def rank(self) -> int:
        return int(os.environ.get("RANK", "0"))  # a standby has none before it takes a place

    @property
    def attempt(self) -> int:
        return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

    def say(self, kind: str, **what: Any) -> None:
        what |= {"kind": kind, "attempt": self.attempt, "pid": os.getpid(), "at": time.monotonic()}
        with (self.folder / f"{self.rank}.json").open("a") as out:
            out.write(json.dumps(what) + "\n")

    def reach(self, point: str, step: int = 0) -> None:
        for attempt, rank, what, when in self.kills:
            if (attempt, rank, when) != (self.attempt, self.rank, step):
                continue
            if what == point:
                self.say("killed")
                os.kill(os.getpid(), signal.SIGKILL)
            if point == "middle" and what == "lost":
                self.say("killed")
                owner = read_owner(arena_path("survivors"))
                assert owner is not None
                os.kill(owner.pid, signal.SIGKILL)
                os.kill(os.getppid(), signal.SIGKILL)  # with which the kernel kills this process
                signal.pause()
            if point == "middle" and what == "bug":
                raise ValueError(f"a bug at step {step}")
            if point == "middle" and what == "exit":
                sys.exit(7)
            if point == "middle" and what == "term":
                os.kill(os.getppid(), signal.SIGTERM)
                wait_until(lambda: signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)  # it is heard once
            if point == "middle" and what == "drain":
                self.await_drain()
            if point == "middle" and what == "hang":
                print(os.getpid(), "hangs", flush=True)
                time.sleep(600)

    def await_drain(self) -> None:
        client = SmpClient(arena_path("survivors"), "survivors")
        print("drain", flush=True)
        wait_until(lambda: client.board.leaving)
        client.close()

    def make(self) -> None:
        """Make the initial state of the job."""
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.Dropout(0.2), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 1)
        )
        self.optim = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        torch.manual_seed(1 + self.rank)

    def wrap(self) -> torch.nn.Module:
        """The model for this process group. DDP would order its sums anew after its first step otherwise, and so round
        differently."""
        return DistributedDataParallel(self.net, find_unused_parameters=True)

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
        model, losses = self.wrap(), []
        for _ in range(STEPS):
            loss = self.loss(model)
            torch.autograd.backward(loss)
            self.optim.step()
            losses.append(float(loss.item()).hex())
        self.say("undisturbed", losses=losses, **self.end())

    def main(self) -> None:
        self.reach("entered")
        if "RANK" in os.environ:
            dist.init_process_group("gloo")
        else:
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        self.reach("joined")
        if not self.attempt:
            self.undisturbed()
        self.make()
        model = self.wrap()
        with InMemorySnapshot(self.net, self.optim) as snap:
            self.say("entered", step=snap.step, epoch=snap.restored.epoch, how=snap.restored.how)
            for step in snap.steps(STEPS):
                self.reach("top", step)
                loss = self.loss(model)
                snap.drain(60)
                dist.barrier()  # or a rank would wait for what a node that is lost has not yet said
                self.reach("middle", step)
                torch.autograd.backward(loss)
                self.optim.step()
                self.reach("stepped", step)
                self.say("step", step=step, loss=float(loss.item()).hex())
        self.say("done", **self.end())
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    script = Script(*sys.argv[1:])
    node = os.environ.setdefault("HOLDFAST_NODE", f"node{script.rank}")
    os.environ["HOLDFAST_ARENA"] = str(script.folder / node)
    survive(script.main)
