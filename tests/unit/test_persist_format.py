"""The bytes of a persisted shard, the lists that make up a snapshot, and which snapshots may go: pure functions."""

from __future__ import annotations

import io
import random
import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from holdfast.smp_daemon.persist import manifest, planes, shardfile
from holdfast.smp_daemon.persist.manifest import PersistManifest
from holdfast.smp_daemon.persist.options import PersistOptions, options_of
from holdfast.smp_daemon.persist.shardfile import Encoder, Header
from holdfast.smp_daemon.shared.errors import ConfigError, DamagedSnapshot
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.plain import encode_digested
from holdfast.smp_daemon.shared.records import digest
from holdfast.smp_daemon.shared.slotfile import Leaf, plan_slot
from tests.strategies import layouts, snapshots, spoilt

RUN = "0badcafe"


def packed(content: bytes, unit_bytes: int, widths: list[int] | None = None) -> bytes:
    """The file of a persisted shard."""
    header = Header("job", RUN, 3, 14, "dp0", len(content), unit_bytes)
    encoder = Encoder(header)
    units = [content[i : i + unit_bytes] for i in range(0, len(content), unit_bytes)]
    written = [
        encoder.unit(memoryview(unit), digest(memoryview(unit)), width)
        for unit, width in zip(units, widths or [1] * len(units), strict=True)
    ]
    return encoder.begin() + b"".join(written) + encoder.end()


def unpacked(file: bytes) -> bytes:
    read = io.BytesIO(file).read
    header = shardfile.read_header(read)
    out = memoryview(bytearray(header.bytes))
    for unit in shardfile.read_units(read, header):
        start = unit.number * header.unit_bytes
        shardfile.decode_unit(unit, out[start : start + unit.length])
    return bytes(out)


