"""Lends units of one snapshot to a trainer of this node, wherever they are."""

from __future__ import annotations

from holdfast.smp_daemon.recovery.fetch import Fetcher
from holdfast.smp_daemon.shared.errors import DamagedSnapshot, ProtocolError
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.sources import Sources
from holdfast.smp_daemon.storage.holdings import ShardKey
from holdfast.smp_daemon.storage.store import Store


class Lender:
    """Gives a trainer of this node units of one snapshot, wherever they are, over its own connections.

    With it a trainer reads parts of other coordinates' shards without a whole shard being brought here. Not
    thread-safe; changes nothing that is held here.
    """

    def __init__(self, store: Store, sources: Sources) -> None:
        self._store = store
        self._sources = sources
        self._fetcher = Fetcher(sources, store.counters, store.backend, by_chain=False, network=store.network)
        self._buffer = memoryview(bytearray(sources.layout.unit_bytes))

    @property
    def snapshot(self) -> SnapshotId:
        """The snapshot whose units it gives."""
        return self._sources.snapshot

    @property
    def bytes_fetched(self) -> int:
        """The bytes that came over the network so far."""
        return self._fetcher.bytes_received

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
        return out, self._fetcher.one(self._fetcher.shard_unit(coord, index, out))

    def close(self) -> None:
        """Close its connections."""
        self._fetcher.close()
