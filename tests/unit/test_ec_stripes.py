"""The geometry of a group: every byte has its stripe, and bytes lost within the limits of parity are recovered."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.ec import Codec, Piece, Stripes, TooManyErasures, choose_codec, choose_unit_bytes
from holdfast.ec.stripes import DEFAULT_UNIT_BYTES, PAGE_BYTES
from tests.sampling import chosen, costly

Segment = tuple[int, int]
"""(position, index)."""


SHAPES = [(n, k, m) for n in range(2, 11) for m in range(1, n) for k in range(1, n - m + 1)]
"""(positions, k, m) of every geometry of up to ten positions."""


@st.composite
def geometries(draw: st.DrawFn, most: int = 6, longest: int = 40) -> Stripes:
    m = draw(st.integers(1, most - 1))
    k = draw(st.integers(1, most - m))
    positions = draw(st.integers(k + m, most))
    lengths = st.lists(st.integers(0, longest), max_size=3).map(tuple)
    segments = draw(st.lists(lengths, min_size=positions, max_size=positions))
    return Stripes(tuple(segments), k, m, draw(st.integers(1, 12)))


def full(positions: int, k: int, m: int, stripes: int = 1) -> Stripes:
    """A group of positions of equal length, in units of 4 bytes, with at least `stripes` stripes."""
    turns = -(-stripes // positions)
    return Stripes(((4 * k * turns,),) * positions, k, m, unit_bytes=4)


@dataclass(frozen=True)
class Loss:
    stripes: Stripes
    segments: frozenset[Segment]
    parities: frozenset[int]


@st.composite
def losses(draw: st.DrawFn) -> Loss:
    stripes = draw(geometries(longest=20))
    segments = frozenset(s for s in all_segments(stripes) if draw(st.integers(0, 2)) == 0)
    parities = frozenset(p for p in range(stripes.positions) if draw(st.integers(0, 2)) == 0)
    return Loss(stripes, segments, parities)


def all_segments(stripes: Stripes) -> list[Segment]:
    return [(p, index) for p, lengths in enumerate(stripes.segments) for index in range(len(lengths))]


def segments_of(stripes: Stripes, positions: Collection[int]) -> set[Segment]:
    return {(p, index) for p, index in all_segments(stripes) if p in positions}


def loss_of(stripes: Stripes, positions: Collection[int]) -> Loss:
    return Loss(stripes, frozenset(segments_of(stripes, positions)), frozenset(positions))


def a_few_turns(stripes: Stripes) -> range:
    return range(stripes.count + 3 * stripes.positions)


class TestEveryByteHasItsStripe:
    @given(geometries())
    def test_every_byte_is_in_exactly_one_piece(self, stripes: Stripes) -> None:
        held = Counter(
            (position, piece.segment, byte)
            for stripe in range(stripes.count)
            for _, position, piece in stripes.contributors(stripe)
            for byte in range(piece.offset, piece.offset + piece.length)
        )
        stored = [(p, i, byte) for p, i in all_segments(stripes) for byte in range(stripes.segments[p][i])]
        assert held == Counter(stored)

    @given(geometries())
    def test_a_stripe_numbers_its_pieces_by_data_position(self, stripes: Stripes) -> None:
        for stripe in range(stripes.count):
            data = stripes.data_positions(stripe)
            for index, position, piece in stripes.contributors(stripe):
                assert data[index] == position
                assert piece == stripes.piece(position, stripes.unit_of(position, stripe))

    @given(geometries())
    def test_a_piece_is_short_only_at_the_end_of_its_segment(self, stripes: Stripes) -> None:
        for position, unit, piece in pieces_of(stripes):
            ends = piece.offset + piece.length == stripes.segments[position][piece.segment]
            assert piece.length == stripes.unit_bytes or (ends and 1 <= piece.length < stripes.unit_bytes)
            assert unit == stripes.first_unit(position, piece.segment) + piece.offset // stripes.unit_bytes

    @given(geometries())
    def test_after_its_units_a_position_has_only_padding(self, stripes: Stripes) -> None:
        for position in range(stripes.positions):
            units = stripes.units(position)
            assert [stripes.piece(position, units + i) for i in range(3)] == [None] * 3

    @given(geometries())
    def test_there_are_no_more_stripes_than_bytes_need(self, stripes: Stripes) -> None:
        if any(chain.from_iterable(stripes.segments)):
            assert list(stripes.contributors(stripes.count - 1))
        else:
            assert stripes.count == 0

    def test_segments_start_on_units_of_their_own(self) -> None:
        stripes = Stripes(((10, 0, 3), (8,)), data=1, parity=1, unit_bytes=4)
        pieces = [stripes.piece(0, unit) for unit in range(5)]
        assert pieces == [Piece(0, 0, 4), Piece(0, 4, 4), Piece(0, 8, 2), Piece(2, 0, 3), None]
        assert [stripes.first_unit(0, index) for index in range(3)] == [0, 3, 3]
        assert [stripes.units(position) for position in range(2)] == [4, 2]


class TestParityIsDealtLikeCards:
    @pytest.mark.parametrize(
        ("n", "m"), [(n, m) for n in range(2, 19) for m in range(1, n)] + [(64, 4), (60, 8), (63, 14)]
    )
    def test_no_position_is_ever_more_than_one_unit_ahead(self, n: int, m: int) -> None:
        stripes = full(n, n - m, m)
        for stripe in range(3 * n + 1):
            ranks = [stripes.parity_rank(position, stripe) for position in range(n)]
            assert max(ranks) - min(ranks) <= 1
            assert sum(ranks) == stripe * m

    @pytest.mark.parametrize(("n", "k", "m"), chosen(SHAPES, SHAPES[::8]))
    def test_parity_and_data_stand_where_cards_fall(self, n: int, k: int, m: int) -> None:
        stripes = full(n, k, m)
        for stripe, start in zip(range(2 * n), dealt_starts(n, m), strict=False):
            homes = [(start + i) % n for i in range(k + m)]
            assert [*stripes.parity_positions(stripe), *stripes.data_positions(stripe)] == homes
            assert [p for p in range(n) if stripes.is_parity(p, stripe)] == sorted(homes[:m])
            assert [p for p in range(n) if stripes.is_data(p, stripe)] == sorted(homes[m:])

    @given(geometries())
    def test_parity_stripes_are_ranked_from_zero_without_gaps(self, stripes: Stripes) -> None:
        for position in range(stripes.positions):
            held = [r for r in a_few_turns(stripes) if position in stripes.parity_positions(r)]
            assert [stripes.parity_rank(position, r) for r in held] == list(range(len(held)))

    @given(geometries())
    def test_a_parity_slot_holds_the_parities_of_all_stripes_and_no_more(self, stripes: Stripes) -> None:
        held = Counter(chain.from_iterable(stripes.parity_positions(r) for r in range(stripes.count)))
        for position in range(stripes.positions):
            assert stripes.parity_bytes(position) == held[position] * stripes.unit_bytes

    @given(geometries())
    def test_the_parity_stripes_of_a_position_are_those_it_holds_parity_of(self, stripes: Stripes) -> None:
        for position in range(stripes.positions):
            held = [r for r in range(stripes.count) if position in stripes.parity_positions(r)]
            assert stripes.parity_stripes(position) == held
            assert [stripes.parity_stripe_of(position, rank) for rank in range(len(held))] == held


class TestUnitsAndStripesAreInverse:
    @given(geometries(), st.integers(0, 10**9))
    def test_the_stripe_of_a_unit_holds_that_unit(self, stripes: Stripes, first: int) -> None:
        for position in range(stripes.positions):
            for unit in range(first, first + 12):
                stripe = stripes.stripe_of(position, unit)
                assert stripes.is_data(position, stripe)
                assert not stripes.is_parity(position, stripe)
                assert stripes.unit_of(position, stripe) == unit

    @given(geometries())
    def test_the_units_of_a_position_follow_its_data_stripes_in_order(self, stripes: Stripes) -> None:
        for position in range(stripes.positions):
            data = [r for r in a_few_turns(stripes) if position in stripes.data_positions(r)]
            assert [stripes.stripe_of(position, unit) for unit in range(len(data))] == data
            assert [stripes.unit_of(position, stripe) for stripe in data] == list(range(len(data)))


class TestStripeBytes:
    @given(geometries())
    def test_a_stripe_is_as_long_as_its_longest_piece(self, stripes: Stripes) -> None:
        longest = dict.fromkeys(range(stripes.count + 2), 0)
        for position, unit, piece in pieces_of(stripes):
            stripe = stripes.stripe_of(position, unit)
            longest[stripe] = max(longest[stripe], piece.length)
        assert {stripe: stripes.stripe_bytes(stripe) for stripe in longest} == longest

    @given(geometries(), st.integers(0, 1000))
    def test_parity_is_zero_beyond(self, stripes: Stripes, seed: int) -> None:
        group = fill(stripes, choose_codec(stripes.data, stripes.parity, "numpy"), seed)
        for stripe in range(stripes.count):
            for position in stripes.parity_positions(stripe):
                parity = group.parities[position][slice(*parity_range(stripes, position, stripe))]
                assert not any(parity[stripes.stripe_bytes(stripe) :])


Slots = Sequence[bytes]


@dataclass(frozen=True)
class Group:
    """The bytes of a whole group: segments by (position, index) and one parity slot for each position."""

    stripes: Stripes
    segments: Mapping[Segment, bytes]
    parities: Slots


def fill(stripes: Stripes, codec: Codec, seed: int) -> Group:
    source = random.Random(seed)
    segments = {(p, i): source.randbytes(stripes.segments[p][i]) for p, i in all_segments(stripes)}
    slots = [bytearray(stripes.parity_bytes(p)) for p in range(stripes.positions)]
    for stripe in range(stripes.count):
        parity = [
            memoryview(slots[p])[slice(*parity_range(stripes, p, stripe))] for p in stripes.parity_positions(stripe)
        ]
        for index, position, piece in stripes.contributors(stripe):
            unit = padded(segments[position, piece.segment], piece, stripes.unit_bytes)
            codec.accumulate(index, memoryview(unit), dict(enumerate(parity)))
    return Group(stripes, segments, [bytes(slot) for slot in slots])


def recover(group: Group, codec: Codec, loss: Loss) -> Group:
    """The group rebuilt from what survives the loss and from which units are padding."""
    stripes = group.stripes
    segments = {s: bytearray(held) for s, held in group.segments.items()}
    slots = [bytearray(held) for held in group.parities]
    for stripe in range(stripes.count):
        homes = dict(enumerate([*stripes.data_positions(stripe), *stripes.parity_positions(stripe)]))
        lost = [index for index, position in homes.items() if is_lost(loss, position, stripe)]
        units = {i: memoryview(unit_at(group, p, stripe)) for i, p in homes.items() if i not in lost}
        wanted = {index: bytearray(stripes.unit_bytes) for index in lost}
        codec.reconstruct(units, {index: memoryview(unit) for index, unit in wanted.items()})
        for index, unit in wanted.items():
            store(stripes, segments, slots, homes[index], stripe, unit)
    return Group(stripes, {s: bytes(b) for s, b in segments.items()}, [bytes(slot) for slot in slots])


def spoiled(group: Group, loss: Loss) -> Group:
    """The group with the lost bytes replaced by others."""

    def upset(held: bytes) -> bytes:
        return bytes(0xFF ^ byte for byte in held)

    segments = {s: upset(held) if s in loss.segments else held for s, held in group.segments.items()}
    parities = [upset(held) if p in loss.parities else held for p, held in enumerate(group.parities)]
    return Group(group.stripes, segments, parities)


def comes_back(group: Group, codec: Codec, loss: Loss) -> bool:
    """Whether the codec recovers every byte; False if it reports that too many units are lost."""
    try:
        recovered = recover(spoiled(group, loss), codec, loss)
    except TooManyErasures:
        return False
    assert recovered == group
    return True


def is_lost(loss: Loss, position: int, stripe: int) -> bool:
    if loss.stripes.is_parity(position, stripe):
        return position in loss.parities
    piece = loss.stripes.piece(position, loss.stripes.unit_of(position, stripe))
    return piece is not None and (position, piece.segment) in loss.segments


def unit_at(group: Group, position: int, stripe: int) -> bytes:
    stripes = group.stripes
    if stripes.is_parity(position, stripe):
        return group.parities[position][slice(*parity_range(stripes, position, stripe))]
    piece = stripes.piece(position, stripes.unit_of(position, stripe))
    if piece is None:
        return bytes(stripes.unit_bytes)
    return padded(group.segments[position, piece.segment], piece, stripes.unit_bytes)


def store(
    stripes: Stripes,
    segments: Mapping[Segment, bytearray],
    slots: Sequence[bytearray],
    position: int,
    stripe: int,
    unit: bytearray,
) -> None:
    if stripes.is_parity(position, stripe):
        slots[position][slice(*parity_range(stripes, position, stripe))] = unit
        return
    piece = stripes.piece(position, stripes.unit_of(position, stripe))
    if piece is not None:
        end = piece.offset + piece.length
        segments[position, piece.segment][piece.offset : end] = unit[: piece.length]


def parity_range(stripes: Stripes, position: int, stripe: int) -> tuple[int, int]:
    start = stripes.parity_rank(position, stripe) * stripes.unit_bytes
    return start, start + stripes.unit_bytes


def padded(segment: bytes, piece: Piece, unit_bytes: int) -> bytes:
    return segment[piece.offset : piece.offset + piece.length].ljust(unit_bytes, b"\0")


def pieces_of(stripes: Stripes) -> list[tuple[int, int, Piece]]:
    """(position, unit, piece) of every unit that is not padding."""
    everything = (
        (position, unit, stripes.piece(position, unit))
        for position in range(stripes.positions)
        for unit in range(stripes.units(position))
    )
    return [(position, unit, piece) for position, unit, piece in everything if piece is not None]


def every_m_come_back(stripes: Stripes, codec: Codec, seed: int) -> bool:
    group = fill(stripes, codec, seed)
    losses = [loss_of(stripes, lost) for lost in combinations(range(stripes.positions), stripes.parity)]
    return all(comes_back(group, codec, loss) and stripes.decodable(loss.segments, loss.parities) for loss in losses)


class TestLostBytesComeBack:
    @costly()
    @given(geometries(longest=24), st.integers(0, 1000))
    def test_any_m_positions_come_back_whatever_the_shape(self, stripes: Stripes, seed: int) -> None:
        assert every_m_come_back(stripes, choose_codec(stripes.data, stripes.parity), seed)


def dealt_starts(positions: int, parity: int) -> Iterator[int]:
    """Where each stripe starts: after the parity of the last one, or one further if another has started there."""
    start, taken = 0, set[int]()
    while True:
        if len(taken) == positions:
            start, taken = 0, set()
        while start in taken:
            start = (start + 1) % positions
        taken.add(start)
        yield start
        start = (start + parity) % positions


class TestDecodable:
    @given(losses(), st.integers(0, 1000))
    def test_what_it_promises_comes_back_and_nothing_else(self, loss: Loss, seed: int) -> None:
        codec = choose_codec(loss.stripes.data, loss.stripes.parity)
        group = fill(loss.stripes, codec, seed)
        assert loss.stripes.decodable(loss.segments, loss.parities) == comes_back(group, codec, loss)

    @given(geometries())
    def test_losing_every_parity_loses_no_byte(self, stripes: Stripes) -> None:
        assert stripes.decodable([], range(stripes.positions))


class TestWhatIsRefused:
    @pytest.mark.parametrize("positions", range(6))
    def test_a_stripe_has_data_and_parity_and_fits_on_its_positions(self, positions: int) -> None:
        segments = ((8,),) * positions
        for data, parity in product(range(-1, 7), range(-1, 7)):
            if data >= 1 and parity >= 1 and data + parity <= positions:
                assert Stripes(segments, data, parity, 4).count > 0
                continue
            with pytest.raises(ValueError, match=rf"{data}\+{parity} units .*{positions}"):
                Stripes(segments, data, parity, 4)

    @pytest.mark.parametrize("unit_bytes", [0, -1])
    def test_a_unit_has_bytes(self, unit_bytes: int) -> None:
        with pytest.raises(ValueError, match=f"positive, not {unit_bytes}"):
            Stripes(((8,), (8,)), 1, 1, unit_bytes)


class TestChooseUnitBytes:
    @given(st.integers(0, 1 << 40), st.integers(0, 64))
    def test_a_unit_is_whole_pages_and_not_above_the_default(self, longest: int, data: int) -> None:
        unit_bytes = choose_unit_bytes(longest, data)
        assert unit_bytes % PAGE_BYTES == 0
        assert PAGE_BYTES <= unit_bytes <= DEFAULT_UNIT_BYTES

    @given(st.integers(1, DEFAULT_UNIT_BYTES), st.integers(1, 64))
    def test_a_small_state_is_one_unit_for_each_data_position(self, longest: int, data: int) -> None:
        unit_bytes = choose_unit_bytes(longest, data)
        assert (unit_bytes - PAGE_BYTES) * data < longest <= unit_bytes * data

    def test_a_large_state_has_units_of_the_default(self) -> None:
        assert choose_unit_bytes(1 << 40, 3) == DEFAULT_UNIT_BYTES
