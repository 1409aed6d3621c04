"""Pieces are copied into slot memory and back, bit for bit, and nothing else is touched."""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.snapshot.copy import runs
from holdfast.snapshot.copy.devices import DeviceEngines, _Divided
from holdfast.snapshot.copy.engines import SAMPLE_BYTES, TABLES, CpuEngine, SlotTensor, Transfer
from holdfast.snapshot.copy.tensors import DTYPES, leaf_of, read_leaf
from tests.unit.test_tensors import bits, random_bits

BEFORE = 32
AFTER = 16
FILL = b"\xa5"

Shape = tuple[int, ...]
View = Callable[[torch.Tensor], torch.Tensor]


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(0, -1) if tensor.dim() else tensor


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of `tensor` as every other element of a larger one."""
    if not tensor.dim():
        return tensor
    wide = torch.empty((*tensor.shape[:-1], 2 * tensor.shape[-1]), dtype=tensor.dtype)
    view = wide[..., ::2]
    view.copy_(tensor)
    return view


shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
dtypes = st.sampled_from(sorted(DTYPES, key=str))
views = st.sampled_from([plain, transposed, strided])


class Pauses(list[int]):
    """Notes before how many bytes a copy may pause, and lets it go on at once."""

    def __call__(self, count: int) -> bool:
        self.append(count)
        return True


def piece(tensor: torch.Tensor, offset: int = 0) -> SlotTensor:
    return SlotTensor(tensor, offset, tensor.nbytes)


def row(tensors: list[torch.Tensor]) -> tuple[SlotTensor, ...]:
    """Pieces for `tensors`, one after another, with a gap before and after each."""
    pieces, at = [], BEFORE
    for tensor in tensors:
        pieces.append(piece(tensor, at))
        at += tensor.nbytes + BEFORE
    return tuple(pieces)


def slot_for(pieces: tuple[SlotTensor, ...]) -> bytearray:
    return bytearray(FILL * (max(p.offset + p.bytes for p in pieces) + AFTER))


def copied(pieces: tuple[SlotTensor, ...]) -> bytearray:
    slot = slot_for(pieces)
    CpuEngine().copy(pieces, memoryview(slot), Pauses())
    return slot


def expected(pieces: tuple[SlotTensor, ...]) -> bytes:
    """A slot with each piece's elements in order at its place, and nothing else."""
    slot = slot_for(pieces)
    for p in pieces:
        slot[p.offset : p.offset + p.bytes] = bits(p.tensor)
    return bytes(slot)


def alike(tensor: torch.Tensor, view: View) -> torch.Tensor:
    """Zeros in the shape of `tensor`, seen through `view` if that keeps the shape."""
    zeros = torch.zeros(tensor.shape, dtype=tensor.dtype)
    return view(zeros) if view(zeros).shape == tensor.shape else zeros


def load(slot: bytearray | bytes, *pieces: SlotTensor) -> None:
    CpuEngine().load(pieces, memoryview(bytearray(slot)))


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
@pytest.mark.parametrize("view", [plain, transposed, strided])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (2, 3, 4), (0,), (2, 0, 3)], ids=str)
def test_every_dtype_and_shape_comes_back_bit_for_bit(dtype: torch.dtype, view: View, shape: Shape) -> None:
    tensor = view(random_bits(dtype, shape))
    target = view(random_bits(dtype, shape, seed=2))
    load(copied((piece(tensor, BEFORE),)), piece(target, BEFORE))
    assert bits(target) == bits(tensor)


@given(st.lists(st.tuples(dtypes, shapes, views, views), min_size=1, max_size=6))
def test_the_slot_holds_the_elements_in_order_and_nothing_else_is_touched(
    drawn: list[tuple[torch.dtype, Shape, View, View]],
) -> None:
    tensors = [view(random_bits(dtype, shape, seed)) for seed, (dtype, shape, view, _) in enumerate(drawn)]
    pieces = row(tensors)
    slot = copied(pieces)
    assert bytes(slot) == expected(pieces)
    targets = [alike(tensor, other) for tensor, (*_, other) in zip(tensors, drawn, strict=True)]
    load(slot, *row(targets))
    assert [bits(target) for target in targets] == [bits(tensor) for tensor in tensors]


