"""A virtual cluster into which every fault of the catalogue can be injected, also into links and clocks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.chaos.cluster import History, VirtualCluster
from holdfast.chaos.faults import CATALOGUE, Fault, check
from holdfast.chaos.launcher import Launcher
from holdfast.chaos.node import VirtualNode
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.scratch import Scratch
from tests.proof.chaos.actions import ACTIONS
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

    def __init__(self, launcher: Launcher, *, wired: bool = False, **others: Any) -> None:
        """
        Args:
            wired: whether each node is in a network namespace, and packets between the nodes can be impaired; else
                nodes have loopback addresses.
            others: see `VirtualCluster`.
        """
        self._wired = wired
        self._wire: Wire | None = None
        self._shim = launcher.shim if isinstance(launcher, ClockedLauncher) else {}
        super().__init__(launcher, actions=ACTIONS, **others)

    def add(self, fault: Fault) -> None:
        check(fault)
        if CATALOGUE[fault.kind].wired and not self._wired:
            raise ConfigError(f"{fault.kind} needs a cluster that is made with wired=True")
        if CATALOGUE[fault.kind].clocked and not self._shim:
            raise ConfigError(f"{fault.kind} needs a ClockedLauncher")
        super().add(fault)

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
        return super()._settings(node) | self._shim | self._clock(node)

    def _describe(self, rank: int) -> dict[str, Any]:
        found, node = super()._describe(rank), self._node_of(rank)
        found["env"] |= ({"GLOO_SOCKET_IFNAME": DEVICE} if self._wire is not None else {}) | self._clock(node)
        return found

    # ------------------------------------------------------------------ what actions do

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
