"""The bytes of a persisted shard, the lists that make up a snapshot, and which snapshots may go: pure functions."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.smp_daemon.persist import manifest
from holdfast.smp_daemon.persist.manifest import NodePart, PersistManifest, read_manifest
from holdfast.smp_daemon.persist.place import Directory
from holdfast.smp_daemon.persist.reading import StoredShards
from holdfast.smp_daemon.shared.errors import ConfigError, DamagedSnapshot, PlaceError
from holdfast.smp_daemon.shared.identity import Run
from holdfast.smp_daemon.shared.layout import Layout, Node, Shard, SnapshotId
from holdfast.smp_daemon.shared.plain import encode_digested, to_plain
from holdfast.smp_daemon.shared.records import ShardRecord, digest_units, record_name
from holdfast.smp_daemon.shared.settings import PERSIST, PERSIST_BANDWIDTH, PERSIST_EVERY, PERSIST_KEEP
from tests.strategies import layouts, snapshots, spoilt

RUN = "0badcafe"
SNAPSHOT = SnapshotId(3, 14)
COORD = "dp0"
UNIT = 64


class Shelf:
    """A place with one persisted shard of 300 random bytes, as `writing` leaves it."""

    def __init__(self, root: Path) -> None:
        self.content = random.Random(1).randbytes(300)
        node = Node("n0", "127.0.0.1", 1, 2, (Shard(COORD, len(self.content)),))
        self.layout = Layout("job", 3, 0, (node,), ((0,),), 1, 0, UNIT, 2, run=Run(RUN, 1))
        digests = digest_units(memoryview(self.content), UNIT)
        self.record = ShardRecord(SNAPSHOT, COORD, len(self.content), UNIT, digests, run=RUN)
        self.slot = root / manifest.folder("job", RUN, SNAPSHOT) / manifest.shard_name(COORD)
        self.note = self.slot.with_name(record_name(self.slot.name))
        self.slot.parent.mkdir(parents=True)
        self.slot.write_bytes(self.content)
        self.note.write_bytes(encode_digested(to_plain(self.record)))
        self._place = Directory(root)

    def read(self) -> bytes:
        out = memoryview(bytearray(len(self.content)))
        with StoredShards(self._place, SNAPSHOT, self.layout) as stored:
            stored.fill(COORD, out)
            assert stored.bytes_received == len(out)
        return bytes(out)


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


def test_what_was_sealed_comes_back(shelf: Shelf) -> None:
    assert shelf.read() == shelf.content


def test_every_flipped_bit_is_noticed(shelf: Shelf) -> None:
    for path in (shelf.slot, shelf.note):
        content = bytearray(path.read_bytes())
        for bit in range(8 * len(content)):
            content[bit // 8] ^= 1 << bit % 8
            path.write_bytes(content)
            with pytest.raises(DamagedSnapshot, match=f"{COORD} of .* is damaged"):
                shelf.read()
            content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
    assert shelf.read() == shelf.content


def test_every_truncation_is_noticed(shelf: Shelf) -> None:
    for path in (shelf.slot, shelf.note):
        content = path.read_bytes()
        for length in range(len(content)):
            path.write_bytes(content[:length])
            with pytest.raises(DamagedSnapshot):
                shelf.read()
        path.write_bytes(content)


@pytest.mark.parametrize("name", ["slot", "note"])
def test_a_file_that_is_not_there_is_named(shelf: Shelf, name: str) -> None:
    path: Path = getattr(shelf, name)
    path.unlink()
    with pytest.raises(PlaceError, match=path.name):
        shelf.read()


@pytest.mark.parametrize(
    "other",
    [
        {"run": "0badcafd"},
        {"snapshot": SnapshotId(3, 15)},
        {"snapshot": SnapshotId(4, 14)},
        {"coord": "dp1"},
        {"bytes": 299},
        {"unit_bytes": 65},
    ],
    ids=str,
)
def test_a_record_of_something_else_is_not_believed(shelf: Shelf, other: dict[str, Any]) -> None:
    shelf.note.write_bytes(encode_digested(to_plain(replace(shelf.record, **other))))
    with pytest.raises(DamagedSnapshot, match="what was asked for"):
        shelf.read()


@pytest.mark.parametrize("change", [{"digests": [1]}, {"kind": "parity"}, {"unit_bytes": 0}, {"bytes": -1}], ids=str)
def test_a_record_that_makes_no_sense_is_refused(shelf: Shelf, change: dict[str, Any]) -> None:
    shelf.note.write_bytes(encode_digested({**to_plain(shelf.record), **change}))
    with pytest.raises(DamagedSnapshot, match="record"):
        shelf.read()


# ---------------------------------------------------------------------- what makes up a snapshot


def manifest_of(layout: Layout) -> PersistManifest:
    return PersistManifest(SnapshotId(layout.epoch, 7), layout)


def files_of(whole: PersistManifest) -> dict[str, int]:
    """The names and lengths of a snapshot's files."""
    names = {manifest.shard_name(coord): whole.layout.shard_bytes(coord) for coord in whole.layout.coords}
    return names | {record_name(name): 100 for name in names}


