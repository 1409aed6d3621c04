"""``python -m tools.alerts.record [FAULT ...]``: inject each fault into a real job on virtual nodes, and record what
Prometheus would have scraped. Takes half an hour for any number of faults, which run in parallel.

Real SMPs and trainers run in real time and are scraped every `EVERY_S` seconds. A recording has one value per scrape
for each series that ``deploy/alerts.yml`` uses, in the notation of ``promtool test rules``.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from prometheus_client.parser import text_string_to_metric_families

from holdfast import InMemorySnapshot
from holdfast.chaos.node import VirtualNode
from holdfast.chaos.runner import Wiring
from holdfast.smp_daemon.shared.paths import read_owner

ROOT = Path(__file__).parent.parent.parent
RECORDINGS = Path(__file__).parent / "recordings"
EVERY_S = 15
FAULT_AT = 8
"""Number of scrapes of the healthy job before the fault."""

STEP_S = 4.0
SCRAPE_S = 10.0
ASKED = sorted(set(re.findall(r"\bholdfast_[a-z_]+[a-z]", (ROOT / "deploy/alerts.yml").read_text())))


def train(node: VirtualNode, rank: int, world: int, store: str, port: int, stop: Path) -> None:
    """Run one rank of a job that trains until the file `stop` exists."""
    os.environ.update(node.environment(), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{store}:{port}", rank=rank, world_size=world)
    model = torch.nn.Linear(64, 64)
    optim = torch.optim.Adam(model.parameters())
    with InMemorySnapshot(model, optim, start=False, every=1) as snap:
        for _ in snap.steps(1 << 30):
            model(torch.ones(64)).sum().backward()
            optim.step()
            optim.zero_grad()
            over = torch.tensor(float(stop.exists()))
            dist.all_reduce(over)
            if over:
                break
            time.sleep(STEP_S)


class Scene:
    """A job on virtual nodes that a fault is injected into, and the series recorded from it."""

    def __init__(self, fault: str, nodes: int, settings: Mapping[str, str]) -> None:
        self.fault = fault
        self.base = Path("/dev/shm") / f"holdfast-alerts-{os.getpid()}"
        self.base.mkdir(mode=0o700)
        (self.base / "place").mkdir()
        self.stop = self.base / "stop"
        number = os.getpid() % 200 + 20
        self.nodes = [VirtualNode(i, 0, f"127.44.{number}.{i + 1}", self.base, fault) for i in range(nodes)]
        for node in self.nodes:
            node.launch(Wiring("", ()), {"HOLDFAST_SCRUB": "64MB/s", **settings}, self.base / "smps.log")
        self.ports = {node: node.wait_ready().http_port for node in self.nodes}
        for node in self.nodes:  # the port actually bound is in the arena
            owner = read_owner(node.arena)
            assert owner is not None
            self.ports[node] = owner.http_port
        with socket.socket() as free:
            free.bind((self.nodes[0].host, 0))
            port = free.getsockname()[1]
        self.trainers: list[int] = []
        for rank, node in enumerate(self.nodes):
            pid = os.fork()
            if not pid:
                status = 1
                try:
                    train(node, rank, nodes, self.nodes[0].host, port, self.stop)
                    status = 0
                except Exception:
                    (self.base / f"rank{rank}.log").write_text(traceback.format_exc())
                finally:
                    os._exit(status)
            self.trainers.append(pid)
        self.series: dict[str, list[str]] = {}
        self.scrapes = 0

    def scrape(self) -> None:
        """Scrape every node once, as Prometheus would."""
        found: dict[str, str] = {}
        for node in self.nodes:
            instance = f'instance="{node.name}:9411",job="holdfast"'
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[node]}/metrics", timeout=SCRAPE_S) as answer:
                    text = answer.read().decode()
                found[f"up{{{instance}}}"] = "1"
            except OSError:
                found[f"up{{{instance}}}"] = "0"
                continue
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name in ASKED:
                        labels = {"exported_job": sample.labels["job"], "node": sample.labels["node"]}
                        named = ",".join([*(f'{k}="{v}"' for k, v in labels.items()), instance])
                        found[f"{sample.name}{{{named}}}"] = f"{sample.value:.0f}"
        for name in found.keys() | self.series.keys():
            before = self.series.setdefault(name, ["_"] * self.scrapes)
            absent = "stale" if before and before[-1] not in ("_", "stale") else "_"
            before.append(found.get(name, absent))
        self.scrapes += 1

    def kill_trainers(self, *ranks: int, by: int = signal.SIGKILL) -> None:
        for rank in ranks or range(len(self.trainers)):
            with suppress(ProcessLookupError):
                os.kill(self.trainers[rank], by)

    def close(self) -> None:
        for pid in self.trainers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for node in self.nodes:
            node.close()
        shutil.rmtree(self.base)


def healthy(scene: Scene) -> None:
    """Nothing is done."""


def node_lost(scene: Scene) -> None:
    """A node loses power, and the launchers of the others give up."""
    scene.kill_trainers(2)
    scene.nodes[2].power_cut()
    scene.kill_trainers()


def trainers_died(scene: Scene) -> None:
    """All trainers are killed, and nobody starts others."""
    scene.kill_trainers()


def trainer_hangs(scene: Scene) -> None:
    """A trainer is stopped, and stays connected."""
    scene.kill_trainers(1, by=signal.SIGSTOP)


def smp_died(scene: Scene) -> None:
    """An SMP is killed while its trainer goes on, and nobody starts another."""
    scene.nodes[1].kill_smp()


def job_ended(scene: Scene) -> None:
    """The job ends well: its nodes are idle, and are still scraped."""
    scene.stop.touch()


def bits_flip(scene: Scene) -> None:
    """A byte of each slot of a node changes while the job is stopped, so that the slots are read, not replaced."""
    scene.kill_trainers(by=signal.SIGSTOP)
    for path in [*scene.nodes[1].arena.glob("*.safetensors"), *scene.nodes[1].arena.glob("*.parity")]:
        with path.open("r+b") as file:
            file.seek(-9, os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(-9, os.SEEK_END)
            file.write(bytes([byte ^ 1]))


def storage_fails(scene: Scene) -> None:
    """The directory for persisted snapshots is replaced by a file."""
    place = scene.base / "place"
    shutil.rmtree(place, ignore_errors=True)
    place.touch()


TAKEN = socket.socket()
"""A socket that occupies a port on loopback before any SMP asks for that port."""

SCENES: dict[str, tuple[Callable[[Scene], None], int, int, Callable[[Path], dict[str, str]]]] = {
    "healthy": (healthy, 2, 12, lambda base: {}),
    "one-node": (healthy, 1, 12, lambda base: {}),
    "node-lost": (node_lost, 3, 25, lambda base: {}),
    "trainers-died": (trainers_died, 2, 25, lambda base: {}),
    "trainer-hangs": (trainer_hangs, 2, 25, lambda base: {}),
    "smp-died": (smp_died, 2, 10, lambda base: {}),
    "job-ended": (job_ended, 2, 12, lambda base: {}),
    "bits-flip": (bits_flip, 2, 6, lambda base: {"HOLDFAST_DEADLINES": "step=0"}),
    "storage-fails": (
        storage_fails,
        2,
        10,
        lambda base: {"HOLDFAST_PERSIST": str(base / "place"), "HOLDFAST_PERSIST_EVERY": "20s"},
    ),
    "port-taken": (healthy, 2, 8, lambda base: {"HOLDFAST_HTTP": str(TAKEN.getsockname()[1])}),
}
"""By fault: the function that injects it, number of nodes, minutes to record, and settings of the SMPs."""


def play(name: str) -> None:
    """Inject one fault, and write its recording."""
    act, nodes, minutes, settings = SCENES[name]
    scene = Scene(name, nodes, settings(Path("/dev/shm") / f"holdfast-alerts-{os.getpid()}"))
    try:
        began = time.monotonic()
        while time.monotonic() - began < 300 and not _trains(scene):
            time.sleep(1)
        for tick in range(minutes * 60 // EVERY_S):
            if tick == FAULT_AT:
                act(scene)
            due = time.monotonic() + EVERY_S
            scene.scrape()
            time.sleep(max(0.0, due - time.monotonic()))
        write(name, act.__doc__ or "", scene)
        for log in scene.base.glob("*.log"):
            sys.stderr.write(f"--- {name} {log.name}\n{log.read_text()[-500:]}\n" if log.stat().st_size else "")
    finally:
        scene.close()


def _trains(scene: Scene) -> bool:
    """Whether every SMP reports a safe snapshot."""
    safe = set()
    for node in scene.nodes:
        with urllib.request.urlopen(f"http://127.0.0.1:{scene.ports[node]}/metrics", timeout=60) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith("holdfast_tolerated_node_failures{") and not line.endswith(" -1.0"):
                    safe.add(node)
    return len(safe) == len(scene.nodes)


def write(name: str, what: str, scene: Scene) -> None:
    """Write a recording: comments, then one series per line."""
    RECORDINGS.mkdir(exist_ok=True)
    lines = [f"# {what.strip()}", f"# every {EVERY_S} s, from scrape {FAULT_AT} on, of {scene.scrapes}"]
    lines += [f"{series}: {shorten(values)}" for series, values in sorted(scene.series.items())]
    (RECORDINGS / f"{name}.txt").write_text("\n".join(lines) + "\n")


def shorten(values: list[str]) -> str:
    """Values in promtool's notation, where ``value x n`` is a value with n repetitions. Pure."""
    words: list[str] = []
    i = 0
    while i < len(values):
        n = i
        while n + 1 < len(values) and values[n + 1] == values[i]:
            n += 1
        repeats = n - i
        if repeats and values[i] == "_":
            words.append(f"_x{repeats + 1}")
        elif repeats and values[i] != "stale":
            words.append(f"{values[i]}x{repeats}")
        else:
            words += values[i : n + 1]
        i = n + 1
    return " ".join(words)


def main(names: list[str]) -> int:
    """Record faults in parallel; return 0 if all could be recorded."""
    TAKEN.bind(("127.0.0.1", 0))
    TAKEN.listen(1)
    playing: dict[int, str] = {}
    for name in names or list(SCENES):
        pid = os.fork()
        if not pid:
            status: Any = 1
            try:
                play(name)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        playing[pid] = name
    failed = [name for pid, name in playing.items() if os.waitpid(pid, 0)[1]]
    print(f"recorded {len(playing) - len(failed)}; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
