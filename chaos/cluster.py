"""A virtual cluster: nodes on loopback addresses of one machine, one job on them, and faults at exact points.

::

    with Launcher(["my_job"]) as launcher:
        cluster = VirtualCluster(launcher, nodes=4, ranks_per_node=2, target="my_job:train", args={...})
        cluster.kill_trainer(3, at="train.step", step=6)
        cluster.kill_node(2, at="train.step", step=12)
        history = cluster.run()

Nothing here sleeps: processes report events, and a process at a point where a fault is due waits until the fault has
been injected. When a trainer or node is lost, the job restarts as under torchrun: all trainers start again, on a
replacement node if one was lost.
"""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.chaos.accounting import beyond_access_times
from holdfast.chaos.faults import CATALOGUE, Fault, check, due_at
from holdfast.chaos.launcher import Launcher
from holdfast.chaos.node import VirtualNode
from holdfast.chaos.runner import Event, Runner, Wiring, release, send_signals
from holdfast.chaos.trainer import ENV as TRAINER_ENV
from holdfast.smp_daemon.net.peers import PeerClient
from holdfast.smp_daemon.shared.errors import ConfigError, DeadlineExceeded, HoldfastError
from holdfast.smp_daemon.shared.failpoints import SMP_FAILPOINTS
from holdfast.smp_daemon.shared.messages import Drain
from holdfast.smp_daemon.shared.paths import read_owner
from holdfast.smp_daemon.shared.scratch import Scratch

TARGET = "holdfast.chaos.drill:train"
"""The usual ``module:function`` that trainers run: one rank of a drill."""

ERROR_LENGTH = 300
"""Maximum length of the line that says why a trainer ended, in characters."""

LOG_TAIL = 12_000
"""Number of characters of each log that an error quotes: enough for all threads of a crashed SMP, and its successor."""


def last_error(log: str) -> str:
    """The last line of a log that mentions an error, cut to `ERROR_LENGTH`; empty if none does."""
    return next((line[:ERROR_LENGTH] for line in reversed(log.splitlines()) if "error" in line.lower()), "")


class JobFailed(HoldfastError):
    """A trainer failed, and no injected fault explains that."""


@dataclass(slots=True)
class Restart:
    """One restart of the job: the faults that caused it, and the times (`time.monotonic`) of the last of these faults,
    of its detection, and of the new start."""

    faults: list[Fault]
    killed_at: float
    noticed_at: float
    spawned_at: float


@dataclass(slots=True)
class History:
    """Everything that happened in a run.

    Attributes:
        leaks: what was left behind at the end.
        tracebacks: errors that an SMP did not expect.
        disk_bytes_written: bytes that went to disk; 0 if they may all be access times.
    """

    events: list[Event] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    tracebacks: list[str] = field(default_factory=list)
    disk_bytes_written: int = 0

    def of(self, kind: str, **match: Any) -> list[Event]:
        """Events of one kind whose fields have the given values."""
        return [e for e in self.events if e["kind"] == kind and all(e.get(k) == v for k, v in match.items())]


def to_ranks(*signals: signal.Signals) -> Action:
    """An action that sends signals to the trainers of the target ranks."""

    def do(cluster: VirtualCluster, fault: Fault) -> None:
        for rank in fault.targets:
            send_signals(cluster.pid_of_rank(rank), *signals)

    return do


def end_smps(by: signal.Signals) -> Action:
    """An action that ends the SMPs of the target nodes with a signal, and starts successors."""

    def do(cluster: VirtualCluster, fault: Fault) -> None:
        for index in fault.targets:
            cluster.replace_smp(index, by)

    return do


def lose_nodes(cluster: VirtualCluster, fault: Fault) -> None:
    """Kill the processes of the target nodes, and wipe their memory."""
    for index in fault.targets:
        for rank in cluster.ranks_on(index):
            send_signals(cluster.pid_of_rank(rank), signal.SIGKILL)
        cluster.power_cut(index)


def drain_nodes(cluster: VirtualCluster, fault: Fault) -> None:
    """Announce that the target nodes are to be taken away."""
    for index in fault.targets:
        cluster.drain(index)


def freeze(cluster: VirtualCluster, fault: Fault) -> None:
    """Do nothing: the cluster keeps the process at the point, until it dies (``freeze``) or for `for_s` (``hold``)."""


Action = Callable[[Any, Fault], None]
"""How a kind of fault is injected into a cluster. Called in that cluster's thread."""

