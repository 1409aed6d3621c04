"""Reads a shard from another node's SMP, for a process that has no SMP of its own."""

from __future__ import annotations

import psutil

from holdfast.smp_daemon.net.links import Links
from holdfast.smp_daemon.shared.belief import Claim, believe_slot
from holdfast.smp_daemon.shared.counters import Counters
from holdfast.smp_daemon.shared.errors import DamagedSnapshot, ProtocolError
from holdfast.smp_daemon.shared.limits import CALL_DEADLINE_S, MAX_HEADER_BYTES
from holdfast.smp_daemon.shared.messages import AskShard, Fetch, HeldShard, ShardUnit, UnitReply
from holdfast.smp_daemon.shared.plain import from_plain
from holdfast.smp_daemon.shared.slotfile import SlotFormat
from holdfast.smp_daemon.shared.sources import Address

AHEAD = 4
"""Number of units requested ahead of the one being received, to keep the link busy."""


class RemoteShard:
    """A copy of the newest sealed shard of `coord` that the SMP at `address` holds, fetched on demand.

    Every call blocks, and raises `HoldfastError` if the SMP is gone or has released the shard meanwhile. Not
    thread-safe; use it as a context manager.

    Attributes:
        snapshot: the snapshot that the shard belongs to.
        view: its slot file; zeros where nothing was fetched yet.
    """

    def __init__(self, address: Address, job: str, coord: str, deadline_s: float = CALL_DEADLINE_S) -> None:
        """Find the shard and allocate memory for it.

        Args:
            deadline_s: timeout for each answer.

        Raises:
            ProtocolError: the SMP holds no such shard, or this machine has too little free memory for it.
        """
        self._address = address
        self._job, self._coord = job, coord
        self._links = Links(Counters(), deadline_s)
        try:
            held = from_plain(HeldShard, self._links.call(address, AskShard(job=job, coord=coord)), "what is held")
            room = psutil.virtual_memory().available
            if held.bytes > room:
                raise ProtocolError(
                    f"the shard of {coord} takes {held.bytes:,} bytes of memory; {room:,} are free here"
                )
        except BaseException:
            self._links.close()
            raise
        self.snapshot = held.snapshot
        self.view = memoryview(bytearray(held.bytes))
        self._unit_bytes = held.unit_bytes
        self._expected = Claim(held.run, held.snapshot, coord, held.bytes)
        self._missing = set(range(-(-held.bytes // held.unit_bytes)))

    def __enter__(self) -> RemoteShard:
        return self

    def __exit__(self, *exception: object) -> None:
        self._links.close()

    def fetch(self, offset: int, length: int) -> None:
        """Fetch these bytes into `view`, checked. Raises `DamagedSnapshot` if they do not match their digests."""
        wanted = range(offset // self._unit_bytes, -(-(offset + length) // self._unit_bytes))
        units = sorted(self._missing.intersection(wanted))
        for index in range(len(units) + AHEAD):
            if index < len(units):
                unit = ShardUnit(self._coord, units[index])
                self._links.send(self._address, Fetch(job=self._job, snapshot=self.snapshot, what=unit))
            if index >= AHEAD:
                self._receive(units[index - AHEAD])

    def read_format(self) -> SlotFormat:
        """Fetch the header and parse it."""
        self.fetch(0, 8)
        header = int.from_bytes(self.view[:8], "little")
        if header > MAX_HEADER_BYTES:
            raise ProtocolError(f"the shard's header claims {header} bytes; the limit is {MAX_HEADER_BYTES}")
        self.fetch(8, header)
        return believe_slot(self.view, self._expected)

    def fetch_all(self) -> None:
        """Fetch the whole shard into `view`."""
        self.fetch(0, self.view.nbytes)

    def _receive(self, index: int) -> None:
        unit = self.view[index * self._unit_bytes : (index + 1) * self._unit_bytes]
        reply = from_plain(UnitReply, self._links.receive(self._address, unit), "an answer with a unit")
        if self._links.digest != reply.digest:
            raise DamagedSnapshot(f"unit {index} of {self._coord} was damaged on its way from {self._address}")
        self._missing.remove(index)
