"""How virtual clusters inject what the demo and most tests need: processes are killed, and nodes lost.

The other faults of the catalogue are injected by `tests.proof.chaos.actions`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from holdfast.chaos.faults import Fault
from holdfast.chaos.runner import send_signals


class FaultContext(Protocol):
    """The cluster that faults are injected into. All methods are called in the cluster's thread."""

    def pid_of_rank(self, rank: int) -> int | None:
        """The pid of a rank's trainer; None if it does not run."""
        ...

    def pid_of_smp(self, index: int) -> int:
        """The pid of a node's SMP."""
        ...

    def arena_of(self, index: int) -> Path:
        """The job's arena on a node."""
        ...

    def place(self) -> Path:
        """The directory that the job persists its snapshots in. Raises `ConfigError` if it persists none."""
        ...

    def host_of(self, index: int) -> str:
        """The node's address."""
        ...

    def ranks_on(self, index: int) -> list[int]:
        """The ranks of a node's trainers."""
        ...

    def namespaces(self) -> Sequence[str | None]:
        """The network namespaces in which the nodes' connections end: paths, or None for this machine's."""
        ...

    def impair(self, fault: Fault) -> None:
        """Impair the packets on the links of the fault's targets."""
        ...

    def set_clock(self, index: int, ahead_s: int) -> None:
        """Set a node's wall clock `ahead_s` seconds ahead of this machine's; behind, if negative."""
        ...

    def unplug(self, index: int) -> None:
        """Stop passing a node's packets, silently. Does nothing if nodes have no links of their own."""
        ...

    def power_cut(self, index: int) -> None:
        """Kill the SMP and wipe the node's memory."""
        ...

    def drain(self, index: int) -> None:
        """Have the node drained while the job trains. It is gone when the job starts again. Returns at once."""
        ...

    def replace_smp(self, index: int, by: signal.Signals = signal.SIGKILL) -> None:
        """End a node's SMP with a signal, or SIGKILL if it survives that; note its exit status; start a successor."""
        ...

    def end_job(self, spare: Sequence[int] = ()) -> None:
        """Kill all trainers except the ranks in `spare`, as a launcher does after a timeout."""
        ...

    def kill_launcher(self) -> None:
        """Kill the process that starts trainers, which die with it, and start the job again."""
        ...

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Call `action` after `seconds`."""
        ...


Action = Callable[[FaultContext, Fault], None]


def to_ranks(*signals: signal.Signals) -> Action:
    """An action that sends signals to the trainers of the target ranks."""

    def do(context: FaultContext, fault: Fault) -> None:
        for rank in fault.targets:
            send_signals(context.pid_of_rank(rank), *signals)

    return do


def end_smps(by: signal.Signals) -> Action:
    """An action that ends the SMPs of the target nodes with a signal, and starts successors."""

    def do(context: FaultContext, fault: Fault) -> None:
        for index in fault.targets:
            context.replace_smp(index, by)

    return do


def lose_nodes(context: FaultContext, fault: Fault) -> None:
    """Unplug the target nodes, kill their processes and wipe their memory."""
    for index in fault.targets:
        context.unplug(index)
        for rank in context.ranks_on(index):
            send_signals(context.pid_of_rank(rank), signal.SIGKILL)
        context.power_cut(index)


def drain_nodes(context: FaultContext, fault: Fault) -> None:
    """Announce that the target nodes are to be taken away."""
    for index in fault.targets:
        context.drain(index)


def freeze(context: FaultContext, fault: Fault) -> None:
    """Do nothing: the cluster keeps the process at the point, until it dies (``freeze``) or for `for_s` (``hold``)."""


ACTIONS: dict[str, Action] = {
    "kill-trainer": to_ranks(signal.SIGKILL),
    "kill-smp": end_smps(signal.SIGKILL),
    "lose-node": lose_nodes,
    "drain-node": drain_nodes,
    "freeze": freeze,
}
"""The action of each kind of fault, by name."""
