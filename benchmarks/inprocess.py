"""The time from a kill to the next step under each launcher, when all ranks are restarted or survivors keep processes.

``python -m benchmarks.inprocess [--rounds 10] [--ways torchrun,ray] [--ranks 3] [--mb 64] [--markdown FILE]``. Every
rank is a node with its own SMP. Rank 1 is killed with SIGKILL in the middle of a step, and comes back in these ways:

* ``restart``: once it has ended, this program kills the others and starts all again, as a batch system does;
* ``torchrun``: the last line of the script is ``main()``, and torchrun restarts all ranks;
* ``torchrun-survive``: it is ``survive(main)``;
* ``survive``: the same, without torchrun;
* ``standby``: the same, and all of its node is killed: a node that waits takes its place;
* ``ray``: a `WorkerGroup`, whose survivors keep their processes, and for whose dead worker Ray starts a new one.

Each round measures all of them, and how long a new process takes to import torch.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from holdfast import InMemorySnapshot
from holdfast.integrations.inprocess import survive
from holdfast.leftovers import find_arenas, remove
from holdfast.scratch import Scratch
from holdfast.smp_daemon.shared.paths import ARENA_ENV, read_owner

VICTIM, KILL_AT, STEPS = 1, 4, 6
DEADLINE_S = 180.0
MOMENTS = ("detected", "begun", "joined", "restored", "step")
Event = dict[str, Any]
Started = list[subprocess.Popen[bytes]]


def note(folder: str, rank: int, attempt: int, moment: str) -> None:
    """Write down that it is this moment of an attempt."""
    with Path(folder, f"{rank}.json").open("a") as out:
        out.write(json.dumps({"moment": moment, "attempt": attempt, "at": time.monotonic()}) + "\n")


def train(folder: str, mb: int, die: Callable[[], object]) -> None:
    """One rank, in one attempt."""
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    node = os.environ.setdefault("HOLDFAST_NODE", f"node{rank}")
    os.environ |= {ARENA_ENV: f"{folder}/{node}", "HOLDFAST_JOB": "bench"}
    torch.set_num_threads(1)

    say = partial(note, folder, rank, attempt)
    say("begun")
    try:
        steps(say, mb, die if rank == VICTIM and attempt == 0 else None)
    except RuntimeError:
        note(folder, rank, attempt + 1, "detected")
        raise


def kill_trainer() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_node() -> None:
    """Kill this node's SMP and supervisor, with which the kernel kills this process."""
    owner = read_owner(Path(os.environ[ARENA_ENV], "bench"))
    assert owner is not None
    os.kill(owner.pid, signal.SIGKILL)
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()


def steps(say: Callable[[str], None], mb: int, die: Callable[[], object] | None) -> None:
    """The training of one rank, which dies on the way if it is the victim."""
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
            dist.barrier()  # or a rank would wait for what a node that is lost has not yet said
            if die is not None and step == KILL_AT:
                say("killed")
                die()
            for parameter in net.parameters():
                dist.all_reduce(parameter.grad)
            optim.step()
            optim.zero_grad()
            say("step")
    dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class Job:
    """What the processes of one run are told: ``python -m benchmarks.inprocess --orders JSON``."""

    part: str
    folder: str
    ranks: int
    mb: int
    port: int

    def do(self) -> None:
        """Play the part: a rank whose script ends with ``main()`` or ``survive(main)``, or Ray's driver."""
        if self.part == "main":
            train(self.folder, self.mb, kill_trainer)
        elif self.part in ("survive", "node"):
            survive(train, self.folder, self.mb, kill_trainer if self.part == "survive" else kill_node)
        else:
            self._drive_ray()

    def _drive_ray(self) -> None:
        import ray

        from holdfast.integrations.ray import WorkerGroup

        ray.init(num_cpus=self.ranks, object_store_memory=1 << 27, include_dashboard=False, log_to_driver=False)
        with WorkerGroup(1, self.ranks, job="bench") as workers:
            workers.run(train, self.folder, self.mb, kill_trainer)
        ray.shutdown()


TORCHRUN = (
    *("-m", "torch.distributed.run", "--nnodes=1", "--max-restarts=3"),
    *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
)


def restart(job: Job) -> None:
    """Start all ranks, and all of them again once the victim has ended."""
    with ranks(job, attempt=0) as started:
        started[VICTIM].wait()  # without a timeout, with which it would look only now and then
        note(job.folder, VICTIM, 1, "detected")
    with ranks(job, attempt=1) as started:
        check(job, started)


