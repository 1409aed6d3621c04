"""What an SMP counts. Read by anybody, at any time; every number only grows."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from holdfast.smp_daemon.shared.system import MACHINE, System


@dataclass(slots=True)
class Counts:
    """The numbers.

    Attributes:
        bytes_sent, bytes_received: raw bytes exchanged with other SMPs.
        units_accumulated: data units of others accumulated into parity here.
        units_damaged: units that did not match their digest, here or on their way here.
        units_repaired: of those, how many were computed again in place.
        bytes_scrubbed: bytes that the scrub has read.
        reconnects: connections to other SMPs that broke and were made anew.
        units_requested_again: requests for units that had been requested of somebody else, who was late or failed.
        pauses: how often encoding made way for a trainer that communicates.
        regroups: how often this node took part in regrouping.
        snapshots_persisted: snapshots that were persisted, whole, with this node's part in them.
        bytes_persisted: what this node wrote for that.
        persist_failures: snapshots that were to be persisted and were not, as far as this node knows.
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


class Counters:
    """`Counts` that several threads add to."""

    def __init__(self, system: System = MACHINE) -> None:
        self._lock = system.Lock()  # innermost: whoever has it takes no other
        self._counts = Counts()

    def add(self, **amounts: int) -> None:
        """Add to the named counts."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self._counts, name, getattr(self._counts, name) + amount)

    def read(self) -> dict[str, int]:
        """All counts as they are now."""
        with self._lock:
            return asdict(self._counts)
