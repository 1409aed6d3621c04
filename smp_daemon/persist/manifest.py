"""Which files at a place make a snapshot, and which snapshots may be removed. Pure.

::

    <place>/<job>.<run>.json      the run, and the addresses of the SMPs that write here
    <place>/<job>.<run>/e<epoch>-s<step>/
        <coord>.safetensors       the slot file of a shard, as it was in memory
        <coord>.safetensors.json  its commit record, with the digest of each unit
        node-<i>.json             node i of the layout has written its part, and read it back
        snapshot.json             the layout; made when all nodes have written their part

Each run of a job has a folder of its own, so no run touches what another has persisted. A snapshot's directory counts
only if it has ``snapshot.json``, and every slot file in its length with its record. Any node that sees that all have
written their part writes ``snapshot.json``; all nodes would write the same. So no coordinator is needed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from holdfast.smp_daemon.shared.errors import DamagedSnapshot, HoldfastError, ProtocolError
from holdfast.smp_daemon.shared.identity import Run, is_run_id
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.limits import MAX_COUNT, is_identifier
from holdfast.smp_daemon.shared.plain import Address, Count, decode_digested, from_plain, to_plain
from holdfast.smp_daemon.shared.records import ShardRecord, record_name

T = TypeVar("T")

FORMAT = 2
"""Of the files here. No other is read."""

SNAPSHOT = "snapshot.json"
MAX_MANIFEST_BYTES = 64 << 20
_NODE = re.compile(r"node-\d{5,}\.json")
_DIRECTORY = re.compile(r"e(\d{1,16})-s(\d{1,16})")


def run_folder(job: str, run: str) -> str:
    """The folder of a run; `run` is its id."""
    return f"{job}.{run}"


def run_file(job: str, run: str) -> str:
    """The file that says which run has that folder."""
    return f"{run_folder(job, run)}.json"


def run_of(name: str) -> tuple[str, str] | None:
    """The job and the run of a folder, or of the file of a run; None if the name is not of this form."""
    job, _, run = name.removesuffix(".json").rpartition(".")
    return (job, run) if is_identifier(job) and is_run_id(run) else None


def folder(job: str, run: str, snapshot: SnapshotId) -> str:
    """The directory of a snapshot of that run."""
    return f"{run_folder(job, run)}/{directory(snapshot)}"


def directory(snapshot: SnapshotId) -> str:
    """The name of a snapshot's directory."""
    return f"e{snapshot.epoch:016}-s{snapshot.step:012}"


def snapshot_of(name: str) -> SnapshotId | None:
    """The snapshot of a directory with that name; None if the name is not of this form."""
    match = _DIRECTORY.fullmatch(name)
    if match is None:
        return None
    snapshot = SnapshotId(int(match[1]), int(match[2]))
    return snapshot if directory(snapshot) == name and max(snapshot) <= MAX_COUNT else None


def shard_name(coord: str) -> str:
    """The name of a shard's slot file. That of its commit record is `records.record_name` of it."""
    return f"{coord}.safetensors"


def node_name(index: int) -> str:
    """The name of the file that says that node `index` of the layout has written its part."""
    return f"node-{index:05}.json"


def read(kind: type[T], content: bytes, name: str) -> T:
    """What a file at a place says. Raises `DamagedSnapshot` if it does not match its digest, or is not `name`."""
    try:
        data = decode_digested(content)
    except ProtocolError as error:
        raise DamagedSnapshot(str(error)) from error
    try:
        return from_plain(kind, data, name)
    except HoldfastError as error:
        raise DamagedSnapshot(f"it is {error}") from error


def stored_record(content: bytes) -> ShardRecord:
    """The commit record in a shard's file. Raises `DamagedSnapshot` if it is none."""
    record = read(ShardRecord, content, "a shard's commit record")
    if len(record.digests) != -(-record.bytes // record.unit_bytes):
        raise DamagedSnapshot(f"its record has {len(record.digests)} digests of {record.bytes} bytes")
    return record


@dataclass(frozen=True, slots=True)
class RunFile:
    """A run that persists at a place, and the addresses of its SMPs."""

    run: Run
    at: tuple[Address, ...]


@dataclass(frozen=True, slots=True)
class PersistManifest:
    """A whole snapshot at a place.

    Attributes:
        layout: the layout of its epoch, which names its shards and their lengths. Nodes may have other names by now.
    """

    snapshot: SnapshotId
    layout: Layout

    @property
    def bytes(self) -> int:
        """The length of all shards."""
        return sum(map(self.layout.shard_bytes, self.layout.coords))

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `read_manifest` reads back, once it has its digest."""
        return {"format": FORMAT, **to_plain(self)}

    def missing(self, files: Mapping[str, int]) -> list[str]:
        """Reasons why `files`, the names and lengths in a directory, are not this snapshot; empty if they are."""
        reasons = []
        for coord in self.layout.coords:
            name, length = shard_name(coord), self.layout.shard_bytes(coord)
            reasons += [f"{each} is not there" for each in (name, record_name(name)) if each not in files]
            if files.get(name, length) != length:
                reasons.append(f"{name} has {files[name]} bytes, not {length}")
        return reasons


def read_manifest(content: bytes) -> PersistManifest:
    """The manifest in a file. Raises `DamagedSnapshot` if it is none of this format."""
    version = read(dict[str, Any], content, "a manifest").get("format")
    if version != FORMAT:
        raise DamagedSnapshot(
            f"it is of format {version!r}, and this version of holdfast reads format {FORMAT} only: use the "
            "version that wrote it"
        )
    found = read(PersistManifest, content, "a manifest")
    if found.layout.epoch != found.snapshot.epoch:
        raise DamagedSnapshot("its layout is of another epoch")
    return found


@dataclass(frozen=True, slots=True)
class NodePart:
    """What the file of a node says.

    Attributes:
        shards: the coordinates that it has written and read back.
        writers: how many nodes write such a file.
    """

    snapshot: SnapshotId
    shards: tuple[str, ...]
    writers: Count

    @classmethod
    def of(cls, snapshot: SnapshotId, layout: Layout, index: int) -> NodePart:
        """The part of node `index` of the layout."""
        coords = tuple(shard.coord for shard in layout.nodes[index].shards)
        return cls(snapshot, coords, sum(bool(node.shards) for node in layout.nodes))


def node_parts(files: Collection[str]) -> list[str]:
    """The names of nodes' files among `files`."""
    return sorted(name for name in files if _NODE.fullmatch(name))


def missing_nodes(layout: Layout, files: Collection[str]) -> list[str]:
    """Names of the nodes whose files are not among `files`. Nodes without shards write none."""
    return [node.name for i, node in enumerate(layout.nodes) if node.shards and node_name(i) not in files]


def expendable(complete: Collection[SnapshotId], incomplete: Collection[SnapshotId], keep: int) -> list[SnapshotId]:
    """Snapshots that may be removed, oldest first: all complete ones except the `keep` newest, and all incomplete ones,
    except one that is the newest of all.

    A snapshot is begun only when no node is writing another. So an incomplete snapshot that is not the newest will
    never be completed: its writers are dead, or gave it up. The newest complete one always stays.
    """
    newest = max([*complete, *incomplete], default=None)
    old = sorted(complete, reverse=True)[max(1, keep) :]
    return sorted([*old, *(snapshot for snapshot in incomplete if snapshot != newest)])
