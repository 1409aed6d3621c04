"""A real Ray cluster of several nodes on this machine, each with an arena, and so an SMP, of its own; and what can be
done to it. Ray's own test cluster starts its processes; a job runs on it as `chaos.ray.job` says.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
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
from holdfast.sessions import tail
from holdfast.smp_daemon.shared.errors import DeadlineExceeded, HoldfastError
from holdfast.smp_daemon.shared.paths import ARENA_ENV
from holdfast.smp_daemon.shared.spawn import end

JOB = "job"
NODE_ENV = "HOLDFAST_NODE"
OBJECT_STORE_BYTES = 80 << 20  # Ray's least is 75 MiB
END_DEADLINE_S = 20.0
LOOK_EVERY_S = 0.2
TRAINERS = ("ray::Worker", "ray::RayTrainWorker")
"""How Ray calls the processes that train."""

CONTROLLER = "ray::TrainController"
"""How it calls that which restarts them under Ray Train; it is where the driver is."""

HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
"""A dead raylet is noticed after 1.5 s and a frozen one after 4.5 s; by Ray's defaults, after 13 and 64."""


@dataclass(slots=True)
class RayFault:
    """A fault that is injected when the rank on a node comes to a point of a step; the process waits there meanwhile.

    Attributes:
        kind: one of `ACTIONS`.
        targets: names of nodes; `node` if empty.
    """

    node: str
    step: int
    kind: str
    targets: tuple[str, ...] = ()
    point: str = "train.step"
    done: bool = field(default=False, compare=False)


class RayNode(LocalNode):
    """A node of a Ray cluster: a raylet, what that has started, and an SMP.

    Attributes:
        raylet: its process, once it has joined.
    """

    raylet: psutil.Process

    def kill_raylet(self) -> None:
        """SIGKILL; what it started dies of that a moment later, but for the SMP."""
        self.raylet.kill()
        self.raylet.wait(END_DEADLINE_S)

    def started(self) -> list[psutil.Process]:
        """All that its raylet has started."""
        return self.raylet.children(recursive=True)

    def power_cut(self) -> None:
        self.kill_raylet()
        super().power_cut()


class VirtualRay(Runner):
    """A context manager; leaving it ends all its processes, and the SMPs on its nodes, and frees their memory.

    Args:
        folder: on tmpfs; of this cluster alone. Its path is short, since sockets lie below it.
        config: of Ray's GCS, besides `HEALTH`.

    Attributes:
        seats: of the worker group that ran last, by attempt; none of Ray Train's.
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
        """Start a head with a node, and the other nodes."""
        from ray.cluster_utils import Cluster

        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ["RAY_TMPDIR"] = str(self._folder / "ray")  # else it says in /tmp which cluster is this machine's
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
            "HOLDFAST_OVERHEAD_BUDGET": "0",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        } | Wiring(str(self._folder / "points.sock"), [("train.step", None)]).environment(name)
        return {"num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES, "env_vars": environment, **more}

    def memory(self, name: str) -> Path:
        """Where a node's arenas lie."""
        return self._folder / name

    def add(self, name: str) -> None:
        """A node joins; one of that name that was there before has left its memory, if it has not been lost."""
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
        """Of the head, for ``RAY_ADDRESS``."""
        return str(self._cluster.address)

    def raylets(self) -> set[int]:
        """Their pids, of all that are not known to be dead."""
        return {node.raylet.pid for node in self._nodes.values()}

    # ------------------------------------------------------------------ what is done to it

    def kill_raylet(self, name: str) -> None:
        """SIGKILL; what it started dies of that a moment later, but for the SMP."""
        self._nodes[name].kill_raylet()

    def freeze(self, name: str) -> None:
        """SIGSTOP to a raylet and all that it started; the SMP goes on. To Ray the node is dead after a while; a spare
        joins."""
        self._frozen = [*self._nodes[name].started(), self._nodes[name].raylet]
        for process in self._frozen:
            process.suspend()
        self.add(f"{name}-spare")

    def thaw(self, *_: str) -> None:
        """What was frozen goes on, in the middle of what it was about, although others have taken its place."""
        for process in self._frozen:
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def replace(self, *names: str) -> None:
        """Nodes lose power: raylets, what they started, and SMPs are killed, and their memory is gone. As many spares
        join."""
        for name in names:
            self._nodes[name].raylet.kill()  # all at once, before Ray can notice the first
        for name in names:
            self._nodes[name].power_cut()
        for name in names:
            self.add(f"{name}-spare")

    def restart_raylet(self, name: str) -> None:
        """It is killed, and comes back on the same host."""
        self.kill_raylet(name)
        self.add(name)

    def kill_actors(self, *names: str, kinds: tuple[str, ...] = TRAINERS) -> None:
        """SIGKILL to all actors on these nodes that Ray calls so: workers of ours, and of Ray Train."""
        for process in [each for name in names for each in self._nodes[name].started()]:
            with suppress(psutil.NoSuchProcess):
                if process.cmdline()[0].startswith(kinds):
                    process.kill()
                    process.wait(END_DEADLINE_S)

    def restart(self, *_: str) -> None:
        """The head is lost, all that Ray has with it, and the driver; operators start Ray again on the same hosts."""
        if self._driver is not None:
            self._driver.kill()
            self._driver.wait(END_DEADLINE_S)
        self.end()
        self.begin()

    def restart_gcs(self, *_: str) -> None:
        """The head's GCS dies and is started again; what it had stored is there only if `config` says so."""
        self._cluster.head_node.kill_gcs_server()
        self._cluster.head_node.start_gcs_server()

    # ------------------------------------------------------------------ a job on it

    def run(self, plan: Mapping[str, Any], faults: Sequence[RayFault] = (), deadline_s: float = 300.0) -> History:
        """Run a job to its end, and do `faults` on the way. A driver that dies is started again. Blocks: half a minute
        on two free processors, minutes on two that others want as well.

        Raises:
            DeadlineExceeded: it took too long.
            HoldfastError: the driver failed although nothing was done to it, or a fault never came due.
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
            raise HoldfastError(f"{len(missed)} faults never came due, as that of {missed[0].node}")
        events = [json.loads(line) for path in sorted(notes.glob("rank*.jsonl")) for line in path.open()]
        seats = notes / "seats.json"
        attempts = json.loads(seats.read_text()) if seats.exists() else []
        self.seats = [[Seat(**seat) for seat in seats] for seats in attempts]
        shutil.rmtree(notes)
        return History(events)

    def _start_driver(self, plan: Mapping[str, Any], log: Path) -> None:
        environment = {**os.environ, "RAY_ADDRESS": self._cluster.address, "HOLDFAST_JOB": JOB}
        with log.open("ab") as out:
            command = [sys.executable, "-m", "holdfast.chaos.ray.job", json.dumps(plan)]
            self._driver = subprocess.Popen(command, env=environment, stdout=out, stderr=out)

    def heard(self, event: Event, sock: socket.socket) -> None:
        """A rank has come to a point: do what is due there, and let it go on."""
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
        for process in using_arenas(self._folder):  # SMPs, and what killed raylets have left and that was not dead yet
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
"""How the faults of the catalogue are injected that Ray knows; each is given the names of its targets."""


def _is_rays(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        line = " ".join(process.cmdline())
        return "/ray/" in line or line.startswith("ray::")
    return False
