"""The slot file: plain safetensors opens it, and no damaged file is taken for a slot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from holdfast.smp_daemon.shared import slotfile
from holdfast.smp_daemon.shared.errors import ProtocolError
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.limits import MAX_HEADER_BYTES, MAX_NAME_BYTES
from holdfast.smp_daemon.shared.slotfile import (
    DTYPE_BYTES,
    PAGE_BYTES,
    RECORD,
    STAMP_BYTES,
    Leaf,
    SlotFormat,
    plan_slot,
    read_format,
    read_stamp,
    write_stamp,
)
from holdfast.snapshot.copy.tensors import DTYPES

SNAPSHOT = SnapshotId(2, 1234)
OWN_DTYPES = {"C128", "C32"}
"""Dtypes that safetensors does not know."""
RECORD_BYTES = 64

leaf_names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
    lambda name: name not in (RECORD, "__metadata__")
)
leaves = st.lists(
    st.builds(
        Leaf, leaf_names, st.sampled_from(sorted(DTYPE_BYTES)), st.lists(st.integers(0, 4), max_size=3).map(tuple)
    ),
    max_size=8,
    unique_by=lambda leaf: leaf.name,
)
numbers = st.integers(0, 10**20 - 1)


def fill(form: SlotFormat, data: Mapping[str, bytes], snapshot: SnapshotId = SNAPSHOT) -> bytearray:
    """A slot file with the leaves in `data`, and zeros for the others."""
    slot = bytearray(form.total_bytes)
    slot[: len(form.header)] = form.header
    write_stamp(memoryview(slot), snapshot)
    offset, capacity = form.record
    slot[offset : offset + capacity] = b"{}".ljust(capacity)
    for name, content in data.items():
        start, leaf = form.offsets[name]
        assert len(content) == leaf.bytes
        slot[start : start + leaf.bytes] = content
    return slot


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())


def some_tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    bits = torch.arange(7 * 16 * dtype.itemsize, dtype=torch.int64).remainder(2 if dtype is torch.bool else 251)
    flat = bits.to(torch.uint8).view(dtype) if dtype is not torch.bool else bits.bool()
    return {"matrix": flat[:6].view(2, 3), "scalar": flat[6].reshape(()), "empty": flat[:0].view(0, 4)}


def written(path: Path, dtype: str) -> dict[str, torch.Tensor]:
    """A slot file at `path` with a matrix, a scalar and an empty tensor of `dtype`, and a leaf that misaligns them."""
    (torch_dtype,) = [t for t, name in DTYPES.items() if name == dtype]
    tensors = {**some_tensors(torch_dtype), "odd": torch.arange(3, dtype=torch.uint8)}
    form = plan_slot(
        "run", "dp0", [Leaf(name, DTYPES[t.dtype], tuple(t.shape)) for name, t in tensors.items()], RECORD_BYTES
    )
    path.write_bytes(fill(form, {name: raw(tensor) for name, tensor in tensors.items()}))
    return tensors


@pytest.mark.parametrize("dtype", sorted(set(DTYPE_BYTES) - OWN_DTYPES))
def test_torch_loads_a_slot_as_a_plain_safetensors_file(dtype: str, tmp_path: Path) -> None:
    tensors = written(tmp_path / "slot", dtype)
    loaded = safetensors.torch.load_file(tmp_path / "slot")
    assert loaded.keys() == {*tensors, RECORD}
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert raw(loaded[name]) == raw(tensor)
    assert bytes(loaded[RECORD].numpy()) == b"{}".ljust(RECORD_BYTES)


@pytest.mark.parametrize("framework", ["pt", "np"])
def test_safe_open_reads_metadata_and_single_tensors(framework: str, tmp_path: Path) -> None:
    tensors = written(tmp_path / "slot", "F32")
    with safe_open(tmp_path / "slot", framework=framework) as file:
        metadata = file.metadata()
        assert {key: metadata[key] for key in ("job", "coord", "format")} == {
            "job": "run",
            "coord": "dp0",
            "format": "holdfast-1",
        }
        assert (int(metadata["epoch"]), int(metadata["step"])) == SNAPSHOT
        assert set(file.keys()) == {*tensors, RECORD}
        assert np.array_equal(np.asarray(file.get_tensor("matrix")), tensors["matrix"].numpy())


@given(leaves, st.integers(0, 100))
def test_a_planned_header_is_read_back(leaves: list[Leaf], capacity: int) -> None:
    form = plan_slot("run", "dp0", leaves, capacity)
    read, metadata = read_format(memoryview(form.header + bytes(form.total_bytes - len(form.header))))
    assert read == form
    assert (metadata["job"], metadata["coord"]) == ("run", "dp0")
    assert form.record[1] == capacity


@given(leaves)
def test_data_starts_on_a_page_and_every_leaf_is_aligned_to_its_own_size(leaves: list[Leaf]) -> None:
    form = plan_slot("run", "dp0", leaves, RECORD_BYTES)
    assert len(form.header) % PAGE_BYTES == 0
    for offset, leaf in form.offsets.values():
        assert offset % DTYPE_BYTES[leaf.dtype] == 0


@given(leaves)
def test_leaves_follow_one_another_without_a_gap_and_the_record_is_last(leaves: list[Leaf]) -> None:
    form = plan_slot("run", "dp0", leaves, RECORD_BYTES)
    end = len(form.header)
    for offset, leaf in form.offsets.values():
        assert offset == end
        end += leaf.bytes
    assert end == form.total_bytes
    assert list(form.offsets)[-1] == RECORD
    assert form.offsets.keys() == {RECORD, *(leaf.name for leaf in leaves)}


@given(leaves, st.randoms(use_true_random=False))
def test_the_order_of_leaves_does_not_matter(leaves: list[Leaf], random: Any) -> None:
    shuffled = random.sample(leaves, len(leaves))
    assert plan_slot("run", "dp0", shuffled, 8) == plan_slot("run", "dp0", leaves, 8)


@given(st.builds(SnapshotId, numbers, numbers), st.builds(SnapshotId, numbers, numbers))
def test_a_stamp_changes_only_its_own_bytes(first: SnapshotId, second: SnapshotId) -> None:
    slot = fill(plan_slot("run", "dp0", [Leaf("w", "F32", (3,))], RECORD_BYTES), {"w": b"x" * 12}, first)
    before = bytes(slot)
    assert read_stamp(memoryview(slot)) == first
    write_stamp(memoryview(slot), second)
    assert read_stamp(memoryview(slot)) == second
    assert slot[:8] == before[:8]
    assert slot[8 + STAMP_BYTES :] == before[8 + STAMP_BYTES :]
    assert (slot == before) == (first == second)
    assert read_format(memoryview(slot))[0].offsets == read_format(memoryview(before))[0].offsets


SMALL = fill(plan_slot("run", "dp0", [Leaf("w", "F32", (2, 3)), Leaf("b", "BF16", ())], RECORD_BYTES), {})
LENGTH = PAGE_BYTES - 8


def test_every_truncation_is_refused() -> None:
    for length in range(len(SMALL)):
        with pytest.raises(ProtocolError):
            read_format(memoryview(SMALL)[:length])
    for length in range(8 + STAMP_BYTES):
        with pytest.raises(ProtocolError, match="no stamp"):
            read_stamp(memoryview(SMALL)[:length])
    with pytest.raises(ProtocolError):
        read_format(memoryview(SMALL + b"\0"))


def test_a_flipped_bit_in_the_header_is_refused_or_moves_nothing() -> None:
    """A header has no digest of its own: a flip may rename a leaf or change a number, but no byte moves."""
    untouched = places(SMALL)
    refused = 0
    for at in range(PAGE_BYTES):
        for bit in range(8):
            slot = bytearray(SMALL)
            slot[at] ^= 1 << bit
            try:
                assert places(slot) == untouched
            except ProtocolError:
                refused += 1
    assert refused > 0.9 * 8 * PAGE_BYTES


def places(slot: bytearray) -> list[tuple[int, int]]:
    form, _ = read_format(memoryview(slot))
    return [(offset, leaf.bytes) for offset, leaf in form.offsets.values()]


def test_a_flipped_bit_in_the_stamp_is_refused_or_gives_another_number() -> None:
    for at in range(8, 8 + STAMP_BYTES):
        for bit in range(8):
            slot = bytearray(SMALL)
            slot[at] ^= 1 << bit
            leading_zero = (SMALL[at], slot[at]) == (ord(" "), ord("0"))
            try:
                assert read_stamp(memoryview(slot)) != SNAPSHOT or leading_zero
            except ProtocolError:
                pass


@pytest.mark.parametrize("length", [0, 1, LENGTH - 1, LENGTH + 1, len(SMALL), MAX_HEADER_BYTES + 1, 2**64 - 1])
def test_a_wrong_header_length_is_refused(length: int) -> None:
    with pytest.raises(ProtocolError):
        read_format(memoryview(length.to_bytes(8, "little") + SMALL[8:]))


def test_a_header_beyond_the_limit_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slotfile, "MAX_HEADER_BYTES", LENGTH - 1)
    with pytest.raises(ProtocolError, match=f"the limit is {LENGTH - 1}"):
        read_format(memoryview(SMALL))
    with pytest.raises(ProtocolError, match=f"{LENGTH} bytes; .*{LENGTH - 1}"):
        plan_slot("run", "dp0", [], 0)
    monkeypatch.setattr(slotfile, "MAX_HEADER_BYTES", LENGTH)
    assert len(read_format(memoryview(SMALL))[0].header) == len(plan_slot("run", "dp0", [], 0).header) == 8 + LENGTH


def slot_of(entries: Any, data_bytes: int) -> memoryview:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return memoryview(len(text).to_bytes(8, "little") + text + bytes(data_bytes))


def entry(dtype: Any, shape: Any, start: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def entries(**changes: Any) -> dict[str, Any]:
    """A good header over 12 bytes of data, with some entries changed, or removed if None."""
    good = {"__metadata__": {}, "w": entry("F32", [2], 0, 8), RECORD: entry("U8", [4], 8, 12)}
    return {key: value for key, value in {**good, **changes}.items() if value is not None}


def test_the_header_that_the_next_tests_change_is_good() -> None:
    form, metadata = read_format(slot_of(entries(), 12))
    assert metadata == {}
    assert [leaf.bytes for _, leaf in form.offsets.values()] == [8, 4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w": entry("F32", [2], 0, 9)}, "is at"),
        ({"w": entry("F32", [2], 4, 12)}, "is at"),
        ({"w": entry("F32", [3], 0, 12)}, "is at"),
        ({"w": entry("F32", [1], 0, 4)}, "is at"),
        ({"w": entry("F32", [2], 8, 0)}, "is at"),
        ({"w": None}, "is at"),
        ({"x": entry("U8", [4], 8, 12)}, "is at"),
        ({RECORD: entry("U8", [3], 8, 11)}, "its header describes"),
        ({RECORD: None, "w": entry("F32", [3], 0, 12)}, "no leaf 'holdfast.record'"),
        ({"w": entry("F31", [2], 0, 8)}, "unknown dtype"),
        ({"w": entry(["F32"], [2], 0, 8)}, "unknown dtype"),
        ({"w": entry({"F32": 1}, [2], 0, 8)}, "unknown dtype"),
        ({"w": entry(None, [2], 0, 8)}, "unknown dtype"),
        ({"w": entry("F32", [-2], 0, -8)}, "has shape"),
        ({"w": entry("F32", [-2, -1], 0, 8)}, "has shape"),
        ({"w": entry("F32", [2.0], 0, 8)}, "has shape"),
        ({"w": entry("F32", [2, True], 0, 8)}, "has shape"),
        ({"w": entry("F32", ["2"], 0, 8)}, "has shape"),
        ({"w": entry("F32", 2, 0, 8)}, "damaged"),
        ({"w": entry("F32", [2], "0", 8)}, "damaged"),
        ({"w": {"dtype": "F32", "shape": [2]}}, "damaged"),
        ({"w": {**entry("F32", [2], 0, 8), "data_offsets": [0, 8, 9]}}, "is at"),
        ({"w": 5}, "damaged"),
        ({"__metadata__": None}, "damaged"),
        ({"__metadata__": [1]}, "damaged"),
        ({"": entry("F32", [0], 0, 0)}, "name a leaf"),
        ({"x" * (MAX_NAME_BYTES + 1): entry("F32", [0], 0, 0)}, "name a leaf"),
        ({"\ud800": entry("F32", [0], 0, 0)}, "name a leaf"),
    ],
)
def test_a_header_that_does_not_describe_the_data_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        read_format(slot_of(entries(**changes), 12))


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"5", b'"text"', b"null", b"{", b"{]", b"\xff{}", b'{"a":' * 100_000, b"[" * 100_000, b"9" * 5000],
)
def test_a_header_that_is_no_json_object_is_refused(text: bytes) -> None:
    with pytest.raises(ProtocolError, match="damaged"):
        read_format(slot_of(text, 12))


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        *((Leaf(name, "F32", (1,)), "name a leaf") for name in ("", "__metadata__", "\ud800")),
        *((Leaf(letter * (MAX_NAME_BYTES // 2 + 1), "F32", (1,)), "name a leaf") for letter in ("xy", "é")),
        *((Leaf(name, "I64", (2,)), "two leaves") for name in ("first", RECORD)),
        *((Leaf("w", dtype, (1,)), "unknown dtype") for dtype in ("F33", "")),
        (Leaf("w", "F32", (-1,)), "has shape"),
    ],
)
def test_a_leaf_that_no_file_can_hold_is_refused(leaf: Leaf, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        plan_slot("run", "dp0", [Leaf("first", "F32", (1,)), leaf], RECORD_BYTES)


def test_the_longest_name_is_allowed() -> None:
    assert "x" * MAX_NAME_BYTES in plan_slot("run", "dp0", [Leaf("x" * MAX_NAME_BYTES, "F32", (1,))], 8).offsets


def test_too_many_leaves_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slotfile, "MAX_LEAVES", 3)
    some = [Leaf(f"w{i}", "F32", (1,)) for i in range(3)]
    assert len(plan_slot("run", "dp0", some[:2], 8).offsets) == 3
    with pytest.raises(ProtocolError, match=r"4 leaves .*limit is 3"):
        plan_slot("run", "dp0", some, 8)