@pytest.mark.parametrize("count", [1, 5])
def test_a_lazily_conjugated_or_negated_tensor_is_kept_as_it_reads(count: int) -> None:
    base = torch.complex(torch.arange(count) + 1.0, torch.arange(count) + 2.0)
    for tensor in (base.conj(), base.conj().imag):
        slot = copied((piece(tensor, BEFORE),))
        assert torch.equal(read_leaf(memoryview(slot), BEFORE, leaf_of("w", tensor)), tensor)


@pytest.mark.parametrize("count", [1, 5])
def test_a_lazily_conjugated_or_negated_tensor_is_filled_in_place(count: int) -> None:
    def target(part: str) -> torch.Tensor:
        lazy = torch.zeros(count, dtype=torch.complex64).conj()
        return lazy if part == "whole" else lazy.imag

    for part, dtype in (("whole", torch.complex64), ("imaginary", torch.float32)):
        wanted = torch.arange(1, count + 1).to(dtype) * (1 + 2j if dtype.is_complex else 1)
        tensor = target(part)
        load(bits(wanted), piece(tensor))
        assert torch.equal(tensor, wanted)


def test_a_copy_goes_into_the_tensor_that_is_there() -> None:
    parameter = torch.nn.Parameter(torch.zeros(6))
    whole = parameter.data
    wanted = bits(random_bits(torch.float32, (6,)))
    load(wanted, piece(parameter))
    assert whole.data_ptr() == parameter.data_ptr()
    assert bits(whole) == wanted
    assert parameter.requires_grad


@pytest.mark.parametrize("part", ["row", "column"])
def test_a_copy_into_a_view_leaves_its_neighbours_alone(part: str) -> None:
    whole = torch.zeros(4, 4)
    load(b"\xff" * 16, piece(whole[1] if part == "row" else whole.t()[1]))
    filled = whole if part == "row" else whole.t()
    assert filled.isnan().tolist() == [[False] * 4, [True] * 4, [False] * 4, [False] * 4]


@pytest.mark.parametrize("limit", [64, 1000, 4096])
def test_long_pieces_come_back_whatever_the_limit(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(runs, "PIECE_BYTES", limit)
    tensors = [random_bits(torch.float32, (n,), n) for n in (1, 16, 17, 255, 5000)]
    pieces = row(tensors)
    slot = copied(pieces)
    assert bytes(slot) == expected(pieces)
    targets = [torch.zeros_like(tensor) for tensor in tensors]
    load(slot, *row(targets))
    assert list(map(bits, targets)) == list(map(bits, tensors))


def mixed(second: View) -> tuple[SlotTensor, ...]:
    return row([random_bits(torch.float32, (40, 25)), second(random_bits(torch.float64, (30, 20)))])


@pytest.mark.parametrize("second", [plain, transposed])
def test_the_copy_pauses_before_every_batch_with_its_length(monkeypatch: pytest.MonkeyPatch, second: View) -> None:
    monkeypatch.setattr(runs, "PIECE_BYTES", 512)
    pieces = mixed(second)
    slot = slot_for(pieces)
    counts = Pauses()

    def pause(count: int) -> bool:
        written = sum(a != b for a, b in zip(slot, slot_for(pieces), strict=True))
        assert written <= sum(counts), "a batch was copied before its pause"
        return counts(count)

    CpuEngine().copy(pieces, memoryview(slot), pause)
    assert bytes(slot) == expected(pieces)
    assert sum(counts) == sum(p.bytes for p in pieces)


def test_a_batch_is_no_longer_than_two_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "PIECE_BYTES", 512)
    counts = Pauses()
    pieces = mixed(plain)
    CpuEngine().copy(pieces, memoryview(slot_for(pieces)), counts)
    assert max(counts) < 2 * 512
    assert len(counts) > 8


class Stop(Exception):
    """Raised by a pause."""


