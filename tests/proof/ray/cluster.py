"""A real Ray cluster of several nodes on this machine, each with its own arena and so its own SMP; and its faults.

Ray's own test cluster starts the processes; jobs run on it through `chaos.ray.job`.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from holdfast.chaos.cluster import History
from holdfast.chaos.runner import Event, LocalNode, Runner, Wiring, loopback_of, release, using_arenas
from holdfast.integrations.ray.worker_group import Seat
from holdfast.leftovers import end
from holdfast.sessions import tail
from holdfast.smp_daemon.shared.errors import DeadlineExceeded, HoldfastError
from holdfast.smp_daemon.shared.paths import ARENA_ENV
from holdfast.smp_daemon.shared.processes import own_command, own_environment

JOB = "job"
NODE_ENV = "HOLDFAST_NODE"
OBJECT_STORE_BYTES = 80 << 20  # Ray's least is 75 MiB
END_DEADLINE_S = 20.0
LOOK_EVERY_S = 0.2
TRAINERS = ("ray::Worker", "ray::RayTrainWorker")
"""The names that Ray gives to processes that train."""

CONTROLLER = "ray::TrainController"
"""The name of the process that restarts them under Ray Train. It runs on the driver's node."""

HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
"""With these, Ray notices a dead raylet after 1.5 s and a frozen one after 4.5 s; by default, after 13 and 64 s."""


@dataclass(slots=True)
class RayFault:
    """A fault that is injected when the rank on a node reaches a point of a step; the process waits there meanwhile.

    Attributes:
        kind: one of `ACTIONS`.
        targets: names of nodes; empty: `node`.
    """

    node: str
    step: int
    kind: str
    targets: tuple[str, ...] = ()
    point: str = "train.step"
    done: bool = field(default=False, compare=False)


class RayNode(LocalNode):
    """A node of a Ray cluster: a raylet, the processes that it has started, and an SMP.

    Attributes:
        raylet: the raylet's process; set once the node has joined.
    """

    raylet: psutil.Process

    def kill_raylet(self) -> None:
        """SIGKILL the raylet. What it started dies a moment later, except the SMP."""
        self.raylet.kill()
        self.raylet.wait(END_DEADLINE_S)

    def started(self) -> list[psutil.Process]:
        """All processes that the raylet has started."""
        return self.raylet.children(recursive=True)

    def power_cut(self) -> None:
        self.kill_raylet()
        super().power_cut()


