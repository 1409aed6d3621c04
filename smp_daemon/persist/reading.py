"""Lists the snapshots at a place, and reads and checks a shard from it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from holdfast.smp_daemon.persist import manifest
from holdfast.smp_daemon.persist.manifest import MAX_MANIFEST_BYTES, SNAPSHOT, PersistManifest
from holdfast.smp_daemon.persist.place import PersistPlace
from holdfast.smp_daemon.persist.shardfile import Header, StoredUnit, decode_unit, read_header, read_units
from holdfast.smp_daemon.shared.errors import DamagedSnapshot
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.logs import get_log

DECODERS = 4
"""Number of threads that decode a shard while it is read."""

log = get_log(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """A snapshot's directory at a place.

    Attributes:
        manifest: the snapshot's manifest; None if the snapshot is not whole.
        reason: why it is not whole; empty if it is.
    """

    snapshot: SnapshotId
    manifest: PersistManifest | None
    reason: str = ""


def find(place: PersistPlace, job: str) -> list[Found]:
    """Every snapshot of a job, whole or not, the newest first. Blocks; raises `PlaceError`."""
    names = place.directories(job)
    found = [snapshot for snapshot in map(manifest.snapshot_of, names) if snapshot is not None]
    return [look(place, job, snapshot) for snapshot in sorted(found, reverse=True)]


def look(place: PersistPlace, job: str, snapshot: SnapshotId) -> Found:
    """Look at one snapshot of a job. Blocks. Raises `PlaceError` if the storage fails, not if the snapshot is not
    whole."""
    folder = f"{job}/{manifest.directory(snapshot)}"
    files = place.files(folder)
    if SNAPSHOT not in files:
        return Found(snapshot, None, "not all of its nodes have written their part")
    try:
        whole = PersistManifest.from_json(manifest.read(place.read(f"{folder}/{SNAPSHOT}", MAX_MANIFEST_BYTES)))
    except DamagedSnapshot as error:
        return Found(snapshot, None, f"its manifest is damaged: {error}")
    if whole.snapshot != snapshot or whole.layout.job != job:
        return Found(snapshot, None, f"its manifest is of {whole.snapshot} of job {whole.layout.job!r}")
    missing = whole.missing(files)
    return Found(snapshot, None if missing else whole, "; ".join(missing[:4]))


def read_shard(
    place: PersistPlace,
    whole: PersistManifest,
    coord: str,
    out: memoryview,
    step: Callable[[int], None] = lambda count: None,
) -> int:
    """Fill `out`, which is as long as the shard, with the sealed bytes. Returns how many bytes were read. Blocks.

    Args:
        step: called with the number of each unit before it is decoded.

    Raises:
        DamagedSnapshot: the file is not what was written; `out` may be filled in part.
        PlaceError: the storage fails.
    """
    job, length = whole.layout.job, whole.layout.shard_bytes(coord)
    path = f"{job}/{manifest.directory(whole.snapshot)}/{manifest.shard_name(coord)}"
    expected = Header(job, *whole.snapshot, coord, length, whole.layout.unit_bytes)
    with place.open(path) as file, ThreadPoolExecutor(DECODERS, "persist-decode") as pool:
        try:
            header = read_header(file.read)
            if header != expected:
                raise DamagedSnapshot(f"it says that it is {header}, not {expected}")
            waiting: list[Future[None]] = []
            for unit in read_units(file.read, header):
                step(unit.number)
                if len(waiting) == 2 * DECODERS:
                    waiting.pop(0).result()
                waiting.append(pool.submit(_decode, unit, header, out))
            for each in waiting:
                each.result()
        except DamagedSnapshot as error:
            raise DamagedSnapshot(f"{coord} of {whole.snapshot} at {place.name} is damaged: {error}") from error
    return whole.stored[coord]


def _decode(unit: StoredUnit, header: Header, out: memoryview) -> None:
    start = unit.number * header.unit_bytes
    decode_unit(unit, out[start : start + unit.length])
