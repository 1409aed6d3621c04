"""Gets single units of a snapshot, one after another: from their holders, or computed from the rest of their stripe.

A source that does not answer is not used again; others are used while enough are left. `smp_daemon.recovery.load`
fetches a whole shard from many sources at a time.
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
        """Whether an SMP that holds something has not answered, so that a unit that failed now may be got later."""
        return bool(self._gone)

    def shard_unit(self, coord: str, index: int, out: memoryview) -> int:
        """Get unit `index` of a shard into `out`, from its holder, or computed if the holder cannot give it. Returns
        its digest.

        Raises:
            Unrecoverable: no SMP gives the unit, and too little of its stripe is left.
            DamagedSnapshot: the computed unit does not match its digest.
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
        """Compute a data or parity unit from k others of its stripe into `out`, which is as long as the unit. Returns
        its digest.

        Args:
            expected: the unit's digest, if known here; for data units it is also learnt from the parity.

        Raises:
            Unrecoverable: fewer than k others can be got.
            DamagedSnapshot: the result does not match the digest, or no digest is known.
        """
        computation = Computation(self._reader, place, out.nbytes)
        waiting = [unit for unit in computation.operands.values() if unit.address not in self._gone]
        while waiting and (lacking := computation.needed - len(computation.buffers)) > 0:
            requested, waiting = waiting[:lacking], waiting[lacking:]
            for unit, reply in self._request(requested):
                computation.add(unit.number, self._buffer(unit.number), reply)
        return computation.finish(out, expected)

    def _request(self, units: list[HeldUnit]) -> Iterator[tuple[HeldUnit, UnitReply]]:
        """Request all units at once; yield those that came whole, with their replies."""
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
    """Gives a trainer of this node units of one snapshot, wherever they are, over its own connections.

    With it a trainer reads parts of other coordinates' shards without a whole shard being brought here. Not
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
        """The snapshot whose units it gives."""
        return self._sources.snapshot

    @property
    def bytes_fetched(self) -> int:
        """The bytes that came over the network so far."""
        return self._links.bytes_received

    def unit(self, coord: str, index: int) -> tuple[memoryview, int]:
        """Unit `index` of a shard, checked, and its digest. The bytes are valid until the next call. Blocks while the
        unit is fetched or computed.

        Raises:
            ProtocolError: there is no such shard, or no such unit of it.
            Unrecoverable: no SMP gives the unit, and too little of its stripe is left.
            DamagedSnapshot: the computed unit does not match its digest.
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
            except (DamagedSnapshot, ProtocolError):  # damaged, or released meanwhile: others may have the unit
                pass
        out = self._buffer[: min(layout.unit_bytes, length - offset)]
        return out, self._fetcher.shard_unit(coord, index, out)

    def close(self) -> None:
        """Close its connections."""
        self._links.close()