@given(layouts())
def test_a_manifest_is_read_back(layout: Layout) -> None:
    whole = manifest_of(layout)
    assert read_manifest(encode_digested(whole.to_json())) == whole


@given(spoilt(layouts().map(lambda layout: manifest_of(layout).to_json())))
def test_a_spoilt_manifest_is_refused_or_says_the_same(data: Any) -> None:
    try:
        found = read_manifest(encode_digested(data))
    except DamagedSnapshot:
        return
    assert found.snapshot.epoch == found.layout.epoch


@pytest.mark.parametrize("version", [1, 3, None, "2"])
def test_files_of_another_format_are_named_as_such(version: object) -> None:
    with pytest.raises(DamagedSnapshot, match=r"of format .* reads format 2 only: use the version that wrote it"):
        read_manifest(encode_digested({"format": version, "snapshot": [1, 2], "layout": {}}))


@given(layouts(), st.data())
def test_a_snapshot_waits_for_every_node_that_has_shards(layout: Layout, data: st.DataObject) -> None:
    whole = manifest_of(layout)
    names = [manifest.node_name(i) for i, node in enumerate(layout.nodes) if node.shards]
    parts = [NodePart.of(whole.snapshot, layout, i) for i, node in enumerate(layout.nodes) if node.shards]
    assert [manifest.read(NodePart, encode_digested(to_plain(part)), "a part") for part in parts] == parts
    assert {part.writers for part in parts} == {len(names)}
    assert manifest.missing_nodes(layout, names) == []
    gone = data.draw(st.sampled_from(names))
    assert len(manifest.missing_nodes(layout, set(names) - {gone})) == 1


@given(layouts())
def test_a_snapshot_is_whole_only_with_every_shard_in_its_length(layout: Layout) -> None:
    whole = manifest_of(layout)
    files = files_of(whole)
    assert whole.missing({**files, "something else": 1}) == []
    first = next(iter(files))
    assert whole.missing({**files, first: files[first] - 1}) == [
        f"{first} has {files[first] - 1} bytes, not {files[first]}"
    ]
    for gone in files:
        assert whole.missing({name: length for name, length in files.items() if name != gone}) == [
            f"{gone} is not there"
        ]


@given(snapshots)
def test_a_directory_names_its_snapshot(snapshot: SnapshotId) -> None:
    assert manifest.snapshot_of(manifest.directory(snapshot)) == snapshot


@pytest.mark.parametrize("name", ["", "e1-s2", "e000001-s000000000002x", "lost+found", "e-1-s2"])
def test_other_directories_are_nobodys(name: str) -> None:
    assert manifest.snapshot_of(name) is None


@given(st.sets(snapshots, max_size=6), st.sets(snapshots, max_size=6), st.integers(1, 4))
def test_the_newest_whole_one_always_stays_and_so_does_what_is_being_written(
    complete: set[SnapshotId], incomplete: set[SnapshotId], keep: int
) -> None:
    incomplete -= complete
    gone = manifest.expendable(complete, incomplete, keep)
    assert complete - set(gone) == set(sorted(complete, reverse=True)[:keep])
    assert incomplete - set(gone) == incomplete & {max(complete | incomplete, default=None)}


# ---------------------------------------------------------------------- settings


def persisting(url: str, **more: str) -> tuple[str, float, int, float]:
    """Where, how often, how many and how fast snapshots are persisted with these settings."""
    said = {"HOLDFAST_PERSIST": url} | {f"HOLDFAST_PERSIST_{name.upper()}": text for name, text in more.items()}
    return PERSIST.value(said), PERSIST_EVERY.value(said), PERSIST_KEEP.value(said), PERSIST_BANDWIDTH.value(said)


def test_the_tier_is_off_unless_a_place_is_named() -> None:
    assert not persisting("")[0]
    assert persisting("/x", every="90s", keep="3", bandwidth="1MB/s") == ("/x", 90.0, 3, 1e6)
    assert persisting("s3://b", every="2h", keep="1") == ("s3://b", 7200.0, 1, 0.0)


@pytest.mark.parametrize(("every", "keep"), [("often", "2"), ("0", "2"), ("5min", "0"), ("5min", "two")])
def test_a_tier_that_makes_no_sense_is_refused(every: str, keep: str) -> None:
    with pytest.raises(ConfigError):
        persisting("/x", every=every, keep=keep)
