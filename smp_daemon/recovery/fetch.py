"""Single units of a snapshot, one after another: from their holders, or computed from the rest of their stripe.

A source that is gone is not used any more, but others, for as long as enough are left. `smp_daemon.recovery.load`
fetches a whole shard from many at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.smp_daemon.net.links import Links
from holdfast.smp_daemon.recovery.units import Computation, HeldUnit, StripePlace, UnitReader, place_of
from holdfast.smp_daemon.shared.counters import Counters
from holdfast.smp_daemon.shared.errors import (
    DamagedSnapshot,
    DeadlineExceeded,
    HoldfastError,
    ProtocolError,
    SmpUnavailable,
)
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.logs import Episodes, about, get_log
from holdfast.smp_daemon.shared.messages import ShardUnit, UnitReply
from holdfast.smp_daemon.shared.sources import Address, Sources
from holdfast.smp_daemon.storage.holdings import ShardKey
from holdfast.smp_daemon.storage.store import Store

log = get_log(__name__)


class Fetcher:
    """Fetches units of one snapshot over the caller's connections. Not thread-safe; every call blocks."""

    def __init__(self, sources: Sources, links: Links, counters: Counters, backend: str = "auto") -> None:
        """`backend`: see `ec.choose_codec`."""
        self.sources = sources
        self.links = links
        self._reader = UnitReader(sources, counters, backend)
        self._refusals = Episodes(log)
        self._gone: set[Address] = set()
        self._buffers: dict[int, memoryview] = {}

    @property
    def misses_somebody(self) -> bool:
        """Whether an SMP that holds something has not answered: what could not be had may be had later."""
        return bool(self._gone)

    def shard_unit(self, coord: str, index: int, out: memoryview) -> int:
        """Unit `index` of a shard, from its holder, or computed if that cannot give it; its digest.

        Raises:
            Unrecoverable: nobody holds it, and too little of its stripe is left.
            DamagedSnapshot: what was computed does not match its digest.
        """
        address = self.sources.shards.get(coord)
        if address is not None and address not in self._gone:
            try:
                self._reader.send(self.links, address, ShardUnit(coord, index))
                return self._reader.receive(self.links, address, out).digest
            except (SmpUnavailable, DeadlineExceeded, DamagedSnapshot, ProtocolError) as error:
                self._note_failure(address, error)
        return self.compute(place_of(self.sources.layout, coord, index), out)

    def compute(self, place: StripePlace, out: memoryview, expected: int | None = None) -> int:
        """A unit, data or parity, from k others of its stripe, into `out`, which is as long as the unit; its digest.

        Args:
            expected: its digest, if known here; for data units it is also learnt from the parity.

        Raises:
            Unrecoverable: fewer than k others can be got.
            DamagedSnapshot: the result does not match the digest, or none is known.
        """
        computation = Computation(self._reader, place, out.nbytes)
        waiting = [unit for unit in computation.operands.values() if unit.address not in self._gone]
        while waiting and (lacking := computation.needed - len(computation.buffers)) > 0:
            requested, waiting = waiting[:lacking], waiting[lacking:]
            for unit, reply in self._request(requested):
                computation.add(unit.number, self._buffer(unit.number), reply)
        return computation.finish(out, expected)

    def _request(self, units: list[HeldUnit]) -> Iterator[tuple[HeldUnit, UnitReply]]:
        """Request all of them at once; those that came whole, with their replies."""
        requested = []
        for unit in units:
            try:
                self._reader.send(self.links, unit.address, unit.what)
                requested.append(unit)
            except (SmpUnavailable, DeadlineExceeded) as error:
                self._note_failure(unit.address, error)
        for unit in requested:
            if unit.address in self._gone:
                continue
            try:
                out = self._buffer(unit.number)[: unit.length]
                yield unit, self._reader.receive(self.links, unit.address, out)
            except (SmpUnavailable, DeadlineExceeded, DamagedSnapshot, ProtocolError) as error:
                self._note_failure(unit.address, error)

    def _buffer(self, number: int) -> memoryview:
        if number not in self._buffers:
            self._buffers[number] = memoryview(bytearray(self.sources.layout.unit_bytes))
        return self._buffers[number]

    def _note_failure(self, address: Address, error: HoldfastError) -> None:
        text, extra = "%s does not give a unit of %s: %s", about(self.sources.snapshot, peer=address)
        self._refusals.begin(address, text, address, self.sources.snapshot, error, extra=extra)
        if isinstance(error, SmpUnavailable | DeadlineExceeded):
            self.links.drop(address)
            self._gone.add(address)


class Lender:
    """Gives a trainer of this node units of one snapshot, wherever they are, over connections of its own.

    So a trainer takes what it needs out of shards that are not its own, and no shard is brought here whole. Not
    thread-safe; changes nothing that is held here.
    """

    def __init__(self, store: Store, sources: Sources) -> None:
        self._store = store
        self._sources = sources
        self._links = Links(store.counters, system=store.system)
        self._fetcher = Fetcher(sources, self._links, store.counters, store.holdings.backend)
        self._buffer = memoryview(bytearray(sources.layout.unit_bytes))

    @property
    def snapshot(self) -> SnapshotId:
        """Of which it gives units."""
        return self._sources.snapshot

    @property
    def bytes_fetched(self) -> int:
        """What came over the network."""
        return self._links.bytes_received

    def unit(self, coord: str, index: int) -> tuple[memoryview, int]:
        """Unit `index` of a shard, checked, and its digest; good until the next call. Blocks while it travels, or is
        computed.

        Raises:
            ProtocolError: there is no such shard, or no such unit of it.
            Unrecoverable: nobody holds it, and too little of its stripe is left.
            DamagedSnapshot: what was computed does not match its digest.
        """
        layout = self._sources.layout
        offset, length = index * layout.unit_bytes, layout.shard_bytes(coord)
        if offset >= length:
            raise ProtocolError(f"there is no unit {index}: {coord} has {length} bytes")
        key = ShardKey(self._sources.snapshot, coord)
        if self._store.holdings.holds(key):
            try:
                unit, record = self._store.holdings.checked_unit(key, index)
                return unit, record.digests[index]
            except (DamagedSnapshot, ProtocolError):  # damaged, which it has noted; or given up: others may have it
                pass
        out = self._buffer[: min(layout.unit_bytes, length - offset)]
        return out, self._fetcher.shard_unit(coord, index, out)

    def close(self) -> None:
        """End its connections."""
        self._links.close()
