"""What is taken at a boundary, when, and that nothing that happens afterwards gets into it."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from snapshot.frozen import FrozenChanged

from holdfast import InMemorySnapshot
from smp_daemon.client import SmpClient
from smp_daemon.errors import HoldfastError, StateMismatch
from smp_daemon.layout import SnapshotId
from smp_daemon.slotfile import RECORD, read_format, read_stamp
from snapshot.adapter import Change, LiveTensor
from snapshot.agreement import Alone
from snapshot.capture import Capture, Staging
from snapshot.copier import Copier, CopyJob
from snapshot.movers import CpuMover, Piece
from snapshot.pace import Pace
from snapshot.state import Misfit, decode_record, decode_values
from snapshot.tensors import read_leaf
from tests.test_hook import arena as arena
from tests.test_hook import train, values
from tests.test_state import Toy, toy

DEADLINE_S = 10.0
SLOTS = 3


class Slots:
    """Stands in for an SMP: hands out its slots in turn."""

    def __init__(self) -> None:
        self.slots: list[memoryview] = []
        self.given: dict[SnapshotId, memoryview] = {}
        self.abandoned: list[SnapshotId] = []

    def reserve(self, total_bytes: int) -> None:
        self.slots = [memoryview(mmap.mmap(-1, total_bytes)) for _ in range(SLOTS)]

    def begin(self, snapshot: SnapshotId, *_: Any) -> memoryview:
        self.given[snapshot] = self.slots[len(self.given) % SLOTS]
        return self.given[snapshot]

    def seal(self, *_: Any) -> None:
        """All bytes are there."""

    def abandon(self, snapshot: SnapshotId, coord: str, *, unused: bool = False) -> None:
        if not unused:
            self.abandoned.append(snapshot)


class Noting(CpuMover):
    """Notes what is copied, and whether the live state might be changed by then."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[list[int], bool]] = []
        self.job: CopyJob | None = None
        self.on_mark: Callable[[], None] = lambda: None

    def mark(self) -> None:
        self.on_mark()

    def copy(self, pieces: Sequence[Piece], slot: memoryview, pause: Callable[[int], None]) -> None:
        super().copy(pieces, slot, pause)
        self.notes.append(([piece.offset for piece in pieces], self.job is not None and self.job.copied.is_set()))


class Rig:
    """A toy's state, its capture, and a copy thread."""

    def __init__(self, adapter: Toy) -> None:
        self.adapter = adapter
        self.mover = Noting()
        self.capture = Capture(adapter, Alone(), self.mover, "run", "dp0")
        self.slots = Slots()
        client = cast(SmpClient, self.slots)
        self.copier = Copier(client, client, self.mover, Pace(), lambda: None, self.capture.over)
        self._epoch = 0
        self._step = 0

    def plan(self) -> None:
        self._epoch += 1
        self.form = self.capture.plan(SnapshotId(self._epoch, self._step))
        self.slots.reserve(self.form.total_bytes)

    def begin(self) -> CopyJob:
        self._step += 1
        self.mover.job = job = self.capture.begin(SnapshotId(self._epoch, self._step), (), None)
        return job

    def end(self, job: CopyJob) -> Held:
        """Finalise and copy it; what stands in its slot then."""
        self.copier.submit(job)
        self.capture.finalise(job)
        assert job.done.wait(DEADLINE_S)
        job.check()
        return Held(self.slots.given[job.snapshot], job.snapshot)

    def fail(self, job: CopyJob) -> HoldfastError:
        """As `end`, for one that is given up; why it was."""
        self.copier.submit(job)
        self.capture.finalise(job)
        assert job.done.wait(DEADLINE_S)
        assert job.error is not None
        return job.error

    def take(self) -> Held:
        return self.end(self.begin())

    def live(self, name: str) -> torch.Tensor:
        (tensor,) = (item.tensor for item in self.adapter.live if item.name == name)
        return tensor

    def exchange(self, name: str, tensor: torch.Tensor) -> None:
        """Another tensor takes the place of the one called `name`."""
        for i, item in enumerate(self.adapter.live):
            if item.name == name:
                self.adapter.live[i] = LiveTensor(name, tensor, item.change)


