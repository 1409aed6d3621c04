"""Lists the snapshots at a place, and reads and checks a shard from it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from holdfast.smp_daemon.persist import manifest
from holdfast.smp_daemon.persist.manifest import MAX_MANIFEST_BYTES, SNAPSHOT, PersistManifest, RunFile
from holdfast.smp_daemon.persist.place import PersistPlace
from holdfast.smp_daemon.persist.shardfile import Header, StoredUnit, decode_unit, read_header, read_units
from holdfast.smp_daemon.shared.belief import Claim, believe
from holdfast.smp_daemon.shared.errors import DamagedSnapshot, NotOurs, PlaceError, ProtocolError
from holdfast.smp_daemon.shared.identity import Run
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.plain import Address, from_plain

DECODERS = 4
"""Number of threads that decode a shard while it is read."""

log = get_log(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """A snapshot's directory at a place.

    Attributes:
        manifest: the snapshot's manifest; None if the snapshot is not whole.
        reason: why it is not whole; empty if it is.
        unfinished: whether it never was whole: some of its nodes have not written their part.
    """

    snapshot: SnapshotId
    manifest: PersistManifest | None
    reason: str = ""
    unfinished: bool = False


@dataclass(frozen=True, slots=True)
class FoundRun:
    """A run's folder at a place: its snapshots, whole or not, the newest first, and the SMPs that last wrote there."""

    run: Run
    snapshots: tuple[Found, ...]
    at: tuple[Address, ...]


def find_runs(place: PersistPlace, job: str) -> list[FoundRun]:
    """What a place has of each run of a job, the newest run first. Blocks; raises `PlaceError`."""
    found = []
    files = place.files("")
    for of, run in runs_at(place):
        if of == job:
            told = _told(place, job, run) if manifest.run_file(job, run) in files else None
            snapshots = tuple(find(place, job, run))
            known = [each.manifest.layout.run for each in snapshots if each.manifest is not None]
            known += [told.run] if told is not None else []
            newest = max(known, key=lambda each: each.begun_s, default=Run(run, 0))
            found.append(FoundRun(newest, snapshots, told.at if told is not None else ()))
    return sorted(found, key=lambda each: (each.run.begun_s, each.run.id), reverse=True)


def run_files(place: PersistPlace, job: str) -> list[RunFile]:
    """The runs of a job that have noted that they persist at a place. Blocks; raises `PlaceError`."""
    named = [manifest.run_of(name) for name in sorted(place.files(""))]
    told = [_told(place, job, each[1]) for each in named if each is not None and each[0] == job]
    return [each for each in told if each is not None]


def _told(place: PersistPlace, job: str, run: str) -> RunFile | None:
    """What the file of a run says; None if it is damaged."""
    path = manifest.run_file(job, run)
    try:
        told = from_plain(RunFile, manifest.read(place.read(path, MAX_MANIFEST_BYTES)), "the file of a run")
        if told.run.id == run:
            return told
        reason = f"it is of run {told.run}"
    except (DamagedSnapshot, ProtocolError) as error:
        reason = str(error)
    log.warning("%s at %s is not used: %s", path, place.name, reason)
    return None


def runs_at(place: PersistPlace) -> list[tuple[str, str]]:
    """The job and the run of everything at a place, sorted. Blocks; raises `PlaceError`."""
    names = {*place.directories(""), *place.files("")}
    return sorted({named for named in map(manifest.run_of, names) if named is not None})


def find(place: PersistPlace, job: str, run: str) -> list[Found]:
    """Every snapshot of a run of a job, whole or not, the newest first. Blocks; raises `PlaceError`."""
    names = place.directories(manifest.run_folder(job, run))
    found = [snapshot for snapshot in map(manifest.snapshot_of, names) if snapshot is not None]
    return [look(place, job, run, snapshot) for snapshot in sorted(found, reverse=True)]


def look(place: PersistPlace, job: str, run: str, snapshot: SnapshotId) -> Found:
    """Look at one snapshot of a run. Blocks. Raises `PlaceError` if the storage fails, not if the snapshot is not
    whole."""
    folder = manifest.folder(job, run, snapshot)
    files = place.files(folder)
    if SNAPSHOT not in files:
        if _all_have_written(place, folder, files):
            return Found(snapshot, None, f"all of its nodes have written their part, and {SNAPSHOT} is not there")
        return Found(snapshot, None, "not all of its nodes have written their part", unfinished=True)
    try:
        whole = PersistManifest.from_json(manifest.read(place.read(f"{folder}/{SNAPSHOT}", MAX_MANIFEST_BYTES)))
    except DamagedSnapshot as error:
        return Found(snapshot, None, f"its manifest is damaged: {error}")
    if whole.snapshot != snapshot or whole.layout.job != job or whole.layout.run.id != run:
        of = f"{whole.snapshot} of run {whole.layout.run} of job {whole.layout.job!r}"
        return Found(snapshot, None, f"its manifest is of {of}")
    missing = whole.missing(files)
    return Found(snapshot, None if missing else whole, "; ".join(missing[:4]))


def _all_have_written(place: PersistPlace, folder: str, files: Collection[str]) -> bool:
    """Whether all lists of nodes are there; also if they cannot be read: then more may have been there."""
    names = manifest.node_lists(files)
    if not names:
        return False
    try:
        writers = int(manifest.read(place.read(f"{folder}/{names[0]}", MAX_MANIFEST_BYTES))["writers"])
    except (DamagedSnapshot, PlaceError, LookupError, TypeError, ValueError):
        return True
    return len(names) >= writers


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
    layout, expected = whole.layout, Claim.of_shard(whole.snapshot, coord, whole.layout)
    path = f"{manifest.folder(layout.job, layout.run.id, whole.snapshot)}/{manifest.shard_name(coord)}"
    with place.open(path) as file, ThreadPoolExecutor(DECODERS, "persist-decode") as pool:
        try:
            header = read_header(file.read)
            believe(header.claim, expected)
            waiting: list[Future[None]] = []
            for unit in read_units(file.read, header):
                step(unit.number)
                if len(waiting) == 2 * DECODERS:
                    waiting.pop(0).result()
                waiting.append(pool.submit(_decode, unit, header, out))
            for each in waiting:
                each.result()
        except (DamagedSnapshot, NotOurs) as error:
            raise DamagedSnapshot(f"{coord} of {whole.snapshot} at {place.name} is damaged: {error}") from error
    return whole.stored[coord]


def _decode(unit: StoredUnit, header: Header, out: memoryview) -> None:
    start = unit.number * header.unit_bytes
    decode_unit(unit, out[start : start + unit.length])
