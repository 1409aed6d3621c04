"""Units of one snapshot from the SMPs that hold it: as they are, or computed from the rest of their stripe.

A source that is gone, and a unit that does not match its digest, are erasures: others are asked, for as long as enough
are left. What was computed is checked against the digest that was made when the unit was sealed; that digest is kept by
whoever folded the unit into parity.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from holdfast.ec import TooManyErasures, choose_codec
from holdfast.smp_daemon.net.links import Links
from holdfast.smp_daemon.shared import fields
from holdfast.smp_daemon.shared.counters import Counters
from holdfast.smp_daemon.shared.errors import (
    DamagedSnapshot,
    DeadlineExceeded,
    HoldfastError,
    ProtocolError,
    SmpUnavailable,
    Unrecoverable,
)
from holdfast.smp_daemon.shared.logs import Episodes, about, get_log
from holdfast.smp_daemon.shared.records import digest
from holdfast.smp_daemon.shared.sources import Address, Sources
from holdfast.smp_daemon.shared.stored import StoredUnit, padding_of, place_of, stored_units

log = get_log(__name__)


class Fetcher:
    """Fetches units of one snapshot over connections of its own. Not thread-safe; every call blocks."""

    def __init__(self, sources: Sources, links: Links, counters: Counters, backend: str = "auto") -> None:
        """`backend`: see `ec.choose_codec`."""
        self.sources = sources
        self.links = links
        self._counters = counters
        self._backend = backend
        self._refusals = Episodes(log)
        self._gone: set[Address] = set()
        self._scratch: dict[int, memoryview] = {}

    def shard_unit(self, coord: str, index: int, out: memoryview) -> None:
        """Unit `index` of a shard, from its holder, or computed if that cannot give it.

        Raises:
            Unrecoverable: nobody holds it, and too little of its stripe is left.
            DamagedSnapshot: what was computed does not match its digest.
        """
        address = self.sources.shards.get(coord)
        if address is not None and address not in self._gone:
            try:
                self._get(address, {"op": "shard_unit", "coord": coord, "unit": index}, out)
                return
            except (SmpUnavailable, DeadlineExceeded, DamagedSnapshot, ProtocolError) as error:
                self._note_failure(address, error)
        self.compute(*place_of(self.sources.layout, coord, index), out)

    def compute(self, group: int, stripe: int, number: int, out: memoryview, expected: int | None = None) -> None:
        """Unit `number` of a stripe, data or parity, from k others, into `out`, which is as long as the unit.

        Args:
            expected: its digest, if known here; for data units it is also learnt from the parity.

        Raises:
            Unrecoverable: fewer than k others can be had.
            DamagedSnapshot: the result does not match the digest, or none is known.
        """
        stripes = self.sources.layout.stripes(group)
        padding = padding_of(self.sources.layout, group, stripe)
        units = {index: memoryview(bytes(out.nbytes)) for index in padding if index != number and out.nbytes}
        digests: dict[int, int] = {}
        waiting = [unit for unit in self._stored(group, stripe) if unit.number != number]
        while len(units) < stripes.data and waiting:
            asked = waiting[: stripes.data - len(units)]
            waiting = waiting[len(asked) :]
            for unit, reply in self._ask(asked):
                units[unit.number] = self._padded(unit, out.nbytes)
                digests |= digests_of(reply)
        if expected is None and number < stripes.data:
            expected = digests.get(stripes.data_positions(stripe)[number])
        try:
            if out.nbytes:
                choose_codec(stripes.data, stripes.parity, self._backend).reconstruct(units, {number: out})
        except TooManyErasures as error:
            raise Unrecoverable(f"stripe {stripe} of group {group}: {error}") from error
        if expected is None or digest(out) != expected:
            self._counters.add(units_damaged=1)
            raise DamagedSnapshot(f"unit {number} of stripe {stripe} was computed and does not match its digest")

    def _stored(self, group: int, stripe: int) -> Iterator[StoredUnit]:
        """The units of a stripe that can be asked for, data first."""
        return (unit for unit in stored_units(self.sources, group, stripe) if unit.address not in self._gone)

    def _ask(self, units: list[StoredUnit]) -> Iterator[tuple[StoredUnit, dict[str, Any]]]:
        """Ask for all of them at once; those that came whole, with their replies."""
        asked = []
        for unit in units:
            try:
                self.links.send(unit.address, self._message(unit.what))
                asked.append(unit)
            except (SmpUnavailable, DeadlineExceeded) as error:
                self._note_failure(unit.address, error)
        for unit in asked:
            if unit.address in self._gone:
                continue
            try:
                yield unit, self._receive(unit.address, self._buffer(unit.number)[: unit.length])
            except (SmpUnavailable, DeadlineExceeded, DamagedSnapshot, ProtocolError) as error:
                self._note_failure(unit.address, error)

    def _padded(self, unit: StoredUnit, length: int) -> memoryview:
        """The first `length` bytes of a unit that was received, with zeros where it is shorter."""
        buffer = self._buffer(unit.number)
        if unit.length < length:
            np.frombuffer(buffer, np.uint8)[unit.length : length] = 0
        return buffer[:length]

    def _buffer(self, number: int) -> memoryview:
        if number not in self._scratch:
            self._scratch[number] = memoryview(bytearray(self.sources.layout.unit_bytes))
        return self._scratch[number]

    def _get(self, address: Address, what: dict[str, Any], out: memoryview) -> dict[str, Any]:
        self.links.send(address, self._message(what))
        return self._receive(address, out)

    def _receive(self, address: Address, out: memoryview) -> dict[str, Any]:
        reply = self.links.receive(address, out)
        if digest(out) != fields.number(reply, "digest"):
            self._counters.add(units_damaged=1)
            raise DamagedSnapshot(f"a unit of {self.sources.snapshot} from {address} was damaged on its way")
        return reply

    def _message(self, what: dict[str, Any]) -> dict[str, Any]:
        return {**what, "job": self.sources.layout.job, "snapshot": self.sources.snapshot}

    def _note_failure(self, address: Address, error: HoldfastError) -> None:
        text, extra = "%s does not give a unit of %s: %s", about(self.sources.snapshot, peer=address)
        self._refusals.begin(address, text, address, self.sources.snapshot, error, extra=extra)
        if isinstance(error, SmpUnavailable | DeadlineExceeded):
            self.links.drop(address)
            self._gone.add(address)


def digests_of(reply: dict[str, Any]) -> dict[int, int]:
    """The digests, by position, of what was folded into a parity unit. Raises `ProtocolError`."""
    said = reply.get("sources", {})
    if not isinstance(said, dict) or not all(position.isdecimal() for position in said):
        raise ProtocolError("'sources' must be digests by position")
    return {int(position): fields.number(said, position) for position in said}
