"""The time from a kill to the next step under torchrun, when all ranks are restarted or when survivors keep processes.

``python -m benchmarks.inprocess [--rounds 10] [--ranks 3] [--mb 64] [--markdown FILE]``. Every rank is a node with its
own SMP. Rank 1 is killed with SIGKILL in the middle of a step, and comes back in one of two ways:

* ``restart``: the last line of the script is ``main()``, and torchrun restarts all ranks;
* ``survive``: it is ``survive(main)``.

Each round measures both, and how long a new process takes to import torch.
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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import torch.distributed as dist

from holdfast import InMemorySnapshot
from holdfast.integrations.inprocess import survive
from holdfast.smp_daemon.shared.paths import ARENA_ENV, read_owner

WAYS: dict[str, Callable[..., Any]] = {"restart": lambda main: main(), "survive": survive}
VICTIM, KILL_AT, STEPS = 1, 4, 6
DEADLINE_S = 180.0
MOMENTS = ("begun", "joined", "restored", "step")
Event = dict[str, Any]


def train(folder: Path, mb: int) -> None:
    """One rank, in one attempt."""
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    def say(moment: str) -> None:
        with (folder / f"{rank}.json").open("a") as out:
            event = {"moment": moment, "attempt": attempt, "at": time.monotonic(), "pid": os.getpid()}
            out.write(json.dumps(event) + "\n")

    say("begun")
    dist.init_process_group("gloo")
    say("joined")
    width = int((mb * 1e6 / 4 / 3 / 4) ** 0.5)  # four layers, with Adam's moments
    net = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))
    optim = torch.optim.Adam(net.parameters(), lr=1e-4)
    with InMemorySnapshot(net, optim) as snap:
        say("restored")
        for step in snap.steps(STEPS):
            net(torch.ones(2, width)).square().mean().backward()
            snap.drain(30)
            if rank == VICTIM and step == KILL_AT and attempt == 0:
                say("killed")
                os.kill(os.getpid(), signal.SIGKILL)
            for parameter in net.parameters():
                dist.all_reduce(parameter.grad)
            optim.step()
            optim.zero_grad()
            say("step")
    dist.destroy_process_group()


def run_rank(orders: dict[str, Any]) -> None:
    """The script that torchrun starts: ``python -m benchmarks.inprocess --orders JSON``."""
    torch.set_num_threads(1)
    folder, node = Path(orders["folder"]), f"node{os.environ['RANK']}"
    os.environ |= {ARENA_ENV: str(folder / node), "HOLDFAST_NODE": node, "HOLDFAST_JOB": "bench"}
    WAYS[orders["way"]](partial(train, folder, orders["mb"]))


def measure(way: str, ranks: int, mb: int) -> dict[str, float]:
    """Seconds from the kill until the last rank reached each of `MOMENTS`."""
    folder = Path(f"/dev/shm/holdfast-bench-{os.getpid()}")
    folder.mkdir(mode=0o700)
    launch = ["-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}", "--max-restarts=3"]
    launch += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    orders = json.dumps({"folder": str(folder), "way": way, "mb": mb})
    quiet = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, *launch, "-m", "benchmarks.inprocess", "--orders", orders],
            env={**os.environ, **quiet},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
        return since_kill([read(folder / f"{rank}.json") for rank in range(ranks)])
    finally:
        for rank in range(ranks):
            owner = read_owner(folder / f"node{rank}" / "bench")
            if owner is not None and psutil.pid_exists(owner.pid):
                smp = psutil.Process(owner.pid)
                smp.kill()
                smp.wait(10)
        shutil.rmtree(folder)


def read(path: Path) -> list[Event]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def since_kill(events: list[list[Event]]) -> dict[str, float]:
    """What `measure` returns, from the events of each rank."""
    [killed] = [event["at"] for event in events[VICTIM] if event["moment"] == "killed"]
    found = {}
    for moment in MOMENTS:
        firsts = [min(e["at"] for e in each if e["attempt"] and e["moment"] == moment) for each in events]
        found[moment] = max(firsts) - killed
    return found


def import_s() -> float:
    """How long a process that imports torch takes."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True, timeout=DEADLINE_S)
    return time.monotonic() - began


def table(found: dict[str, list[dict[str, float]]], imports: list[float]) -> str:
    """A Markdown table of medians, with the range of `step`, and its ratio to the import of torch in the same round."""
    lines = [f"| | {' | '.join(MOMENTS)} | range | ratio |", "|---|" + "---:|" * (len(MOMENTS) + 2)]
    for way, trials in found.items():
        cells = [f"{median(each[moment] for each in trials):.2f}" for moment in MOMENTS]
        steps = [each["step"] for each in trials]
        ratio = median(step / took for step, took in zip(steps, imports, strict=True))
        lines.append(f"| {way} | {' | '.join(cells)} | {min(steps):.2f}-{max(steps):.2f} | {ratio:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--orders", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--mb", type=int, default=64, help="state of each rank")
    parser.add_argument("--markdown", type=Path)
    parsed = parser.parse_args()
    if parsed.orders:
        run_rank(json.loads(parsed.orders))
        return
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    imports = []
    for _ in range(parsed.rounds):
        imports.append(import_s())
        for way, trials in found.items():
            trials.append(measure(way, parsed.ranks, parsed.mb))
            print(way, {moment: round(seconds, 2) for moment, seconds in trials[-1].items()}, flush=True)
    print(text := f"{table(found, imports)}\n\nimport of torch: {median(imports):.2f} s (median)")
    if parsed.markdown:
        parsed.markdown.write_text(text + "\n")


if __name__ == "__main__":
    main()
