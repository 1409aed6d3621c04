"""The counters of an SMP. They can be read at any time, and only grow."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.smp_daemon.shared.system import MACHINE, Threads

COUNTS = {
    "bytes_sent": "bytes sent to other SMPs",
    "bytes_received": "bytes received from other SMPs",
    "units_accumulated": "units of others accumulated into parity",
    "units_damaged": "units that did not match their digest, here or on their way here",
    "units_repaired": "damaged units that were computed again and put back in place",
    "bytes_scrubbed": "bytes read by the scrub",
    "reconnects": "connections to other SMPs that broke and were made again",
    "units_requested_again": "units requested again from another SMP, since the first was late or failed",
    "pauses": "times that encoding paused while a trainer communicated",
    "regroups": "times that this node took part in regrouping",
    "snapshots_persisted": "snapshots persisted whole, with this node's part in them",
    "bytes_persisted": "bytes written for them",
    "persist_failures": "failed attempts to persist a snapshot, as far as this node knows",
}
"""What each counter counts, by its name."""

MOVES = frozenset({"bytes_sent", "bytes_received", "units_accumulated"})
"""Counters of work that somebody waits for. Nobody does for the scrub, which never ends."""


class Counters:
    """The counters of `COUNTS`, which several threads add to."""

    def __init__(self, threads: Threads = MACHINE, on_move: Callable[[], None] = lambda: None) -> None:
        """`on_move`: called by one thread at a time whenever bytes have moved; must not block."""
        self._lock = threads.Lock()  # guards `_counts`; innermost: no other lock is taken under it
        self._counts = dict.fromkeys(COUNTS, 0)
        self._on_move = on_move

    def add(self, **amounts: int) -> None:
        """Add to the named counts. Raises `KeyError` for one that does not exist."""
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount
            if not MOVES.isdisjoint(amounts):
                self._on_move()

    def moved(self) -> None:
        """Bytes have moved that no counter counts."""
        with self._lock:
            self._on_move()

    def read(self) -> dict[str, int]:
        """The current values of all counters."""
        with self._lock:
            return dict(self._counts)
