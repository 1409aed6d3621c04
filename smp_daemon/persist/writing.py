"""Writes a node's part of a snapshot from its arena to a place, publishes whole snapshots, and removes old ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.smp_daemon.persist import manifest
from holdfast.smp_daemon.persist.manifest import MAX_MANIFEST_BYTES, SNAPSHOT, NodePart, RunFile
from holdfast.smp_daemon.persist.place import PersistPlace
from holdfast.smp_daemon.persist.reading import StoredShards, find
from holdfast.smp_daemon.shared.errors import DamagedSnapshot, PlaceError
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.plain import encode_digested, to_plain
from holdfast.smp_daemon.shared.records import digest, record_name
from holdfast.smp_daemon.storage.holdings import Holdings, ShardKey

log = get_log(__name__)

Pace = Callable[[int], None]
"""Called with the length of each unit before it is read: waits for the rate limit, raises if the work is given up."""


def write_node(
    place: PersistPlace, holdings: Holdings, layout: Layout, node: str, snapshot: SnapshotId, pace: Pace
) -> int:
    """Write all shards of `node` in `layout`, read them back, and then write the node's file. Blocks; holds a few units
    in memory.

    What was read back from the storage once is what older snapshots are removed for; see `tidy`.

    Returns the length of all its shards.

    Raises:
        PlaceError: the storage fails.
        DamagedSnapshot: a unit does not match its digest, in memory or as the storage gives it back.
        ProtocolError: the snapshot was released meanwhile.
    """
    index = [each.name for each in layout.nodes].index(node)
    folder = manifest.folder(layout.job, layout.run.id, snapshot)
    stored = StoredShards(place, snapshot, layout)
    coords = [shard.coord for shard in layout.nodes[index].shards]
    for coord in coords:
        _write_shard(place, holdings, f"{folder}/{manifest.shard_name(coord)}", ShardKey(snapshot, coord), pace)
        unit = memoryview(bytearray(layout.unit_bytes))
        for number, start in enumerate(range(0, layout.shard_bytes(coord), layout.unit_bytes)):
            out = unit[: layout.shard_bytes(coord) - start]
            pace(out.nbytes)
            stored.one(stored.shard_unit(coord, number, out))
    with place.create(f"{folder}/{manifest.node_name(index)}") as file:
        file.write(encode_digested(to_plain(NodePart.of(snapshot, layout, index))))
    return sum(map(layout.shard_bytes, coords))


def _write_shard(place: PersistPlace, holdings: Holdings, path: str, key: ShardKey, pace: Pace) -> None:
    """Write a slot file, and then its commit record, without which it does not count."""
    view, record = holdings.open(key)
    with place.create(path) as file:
        for number, sealed in enumerate(record.digests):
            if number == len(record.digests) // 2:
                failpoint("persist.middle", key.snapshot.step)
            offset, count = record.unit(number)
            pace(count)
            unit = bytes(view[offset : offset + count])
            if digest(memoryview(unit)) != sealed:  # of the copy, which is what is written
                holdings.checked_unit(key, number)  # raises if the slot is damaged too, and notes it for the scrub
                raise DamagedSnapshot(f"unit {number} of {key} was damaged while it was read")
            file.write(unit)
    with place.create(record_name(path)) as file:
        file.write(encode_digested(to_plain(record)))


def publish(place: PersistPlace, layout: Layout, snapshot: SnapshotId) -> list[str]:
    """Write the manifest that makes the snapshot count, if every node has written its part. Returns the nodes that have
    not; none if the snapshot counts.

    Raises:
        PlaceError: the storage fails.
        DamagedSnapshot: the parts that the nodes have written do not fit together, or some of it is not there.
    """
    folder = manifest.folder(layout.job, layout.run.id, snapshot)
    files = place.files(folder)
    if SNAPSHOT in files:
        return []
    missing = manifest.missing_nodes(layout, files)
    if missing:
        return missing
    names = [manifest.node_name(i) for i, node in enumerate(layout.nodes) if node.shards]
    contents = [place.read(f"{folder}/{name}", MAX_MANIFEST_BYTES) for name in names]
    parts = [manifest.read(NodePart, content, "the file of a node") for content in contents]
    whole = manifest.combine(snapshot, layout, parts)
    if gone := whole.missing(files):
        raise DamagedSnapshot(f"{snapshot} is not whole at {place.name}: {'; '.join(gone[:4])}")
    with place.create(f"{folder}/{SNAPSHOT}") as file:
        file.write(encode_digested(whole.to_json()))
    return []


def note_run(place: PersistPlace, layout: Layout) -> None:
    """Note at the place which run persists there, and where its SMPs are. Blocks. Raises `PlaceError`."""
    with place.create(manifest.run_file(layout.job, layout.run.id)) as file:
        file.write(encode_digested(to_plain(RunFile.of(layout))))


def tidy(place: PersistPlace, job: str, run: str, keep: int) -> Sequence[SnapshotId]:
    """Remove snapshots of a run that are not needed any more, and return them. Those that cannot be removed are logged,
    and returned too. Other runs' snapshots stay.

    Call this only after this start of the run has published a snapshot, every shard of which was read back: what a
    start that could restore nothing finds there is not removed. Raises `PlaceError` if the storage cannot be listed or
    read.
    """
    found = find(place, job, run)
    whole = [each.snapshot for each in found if each.manifest is not None]
    others = [each.snapshot for each in found if each.manifest is None]
    gone = manifest.expendable(whole, others, keep)
    for snapshot in gone:
        folder = manifest.folder(job, run, snapshot)
        try:
            place.remove(f"{folder}/{SNAPSHOT}")  # first: without it the rest does not count
            place.remove(folder)
        except PlaceError as error:
            log.warning("%s could not be removed from %s: %s", snapshot, place.name, error)
    return gone
