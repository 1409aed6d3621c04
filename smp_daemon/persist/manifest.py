"""Which files at a place make a snapshot, and which may be removed. Pure.

::

    <place>/<job>/e<epoch>-s<step>/
        <coord>.shard     one per shard
        node-<i>.json     what node i of the layout has written: made when its shards are there
        snapshot.json     the layout, and every shard's length: made when all nodes' lists are there

Only ``snapshot.json`` makes it a snapshot, and only with every shard beside it in the length that it says. Whichever
node sees that all lists are there makes it; all would make the same. So there is no coordinator that can be missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from holdfast.smp_daemon.shared.errors import DamagedSnapshot, HoldfastError
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.limits import MAX_COUNT
from holdfast.smp_daemon.shared.plain import Count, from_plain, to_plain

SNAPSHOT = "snapshot.json"
MAX_MANIFEST_BYTES = 64 << 20
_DIRECTORY = re.compile(r"e(\d{1,16})-s(\d{1,16})")


def directory(snapshot: SnapshotId) -> str:
    """The name of a snapshot's directory."""
    return f"e{snapshot.epoch:06}-s{snapshot.step:012}"


def snapshot_of(name: str) -> SnapshotId | None:
    """The snapshot that a directory of that name is of; None if it is none of ours."""
    match = _DIRECTORY.fullmatch(name)
    if match is None:
        return None
    snapshot = SnapshotId(int(match[1]), int(match[2]))
    return snapshot if directory(snapshot) == name and max(snapshot) <= MAX_COUNT else None


def shard_name(coord: str) -> str:
    """The file of a shard."""
    return f"{coord}.shard"


def node_name(index: int) -> str:
    """The list of node `index` of the layout."""
    return f"node-{index:05}.json"


def seal(data: Any) -> bytes:
    """JSON in one line, and its digest in another."""
    text = json.dumps(data, separators=(",", ":"), sort_keys=True).encode()
    return text + b"\n" + xxhash.xxh3_128_hexdigest(text).encode() + b"\n"


def unseal(content: bytes) -> Any:
    """Raises `DamagedSnapshot` if `content` is not what `seal` makes."""
    text, _, rest = content.partition(b"\n")
    if rest.strip() != xxhash.xxh3_128_hexdigest(text).encode():
        raise DamagedSnapshot("it does not match its digest")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedSnapshot(f"it is not JSON: {error}") from error


@dataclass(frozen=True, slots=True)
class PersistManifest:
    """A whole snapshot at a place.

    Attributes:
        layout: of the epoch that it was taken in: which shards there are. Nodes may have other names by now.
        stored: the length of each shard's file, in bytes.
    """

    snapshot: SnapshotId
    layout: Layout
    stored: Mapping[str, Count]

    @property
    def bytes(self) -> int:
        """Of all shards, as they were in memory."""
        return sum(shard.bytes for node in self.layout.nodes for shard in node.shards)

    @property
    def stored_bytes(self) -> int:
        """Of all files."""
        return sum(self.stored.values())

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back."""
        return {"format": 1, **to_plain(self)}

    @classmethod
    def from_json(cls, data: Any) -> PersistManifest:
        """Raises `DamagedSnapshot` if `data` is not what `to_json` makes, or does not name every shard once."""
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
        """What keeps the files of a directory, with their lengths, from being this snapshot; empty if nothing does."""
        return [
            f"{name} has {files[name]} bytes, not {length}" if name in files else f"{name} is not there"
            for name, length in ((shard_name(coord), length) for coord, length in self.stored.items())
            if files.get(name) != length
        ]


def node_list(snapshot: SnapshotId, stored: Mapping[str, int]) -> dict[str, Any]:
    """What a node says it has written."""
    return {"snapshot": list(snapshot), "stored": dict(stored)}


def missing_nodes(layout: Layout, files: Collection[str]) -> list[str]:
    """Nodes whose lists are not there yet. Nodes without shards write none."""
    return [node.name for i, node in enumerate(layout.nodes) if node.shards and node_name(i) not in files]


def combine(snapshot: SnapshotId, layout: Layout, lists: Collection[Any]) -> PersistManifest:
    """The manifest that follows from the lists of all nodes. Raises `DamagedSnapshot` if they are of something else."""
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
    """What may be removed, the oldest first: whole ones but the `keep` newest, and all that are not whole but the
    newest of all.

    A snapshot is begun only when no node is at work on another, so one that is not whole and not the newest will never
    be whole: whoever wrote it is dead, or gave it up. The newest whole one always stays.
    """
    newest = max([*complete, *incomplete], default=None)
    old = sorted(complete, reverse=True)[max(1, keep) :]
    return sorted([*old, *(snapshot for snapshot in incomplete if snapshot != newest)])