ACTIONS: dict[str, Action] = {
    "kill-trainer": to_ranks(signal.SIGKILL),
    "kill-smp": end_smps(signal.SIGKILL),
    "lose-node": lose_nodes,
    "drain-node": drain_nodes,
    "freeze": freeze,
}
"""What the demo and most tests need, by the kind of fault. `tests.proof.chaos.actions` has the others."""


class VirtualCluster(Runner):
    """One job on virtual nodes. Use once: declare faults, then `run`. Not thread-safe."""

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
        smp_module: str = "holdfast.smp_daemon",
        actions: Mapping[str, Action] = ACTIONS,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            target: ``module:function`` that each trainer runs; the launcher has imported the module.
            args: handed to every trainer, as JSON.
            smps: whether nodes have an SMP at all.
            place: returns the node index for (generation, rank); default: ranks in order, `ranks_per_node` on each.
            on_event: called for every event, in the thread that calls `run`.
            memory: directory of the nodes' memory; default: one that belongs to this cluster. If the clusters of
                several jobs, each in a process of its own, get the same directory, they run on the same nodes, and the
                caller removes what is left of it.
            smp_module: the module to run as the SMP.
            actions: how each kind of fault is injected.
            environment: more environment variables for the SMPs.
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
        self._scratch = Scratch("virtual")
        self._base = self._scratch.path
        self._memory = memory or self._base
        self._smp_module = smp_module
        self._actions = actions
        self._environment = dict(environment or {})
        self._lives = [0] * nodes
        self._nodes = [self._new_node(index) for index in range(nodes)]
        self._faults: list[Fault] = []
        self._pids: dict[int, int] = {}
        self._running: set[int] = set()
        self._generation = 0
        self._restarting = False
        self._cause: list[Fault] = []
        self._dealt_with: list[Fault] = []
        self._draining: dict[int, Future[object]] = {}
        self._strays: set[int] = set()
        self.history = History()

    # ------------------------------------------------------------------ faults

    def add(self, fault: Fault) -> None:
        """Add a fault. Raises `ConfigError` if this cluster cannot inject it."""
        check(fault)
        if fault.kind not in self._actions:
            raise ConfigError(f"{fault.kind} needs a cluster that is made with actions= that have it")
        of = CATALOGUE[fault.kind].of
        limit = {"rank": self._world, "node": len(self._nodes)}.get(of, 0)
        if of and (not fault.targets or not all(0 <= target < limit for target in fault.targets)):
            raise ConfigError(f"{fault.kind} with targets {fault.targets}: choose {of}s from 0 to {limit - 1}")
        self._faults.append(fault)

    def kill_trainer(self, *ranks: int, at: str, step: int | None = None) -> None:
        """SIGKILL trainers when the first of them reaches point `at` of `step`."""
        self.add(Fault(f"rank{ranks[0]}", at, step, "kill-trainer", ranks))

    def kill_node(self, *indices: int, at: str, step: int | None = None, by: str | None = None) -> None:
        """Cut the power of nodes: SIGKILL their SMPs and trainers, and wipe their memory.

        `by`: the process that triggers it; default: one on the first of the nodes.
        """
        self.add(Fault(by or self.witness(indices[0], at), at, step, "lose-node", indices))

    def kill_smp(self, index: int, *, at: str, step: int | None = None) -> None:
        """SIGKILL a node's SMP, and start another in the same arena; trainers are left alone."""
        self.add(Fault(self.witness(index, at), at, step, "kill-smp", (index,)))

    def drain_node(self, index: int, *, at: str, step: int) -> None:
        """Announce that a node is to be taken away. It has left when the job starts again."""
        self.add(Fault(self.witness(index, at), at, step, "drain-node", (index,)))

    def freeze(self, who: str, *, at: str, step: int | None = None) -> None:
        """Keep ``rank<r>`` or ``smp<i>`` at point `at` when it gets there, until it is killed."""
        self.add(Fault(who, at, step, "freeze", ()))

    def witness(self, index: int, at: str) -> str:
        """The process of a node that reaches a point: its SMP or its first trainer."""
        return f"smp{index}" if at in SMP_FAILPOINTS else f"rank{self.ranks_on(index)[0]}"

    # ------------------------------------------------------------------ running

    def run(self) -> History:
        """Run the job to its end, with all faults. Always cleans up.

        Raises:
            JobFailed: a trainer failed without a fault; the first line has the errors of all trainers, and logs follow.
            DeadlineExceeded: the job did not end in time.
            HoldfastError: the job ended before all faults could be injected.
        """
        self._deadline = time.monotonic() + self._deadline_s
        self._events_path = str(self._base / "events")
        with ExitStack() as stack:
            stack.enter_context(self._scratch)
            self.listen(self._base / "events")
            for each in (self.hang_up, self._read_tracebacks, self._close_nodes, self._end_trainers):
                stack.callback(each)  # runs last to first; if one fails or is interrupted, the rest still run
            self.watch(self._launcher, self._hear_launcher)
            self._start_nodes(self._nodes if self._smps else [])
            before = self._launcher.disk_bytes_written()
            self._spawn()
            while self._running or self._strays or self._timers:
                if time.monotonic() >= self._deadline:
                    raise DeadlineExceeded(f"the job did not end within {self._deadline_s:.0f} s\n{self._logs()}")
                self.turn(self._deadline)
            self.catch_up()
            self._settle()
            written = self.history.disk_bytes_written + self._launcher.disk_bytes_written() - before
            self.history.disk_bytes_written = beyond_access_times(written)
            return self.history

    def _hear_launcher(self, launcher: Launcher) -> None:
        for message in launcher.messages():
            if message["kind"] == "spawned":
                self._pids = {int(rank): pid for rank, pid in message["pids"].items()}
            elif message["kind"] == "stray":
                self._strays.discard(message["rank"])
                self._note(message)
            elif message["kind"] == "exit":
                self._running.discard(message["rank"])
                self._note(message | {"generation": self._generation})
                if message["status"] != 0 and not self._restarting:
                    self._fail(message)
                elif not self._running and self._restarting:
                    self._restart()

    def _fail(self, message: Event) -> None:
        """Handle a trainer's failure: raise `JobFailed` unless a fault explains it; kill the ranks that wait for it."""
        fired = [f for f in self._faults if f.fired_at is not None and not any(f is done for done in self._dealt_with)]
        cause = [fault for fault in fired if CATALOGUE[fault.kind].ends_job]
        if not cause:
            ended = f"rank {message['rank']} ended with status {message['status']}"
            raise JobFailed("; ".join([ended, *self._errors()]) + f"\n{self._logs()}")
        self._restarting = True
        self._noticed_at = message["at"]
        self._cause = cause
        if self._running:
            self._launcher.kill()
        else:
            self._restart()

    def _restart(self) -> None:
        self._dealt_with += self._cause
        while self._draining:
            index, answer = self._draining.popitem()
            self._note({"kind": "drained", "node": index, "result": answer.result(self._deadline_s)})
            self._nodes[index].wait_end()
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
        first = self._node_of(0)
        self._launcher.spawn(self._target, ranks, (first.host, first.place))

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
        log, place = str(self._base / f"{who}.log"), self._node_of(rank).place
        return {"rank": rank, "env": environment, "log": log, "place": place}

    # ------------------------------------------------------------------ events

    def heard(self, event: Event, sock: socket.socket) -> None:
        if event["kind"] == "reached":
            self._reached(event, sock)
        else:
            self._note(event)

    def _reached(self, event: Event, sock: socket.socket) -> None:
        frozen, held_s = False, 0.0
        for fault in due_at(self._faults, event["who"], event["point"], event["step"]):
            fault.seen += 1
            if fault.seen < fault.nth:
                continue
            fault.due = True
            frozen |= fault.kind == "freeze"
            held_s += fault.for_s * (fault.kind == "hold")
            if fault.delay_s:
                self.later(fault.delay_s, partial(self._inject, fault, event["step"]))
            else:
                self._inject(fault, event["step"])
        if held_s:
            self.later(held_s, partial(release, sock))
        elif not frozen:
            release(sock)

    def _inject(self, fault: Fault, step: int) -> None:
        fault.fired_at = time.monotonic()
        self._note(
            {
                "kind": "fault",
                "fault": fault.kind,
                "targets": list(fault.targets),
                "at": fault.fired_at,
                "point": fault.point,
                "step": step,
                "generation": self._generation,
            }
        )
        self._actions[fault.kind](self, fault)

    # ------------------------------------------------------------------ what actions do

    def pid_of_rank(self, rank: int) -> int | None:
        """The pid of a rank's trainer; None if it does not run."""
        # The zygote has not reported the end of this child, so the pid is still the trainer's.
        return self._pids[rank] if rank in self._running else None

    def arena_of(self, index: int) -> Path:
        """The job's arena on a node."""
        return self._nodes[index].arena

    def ranks_on(self, index: int) -> list[int]:
        """The ranks of a node's trainers."""
        return [rank for rank in range(self._world) if self._place(self._generation, rank) == index]

    def power_cut(self, index: int) -> None:
        """Kill a node's SMP, and wipe its memory."""
        self._nodes[index].power_cut()

    def drain(self, index: int) -> None:
        """Have a node drained while the job trains. It is gone when the job starts again. Returns at once."""
        owner = read_owner(self._nodes[index].arena)
        if owner is None:
            raise HoldfastError(f"the SMP of {self._nodes[index].name} has ended, so it cannot be drained")
        self._draining[index] = answer = Future[object]()

        def ask() -> None:
            try:
                with PeerClient(self._job) as peers:
                    message = Drain(job=self._job, deadline_s=self._deadline_s)
                    answer.set_result(peers.ask(owner.control, message, self._deadline_s))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=ask, name="drain", daemon=True).start()

    def replace_smp(self, index: int, by: signal.Signals) -> None:
        """End a node's SMP with a signal, or SIGKILL if it survives that; note its exit status; start a successor."""
        status = self._nodes[index].end_smp(by)
        self._note({"kind": "smp-ended", "node": index, "by": by.name, "status": status, "at": time.monotonic()})
        self._start_nodes([self._nodes[index]])

    def _note(self, event: Event) -> None:
        self.history.events.append(event)
        self._on_event(event)

    # ------------------------------------------------------------------ nodes

    def _new_node(self, index: int) -> VirtualNode:
        life = self._lives[index]
        number = index + life * len(self._lives)
        return VirtualNode(index, life, self._host(number), self._memory, self._job, self._smp_module)

    def _host(self, number: int) -> str:
        return f"127.0.0.{11 + number}"

    def _start_nodes(self, nodes: Sequence[VirtualNode]) -> None:
        for node in nodes:
            node.launch(self._wiring(node.who), self._settings(node), log=self._base / f"{node.who}.log")
        for node in nodes:
            node.wait_ready()

    def _settings(self, node: VirtualNode) -> dict[str, str]:
        """More environment variables for the SMP of a node."""
        return self._environment

    def _wiring(self, who: str) -> Wiring:
        rules = [(fault.point, fault.step) for fault in self._faults if fault.who == who and not fault.due]
        return Wiring(self._events_path, rules)

    def _node_of(self, rank: int) -> VirtualNode:
        return self._nodes[self._place(self._generation, rank)]

    # ------------------------------------------------------------------ the end

    def _settle(self) -> None:
        """Check, after the job has ended well, that all faults were injected and that SMPs end and leave nothing."""
        unfired = [f for f in self._faults if f.fired_at is None]
        if unfired:
            raise HoldfastError(f"the job ended before these faults could be injected: {unfired}")
        if not self._smps:
            return
        for node in self._nodes:
            status = node.wait_end()
            if status != 0:
                self.history.leaks.append(f"the SMP of {node.name} ended with status {status}")
            self.history.disk_bytes_written += node.disk_bytes_written
            if node.arena.exists():
                self.history.leaks.append(f"{node.arena} is still there")

    def _end_trainers(self) -> None:
        if self._running or self._strays:
            self._launcher.end_trainers()

    def _close_nodes(self) -> None:
        with ExitStack() as stack:
            for node in self._nodes:
                stack.callback(node.close)

    def _read_tracebacks(self) -> None:
        for path in sorted(self._base.glob("smp*.log")):
            _, found, rest = path.read_text(errors="replace").partition("Traceback (most recent call last)")
            if found:
                self.history.tracebacks.append(f"{path.stem}: {rest[-2000:].strip()}")

    def _errors(self) -> list[str]:
        """The last error of each trainer. The first one to be reported may only have seen another one end."""
        logs = {path.stem: path.read_text(errors="replace") for path in sorted(self._base.glob("rank*.log"))}
        return [f"{who}: {line}" for who, text in logs.items() if (line := last_error(text))]

    def _logs(self) -> str:
        ended = [(node, node.ended()) for node in self._nodes]
        texts = [f"the SMP of {node.name} ended with status {status}" for node, status in ended if status is not None]
        for path in sorted(self._base.glob("**/*.log")):
            text = path.read_text(errors="replace").strip()
            if text:
                texts.append(f"--- {path.name} of {path.parent.parent.name}\n{text[-LOG_TAIL:]}")
        return "\n".join(texts)
