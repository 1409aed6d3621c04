"""The scrub: reads everything that is sealed, slowly and over and over, and repairs damaged units.

Before its first pass it reads, as fast as it can, what a predecessor left in the arena. It notes damaged units there,
and `recovery.reconciler` repairs them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from holdfast.smp_daemon.recovery.rebuild import repair_units
from holdfast.smp_daemon.shared.errors import HoldfastError, NotHeld, NotOurs
from holdfast.smp_daemon.shared.logs import Episodes, about, get_log
from holdfast.smp_daemon.shared.pacer import Pacer
from holdfast.smp_daemon.shared.priority import make_background
from holdfast.smp_daemon.storage.store import Store

PASS_EVERY_S = 60.0
"""Pause before each pass."""

log = get_log(__name__)


@dataclass(slots=True)
class Pass:
    """The result of one pass: number of units read, of damaged units, and of damaged units that were repaired."""

    units: int = 0
    damaged: int = 0
    repaired: int = 0


class _SmpEnds(Exception):
    """The SMP ends. No `HoldfastError`: it ends the pass, whatever else that passes over."""


class Scrubber:
    """The scrubbing thread. With a rate of 0 in `pacer` passes run only on request."""

    def __init__(self, store: Store, pacer: Pacer, priority: str) -> None:
        """`priority`: see `smp_daemon.shared.priority`."""
        self._store = store
        self._pacer = pacer
        self._priority = priority
        self._closed = store.network.Event()
        if pacer.rate or store.holdings.unverified_bytes:
            store.network.Thread(target=self._run, name="scrub", daemon=True).start()

    def close(self) -> None:
        """Stop after the current unit."""
        self._closed.set()

    def _run(self) -> None:
        make_background(self._priority)
        episodes = Episodes(log)
        monotonic = self._store.network.monotonic
        with suppress(_SmpEnds):
            verify_adopted(self._store, lambda count: self._wait(0))
            while self._pacer.rate:
                self._wait(PASS_EVERY_S)
                try:
                    scrub(self._store, lambda count: self._wait(self._pacer.wait_s(count, monotonic())))
                    episodes.end("scrub", "the scrub completes its passes again")
                except HoldfastError as error:
                    episodes.begin("scrub", "a pass of the scrub was aborted: %s", error)

    def _wait(self, seconds: float) -> None:
        if self._closed.wait(seconds):
            raise _SmpEnds


def verify_adopted(store: Store, pace: Callable[[int], None]) -> None:
    """Read what a predecessor left and nobody has read since, and note damaged units. Blocks for one read of it.

    Args:
        pace: called with the length of each unit in bytes before it is read.
    """
    count = store.holdings.unverified_bytes
    store.holdings.verify(pace)
    if count:
        log.info("what the last SMP left is verified: %d bytes", count, extra=about(bytes=count))


def scrub(store: Store, pace: Callable[[int], None]) -> Pass:
    """Read and check every sealed unit once; repair what can be repaired. Blocks.

    Args:
        pace: called with the length of each unit in bytes before it is read.
    """
    found = Pass()

    def read(count: int) -> None:
        pace(count)
        found.units += 1
        store.counters.add(bytes_scrubbed=count)

    for key in store.holdings.held():
        try:
            damaged = store.holdings.damaged_units(key, read)
        except (NotHeld, NotOurs):
            continue  # it was released meanwhile
        found.damaged += len(damaged)
        if damaged:
            found.repaired += repair_units(store, key, damaged)
    return found