@given(
    content=st.binary(min_size=1, max_size=300) | st.integers(1, 300).map(bytes),
    unit_bytes=st.integers(1, 100),
    width=st.sampled_from([1, 2, 4, 8]),
)
def test_what_was_sealed_comes_back(content: bytes, unit_bytes: int, width: int) -> None:
    units = -(-len(content) // unit_bytes)
    assert unpacked(packed(content, unit_bytes, [width] * units)) == content


@given(content=st.binary(max_size=200), width=st.sampled_from([1, 2, 3, 4, 8]))
def test_planes_are_joined_to_what_was_split(content: bytes, width: int) -> None:
    out = memoryview(bytearray(len(content)))
    planes.join(planes.split(memoryview(content), width), width, out)
    assert bytes(out) == content


def test_planes_pay_where_numbers_have_exponents() -> None:
    weights = (np.random.default_rng(1).standard_normal(1 << 16) * 0.02).astype(np.float32).tobytes()
    plain, in_planes = len(packed(weights, len(weights))), len(packed(weights, len(weights), [4]))
    assert in_planes < plain < len(weights)


def test_what_does_not_compress_is_stored_as_it_is() -> None:
    noise = random.Random(1).randbytes(1 << 12)
    assert 0 < len(packed(noise, 1 << 10)) - len(noise) < 300


def test_each_unit_is_cut_into_planes_as_wide_as_most_of_its_numbers() -> None:
    leaves = [
        Leaf("a", "F32", (1500,)),
        Leaf("b", "BF16", (4096,)),
        Leaf("c", "C128", (256,)),
        Leaf("d", "BOOL", (9000,)),
    ]
    form = plan_slot("job", "dp0", leaves, 64)
    assert planes.widths(form, 4096) == [1, 8, 4, 2, 2, 1, 1, 1]


def test_every_flipped_bit_is_noticed() -> None:
    content = np.linspace(0, 1, 40, dtype=np.float32).tobytes() + bytes(50)
    file = packed(content, 64, [4, 4, 1, 1])
    for bit in range(8 * len(file)):
        bad = bytearray(file)
        bad[bit // 8] ^= 1 << bit % 8
        try:
            assert unpacked(bytes(bad)) == content  # a flip of a bit that zstandard ignores is harmless
        except DamagedSnapshot:
            pass


def test_every_truncation_is_noticed_and_so_is_what_follows() -> None:
    file = packed(random.Random(2).randbytes(100), 32)
    for length in range(len(file)):
        with pytest.raises(DamagedSnapshot):
            unpacked(file[:length])
    with pytest.raises(DamagedSnapshot, match="follows its end"):
        unpacked(file + b"\0")


@pytest.mark.parametrize(
    ("length", "unit_bytes"), [(0, 64), (1 << 60, 64), (100, 0), (100, 1 << 40), (-1, 64)], ids=str
)
def test_a_header_that_claims_too_much_is_refused(length: int, unit_bytes: int) -> None:
    begin = Encoder(Header("job", RUN, 1, 1, "dp0", length, unit_bytes)).begin()
    with pytest.raises(DamagedSnapshot, match="its header claims"):
        shardfile.read_header(io.BytesIO(begin).read)


def test_a_length_beyond_the_limit_is_not_read() -> None:
    begin = shardfile.MAGIC + struct.pack("<I", 1 << 31)
    with pytest.raises(DamagedSnapshot, match="the limit is 4096"):
        shardfile.read_header(io.BytesIO(begin).read)


def test_a_frame_that_claims_more_than_a_unit_is_not_decompressed() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    unit = shardfile.StoredUnit(0, 64, shardfile.ZSTD, 1, 0, bomb)
    with pytest.raises(DamagedSnapshot, match="claims another length"):
        shardfile.decode_unit(unit, memoryview(bytearray(64)))


def test_a_file_with_a_unit_missing_is_not_ended() -> None:
    with pytest.raises(ValueError, match="0 units of 2"):
        Encoder(Header("job", RUN, 1, 1, "dp0", 100, 64)).end()


# ---------------------------------------------------------------------- what makes up a snapshot


def manifest_of(layout: Layout) -> PersistManifest:
    stored = {coord: 10 + i for i, coord in enumerate(layout.coords)}
    return PersistManifest(SnapshotId(layout.epoch, 7), layout, stored)


@given(layouts())
def test_a_manifest_is_read_back(layout: Layout) -> None:
    whole = manifest_of(layout)
    assert PersistManifest.from_json(manifest.read(encode_digested(whole.to_json()))) == whole


@given(spoilt(layouts().map(lambda layout: manifest_of(layout).to_json())))
def test_a_spoilt_manifest_is_refused_or_says_the_same(data: object) -> None:
    try:
        found = PersistManifest.from_json(data)
    except DamagedSnapshot:
        return
    assert found.stored.keys() == set(found.layout.coords)


def test_a_flipped_bit_in_a_manifest_is_noticed() -> None:
    sealed = bytearray(encode_digested({"snapshot": [1, 2]}))
    for bit in range(8 * len(sealed)):
        sealed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedSnapshot):
            manifest.read(bytes(sealed))
        sealed[bit // 8] ^= 1 << bit % 8


@given(layouts(), st.data())
def test_the_lists_of_all_nodes_make_the_manifest_whoever_puts_them_together(
    layout: Layout, data: st.DataObject
) -> None:
    whole = manifest_of(layout)
    lists = [
        manifest.node_list(whole.snapshot, {shard.coord: whole.stored[shard.coord] for shard in node.shards}, layout)
        for node in layout.nodes
    ]
    names = [manifest.node_name(i) for i, node in enumerate(layout.nodes) if node.shards]
    assert manifest.combine(whole.snapshot, layout, data.draw(st.permutations(lists))) == whole
    assert manifest.missing_nodes(layout, names) == []
    gone = data.draw(st.sampled_from(names))
    assert len(manifest.missing_nodes(layout, set(names) - {gone})) == 1
    left = [each for i, each in enumerate(lists) if manifest.node_name(i) != gone]
    with pytest.raises(DamagedSnapshot):
        manifest.combine(whole.snapshot, layout, left)


@given(layouts())
def test_a_snapshot_is_whole_only_with_every_shard_in_its_length(layout: Layout) -> None:
    whole = manifest_of(layout)
    files = {manifest.shard_name(coord): length for coord, length in whole.stored.items()}
    assert whole.missing({**files, "something else": 1}) == []
    first = next(iter(files))
    assert whole.missing({**files, first: files[first] - 1}) == [
        f"{first} has {files[first] - 1} bytes, not {files[first]}"
    ]
    del files[first]
    assert whole.missing(files) == [f"{first} is not there"]


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


def persisting(url: str, **more: str) -> PersistOptions | None:
    variables = {f"HOLDFAST_PERSIST_{name.upper()}": text for name, text in more.items()}
    return options_of({"HOLDFAST_PERSIST": url, **variables})


def test_the_tier_is_off_unless_a_place_is_named() -> None:
    assert persisting("") is None
    assert persisting("/x", every="90s", keep="3", bandwidth="1MB/s") == PersistOptions("/x", 90.0, 3, 1e6)
    assert persisting("s3://b", every="2h", keep="1") == PersistOptions("s3://b", 7200.0, 1)


@pytest.mark.parametrize(("every", "keep"), [("often", "2"), ("0", "2"), ("5min", "0"), ("5min", "two")])
def test_a_tier_that_makes_no_sense_is_refused(every: str, keep: str) -> None:
    with pytest.raises(ConfigError):
        persisting("/x", every=every, keep=keep)
