"""What is taken when a step begins; nothing that happens afterwards may get into it."""

from __future__ import annotations

import gc
import json
import mmap
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch

from holdfast import InMemorySnapshot
from holdfast.smp_daemon.shared.client import RecoveredShard, SmpClient
from holdfast.smp_daemon.shared.errors import HoldfastError, StateMismatch
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.records import digest_units
from holdfast.smp_daemon.shared.slotfile import RECORD, read_format, read_record, read_stamp
from holdfast.smp_daemon.shared.trainer_slots import TakenSlot
from holdfast.snapshot.collective.agreement import Agreement
from holdfast.snapshot.copy.engines import CpuEngine, SlotTensor, Transfer
from holdfast.snapshot.copy.errors import GivenUp, LayoutChanged
from holdfast.snapshot.copy.pace import Pace
from holdfast.snapshot.copy.tensors import read_leaf
from holdfast.snapshot.copy.witness import StateChanged
from holdfast.snapshot.state import rng
from holdfast.snapshot.state.live import Change, LiveTensor
from holdfast.snapshot.state.manifest import Manifest
from holdfast.snapshot.state.record import decode_values, parse_record
from holdfast.snapshot.step.capture import Capture, Staging
from holdfast.snapshot.step.copier import Copier
from holdfast.snapshot.step.orders import CopyState, Due, SnapshotCopy
from tests.deadlines import DEADLINE_S
from tests.system.test_hook import train, values
from tests.unit.test_engines import Counting
from tests.unit.test_state import Toy, named, toy

SLOTS = 3
UNIT_BYTES = 4096


class Slots:
    """Stands in for an SMP; hands out its slots in turn."""

    def __init__(self) -> None:
        self.connection = 1
        self.slots: list[memoryview] = []
        self.taken = 0
        self.given: dict[SnapshotId, memoryview] = {}
        self.sealed: list[SnapshotId] = []
        self.given_back: list[TakenSlot] = []

    def reserve(self, total_bytes: int) -> None:
        self.slots = [memoryview(mmap.mmap(-1, total_bytes)) for _ in range(SLOTS)]

    def take(self, coord: str, keep: Collection[SnapshotId]) -> TakenSlot:
        self.taken += 1
        return TakenSlot(f"{coord}.{self.taken}.safetensors", self.taken, self.slots[self.taken % SLOTS])

    def seal(self, snapshot: SnapshotId, coord: str, slot: TakenSlot, *_: Any, **options: Any) -> None:
        self.given[snapshot] = slot.view
        self.sealed.append(snapshot)

    def sealed_shard(self, snapshot: SnapshotId, coord: str, slot: TakenSlot) -> RecoveredShard:
        return RecoveredShard(slot.view, "held", 0, UNIT_BYTES, digest_units(slot.view, UNIT_BYTES))

    def give_back(self, slot: TakenSlot) -> None:
        self.given_back.append(slot)


