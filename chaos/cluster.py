"""A virtual cluster: nodes on loopback addresses of one machine, one job on them, and faults at exact points.

::

    with Launcher(["my_job"]) as launcher:
        cluster = VirtualCluster(launcher, nodes=4, ranks_per_node=2, target="my_job:train", args={...})
        cluster.kill_trainer(3, at="train.step", step=6)
        cluster.kill_node(2, at="train.step", step=12)
        history = cluster.run()

Nothing here sleeps: processes report events, and a process at a point where a fault is due waits until it is dealt
with. When a trainer or a node is gone the job restarts as torchrun would restart it: all trainers anew, on a
replacement where a node was lost.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.accounting import beyond_access_times
from chaos.launcher import Launcher
from chaos.node import VirtualNode, Wiring
from chaos.trainer import ENV as TRAINER_ENV
from smp_daemon.errors import ConfigError, DeadlineExceeded, HoldfastError
from smp_daemon.paths import arena_base

Event = dict[str, Any]
SMP_POINTS = ("seal.done", "encode.middle", "rebuild.middle", "heal.done")


class JobFailed(HoldfastError):
    """A trainer failed although nothing was done to it."""


@dataclass(slots=True)
class Fault:
    """Something to be done when a process reaches a point.

    Attributes:
        who: ``rank3`` or ``smp2``: the process that triggers it.
        kind: ``trainer`` or ``node`` (what dies), ``smp``, or ``freeze`` (who triggers it stays where it is).
        targets: ranks or node indices.
    """

    who: str
    point: str
    step: int | None
    kind: str
    targets: tuple[int, ...]
    fired_at: float | None = None

    def matches(self, who: str, point: str, step: int) -> bool:
        """Whether it is due."""
        return self.fired_at is None and (self.who, self.point) == (who, point) and self.step in (None, step)


@dataclass(slots=True)
class Restart:
    """One restart of the job: what caused it, and when (`time.monotonic`) it was noticed and dealt with."""

    faults: list[Fault]
    killed_at: float
    noticed_at: float
    spawned_at: float


@dataclass(slots=True)
class History:
    """What happened: every event, restarts, what was left over at the end, what went to disk but for access times."""

    events: list[Event] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    disk_bytes_written: int = 0

    def of(self, kind: str, **match: Any) -> list[Event]:
        """Events of one kind whose fields have the given values."""
        return [e for e in self.events if e["kind"] == kind and all(e.get(k) == v for k, v in match.items())]


class VirtualCluster:
    """One job on virtual nodes. Use once: declare faults, then `run`."""

    def __init__(
        self,
        launcher: Launcher,
        *,
        nodes: int,
        ranks_per_node: int,
        target: str,
        args: dict[str, Any],
        job: str = "job",
        smps: bool = True,
        deadline_s: float = 120.0,
        place: Callable[[int, int], int] | None = None,
        on_event: Callable[[Event], None] | None = None,
        memory: Path | None = None,
    ) -> None:
        """
        Args:
            target: ``module:function`` that each trainer runs; the launcher has imported the module.
            args: handed to every trainer, as JSON.
            smps: whether nodes have an SMP at all.
            place: node index of (generation, rank); default: ranks in order, `ranks_per_node` on each.
            on_event: called for every event, in the thread that runs.
            memory: where the nodes' memory lies, by default in a directory of this cluster. Clusters of several jobs
                that are given the same one, each in a process of its own, run on the same nodes; what they leave of it
                is the caller's.
        """
        if not 1 <= nodes <= 64 or not 1 <= ranks_per_node <= 16:
            raise ConfigError(f"{nodes} nodes with {ranks_per_node} ranks: choose 1-64 nodes with 1-16 ranks each")
        self._launcher = launcher
        self._world = nodes * ranks_per_node
        self._target = target
        self._args = args
        self._job = job
        self._smps = smps
        self._deadline_s = deadline_s
        self._place = place or (lambda generation, rank: rank // ranks_per_node)
        self._on_event = on_event or (lambda event: None)
        self._base = arena_base() / f"virtual-{os.getpid()}"
        self._memory = memory or self._base
        self._lives = [0] * nodes
        self._nodes = [self._new_node(index) for index in range(nodes)]
        self._faults: list[Fault] = []
        self._pids: dict[int, int] = {}
        self._running: set[int] = set()
        self._generation = 0
        self._restarting = False
        self._cause: list[Fault] = []
        self._dealt_with: list[Fault] = []
        self.history = History()

    # ------------------------------------------------------------------ faults

    def kill_trainer(self, *ranks: int, at: str, step: int | None = None) -> None:
        """SIGKILL trainers when the first of them reaches point `at` of `step`."""
        self._faults.append(Fault(f"rank{ranks[0]}", at, step, "trainer", ranks))

    def kill_node(self, *indices: int, at: str, step: int | None = None, by: str | None = None) -> None:
        """Cut the power of nodes: SIGKILL SMP and trainers, wipe the arena. Triggered by the first of them."""
        if by is None:
            by = f"smp{indices[0]}" if at in SMP_POINTS else f"rank{self._ranks_on(indices[0])[0]}"
        self._faults.append(Fault(by, at, step, "node", indices))

    def kill_smp(self, index: int, *, at: str, step: int | None = None) -> None:
        """SIGKILL a node's SMP, and start another in the same arena; the trainers are not touched."""
        by = f"smp{index}" if at in SMP_POINTS else f"rank{self._ranks_on(index)[0]}"
        self._faults.append(Fault(by, at, step, "smp", (index,)))

    def freeze(self, who: str, *, at: str, step: int | None = None) -> None:
        """Keep ``rank<r>`` or ``smp<i>`` where it is when it reaches point `at`, until it is killed."""
        self._faults.append(Fault(who, at, step, "freeze", ()))

    # ------------------------------------------------------------------ running

    def run(self) -> History:
        """Run the job to its end, with all faults. Cleans up, whatever happens.

        Raises:
            JobFailed: a trainer failed by itself; the message ends with its log.
            DeadlineExceeded: the job is not done in time.
        """
        self._deadline = time.monotonic() + self._deadline_s
        self._base.mkdir(parents=True, mode=0o700)
        self._selector = selectors.DefaultSelector()
        self._events_path = str(self._base / "events")
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(self._events_path)
            listening.listen(64)
            self._selector.register(listening, selectors.EVENT_READ, self._accept)
            self._selector.register(self._launcher, selectors.EVENT_READ, self._hear)
            self._start_nodes(self._nodes if self._smps else [])
            before = self._launcher.disk_bytes_written()
            self._spawn()
            while self._running:
                self._turn()
            self._settle()
            written = self.history.disk_bytes_written + self._launcher.disk_bytes_written() - before
            self.history.disk_bytes_written = beyond_access_times(written)
            return self.history
        finally:
            self._clean_up(listening)

    def _turn(self) -> None:
        left = self._deadline - time.monotonic()
        ready = self._selector.select(max(0.0, left))
        if not ready and left <= 0:
            raise DeadlineExceeded(f"the job did not end within {self._deadline_s:.0f} s\n{self._logs()}")
        for key, _ in ready:
            key.data(key.fileobj)

    def _hear(self, launcher: Launcher) -> None:
        for message in launcher.messages():
            if message["kind"] == "spawned":
                self._pids = {int(rank): pid for rank, pid in message["pids"].items()}
            elif message["kind"] == "exit":
                self._running.discard(message["rank"])
                self._note(message | {"generation": self._generation})
                if message["status"] != 0 and not self._restarting:
                    self._fail(message)
                elif not self._running and self._restarting:
                    self._restart()

    def _fail(self, message: Event) -> None:
        """A trainer is gone. Nobody wakes the ranks that wait for it, so the launcher ends them all."""
        cause = [f for f in self._faults if f.fired_at is not None and f not in self._dealt_with and f.kind != "freeze"]
        if not cause:
            raise JobFailed(f"rank {message['rank']} ended with status {message['status']}\n{self._logs()}")
        self._restarting = True
        self._noticed_at = message["at"]
        self._cause = cause
        if self._running:
            self._launcher.kill()
        else:
            self._restart()

    def _restart(self) -> None:
        self._dealt_with += self._cause
        fresh = []
        for index, node in enumerate(self._nodes):
            if self._smps and not node.alive:
                node.close()
                self.history.disk_bytes_written += node.disk_bytes_written
                self._lives[index] += 1
                self._nodes[index] = self._new_node(index)
                fresh.append(self._nodes[index])
        self._start_nodes(fresh)
        self._generation += 1
        self._spawn()
        killed_at = max(f.fired_at or 0.0 for f in self._cause)
        self.history.restarts.append(Restart(self._cause, killed_at, self._noticed_at, time.monotonic()))

    def _spawn(self) -> None:
        self._restarting = False
        ranks = [self._describe(rank) for rank in range(self._world)]
        self._running = set(range(self._world))
        self._launcher.spawn(self._target, ranks, self._node_of(0).host)

    def _describe(self, rank: int) -> dict[str, Any]:
        trainer = {
            "rank": rank,
            "world": self._world,
            "generation": self._generation,
            "events": self._events_path,
            "args": self._args,
        }
        who = f"rank{rank}"
        environment = {TRAINER_ENV: json.dumps(trainer), **self._node_of(rank).environment()}
        environment |= self._wiring(who).environment(who)
        return {"rank": rank, "env": environment, "log": str(self._base / f"{who}.log")}

    # ------------------------------------------------------------------ events

    def _accept(self, listening: socket.socket) -> None:
        sock, _ = listening.accept()
        buffer = bytearray()
        self._selector.register(sock, selectors.EVENT_READ, lambda s: self._read(s, buffer))

    def _read(self, sock: socket.socket, buffer: bytearray) -> None:
        try:
            data = sock.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            self._selector.unregister(sock)
            sock.close()
            return
        buffer += data
        while b"\n" in buffer:
            line, _, rest = bytes(buffer).partition(b"\n")
            buffer[:] = rest
            event = json.loads(line)
            if event["kind"] == "reached":
                self._reached(event, sock)
            else:
                self._note(event)

    def _reached(self, event: Event, sock: socket.socket) -> None:
        due = [f for f in self._faults if f.matches(event["who"], event["point"], event["step"])]
        frozen = False
        for fault in due:
            fault.fired_at = time.monotonic()
            self._note(
                {
                    "kind": "fault",
                    "fault": fault.kind,
                    "targets": list(fault.targets),
                    "at": fault.fired_at,
                    "point": fault.point,
                    "step": event["step"],
                }
            )
            frozen |= fault.kind == "freeze"
            self._inject(fault)
        if frozen:
            return
        try:
            sock.sendall(b"g")
        except OSError:
            pass  # it was killed

    def _inject(self, fault: Fault) -> None:
        if fault.kind == "trainer":
            for rank in fault.targets:
                self._kill_rank(rank)
        elif fault.kind == "node":
            for index in fault.targets:
                for rank in self._ranks_on(index):
                    self._kill_rank(rank)
                self._nodes[index].power_cut()
        elif fault.kind == "smp":
            for index in fault.targets:
                self._nodes[index].kill_smp()
                self._start_nodes([self._nodes[index]])

    def _kill_rank(self, rank: int) -> None:
        if rank in self._running:
            os.kill(self._pids[rank], 9)  # a child that the zygote has not reported, so the pid is still its

    def _note(self, event: Event) -> None:
        self.history.events.append(event)
        self._on_event(event)

    # ------------------------------------------------------------------ nodes

    def _new_node(self, index: int) -> VirtualNode:
        life = self._lives[index]
        host = f"127.0.0.{11 + index + life * len(self._lives)}"
        return VirtualNode(index, life, host, self._memory, self._job)

    def _start_nodes(self, nodes: Sequence[VirtualNode]) -> None:
        for node in nodes:
            node.launch(self._wiring(node.who))
        for node in nodes:
            node.wait_ready()

    def _wiring(self, who: str) -> Wiring:
        rules = [(f.point, f.step) for f in self._faults if f.who == who and f.fired_at is None]
        return Wiring(self._events_path, rules)

    def _node_of(self, rank: int) -> VirtualNode:
        return self._nodes[self._place(self._generation, rank)]

    def _ranks_on(self, index: int) -> list[int]:
        return [rank for rank in range(self._world) if self._place(self._generation, rank) == index]

    # ------------------------------------------------------------------ the end

    def _settle(self) -> None:
        """The job ended well: its SMPs must end by themselves and leave nothing."""
        unfired = [f for f in self._faults if f.fired_at is None]
        if unfired:
            raise HoldfastError(f"the job ended before {unfired} could happen")
        if not self._smps:
            return
        for node in self._nodes:
            status = node.wait_end()
            if status != 0:
                self.history.leaks.append(f"the SMP of {node.name} ended with status {status}")
            self.history.disk_bytes_written += node.disk_bytes_written
            if node.arena.exists():
                self.history.leaks.append(f"{node.arena} is still there")

    def _clean_up(self, listening: socket.socket) -> None:
        if self._running:
            self._launcher.end_trainers()
        for node in self._nodes:
            node.close()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        listening.close()
        shutil.rmtree(self._base, ignore_errors=True)

    def _logs(self) -> str:
        texts = []
        for path in sorted(self._base.glob("**/*.log")):
            text = path.read_text(errors="replace").strip()
            if text:
                texts.append(f"--- {path.name} of {path.parent.parent.name}\n{text[-3000:]}")
        return "\n".join(texts)
