"""Lists the snapshots at a place, and gives the units of one of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from holdfast.smp_daemon.persist import manifest
from holdfast.smp_daemon.persist.manifest import (
    MAX_MANIFEST_BYTES,
    SNAPSHOT,
    NodePart,
    PersistManifest,
    RunFile,
    read_manifest,
    stored_record,
)
from holdfast.smp_daemon.persist.place import PersistPlace
from holdfast.smp_daemon.recovery.fetch import UnitSource, WantedUnit, Writing
from holdfast.smp_daemon.shared.belief import Claim, believe, believe_unit
from holdfast.smp_daemon.shared.errors import DamagedSnapshot, NotOurs, PlaceError
from holdfast.smp_daemon.shared.identity import Run
from holdfast.smp_daemon.shared.inventory import PersistedRun
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.limits import MAX_RECORD_BYTES
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.plain import Address
from holdfast.smp_daemon.shared.records import ShardRecord, record_name
from holdfast.smp_daemon.shared.system import MACHINE, Threads
from holdfast.smp_daemon.storage.holdings import Key, ShardKey

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

    def told(self) -> PersistedRun:
        """What trainers and commands are told of it."""
        whole = frozenset(each.snapshot for each in self.snapshots if each.manifest is not None)
        return PersistedRun(self.run, whole, self._reasons(False), self._reasons(True), self.at)

    def _reasons(self, unfinished: bool) -> tuple[str, ...]:
        """Why snapshots are not whole, of those that never were (`unfinished`), or of the others."""
        lacking = [each for each in self.snapshots if each.manifest is None and each.unfinished is unfinished]
        return tuple(f"{each.snapshot}: {each.reason}" for each in lacking)


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
        told = manifest.read(RunFile, place.read(path, MAX_MANIFEST_BYTES), "the file of a run")
        if told.run.id == run:
            return told
        reason = f"it is of run {told.run}"
    except DamagedSnapshot as error:
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
        whole = read_manifest(place.read(f"{folder}/{SNAPSHOT}", MAX_MANIFEST_BYTES))
    except DamagedSnapshot as error:
        return Found(snapshot, None, f"{place.name}/{folder}/{SNAPSHOT} cannot be used: {error}")
    if whole.snapshot != snapshot or whole.layout.job != job or whole.layout.run.id != run:
        of = f"{whole.snapshot} of run {whole.layout.run} of job {whole.layout.job!r}"
        return Found(snapshot, None, f"its manifest is of {of}")
    missing = whole.missing(files)
    return Found(snapshot, None if missing else whole, "; ".join(missing[:4]))


def _all_have_written(place: PersistPlace, folder: str, files: Collection[str]) -> bool:
    """Whether all files of nodes are there; also if they cannot be read: then more may have been there."""
    names = manifest.node_parts(files)
    if not names:
        return False
    try:
        part = manifest.read(NodePart, place.read(f"{folder}/{names[0]}", MAX_MANIFEST_BYTES), "the file of a node")
    except (DamagedSnapshot, PlaceError):
        return True
    return len(names) >= part.writers


class StoredShards(UnitSource):
    """The shards of a persisted snapshot: slot files and their commit records, as in an SMP's memory."""

    def __init__(self, place: PersistPlace, snapshot: SnapshotId, layout: Layout, threads: Threads = MACHINE) -> None:
        """`layout`: of the snapshot's epoch, from its manifest. Reads nothing yet."""
        super().__init__(snapshot, layout, threads)
        self._place = place
        self._folder = manifest.folder(layout.job, layout.run.id, snapshot)
        # Held while a record is read, so that only one of the workers reads it. `changed` is never taken under it.
        self._reading = threads.Lock()
        self._records: dict[str, ShardRecord] = {}

    def how(self, coord: str) -> str:
        return "persisted"

    def shard_unit(self, coord: str, index: int, out: memoryview) -> WantedUnit:
        return WantedUnit(coord, index, out)

    def lost_unit(self, key: Key, index: int, out: memoryview, expected: int) -> WantedUnit:
        part = key.coord if isinstance(key, ShardKey) else str(key)  # storage has no parity: no such file
        return WantedUnit(part, index, out, expected=expected)

    def get(self, unit: WantedUnit, left: int, writing: Writing) -> int:
        """Raises `DamagedSnapshot` if the files are not what was written, `PlaceError` if the storage fails."""
        path = f"{self._folder}/{manifest.shard_name(unit.name)}"
        try:
            record = self._record(unit.name, path)
            offset, length = record.unit(unit.index)
            content = self._place.read_part(path, offset, length)
            believe_unit(memoryview(content), record.digests[unit.index], f"unit {unit.index}")
        except (DamagedSnapshot, NotOurs) as error:
            what = f"{unit.name} of {self.snapshot} at {self._place.name}"
            raise DamagedSnapshot(f"{what} is damaged: {error}") from error
        with writing():
            np.copyto(np.frombuffer(unit.out, np.uint8), np.frombuffer(content, np.uint8))
        with self.changed:
            self.bytes_received += len(content)
        return record.digests[unit.index]

    def _record(self, coord: str, path: str) -> ShardRecord:
        with self._reading:
            if coord not in self._records:
                record = stored_record(self._place.read(record_name(path), MAX_RECORD_BYTES))
                believe(Claim.of_record(record), Claim.of_shard(self.snapshot, coord, self.layout))
                self._records[coord] = record
            return self._records[coord]
