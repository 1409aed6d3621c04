"""The counters of an SMP. They can be read at any time, and only grow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from holdfast.smp_daemon.shared.system import MACHINE, Threads


@dataclass(slots=True)
class Counts:
    """The values of all counters.

    Attributes:
        bytes_sent, bytes_received: raw bytes exchanged with other SMPs.
        units_accumulated: data units of other nodes accumulated into parity on this one.
        units_damaged: units that did not match their digest, on this node or on their way to it.
        units_repaired: damaged units that were repaired in place.
        bytes_scrubbed: bytes that the scrub has read.
        reconnects: connections to other SMPs that broke and were made again.
        units_requested_again: requests for units that another SMP had been asked for, and was late or failed.
        pauses: how often encoding paused for a trainer that communicates.
        regroups: how often this node took part in regrouping.
        snapshots_persisted: snapshots persisted whole, to which this node contributed.
        bytes_persisted: bytes that this node wrote to persist snapshots.
        persist_failures: snapshots that could not be persisted, as far as this node knows.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    units_accumulated: int = 0
    units_damaged: int = 0
    units_repaired: int = 0
    bytes_scrubbed: int = 0
    reconnects: int = 0
    units_requested_again: int = 0
    pauses: int = 0
    regroups: int = 0
    snapshots_persisted: int = 0
    bytes_persisted: int = 0
    persist_failures: int = 0


MOVES = frozenset({"bytes_sent", "bytes_received", "units_accumulated"})
"""Counters of work that somebody waits for. Nobody does for the scrub, which never ends."""


class Counters:
    """`Counts` that several threads add to."""

    def __init__(self, threads: Threads = MACHINE, on_move: Callable[[], None] = lambda: None) -> None:
        """`on_move`: called by one thread at a time whenever bytes have moved; must not block."""
        self._lock = threads.Lock()  # guards `_counts`; innermost: no other lock is taken under it
        self._counts = Counts()
        self._on_move = on_move

    def add(self, **amounts: int) -> None:
        """Add to the named counts."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self._counts, name, getattr(self._counts, name) + amount)
            if not MOVES.isdisjoint(amounts):
                self._on_move()

    def moved(self) -> None:
        """Bytes have moved that no counter counts."""
        with self._lock:
            self._on_move()

    def read(self) -> dict[str, int]:
        """The current values of all counters."""
        with self._lock:
            return asdict(self._counts)
