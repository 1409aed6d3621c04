"""Gathering parity: in whatever order units arrive, the slot ends as the XOR of the padded units.

A parity unit is as long as the longest data unit of its stripe; the rest of its place in the slot stays as it was.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.ec import Stripes, choose_codec
from holdfast.smp_daemon.shared.errors import ProtocolError, StaleEpoch
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.records import ParityRecord, digest
from holdfast.smp_daemon.storage.parity import ParityGathering

SNAPSHOT = SnapshotId(3, 40)
TAG = "0123456789abcdef"


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

    def __post_init__(self) -> None:
        self.before = bytes(self.slot)

    @property
    def stripes_held(self) -> list[int]:
        """The stripes whose parity is at `position`. With one parity per stripe, it moves on by one each time."""
        return [r for r in range(self.stripes.count) if r % self.stripes.positions == self.position]

    def accumulate(self, unit: Unit) -> None:
        self.gathering.accumulate(unit.stripe, unit.position, memoryview(unit.content), unit.digest)

    def expected(self) -> bytes:
        """The parity slot, computed without the code under test."""
        slot = bytearray(self.before)
        for rank, parity in enumerate(self.expected_units()):
            at = rank * self.stripes.unit_bytes
            slot[at : at + len(parity)] = parity
        return bytes(slot)

    def expected_units(self) -> list[bytes]:
        return [self.padded_xor(r) for r in self.stripes_held]

    def padded_xor(self, stripe: int) -> bytes:
        contents = [unit.content for unit in self.units if unit.stripe == stripe]
        length = max(map(len, contents), default=0)
        total = 0
        for content in contents:
            total ^= int.from_bytes(content.ljust(length, b"\0"), "big")
        return total.to_bytes(length, "big")


def start(stripes: Stripes, position: int, seed: int = 1) -> Gathered:
    """A slot full of an older snapshot's bytes, and units of random bytes."""
    source = random.Random(seed)
    units = [
        Unit(r, contributor, source.randbytes(piece.length))
        for r in range(stripes.count)
        if stripes.is_parity(position, r)
        for _, contributor, piece in stripes.contributors(r)
    ]
    slot = bytearray(source.randbytes(stripes.parity_bytes(position)))
    codec = choose_codec(stripes.data, stripes.parity)
    gathering = ParityGathering(SNAPSHOT, stripes, TAG, position, codec, memoryview(slot))
    return Gathered(stripes, position, slot, gathering, units)


@st.composite
def gatherings(draw: st.DrawFn) -> Gathered:
    lengths = st.lists(st.integers(1, 40), min_size=1, max_size=2).map(tuple)
    segments = tuple(draw(st.lists(lengths, min_size=2, max_size=5)))
    stripes = Stripes(segments, draw(st.integers(1, len(segments) - 1)), 1, draw(st.integers(1, 12)))
    return start(stripes, draw(st.integers(0, len(segments) - 1)), draw(st.integers(0, 99)))


def small() -> Gathered:
    """Position 0 of three: its one stripe gets 8 bytes from position 1 and 5 from position 2."""
    return start(Stripes(((8,), (8,), (5,)), 2, 1, 8), 0)


def test_a_gathering_is_begun_at_once_however_many_stripes_there_are() -> None:
    """The store's lock is held meanwhile."""
    stripes = Stripes(((1 << 60,), (1 << 59,), (1 << 60,)), 2, 1, 4 << 20)
    gathering = ParityGathering(SNAPSHOT, stripes, TAG, 1, choose_codec(2, 1), memoryview(b""))
    assert not gathering.complete


@given(gatherings(), st.data())
def test_units_in_any_order_and_repeated_give_the_xor_of_padded_units(gathered: Gathered, data: st.DataObject) -> None:
    for unit in data.draw(st.permutations(gathered.units + gathered.units[:3])):
        gathered.accumulate(unit)
    assert gathered.gathering.complete
    assert bytes(gathered.slot) == gathered.expected()


@given(gatherings())
def test_a_gathering_is_complete_with_its_last_unit_and_no_earlier(gathered: Gathered) -> None:
    for unit in gathered.units:
        assert not gathered.gathering.complete
        gathered.accumulate(unit)
    assert gathered.gathering.complete


