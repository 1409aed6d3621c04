"""Live tensors that change while they are copied: what shows it, and under which name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.smp_daemon.shared.errors import HoldfastError
from holdfast.snapshot.copy.engines import SAMPLE_BYTES, CpuEngine, Sample, SlotTensor
from holdfast.snapshot.copy.tensors import DTYPES
from holdfast.snapshot.copy.witness import StateChanged, WatchedPieces, Witness
from tests.deadlines import DEADLINE_S
from tests.unit.test_engines import BEFORE, Counting, Pauses, slot_for, strided, transposed
from tests.unit.test_tensors import random_bits

PERIODS = 3
"""Every part of a piece is sampled within this many times as many turns as it has parts."""


class Copying:
    """Tensors named ``w0``, ``w1``..., with a slot for their copy and a witness."""

    def __init__(self, *tensors: torch.Tensor, turn: int = 1, engine: CpuEngine | None = None) -> None:
        pieces, at = [], BEFORE
        for i, tensor in enumerate(tensors):
            pieces.append(SlotTensor(tensor.detach(), at, tensor.nbytes, f"w{i}"))
            at += tensor.nbytes + BEFORE
        self.pieces = tuple(pieces)
        self.slot = memoryview(slot_for(self.pieces))
        self.engine = engine or CpuEngine()
        self.witness = Witness(self.engine, WatchedPieces(self.pieces), turn)
        self._looked = False

    def copy(self, which: slice = slice(None)) -> None:
        self.engine.copy(self.pieces[which], self.slot, Pauses())

    def look(self) -> None:
        """Let the witness look, as once the copy has read everything."""
        self.witness.look(self.engine)
        self._looked = True

    def changed(self) -> list[str]:
        """The names that the check finds, with the copy having just read everything."""
        if not self._looked:
            self.look()
        try:
            self.witness.check(self.slot)
        except StateChanged as error:
            return list(error.names)
        return []


def copied(*tensors: torch.Tensor, **options: Any) -> Copying:
    """`Copying`, with the copy made."""
    copying = Copying(*tensors, **options)
    copying.copy()
    return copying


def flip(tensor: torch.Tensor, index: int) -> None:
    """Flip a bit of the byte at `index`, unseen by version counters."""
    tensor.data.view(-1).view(torch.uint8)[index] ^= 1


def looks(count: int, turns: Sequence[int]) -> list[int]:
    """The part, of `count` parts of a piece, that each turn samples."""
    pieces = (SlotTensor(torch.zeros(count * SAMPLE_BYTES, dtype=torch.uint8), 0, count * SAMPLE_BYTES, "w"),)
    engine = CpuEngine()
    return [int(engine.sample(pieces, turn).start[0]) // SAMPLE_BYTES for turn in turns]


def changed_by_now(witness: Witness) -> list[str]:
    """What has been written to, or has other bytes by now."""
    return sorted({*witness.written(), *witness.rewritten()})


# ------------------------------------------------------------------ what is noticed


def test_a_change_in_place_is_named_though_it_puts_back_what_was_there() -> None:
    copying = copied(*(torch.ones(3) for _ in range(3)))
    copying.pieces[1].tensor.add_(1).sub_(1)
    assert changed_by_now(copying.witness) == copying.witness.written() == copying.changed() == ["w1"]
    assert copying.witness.rewritten() == []


def test_a_change_through_a_view_or_by_an_optimizer_is_named() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(4)) for _ in range(3)]
    copying = copied(*parameters)
    parameters[0].detach()[1:2].fill_(3)
    parameters[2].grad = torch.ones(4)
    torch.optim.SGD([parameters[2]], lr=1.0).step()
    assert copying.changed() == ["w0", "w2"]


def test_a_change_of_the_whole_is_one_of_each_part() -> None:
    """As with state that replicas share."""
    whole = torch.zeros(6)
    copying = copied(whole.view(-1)[2:4])
    whole[:1] = 1
    assert copying.changed() == ["w0"]


def test_what_is_written_through_data_is_named() -> None:
    """No version counter shows it."""
    copying = copied(*(torch.zeros(1000 * (i + 1)) for i in range(3)))
    versions = WatchedPieces(copying.pieces).versions()
    copying.pieces[1].tensor.data.fill_(1)
    assert WatchedPieces(copying.pieces).versions() == versions
    assert changed_by_now(copying.witness) == copying.witness.rewritten() == copying.changed() == ["w1"]
    assert copying.witness.written() == []


@pytest.mark.parametrize("when", ["before the copy", "after the copy"])
def test_a_whole_tensor_that_is_written_through_data_is_named_at_any_turn(when: str) -> None:
    for turn in range(1, 50):
        copying = Copying(torch.zeros(10_000), turn=turn)
        if when == "after the copy":
            copying.copy()
        copying.pieces[0].tensor.data.fill_(1)
        if when == "before the copy":
            copying.copy()
        assert copying.changed() == ["w0"]


def test_a_change_that_is_taken_back_before_the_look_is_seen_in_the_copy() -> None:
    """Like weights swapped for an evaluation, through ``.data``: the copy is torn, the tensors are as before."""
    tensors = [torch.zeros(1000), torch.zeros(10)]
    copying = Copying(*tensors)
    copying.copy(slice(0, 1))
    for tensor in tensors:
        tensor.data.fill_(1)
    copying.copy(slice(1, 2))
    for tensor in tensors:
        tensor.data.fill_(0)
    assert changed_by_now(copying.witness) == []
    assert copying.changed() == ["w1"]


def test_what_changes_after_the_look_is_of_the_next_step() -> None:
    tensors = [torch.zeros(5), torch.zeros(5)]
    copying = copied(*tensors)
    copying.look()
    tensors[0].add_(1)
    tensors[1].data.fill_(1)
    assert copying.changed() == []


def test_what_the_slot_has_of_others_is_none_of_it() -> None:
    copying = copied(torch.zeros(40))
    piece = copying.pieces[0]
    copying.slot[piece.offset - 1] ^= 1
    copying.slot[piece.offset + piece.bytes] ^= 1
    assert copying.changed() == []


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5)], ids=str)
def test_any_dtype_is_compared_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_bits(dtype, shape)
    copying = copied(tensor)
    assert copying.changed() == []
    where = looks(-(-tensor.nbytes // SAMPLE_BYTES), [1])[0] * SAMPLE_BYTES
    copying = copied(tensor)
    flip(tensor, min(where + SAMPLE_BYTES, tensor.nbytes) - 1)
    assert copying.changed() == ["w0"]


def test_what_is_not_a_number_is_equal_to_itself_and_a_negative_zero_is_not_zero() -> None:
    tensor = torch.tensor([float("nan"), 0.0])
    copying = copied(tensor)
    assert changed_by_now(copying.witness) == []
    tensor.data[1] = -0.0
    assert copying.changed() == ["w0"]


def test_many_names_are_cut_and_counted() -> None:
    copying = copied(*(torch.zeros(1) for _ in range(11)))
    for piece in copying.pieces:
        piece.tensor.data.fill_(1)
    copying.look()
    with pytest.raises(StateChanged, match=r"^w0, w1, w2, w3, w4, w5, w6, w7, and 3 more changed") as raised:
        copying.witness.check(copying.slot)
    assert raised.value.names == tuple(piece.name for piece in copying.pieces)


# ------------------------------------------------------------------ tensors of inference mode


def test_tensors_of_inference_mode_are_watched_without_their_versions() -> None:
    with torch.inference_mode():
        tensors = [torch.zeros(5), torch.zeros(5)]
    copying = copied(torch.zeros(5), *tensors)
    assert changed_by_now(copying.witness) == []
    with torch.inference_mode():
        tensors[1].fill_(1)
    assert copying.changed() == ["w2"]


def test_a_tensor_beside_one_of_inference_mode_keeps_its_version() -> None:
    with torch.inference_mode():
        inferred = torch.zeros(5)
    copying = copied(inferred, torch.zeros(5))
    copying.pieces[1].tensor.add_(1).sub_(1)
    assert copying.changed() == ["w1"]


# ------------------------------------------------------------------ forms of tensors


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(2, 3, 4, -1).contiguous(memory_format=torch.channels_last)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda base: transposed(base.view(24, -1)),
    "strided": lambda base: strided(base.view(24, -1)),
    "channels last": channels_last,
    "a column": lambda base: base.view(24, -1)[:, 1],
    "permuted": lambda base: base.view(2, 3, 4, -1).permute(3, 1, 0, 2),
}


@pytest.mark.parametrize("form", VIEWS)
def test_a_tensor_in_no_order_is_named_at_any_turn(form: str) -> None:
    for turn in range(1, 30):
        tensor = VIEWS[form](torch.zeros(240))
        assert not tensor.is_contiguous()
        copying = copied(tensor, turn=turn)
        assert changed_by_now(copying.witness) == []
        tensor.data.fill_(1)
        assert changed_by_now(copying.witness) == copying.changed() == ["w0"]


@pytest.mark.parametrize("form", VIEWS)
def test_a_torn_copy_of_a_tensor_in_no_order_is_named_at_any_turn(form: str) -> None:
    for turn in range(1, 30):
        tensor = VIEWS[form](torch.arange(240.0))
        copying = Copying(tensor, turn=turn)
        tensor.data.add_(1)
        copying.copy()
        tensor.data.sub_(1)
        assert changed_by_now(copying.witness) == []
        assert copying.changed() == ["w0"]


@pytest.mark.parametrize("form", VIEWS)
def test_each_element_of_a_tensor_in_no_order_has_its_turn(form: str) -> None:
    tensor = VIEWS[form](torch.arange(240.0))
    copying = copied(tensor)
    seen = set()
    for turn in range(PERIODS * tensor.numel()):
        sample = copying.engine.sample(copying.pieces, turn)
        (value,) = sample.read()[0, :4].view(np.float32)
        seen.add(float(value))
        place = copying.pieces[0].offset + int(sample.place[0])
        assert bytes(copying.slot[place : place + 4]) == bytes(sample.read()[0, :4])
    assert seen == set(tensor.flatten().tolist())


@pytest.mark.parametrize("part", ["whole", "imaginary"])
def test_a_tensor_that_is_conjugated_or_negated_lazily_is_watched_in_memory(part: str) -> None:
    base = torch.complex(torch.ones(9), torch.ones(9))
    tensor = base.conj() if part == "whole" else base.conj().imag
    copying = copied(tensor)
    assert changed_by_now(copying.witness) == []
    base.data.fill_(3 + 3j)
    assert copying.changed() == ["w0"]


def test_a_conjugated_copy_is_not_taken_for_a_torn_one() -> None:
    base = torch.complex(torch.ones(9), torch.ones(9))
    copying = copied(base.conj(), base.conj().imag)
    assert copying.changed() == []


@pytest.mark.parametrize("turn", [0, 5])
def test_empty_tensors_are_passed_over(turn: int) -> None:
    for empty in ([], [torch.zeros(0), torch.zeros(3, 0)]):
        copying = Copying(*empty, turn=turn) if empty else None
        if copying is not None:
            assert copying.changed() == []
    assert changed_by_now(Witness(CpuEngine(), WatchedPieces(()), turn)) == []
    tensor = torch.zeros(3)
    copying = copied(torch.zeros(0), tensor, torch.zeros(4, 0).t(), turn=turn)
    assert changed_by_now(copying.witness) == []
    tensor.data.fill_(1)
    assert copying.changed() == ["w1"]


# ------------------------------------------------------------------ where the witness looks


def test_equal_turns_look_at_the_same_places_and_others_at_others() -> None:
    assert looks(1000, [7, 7, 7]) == [looks(1000, [7])[0]] * 3
    assert len(set(looks(1000, range(100)))) == 100


@given(st.integers(1, 300), st.integers(0, 1 << 40), st.sampled_from([1, 2, 3, 4, 10, 16, 64, 100, 256]))
def test_every_part_of_a_piece_has_its_turn_whatever_the_interval(count: int, first: int, interval: int) -> None:
    """Also with snapshots at every 16th step, and tensors whose size is a power of two."""
    assert set(looks(count, range(first, first + 8 * count * interval, interval))) == set(range(count))


@given(st.integers(1, 300), st.integers(0, 1 << 40))
def test_successive_turns_look_at_every_part_soon(count: int, first: int) -> None:
    assert set(looks(count, range(first, first + PERIODS * count))) == set(range(count))


@given(st.integers(1, 5 * SAMPLE_BYTES), st.integers(0, 2**20), st.integers(0, 7))
def test_a_byte_that_changes_unseen_is_found_within_a_few_turns(count: int, place: int, first: int) -> None:
    tensor = random_bits(torch.uint8, (count,))
    pieces = (SlotTensor(tensor, 0, count, "w"),)
    turns = range(first, first + PERIODS * -(-count // SAMPLE_BYTES))
    witnesses = [Witness(CpuEngine(), WatchedPieces(pieces), turn) for turn in turns]
    assert not any(changed_by_now(witness) for witness in witnesses)
    flip(tensor, place % count)
    assert any(changed_by_now(witness) == ["w"] for witness in witnesses)


def test_the_last_bytes_of_a_tensor_are_looked_at_and_none_behind_them() -> None:
    memory = torch.zeros(SAMPLE_BYTES * 3, dtype=torch.uint8)
    tensor = memory[: SAMPLE_BYTES + 5]
    pieces = (SlotTensor(tensor, 0, tensor.nbytes, "w"),)
    samples = [CpuEngine().sample(pieces, turn) for turn in range(6)]
    assert {(int(each.start[0]), int(each.length[0])) for each in samples} == {(0, SAMPLE_BYTES), (SAMPLE_BYTES, 5)}
    memory[SAMPLE_BYTES + 5 :] = 1
    assert not any(CpuEngine().sample(pieces, turn).read().any() for turn in range(6))


def test_a_sample_is_of_the_time_when_it_was_taken() -> None:
    tensor = torch.zeros(4)
    pieces = (SlotTensor(tensor, 0, 16, "w"),)
    sample = CpuEngine().sample(pieces, 1)
    tensor.fill_(1)
    assert not sample.read().any()


def test_where_to_look_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Counting(monkeypatch, "holdfast.snapshot.copy.engines.Places")
    copying = Copying(torch.zeros(5), torch.zeros(5))
    for _ in range(5):
        copying.copy()
        assert copying.changed() == []
    assert made.count == 1


# ------------------------------------------------------------------ devices that lag behind


class Delayed(CpuEngine):
    """Its copies may still be in progress when the call returns."""

    queues = True


@pytest.mark.parametrize("ended", [False, True])
def test_while_copies_are_under_way_changes_count_until_the_step_ends(ended: bool) -> None:
    copying = copied(torch.zeros(5), torch.zeros(5), engine=Delayed())
    copying.look()
    if ended:
        copying.witness.end()
    copying.pieces[0].tensor.add_(1)
    copying.witness.end()
    copying.pieces[1].tensor.add_(1)
    assert copying.changed() == ([] if ended else ["w0"])


def test_a_check_ends_it_if_nobody_has() -> None:
    copying = copied(torch.zeros(5), engine=Delayed())
    copying.look()
    copying.pieces[0].tensor.add_(1).sub_(1)
    assert copying.changed() == ["w0"]


def test_threads_that_end_and_check_at_once_agree() -> None:
    engine = Delayed()
    for turn in range(50):
        copying = copied(torch.zeros(500), torch.zeros(3), turn=turn, engine=engine)
        copying.look()
        start = threading.Barrier(2, timeout=DEADLINE_S)
        found: list[list[str]] = []

        def end(copying: Copying = copying, start: threading.Barrier = start) -> None:
            start.wait()
            copying.witness.end()
            copying.pieces[1].tensor.add_(1)

        def check(copying: Copying = copying, start: threading.Barrier = start, found: list[list[str]] = found) -> None:
            start.wait()
            found.append(copying.changed())

        threads = [threading.Thread(target=work, daemon=True) for work in (end, check)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        assert found == [[]]


class Failing(CpuEngine):
    """A device that fails once the step runs."""

    failing = False

    def sample(self, pieces: Sequence[SlotTensor], turn: int) -> Sample:
        if self.failing:
            raise HoldfastError("an illegal memory access")
        return super().sample(pieces, turn)


def test_a_device_that_fails_ends_the_copy() -> None:
    engine = Failing()
    copying = copied(torch.zeros(5), engine=engine)
    engine.failing = True
    with pytest.raises(HoldfastError, match="illegal memory access"):
        copying.look()