class Noting(CpuEngine):
    """Records what is copied, and whether the live state may have changed by then."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[list[int], bool]] = []
        self.job: SnapshotCopy | None = None
        self.on_mark: Callable[[], None] = lambda: None
        self.before_copy: Callable[[], object] = lambda: None
        self.after_copy: Callable[[], object] = lambda: None

    def mark(self) -> Transfer:
        self.on_mark()
        return self

    def copy(self, pieces: Sequence[SlotTensor], *rest: Any, **more: Any) -> None:
        self.before_copy()
        super().copy(pieces, *rest, **more)
        self.after_copy()
        self.notes.append(
            ([piece.offset for piece in pieces], self.job is not None and self.job.state >= CopyState.COPIED)
        )


class Rig:
    """The state of a toy, its capture, and a copy thread."""

    def __init__(self, adapter: Toy, slots: Slots | None = None) -> None:
        self.adapter = adapter
        self.engine = Noting()
        self.loop: dict[str, Any] = {}
        self.notes: dict[str, Any] | None = None
        self.capture = Capture(adapter, Agreement(), self.engine, "run", "dp0", lambda: self.loop, lambda: self.notes)
        self.slots = slots or Slots()
        client = cast(SmpClient, self.slots)
        self.copier = Copier(client, client, self.engine, Pace(), lambda: None)
        self._epoch = 0
        self._step = 0

    def plan(self) -> None:
        self._epoch += 1
        self.form = self.capture.plan(SnapshotId(self._epoch, self._step))
        self.slots.reserve(self.form.total_bytes)

    def begin(self, *, declared: bool = True) -> SnapshotCopy:
        """Begin the next step."""
        self._step += 1
        self.capture.mark()
        return self.begin_marked(declared=declared)

    def begin_marked(self, *, declared: bool = True) -> SnapshotCopy:
        """The same, after `mark` has been called."""
        snapshot = SnapshotId(self._epoch, self._step)
        self.engine.job = job = self.capture.begin(Due(snapshot), declared=declared)
        return job

    def end(self, job: SnapshotCopy) -> Held:
        """Copy and seal the snapshot; return the contents of its slot."""
        self.run(job)
        job.check()
        assert self.slots.sealed[-1] == job.snapshot
        return Held(self.slots.given[job.snapshot], job.snapshot)

    def fail(self, job: SnapshotCopy) -> HoldfastError:
        """Like `end` for a snapshot that is given up; return the error."""
        self.run(job)
        assert job.error is not None
        assert job.snapshot not in self.slots.sealed
        return job.error

    def run(self, job: SnapshotCopy) -> None:
        self.copier.submit(job)
        job.confirm()
        assert job.reached(CopyState.SEALED, DEADLINE_S)

    def take(self) -> Held:
        return self.end(self.begin())

    def live(self, name: str) -> torch.Tensor:
        (tensor,) = (item.tensor for item in self.adapter.live if item.name == name)
        return tensor

    def exchange(self, name: str, tensor: torch.Tensor) -> None:
        """Put another tensor in the place of the one called `name`."""
        for i, item in enumerate(self.adapter.live):
            if item.name == name:
                self.adapter.live[i] = LiveTensor(name, tensor, item.change)


@dataclass(frozen=True)
class Held:
    """A slot, read as a restore reads it."""

    slot: memoryview
    snapshot: SnapshotId

    def __getitem__(self, name: str) -> list[Any]:
        form, _ = read_format(self.slot)
        values: list[Any] = read_leaf(self.slot, *form.offsets[name]).reshape(-1).tolist()
        return values

    @property
    def plain(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        form, _ = read_format(self.slot)
        record = parse_record(read_record(self.slot, form), self.snapshot)
        return decode_values(record, lambda name: read_leaf(self.slot, *form.offsets[name]))


def moving(job: SnapshotCopy) -> tuple[SlotTensor, ...]:
    """The live tensors that are copied while the step runs."""
    assert job.live is not None
    return job.live.pieces


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A toy with a layout, and a tensor of each kind: ``model.weight``, ``model.mean``, ``model.base``."""
    made = Rig(toy())
    made.plan()
    yield made
    made.copier.close(DEADLINE_S)


# ------------------------------------------------------------------ the layout


def test_the_layout_has_a_place_for_every_tensor_and_the_record(rig: Rig) -> None:
    assert rig.form.offsets.keys() == {
        *("model.weight", "model.mean", "model.base", "early.rng", "late.warm"),
        RECORD,
    }


def test_there_is_no_snapshot_before_there_is_a_layout() -> None:
    rig = Rig(toy())
    with pytest.raises(LayoutChanged, match="no layout yet"):
        rig.begin()
    rig.copier.close(DEADLINE_S)


def test_there_is_no_snapshot_before_the_boundary_is_marked(rig: Rig) -> None:
    with pytest.raises(LayoutChanged, match="nothing was marked"):
        rig.begin_marked()


def test_a_layout_is_refused_while_the_state_does_not_verify(rig: Rig) -> None:
    rig.adapter.problem = StateMismatch("the model's weight is not the cast of its main parameter")
    with pytest.raises(StateMismatch, match="not the cast"):
        rig.plan()


def test_a_layout_of_two_tensors_with_one_name_is_refused(rig: Rig) -> None:
    rig.adapter.live.append(LiveTensor("early.rng", torch.zeros(2), Change.ANY))
    with pytest.raises(HoldfastError, match=r"two leaves .*'early\.rng'"):
        rig.plan()


