"""Where each byte of a group goes: units, stripes and rotating parity (REFT's RAIM5, for any n and m).

A *position* is a node's place in its group, 0..n-1. Its bytes are its segments (the slot files of its shards)
one after another, each padded with virtual zeros to whole units, so that a unit never straddles two segments.
Padding is neither sent nor stored.

In stripe r the positions r, r+1, ... r+m-1 (mod n) hold parity, and every other position contributes its next
data unit. Parity work and traffic are even: of n stripes in a row each position holds parity in m.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

PAGE_BYTES = 4096
DEFAULT_UNIT_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """The stored part of one unit: `length` bytes at `offset` of segment `segment` of a position."""

    segment: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Stripes:
    """The geometry of one group.

    Attributes:
        segments: for each position, the lengths of its segments in bytes.
        parity: m, parity units per stripe.
        unit_bytes: length of a unit.
    """

    segments: tuple[tuple[int, ...], ...]
    parity: int
    unit_bytes: int

    def __post_init__(self) -> None:
        if not 1 <= self.parity < self.positions:
            raise ValueError(f"a group of {self.positions} cannot hold {self.parity} parity units a stripe")
        if self.unit_bytes < 1:
            raise ValueError(f"unit_bytes must be positive, not {self.unit_bytes}")

    @property
    def positions(self) -> int:
        """n = k + m."""
        return len(self.segments)

    @property
    def data(self) -> int:
        """k, data units per stripe."""
        return self.positions - self.parity

    @property
    def count(self) -> int:
        """Stripes needed to cover the longest position."""
        return max(self._stripe_count_of(p) for p in range(self.positions))

    def units(self, position: int) -> int:
        """Units of `position` that hold at least one stored byte."""
        return sum(self._segment_units(length) for length in self.segments[position])

    def is_parity(self, position: int, stripe: int) -> bool:
        """Whether `position` holds parity in `stripe`."""
        return (position - stripe) % self.positions < self.parity

    def parity_positions(self, stripe: int) -> tuple[int, ...]:
        """Positions holding parity units k, k+1, ... of `stripe`, in that order."""
        return tuple((stripe + j) % self.positions for j in range(self.parity))

    def data_positions(self, stripe: int) -> tuple[int, ...]:
        """Positions contributing data units 0, 1, ... k-1 to `stripe`, in that order."""
        return tuple(p for p in range(self.positions) if not self.is_parity(p, stripe))

    def parity_rank(self, position: int, stripe: int) -> int:
        """How many stripes before `stripe` have parity on `position`: its place in the parity slot, in units."""
        whole, rest = divmod(stripe, self.positions)
        return whole * self.parity + sum(self.is_parity(position, r) for r in range(rest))

    def parity_bytes(self, position: int) -> int:
        """Length of the parity slot of `position`."""
        return self.parity_rank(position, self.count) * self.unit_bytes

    def unit_of(self, position: int, stripe: int) -> int:
        """Index of the unit that data position `position` contributes to `stripe`."""
        return stripe - self.parity_rank(position, stripe)

    def stripe_of(self, position: int, unit: int) -> int:
        """The stripe that unit `unit` of `position` belongs to: the inverse of `unit_of`."""
        whole, rest = divmod(unit, self.data)
        stripe = whole * self.positions
        while self.is_parity(position, stripe) or rest:
            rest -= not self.is_parity(position, stripe)
            stripe += 1
        return stripe

    def piece(self, position: int, unit: int) -> Piece | None:
        """Where unit `unit` of `position` is stored, or None if it is all padding."""
        for index, length in enumerate(self.segments[position]):
            units = self._segment_units(length)
            if unit < units:
                offset = unit * self.unit_bytes
                return Piece(index, offset, min(self.unit_bytes, length - offset))
            unit -= units
        return None

    def first_unit(self, position: int, segment: int) -> int:
        """Index of the first unit of segment `segment` of `position`."""
        return sum(self._segment_units(length) for length in self.segments[position][:segment])

    def contributors(self, stripe: int) -> Iterator[tuple[int, int, Piece]]:
        """(data index, position, piece) of every data unit of `stripe` that is not padding."""
        for index, position in enumerate(self.data_positions(stripe)):
            piece = self.piece(position, self.unit_of(position, stripe))
            if piece is not None:
                yield index, position, piece

    def decodable(self, lost_segments: Collection[tuple[int, int]], lost_parities: Collection[int]) -> bool:
        """Whether every byte can be had although segments (position, index) and parity slots are lost."""
        if not lost_segments:
            return True
        for stripe in range(self.count):
            lost = sum((p, piece.segment) in lost_segments for _, p, piece in self.contributors(stripe))
            if lost and lost + sum(p in lost_parities for p in self.parity_positions(stripe)) > self.parity:
                return False
        return True

    def _segment_units(self, length: int) -> int:
        return -(-length // self.unit_bytes)

    def _stripe_count_of(self, position: int) -> int:
        units = self.units(position)
        return self.stripe_of(position, units - 1) + 1 if units else 0


def choose_unit_bytes(longest_segment: int, data: int) -> int:
    """A unit length in bytes: 4 MiB, or less where that would leave a small state in a single stripe."""
    even = -(-longest_segment // max(1, data))
    return min(DEFAULT_UNIT_BYTES, max(1, -(-even // PAGE_BYTES)) * PAGE_BYTES)
