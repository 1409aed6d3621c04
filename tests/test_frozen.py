"""Tensors that are taken for frozen: what tells of a change, and how soon."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshot.frozen import SAMPLE_BYTES, FrozenChanged, check_sample, versions

from smp_daemon.client import SmpClient
from smp_daemon.layout import SnapshotId
from smp_daemon.slotfile import Leaf, SlotFormat, plan_slot
from snapshot.copier import Copier, CopyJob
from snapshot.movers import CpuMover, Piece
from snapshot.pace import Pace
from snapshot.state import place_tensors
from snapshot.tensors import DTYPES
from tests.test_movers import row, slot_for, strided, transposed, unpaced
from tests.test_tensors import bits, random_bits

quick = settings(deadline=None, derandomize=True, max_examples=60)

DEADLINE_S = 10.0
SLOTS = 3


def captured(tensors: list[torch.Tensor]) -> tuple[tuple[Piece, ...], memoryview]:
    """Pieces for `tensors`, and a slot that has them."""
    pieces = row(tensors)
    slot = memoryview(slot_for(pieces))
    CpuMover().copy(pieces, slot, unpaced)
    return pieces, slot


def flip(tensor: torch.Tensor, index: int) -> None:
    """Flip a bit of the byte at `index`, as nothing that counts versions sees it."""
    tensor.data.view(-1).view(torch.uint8)[index] ^= 1


def turns_that_find_it(pieces: tuple[Piece, ...], slot: memoryview, turns: range) -> list[int]:
    found = []
    for turn in turns:
        try:
            check_sample(pieces, slot, turn)
        except FrozenChanged:
            found.append(turn)
    return found


# ------------------------------------------------------------------ versions


def test_a_change_in_place_is_a_new_version_and_a_reading_is_not() -> None:
    pieces = row([torch.zeros(3), torch.zeros(2)])
    before = versions(pieces)
    _ = pieces[0].tensor.sum() + pieces[1].tensor.clone()[0]
    assert versions(pieces) == before
    with torch.no_grad():
        pieces[1].tensor.add_(1)
    assert versions(pieces)[0] == before[0]
    assert versions(pieces)[1] > before[1]


def test_a_change_through_a_view_or_an_optimizer_is_a_new_version() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    pieces = row([parameter])
    before = versions(pieces)
    parameter.detach()[1:2].fill_(3)
    between = versions(pieces)
    parameter.grad = torch.ones(4)
    torch.optim.SGD([parameter], lr=1.0).step()
    assert before < between < versions(pieces)


def test_a_change_through_data_is_none() -> None:
    """This is what the samples are for."""
    pieces = row([torch.zeros(4)])
    before = versions(pieces)
    pieces[0].tensor.data.fill_(1)
    assert versions(pieces) == before


# ------------------------------------------------------------------ samples


@quick
@given(st.integers(1, 5 * SAMPLE_BYTES), st.integers(0, 2**20), st.integers(0, 7))
def test_a_changed_byte_is_found_once_in_as_many_turns_as_there_are_pages(count: int, place: int, first: int) -> None:
    pieces, slot = captured([random_bits(torch.uint8, (count,))])
    pages = -(-count // SAMPLE_BYTES)
    turns = range(first, first + pages)
    assert turns_that_find_it(pieces, slot, turns) == []
    flip(pieces[0].tensor, place % count)
    (found,) = turns_that_find_it(pieces, slot, turns)
    assert found % pages == place % count // SAMPLE_BYTES


def test_every_turn_looks_at_a_page_of_every_tensor() -> None:
    sizes = [1, SAMPLE_BYTES, SAMPLE_BYTES + 1, 3 * SAMPLE_BYTES]
    for changed, pages in enumerate([1, 1, 2, 3]):
        pieces, slot = captured([random_bits(torch.uint8, (size,)) for size in sizes])
        flip(pieces[changed].tensor, sizes[changed] - 1)
        found = turns_that_find_it(pieces, slot, range(6))
        assert found == [turn for turn in range(6) if turn % pages == pages - 1]


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5)], ids=str)
def test_any_dtype_is_compared_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    pieces, slot = captured([random_bits(dtype, shape)])
    check_sample(pieces, slot, 0)
    flip(pieces[0].tensor, pieces[0].bytes - 1)
    with pytest.raises(FrozenChanged):
        check_sample(pieces, slot, 0)


def test_what_is_not_a_number_is_equal_to_itself_and_a_negative_zero_is_not_zero() -> None:
    pieces, slot = captured([torch.tensor([float("nan"), 0.0])])
    check_sample(pieces, slot, 0)
    pieces[0].tensor.data[1] = -0.0
    with pytest.raises(FrozenChanged):
        check_sample(pieces, slot, 0)


@pytest.mark.parametrize("count", [1, 3000])
@pytest.mark.parametrize("kind", ["transposed", "strided", "conjugated", "negated"])
def test_a_tensor_that_is_no_plain_memory_is_compared_as_it_reads(kind: str, count: int) -> None:
    base = random_bits(torch.float32, (2, count))
    tensor = {
        "transposed": lambda: transposed(base),
        "strided": lambda: strided(base),
        "conjugated": lambda: torch.complex(torch.ones(count), torch.ones(count)).conj(),
        "negated": lambda: torch.complex(torch.ones(count), torch.ones(count)).conj().imag,
    }[kind]()
    pieces, slot = captured([tensor])
    pages = -(-tensor.nbytes // SAMPLE_BYTES)
    assert turns_that_find_it(pieces, slot, range(pages)) == []
    tensor.data[(-1,) * tensor.dim()] = 7
    assert turns_that_find_it(pieces, slot, range(pages)) == [pages - 1]


def test_parts_of_a_tensor_count_the_changes_of_the_whole() -> None:
    whole = torch.zeros(6)
    pieces = row([whole.detach().view(-1)[2:4]])
    before = versions(pieces)
    whole.add_(1)
    assert versions(pieces) > before


@pytest.mark.parametrize("turn", [0, 5])
def test_empty_tensors_are_passed_over(turn: int) -> None:
    check_sample((), memoryview(b""), turn)
    pieces, slot = captured([torch.zeros(0), torch.zeros(3, 0)])
    check_sample(pieces, slot, turn)
    pieces, slot = captured([torch.zeros(0), torch.zeros(3)])
    check_sample(pieces, slot, turn)
    flip(pieces[1].tensor, 0)
    with pytest.raises(FrozenChanged):
        check_sample(pieces, slot, turn)


def test_a_damaged_slot_is_a_change_too() -> None:
    pieces, slot = captured([torch.zeros(4), torch.zeros(4)])
    slot[pieces[0].offset - 1] ^= 1
    check_sample(pieces, slot, 0)
    slot[pieces[1].offset] ^= 1
    with pytest.raises(FrozenChanged):
        check_sample(pieces, slot, 0)


# ------------------------------------------------------------------ in the copy thread


class Slots:
    """Stands in for an SMP: hands its slots out in turn."""

    def __init__(self, form: SlotFormat) -> None:
        self.slots = [memoryview(mmap.mmap(-1, form.total_bytes)) for _ in range(SLOTS)]
        self.begun = 0
        self.sealed = 0

    def begin(self, *_: Any) -> memoryview:
        self.begun += 1
        return self.slots[(self.begun - 1) % SLOTS]

    def seal(self, *_: Any) -> None:
        self.sealed += 1

    def abandon(self, *_: Any, unused: bool = False) -> None:
        """Nothing is kept of it."""


class Copying:
    """A copier, and snapshots of nothing but frozen tensors."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        leaves = [Leaf(f"t{i}", "U8", tuple(tensor.shape)) for i, tensor in enumerate(tensors)]
        self.form = plan_slot("run", "dp0", leaves, 64)
        self.once = place_tensors(self.form, ((f"t{i}", tensor) for i, tensor in enumerate(tensors)))
        self.slots = Slots(self.form)
        self.copied: list[int] = []
        self._step = 0
        client = cast(SmpClient, self.slots)
        self.copier = Copier(client, client, self._mover(), Pace(), lambda: None)

    def take(self) -> CopyJob:
        """A whole snapshot; what became of it."""
        self._step += 1
        job = CopyJob(
            snapshot=SnapshotId(1, self._step),
            coord="dp0",
            keep=(),
            protected=None,
            form=self.form,
            moving=(),
            moving_bytes=0,
            staged=(),
            early=(),
            once=self.once,
            versions=tuple(versions(self.once)),
        )
        self.copier.submit(job)
        job.finalise((), lambda: b"{}")
        assert job.done.wait(DEADLINE_S)
        return job

    def held(self, slot: int, index: int) -> bytes:
        piece = self.once[index]
        return bytes(self.slots.slots[slot][piece.offset : piece.offset + piece.bytes])

    def _mover(self) -> CpuMover:
        copied = self.copied

        class Noting(CpuMover):
            def copy(self, pieces: Any, slot: memoryview, pause: Any) -> None:
                super().copy(pieces, slot, pause)
                if pieces:
                    copied.append(len(pieces))

        return Noting()


