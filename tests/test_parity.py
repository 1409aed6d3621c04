"""Gathering parity: whatever order units arrive in, the slot ends as the XOR of the padded units."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ec import Stripes, choose_codec
from smp_daemon.errors import DamagedSnapshot, ProtocolError, StaleEpoch
from smp_daemon.layout import SnapshotId
from smp_daemon.parity import ParityGathering
from smp_daemon.records import ParityRecord, digest

quick = settings(deadline=None, derandomize=True, max_examples=100)

SNAPSHOT = SnapshotId(3, 40)
GROUP = 5


@dataclass(frozen=True)
class Unit:
    stripe: int
    position: int
    content: bytes

    @property
    def digest(self) -> int:
        return digest(memoryview(self.content))


@dataclass
class Gathered:
    """A gathering at `position`, the slot that it writes to, and every unit that it waits for."""

    stripes: Stripes
    position: int
    slot: bytearray
    gathering: ParityGathering
    units: list[Unit]

    def fold(self, unit: Unit) -> None:
        self.gathering.fold(unit.stripe, unit.position, memoryview(unit.content), unit.digest)

    def expected(self) -> bytes:
        """The parity slot, computed without the code under test."""
        held = [r for r in range(self.stripes.count) if r % self.stripes.positions == self.position]
        return b"".join(self.padded_xor(r) for r in held)

    def padded_xor(self, stripe: int) -> bytes:
        total = 0
        for unit in self.units:
            if unit.stripe == stripe:
                total ^= int.from_bytes(unit.content.ljust(self.stripes.unit_bytes, b"\0"), "big")
        return total.to_bytes(self.stripes.unit_bytes, "big")


def start(stripes: Stripes, position: int, seed: int = 1) -> Gathered:
    """A slot full of what an older snapshot left, and units of random bytes."""
    source = random.Random(seed)
    units = [
        Unit(r, contributor, source.randbytes(piece.length))
        for r in range(stripes.count)
        if stripes.is_parity(position, r)
        for _, contributor, piece in stripes.contributors(r)
    ]
    slot = bytearray(source.randbytes(stripes.parity_bytes(position)))
    codec = choose_codec(stripes.data, stripes.parity)
    gathering = ParityGathering(SNAPSHOT, stripes, GROUP, position, codec, memoryview(slot))
    return Gathered(stripes, position, slot, gathering, units)


@st.composite
def gatherings(draw: st.DrawFn) -> Gathered:
    lengths = st.lists(st.integers(1, 40), min_size=1, max_size=2).map(tuple)
    segments = tuple(draw(st.lists(lengths, min_size=2, max_size=5)))
    stripes = Stripes(segments, 1, draw(st.integers(1, 12)))
    return start(stripes, draw(st.integers(0, len(segments) - 1)), draw(st.integers(0, 99)))


def small() -> Gathered:
    """Position 0 of three: its one stripe gets 8 bytes of position 1 and 5 of position 2."""
    return start(Stripes(((8,), (8,), (5,)), 1, 8), 0)


@quick
@given(gatherings(), st.data())
def test_units_in_any_order_and_repeated_give_the_xor_of_padded_units(gathered: Gathered, data: st.DataObject) -> None:
    for unit in data.draw(st.permutations(gathered.units + gathered.units[:3])):
        gathered.fold(unit)
    assert gathered.gathering.complete
    assert bytes(gathered.slot) == gathered.expected()


@quick
@given(gatherings())
def test_a_gathering_is_complete_with_its_last_unit_and_no_earlier(gathered: Gathered) -> None:
    for unit in gathered.units:
        assert not gathered.gathering.complete
        gathered.fold(unit)
    assert gathered.gathering.complete


@quick
@given(gatherings())
def test_the_record_holds_digests_of_the_slot_and_of_every_unit(gathered: Gathered) -> None:
    for unit in gathered.units:
        gathered.fold(unit)
    size = gathered.stripes.unit_bytes
    held = [r for r in range(gathered.stripes.count) if r % gathered.stripes.positions == gathered.position]
    expected = gathered.expected()
    assert gathered.gathering.record() == ParityRecord(
        SNAPSHOT,
        GROUP,
        gathered.position,
        size,
        tuple(digest(memoryview(expected)[i * size : (i + 1) * size]) for i in range(len(held))),
        tuple({unit.position: unit.digest for unit in gathered.units if unit.stripe == r} for r in held),
    )


def test_a_unit_of_a_stripe_that_nobody_fills_is_zero() -> None:
    gathered = start(Stripes(((8,), (8,), (8,), (32,)), 1, 8), 3)
    assert gathered.units == []
    assert gathered.gathering.complete
    assert bytes(gathered.slot) == bytes(8)


def test_an_incomplete_gathering_has_no_record() -> None:
    gathered = small()
    gathered.fold(gathered.units[0])
    with pytest.raises(ValueError, match="lacks 1 units"):
        gathered.gathering.record()


def test_a_duplicate_changes_nothing() -> None:
    gathered = small()
    gathered.fold(gathered.units[0])
    before = bytes(gathered.slot)
    gathered.fold(gathered.units[0])
    assert bytes(gathered.slot) == before
    assert not gathered.gathering.complete


@pytest.mark.parametrize("length", [0, 4, 6, 8])
def test_a_unit_of_another_length_is_refused(length: int) -> None:
    gathered = small()
    before = bytes(gathered.slot)
    with pytest.raises(ProtocolError, match=f"has {length} bytes, not 5"):
        gathered.fold(Unit(0, 2, bytes(length)))
    assert bytes(gathered.slot) == before


@pytest.mark.parametrize("stripe", [-1, 1, 2, 3, 99])
def test_a_stripe_whose_parity_is_elsewhere_is_refused(stripe: int) -> None:
    gathered = small()
    with pytest.raises(ProtocolError, match=f"position 0 holds no parity of stripe {stripe}"):
        gathered.fold(Unit(stripe, 1, bytes(8)))


@pytest.mark.parametrize("position", [-1, 0, 3])
def test_a_position_that_contributes_nothing_is_refused(position: int) -> None:
    gathered = small()
    with pytest.raises(ProtocolError, match=f"position {position} contributes nothing to stripe 0"):
        gathered.fold(Unit(0, position, bytes(8)))


def test_a_unit_that_was_damaged_on_its_way_is_refused() -> None:
    gathered = small()
    unit = gathered.units[0]
    before = bytes(gathered.slot)
    with pytest.raises(DamagedSnapshot, match=r"step 40 .* from position 1"):
        gathered.gathering.fold(0, 1, memoryview(bytes(8)), unit.digest)
    assert bytes(gathered.slot) == before
    gathered.fold(unit)
    gathered.fold(gathered.units[1])
    assert bytes(gathered.slot) == gathered.expected()


@pytest.mark.parametrize("done", [0, 1, 2])
def test_after_cancel_nothing_is_written(done: int) -> None:
    gathered = small()
    for unit in gathered.units[:done]:
        gathered.fold(unit)
    gathered.gathering.cancel()
    before = bytes(gathered.slot)
    for unit in gathered.units:
        with pytest.raises(StaleEpoch, match="step 40"):
            gathered.fold(unit)
    assert bytes(gathered.slot) == before


def test_with_two_parities_each_position_folds_its_own_row() -> None:
    stripes = Stripes(((20,), (13,), (9,), (20,)), 2, 8)
    codec = choose_codec(2, 2)
    slots = {}
    for position in range(4):
        gathered = start(stripes, position, seed=9)
        for unit in [u for u in all_units(stripes) if stripes.is_parity(position, u.stripe)]:
            gathered.fold(unit)
        slots[position] = bytes(gathered.slot)
    for stripe in range(stripes.count):
        data = [memoryview(bytearray(8)) for _ in range(2)]
        parity = [memoryview(bytearray(8)) for _ in range(2)]
        for unit in all_units(stripes):
            if unit.stripe == stripe:
                index = stripes.data_positions(stripe).index(unit.position)
                data[index][: len(unit.content)] = unit.content
        codec.encode(data, parity)
        for row, position in enumerate(stripes.parity_positions(stripe)):
            at = stripes.parity_rank(position, stripe) * 8
            assert slots[position][at : at + 8] == bytes(parity[row])


def all_units(stripes: Stripes) -> list[Unit]:
    source = random.Random(4)
    return [
        Unit(r, contributor, source.randbytes(piece.length))
        for r in range(stripes.count)
        for _, contributor, piece in stripes.contributors(r)
    ]