# ------------------------------------------------------------------ what is copied when


def test_tensors_are_taken_as_their_class_says(rig: Rig) -> None:
    job = rig.begin()
    assert named(moving(job)) == ["model.weight", "model.base"]
    for piece in moving(job):
        assert piece.tensor.data_ptr() == rig.live(piece.name).data_ptr()
    assert named(job.order.ready) == ["model.mean", "early.rng", "late.warm"]
    at_once = (rig.live("model.mean"), rig.adapter.early_tree["rng"], rig.adapter.late_tree["warm"])
    for piece, tensor in zip(job.order.ready, at_once, strict=True):
        assert torch.equal(piece.tensor, tensor)
        assert piece.tensor.data_ptr() != tensor.data_ptr()


def test_a_slot_holds_the_whole_state_and_says_of_which_step(rig: Rig) -> None:
    rig.take()
    held = rig.take()
    assert read_stamp(held.slot) == held.snapshot == SnapshotId(1, 2)
    assert held["model.weight"] == [0, 1, 2, 3, 4, 5]
    assert (held["model.mean"], held["model.base"]) == ([1, 1, 1], [4, 4])
    early, late, fixed = held.plain
    assert (early["seen"], early["rng"].tolist()) == (5, [1, 2, 3])
    assert (late["lr"], late["warm"].item()) == (0.1, 2.0)
    assert fixed == {"order": ["b", "a"]}


def test_what_changes_after_the_step_has_begun_does_not_change_what_was_taken_at_once(rig: Rig) -> None:
    job = rig.begin()
    rig.live("model.mean").fill_(9)
    rig.adapter.early_tree["rng"].fill_(9)
    rig.adapter.early_tree["seen"] = 9
    rig.adapter.late_tree["warm"].fill_(9)
    rig.adapter.late_tree["lr"] = 9
    held = rig.end(job)
    early, late, _ = held.plain
    assert held["model.mean"] == [1, 1, 1]
    assert (early["seen"], early["rng"].tolist()) == (5, [1, 2, 3])
    assert (late["lr"], late["warm"].item()) == (0.1, 2.0)


def test_what_reading_data_changes_is_taken_before_it_is_read_and_the_rest_when_the_step_begins(rig: Rig) -> None:
    def read_a_batch_and_step_the_schedule() -> None:
        rig.adapter.early_tree["rng"].fill_(9)
        rig.adapter.early_tree["seen"] = 6
        rig.adapter.late_tree["lr"] = 0.2
        rig.adapter.late_tree["warm"].fill_(3)
        rig.live("model.mean").fill_(5)
        rig.live("model.weight").fill_(7)

    rig.capture.mark()
    read_a_batch_and_step_the_schedule()
    held = rig.end(rig.begin_marked())
    early, late, _ = held.plain
    assert (early["seen"], early["rng"].tolist()) == (5, [1, 2, 3])
    assert (late["lr"], late["warm"].item()) == (0.2, 3.0)
    assert (held["model.mean"], held["model.weight"]) == ([5] * 3, [7] * 6)


def test_a_boundary_may_be_marked_again(rig: Rig) -> None:
    for seen in (6, 7):
        rig.adapter.early_tree["seen"] = seen
        rig.capture.mark()
    assert rig.end(rig.begin_marked()).plain[0]["seen"] == 7


def test_the_record_says_where_the_loop_is_as_the_step_begins(rig: Rig) -> None:
    rig.loop = {"data": {"taken": 3}}
    rig.capture.mark()
    rig.loop = {"data": {"taken": 4}}
    assert rig.end(rig.begin_marked()).plain[0]["loop"] == {"data": {"taken": 4}}


@pytest.fixture
def drawing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """A rig whose early values are the current random generators."""
    monkeypatch.setattr(rig.adapter, "early", lambda: {"rng": rng.capture()})
    rig.capture.plan(SnapshotId(1, 1))
    return rig


