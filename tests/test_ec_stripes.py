"""The geometry of a group: every byte has its stripe, and a loss the parity covers gives its bytes back."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ec import Codec, Piece, Stripes, choose_codec, choose_unit_bytes
from ec.stripes import DEFAULT_UNIT_BYTES, PAGE_BYTES

quick = settings(deadline=None, derandomize=True, max_examples=80)
thorough = settings(deadline=None, derandomize=True, max_examples=400)

Segment = tuple[int, int]
"""(position, index)."""

FIELD = 257


@st.composite
def geometries(
    draw: st.DrawFn, parity: int | None = None, fewest: int = 2, most: int = 6, longest: int = 40
) -> Stripes:
    positions = draw(st.integers(fewest, most))
    lengths = st.lists(st.integers(0, longest), max_size=3).map(tuple)
    segments = draw(st.lists(lengths, min_size=positions, max_size=positions))
    m = draw(st.integers(1, positions - 1)) if parity is None else parity
    return Stripes(tuple(segments), m, draw(st.integers(1, 12)))


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


def a_few_turns(stripes: Stripes) -> range:
    return range(stripes.count + 3 * stripes.positions)


class TestEveryByteHasItsStripe:
    @quick
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

    @quick
    @given(geometries())
    def test_a_stripe_numbers_its_pieces_by_data_position(self, stripes: Stripes) -> None:
        for stripe in range(stripes.count):
            data = stripes.data_positions(stripe)
            for index, position, piece in stripes.contributors(stripe):
                assert data[index] == position
                assert piece == stripes.piece(position, stripes.unit_of(position, stripe))

    @quick
    @given(geometries())
    def test_a_unit_never_straddles_two_segments(self, stripes: Stripes) -> None:
        for position, lengths in enumerate(stripes.segments):
            for unit in range(stripes.units(position)):
                piece = stripes.piece(position, unit)
                assert piece is not None
                assert 1 <= piece.length <= stripes.unit_bytes
                assert piece.offset + piece.length <= lengths[piece.segment]

    @quick
    @given(geometries())
    def test_a_piece_is_short_only_at_the_end_of_its_segment(self, stripes: Stripes) -> None:
        for position, unit, piece in pieces_of(stripes):
            ends = piece.offset + piece.length == stripes.segments[position][piece.segment]
            assert piece.length == stripes.unit_bytes or ends
            assert unit == stripes.first_unit(position, piece.segment) + piece.offset // stripes.unit_bytes

    @quick
    @given(geometries())
    def test_after_its_units_a_position_has_only_padding(self, stripes: Stripes) -> None:
        for position in range(stripes.positions):
            units = stripes.units(position)
            assert [stripes.piece(position, units + i) for i in range(3)] == [None] * 3

    @quick
    @given(geometries())
    def test_there_are_no_more_stripes_than_bytes_need(self, stripes: Stripes) -> None:
        if any(chain.from_iterable(stripes.segments)):
            assert list(stripes.contributors(stripes.count - 1))
        else:
            assert stripes.count == 0

    def test_segments_start_on_units_of_their_own(self) -> None:
        stripes = Stripes(((10, 0, 3), (8,)), parity=1, unit_bytes=4)
        pieces = [stripes.piece(0, unit) for unit in range(5)]
        assert pieces == [Piece(0, 0, 4), Piece(0, 4, 4), Piece(0, 8, 2), Piece(2, 0, 3), None]
        assert [stripes.first_unit(0, index) for index in range(3)] == [0, 3, 3]
        assert [stripes.units(position) for position in range(2)] == [4, 2]


class TestParityRotates:
    def test_one_parity_visits_three_positions_in_turn(self) -> None:
        stripes = Stripes(((8,), (8,), (8,)), parity=1, unit_bytes=4)
        assert [stripes.parity_positions(r) for r in range(4)] == [(0,), (1,), (2,), (0,)]
        assert [stripes.data_positions(r) for r in range(4)] == [(1, 2), (0, 2), (0, 1), (1, 2)]

    def test_two_parities_wrap_around_four_positions(self) -> None:
        stripes = Stripes(((8,),) * 4, parity=2, unit_bytes=4)
        assert [stripes.parity_positions(r) for r in range(4)] == [(0, 1), (1, 2), (2, 3), (3, 0)]
        assert [stripes.data_positions(r) for r in range(4)] == [(2, 3), (0, 3), (0, 1), (1, 2)]

    @quick
    @given(geometries())
    def test_a_stripe_has_k_data_and_m_parity_positions(self, stripes: Stripes) -> None:
        for stripe in a_few_turns(stripes):
            parity, data = stripes.parity_positions(stripe), stripes.data_positions(stripe)
            assert (len(data), len(parity)) == (stripes.data, stripes.parity)
            assert sorted(parity + data) == list(range(stripes.positions))
            assert all(stripes.is_parity(position, stripe) for position in parity)

    @quick
    @given(geometries())
    def test_parity_stripes_are_ranked_from_zero_without_gaps(self, stripes: Stripes) -> None:
        for position in range(stripes.positions):
            held = [r for r in a_few_turns(stripes) if position in stripes.parity_positions(r)]
            assert [stripes.parity_rank(position, r) for r in held] == list(range(len(held)))

    @quick
    @given(geometries())
    def test_a_parity_slot_holds_the_parities_of_all_stripes_and_no_more(self, stripes: Stripes) -> None:
        held = Counter(chain.from_iterable(stripes.parity_positions(r) for r in range(stripes.count)))
        for position in range(stripes.positions):
            assert stripes.parity_bytes(position) == held[position] * stripes.unit_bytes

    @quick
    @given(geometries())
    def test_parity_slots_differ_by_at_most_m_units(self, stripes: Stripes) -> None:
        slots = [stripes.parity_bytes(position) for position in range(stripes.positions)]
        assert max(slots) - min(slots) <= stripes.parity * stripes.unit_bytes

    @quick
    @given(geometries())
    def test_after_whole_turns_every_position_held_m_parities_a_turn(self, stripes: Stripes) -> None:
        for turns in range(4):
            ranks = {stripes.parity_rank(p, turns * stripes.positions) for p in range(stripes.positions)}
            assert ranks == {turns * stripes.parity}


class TestUnitsAndStripesAreInverse:
    @quick
    @given(geometries(), st.integers(0, 10**9))
    def test_the_stripe_of_a_unit_holds_that_unit(self, stripes: Stripes, first: int) -> None:
        for position in range(stripes.positions):
            for unit in range(first, first + 12):
                stripe = stripes.stripe_of(position, unit)
                assert not stripes.is_parity(position, stripe)
                assert stripes.unit_of(position, stripe) == unit

    @quick
    @given(geometries(), st.integers(0, 10**9))
    def test_the_unit_of_a_stripe_lies_in_that_stripe(self, stripes: Stripes, first: int) -> None:
        for stripe in range(first, first + 12):
            for position in stripes.data_positions(stripe):
                assert stripes.stripe_of(position, stripes.unit_of(position, stripe)) == stripe

    @quick
    @given(geometries())
    def test_units_fill_the_data_stripes_in_order(self, stripes: Stripes) -> None:
        for position in range(stripes.positions):
            data = [r for r in a_few_turns(stripes) if position in stripes.data_positions(r)]
            assert [stripes.stripe_of(position, unit) for unit in range(len(data))] == data


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


def recover(group: Group, codec: Codec, lost: Collection[int]) -> Group:
    """The group rebuilt without a look at any byte of the lost positions."""
    stripes = group.stripes
    lengths = {(p, i): stripes.segments[p][i] for p, i in all_segments(stripes)}
    segments = {s: bytearray(n) if s[0] in lost else bytearray(group.segments[s]) for s, n in lengths.items()}
    slots = [bytearray(len(b)) if p in lost else bytearray(b) for p, b in enumerate(group.parities)]
    for stripe in range(stripes.count):
        homes = [*stripes.data_positions(stripe), *stripes.parity_positions(stripe)]
        units = {i: unit_at(group, p, stripe) for i, p in enumerate(homes) if p not in lost}
        wanted = {i: bytearray(stripes.unit_bytes) for i, p in enumerate(homes) if p in lost}
        codec.reconstruct(
            {i: memoryview(unit) for i, unit in units.items()},
            {i: memoryview(unit) for i, unit in wanted.items()},
        )
        for index, unit in wanted.items():
            store(stripes, segments, slots, homes[index], stripe, unit)
    return Group(stripes, {s: bytes(b) for s, b in segments.items()}, [bytes(slot) for slot in slots])


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


class TestLostBytesComeBack:
    @quick
    @given(geometries(parity=1), st.integers(0, 1000))
    def test_any_one_position_comes_back_from_the_others(self, stripes: Stripes, seed: int) -> None:
        codec = choose_codec(stripes.data, 1, "numpy")
        group = fill(stripes, codec, seed)
        for lost in range(stripes.positions):
            assert recover(group, codec, {lost}) == group

    @settings(quick, max_examples=20)
    @given(geometries(parity=2, fewest=3, most=5, longest=24), st.integers(0, 1000))
    def test_any_two_positions_come_back_with_two_parities(self, stripes: Stripes, seed: int) -> None:
        codec = choose_codec(stripes.data, 2, "pyeclib")
        group = fill(stripes, codec, seed)
        for lost in combinations(range(stripes.positions), 2):
            assert recover(group, codec, lost) == group


def dealt_units(lengths: Sequence[int], unit_bytes: int) -> list[int]:
    """For each unit of a position the index of the segment that it was cut from."""
    return [index for index, length in enumerate(lengths) for _ in range(0, length, unit_bytes)]


def dealt_stripes(stripes: Stripes) -> list[tuple[list[int], list[Segment]]]:
    """The positions of the parities of each stripe, and the segments of its data, dealt out like cards."""
    n = stripes.positions
    hands = [dealt_units(lengths, stripes.unit_bytes) for lengths in stripes.segments]
    dealt: list[tuple[list[int], list[Segment]]] = []
    while any(hands):
        first = len(dealt) % n
        parities = (list(range(n)) * 2)[first : first + stripes.parity]
        data = [(p, hands[p].pop(0)) for p in range(n) if p not in parities and hands[p]]
        dealt.append((parities, data))
    return dealt


def rank(rows: Sequence[Sequence[int]]) -> int:
    """Rank of a matrix over the integers modulo `FIELD`."""
    if not rows or not rows[0]:
        return 0
    pivot = next((row for row in rows if row[0]), None)
    if pivot is None:
        return rank([row[1:] for row in rows])
    inverse = pow(pivot[0], -1, FIELD)
    rest = [row for row in rows if row is not pivot]
    reduced = [[(b - row[0] * inverse * a) % FIELD for a, b in zip(pivot, row, strict=True)][1:] for row in rest]
    return 1 + rank(reduced)


def solvable(unknown: Collection[int], equations: Collection[int]) -> bool:
    """Whether parities `equations` of a Cauchy code determine the data units of positions `unknown`."""
    rows = [[pow(100 + j - p, -1, FIELD) for p in unknown] for j in equations]
    return rank(rows) == len(unknown)


def oracle(loss: Loss) -> bool:
    return all(
        solvable(
            [position for position, index in data if (position, index) in loss.segments],
            [j for j, position in enumerate(parities) if position not in loss.parities],
        )
        for parities, data in dealt_stripes(loss.stripes)
    )


class TestDecodable:
    @thorough
    @given(losses())
    def test_it_agrees_with_solving_the_equations(self, loss: Loss) -> None:
        assert loss.stripes.decodable(loss.segments, loss.parities) == oracle(loss)

    @quick
    @given(geometries())
    def test_it_agrees_for_every_set_of_lost_positions(self, stripes: Stripes) -> None:
        for count in range(stripes.positions + 1):
            for lost in combinations(range(stripes.positions), count):
                loss = Loss(stripes, frozenset(segments_of(stripes, lost)), frozenset(lost))
                assert stripes.decodable(loss.segments, loss.parities) == oracle(loss)

    @quick
    @given(geometries())
    def test_up_to_m_lost_positions_are_decodable(self, stripes: Stripes) -> None:
        for lost in combinations(range(stripes.positions), stripes.parity):
            assert stripes.decodable(segments_of(stripes, lost), lost)

    @quick
    @given(geometries())
    def test_losing_every_parity_loses_no_byte(self, stripes: Stripes) -> None:
        assert stripes.decodable([], range(stripes.positions))

    @pytest.mark.parametrize(
        ("segments", "parities", "decodable"),
        [
            ([(0, 0)], [], True),
            ([(0, 0)], [0], True),
            ([(0, 0)], [1], False),
            ([(0, 0), (1, 0)], [], False),
            ([(2, 0)], [0, 1, 2], True),
            ([(2, 0), (0, 0), (1, 0)], [], False),
        ],
    )
    def test_these_losses_are_judged_like_this(
        self, segments: list[Segment], parities: list[int], decodable: bool
    ) -> None:
        stripes = Stripes(((12,), (12,), (0,)), parity=1, unit_bytes=4)
        assert stripes.decodable(segments, parities) is decodable

    def test_two_segments_that_share_no_stripe_may_both_be_lost(self) -> None:
        stripes = Stripes(((4, 4), (4, 4), (4, 4)), parity=1, unit_bytes=4)
        assert stripes.decodable([(0, 0), (1, 0)], [])
        assert not stripes.decodable([(0, 0), (2, 1)], [])


class TestWhatIsRefused:
    @quick
    @given(st.integers(0, 6), st.integers(-2, 9))
    def test_parity_must_leave_room_for_data(self, positions: int, parity: int) -> None:
        segments = ((8,),) * positions
        if 1 <= parity < positions:
            assert Stripes(segments, parity, 4).data == positions - parity
            return
        with pytest.raises(ValueError, match=f"group of {positions} cannot hold {parity} parity"):
            Stripes(segments, parity, 4)

    @pytest.mark.parametrize("unit_bytes", [0, -1])
    def test_a_unit_has_bytes(self, unit_bytes: int) -> None:
        with pytest.raises(ValueError, match=f"positive, not {unit_bytes}"):
            Stripes(((8,), (8,)), 1, unit_bytes)


class TestChooseUnitBytes:
    @quick
    @given(st.integers(0, 1 << 40), st.integers(0, 64))
    def test_a_unit_is_whole_pages_and_not_above_the_default(self, longest: int, data: int) -> None:
        unit_bytes = choose_unit_bytes(longest, data)
        assert unit_bytes % PAGE_BYTES == 0
        assert PAGE_BYTES <= unit_bytes <= DEFAULT_UNIT_BYTES

    @quick
    @given(st.integers(1, DEFAULT_UNIT_BYTES), st.integers(1, 64))
    def test_a_small_state_is_one_unit_for_each_data_position(self, longest: int, data: int) -> None:
        unit_bytes = choose_unit_bytes(longest, data)
        assert (unit_bytes - PAGE_BYTES) * data < longest <= unit_bytes * data

    def test_one_byte_over_whole_pages_takes_another_page(self) -> None:
        assert choose_unit_bytes(2 * PAGE_BYTES, 2) == PAGE_BYTES
        assert choose_unit_bytes(2 * PAGE_BYTES + 1, 2) == 2 * PAGE_BYTES

    def test_a_large_state_has_units_of_the_default(self) -> None:
        assert choose_unit_bytes(1 << 40, 3) == DEFAULT_UNIT_BYTES
