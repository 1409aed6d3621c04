"""A virtual cluster into which every fault of the catalogue can be injected, also into links and clocks."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, cast

from holdfast.chaos.cluster import History, VirtualCluster
from holdfast.chaos.faults import SMP_FAILPOINTS
from holdfast.chaos.launcher import Launcher
from holdfast.chaos.node import VirtualNode
from holdfast.chaos.runner import Event, release
from holdfast.scratch import Scratch
from holdfast.smp_daemon.net.peers import PeerClient
from holdfast.smp_daemon.shared.errors import ConfigError, HoldfastError
from holdfast.smp_daemon.shared.messages import Drain
from holdfast.smp_daemon.shared.paths import read_owner
from tests.proof.chaos.actions import ACTIONS, check
from tests.proof.chaos.faults import CATALOGUE, Fault, due_at
from tests.proof.chaos.network import clocks
from tests.proof.chaos.network.namespaces import DEVICE, place_of
from tests.proof.chaos.network.wire import Wire


class ClockedLauncher(Launcher):
    """A launcher whose trainers have wall clocks that can be set.

    Attributes:
        shim: environment variables that make the wall clock of a process settable.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        """As `Launcher`. Raises `ConfigError` if clocks cannot be set here."""
        self._clocks = Scratch("clocks").__enter__()
        try:
            self.shim = clocks.compile_shim(self._clocks.path)
        except ConfigError:
            self._clocks.remove()
            raise
        super().__init__(modules, environment=self.shim)

    def close(self) -> None:
        super().close()
        self._clocks.remove()


