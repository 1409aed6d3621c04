"""A rank's state at one moment, and whether a slot fits it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from smp_daemon.errors import ConfigError, ProtocolError, StateMismatch
from smp_daemon.layout import SnapshotId
from smp_daemon.slotfile import RECORD, Leaf, SlotFormat
from snapshot.adapter import LiveTensor, Tree
from snapshot.state import (
    RECORD_PAGE_BYTES,
    Capture,
    capture_early,
    capture_late,
    check_fit,
    decode_record,
    decode_values,
    encode_record,
    fits,
    plan_format,
)
from snapshot.tensors import copy_out, read_leaf

SNAPSHOT = SnapshotId(2, 17)


@dataclass
class Toy:
    """An adapter whose state is what a test puts into it."""

    live: list[LiveTensor] = field(default_factory=list)
    early_tree: Tree = field(default_factory=dict)
    late_tree: Tree = field(default_factory=dict)

    def coordinate(self) -> str:
        return "dp0"

    def modules(self) -> Sequence[torch.nn.Module]:
        return []

    def optimizer(self) -> Any:
        return None

    def tensors(self) -> Iterator[LiveTensor]:
        yield from self.live

    def early(self) -> Tree:
        return self.early_tree

    def late(self) -> Tree:
        return self.late_tree

    def verify(self) -> None:
        pass

    def materialise(self, leaves: Mapping[str, Leaf]) -> None:
        pass

    def check(self, early: Tree, late: Tree) -> None:
        pass

    def load(self, early: Tree, late: Tree) -> None:
        pass


def no_tensor(name: str) -> torch.Tensor:
    raise KeyError(name)


def toy() -> Toy:
    return Toy(
        [
            LiveTensor("model.weight", torch.arange(6.0).view(2, 3), stable=True),
            LiveTensor("model.mean", torch.ones(3), stable=False),
        ],
        {"rng": torch.tensor([1, 2, 3], dtype=torch.uint8), "seen": 5},
        {"lr": 0.1, "warm": torch.tensor(2.0)},
    )


def shapes(capture: Capture) -> dict[str, tuple[int, ...]]:
    return {leaf.name: leaf.shape for leaf in capture.leaves({})}


def test_a_capture_keeps_stable_tensors_by_reference_and_copies_the_rest() -> None:
    adapter = toy()
    capture = capture_early(adapter)
    assert [item.name for item in capture.stable] == ["model.weight"]
    assert capture.stable[0].tensor is adapter.live[0].tensor
    assert capture.early.keys() == {"model.mean", "early.rng"}
    assert capture.values == {"rng": {"$": "tensor", "name": "early.rng"}, "seen": 5}


def test_what_changes_after_the_capture_does_not_change_the_copies() -> None:
    adapter = toy()
    capture = capture_early(adapter)
    adapter.live[1].tensor.fill_(9)
    adapter.early_tree["rng"].fill_(9)
    adapter.early_tree["seen"] = 9
    assert torch.equal(capture.early["model.mean"], torch.ones(3))
    assert capture.early["early.rng"].tolist() == [1, 2, 3]
    assert capture.values["seen"] == 5


def test_copies_carry_no_gradient() -> None:
    adapter = Toy([LiveTensor("mean", torch.ones(3, requires_grad=True), stable=False)])
    assert not capture_early(adapter).early["mean"].requires_grad


def test_late_tensors_are_copied_too() -> None:
    adapter = toy()
    tensors, values = capture_late(adapter)
    adapter.late_tree["warm"].fill_(9)
    assert tensors["late.warm"].item() == 2.0
    assert values == {"lr": 0.1, "warm": {"$": "tensor", "name": "late.warm"}}


def test_the_leaves_of_a_snapshot_are_all_its_tensors() -> None:
    adapter = toy()
    late, _ = capture_late(adapter)
    assert set(capture_early(adapter).leaves(late)) == {
        Leaf("model.weight", "F32", (2, 3)),
        Leaf("model.mean", "F32", (3,)),
        Leaf("early.rng", "U8", (3,)),
        Leaf("late.warm", "F32", ()),
    }


def test_an_unstable_tensor_and_an_early_one_of_the_same_name_are_both_kept() -> None:
    adapter = Toy([LiveTensor("early.x", torch.zeros(2), stable=False)], {"x": torch.ones(3)})
    assert sorted(shapes(capture_early(adapter)).values()) == [(2,), (3,)]


def test_a_live_tensor_that_cannot_be_captured_is_named() -> None:
    adapter = Toy([LiveTensor("model.weight", torch.zeros(2, device="meta"), stable=True)])
    with pytest.raises(ConfigError, match=r"model\.weight lives on meta"):
        capture_early(adapter).leaves({})


def whole_slot(adapter: Toy, snapshot: SnapshotId = SNAPSHOT) -> tuple[SlotFormat, memoryview]:
    """A slot as the copy thread writes it, less its stamp."""
    capture = capture_early(adapter)
    late, values = capture_late(adapter)
    record = encode_record(snapshot, "dp0", capture.values, values)
    form = plan_format("run", "dp0", capture.leaves(late), len(record))
    slot = memoryview(bytearray(form.total_bytes))
    live = {item.name: item.tensor for item in capture.stable}
    for name, tensor in {**live, **capture.early, **late}.items():
        copy_out(tensor, slot, form.offsets[name][0])
    write_record(form, slot, record)
    return form, slot


def write_record(form: SlotFormat, slot: memoryview, record: bytes) -> None:
    offset, capacity = form.record
    slot[offset : offset + capacity] = record.ljust(capacity)


def test_early_and_late_values_come_back_from_a_slot() -> None:
    form, slot = whole_slot(toy())
    record = decode_record(slot, form, SNAPSHOT)
    assert record["coord"] == "dp0"
    early, late = decode_values(record, lambda name: read_leaf(slot, *form.offsets[name]))
    assert (early["seen"], early["rng"].tolist()) == (5, [1, 2, 3])
    assert (late["lr"], late["warm"].item()) == (0.1, 2.0)


def test_a_value_whose_tensor_is_not_in_the_slot_is_refused() -> None:
    form, slot = whole_slot(toy())
    with pytest.raises(ProtocolError, match="malformed 'tensor'"):
        decode_values(decode_record(slot, form, SNAPSHOT), no_tensor)


@pytest.mark.parametrize("other", [SnapshotId(2, 18), SnapshotId(1, 17)])
def test_a_record_of_another_snapshot_is_refused(other: SnapshotId) -> None:
    form, slot = whole_slot(toy())
    with pytest.raises(ProtocolError, match="the record is of step 17"):
        decode_record(slot, form, other)


@pytest.mark.parametrize(
    "record",
    [b"", b"{", b"\xff", b"[]", b"5", b"null", b"{}", b'{"epoch":2}', b'{"step":17}', b"[" * 4000],
)
def test_a_malformed_record_is_refused(record: bytes) -> None:
    form, slot = whole_slot(toy())
    write_record(form, slot, record)
    with pytest.raises(ProtocolError):
        decode_record(slot, form, SNAPSHOT)


def test_a_record_of_nothing_but_values_is_enough_to_decode_them() -> None:
    assert decode_values({"early": {"a": 1}, "late": {}}, no_tensor) == ({"a": 1}, {})


@pytest.mark.parametrize("lacking", ["early", "late"])
def test_a_record_without_its_values_is_refused(lacking: str) -> None:
    record = json.loads(encode_record(SNAPSHOT, "dp0", {}, {}))
    del record[lacking]
    with pytest.raises(ProtocolError, match="not both 'early' and 'late'"):
        decode_values(record, no_tensor)


@pytest.mark.parametrize("length", [1, 100, RECORD_PAGE_BYTES, 10 * RECORD_PAGE_BYTES + 1])
def test_a_record_may_grow_to_twice_its_size(length: int) -> None:
    form = plan_format("run", "dp0", [], length)
    assert fits(form, [], length)
    assert fits(form, [], 2 * length)
    assert fits(form, [], form.record[1])
    assert not fits(form, [], form.record[1] + 1)
    assert form.record[1] <= 2 * length + 2 * RECORD_PAGE_BYTES
    assert form.record[1] % RECORD_PAGE_BYTES == 0


WEIGHT = Leaf("w", "F32", (2, 3))
BIAS = Leaf("b", "F32", (3,))


@pytest.mark.parametrize(
    ("leaves", "fitting"),
    [
        ([WEIGHT, BIAS], True),
        ([BIAS, WEIGHT], True),
        ([WEIGHT], False),
        ([WEIGHT, BIAS, Leaf("c", "F32", ())], False),
        ([WEIGHT, Leaf("b", "F16", (3,))], False),
        ([Leaf("w", "F32", (3, 2)), BIAS], False),
    ],
)
def test_a_slot_fits_the_leaves_that_it_was_planned_for(leaves: list[Leaf], fitting: bool) -> None:
    form = plan_format("run", "dp0", [WEIGHT, BIAS], 10)
    assert fits(form, leaves, 10) == fitting


def live(**tensors: torch.Tensor) -> list[LiveTensor]:
    return [LiveTensor(name, tensor, stable=True) for name, tensor in tensors.items()]


def test_a_slot_that_fits_the_job_passes() -> None:
    leaves = [WEIGHT, BIAS, Leaf("early.rng", "U8", (3,)), Leaf("late.warm", "F32", ())]
    form = plan_format("run", "dp0", leaves, 10)
    assert RECORD in form.offsets
    check_fit(form, live(w=torch.zeros(2, 3), b=torch.zeros(3)))


def test_what_is_missing_extra_or_changed_is_listed() -> None:
    form = plan_format("run", "dp0", [WEIGHT, BIAS, Leaf("old", "F32", ())], 10)
    job = live(w=torch.zeros(3, 2), b=torch.zeros(3, dtype=torch.float64), new=torch.zeros(()))
    with pytest.raises(StateMismatch) as raised:
        check_fit(form, job)
    for part in (
        "new is not in the snapshot",
        "old is not in this job",
        "w is F32[2, 3] in the snapshot, F32[3, 2] in this job",
        "b is F32[3] in the snapshot, F64[3] in this job",
    ):
        assert part in str(raised.value)
    assert "more" not in str(raised.value)


@pytest.mark.parametrize(("count", "end"), [(8, ""), (9, "; and 1 more"), (10, "; and 2 more")])
def test_a_long_list_of_problems_is_cut_and_counted(count: int, end: str) -> None:
    form = plan_format("run", "dp0", [Leaf(f"w{i}", "F32", ()) for i in range(count)], 10)
    with pytest.raises(StateMismatch, match=f"w7 is not in this job{end}$"):
        check_fit(form, [])
