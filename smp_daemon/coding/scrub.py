"""The scrub: reads everything that is sealed, slowly and over and over, and repairs damaged units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast.smp_daemon.recovery.rebuild import repair_units
from holdfast.smp_daemon.shared.errors import DamagedSnapshot, HoldfastError, ProtocolError
from holdfast.smp_daemon.shared.logs import Episodes, get_log
from holdfast.smp_daemon.shared.pacer import Pacer
from holdfast.smp_daemon.shared.priority import make_background
from holdfast.smp_daemon.shared.system import MACHINE, System
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


class Scrubber:
    """The scrubbing thread. With a rate of 0 in `pacer` it does not start, and passes run only on request."""

    def __init__(self, pacer: Pacer, priority: str = "normal", system: System = MACHINE) -> None:
        """`priority`: see `smp_daemon.shared.priority`."""
        self._system = system
        self._pacer = pacer
        self._priority = priority
        self._closed = system.Event()

    def start(self, store: Store) -> None:
        """Begin to work for `store`."""
        if self._pacer.rate:
            self._system.Thread(target=self._run, args=(store,), name="scrub", daemon=True).start()

    def close(self) -> None:
        """Stop after the current unit."""
        self._closed.set()

    def _run(self, store: Store) -> None:
        make_background(self._priority)
        episodes = Episodes(log)
        while not self._closed.wait(PASS_EVERY_S):
            try:
                scrub(store, self._pace)
                episodes.end("scrub", "the scrub completes its passes again")
            except HoldfastError as error:
                episodes.begin("scrub", "a pass of the scrub was aborted: %s", error)

    def _pace(self, count: int) -> None:
        if self._closed.wait(self._pacer.wait_s(count, self._system.monotonic())):
            raise ProtocolError("the SMP ends")


def scrub(store: Store, pace: Callable[[int], None]) -> Pass:
    """Read and check every sealed unit once; repair what can be repaired. Blocks.

    Args:
        pace: called with the length of each unit in bytes before it is read.
    """
    found = Pass()
    for key in store.holdings.held():
        damaged = []
        try:
            _, record = store.holdings.open(key)
            for index in range(len(record.digests)):
                length = record.unit(index)[1]
                if not length:
                    continue
                pace(length)
                try:
                    store.holdings.checked_unit(key, index)
                except DamagedSnapshot:
                    damaged.append(index)
                found.units += 1
                store.counters.add(bytes_scrubbed=length)
        except ProtocolError:
            continue  # it was released meanwhile
        found.damaged += len(damaged)
        if damaged:
            found.repaired += repair_units(store, key, damaged)
    return found