class ChaosCluster(VirtualCluster):
    """As `VirtualCluster`. With a `ClockedLauncher` each node has a wall clock of its own."""

    kinds = CATALOGUE
    actions = ACTIONS

    def __init__(
        self,
        launcher: Launcher,
        *,
        wired: bool = False,
        place: Callable[[int, int], int] | None = None,
        memory: Path | None = None,
        smp_module: str = "holdfast.smp_daemon",
        environment: Mapping[str, str] | None = None,
        **others: Any,
    ) -> None:
        """
        Args:
            wired: whether each node is in a network namespace, and packets between the nodes can be impaired; else
                nodes have loopback addresses.
            place: returns the node index for (generation, rank); default: ranks in order.
            memory: directory of the nodes' memory; default: one that belongs to this cluster. If the clusters of
                several jobs, each in a process of its own, get the same directory, they run on the same nodes, and the
                caller removes what is left of it.
            smp_module: the module to run as the SMP.
            environment: more environment variables for the SMPs.
            others: see `VirtualCluster`.
        """
        self._wired = wired
        self._wire: Wire | None = None
        self._shim = launcher.shim if isinstance(launcher, ClockedLauncher) else {}
        self._place = place
        self._memory = memory
        self._smp_module = smp_module
        self._environment = dict(environment or {})
        self._draining: dict[int, Future[object]] = {}
        self._strays: set[int] = set()
        super().__init__(launcher, **others)

    # ------------------------------------------------------------------ faults

    def add(self, fault: Fault) -> None:
        """Add a fault. Raises `ConfigError` if this cluster cannot inject it."""
        check(fault)
        if CATALOGUE[fault.kind].wired and not self._wired:
            raise ConfigError(f"{fault.kind} needs a cluster that is made with wired=True")
        if CATALOGUE[fault.kind].clocked and not self._shim:
            raise ConfigError(f"{fault.kind} needs a ClockedLauncher")
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

    def run(self) -> History:
        if not self._wired:
            return super().run()
        self._wire = Wire()
        try:
            history = super().run()
            for kind, packets in self._wire.hits():
                self._note({"kind": "impaired", "fault": kind, "packets": packets, "at": time.monotonic()})
            return history
        finally:
            self.history.leaks += self._wire.close()

    def _any_runs(self) -> bool:
        return super()._any_runs() or bool(self._strays)

    def _hear(self, message: Event) -> None:
        if message["kind"] == "stray":
            self._strays.discard(message["rank"])
            self._note(message)
        else:
            super()._hear(message)

    def _restart(self) -> None:
        while self._draining:
            index, answer = self._draining.popitem()
            self._note({"kind": "drained", "node": index, "result": answer.result(self._deadline_s)})
            self._nodes[index].wait_end()
        super()._restart()

    def _reached(self, event: Event, sock: socket.socket) -> None:
        frozen, held_s = False, 0.0
        for fault in due_at(cast("list[Fault]", self._faults), event["who"], event["point"], event["step"]):
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

    def _index_of(self, rank: int) -> int:
        return self._place(self._generation, rank) if self._place is not None else super()._index_of(rank)

    def _new_node(self, index: int) -> VirtualNode:
        node = super()._new_node(index)
        return VirtualNode(
            index, self._lives[index], node.host, self._memory or self._base, self._job, self._smp_module
        )

    def _host(self, number: int) -> str:
        return f"10.77.{number // 250}.{number % 250 + 1}" if self._wired else super()._host(number)

    def _clock(self, node: VirtualNode) -> dict[str, str]:
        """The variable that names a node's clock."""
        return {clocks.ENV: str(self._base / f"{node.name}.clock")} if self._shim else {}

    def _start_nodes(self, nodes: Sequence[VirtualNode]) -> None:
        for node in nodes:
            if not node.place and (self._wire is not None or self._shim):
                node.place = place_of(self._wire.open(node.host) if self._wire else "")
                self.set_clock(node.index, 0)
        super()._start_nodes(nodes)

    def _settings(self, node: VirtualNode) -> dict[str, str]:
        return self._environment | self._shim | self._clock(node)

    def _describe(self, rank: int) -> dict[str, Any]:
        found, node = super()._describe(rank), self._node_of(rank)
        found["env"] |= ({"GLOO_SOCKET_IFNAME": DEVICE} if self._wire is not None else {}) | self._clock(node)
        return found

    # ------------------------------------------------------------------ what actions do

    def arena_of(self, index: int) -> Path:
        """The job's arena on a node."""
        return self._nodes[index].arena

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

    def namespaces(self) -> list[str | None]:
        """The network namespaces in which the nodes' connections end: paths, or None for this machine's."""
        return [node.place[1] for node in self._nodes] if self._wire is not None else [None]

    def impair(self, fault: Fault) -> None:
        """Impair the packets on the links of the fault's targets."""
        assert self._wire is not None  # `add` has checked it
        hosts = [self._nodes[index].host for index in fault.targets]
        self._wire.impair(fault.kind, hosts, amount=fault.amount, seed=fault.seed, for_s=fault.for_s)

    def unplug(self, index: int) -> None:
        """Stop passing a node's packets, silently. Does nothing if nodes have no links of their own."""
        if self._wire is not None:
            self._wire.unplug(self._nodes[index].host)

    def set_clock(self, index: int, ahead_s: int) -> None:
        """Set a node's wall clock `ahead_s` seconds ahead of this machine's; behind, if negative."""
        for path in self._clock(self._nodes[index]).values():
            clocks.set_clock(Path(path), ahead_s)

    def pid_of_smp(self, index: int) -> int:
        """The pid of a node's SMP."""
        return self._nodes[index].pid

    def host_of(self, index: int) -> str:
        """A node's address."""
        return self._nodes[index].host

    def place(self) -> Path:
        """The directory that the job persists its snapshots in. Raises `ConfigError` if it persists none."""
        if "HOLDFAST_PERSIST" not in self._environment:
            raise ConfigError("this cluster persists nothing")
        return Path(self._environment["HOLDFAST_PERSIST"])

    def end_job(self, spare: Sequence[int] = ()) -> None:
        """Kill all trainers except the ranks in `spare`, as a launcher does after a timeout."""
        if not self._running:
            return
        spared = self._running.intersection(spare)
        self._strays |= spared
        self._running -= spared
        self._launcher.kill(sorted(spared))

    def kill_launcher(self) -> None:
        """Kill the process that starts trainers, which die with it, and start the job again."""
        self._selector.unregister(self._launcher)
        self._launcher.replace()
        self.watch(self._launcher, self._hear_launcher)
        at = time.monotonic()
        for rank in sorted(self._running):
            self._note({"kind": "exit", "rank": rank, "status": -9, "at": at, "generation": self._generation})
        self._running.clear()
        self._noticed_at = at
        self._cause = [fault for fault in self._faults if fault.fired_at is not None and fault.kind == "kill-launcher"]
        self._restart()