@pytest.fixture
def frozen() -> Iterator[Copying]:
    """A frozen tensor of as many pages as there are slots, and a small one."""
    copying = Copying([random_bits(torch.uint8, (SLOTS * SAMPLE_BYTES,)), random_bits(torch.uint8, (5,))])
    yield copying
    copying.copier.close(DEADLINE_S)


def test_what_is_frozen_is_copied_once_into_each_slot(frozen: Copying) -> None:
    for _ in range(3 * SLOTS):
        assert frozen.take().error is None
    assert frozen.copied == [2] * SLOTS
    assert {frozen.held(slot, 1) for slot in range(SLOTS)} == {bits(frozen.once[1].tensor)}


def test_what_has_another_version_is_copied_again(frozen: Copying) -> None:
    for _ in range(SLOTS):
        frozen.take()
    frozen.once[1].tensor.fill_(9)
    for _ in range(2 * SLOTS):
        assert frozen.take().error is None
    assert frozen.copied == [2] * 2 * SLOTS
    assert {frozen.held(slot, 1) for slot in range(SLOTS)} == {b"\x09" * 5}


@pytest.mark.parametrize("page", range(SLOTS))
def test_a_change_that_no_version_tells_of_ends_a_snapshot_soon(frozen: Copying, page: int) -> None:
    for _ in range(SLOTS):
        frozen.take()
    flip(frozen.once[0].tensor, page * SAMPLE_BYTES)
    found = [isinstance(frozen.take().error, FrozenChanged) for _ in range(SLOTS)]
    assert any(found)
    assert frozen.slots.sealed == 2 * SLOTS - sum(found)


@pytest.mark.parametrize("page", range(SLOTS))
@pytest.mark.parametrize("filled", range(1, SLOTS))
def test_every_slot_is_compared_page_by_page(frozen: Copying, page: int, filled: int) -> None:
    """A change before the last slot is filled for the first time leaves only the first ones wrong."""
    for _ in range(filled):
        frozen.take()
    flip(frozen.once[0].tensor, page * SAMPLE_BYTES)
    assert any(isinstance(frozen.take().error, FrozenChanged) for _ in range(SLOTS * (SLOTS + 1)))
