"""The time from a kill to the next step, when all ranks are restarted or when survivors keep their processes.

``python -m benchmarks.inprocess [--rounds 2] [--ranks 3] [--mb 64] [--markdown FILE]``. Every rank is a node with its
own SMP. Rank 1 is killed with SIGKILL in the middle of a step, and comes back in one of three ways:

* ``restart``: all other ranks are killed too, and all ranks are started again, as torchrun does;
* ``in-process``: the survivors abandon their process groups and form new ones with one newly started process;
* ``spare``: as ``in-process``, but the new process is a waiting spare that has already imported everything.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from holdfast import InMemorySnapshot
from holdfast.integrations.inprocess import RANK_LOST, abandon_process_groups
from holdfast.smp_daemon.shared.paths import ARENA_ENV, read_owner

WAYS = ("restart", "in-process", "spare")
VICTIM, KILL_AT, STEPS = 1, 4, 6
DEADLINE_S = 180.0
MOMENTS = ("noticed", "ready", "joined", "restored", "step")
Event = dict[str, Any]


class Rank:
    """One trainer: ``python -m benchmarks.inprocess --orders JSON``."""

    def __init__(self, orders: dict[str, Any]) -> None:
        self._orders = orders
        torch.set_num_threads(1)
        self._out = Path(orders["out"]).open("a")  # noqa: SIM115  # for as long as the process lives
        self._store = TCPStore("127.0.0.1", orders["port"], is_master=False, timeout=timedelta(seconds=DEADLINE_S))
        width = int((orders["mb"] * 1e6 / 4 / 3 / 4) ** 0.5)  # four layers, with Adam's moments
        self._net = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))
        self._optim = torch.optim.Adam(self._net.parameters(), lr=1e-4)
        self._width = width

    def _say(self, moment: str, turn: int) -> None:
        self._out.write(json.dumps({"moment": moment, "turn": turn, "at": time.monotonic(), "pid": os.getpid()}) + "\n")
        self._out.flush()

    def _train(self, turn: int) -> None:
        store = PrefixStore(f"turn{turn}", self._store)
        rank, world, timeout = self._orders["rank"], self._orders["world"], timedelta(seconds=DEADLINE_S)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
        self._say("joined", turn)
        with InMemorySnapshot(self._net, self._optim) as snap:
            self._say("restored", turn)
            for step in range(snap.step, STEPS):
                self._net(torch.ones(2, self._width)).square().mean().backward()
                snap.drain(30)
                if rank == VICTIM and step == KILL_AT and turn == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                for parameter in self._net.parameters():
                    dist.all_reduce(parameter.grad)
                self._optim.step()
                self._optim.zero_grad()
                self._say("step", turn)

    def run(self) -> None:
        """Train to the end, with one more attempt after another rank was lost."""
        turn = self._orders["turn"]
        if self._orders["waits"]:
            self._say("waits", turn)
            self._store.wait(["needed"])
        self._say("ready", turn)
        for attempt in (turn, turn + 1):
            try:
                self._train(attempt)
                break
            except RANK_LOST:
                self._say("noticed", attempt)
            abandon_process_groups()
        abandon_process_groups()


class Trial:
    """One kill, on one set of nodes."""

    def __init__(self, base: Path, way: str, ranks: int, mb: int) -> None:
        base.mkdir(mode=0o700)
        self._base, self._way, self._ranks, self._mb = base, way, ranks, mb
        timeout = timedelta(seconds=DEADLINE_S)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def _start(self, rank: int, turn: int, *, waits: bool = False) -> subprocess.Popen[bytes]:
        own = self._base / f"node{rank}"
        own.mkdir(exist_ok=True, mode=0o700)
        orders = {
            "port": self._store.port,
            "rank": rank,
            "world": self._ranks,
            "turn": turn,
            "mb": self._mb,
            "waits": waits,
            "out": str(self._base / f"{rank}.json"),
        }
        names = {ARENA_ENV: str(own), "HOLDFAST_NODE": f"node{rank}", "HOLDFAST_JOB": "bench"}
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.inprocess", "--orders", json.dumps(orders)],
            env={**os.environ, **names, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            stderr=(self._base / "log").open("ab"),
        )

    def _events(self, rank: int) -> list[Event]:
        path = self._base / f"{rank}.json"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def run(self) -> dict[str, float]:
        """Seconds from the kill until the last rank reached each moment."""
        spare = self._start(VICTIM, 1, waits=True) if self._way == "spare" else None
        deadline = time.monotonic() + DEADLINE_S
        while spare is not None and not self._events(VICTIM):  # the spare must be ready before the kill
            if time.monotonic() > deadline:
                raise TimeoutError("the spare does not come up")
            time.sleep(0.05)
        for rank in range(self._ranks):
            self._processes[rank] = self._start(rank, 0)
        killed = self._processes[VICTIM]
        if killed.wait(DEADLINE_S) != -signal.SIGKILL:
            raise RuntimeError((self._base / "log").read_text()[-2000:])
        at, again = time.monotonic(), 1
        if self._way == "restart":
            again = 2  # survivors may have begun turn 1 and left addresses in the store before they are killed
            for process in self._processes.values():
                process.kill()
                process.wait(DEADLINE_S)
            self._processes = {rank: self._start(rank, again) for rank in range(self._ranks)}
        elif spare is not None:
            self._store.set("needed", "1")
            self._processes[VICTIM] = spare
        else:
            self._processes[VICTIM] = self._start(VICTIM, 1)
        for process in self._processes.values():
            if process.wait(DEADLINE_S):
                raise RuntimeError((self._base / "log").read_text()[-2000:])
        first: dict[str, list[float]] = {}
        for rank in range(self._ranks):
            seen: dict[str, float] = {}
            for event in self._events(rank):
                if event["at"] >= at - 1.0 and (event["turn"] == again or event["moment"] == "noticed"):
                    seen.setdefault(event["moment"], event["at"] - at)
            for moment, seconds in seen.items():
                first.setdefault(moment, []).append(seconds)
        return {moment: max(first[moment]) for moment in MOMENTS if moment in first}

    def close(self) -> None:
        """Kill all remaining processes and free the memory."""
        for process in self._processes.values():
            process.kill()
            process.wait(10)
        for rank in range(self._ranks):
            owner = read_owner(self._base / f"node{rank}" / "bench")
            if owner is not None and psutil.pid_exists(owner.pid):
                smp = psutil.Process(owner.pid)
                smp.kill()
                smp.wait(10)
        shutil.rmtree(self._base)


def trial(way: str, ranks: int, mb: int) -> dict[str, float]:
    """Seconds from the kill to each of `MOMENTS`."""
    made = Trial(Path(f"/dev/shm/holdfast-bench-{os.getpid()}"), way, ranks, mb)
    try:
        return made.run()
    finally:
        made.close()


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """A Markdown table of medians, with the range of `step`."""
    lines = [f"| | {' | '.join(MOMENTS)} | range |", "|---|" + "---:|" * (len(MOMENTS) + 1)]
    for way, trials in found.items():
        cells = []
        for moment in MOMENTS:
            seconds = [each[moment] for each in trials if moment in each]
            cells.append(f"{median(seconds):.2f}" if seconds else "")
        steps = [each["step"] for each in trials]
        lines.append(f"| {way} | {' | '.join(cells)} | {min(steps):.2f}-{max(steps):.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--orders", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--mb", type=int, default=64, help="state of each rank")
    parser.add_argument("--markdown", type=Path)
    parsed = parser.parse_args()
    if parsed.orders:
        Rank(json.loads(parsed.orders)).run()
        return
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(parsed.rounds):
        for way in WAYS:
            found[way].append(trial(way, parsed.ranks, parsed.mb))
            print(way, {moment: round(seconds, 2) for moment, seconds in found[way][-1].items()}, flush=True)
    print(table(found))
    if parsed.markdown:
        parsed.markdown.write_text(table(found) + "\n")


if __name__ == "__main__":
    main()