@dataclass(frozen=True)
class Held:
    """A slot, as a restore reads it."""

    slot: memoryview
    snapshot: SnapshotId

    def __getitem__(self, name: str) -> list[Any]:
        form, _ = read_format(self.slot)
        values: list[Any] = read_leaf(self.slot, *form.offsets[name]).reshape(-1).tolist()
        return values

    @property
    def plain(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        form, _ = read_format(self.slot)
        record = decode_record(self.slot, form, self.snapshot)
        return decode_values(record, lambda name: read_leaf(self.slot, *form.offsets[name]))


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A toy that is laid out, with a tensor of each kind: ``model.weight``, ``model.mean``, ``model.base``."""
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
    with pytest.raises(Misfit, match="there is no layout yet"):
        rig.begin()
    rig.copier.close(DEADLINE_S)


def test_a_layout_is_refused_while_the_state_does_not_verify(rig: Rig) -> None:
    rig.adapter.problem = StateMismatch("the model's weight is not the cast of its main parameter")
    with pytest.raises(StateMismatch, match="not the cast"):
        rig.plan()


def test_a_layout_of_two_tensors_with_one_name_is_refused(rig: Rig) -> None:
    rig.adapter.live.append(LiveTensor("early.rng", torch.zeros(2), Change.FORWARD))
    with pytest.raises(HoldfastError, match=r"two leaves are called 'early\.rng'"):
        rig.plan()


# ------------------------------------------------------------------ what is copied when


def test_tensors_are_taken_as_their_class_says(rig: Rig) -> None:
    job = rig.begin()
    assert [piece.tensor for piece in job.moving] == [rig.live("model.weight")]
    assert [piece.tensor for piece in job.once] == [rig.live("model.base")]
    assert job.moving[0].tensor is rig.live("model.weight")
    assert job.once[0].tensor is rig.live("model.base")
    for pieces, tensor in ((job.staged, rig.live("model.mean")), (job.early, rig.adapter.early_tree["rng"])):
        (piece,) = pieces
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


def test_what_changes_after_the_boundary_does_not_change_what_was_copied_at_it(rig: Rig) -> None:
    job = rig.begin()
    rig.live("model.mean").fill_(9)
    rig.adapter.early_tree["rng"].fill_(9)
    rig.adapter.early_tree["seen"] = 9
    held = rig.end(job)
    early, _, _ = held.plain
    assert held["model.mean"] == [1, 1, 1]
    assert (early["seen"], early["rng"].tolist()) == (5, [1, 2, 3])


def test_late_values_are_those_of_the_next_forward(rig: Rig) -> None:
    job = rig.begin()
    rig.adapter.late_tree["lr"] = 0.2
    rig.adapter.late_tree["warm"].fill_(3)
    rig.capture.finalise(job)
    rig.adapter.late_tree["lr"] = 0.3
    rig.adapter.late_tree["warm"].fill_(4)
    _, late, _ = rig.end(job).plain
    assert (late["lr"], late["warm"].item()) == (0.2, 3.0)


def test_what_was_given_up_is_not_finalised(rig: Rig) -> None:
    job = rig.begin()
    job.abort(HoldfastError("over"))
    assert str(rig.fail(job)) == "over"
    assert job.late == ()
    assert rig.slots.abandoned == [job.snapshot]


def test_copies_carry_no_gradient(rig: Rig) -> None:
    rig.exchange("model.mean", torch.ones(3, requires_grad=True))
    job = rig.begin()
    assert not job.staged[0].tensor.requires_grad
    assert rig.end(job)["model.mean"] == [1, 1, 1]


def test_live_tensors_are_read_before_they_may_change_and_what_settles_late_after(rig: Rig) -> None:
    rig.take()
    places = [[rig.form.offsets[name][0]] for name in ("model.weight", "model.base", "model.mean", "early.rng")]
    assert rig.mover.notes[:4] == [(place, False) for place in places]
    assert rig.mover.notes[4:] == [([rig.form.offsets["late.warm"][0]], True)]


def test_the_state_is_marked_when_all_copies_of_the_boundary_are_made(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a device may read the copies before it has made them."""
    order: list[str] = []
    take = Staging.take

    def taken(staging: Staging, pieces: Sequence[Piece]) -> tuple[Piece, ...]:
        order.append("copies")
        return take(staging, pieces)

    monkeypatch.setattr(Staging, "take", taken)
    rig.mover.on_mark = lambda: order.append("mark")
    rig.begin()
    assert order == ["copies", "mark"]


# ------------------------------------------------------------------ what does not fit


def grow(rig: Rig) -> None:
    rig.adapter.live.append(LiveTensor("model.new", torch.zeros(1), Change.STEP))


def shrink(rig: Rig) -> None:
    rig.adapter.live.pop()


def reshape(rig: Rig) -> None:
    rig.exchange("model.mean", torch.ones(4))


def cast_down(rig: Rig) -> None:
    rig.exchange("model.weight", torch.ones(2, 3).half())


def grow_early(rig: Rig) -> None:
    rig.adapter.early_tree["rng"] = torch.zeros(4, dtype=torch.uint8)


@pytest.mark.parametrize("change", [grow, shrink, reshape, cast_down, grow_early])
def test_a_state_of_other_leaves_needs_a_new_layout(rig: Rig, change: Callable[[Rig], None]) -> None:
    rig.take()
    change(rig)
    for _ in range(2):
        with pytest.raises(Misfit):
            rig.begin()
    rig.plan()
    rig.take()


def test_a_new_late_tensor_ends_the_snapshot_and_not_the_loop(rig: Rig) -> None:
    job = rig.begin()
    rig.adapter.late_tree["more"] = torch.zeros(2)
    error = rig.fail(job)
    assert isinstance(error, Misfit)
    assert "late.more" in str(error)
    rig.plan()
    assert rig.take()["late.more"] == [0, 0]


def test_a_late_value_that_cannot_be_kept_ends_the_snapshot_and_not_the_loop(rig: Rig) -> None:
    job = rig.begin()
    rig.adapter.late_tree["handle"] = object()
    assert "late.handle is a builtins.object" in str(rig.fail(job))
    del rig.adapter.late_tree["handle"]
    rig.take()


def test_plain_values_that_grow_beyond_their_room_need_a_new_layout(rig: Rig) -> None:
    rig.adapter.late_tree["text"] = "x" * rig.form.record[1]
    assert isinstance(rig.fail(rig.begin()), Misfit)
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


# ------------------------------------------------------------------ what is taken for frozen


def test_what_is_frozen_is_the_same_pieces_every_time(rig: Rig) -> None:
    """By this the copy thread knows that a slot has them."""
    jobs = [rig.begin() for _ in range(2)]
    assert jobs[0].once is jobs[1].once
    assert jobs[0].versions == jobs[1].versions
    rig.live("model.base").add_(1)
    assert rig.begin().versions != jobs[0].versions


def test_what_is_frozen_is_copied_once_into_each_slot(rig: Rig) -> None:
    for _ in range(3 * SLOTS):
        assert rig.take()["model.base"] == [4, 4]
    place = rig.form.offsets["model.base"][0]
    assert [offsets for offsets, _ in rig.mover.notes].count([place]) == SLOTS


def test_what_changes_right_after_the_step_is_taken_with_it(rig: Rig) -> None:
    """Such as a moving average of the weights."""
    for value in range(2 * SLOTS):
        job = rig.begin()
        rig.live("model.base").fill_(value)
        held = rig.end(job)
        assert held["model.base"] == [value, value]
        assert job.once == ()
        assert len(job.late) == 2


def test_what_has_changed_once_is_copied_every_time(rig: Rig) -> None:
    job = rig.begin()
    rig.live("model.base").fill_(5)
    rig.end(job)
    rig.live("model.base").data.fill_(6)
    job = rig.begin()
    assert (job.once, job.versions) == ((), ())
    assert rig.end(job)["model.base"] == [6, 6]


def test_what_changes_after_the_late_values_are_taken_is_of_the_next_snapshot(rig: Rig) -> None:
    job = rig.begin()
    rig.live("model.base").fill_(5)
    rig.capture.finalise(job)
    rig.live("model.base").fill_(6)
    assert rig.end(job)["model.base"] == [5, 5]
    assert rig.take()["model.base"] == [6, 6]


def test_what_changes_between_two_boundaries_is_copied_anew(rig: Rig) -> None:
    for value in (4, 5, 6, 6, 6, 6, 7):
        rig.live("model.base").fill_(value)
        job = rig.begin()
        assert len(job.once) == 1
        assert rig.end(job)["model.base"] == [value, value]


def test_a_change_that_no_version_tells_of_ends_one_snapshot_and_is_in_the_next(rig: Rig) -> None:
    for _ in range(SLOTS):
        rig.take()
    rig.live("model.base").data.fill_(5)
    assert isinstance(rig.fail(rig.begin()), FrozenChanged)
    for value in (5, 6, 7):
        rig.live("model.base").data.fill_(value)
        assert rig.take()["model.base"] == [value, value]


# ------------------------------------------------------------------ memory that is used again


def test_no_more_than_two_copies_are_ever_made(rig: Rig) -> None:
    places = set()
    before = rig.begin()
    for value in range(10):
        rig.live("model.mean").fill_(value)
        job = rig.begin()
        places |= {piece.tensor.data_ptr() for piece in (*before.staged, *job.staged)}
        assert rig.end(before)["model.mean"] == ([value - 1] * 3 if value else [1, 1, 1])
        before = job
    assert len(places) == 2


def test_a_copy_that_is_in_use_is_not_written_again(rig: Rig) -> None:
    jobs = []
    for value in range(4):
        rig.live("model.mean").fill_(value)
        jobs.append(rig.begin())
    assert [job.staged[0].tensor.tolist() for job in jobs] == [[value] * 3 for value in range(4)]


def test_nothing_to_copy_takes_no_memory() -> None:
    staging = Staging()
    assert staging.take(()) == ()
    staging.give_back(())
    assert len(staging.take((Piece(torch.ones(1), 0, 4),))) == 1


def test_copies_of_an_older_layout_are_not_used_for_a_newer_one(rig: Rig) -> None:
    """A snapshot may still be sealed while the next layout is made."""
    old = rig.begin()
    rig.adapter.live.append(LiveTensor("model.a", torch.full((3,), 3.0), Change.FORWARD))
    rig.plan()
    rig.capture.over(old)
    held = rig.take()
    assert (held["model.mean"], held["model.a"]) == ([1, 1, 1], [3, 3, 3])


def test_copies_whose_order_has_changed_are_put_in_their_places(rig: Rig) -> None:
    rig.adapter.live.append(LiveTensor("model.var", torch.full((3,), 3.0), Change.FORWARD))
    rig.plan()
    old = rig.begin()
    rig.adapter.live.reverse()
    new = rig.begin()
    rig.capture.over(old)
    held = rig.take()
    rig.capture.over(new)
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
            snap.drain(10)
        assert snap.statistics.failed == 0
        kept = [*values(model, optim), *(mean.clone() for mean in average.parameters())]
    model, average, optim = job()
    with InMemorySnapshot([model, average], optim) as snap:
        assert snap.step == 6
        assert all(map(torch.equal, [*values(model, optim), *average.parameters()], kept))
