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
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from holdfast.chaos.accounting import beyond_access_times
from holdfast.chaos.faults import CATALOGUE, Fault, Kind
from holdfast.chaos.launcher import Launcher
from holdfast.chaos.node import VirtualNode
from holdfast.chaos.runner import Event, Runner, Wiring, release, send_signals
from holdfast.chaos.trainer import ENV as TRAINER_ENV
from holdfast.scratch import Scratch
from holdfast.smp_daemon.shared.errors import ConfigError, DeadlineExceeded, HoldfastError

TARGET = "holdfast.chaos.drill:train"
"""The usual ``module:function`` that trainers run: one rank of a drill."""

ERROR_LENGTH = 300
"""Maximum length of the line that says why a trainer ended, in characters."""

LOG_TAIL = 24_000
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


def kill_trainers(cluster: VirtualCluster, fault: Fault) -> None:
    """SIGKILL the trainers of the target ranks."""
    for rank in fault.targets:
        send_signals(cluster.pid_of_rank(rank), signal.SIGKILL)


def lose_nodes(cluster: VirtualCluster, fault: Fault) -> None:
    """Kill the processes of the target nodes, and wipe their memory."""
    for index in fault.targets:
        for rank in cluster.ranks_on(index):
            send_signals(cluster.pid_of_rank(rank), signal.SIGKILL)
        cluster.power_cut(index)


Action = Callable[[Any, Any], None]
"""How a kind of fault is injected: called with the cluster and the fault, in that cluster's thread."""


class VirtualCluster(Runner):
    """One job on virtual nodes. Use once: declare faults, then `run`. Not thread-safe.

    `tests.proof.chaos.cluster` injects more kinds of faults.

    Attributes:
        kinds, actions: the kinds of faults, and how those that it can inject are injected.
    """

    kinds: Mapping[str, Kind] = CATALOGUE
    actions: Mapping[str, Action] = {"kill-trainer": kill_trainers, "lose-node": lose_nodes}

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
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        """
        Args:
            target: ``module:function`` that each trainer runs; the launcher has imported the module.
            args: handed to every trainer, as JSON.
            smps: whether nodes have an SMP at all.
            on_event: called for every event, in the thread that calls `run`.
        """
        if not 1 <= nodes <= 64 or not 1 <= ranks_per_node <= 16:
            raise ConfigError(f"{nodes} nodes with {ranks_per_node} ranks: choose 1-64 nodes with 1-16 ranks each")
        self._launcher = launcher
        self._world = nodes * ranks_per_node
        self._ranks_per_node = ranks_per_node
        self._target = target
        self._args = args
        self._job = job
        self._smps = smps
        self._deadline_s = deadline_s
        self._on_event = on_event
        self._scratch = Scratch("virtual")
        self._base = self._scratch.path
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

    def kill_trainer(self, *ranks: int, at: str, step: int) -> None:
        """SIGKILL trainers when the first of them reaches point `at` of `step`."""
        self._faults.append(Fault(f"rank{ranks[0]}", at, step, "kill-trainer", ranks))

    def kill_node(self, *indices: int, at: str, step: int) -> None:
        """Cut the power of nodes: SIGKILL their SMPs and trainers, and wipe their memory."""
        self._faults.append(Fault(f"rank{self.ranks_on(indices[0])[0]}", at, step, "lose-node", indices))

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
            while self._any_runs() or self._timers:
                if time.monotonic() >= self._deadline:
                    raise DeadlineExceeded(f"the job did not end within {self._deadline_s:.0f} s\n{self._logs()}")
                self.turn(self._deadline)
            self.catch_up()
            self._settle()
            written = self.history.disk_bytes_written + self._launcher.disk_bytes_written() - before
            self.history.disk_bytes_written = beyond_access_times(written)
            return self.history

    def _any_runs(self) -> bool:
        """Whether any trainer runs."""
        return bool(self._running)

    def _hear_launcher(self, launcher: Launcher) -> None:
        for message in launcher.messages():
            self._hear(message)

    def _hear(self, message: Event) -> None:
        """Handle a message of the launcher."""
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
        """Handle a trainer's failure: raise `JobFailed` unless a fault explains it; kill the ranks that wait for it."""
        fired = [f for f in self._faults if f.fired_at is not None and not any(f is done for done in self._dealt_with)]
        cause = [fault for fault in fired if self.kinds[fault.kind].ends_job]
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
        for fault in self._faults:
            if fault.matches(event["who"], event["point"], event["step"]):
                fault.due = True
                self._inject(fault, event["step"])
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
        self.actions[fault.kind](self, fault)

    # ------------------------------------------------------------------ what actions do

    def pid_of_rank(self, rank: int) -> int | None:
        """The pid of a rank's trainer; None if it does not run."""
        # The zygote has not reported the end of this child, so the pid is still the trainer's.
        return self._pids[rank] if rank in self._running else None

    def ranks_on(self, index: int) -> list[int]:
        """The ranks of a node's trainers."""
        return [rank for rank in range(self._world) if self._index_of(rank) == index]

    def power_cut(self, index: int) -> None:
        """Kill a node's SMP, and wipe its memory."""
        self._nodes[index].power_cut()

    def _note(self, event: Event) -> None:
        self.history.events.append(event)
        self._on_event(event)

    # ------------------------------------------------------------------ nodes

    def _new_node(self, index: int) -> VirtualNode:
        life = self._lives[index]
        number = index + life * len(self._lives)
        return VirtualNode(index, life, self._host(number), self._base, self._job)

    def _host(self, number: int) -> str:
        return f"127.0.0.{11 + number}"

    def _start_nodes(self, nodes: Sequence[VirtualNode]) -> None:
        for node in nodes:
            node.launch(self._wiring(node.who), self._settings(node), log=self._base / f"{node.who}.log")
        for node in nodes:
            node.wait_ready()

    def _settings(self, node: VirtualNode) -> dict[str, str]:
        """More environment variables for the SMP of a node."""
        return {}

    def _wiring(self, who: str) -> Wiring:
        rules = [(fault.point, fault.step) for fault in self._faults if fault.who == who and not fault.due]
        return Wiring(self._events_path, rules)

    def _node_of(self, rank: int) -> VirtualNode:
        return self._nodes[self._index_of(rank)]

    def _index_of(self, rank: int) -> int:
        """The index of a rank's node."""
        return rank // self._ranks_per_node

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
        if self._any_runs():
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
