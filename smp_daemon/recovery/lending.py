"""Single units of a snapshot for a trainer of this node, wherever they are: it takes what it needs out of shards that
are not its own, and no shard is brought here whole.
"""

from __future__ import annotations

from holdfast.smp_daemon.net.links import Links
from holdfast.smp_daemon.recovery.fetch import Fetcher
from holdfast.smp_daemon.shared.errors import DamagedSnapshot, ProtocolError
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.records import digest
from holdfast.smp_daemon.shared.sources import Sources
from holdfast.smp_daemon.storage.holdings import ShardKey
from holdfast.smp_daemon.storage.store import Store


class Lender:
    """Gives units of one snapshot, over connections of its own. Not thread-safe; changes nothing that is held here."""

    def __init__(self, store: Store, sources: Sources) -> None:
        self._store = store
        self._sources = sources
        self._links = Links(store.counters)
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
        self._fetcher.shard_unit(coord, index, out)
        return out, digest(out)

    def close(self) -> None:
        """End its connections."""
        self._links.close()