def test_how_generators_are_is_noted_where_the_loop_does_not_say_that_a_step_begins(drawing: Rig) -> None:
    rig = drawing

    def began(*, declared: bool) -> Any:
        return json.loads(rig.begin(declared=declared).record())["late"]["began"]

    assert began(declared=True) is None
    first = began(declared=False)
    assert first
    assert began(declared=False) == first
    torch.rand(1)
    second = began(declared=False)
    assert {name for name in first if first[name] != second[name]} == {"rng torch"}


def test_notes_stand_beside_the_state(rig: Rig) -> None:
    rig.notes = {"interval": 3}
    held = rig.take()
    form, _ = read_format(held.slot)
    assert parse_record(read_record(held.slot, form), held.snapshot)["notes"] == {"interval": 3}


def test_what_was_given_up_is_not_copied(rig: Rig) -> None:
    job = rig.begin()
    job.abort(HoldfastError("over"))
    assert str(rig.fail(job)) == "over"
    assert rig.engine.notes == []
    assert [slot.number for slot in rig.slots.given_back] == [rig.slots.taken]


def test_what_is_given_up_after_it_was_copied_is_not_sealed(rig: Rig) -> None:
    job = rig.begin()
    rig.copier.submit(job)
    assert job.reached(CopyState.COPIED, DEADLINE_S)
    job.abort(HoldfastError("over"))
    assert job.reached(CopyState.SEALED, DEADLINE_S)
    assert (rig.slots.sealed, len(rig.slots.given_back)) == ([], 1)


def test_nothing_is_sealed_before_it_is_sure_that_the_step_has_begun(rig: Rig) -> None:
    first, second = rig.begin(declared=False), rig.begin(declared=False)
    for job in (first, second):
        rig.copier.submit(job)
        assert job.reached(CopyState.COPIED, DEADLINE_S)
    second.confirm()
    assert rig.slots.sealed == []
    first.confirm()
    assert second.reached(CopyState.SEALED, DEADLINE_S)
    assert rig.slots.sealed == [first.snapshot, second.snapshot]


def test_copies_carry_no_gradient(rig: Rig) -> None:
    rig.exchange("model.mean", torch.ones(3, requires_grad=True))
    rig.exchange("model.weight", torch.ones(2, 3, requires_grad=True))
    job = rig.begin()
    assert not any(piece.tensor.requires_grad for piece in (*moving(job), *job.order.ready))
    assert rig.end(job)["model.mean"] == [1, 1, 1]


def test_live_tensors_are_read_before_they_may_change_and_copies_after(rig: Rig) -> None:
    rig.take()
    moving, ready = (
        [rig.form.offsets[name][0] for name in names]
        for names in (("model.weight", "model.base"), ("model.mean", "early.rng", "late.warm"))
    )
    assert rig.engine.notes == [(moving, False), (ready, True)]


