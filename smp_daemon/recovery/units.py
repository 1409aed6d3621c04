"""Units of one snapshot: who holds them, and how to compute one from its stripe.

A unit that does not match its digest is an erasure, like a unit that nobody holds. A computed unit is checked against
the digest made when it was sealed; the nodes that accumulated it into parity have kept that digest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from holdfast.ec import Codec, TooManyErasures, choose_codec
from holdfast.smp_daemon.shared.errors import DamagedSnapshot, Unrecoverable
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.messages import (
    ParityUnit,
    PartialSum,
    ShardUnit,
    Term,
    UnitReply,
)
from holdfast.smp_daemon.shared.records import digest
from holdfast.smp_daemon.shared.sources import Address, Sources
from holdfast.smp_daemon.storage.holdings import Key, ParityKey, ShardKey

MICROSECONDS = 1e6


class StripePlace(NamedTuple):
    """The place of a unit: its group, stripe, and number in the stripe, 0..k-1 for data, k..k+m-1 for parity."""

    group: int
    stripe: int
    number: int


@dataclass(frozen=True, slots=True)
class HeldUnit:
    """A unit of a stripe that some SMP holds.

    Attributes:
        number: the unit's number in its stripe: 0..k-1 for data, k..k+m-1 for parity.
        address: the SMP that holds it.
        what: the name by which to request it.
        length: its length in bytes. Data units may be shorter than the stripe; the rest is zeros.
    """

    number: int
    address: Address
    what: ShardUnit | ParityUnit
    length: int


def key_of(snapshot: SnapshotId, what: ShardUnit | ParityUnit) -> Key:
    """The shard or the parity that a unit is of."""
    if isinstance(what, ShardUnit):
        return ShardKey(snapshot, what.coord)
    return ParityKey(snapshot, what.tag, what.position)


def place_of(layout: Layout, coord: str, index: int) -> StripePlace:
    """The place of unit `index` of a shard. Raises `Unrecoverable` if its group has no parity."""
    located = layout.locate(coord)
    if not layout.protects(located.group):
        raise Unrecoverable(f"{coord} is lost and its group {located.group} has no parity")
    stripes = layout.stripes(located.group)
    stripe = stripes.stripe_of(located.position, stripes.first_unit(located.position, located.segment) + index)
    return StripePlace(located.group, stripe, stripes.data_positions(stripe).index(located.position))


def place_of_key(layout: Layout, key: Key, index: int) -> StripePlace:
    """The place in its stripe of unit `index` of a shard or a parity. Raises `Unrecoverable` if it belongs to no stripe
    of this layout."""
    if isinstance(key, ShardKey):
        return place_of(layout, key.coord, index)
    group = layout.group_of(key.tag)
    if group is None:
        raise Unrecoverable(f"{key} belongs to no group of this layout")
    stripes = layout.stripes(group)
    stripe = stripes.parity_stripes(key.position)[index]
    return StripePlace(group, stripe, stripes.data + stripes.parity_positions(stripe).index(key.position))


def held_units(sources: Sources, group: int, stripe: int) -> Iterator[HeldUnit]:
    """The units of a stripe that have a known holder, data first."""
    layout, stripes = sources.layout, sources.layout.stripes(group)
    for index, position, piece in stripes.contributors(stripe):
        coord = layout.members(group)[position].shards[piece.segment].coord
        address = sources.shards.get(coord)
        if address is not None:
            unit = piece.offset // stripes.unit_bytes
            yield HeldUnit(index, address, ShardUnit(coord, unit), piece.length)
    length = stripes.stripe_bytes(stripe)
    for row, position in enumerate(stripes.parity_positions(stripe)):
        address = sources.parity_holder(group, position)
        if address is not None:
            rank = stripes.parity_rank(position, stripe)
            what = ParityUnit(layout.tag(group), position, rank)
            yield HeldUnit(stripes.data + row, address, what, length)


class Computation:
    """Computes one unit of a stripe, data or parity, from k others. Not thread-safe; does not block.

    Attributes:
        operands: the other units of the stripe that have a holder, by number, data first.
        needed: how many operands the computation takes. The rest of the k are padding: zeros that are stored nowhere.
        buffers: the operands that have come, by number. Each buffer is at least as long as the unit.
    """

    def __init__(self, sources: Sources, place: StripePlace, length: int, backend: str = "auto") -> None:
        """`length`: length of the unit in bytes. `backend`: see `ec.choose_codec`."""
        layout = sources.layout
        self._backend = backend
        self._place = place
        self._length = length
        self._stripes = layout.stripes(place.group)
        self._digests: dict[int, int] = {}
        held = held_units(sources, place.group, place.stripe)
        stored = {number for number, _, _ in self._stripes.contributors(place.stripe)} | {place.number}
        self._padding = [number for number in range(self._stripes.data) if number not in stored]
        self.operands = {unit.number: unit for unit in held if unit.number != place.number}
        self.needed = self._stripes.data - len(self._padding)
        self.buffers: dict[int, memoryview] = {}

    @property
    def is_data(self) -> bool:
        """Whether it is a data unit, whose digest the holders of its parity know."""
        return self._place.number < self._stripes.data

    def add(self, number: int, buffer: memoryview, reply: UnitReply) -> None:
        """Add operand `number`, which was received into `buffer`. If it is shorter than the unit, the rest of the
        buffer is overwritten with zeros."""
        self._digests |= reply.sources
        if (received := self.operands[number].length) < self._length:
            np.frombuffer(buffer, np.uint8)[received : self._length] = 0
        self.buffers[number] = buffer

    def chain(self, order: Sequence[int]) -> PartialSum:
        """The request to send to the holder of the first operand in `order`, so that helpers sum the operands on the
        way here."""
        factors = self._codec().coefficients([*order, *self._padding], self._place.number)
        units = [self.operands[number] for number in order]
        terms = tuple(Term(unit.address, unit.what, factors.get(unit.number, 0)) for unit in units)
        return PartialSum(terms, self._length, self._position)

    def finish(self, out: memoryview, expected: int | None = None) -> int:
        """Compute the unit into `out` from the operands that have come, and return its digest.

        Args:
            expected: the unit's digest, if known here; for data units it is also learnt from the parity.

        Raises:
            Unrecoverable: too few operands have come.
            DamagedSnapshot: the result does not match the digest, or no digest is known.
        """
        _, stripe, number = self._place
        units = {index: buffer[: out.nbytes] for index, buffer in self.buffers.items()}
        zeros = memoryview(bytes(out.nbytes if self._padding else 0))
        try:
            if out.nbytes:
                self._codec().reconstruct(units | dict.fromkeys(self._padding, zeros), {number: out})
        except TooManyErasures as error:
            raise Unrecoverable(f"stripe {stripe} of group {self._place.group}: {error}") from error
        if expected is None and number < self._stripes.data:
            expected = self._digests.get(self._position)
        if expected is None or digest(out) != expected:
            raise DamagedSnapshot(f"unit {number} of stripe {stripe} was computed and does not match its digest")
        return expected

    def _codec(self) -> Codec:
        return choose_codec(self._stripes.data, self._stripes.parity, self._backend)

    @property
    def _position(self) -> int:
        """The position of the node whose data unit this is. Holders of parity keep the unit's digest under it."""
        return self._stripes.data_positions(self._place.stripe)[self._place.number]
