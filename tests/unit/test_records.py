"""Commit records: their way through JSON and through files, and digests."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from holdfast.smp_daemon.shared import records
from holdfast.smp_daemon.shared.errors import ProtocolError
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.plain import from_plain, to_plain
from holdfast.smp_daemon.shared.records import (
    ParityRecord,
    ShardRecord,
    digest,
    digest_units,
    read_json,
    write_json,
)
from tests.strategies import parity_records, shard_records


@pytest.mark.parametrize("unit_bytes", [0, -1, float("inf")])
@given(shard=shard_records, parity=parity_records)
def test_a_unit_that_cuts_nothing_is_refused(shard: ShardRecord, parity: ParityRecord, unit_bytes: float) -> None:
    with pytest.raises(ProtocolError):
        from_plain(ShardRecord, {**to_plain(shard), "unit_bytes": unit_bytes})
    with pytest.raises(ProtocolError):
        from_plain(ParityRecord, {**to_plain(parity), "unit_bytes": unit_bytes})


@given(shard_records)
def test_the_units_of_a_shard_are_next_to_each_other_and_the_last_may_be_short(record: ShardRecord) -> None:
    count = min(5, -(-record.bytes // record.unit_bytes))
    units = [record.unit(index) for index in range(count)]
    assert [offset for offset, _ in units] == [index * record.unit_bytes for index in range(count)]
    assert all(0 < length <= record.unit_bytes for _, length in units)
    last = -(-record.bytes // record.unit_bytes) - 1
    if last >= 0:
        assert sum(record.unit(last)) == record.bytes


@given(parity_records)
def test_the_units_of_a_parity_each_have_a_place_of_a_whole_unit_and_a_length_of_their_own(
    record: ParityRecord,
) -> None:
    expected = [(index * record.unit_bytes, length) for index, length in enumerate(record.lengths)]
    assert [record.unit(index) for index in range(len(record.lengths))] == expected


PARITY = ParityRecord(SnapshotId(1, 2), "0123456789abcdef", 1, 8, (8, 5), (11, 12), ({0: 1, 2: 2}, {2: 3}))


@pytest.mark.parametrize("key", ["lengths", "digests", "sources"])
def test_a_parity_record_of_more_units_than_it_describes_is_refused(key: str) -> None:
    data = to_plain(PARITY)
    assert from_plain(ParityRecord, data) == PARITY
    for units in (data[key][:1], [*data[key], data[key][0]]):
        with pytest.raises(ProtocolError, match="the same units"):
            from_plain(ParityRecord, {**data, key: units})


@pytest.mark.parametrize("length", [-1, 9, 1 << 40])
def test_a_parity_unit_that_leaves_its_place_is_refused(length: int) -> None:
    with pytest.raises(ProtocolError, match=r"longer than|>= 0"):
        from_plain(ParityRecord, {**to_plain(PARITY), "lengths": [8, length]})


@given(st.binary(max_size=50), st.integers(1, 60))
def test_every_unit_has_its_digest_and_the_last_may_be_short(data: bytes, unit_bytes: int) -> None:
    expected: list[int] = []
    while data[len(expected) * unit_bytes :]:
        unit = data[len(expected) * unit_bytes :][:unit_bytes]
        expected.append(xxhash.xxh3_64_intdigest(unit))
    assert list(digest_units(memoryview(data), unit_bytes)) == expected


def test_every_flipped_bit_changes_the_digest() -> None:
    data = bytes(range(64))
    flipped = [bytes(b ^ (1 << bit) * (i == at) for i, b in enumerate(data)) for at in range(64) for bit in range(8)]
    assert len({digest(memoryview(one)) for one in [data, *flipped]}) == 1 + len(flipped)


def test_a_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_json(path, {"old": [1]})
    with path.open() as reader:
        write_json(path, {"new": [2, 3]})
        assert json.loads(reader.read())["old"] == [1], "a JSON object for any reader"
    assert read_json(path) == {"new": [2, 3]}
    assert list(tmp_path.iterdir()) == [path]


def test_a_crash_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_json(path, {"old": 1})
    with pytest.raises(TypeError):
        write_json(path, {"new": object()})
    assert read_json(path) == {"old": 1}


def test_a_file_that_is_not_there_is_none(tmp_path: Path) -> None:
    assert read_json(tmp_path / "nothing") is None


@pytest.mark.parametrize("content", [b"", b"{", b"{'a': 1}", b"\xff\xfe\x00", b"[" * 100_000, b"9" * 5000 + b"]"])
def test_a_file_that_is_not_json_or_has_no_digest_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    for written in (content, content + b"\n", content + b"\n" + xxhash.xxh3_128_hexdigest(content).encode() + b"\n"):
        path.write_bytes(written)
        with pytest.raises(ProtocolError, match=re.escape(str(path))):
            read_json(path)


def test_a_file_beyond_the_limit_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / "fits", {"n": 1234567890})
    write_json(tmp_path / "large", {"n": 12345678901})
    most = (tmp_path / "fits").stat().st_size
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", most)
    assert read_json(tmp_path / "fits") == {"n": 1234567890}
    with pytest.raises(ProtocolError, match=f"larger than {most} bytes"):
        read_json(tmp_path / "large")
