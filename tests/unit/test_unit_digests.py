"""Digests that are taken while units are copied are those of the bytes in the slot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.smp_daemon.shared import records
from holdfast.snapshot.copy import engines, runs, unit_digests
from holdfast.snapshot.copy.engines import CpuEngine, SlotTensor
from holdfast.snapshot.copy.unit_digests import UnitDigests
from tests.unit.test_engines import Pauses


def pieces_of(lengths: Sequence[int], gaps: Sequence[int]) -> tuple[tuple[SlotTensor, ...], int]:
    """Tensors one after another in a slot, with a gap before each; and the length of the slot."""
    at, found = 0, []
    rng = np.random.default_rng(len(lengths))
    for number, (length, gap) in enumerate(zip(lengths, gaps, strict=True)):
        tensor = torch.from_numpy(rng.integers(0, 256, length, dtype=np.uint8))
        found.append(SlotTensor(tensor, at + gap, length, f"t{number}"))
        at += gap + length
    return tuple(found), at + 1


@pytest.fixture(autouse=True)
def needs_a_compiler() -> None:
    if not runs.digests():
        pytest.skip("holdfast was installed without a compiler, or xxhash exports nothing")


@given(
    rows=st.lists(st.tuples(st.integers(0, 300), st.sampled_from((0, 0, 0, 1, 70))), min_size=1, max_size=30),
    unit_bytes=st.sampled_from((1, 7, 64, 100, 256)),
    shuffled=st.randoms(use_true_random=False),
)
def test_digests_are_those_of_the_slot(rows: list[tuple[int, int]], unit_bytes: int, shuffled: object) -> None:
    pieces, length = pieces_of([row[0] for row in rows], [row[1] for row in rows])
    mixed = list(pieces)
    shuffled.shuffle(mixed)  # type: ignore[attr-defined]
    slot = memoryview(bytearray(b"\xa5" * length))
    digests = UnitDigests(length, unit_bytes)

    CpuEngine().copy(tuple(mixed), slot, Pauses(), digests)

    for piece in pieces:
        assert bytes(slot[piece.offset : piece.offset + piece.bytes]) == piece.tensor.numpy().tobytes()
    assert digests.complete(slot) == records.digest_units(slot, unit_bytes)


@pytest.mark.parametrize("length", [4095, 4096, 4097, 5 * 4096 + 63, 1 << 17])
@pytest.mark.parametrize("shift", [0, 1, 63])
def test_pieces_around_the_size_of_the_fused_loop(length: int, shift: int) -> None:
    pieces, total = pieces_of([length, length, length], [shift, 0, 0])
    slot = memoryview(bytearray(total))
    digests = UnitDigests(total, 4096)
    CpuEngine().copy(pieces, slot, Pauses(), digests)
    assert digests.complete(slot) == records.digest_units(slot, 4096)


def test_only_units_that_hold_something_else_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces, total = pieces_of([4096] * 1000, [100] + [0] * 999)
    read: list[int] = []

    def digest(data: memoryview) -> int:
        read.append(data.nbytes)
        return records.digest(data)

    monkeypatch.setattr(unit_digests, "digest", digest)
    slot = memoryview(bytearray(total))
    digests = UnitDigests(total, 1 << 16)
    CpuEngine().copy(pieces, slot, Pauses(), digests)
    assert digests.complete(slot) == records.digest_units(slot, 1 << 16)
    assert len(read) == 2  # the first has the gap, the last is not full


def test_batches_end_with_units_and_stay_below_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "PIECE_BYTES", 1000)
    pieces, total = pieces_of([2600, 900], [0, 0])
    slot = memoryview(bytearray(total))
    digests = UnitDigests(total, 300)
    paused = Pauses()
    CpuEngine().copy(pieces, slot, paused, digests)
    assert max(paused) <= 1000
    assert sum(paused) == 3500
    assert digests.complete(slot) == records.digest_units(slot, 300)


def test_a_table_is_made_once_for_pieces_and_unit_length() -> None:
    pieces, total = pieces_of([900], [0])
    engine, slot = CpuEngine(), memoryview(bytearray(total))
    for unit_bytes in (300, 450, 300):
        digests = UnitDigests(total, unit_bytes)
        engine.copy(pieces, slot, Pauses(), digests)
        assert digests.complete(slot) == records.digest_units(slot, unit_bytes)
    assert len(engine._tables) == 2 < engines.TABLES


def test_a_piece_that_is_not_plain_is_digested_from_the_slot() -> None:
    tensor = torch.arange(64, dtype=torch.uint8).reshape(8, 8).t()
    piece = SlotTensor(tensor, 0, 64, "transposed")
    slot = memoryview(bytearray(64))
    digests = UnitDigests(64, 16)
    CpuEngine().copy((piece,), slot, Pauses(), digests)
    assert bytes(slot) == tensor.contiguous().numpy().tobytes()
    assert digests.complete(slot) == records.digest_units(slot, 16)