@pytest.mark.parametrize("after", [0, 1, 5])
def test_an_error_of_the_pause_ends_the_copy(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    monkeypatch.setattr(runs, "PIECE_BYTES", 512)
    pieces = (piece(random_bits(torch.float32, (2048,))),)
    slot = slot_for(pieces)
    counts = Pauses()

    def pause(count: int) -> bool:
        if len(counts) == after:
            raise Stop
        return counts(count)

    with pytest.raises(Stop):
        CpuEngine().copy(pieces, memoryview(slot), pause)
    done = sum(counts)
    assert slot == bits(pieces[0].tensor)[:done] + FILL * (len(slot) - done)


class Counting:
    """Counts the calls of a function."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, target: str = "holdfast.snapshot.copy.runs.make_runs") -> None:
        self.count = 0
        module, _, name = target.rpartition(".")
        self._called = getattr(importlib.import_module(module), name)
        monkeypatch.setattr(target, self._counted)

    def _counted(self, *arguments: Any) -> Any:
        self.count += 1
        return self._called(*arguments)


def test_the_table_of_the_same_pieces_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Counting(monkeypatch)
    engine = CpuEngine()
    pieces = row([torch.zeros(5), torch.zeros(3, 4).t()])
    for value in range(4):
        for p in pieces:
            p.tensor.fill_(value)
        slot = slot_for(pieces)
        engine.copy(pieces, memoryview(slot), Pauses())
        assert bytes(slot) == expected(pieces)
    assert made.count == 1


def test_other_pieces_are_copied_and_looked_at_though_the_first_are_gone() -> None:
    """If a sequence were freed, another one could get its id and the memory of its tensors."""
    engine = CpuEngine()
    for seed in range(5 * TABLES):
        pieces = row([random_bits(torch.uint8, (20 + seed % 3,), seed), random_bits(torch.uint8, (7,), seed + 1)])
        slot = slot_for(pieces)
        engine.copy(pieces, memoryview(slot), Pauses())
        assert bytes(slot) == expected(pieces)
        seen = engine.sample(pieces, 1).read()
        assert [bytes(line) for line in seen] == [bits(p.tensor).ljust(SAMPLE_BYTES, b"\0") for p in pieces]
        del pieces


def test_what_is_copied_again_and_again_is_remembered_whatever_comes_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that exist for one step only are copied between the copies of the state."""
    made = Counting(monkeypatch)
    engine = CpuEngine()
    state = row([torch.zeros(5)])
    slot = memoryview(slot_for(state))
    for _ in range(4 * TABLES):
        engine.copy(state, slot, Pauses())
        engine.copy(row([torch.zeros(5)]), slot, Pauses())
    assert made.count == 1 + 4 * TABLES


def remember(engine: CpuEngine) -> weakref.ref[torch.Tensor]:
    """Copy and sample a tensor to which only `engine` may keep a reference."""
    pieces = row([torch.ones(9)])
    engine.copy(pieces, memoryview(slot_for(pieces)), Pauses())
    engine.sample(pieces, 1)
    return weakref.ref(pieces[0].tensor)


def test_what_is_to_be_forgotten_is_let_go() -> None:
    engine = CpuEngine()
    kept = [remember(engine) for _ in range(2)]
    gc.collect()
    assert all(tensor() is not None for tensor in kept)
    engine.forget()
    gc.collect()
    assert all(tensor() is None for tensor in kept)
    assert remember(engine)() is not None


def test_layouts_that_are_over_are_let_go() -> None:
    engine = CpuEngine()
    kept = [remember(engine) for _ in range(4 * TABLES)]
    gc.collect()
    assert sum(tensor() is not None for tensor in kept) <= TABLES
    for _ in range(2):
        engine.close()
    gc.collect()
    assert all(tensor() is None for tensor in kept)


def test_nothing_and_empty_tensors_are_copied_without_a_pause() -> None:
    pieces = (piece(torch.zeros(0), 8), piece(torch.zeros(3, 0).t(), 8))
    slot = slot_for(pieces)
    pauses = Pauses()
    for some in ((), pieces):
        CpuEngine().copy(some, memoryview(slot), pauses)
        CpuEngine().load(some, memoryview(slot))
    assert slot == FILL * len(slot)
    assert pauses == []


# ------------------------------------------------------------------ several devices


class Named(CpuEngine):
    """Records what it is asked to do."""

    def __init__(self, name: str, notes: list[tuple[object, ...]]) -> None:
        super().__init__()
        self._name = name
        self._notes = notes
        self.given: list[Sequence[SlotTensor]] = []

    def mark(self) -> Transfer:
        self._notes.append((self._name, "mark"))
        return self

    def copy(self, pieces: Sequence[SlotTensor], *rest: Any, **more: Any) -> None:
        self.given.append(pieces)
        self._notes.append((self._name, "copy", *(p.offset for p in pieces)))

    def guard(self) -> None:
        self._notes.append((self._name, "guard"))

    def fence(self) -> None:
        self._notes.append((self._name, "fence"))

    def finish(self) -> None:
        self._notes.append((self._name, "finish"))

    def load(self, pieces: Sequence[SlotTensor], slot: memoryview) -> None:
        self._notes.append((self._name, "load", *(p.offset for p in pieces)))

    def close(self) -> None:
        self._notes.append((self._name, "close"))


META = torch.device("meta")


def test_each_device_moves_its_own_pieces_and_all_take_part_in_everything_else() -> None:
    notes: list[tuple[object, ...]] = []
    engines = DeviceEngines({META}, lambda device, pages: Named(str(device), notes))
    pieces = tuple(piece(torch.zeros(1, device=device), i) for i, device in enumerate(["cpu", "meta", "meta", "cpu"]))
    slot = memoryview(bytearray(8))
    transfer = engines.mark()
    transfer.copy(pieces, slot, Pauses())
    transfer.guard()
    transfer.fence()
    transfer.finish()
    engines.load(pieces, slot)
    engines.close()
    assert notes == [
        *[(name, "mark") for name in ("cpu", "meta")],
        *[("cpu", "copy", 0, 3), ("meta", "copy", 1, 2)],
        *[(name, "guard") for name in ("cpu", "meta")],
        *[(name, "fence") for name in ("cpu", "meta")],
        *[(name, "finish") for name in ("cpu", "meta")],
        *[("cpu", "load", 0, 3), ("meta", "load", 1, 2)],
        *[(name, "close") for name in ("cpu", "meta")],
    ]


def test_a_device_is_given_the_same_sequence_for_the_same_pieces() -> None:
    """An engine recognizes pieces by their sequence."""
    made: dict[str, Named] = {}
    engines = DeviceEngines({META}, lambda device, pages: made.setdefault(str(device), Named(str(device), [])))
    slot = memoryview(bytearray(8))

    def both() -> tuple[SlotTensor, ...]:
        return tuple(piece(torch.zeros(1, device=device), i) for i, device in enumerate(["cpu", "meta"]))

    pieces = both()
    for _ in range(2):
        engines.mark().copy(pieces, slot, Pauses())
    assert made["cpu"].given[0] is made["cpu"].given[1]
    for _ in range(5 * TABLES):
        others = both()
        engines.mark().copy(others, slot, Pauses())
        assert made["cpu"].given[-1][0].tensor is others[0].tensor
        del others


def test_a_device_that_nobody_spoke_of_is_named() -> None:
    engines = DeviceEngines()
    pieces = (piece(torch.zeros(1, device="meta"), 0),)
    with pytest.raises(ConfigError, match="come to meta"):
        engines.sample(pieces, 1)


def test_a_sample_of_several_devices_is_one_sample_of_their_pieces() -> None:
    """Two copy engines stand in for two devices; the second's pieces come between the first's."""
    pieces = row([torch.full((n,), i + 1, dtype=torch.uint8) for i, n in enumerate([5, 200, 0, 7, 100])])
    alone = CpuEngine().sample(pieces, 3)
    engines = DeviceEngines()
    first, second = ([0, 2, 4], [1, 3])
    divided = _Divided(
        pieces, [(CpuEngine(), tuple(pieces[i] for i in part), np.array(part, np.int64)) for part in (first, second)]
    )
    engines._divided[id(pieces), 0] = divided
    together = engines.sample(pieces, 3)
    order = np.argsort(together.index)
    assert together.index[order].tolist() == alone.index.tolist() == [0, 1, 3, 4]
    for name in ("start", "length", "place"):
        assert getattr(together, name)[order].tolist() == getattr(alone, name).tolist()
    assert np.array_equal(together.read()[order], alone.read())
    assert len(engines.sample((), 3).read()) == 0


def test_several_devices_forget_what_each_remembers() -> None:
    engines = DeviceEngines()
    pieces = row([torch.ones(9)])
    engines.mark().copy(pieces, memoryview(slot_for(pieces)), Pauses())
    engines.sample(pieces, 1)
    kept = weakref.ref(pieces[0].tensor)
    del pieces
    gc.collect()
    assert kept() is not None
    engines.forget()
    gc.collect()
    assert kept() is None


def test_unknown_devices_have_no_engine() -> None:
    assert not DeviceEngines({torch.device("cpu")}).queues
    with pytest.raises(ConfigError, match="state on meta"):
        DeviceEngines({torch.device("cpu"), META})
    with pytest.raises(ConfigError, match="state on meta"):
        CpuEngine().cover({META})