@given(gatherings())
def test_the_record_holds_digests_of_the_slot_and_of_every_unit(gathered: Gathered) -> None:
    for unit in gathered.units:
        gathered.accumulate(unit)
    expected = gathered.expected_units()
    assert gathered.gathering.record() == ParityRecord(
        SNAPSHOT,
        TAG,
        gathered.position,
        gathered.stripes.unit_bytes,
        tuple(len(parity) for parity in expected),
        tuple(digest(memoryview(parity)) for parity in expected),
        tuple(
            {unit.position: unit.digest for unit in gathered.units if unit.stripe == r} for r in gathered.stripes_held
        ),
    )


def test_a_parity_unit_is_as_long_as_the_longest_data_unit_of_its_stripe() -> None:
    gathered = start(Stripes(((3,), (5,), (2,), (8,)), 2, 1, 8), 0)
    assert [len(unit.content) for unit in gathered.units] == [5, 2]
    for unit in gathered.units:
        gathered.accumulate(unit)
    assert gathered.gathering.record().lengths == (5,)
    assert gathered.slot[5:] == gathered.before[5:8]
    assert bytes(gathered.slot) == gathered.expected()


def test_a_unit_of_a_stripe_that_nobody_fills_is_empty() -> None:
    gathered = start(Stripes(((8,), (8,), (8,), (32,)), 3, 1, 8), 3)
    assert gathered.units == []
    assert gathered.gathering.complete
    assert (gathered.gathering.record().lengths, gathered.gathering.record().sources) == ((0,), ({},))
    assert bytes(gathered.slot) == gathered.before != bytes(8)


def test_an_incomplete_gathering_has_no_record() -> None:
    gathered = small()
    gathered.accumulate(gathered.units[0])
    with pytest.raises(ValueError, match="units of 1 stripes"):
        gathered.gathering.record()


@pytest.mark.parametrize(
    ("stripe", "position", "length", "message"),
    [
        *((0, 2, length, f"has {length} bytes, not 5") for length in (0, 4, 6, 8)),
        *((stripe, 1, 8, f"position 0 .*stripe {stripe}") for stripe in (-1, 1, 2, 3, 99)),  # its parity is elsewhere
        *((0, position, 8, f"position {position} .*stripe 0") for position in (-1, 0, 3)),  # contributes nothing
    ],
)
def test_what_is_no_unit_of_its_stripes_is_refused(stripe: int, position: int, length: int, message: str) -> None:
    gathered = small()
    before = bytes(gathered.slot)
    with pytest.raises(ProtocolError, match=message):
        gathered.accumulate(Unit(stripe, position, bytes(length)))
    assert bytes(gathered.slot) == before


@pytest.mark.parametrize("done", [0, 1, 2])
def test_after_cancel_nothing_is_written(done: int) -> None:
    gathered = small()
    for unit in gathered.units[:done]:
        gathered.accumulate(unit)
    gathered.gathering.cancel()
    before = bytes(gathered.slot)
    for unit in gathered.units:
        with pytest.raises(StaleEpoch, match="step 40"):
            gathered.accumulate(unit)
    assert bytes(gathered.slot) == before


@pytest.mark.parametrize(("k", "m"), [(2, 2), (1, 2), (1, 3), (2, 3)])
def test_with_several_parities_each_position_accumulates_its_own_row(k: int, m: int) -> None:
    stripes = Stripes(((20,), (13,), (9,), (20,), (6, 1)), k, m, 8)
    codec = choose_codec(k, m)
    gathered = [start(stripes, position, seed=9) for position in range(5)]
    for position, each in enumerate(gathered):
        for unit in [u for u in all_units(stripes) if stripes.is_parity(position, u.stripe)]:
            each.accumulate(unit)
    for stripe in range(stripes.count):
        units = [unit for unit in all_units(stripes) if unit.stripe == stripe]
        length = max((len(unit.content) for unit in units), default=0)
        data = [memoryview(bytearray(length)) for _ in range(k)]
        parity = [memoryview(bytearray(length)) for _ in range(m)]
        for unit in units:
            data[stripes.data_positions(stripe).index(unit.position)][: len(unit.content)] = unit.content
        codec.encode(data, parity)
        for row, position in enumerate(stripes.parity_positions(stripe)):
            rank = stripes.parity_rank(position, stripe)
            offset, found = gathered[position].gathering.record().unit(rank)
            assert found == length
            assert gathered[position].slot[offset : offset + length] == bytes(parity[row])
            assert (
                gathered[position].slot[offset + length : offset + 8]
                == (gathered[position].before[offset + length : offset + 8])
            )


def all_units(stripes: Stripes) -> list[Unit]:
    source = random.Random(4)
    return [
        Unit(r, contributor, source.randbytes(piece.length))
        for r in range(stripes.count)
        for _, contributor, piece in stripes.contributors(r)
    ]
