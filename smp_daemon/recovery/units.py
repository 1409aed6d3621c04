"""Units of one snapshot: who holds them, how they are requested and checked, how one is computed from its stripe.

A unit that does not match its digest is an erasure, as one that nobody holds. What is computed is checked against the
digest that was made when the unit was sealed; whoever accumulated the unit into parity has kept that digest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from holdfast.ec import Codec, TooManyErasures, choose_codec
from holdfast.smp_daemon.net.links import Links
from holdfast.smp_daemon.shared import fields
from holdfast.smp_daemon.shared.counters import Counters
from holdfast.smp_daemon.shared.errors import DamagedSnapshot, ProtocolError, Unrecoverable
from holdfast.smp_daemon.shared.layout import Layout
from holdfast.smp_daemon.shared.records import digest
from holdfast.smp_daemon.shared.sources import Address, Sources
from holdfast.smp_daemon.shared.transport import Message

MICROSECONDS = 1e6
MAX_WAIT_US = 1 << 40


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
    what: dict[str, Any]
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
            yield HeldUnit(index, address, {"op": "shard_unit", "coord": coord, "unit": unit}, piece.length)
    length = stripes.stripe_bytes(stripe)
    for row, position in enumerate(stripes.parity_positions(stripe)):
        address = sources.parities.get((group, position))
        if address is not None:
            rank = stripes.parity_rank(position, stripe)
            what = {"op": "parity_unit", "tag": layout.tag(group), "position": position, "unit": rank}
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

    def send(self, links: Links, address: Address, what: Message) -> None:
        """Request a unit, or a partial sum. Raises as `Links.send`."""
        links.send(address, {**what, "job": self.sources.layout.job, "snapshot": self.sources.snapshot})

    def receive(self, links: Links, address: Address, out: memoryview, field: str = "digest") -> Message:
        """Fill `out` with the answer to the oldest request there, and return the reply. Blocks as `Links.receive`.

        Args:
            field: of the reply, with the digest that `out` must have.

        Raises:
            DamagedSnapshot: it has another digest.
        """
        reply = links.receive(address, out)
        if digest(out) != fields.number(reply, field):
            raise self.damaged(f"a unit of {self.sources.snapshot} from {address} was damaged on its way")
        return reply

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

    def add(self, number: int, buffer: memoryview, reply: Message) -> None:
        """Operand `number` has come: it begins `buffer`, and what follows is overwritten with zeros.

        Raises:
            ProtocolError: the reply is none to a request for a unit.
        """
        self._digests |= digests_of(reply)
        if (received := self.operands[number].length) < self._length:
            np.frombuffer(buffer, np.uint8)[received : self._length] = 0
        self.buffers[number] = buffer

    def chain(self, order: Sequence[int]) -> Message:
        """What to request of the holder of the first of `order`, so that operands are summed on their way here."""
        factors = self._codec().coefficients([*order, *self._padding], self._place.number)
        units = [self.operands[number] for number in order]
        terms = [{"at": list(u.address), "what": u.what, "factor": factors.get(u.number, 0)} for u in units]
        return {"op": "partial", "terms": terms, "length": self._length, "position": self._position}

    def finish(self, out: memoryview, expected: int | None = None) -> None:
        """Compute the unit into `out`, from the operands that have come.

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

    def _codec(self) -> Codec:
        return choose_codec(self._stripes.data, self._stripes.parity, self._reader.backend)

    @property
    def _position(self) -> int:
        """Of the node whose data unit it is; holders of parity keep its digest by that."""
        return self._stripes.data_positions(self._place.stripe)[self._place.number]


def digests_of(reply: Message) -> dict[int, int]:
    """The digests, by position, of what was accumulated into a parity unit. Raises `ProtocolError`."""
    said = reply.get("sources", {})
    if not isinstance(said, dict) or not all(position.isdecimal() for position in said):
        raise ProtocolError("'sources' must be digests by position")
    return {int(position): fields.number(said, position) for position in said}


def waits_of(reply: Message) -> tuple[float, ...]:
    """How long each helper of a chain, but the last, waited for the next, in seconds. Raises `ProtocolError`."""
    said = reply.get("waits", [])
    if not isinstance(said, list):
        raise ProtocolError("'waits' must be a list of microseconds")
    return tuple(fields.number({"wait": wait}, "wait", MAX_WAIT_US) / MICROSECONDS for wait in said)
