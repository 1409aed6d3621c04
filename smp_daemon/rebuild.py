"""Getting bytes back: from this arena, from another SMP, or decoded from what the group still holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ec import Piece, Stripes, TooManyErasures, choose_codec
from smp_daemon.errors import DamagedSnapshot, ProtocolError, Unrecoverable
from smp_daemon.layout import Layout
from smp_daemon.points import reach
from smp_daemon.records import digest
from smp_daemon.sources import Address, Sources
from smp_daemon.store import Store
from smp_daemon.transport import SocketStream, call, connect


@dataclass(frozen=True, slots=True)
class Recovered:
    """A shard that is here again: its slot file, how it came, and the bytes that came over the network for it."""

    file: str
    how: str
    bytes_fetched: int


def recover(store: Store, sources: Sources, coord: str) -> Recovered:
    """Make sure that `store` holds `coord`, checked against its digests. Blocks while bytes travel.

    Raises:
        DamagedSnapshot: a copy that was counted on is damaged; whoever holds it no longer counts it.
        Unrecoverable: too little is left to decode from.
        SmpUnavailable, DeadlineExceeded: a source does not answer.
    """
    file = store.verified(sources.snapshot, coord)
    if file is not None:
        return Recovered(file, "held", 0)
    store.keep_layout(sources.layout)
    with _Fetch(sources) as fetch:
        with store.receiving_shard(sources.snapshot, coord, sources.layout) as view:
            units = list(_units_of(sources.layout, coord))
            for done, (unit, piece) in enumerate(units):
                if done == len(units) // 2:
                    reach("rebuild.middle", sources.snapshot.step)
                out = view[piece.offset : piece.offset + piece.length]
                if coord in sources.shards:
                    fetch.shard_unit(coord, piece.offset // sources.layout.unit_bytes, out)
                else:
                    fetch.decode_unit(coord, unit, out)
        file = store.arena.shard_pool(coord).path_of(sources.snapshot)
        return Recovered(file, "fetched" if coord in sources.shards else "rebuilt", fetch.bytes_fetched)


def heal(store: Store, sources: Sources, group: int, position: int) -> int:
    """Compute the parity that a lost node held, so that the group can lose another. Returns bytes fetched."""
    store.keep_layout(sources.layout)
    stripes = sources.layout.stripes(group)
    members = sources.layout.members(group)
    with _Fetch(sources) as fetch:
        with store.receiving_parity(sources.snapshot, group, position, sources.layout) as gathering:
            for stripe in range(stripes.count):
                if not stripes.is_parity(position, stripe):
                    continue
                for _, contributor, piece in stripes.contributors(stripe):
                    unit = memoryview(bytearray(piece.length))
                    coord = members[contributor].shards[piece.segment].coord
                    fetch.shard_unit(coord, piece.offset // sources.layout.unit_bytes, unit)
                    gathering.fold(stripe, contributor, unit, digest(unit))
        reach("heal.done", sources.snapshot.step)
        return fetch.bytes_fetched


def _units_of(layout: Layout, coord: str) -> list[tuple[int, Piece]]:
    """(unit index of its position, piece) of every unit of a shard."""
    place = layout.locate(coord)
    length, unit_bytes = place.bytes, layout.unit_bytes
    first = 0
    if layout.protects(place.group):
        first = layout.stripes(place.group).first_unit(place.position, place.segment)
    return [
        (first + i, Piece(place.segment, offset, min(unit_bytes, length - offset)))
        for i, offset in enumerate(range(0, length, unit_bytes))
    ]


class _Fetch:
    """Fetches units of one snapshot; keeps a connection to each source and a count of what came."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._streams: dict[Address, SocketStream] = {}
        self.bytes_fetched = 0

    def __enter__(self) -> _Fetch:
        return self

    def __exit__(self, *exc: object) -> None:
        for stream in self._streams.values():
            stream.close()

    def shard_unit(self, coord: str, index: int, out: memoryview) -> None:
        """Unit `index` of a shard that some SMP holds."""
        address = self._sources.shards[coord]
        reply = self._get(address, {"op": "shard_unit", "coord": coord, "unit": index}, out)
        self._check(out, int(reply["digest"]), f"unit {index} of {coord}")

    def decode_unit(self, coord: str, unit: int, out: memoryview) -> None:
        """Unit `unit` of the lost position that holds `coord`, from the rest of its stripe."""
        layout = self._sources.layout
        place = layout.locate(coord)
        if not layout.protects(place.group):
            raise Unrecoverable(f"{coord} is lost and its group {place.group} has no parity")
        stripes = layout.stripes(place.group)
        stripe = stripes.stripe_of(place.position, unit)
        units = self._data_units(layout, stripes, place.group, stripe)
        expected: int | None = None
        for row, owner in enumerate(stripes.parity_positions(stripe)):
            if len(units) == stripes.data:
                break
            if (place.group, owner) in self._sources.parities:
                view, digests = self._parity_unit(stripes, place.group, owner, stripe)
                units[stripes.data + row] = view
                expected = digests.get(place.position, expected)
        index = stripes.data_positions(stripe).index(place.position)
        whole = memoryview(bytearray(stripes.unit_bytes))
        codec = choose_codec(stripes.data, stripes.parity, layout.backend)
        try:
            codec.reconstruct(units, {index: whole})
        except TooManyErasures as error:
            raise Unrecoverable(f"stripe {stripe} of group {place.group}: {error}") from error
        out[:] = whole[: out.nbytes]
        if expected is None or digest(out) != expected:
            raise DamagedSnapshot(f"a decoded unit of {coord} does not match the digest made when it was sealed")

    def _data_units(self, layout: Layout, stripes: Stripes, group: int, stripe: int) -> dict[int, memoryview]:
        """The data units of a stripe that can be had, padded with zeros to whole units."""
        stored = {index: (p, piece) for index, p, piece in stripes.contributors(stripe)}
        units: dict[int, memoryview] = {}
        for index in range(stripes.data):
            whole = memoryview(bytearray(stripes.unit_bytes))
            if index in stored:
                position, piece = stored[index]
                coord = layout.members(group)[position].shards[piece.segment].coord
                if coord not in self._sources.shards:
                    continue
                self.shard_unit(coord, piece.offset // stripes.unit_bytes, whole[: piece.length])
            units[index] = whole
        return units

    def _parity_unit(
        self, stripes: Stripes, group: int, position: int, stripe: int
    ) -> tuple[memoryview, dict[int, int]]:
        whole = memoryview(bytearray(stripes.unit_bytes))
        rank = stripes.parity_rank(position, stripe)
        reply = self._get(
            self._sources.parities[group, position],
            {"op": "parity_unit", "group": group, "position": position, "unit": rank},
            whole,
        )
        self._check(whole, int(reply["digest"]), f"parity unit {rank} of position {position}")
        return whole, {int(p): int(d) for p, d in reply["sources"].items()}

    def _get(self, address: Address, what: dict[str, Any], out: memoryview) -> dict[str, Any]:
        if address not in self._streams:
            self._streams[address] = connect(address)
        stream = self._streams[address]
        message = {**what, "job": self._sources.layout.job, "snapshot": self._sources.snapshot}
        reply, payload = call(stream, message)
        if payload != out.nbytes:
            raise ProtocolError(f"{address} sent {payload} bytes where {out.nbytes} were expected")
        stream.receive_into(out)
        self.bytes_fetched += payload
        return reply

    def _check(self, data: memoryview, expected: int, what: str) -> None:
        if digest(data) != expected:
            raise DamagedSnapshot(f"{what} of {self._sources.snapshot} does not match its digest")
