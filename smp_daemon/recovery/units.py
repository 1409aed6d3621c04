"""Units of one snapshot: who holds them, how they are requested and checked, how one is computed from its stripe.

A unit that does not match its digest is an erasure, as one that nobody holds. What is computed is checked against the
digest that was made when the unit was sealed; whoever accumulated the unit into parity has kept that digest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from holdfast.ec import Codec, TooManyErasures, choose_codec
from holdfast.smp_daemon.net.links import Links
from holdfast.smp_daemon.shared.counters import Counters
from holdfast.smp_daemon.shared.errors import DamagedSnapshot, ProtocolError, Unrecoverable
from holdfast.smp_daemon.shared.layout import Layout
from holdfast.smp_daemon.shared.messages import (
    AskParityUnit,
    AskPartialSum,
    AskShardUnit,
    ParityUnit,
    PartialSum,
    ShardUnit,
    SumReply,
    Term,
    UnitReply,
)
from holdfast.smp_daemon.shared.plain import from_plain
from holdfast.smp_daemon.shared.records import digest
from holdfast.smp_daemon.shared.sources import Address, Sources

MICROSECONDS = 1e6
_REQUESTS = {ShardUnit: AskShardUnit, ParityUnit: AskParityUnit, PartialSum: AskPartialSum}


class StripePlace(NamedTuple):
    """Which unit of which stripe: `number` in its stripe is 0..k-1 for data, k..k+m-1 for parity."""

    group: int
    stripe: int
    number: int


@dataclass(frozen=True, slots=True)
class HeldUnit:
    """A unit of a stripe that somebody holds.

    Attributes:
        number: of the unit in its stripe: 0..k-1 data, k..k+m-1 parity.
        what: how to request it.
        length: its bytes; data units may be shorter than their stripe, the rest is zeros.
    """

    number: int
    address: Address
    what: ShardUnit | ParityUnit
    length: int


def place_of(layout: Layout, coord: str, index: int) -> StripePlace:
    """The place of unit `index` of a shard. Raises `Unrecoverable` if its group has no parity."""
    located = layout.locate(coord)
    if not layout.protects(located.group):
        raise Unrecoverable(f"{coord} is lost and its group {located.group} has no parity")
    stripes = layout.stripes(located.group)
    stripe = stripes.stripe_of(located.position, stripes.first_unit(located.position, located.segment) + index)
    return StripePlace(located.group, stripe, stripes.data_positions(stripe).index(located.position))


def held_units(sources: Sources, group: int, stripe: int) -> Iterator[HeldUnit]:
    """The units of a stripe that somebody is known to hold, data first."""
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


class UnitReader:
    """Requests units of one snapshot, checks what comes, and computes what is lost.

    It keeps no connections and changes nothing, so threads may share it.
    """

    def __init__(self, sources: Sources, counters: Counters, backend: str = "auto") -> None:
        """`backend`: see `ec.choose_codec`."""
        self.sources = sources
        self.counters = counters
        self.backend = backend

    def send(self, links: Links, address: Address, what: ShardUnit | ParityUnit | PartialSum) -> None:
        """Request a unit, or a partial sum. Raises as `Links.send`."""
        kind = _REQUESTS[type(what)]
        job, snapshot = self.sources.layout.job, self.sources.snapshot
        links.send(address, kind(job=job, snapshot=snapshot, **msgspec.structs.asdict(what)))

    def receive(self, links: Links, address: Address, out: memoryview) -> UnitReply:
        """Fill `out` with the answer to the oldest request there, for a unit. Blocks as `Links.receive`.

        Raises:
            DamagedSnapshot: it does not match its digest.
        """
        reply = from_plain(UnitReply, links.receive(address, out), "an answer with a unit")
        self._check(address, links.digest, reply.digest)
        return reply

    def receive_sum(self, links: Links, address: Address, out: memoryview) -> tuple[float, ...]:
        """The same, for a partial sum; how long each of those on the way, but the last, waited, in seconds."""
        reply = from_plain(SumReply, links.receive(address, out), "an answer with a sum")
        if reply.expected is None:
            raise ProtocolError(f"nobody that {address} has asked knows what the sum must be")
        self._check(address, links.digest, reply.expected)
        return tuple(wait / MICROSECONDS for wait in reply.waits)

    def _check(self, address: Address, found: int, expected: int) -> None:
        if found != expected:
            raise self.damaged(f"a unit of {self.sources.snapshot} from {address} was damaged on its way")

    def damaged(self, text: str) -> DamagedSnapshot:
        """The error for a unit that does not match its digest, which is counted."""
        self.counters.add(units_damaged=1)
        return DamagedSnapshot(text)


class Computation:
    """One unit of a stripe, data or parity, computed from k others. Not thread-safe; does not block.

    Attributes:
        operands: the other units of the stripe that somebody holds, by number, data first.
        needed: how many of them it takes. Padding, which is zeros and stored nowhere, makes up for the rest of k.
        buffers: those that have come, by number; as long as the unit at least.
    """

    def __init__(self, reader: UnitReader, place: StripePlace, length: int) -> None:
        """`length`: bytes of the unit."""
        layout = reader.sources.layout
        self._reader = reader
        self._place = place
        self._length = length
        self._stripes = layout.stripes(place.group)
        self._digests: dict[int, int] = {}
        held = held_units(reader.sources, place.group, place.stripe)
        stored = {number for number, _, _ in self._stripes.contributors(place.stripe)} | {place.number}
        self._padding = [number for number in range(self._stripes.data) if number not in stored]
        self.operands = {unit.number: unit for unit in held if unit.number != place.number}
        self.needed = self._stripes.data - len(self._padding)
        self.buffers: dict[int, memoryview] = {}

    def add(self, number: int, buffer: memoryview, reply: UnitReply) -> None:
        """Operand `number` has come: it begins `buffer`, and what follows is overwritten with zeros."""
        self._digests |= reply.sources
        if (received := self.operands[number].length) < self._length:
            np.frombuffer(buffer, np.uint8)[received : self._length] = 0
        self.buffers[number] = buffer

    def chain(self, order: Sequence[int]) -> PartialSum:
        """What to request of the holder of the first of `order`, so that operands are summed on their way here."""
        factors = self._codec().coefficients([*order, *self._padding], self._place.number)
        units = [self.operands[number] for number in order]
        terms = tuple(Term(unit.address, unit.what, factors.get(unit.number, 0)) for unit in units)
        return PartialSum(terms, self._length, self._position)

    def finish(self, out: memoryview, expected: int | None = None) -> int:
        """Compute the unit into `out`, from the operands that have come; its digest.

        Args:
            expected: its digest, if known here; for data units it is also learnt from the parity.

        Raises:
            Unrecoverable: fewer than k have come.
            DamagedSnapshot: the result does not match the digest, or none is known.
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
            text = f"unit {number} of stripe {stripe} was computed and does not match its digest"
            raise self._reader.damaged(text)
        return expected

    def _codec(self) -> Codec:
        return choose_codec(self._stripes.data, self._stripes.parity, self._reader.backend)

    @property
    def _position(self) -> int:
        """Of the node whose data unit it is; holders of parity keep its digest by that."""
        return self._stripes.data_positions(self._place.stripe)[self._place.number]
