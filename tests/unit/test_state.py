"""The record of a rank's plain values, where its tensors are in a slot, and whether a slot fits a job."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from holdfast.smp_daemon.shared.errors import ProtocolError, StateMismatch
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.slotfile import Leaf, SlotFormat, read_record
from holdfast.snapshot.copy.engines import CpuEngine, SlotTensor
from holdfast.snapshot.copy.tensors import leaf_of
from holdfast.snapshot.state.adapter import Adapter
from holdfast.snapshot.state.live import At, Change, Container, LiveTensor, Look, Tree, Updated
from holdfast.snapshot.state.manifest import Manifest
from holdfast.snapshot.state.record import (
    BEGAN,
    EARLY,
    LATE,
    LOOP,
    RECORD_PAGE_BYTES,
    Placed,
    Values,
    capture_tree,
    check_leaves,
    decode_values,
    encode_record,
    parse_record,
    place,
    place_tensors,
    plan_format,
)
from holdfast.snapshot.state.replicas import ALONE, Sharing
from holdfast.snapshot.state.steppers import Steppers
from holdfast.snapshot.state.tracked import Tracked

SNAPSHOT = SnapshotId(2, 17)
NOTHING = Values({}, {})
NOTHING_FIXED = '{"state":{},"shared":{},"strides":{},"blocks":{}}'


@dataclass
class Toy(Adapter):
    """An adapter whose state the test sets. Replacing an item of `live` is noticed."""

    live: list[LiveTensor] = field(default_factory=list)
    early_tree: Tree = field(default_factory=dict)
    late_tree: Tree = field(default_factory=dict)
    fixed_tree: Tree = field(default_factory=dict)
    problem: StateMismatch | None = None
    rebuilds: list[Callable[[At], object]] = field(default_factory=list)

    def coordinate(self) -> str:
        return "dp0"

    def rebuild(self, at: At) -> None:
        for each in self.rebuilds:
            each(at)

    def replica_set(self) -> str:
        return "dp0"

    def track(self, piece: Tracked) -> None:
        raise AssertionError("nothing is tracked here")

    def modules(self) -> Sequence[torch.nn.Module]:
        return []

    def optimizers(self) -> Sequence[Any]:
        return []

    def scalers(self) -> Sequence[Any]:
        return []

    def tensors(self) -> Iterator[LiveTensor]:
        yield from self.live

    def updated(self) -> dict[str, Updated]:
        return {}

    def watched(self) -> Iterator[Container]:
        yield self.live

    def look(self) -> Look:
        return Look(self.fixed_tree, lambda: self.late_tree)

    def early(self) -> Tree:
        return self.early_tree

    def named(self) -> Sequence[Any]:
        return ()

    def generators(self) -> dict[str, Any]:
        return {}

    def watch(self) -> None:
        pass

    def verify(self) -> None:
        if self.problem is not None:
            raise self.problem

    def withdraw(self) -> None:
        """Nothing was created, so there is nothing to undo."""

    def materialise(self, leaves: Mapping[str, Leaf]) -> None:
        pass

    def check(self, early: Tree, late: Tree, fixed: Tree) -> None:
        pass

    def load(self, early: Tree, late: Tree, fixed: Tree) -> None:
        pass

    def extras(self) -> Collection[str]:
        return ()

    def steppers(self) -> Steppers:
        return Steppers((), (), ())

    def rewinding(self, early: Tree) -> Callable[[], None]:
        return lambda: None


def no_tensor(name: str) -> torch.Tensor:
    raise KeyError(name)


def toy() -> Toy:
    return Toy(
        [
            LiveTensor("model.weight", torch.arange(6.0).view(2, 3), Change.STEP),
            LiveTensor("model.mean", torch.ones(3), Change.ANY),
            LiveTensor("model.base", torch.full((2,), 4.0), Change.STEP),
        ],
        {"rng": torch.tensor([1, 2, 3], dtype=torch.uint8), "seen": 5},
        {"lr": 0.1, "warm": torch.tensor(2.0)},
        {"order": ["b", "a"]},
    )


LOOP_HERE = {"iteration": 7}
BEGAN_SO = {"read": {"rng torch": "5e"}, "rng": None}


def captured(adapter: Toy, found: Manifest | Look) -> tuple[Values, Values]:
    early, late = adapter.early() | {LOOP: LOOP_HERE}, found.late() | {BEGAN: BEGAN_SO}
    return capture_tree(early, EARLY), capture_tree(late, LATE)


def test_early_and_late_values_are_copied_when_they_are_captured() -> None:
    adapter = toy()
    early, late = captured(adapter, adapter.look())
    adapter.early_tree["rng"].fill_(9)
    adapter.early_tree["seen"] = 9
    adapter.late_tree["warm"].fill_(9)
    assert early.tensors["early.rng"].tolist() == [1, 2, 3]
    assert early.encoded == {"rng": {"$": "tensor", "name": "early.rng"}, "seen": 5, "loop": LOOP_HERE}
    assert late.tensors["late.warm"].item() == 2.0
    assert late.encoded == {"lr": 0.1, "warm": {"$": "tensor", "name": "late.warm"}, "began": BEGAN_SO}


def test_copies_carry_no_gradient() -> None:
    adapter = Toy(early_tree={"mean": torch.ones(3, requires_grad=True)})
    assert not capture_tree(adapter.early(), EARLY).tensors["early.mean"].requires_grad


def placed_toy(adapter: Toy, restless: Collection[str] = ()) -> Placed:
    manifest = Manifest(adapter)
    return place(manifest, plan_format("run", "dp0", manifest.leaves, 10), restless)


def named(pieces: Sequence[SlotTensor]) -> list[str]:
    return [piece.name for piece in pieces]


def test_what_was_seen_to_change_is_copied_at_once_whatever_its_class() -> None:
    placed = placed_toy(toy(), restless={"model.weight", "no longer there"})
    assert (named(placed.moving), named(placed.at_once)) == (["model.base"], ["model.weight", "model.mean"])
    assert placed.moving_bytes == 8
    assert placed.subjects.pieces == placed.moving


def whole_slot(
    adapter: Toy, snapshot: SnapshotId = SNAPSHOT, sharing: Sharing = ALONE
) -> tuple[SlotFormat, memoryview]:
    """A slot as the copy thread writes it, without its stamp."""
    manifest = Manifest(adapter, sharing)
    early, late = captured(adapter, manifest)
    record = encode_record(snapshot, adapter.coordinate(), early, late, manifest.fixed)
    form = plan_format("run", adapter.coordinate(), [*manifest.leaves, *early.leaves, *late.leaves], len(record))
    slot = memoryview(bytearray(form.total_bytes))
    live = {item.name: item.tensor for item in manifest.items}
    pieces = place_tensors(form, {**live, **early.tensors, **late.tensors}.items())
    CpuEngine().copy(pieces, slot, lambda count: True)
    write_record(form, slot, record)
    return form, slot


def write_record(form: SlotFormat, slot: memoryview, record: bytes) -> None:
    offset, capacity = form.record
    slot[offset : offset + capacity] = record.ljust(capacity)


def test_a_value_whose_tensor_is_not_in_the_slot_is_refused() -> None:
    form, slot = whole_slot(toy())
    with pytest.raises(ProtocolError, match="malformed 'tensor'"):
        decode_values(parse_record(read_record(slot, form), SNAPSHOT), no_tensor)


@pytest.mark.parametrize("other", [SnapshotId(2, 18), SnapshotId(1, 17)])
def test_a_record_of_another_snapshot_is_refused(other: SnapshotId) -> None:
    form, slot = whole_slot(toy())
    with pytest.raises(ProtocolError, match="step 17"):
        parse_record(read_record(slot, form), other)


@pytest.mark.parametrize(
    "record",
    [b"", b"{", b"\xff", b"[]", b"5", b"null", b"{}", b'{"epoch":2}', b'{"step":17}', b"[" * 4000],
)
def test_a_malformed_record_is_refused(record: bytes) -> None:
    form, slot = whole_slot(toy())
    write_record(form, slot, record)
    with pytest.raises(ProtocolError):
        parse_record(read_record(slot, form), SNAPSHOT)


def test_a_record_of_nothing_but_values_is_enough_to_decode_them() -> None:
    fixed = {"state": {"b": [2]}, "shared": {}, "strides": {}, "blocks": {}}
    record = {"early": {"a": 1}, "late": {}, "fixed": fixed}
    assert decode_values(record, no_tensor) == ({"a": 1}, {}, {"b": [2]})


@pytest.mark.parametrize(
    "fixed", [{}, None, [], {"state": {}}, {"state": {}, "shared": {}}, json.loads(NOTHING_FIXED) | {"more": 1}]
)
def test_a_record_that_does_not_say_what_is_fixed_is_refused(fixed: Any) -> None:
    with pytest.raises(ProtocolError, match="what is fixed"):
        decode_values({"early": {}, "late": {}, "fixed": fixed}, no_tensor)


@pytest.mark.parametrize("lacking", ["early", "late", "fixed"])
def test_a_record_without_its_values_is_refused(lacking: str) -> None:
    record = json.loads(encode_record(SNAPSHOT, "dp0", NOTHING, NOTHING, NOTHING_FIXED))
    del record[lacking]
    with pytest.raises(ProtocolError, match=rf"and not \['{lacking}'\]"):
        decode_values(record, no_tensor)


@pytest.mark.parametrize("length", [1, 100, RECORD_PAGE_BYTES, 10 * RECORD_PAGE_BYTES + 1])
def test_a_record_may_grow_to_twice_its_size(length: int) -> None:
    form = plan_format("run", "dp0", [], length)
    assert 2 * length <= form.record[1] <= 2 * length + 2 * RECORD_PAGE_BYTES
    assert form.record[1] % RECORD_PAGE_BYTES == 0


WEIGHT = Leaf("w", "F32", (2, 3))
BIAS = Leaf("b", "F32", (3,))


def live(**tensors: torch.Tensor) -> list[LiveTensor]:
    return [LiveTensor(name, tensor, Change.STEP) for name, tensor in tensors.items()]


def check_fit(form: SlotFormat, job: list[LiveTensor], shared: Mapping[str, Leaf]) -> None:
    check_leaves(form, {item.name: leaf_of(item.name, item.tensor) for item in job}, shared)


def test_parts_of_what_replicas_share_stand_for_the_whole() -> None:
    leaves = [Leaf("w@0:4", "F32", (4,)), BIAS, Leaf("early.rng", "U8", (3,)), Leaf("late.warm", "F32", ())]
    form = plan_format("run", "dp0", leaves, 10)
    job = live(w=torch.zeros(2, 3), b=torch.zeros(3))
    check_fit(form, job, {"w": WEIGHT, "b": BIAS})
    with pytest.raises(StateMismatch, match=r"w is None in the snapshot.*; w@0:4"):
        check_fit(form, job, {})
    with pytest.raises(StateMismatch, match=r"w is .*\(6,\).* in the snapshot, .*\(2, 3\).* in this job"):
        check_fit(form, job, {"w": Leaf("w", "F32", (6,))})


def test_what_is_missing_extra_or_changed_is_listed() -> None:
    form = plan_format("run", "dp0", [WEIGHT, BIAS, Leaf("old", "F32", ())], 10)
    job = live(w=torch.zeros(3, 2), b=torch.zeros(3, dtype=torch.float64), new=torch.zeros(()))
    with pytest.raises(StateMismatch) as raised:
        check_fit(form, job, {})
    for part in (
        "new is None in the snapshot",
        f"old is {Leaf('old', 'F32', ())} in the snapshot, None in this job",
        f"w is {WEIGHT} in the snapshot, {Leaf('w', 'F32', (3, 2))} in this job",
        f"b is {BIAS} in the snapshot, {Leaf('b', 'F64', (3,))} in this job",
    ):
        assert part in str(raised.value)
    assert "more" not in str(raised.value)


@pytest.mark.parametrize(("count", "end"), [(8, ""), (9, "; and 1 more"), (10, "; and 2 more")])
def test_a_long_list_of_problems_is_cut_and_counted(count: int, end: str) -> None:
    form = plan_format("run", "dp0", [Leaf(f"w{i}", "F32", ()) for i in range(count)], 10)
    with pytest.raises(StateMismatch, match=f"w7 is .*None in this job{end}$"):
        check_fit(form, [], {})