class VirtualRay(Runner):
    """A Ray cluster. A context manager: leaving it ends all its processes and its nodes' SMPs, and frees their memory.

    Args:
        folder: a folder on tmpfs for this cluster alone. Its path must be short, since it will contain sockets.
        config: settings of Ray's GCS, besides `HEALTH`.

    Attributes:
        seats: the seats of the last worker group, by attempt; empty under Ray Train.
    """

    def __init__(self, nodes: int, folder: Path, *, config: Mapping[str, Any] | None = None) -> None:
        self._count, self._folder = nodes, folder
        self._config = {**HEALTH, **(config or {})}
        self._nodes: dict[str, RayNode] = {}
        self._driver: subprocess.Popen[bytes] | None = None
        self._frozen: list[psutil.Process] = []
        self._faults: Sequence[RayFault] = ()
        self.seats: list[list[Seat]] = []

    # ------------------------------------------------------------------ nodes

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self.listen(self._folder / "points.sock")
        try:
            self.begin()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def begin(self) -> None:
        """Start a head with one node, then the other nodes."""
        from ray.cluster_utils import Cluster

        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ["RAY_TMPDIR"] = str(self._folder / "ray")  # otherwise Ray notes this cluster's address in /tmp
        head = {"include_dashboard": False, "_system_config": self._config}
        self._cluster = Cluster(initialize_head=True, head_node_args=self._options("node0", **head))
        self._find("node0")
        for index in range(1, self._count):
            self.add(f"node{index}")

    def _options(self, name: str, **more: Any) -> dict[str, Any]:
        environment = {
            NODE_ENV: name,
            ARENA_ENV: str(self.memory(name)),
            "HOLDFAST_HOST": loopback_of(name),
            "HOLDFAST_EVERY": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        } | Wiring(str(self._folder / "points.sock"), [("train.step", None)]).environment(name)
        return {"num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES, "env_vars": environment, **more}

    def memory(self, name: str) -> Path:
        """The folder of a node's arenas."""
        return self._folder / name

    def add(self, name: str) -> None:
        """Add a node. It finds the memory of an earlier node of this name, unless that was lost."""
        self._cluster.add_node(wait=False, **self._options(name))
        self._find(name)

    def _find(self, name: str) -> None:
        known = self.raylets()
        for process in psutil.Process().children():
            with suppress(psutil.Error):
                named = process.name() == "raylet" and process.environ().get(NODE_ENV) == name
                if named and process.pid not in known:
                    self._nodes[name] = RayNode(name, self.memory(name), JOB)
                    self._nodes[name].raylet = process
                    return
        raise HoldfastError(f"{name} has no raylet")

    @property
    def address(self) -> str:
        """The address of the head, for ``RAY_ADDRESS``."""
        return str(self._cluster.address)

    def raylets(self) -> set[int]:
        """The pids of all raylets, as last started; some may be dead."""
        return {node.raylet.pid for node in self._nodes.values()}

    # ------------------------------------------------------------------ faults

    def kill_raylet(self, name: str) -> None:
        """SIGKILL the raylet. What it started dies a moment later, except the SMP."""
        self._nodes[name].kill_raylet()

    def freeze(self, name: str) -> None:
        """SIGSTOP a raylet and all that it started; the SMP goes on. Ray declares the node dead after a while; a spare
        joins."""
        self._frozen = [*self._nodes[name].started(), self._nodes[name].raylet]
        for process in self._frozen:
            process.suspend()
        self.add(f"{name}-spare")

    def thaw(self, *_: str) -> None:
        """Let frozen processes go on, in the middle of their work, although others have taken their place."""
        for process in self._frozen:
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def replace(self, *names: str) -> None:
        """Cut the power of nodes: kill raylets, what they started, and SMPs, and remove their memory. As many spares
        join."""
        for name in names:
            self._nodes[name].raylet.kill()  # all at once, before Ray can notice the first
        for name in names:
            self._nodes[name].power_cut()
        for name in names:
            self.add(f"{name}-spare")

    def restart_raylet(self, name: str) -> None:
        """Kill a raylet, and start another one on the same host."""
        self.kill_raylet(name)
        self.add(name)

    def kill_actors(self, *names: str, kinds: tuple[str, ...] = TRAINERS) -> None:
        """SIGKILL all actors on these nodes whose names begin with one of `kinds`; by default, those that train."""
        for process in [each for name in names for each in self._nodes[name].started()]:
            with suppress(psutil.NoSuchProcess):
                if process.cmdline()[0].startswith(kinds):
                    process.kill()
                    process.wait(END_DEADLINE_S)

    def restart(self, *_: str) -> None:
        """Lose the head, all of Ray with it, and the driver; start Ray again on the same hosts, as operators would."""
        if self._driver is not None:
            self._driver.kill()
            self._driver.wait(END_DEADLINE_S)
        self.end()
        self.begin()

    def restart_gcs(self, *_: str) -> None:
        """Kill the head's GCS and start it again. What it had stored survives only if `config` says so."""
        self._cluster.head_node.kill_gcs_server()
        self._cluster.head_node.start_gcs_server()

    # ------------------------------------------------------------------ a job on it

    def run(self, plan: Mapping[str, Any], faults: Sequence[RayFault] = (), deadline_s: float = 300.0) -> History:
        """Run a job to its end, with `faults` on the way. A driver that dies is started again.

        Blocks: half a minute on two free processors, minutes on two busy ones.

        Raises:
            DeadlineExceeded: the job took longer than `deadline_s`.
            HoldfastError: the driver failed before any fault, or a fault never came due.
        """
        notes = self._folder / "notes"
        notes.mkdir()
        log = self._folder / "driver.log"
        plan = {**plan, "folder": str(notes)}
        limit = time.monotonic() + deadline_s
        self._start_driver(plan, log)
        self._faults = faults
        while self._driver is not None and (status := self._driver.poll()) != 0:
            if time.monotonic() > limit:
                raise DeadlineExceeded(f"the job took over {deadline_s:.0f} s\n{tail(log)}")
            if status is not None:
                if not any(fault.done for fault in faults):
                    raise HoldfastError(f"the driver ended with status {status}\n{tail(log)}")
                self._start_driver(plan, log)
            self.turn(time.monotonic() + LOOK_EVERY_S)
        self._driver = None
        if missed := [fault for fault in faults if not fault.done]:
            raise HoldfastError(f"{len(missed)} faults were never triggered, the first of them on {missed[0].node}")
        events = [json.loads(line) for path in sorted(notes.glob("rank*.jsonl")) for line in path.open()]
        seats = notes / "seats.json"
        attempts = json.loads(seats.read_text()) if seats.exists() else []
        self.seats = [[Seat(**seat) for seat in seats] for seats in attempts]
        shutil.rmtree(notes)
        return History(events)

    def _start_driver(self, plan: Mapping[str, Any], log: Path) -> None:
        environment = {**os.environ, "RAY_ADDRESS": self._cluster.address, "HOLDFAST_JOB": JOB}
        with log.open("ab") as out:
            command = own_command("tests.proof.ray.job", json.dumps(plan))
            self._driver = subprocess.Popen(command, env=own_environment(environment), stdout=out, stderr=out)

    def heard(self, event: Event, sock: socket.socket) -> None:
        """Inject the faults that are due where a rank has reached a point, and let the rank go on."""
        at = event["who"], event["point"], event["step"]
        for fault in [each for each in self._faults if not each.done and (each.node, each.point, each.step) == at]:
            fault.done = True
            ACTIONS[fault.kind](self, *(fault.targets or (fault.node,)))
        release(sock)

    # ------------------------------------------------------------------ the end

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hang_up()
        if self._driver is not None:
            self._driver.kill()
            self._driver.wait(END_DEADLINE_S)
        self.end()
        for process in using_arenas(self._folder):  # SMPs, and what killed raylets left that is not dead yet
            end(process)
        shutil.rmtree(self._folder)

    def end(self) -> None:
        """Kill all of Ray's processes; SMPs and memory stay."""
        for process in psutil.Process().children(recursive=True):
            if _is_rays(process):
                end(process)
        self._nodes.clear()


ACTIONS: dict[str, Callable[..., None]] = {
    "kill-trainer": VirtualRay.kill_actors,
    "kill-controller": lambda ray, *names: ray.kill_actors(*names, kinds=(CONTROLLER,)),
    "kill-raylet": VirtualRay.restart_raylet,
    "kill-gcs": VirtualRay.restart_gcs,
    "lose-head": VirtualRay.restart,
    "lose-node": VirtualRay.replace,
    "freeze-node": VirtualRay.freeze,
    "thaw-node": VirtualRay.thaw,
}
"""How each fault of the catalogue that Ray knows is injected; called with the cluster and the names of the targets."""


def _is_rays(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        line = " ".join(process.cmdline())
        return "/ray/" in line or line.startswith("ray::")
    return False