def test_the_state_is_marked_when_all_copies_of_the_boundary_are_made(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a device may read the copies before it has made them."""
    order: list[str] = []
    take = Staging.take

    def taken(staging: Staging, pieces: Sequence[SlotTensor]) -> tuple[SlotTensor, ...]:
        order.append("copies")
        return take(staging, pieces)

    monkeypatch.setattr(Staging, "take", taken)
    rig.engine.on_mark = lambda: order.append("mark")
    rig.begin()
    assert order == ["copies", "mark"]


# ------------------------------------------------------------------ what does not fit


def add_late(rig: Rig) -> None:
    rig.adapter.late_tree["more"] = torch.zeros(2)


@pytest.mark.parametrize(
    "change",
    [
        lambda rig: rig.adapter.live.append(LiveTensor("model.new", torch.zeros(1), Change.STEP)),
        lambda rig: rig.adapter.live.pop(),
        lambda rig: rig.exchange("model.mean", torch.ones(4)),
        lambda rig: rig.exchange("model.weight", torch.ones(2, 3).half()),
        lambda rig: rig.adapter.early_tree.update(rng=torch.zeros(4, dtype=torch.uint8)),
        add_late,
    ],
    ids=["one more", "one less", "another shape", "another type", "a longer value", "one more value"],
)
def test_a_state_of_other_leaves_needs_a_new_layout(rig: Rig, change: Callable[[Rig], object]) -> None:
    rig.take()
    change(rig)
    for _ in range(2):
        with pytest.raises(LayoutChanged):
            rig.begin()
    rig.plan()
    rig.take()


def test_state_that_comes_to_another_device_needs_a_new_layout_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slots are registered with that device where they are reserved."""
    rig.take()
    devices = {torch.device("cpu")}
    there = property(lambda manifest: devices, lambda manifest, found: None)
    monkeypatch.setattr(Manifest, "devices", there, raising=False)
    monkeypatch.setattr(rig.engine, "cover", lambda devices: None)
    for name in ("cuda:0", "cpu"):
        devices = {torch.device(name)}
        rig.exchange("model.mean", torch.ones(3))
        if name != "cpu":
            with pytest.raises(LayoutChanged, match="device"):
                rig.begin()
            rig.plan()
        rig.take()


def test_a_device_without_memory_for_a_copy_costs_a_snapshot_and_not_the_job(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*ignored: Any, **more: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    for place, name in ((torch, "empty_like"), (torch.Tensor, "clone")):
        with monkeypatch.context() as patched:
            patched.setattr(place, name, full)
            with pytest.raises(GivenUp, match=r"no memory .* 20\.00 MiB"):
                rig.begin()
    rig.take()


def test_a_tensor_without_room_is_named(rig: Rig) -> None:
    add_late(rig)
    with pytest.raises(LayoutChanged, match=r"no room for late\.more"):
        rig.begin()
    rig.plan()
    assert rig.take()["late.more"] == [0, 0]


@pytest.mark.parametrize("tree", ["early", "late"])
def test_a_value_that_cannot_be_kept_is_named_as_the_step_begins(rig: Rig, tree: str) -> None:
    """Not when the boundary is marked, since nobody would learn of it."""
    values: dict[str, Any] = getattr(rig.adapter, f"{tree}_tree")
    values["handle"] = object()
    with pytest.raises(StateMismatch, match=rf"{tree}\.handle is a builtins\.object"):
        rig.begin()
    del values["handle"]
    rig.take()


def test_plain_values_that_grow_beyond_their_room_need_a_new_layout(rig: Rig) -> None:
    rig.adapter.late_tree["text"] = "x" * rig.form.record[1]
    assert isinstance(rig.fail(rig.begin()), LayoutChanged)
    rig.plan()
    assert rig.take().plain[1]["text"] == rig.adapter.late_tree["text"]


@pytest.mark.parametrize("name", ["model.weight", "model.mean", "model.base"])
def test_another_tensor_of_the_same_leaf_is_followed(rig: Rig, name: str) -> None:
    rig.take()
    wanted = torch.full_like(rig.live(name), 7)
    rig.exchange(name, wanted)
    held = rig.take()
    assert held[name] == [7] * wanted.numel()
    assert held.snapshot.step == 2


def test_a_tensor_whose_data_is_elsewhere_is_followed(rig: Rig) -> None:
    rig.take()
    for item in rig.adapter.live:
        item.tensor.data = torch.full_like(item.tensor, 8)
    held = rig.take()
    assert [set(held[item.name]) for item in rig.adapter.live] == [{8.0}] * 3


# ------------------------------------------------------------------ memory that moves


def elsewhere(tensor: torch.Tensor, value: float) -> None:
    """Move `tensor` to new memory, and have its old memory allocated to others."""
    tensor.data = torch.full_like(tensor, value)
    gc.collect()
    for _ in range(20):
        torch.full((tensor.numel(),), 99.0)


BIG = 1 << 20


def test_data_that_is_exchanged_while_it_is_copied_is_copied_as_it_was(rig: Rig) -> None:
    """If the memory were freed while it is read, the process would crash."""
    for step in range(5):
        rig.exchange("model.base", torch.full((BIG,), float(step)))
        rig.plan()
        rig.engine.before_copy = lambda: elsewhere(rig.live("model.base"), 7)
        held = rig.take()
        assert set(held["model.base"]) == {float(step)}
        rig.engine.before_copy = lambda: None
        assert set(rig.take()["model.base"]) == {7.0}


def test_data_of_another_shape_that_comes_while_it_is_copied_is_named(rig: Rig) -> None:
    def widen() -> None:
        rig.live("model.weight").data = torch.zeros(2, 4)

    job = rig.begin()
    rig.engine.after_copy = widen
    error = rig.fail(job)
    assert isinstance(error, LayoutChanged)
    assert "model.weight: of another shape" in str(error)


@pytest.mark.parametrize("when", ["before the step", "while it is copied"])
def test_a_tensor_that_is_transposed_in_its_memory_is_named(rig: Rig, when: str) -> None:
    rig.take()
    weight = rig.live("model.weight")
    if when == "before the step":
        weight.t_()
        job = rig.begin()
    else:
        job = rig.begin()
        rig.engine.before_copy = lambda: (weight.t_(), None)[1] if weight.shape == (2, 3) else None
    error = rig.fail(job)
    assert isinstance(error, LayoutChanged)
    assert "model.weight" in str(error)
    rig.plan()
    assert rig.take()["model.weight"] == [0, 3, 1, 4, 2, 5]


def test_a_square_that_is_transposed_through_data_is_named(rig: Rig) -> None:
    """Neither its version nor its shape shows the change."""
    rig.exchange("model.weight", torch.arange(9.0).view(3, 3))
    rig.plan()
    rig.take()
    weight = rig.live("model.weight")
    weight.data = weight.data.t()
    assert isinstance(rig.fail(rig.begin()), LayoutChanged)
    rig.plan()
    assert rig.take()["model.weight"] == [0, 3, 6, 1, 4, 7, 2, 5, 8]


def test_memory_that_moves_with_each_step_is_not_held_once_it_is_copied(rig: Rig) -> None:
    """Otherwise, with several snapshots pending, as many generations of the state would be kept."""
    jobs, memory = [], []
    for step in range(10):
        for name in ("model.weight", "model.base"):
            rig.live(name).data = torch.full_like(rig.live(name), step)
        memory += [weakref.ref(rig.live(name).untyped_storage()) for name in ("model.weight", "model.base")]
        job = rig.begin()
        jobs.append(job)  # as the hook does until it knows the outcome
        assert rig.end(job)["model.base"] == [step, step]
        assert job.fence(DEADLINE_S, DEADLINE_S)
        rig.capture.let_go()
    gc.collect()
    assert sum(held() is not None for held in memory) == 2
    assert all(job.live is None for job in jobs)


def test_state_that_stays_where_it_is_is_not_walked_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    walks = Counting(monkeypatch, "holdfast.snapshot.step.capture.Manifest")
    for _ in range(3):
        job = rig.begin()
        rig.end(job)
        assert job.fence(DEADLINE_S, DEADLINE_S)
        rig.capture.let_go()
    assert walks.count == 0


# ------------------------------------------------------------------ what changes while it is copied


@pytest.mark.parametrize("write", [lambda tensor: tensor.add_(1), lambda tensor: tensor.data.add_(1)])
@pytest.mark.parametrize("name", ["model.weight", "model.base"])
def test_what_changes_while_it_is_copied_ends_the_snapshot_and_is_copied_at_once_from_then_on(
    rig: Rig, write: Callable[[torch.Tensor], object], name: str
) -> None:
    """This holds for every tensor, even a frozen one."""
    rig.take()
    rig.engine.after_copy = lambda: write(rig.live(name))
    error = rig.fail(rig.begin())
    assert isinstance(error, StateChanged)
    assert error.names == (name,)
    rig.capture.copy_at_once(error)
    for _ in range(3):
        expected = rig.live(name).flatten().tolist()
        job = rig.begin()
        assert name not in named(moving(job))
        assert rig.end(job)[name] == expected


def test_what_is_copied_at_once_stays_so_in_the_next_layout(rig: Rig) -> None:
    rig.capture.copy_at_once(StateChanged(["model.weight"]))
    rig.plan()
    assert named(moving(rig.begin())) == ["model.base"]


def test_what_is_swapped_and_given_back_while_it_is_copied_ends_the_snapshot(rig: Rig) -> None:
    weight = rig.live("model.weight")
    job = rig.begin()
    rig.engine.before_copy = lambda: (weight.data.add_(1), None)[1]
    rig.engine.after_copy = lambda: (weight.data.sub_(1), None)[1]
    error = rig.fail(job)
    assert isinstance(error, StateChanged)
    assert error.names == ("model.weight",)


def test_what_changes_once_it_is_copied_is_of_the_next_snapshot(rig: Rig) -> None:
    job = rig.begin()
    rig.copier.submit(job)
    assert job.fence(DEADLINE_S, DEADLINE_S)
    for name in ("model.weight", "model.base"):
        rig.live(name).fill_(6)
    job.confirm()
    assert job.reached(CopyState.SEALED, DEADLINE_S)
    job.check()
    held = Held(rig.slots.given[job.snapshot], job.snapshot)
    assert (held["model.base"], held["model.weight"]) == ([4, 4], [0, 1, 2, 3, 4, 5])
    assert rig.take()["model.base"] == [6, 6]


# ------------------------------------------------------------------ memory that is reused


def test_no_more_than_two_copies_are_ever_made(rig: Rig) -> None:
    places = set()
    before = rig.begin()
    for value in range(10):
        rig.live("model.mean").fill_(value)
        job = rig.begin()
        places |= {piece.tensor.data_ptr() for piece in (before.order.ready[0], job.order.ready[0])}
        assert rig.end(before)["model.mean"] == ([value - 1] * 3 if value else [1, 1, 1])
        before = job
    assert len(places) == 2


def test_a_copy_that_is_in_use_is_not_written_again(rig: Rig) -> None:
    jobs = []
    for value in range(4):
        rig.live("model.mean").fill_(value)
        jobs.append(rig.begin())
    assert [job.order.ready[0].tensor.tolist() for job in jobs] == [[value] * 3 for value in range(4)]


def test_nothing_to_copy_takes_no_memory() -> None:
    staging = Staging()
    assert staging.take(()) == ()
    staging.give_back(())
    assert len(staging.take((SlotTensor(torch.ones(1), 0, 4),))) == 1


def test_copies_of_an_older_layout_are_not_used_for_a_newer_one(rig: Rig) -> None:
    """A snapshot may still be in the middle of its seal while the next layout is made."""
    old = rig.begin()
    rig.adapter.live.append(LiveTensor("model.a", torch.full((3,), 3.0), Change.ANY))
    rig.plan()
    old.order.release()
    held = rig.take()
    assert (held["model.mean"], held["model.a"]) == ([1, 1, 1], [3, 3, 3])


def test_copies_whose_order_has_changed_are_put_in_their_places(rig: Rig) -> None:
    rig.adapter.live.append(LiveTensor("model.var", torch.full((3,), 3.0), Change.ANY))
    rig.plan()
    old = rig.begin()
    rig.adapter.live.reverse()
    new = rig.begin()
    old.order.release()
    held = rig.take()
    new.order.release()
    assert (held["model.mean"], held["model.var"]) == ([1, 1, 1], [3, 3, 3])


# ------------------------------------------------------------------ with everything else


@pytest.mark.usefixtures("arena")
def test_an_average_of_the_weights_comes_back_as_it_was_after_the_step() -> None:
    def job() -> tuple[torch.nn.Linear, torch.nn.Linear, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model, average = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3).requires_grad_(False)
        return model, average, torch.optim.Adam(model.parameters(), lr=0.1)

    model, average, optim = job()
    with InMemorySnapshot([model, average], optim, keep=True) as snap:
        for _ in range(6):
            train(snap, model, optim, 1)
            for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(weight.detach(), 0.25)
            snap.drain(60)
        assert snap.statistics.failed == 0
        kept = [*values(model, optim), *(mean.clone() for mean in average.parameters())]
    model, average, optim = job()
    with InMemorySnapshot([model, average], optim) as snap:
        assert snap.step == 6
        assert all(map(torch.equal, [*values(model, optim), *average.parameters()], kept))


def test_what_stands_in_for_cuda_where_there_is_no_device_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the demo on a machine without a GPU, with a torch that was built for one."""
    monkeypatch.setattr(torch._C, "_has_cuda", True)
    monkeypatch.setattr(torch.cuda, "_initialized", True)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    assert "cuda" not in rng.capture()
