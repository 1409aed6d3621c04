"""Reading a shard out of another node's SMP, by a process that needs no SMP of its own."""

from __future__ import annotations

import psutil

from holdfast.smp_daemon.net.links import Links
from holdfast.smp_daemon.recovery.units import UnitReader
from holdfast.smp_daemon.shared.counters import Counters
from holdfast.smp_daemon.shared.errors import ProtocolError, SmpUnavailable
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.limits import CALL_DEADLINE_S, MAX_HEADER_BYTES
from holdfast.smp_daemon.shared.messages import PeerInventory, ShardUnit
from holdfast.smp_daemon.shared.slotfile import SlotFormat, read_format
from holdfast.smp_daemon.shared.sources import Address, Sources

AHEAD = 4
"""Units asked for before they are received, so that the link is busy."""


class RemoteShard:
    """A copy, fetched as it is needed, of the newest sealed shard of `coord` that the SMP at `address` holds.

    Every call blocks and raises `HoldfastError` if the SMP is gone, or has given the shard up meanwhile. Not
    thread-safe; use it as a context manager.

    Attributes:
        snapshot: what it is a shard of.
        view: its slot file; zeros where nothing was fetched yet.
    """

    def __init__(self, address: Address, job: str, coord: str, deadline_s: float = CALL_DEADLINE_S) -> None:
        """Find the shard. `deadline_s`: how long each answer may take. Raises `SmpUnavailable` if there is none."""
        self._address = address
        counters = Counters()
        self._links = Links(counters, deadline_s)
        try:
            inventory = Inventory.read(self._links.call(address, PeerInventory(job=job)))
            held = max((snapshot for snapshot, name in inventory.shards if name == coord), default=None)
            layouts = [known for known in inventory.layouts.values() if held is not None and known.epoch == held.epoch]
            if held is None or not layouts:
                raise SmpUnavailable(f"the SMP at {address[0]}:{address[1]} holds no shard of {coord}")
        except BaseException:
            self._links.close()
            raise
        self.snapshot = held
        layout = layouts[0]
        self._coord = coord
        self._reader = UnitReader(Sources(held, layout, {coord: address}, {}), counters)
        length = next(shard.bytes for node in layout.nodes for shard in node.shards if shard.coord == coord)
        room = psutil.virtual_memory().available
        if length > room:
            self._links.close()
            raise ProtocolError(f"the shard of {coord} has {length:,} bytes there, and {room:,} are free here")
        self.view = memoryview(bytearray(length))
        self._unit_bytes = layout.unit_bytes
        self._missing = set(range(-(-length // layout.unit_bytes)))

    def __enter__(self) -> RemoteShard:
        return self

    def __exit__(self, *exception: object) -> None:
        self._links.close()

    def fetch(self, offset: int, length: int) -> None:
        """Have these bytes in `view`, checked. Raises `DamagedSnapshot` if they are not what was sealed."""
        wanted = range(offset // self._unit_bytes, -(-(offset + length) // self._unit_bytes))
        units = sorted(self._missing.intersection(wanted))
        for index in range(len(units) + AHEAD):
            if index < len(units):
                what = ShardUnit(self._coord, units[index])
                self._reader.send(self._links, self._address, what)
            if index >= AHEAD:
                self._receive(units[index - AHEAD])

    def read_format(self) -> SlotFormat:
        """Fetch the header; what it says."""
        self.fetch(0, 8)
        header = int.from_bytes(self.view[:8], "little")
        if header > MAX_HEADER_BYTES:
            raise ProtocolError(f"the shard's header claims {header} bytes; the limit is {MAX_HEADER_BYTES}")
        self.fetch(8, header)
        return read_format(self.view)[0]

    def fetch_all(self) -> None:
        """Have all of it in `view`."""
        self.fetch(0, self.view.nbytes)

    def _receive(self, index: int) -> None:
        unit = self.view[index * self._unit_bytes : (index + 1) * self._unit_bytes]
        self._reader.receive(self._links, self._address, unit)
        self._missing.remove(index)
