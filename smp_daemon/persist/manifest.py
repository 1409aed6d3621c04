"""Which files at a place make a snapshot, and which snapshots may be removed. Pure.

::

    <place>/<job>.<run>.json      the run, and the addresses of the SMPs that write here
    <place>/<job>.<run>/e<epoch>-s<step>/
        <coord>.shard             one per shard
        node-<i>.json             lists what node i of the layout has written and read back
        snapshot.json             the layout, and every shard's length; made when all nodes' lists are there

Each run of a job has a folder of its own, so no run touches what another has persisted. A snapshot's directory counts
only if it has ``snapshot.json`` and every shard has the length stated in it. Any node that sees all lists writes
``snapshot.json``; all nodes would write the same. So no coordinator is needed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.smp_daemon.shared.errors import DamagedSnapshot, HoldfastError, ProtocolError
from holdfast.smp_daemon.shared.identity import Run, is_run_id
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.limits import MAX_COUNT, is_identifier
from holdfast.smp_daemon.shared.plain import Address, Count, decode_digested, from_plain, to_plain

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
    """The name of a shard's file."""
    return f"{coord}.shard"


def node_name(index: int) -> str:
    """The name of the list of node `index` of the layout."""
    return f"node-{index:05}.json"


def read(content: bytes) -> Any:
    """The JSON in a file of a snapshot. Raises `DamagedSnapshot` if it does not match its digest, or is not JSON."""
    try:
        return decode_digested(content)
    except ProtocolError as error:
        raise DamagedSnapshot(str(error)) from error


@dataclass(frozen=True, slots=True)
class RunFile:
    """A run that persists at a place, and the addresses of its SMPs."""

    run: Run
    at: tuple[Address, ...]

    @classmethod
    def of(cls, layout: Layout) -> RunFile:
        """The run of `layout`, and the SMPs of its nodes."""
        return cls(layout.run, tuple(node.control for node in layout.nodes))


@dataclass(frozen=True, slots=True)
class PersistManifest:
    """A whole snapshot at a place.

    Attributes:
        layout: the layout of its epoch, which names its shards. Nodes may have other names by now.
        stored: the length of each shard's file, in bytes.
    """

    snapshot: SnapshotId
    layout: Layout
    stored: Mapping[str, Count]

    @property
    def bytes(self) -> int:
        """The length of all shards as they were in memory."""
        return sum(shard.bytes for node in self.layout.nodes for shard in node.shards)

    @property
    def stored_bytes(self) -> int:
        """The length of all shard files."""
        return sum(self.stored.values())

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back."""
        return {"format": 1, **to_plain(self)}

    @classmethod
    def from_json(cls, data: Any) -> PersistManifest:
        """Undo `to_json`. Raises `DamagedSnapshot` if `data` has another form, or does not name every shard."""
        version = data.get("format") if isinstance(data, dict) else None
        if version != 1:
            raise DamagedSnapshot(f"it is of format {version!r}, and this version reads 1: install a newer holdfast")
        try:
            found = from_plain(cls, data, "a manifest")
        except HoldfastError as error:
            raise DamagedSnapshot(f"it is {error}") from error
        if found.stored.keys() != set(found.layout.coords) or found.layout.epoch != found.snapshot.epoch:
            raise DamagedSnapshot("its shards are not those of its layout")
        return found

    def missing(self, files: Mapping[str, int]) -> list[str]:
        """Reasons why `files`, the names and lengths in a directory, are not this snapshot; empty if they are."""
        return [
            f"{name} has {files[name]} bytes, not {length}" if name in files else f"{name} is not there"
            for name, length in ((shard_name(coord), length) for coord, length in self.stored.items())
            if files.get(name) != length
        ]


def node_list(snapshot: SnapshotId, stored: Mapping[str, int], layout: Layout) -> dict[str, Any]:
    """A node's list: the snapshot, the length of each shard's file that it has written, and how many nodes write
    one."""
    writers = sum(bool(node.shards) for node in layout.nodes)
    return {"snapshot": list(snapshot), "stored": dict(stored), "writers": writers}


def node_lists(files: Collection[str]) -> list[str]:
    """The names of nodes' lists among `files`."""
    return sorted(name for name in files if _NODE.fullmatch(name))


def missing_nodes(layout: Layout, files: Collection[str]) -> list[str]:
    """Names of the nodes whose lists are not among `files`. Nodes without shards write none."""
    return [node.name for i, node in enumerate(layout.nodes) if node.shards and node_name(i) not in files]


def combine(snapshot: SnapshotId, layout: Layout, lists: Collection[Any]) -> PersistManifest:
    """The manifest made from the lists of all nodes. Raises `DamagedSnapshot` if the lists do not fit the snapshot or
    the layout."""
    stored: dict[str, int] = {}
    try:
        for each in lists:
            if SnapshotId(*each["snapshot"]) != snapshot:
                raise DamagedSnapshot(f"a node's list is of {each['snapshot']}, not of {snapshot}")
            stored |= {str(coord): int(length) for coord, length in each["stored"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedSnapshot(f"a node's list is damaged: {error!r}") from error
    if stored.keys() != set(layout.coords):
        raise DamagedSnapshot("the lists of the nodes do not name the shards of their layout")
    return PersistManifest(snapshot, layout, {coord: stored[coord] for coord in layout.coords})


def expendable(complete: Collection[SnapshotId], incomplete: Collection[SnapshotId], keep: int) -> list[SnapshotId]:
    """Snapshots that may be removed, oldest first: all complete ones except the `keep` newest, and all incomplete ones,
    except one that is the newest of all.

    A snapshot is begun only when no node is writing another. So an incomplete snapshot that is not the newest will
    never be completed: its writers are dead, or gave it up. The newest complete one always stays.
    """
    newest = max([*complete, *incomplete], default=None)
    old = sorted(complete, reverse=True)[max(1, keep) :]
    return sorted([*old, *(snapshot for snapshot in incomplete if snapshot != newest)])