def each_rank(job: Job) -> None:
    """Start all ranks, and leave them to themselves."""
    with ranks(job, attempt=0) as started:
        check(job, started)


def with_standby(job: Job) -> None:
    """Start a process that waits for the place of a rank, then all ranks."""
    waits = {"HOLDFAST_STANDBY": f"127.0.0.1:{job.port}", "HOLDFAST_NODE": f"node{job.ranks}"}
    with running(job, [waits]) as waiting, ranks(job, attempt=0) as started:
        started.pop(VICTIM).wait(DEADLINE_S)
        check(job, started + waiting)


def one_process(job: Job, *launch: str) -> None:
    """Start a process that starts the ranks."""
    with running(job, [{}], *launch) as started:
        check(job, started)


def torchrun(job: Job) -> None:
    """Start torchrun, which starts the ranks."""
    one_process(job, *TORCHRUN, f"--nproc-per-node={job.ranks}")


WAYS: dict[str, tuple[str, Callable[[Job], None]]] = {
    "restart": ("main", restart),
    "torchrun": ("main", torchrun),
    "torchrun-survive": ("survive", torchrun),
    "survive": ("survive", each_rank),
    "standby": ("node", with_standby),
    "ray": ("ray", one_process),
}
"""The part that processes play, and who starts them."""


@contextmanager
def ranks(job: Job, attempt: int) -> Iterator[Started]:
    """A process for each rank, with what torchrun would tell it."""
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job.port), "WORLD_SIZE": str(job.ranks)}
    told["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
    each = [told | {"RANK": str(rank), "HOLDFAST_NODE": f"node{rank}"} for rank in range(job.ranks)]
    with running(job, each) as started:
        yield started


@contextmanager
def running(job: Job, environments: Sequence[dict[str, str]], *launch: str) -> Iterator[Started]:
    """A process for each of `environments`; those that are left at the end are killed, with all that they started."""
    quiet = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    quiet["RAY_USAGE_STATS_ENABLED"] = "0"
    command = [sys.executable, *launch, "-m", "benchmarks.inprocess", "--orders", json.dumps(asdict(job))]
    started = []
    try:
        with Path(job.folder, "log").open("ab") as log:
            for more in environments:
                told = {**os.environ, **quiet, **more}
                started.append(subprocess.Popen(command, env=told, stdout=log, stderr=log, start_new_session=True))
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)


def check(job: Job, started: Started) -> None:
    """Wait until all have ended. Raises `RuntimeError` if one has failed."""
    limit = time.monotonic() + DEADLINE_S
    if any(process.wait(max(0.0, limit - time.monotonic())) for process in started):
        raise RuntimeError(Path(job.folder, "log").read_text(errors="replace")[-3000:])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def measure(way: str, ranks: int, mb: int) -> dict[str, float]:
    """Seconds from the kill until the first rank has detected it, and the last has reached the others of `MOMENTS`."""
    part, run = WAYS[way]
    with Scratch("bench") as scratch:
        folder = scratch.path
        try:
            run(Job(part, str(folder), ranks, mb, free_port()))
            return since_kill([read(folder / f"{rank}.json") for rank in range(ranks)])
        finally:
            for found in (found for node in folder.glob("node*") for found in find_arenas(node)):
                remove(found)


def read(path: Path) -> list[Event]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def since_kill(events: list[list[Event]]) -> dict[str, float]:
    """What `measure` returns, from the events of each rank. *Detected* is when the first other rank's collective has
    failed, or this program has seen the end of the victim."""
    [killed] = [event["at"] for event in events[VICTIM] if event["moment"] == "killed"]
    later = [[event for event in each if event["attempt"]] for each in events]
    found = {"detected": min(event["at"] for each in later for event in each) - killed}
    for moment in MOMENTS[1:]:
        found[moment] = max(min(e["at"] for e in each if e["moment"] == moment) for each in later) - killed
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
    parser.add_argument("--ways", default=",".join(way for way in WAYS if way != "ray" or find_spec("ray")))
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--mb", type=int, default=64, help="state of each rank")
    parser.add_argument("--markdown", type=Path)
    parsed = parser.parse_args()
    if parsed.orders:
        Job(**json.loads(parsed.orders)).do()
        return
    found: dict[str, list[dict[str, float]]] = {way: [] for way in parsed.ways.split(",")}
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
