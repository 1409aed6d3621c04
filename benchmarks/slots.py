"""``python benchmarks/slots.py --markdown FILE``: how many snapshots are skipped, by slots and `protect_every`.

Two ranks on two virtual nodes that mirror each other train a few megabytes, with a snapshot due after every step. The
bandwidth of encoding is capped, so that encoding takes several steps. The results are compared with the predictions of
`benchmarks.played_slots` for the measured times.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist

from benchmarks.played_slots import parse_protect_every, play
from holdfast import InMemorySnapshot
from holdfast.bench.machine import describe, machine
from holdfast.smp_daemon.shared.paths import arena_base

WARM = 20
SLOTS = (2, 3, 4)
PROTECT_EVERY = ("1", "4", "8", "auto")
STATE_BYTES = 12 * (1000 * 2000 + 2000)
DEADLINE_S = 300.0


def main() -> None:
    """Measure each combination, print its row, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=180, help=f"of each run, after {WARM} (default 180)")
    parser.add_argument("--step-s", type=float, default=0.1, help="how long one takes at least (default 0.1)")
    parser.add_argument("--bandwidth", type=float, default=60e6, help="bytes per second of encoding (default 60e6)")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(int(arguments.train[0]), arguments.train[1], arguments.steps, arguments.step_s)
        return
    encode_s = STATE_BYTES / arguments.bandwidth
    lines = [
        "| slots | protect_every | skipped | played | protected, of those taken |",
        "|---:|---:|---:|---:|---:|",
    ]
    for slots in SLOTS:
        for every in PROTECT_EVERY:
            found = run(slots, every, arguments)
            played = play(
                slots,
                parse_protect_every(every),
                interval_s=found["step_s"],
                commit_s=found["commit_s"],
                encode_s=encode_s,
                code=1.0,
            )
            skipped = found["skipped"] / (found["taken"] + found["skipped"])
            safe = f"{found['protected']} of {found['taken']}"
            lines.append(f"| {slots} | {every} | {skipped:.0%} | {played.skipped:.0%} | {safe} |")
            print(lines[-1], flush=True)
    text = "\n".join(
        [
            "# Snapshots that are skipped, by slots and protect_every",
            "",
            f"{datetime.now(UTC).isoformat(timespec='seconds')}, {describe(machine())}; load average "
            f"{os.getloadavg()[0]:.1f} after. `python benchmarks/slots.py {' '.join(sys.argv[1:])}`".rstrip(),
            "",
            f"Two nodes, copies:1, {STATE_BYTES / 1e6:.0f} MB of state each, a snapshot due after each of "
            f"{arguments.steps} steps of {arguments.step_s:g} s or a little more; encoding is held to "
            f"{arguments.bandwidth / 1e6:g} MB/s, and so takes {encode_s:.1f} s. *Played*: by "
            "`benchmarks.played_slots`.",
            "",
            *lines,
            "",
        ]
    )
    if arguments.markdown:
        arguments.markdown.write_text(text)


def run(slots: int, every: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one job of two processes; return the counts of rank 0. Blocks."""
    base = arena_base()
    base.mkdir(parents=True, exist_ok=True, mode=0o700)
    arenas = Path(tempfile.mkdtemp(prefix="bench-slots-", dir=base))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--train", str(slots), every]
    command += ["--steps", str(arguments.steps), "--step-s", str(arguments.step_s)]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    common |= {"HOLDFAST_BANDWIDTH": f"{arguments.bandwidth:.0f}B/s", "HOLDFAST_JOB": f"bench{os.getpid()}"}
    ranks: list[subprocess.Popen[str]] = []
    try:
        for rank in range(2):
            own = {"RANK": str(rank), "HOLDFAST_NODE": f"node{rank}", "HOLDFAST_ARENA": str(arenas / str(rank))}
            environment = os.environ | common | own
            ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        said, _ = ranks[0].communicate(timeout=DEADLINE_S)
        ranks[1].communicate(timeout=DEADLINE_S)
    finally:
        for process in ranks:
            process.kill()
        shutil.rmtree(arenas, ignore_errors=True)
    found: dict[str, Any] = json.loads(said)
    return found


def train(slots: int, every: str, steps: int, step_s: float) -> None:
    """Run one rank; rank 0 prints its counts."""
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(1000, 2000)
    optim = torch.optim.Adam(model.parameters())
    options: dict[str, Any] = {"slots": slots, "protect_every": parse_protect_every(every), "protect": "copies:1"}
    with InMemorySnapshot(model, optim, every=1, **options) as snap:
        before, began, commits = (0, 0, 0), 0.0, []
        for step in range(WARM + steps):
            if step == WARM:
                before, began = _counted(snap), time.monotonic()
            turn_s = time.monotonic()
            snap.begin()
            model(torch.ones(4, 1000)).sum().backward()
            time.sleep(max(0.0, step_s - (time.monotonic() - turn_s)))
            dist.barrier()
            copy = snap._session.protecting.newest
            if copy is not None and copy.sealed_s:
                commits.append(copy.sealed_s - copy.begun_s)
            optim.step()
            optim.zero_grad()
        took_s = time.monotonic() - began
        taken, skipped, protected = (now - then for now, then in zip(_counted(snap), before, strict=True))
        if dist.get_rank() == 0:
            counts = {"taken": taken, "skipped": skipped, "protected": protected}
            print(json.dumps({**counts, "step_s": took_s / steps, "commit_s": sum(commits) / max(1, len(commits))}))
    dist.destroy_process_group()


def _counted(snap: InMemorySnapshot) -> tuple[int, int, int]:
    return snap.statistics.taken, snap.statistics.skipped, snap.statistics.protected


if __name__ == "__main__":
    main()
