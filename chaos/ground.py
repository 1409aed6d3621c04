"""A fault that is to be done, and what must be known of a virtual cluster to do it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(slots=True)
class Fault:
    """Something to be done when a process reaches a point.

    Attributes:
        who: ``rank3`` or ``smp2``: the process that triggers it.
        step: of which step or snapshot; None: the first time.
        kind: one of `CATALOGUE`.
        targets: ranks or node indices, as the kind says.
        delay_s: how long after the point; the process goes on meanwhile.
        for_s: how long it lasts, for kinds that pass; of the network's and the clock's, 0 is to the end.
        amount: bits to flip, descriptors or bytes to leave, percent of packets, milliseconds, seconds, kB/s: as the
            kind says.
        seed: for what is drawn.
        nth: at the how-many-th time that the process comes to the point.
        fired_at: `time.monotonic`, once it has been done.
    """

    who: str
    point: str
    step: int | None
    kind: str
    targets: tuple[int, ...]
    delay_s: float = 0.0
    for_s: float = 0.0
    amount: int = 0
    seed: int = 0
    nth: int = 1
    seen: int = field(default=0, compare=False)
    due: bool = field(default=False, compare=False)
    fired_at: float | None = field(default=None, compare=False)

    def matches(self, who: str, point: str, step: int) -> bool:
        """Whether it is due."""
        return not self.due and (self.who, self.point) == (who, point) and self.step in (None, step)


class Ground(Protocol):
    """What faults need of a cluster."""

    def pid_of_rank(self, rank: int) -> int | None:
        """The trainer's process, if it runs."""
        ...

    def pid_of_smp(self, index: int) -> int:
        """The SMP's process."""
        ...

    def arena_of(self, index: int) -> Path:
        """Where the node's snapshots lie."""
        ...

    def place(self) -> Path:
        """Where the job's snapshots are persisted. Raises `ConfigError` if they are not."""
        ...

    def host_of(self, index: int) -> str:
        """The node's address."""
        ...

    def ranks_on(self, index: int) -> list[int]:
        """The trainers of a node."""
        ...

    def namespaces(self) -> Sequence[str | None]:
        """Where connections of the nodes end: paths of network namespaces, or None for this machine's."""
        ...

    def impair(self, fault: Fault) -> None:
        """Spoil what goes over the links of its targets."""
        ...

    def set_clock(self, index: int, ahead_s: int) -> None:
        """The node's wall clock is so far ahead of this machine's from now on."""
        ...

    def unplug(self, index: int) -> None:
        """Nothing leaves the node any more; where nodes have no links of their own, nothing happens."""
        ...

    def power_cut(self, index: int) -> None:
        """Kill the SMP and wipe the node's memory."""
        ...

    def replace_smp(self, index: int, by: signal.Signals = signal.SIGKILL) -> None:
        """End the SMP by a signal, or SIGKILL if it outlives that; note how it ended; start another in its arena."""
        ...

    def end_job(self, spare: Sequence[int] = ()) -> None:
        """Kill all trainers but those spared, as a launcher does that has lost patience."""
        ...

    def kill_launcher(self) -> None:
        """Kill what starts trainers; they die with it."""
        ...

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something in a while."""
        ...
