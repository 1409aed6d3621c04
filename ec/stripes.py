"""Where each byte of a group goes: units, stripes and rotating parity (REFT's RAIM5, for any n, k and m).

A *position* is a node's place in its group, 0..n-1. Its bytes are its segments (the slot files of its shards)
one after another, each padded with virtual zeros to whole units, so that a unit never straddles two segments.
Padding is neither sent nor stored.

A stripe covers k + m <= n neighbouring positions, counted around the group: the first m hold parity, the other k
contribute their next data unit. Each stripe starts m positions after the one before, so that parity is dealt out like
cards and no position is ever more than one parity unit ahead of another. If m and n have a common divisor, the starts
would repeat before every position was a start, so each further round starts one position later. After n stripes each
position has held parity in m of them and data in k of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

PAGE_BYTES = 4096
DEFAULT_UNIT_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """The stored part of one unit: `length` bytes at `offset` of segment `segment` of a position."""

    segment: int
    offset: int
    length: int


@dataclass(frozen=True)
class Stripes:
    """The geometry of one group.

    Attributes:
        segments: for each position, the lengths of its segments in bytes.
        data: k, data units per stripe.
        parity: m, parity units per stripe.
        unit_bytes: length of a unit.
    """

    segments: tuple[tuple[int, ...], ...]
    data: int
    parity: int
    unit_bytes: int

    def __post_init__(self) -> None:
        if self.data < 1 or self.parity < 1 or self.data + self.parity > self.positions:
            raise ValueError(f"stripes of {self.data}+{self.parity} units do not fit on {self.positions} positions")
        if self.unit_bytes < 1:
            raise ValueError(f"unit_bytes must be positive, not {self.unit_bytes}")

    @cached_property
    def positions(self) -> int:
        """n, the nodes of the group."""
        return len(self.segments)

    @cached_property
    def count(self) -> int:
        """Stripes needed to cover the longest position."""
        lasts = ((p, self.units(p) - 1) for p in range(self.positions))
        return max(0 if last < 0 else self.stripe_of(p, last) + 1 for p, last in lasts)

    def units(self, position: int) -> int:
        """Units of `position` that hold at least one stored byte."""
        return self._first_units[position][-1]

    def is_parity(self, position: int, stripe: int) -> bool:
        """Whether `position` holds parity in `stripe`."""
        return self._offset(position, stripe) < self.parity

    def is_data(self, position: int, stripe: int) -> bool:
        """Whether `position` contributes a data unit, possibly only padding, to `stripe`."""
        return self.parity <= self._offset(position, stripe) < self.parity + self.data

    def parity_positions(self, stripe: int) -> tuple[int, ...]:
        """Positions holding parity units k, k+1, ... of `stripe`, in that order."""
        return self._members[stripe % self.positions][: self.parity]

    def data_positions(self, stripe: int) -> tuple[int, ...]:
        """Positions contributing data units 0, 1, ... k-1 to `stripe`, in that order."""
        return self._members[stripe % self.positions][self.parity :]

    def parity_rank(self, position: int, stripe: int) -> int:
        """Number of earlier stripes with parity on `position`: the index of this one's unit in the parity slot."""
        turns, rest = divmod(stripe, self.positions)
        return turns * self.parity + self._ranks[position][rest][0]

    def parity_stripe_of(self, position: int, rank: int) -> int:
        """The stripe whose parity is unit `rank` of the parity slot of `position`: the inverse of `parity_rank`."""
        turns, rest = divmod(rank, self.parity)
        held = [stripe for stripe in range(self.positions) if self.is_parity(position, stripe)]
        return turns * self.positions + held[rest]

    def parity_bytes(self, position: int) -> int:
        """Length of the parity slot of `position`."""
        return self.parity_rank(position, self.count) * self.unit_bytes

    def parity_stripes(self, position: int) -> list[int]:
        """Stripes whose parity is in the parity slot of `position`, in slot order."""
        return [stripe for stripe in range(self.count) if self.is_parity(position, stripe)]

    def parity_units(self, position: int) -> int:
        """How many stripes whose parity is on `position` have a data unit that is not padding. Takes the same time for
        any number of stripes: of all stripes with the same remainder modulo n, the first ones have."""

        def turns(pattern: int) -> int:
            left = (self.units(each) - self._ranks[each][pattern][1] for each in self.data_positions(pattern))
            return max(0, -(-max(left) // self.data))

        return sum(turns(pattern) for pattern in range(self.positions) if self.is_parity(position, pattern))

    def unit_of(self, position: int, stripe: int) -> int:
        """Index of the unit that data position `position` contributes to `stripe`."""
        turns, rest = divmod(stripe, self.positions)
        return turns * self.data + self._ranks[position][rest][1]

    def stripe_of(self, position: int, unit: int) -> int:
        """The stripe that unit `unit` of `position` belongs to: the inverse of `unit_of`."""
        turns, rest = divmod(unit, self.data)
        return turns * self.positions + self._data_stripes[position][rest]

    def piece(self, position: int, unit: int) -> Piece | None:
        """Where unit `unit` of `position` is stored, or None if it is all padding."""
        firsts = self._first_units[position]
        for segment, length in enumerate(self.segments[position]):
            if firsts[segment] <= unit < firsts[segment + 1]:
                offset = (unit - firsts[segment]) * self.unit_bytes
                return Piece(segment, offset, min(self.unit_bytes, length - offset))
        return None

    def first_unit(self, position: int, segment: int) -> int:
        """Index of the first unit of segment `segment` of `position`."""
        return self._first_units[position][segment]

    def contributors(self, stripe: int) -> Iterator[tuple[int, int, Piece]]:
        """(data index, position, piece) of every data unit of `stripe` that is not padding."""
        for index, position in enumerate(self.data_positions(stripe)):
            piece = self.piece(position, self.unit_of(position, stripe))
            if piece is not None:
                yield index, position, piece

    def stripe_bytes(self, stripe: int) -> int:
        """Length of the longest data unit of `stripe` without padding. Beyond it, parity is zero."""
        return max((piece.length for _, _, piece in self.contributors(stripe)), default=0)

    def decodable(self, lost_segments: Collection[tuple[int, int]], lost_parities: Collection[int]) -> bool:
        """Whether every byte can be recovered although these segments (position, index) and parity slots are lost."""
        lost_units: dict[int, list[tuple[int, int]]] = {}
        for position, segment in lost_segments:
            firsts = self._first_units[position]
            lost_units.setdefault(position, []).append((firsts[segment], firsts[segment + 1]))
        # All stripes with the same remainder modulo n, a pattern, cover the same positions, and their unit numbers grow
        # evenly. So it is enough to count how many lost runs of units overlap, for any number of stripes.
        for pattern in range(self.positions):
            left = self.parity - sum(position in lost_parities for position in self.parity_positions(pattern))
            if self._most_lost(pattern, lost_units) > max(0, left):
                return False
        return True

    def _most_lost(self, pattern: int, lost_units: Mapping[int, Sequence[tuple[int, int]]]) -> int:
        """The most data units that one stripe of a pattern has lost. `lost_units`: by position, runs (first, end)."""
        changes = []
        for position in self.data_positions(pattern):
            rank = self._ranks[position][pattern][1]
            for first, end in lost_units.get(position, ()):
                begins, ends = (max(0, -((rank - unit) // self.data)) for unit in (first, end))
                if begins < ends:
                    changes += [(begins, 1), (ends, -1)]
        most = lost = 0
        for _, change in sorted(changes):  # at the same stripe, ends sort before begins
            lost += change
            most = max(most, lost)
        return most

    def _offset(self, position: int, stripe: int) -> int:
        """How many positions `position` is after the start of `stripe`."""
        return (position - self._starts[stripe % self.positions]) % self.positions

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """First position of each of n stripes; every position occurs once."""
        round_length = self.positions // math.gcd(self.parity, self.positions)
        return tuple((r * self.parity + r // round_length) % self.positions for r in range(self.positions))

    @cached_property
    def _members(self) -> tuple[tuple[int, ...], ...]:
        """The m + k positions of each of n stripes, parity first."""
        width = self.parity + self.data
        return tuple(tuple((start + j) % self.positions for j in range(width)) for start in self._starts)

    @cached_property
    def _ranks(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """By position and stripe of a turn (n stripes): parity and data units it had in earlier stripes of the turn."""
        table = []
        for position in range(self.positions):
            row, parities, units = [], 0, 0
            for stripe in range(self.positions):
                row.append((parities, units))
                parities += self.is_parity(position, stripe)
                units += self.is_data(position, stripe)
            table.append(tuple(row))
        return tuple(table)

    @cached_property
    def _data_stripes(self) -> tuple[tuple[int, ...], ...]:
        """By position: the stripes of a turn to which it contributes data."""
        return tuple(
            tuple(stripe for stripe in range(self.positions) if self.is_data(position, stripe))
            for position in range(self.positions)
        )

    @cached_property
    def _first_units(self) -> tuple[tuple[int, ...], ...]:
        """By position: the first unit of each segment, then the number of all units."""
        table = []
        for lengths in self.segments:
            firsts = [0]
            for length in lengths:
                firsts.append(firsts[-1] - (-length // self.unit_bytes))
            table.append(tuple(firsts))
        return tuple(table)


def choose_unit_bytes(longest_segment: int, data: int) -> int:
    """A unit length in bytes: 4 MiB, or less where that would leave a small state in a single stripe."""
    even = -(-longest_segment // max(1, data))
    return min(DEFAULT_UNIT_BYTES, max(1, -(-even // PAGE_BYTES)) * PAGE_BYTES)
