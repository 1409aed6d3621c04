"""Which units of a stripe somebody holds, and how to ask for them. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from holdfast.smp_daemon.shared.errors import Unrecoverable
from holdfast.smp_daemon.shared.layout import Layout
from holdfast.smp_daemon.shared.sources import Address, Sources


class Place(NamedTuple):
    """Where a unit stands: `number` in its stripe is 0..k-1 for data, k..k+m-1 for parity."""

    group: int
    stripe: int
    number: int


@dataclass(frozen=True, slots=True)
class StoredUnit:
    """A unit of a stripe that somebody holds.

    Attributes:
        number: of the unit in its stripe: 0..k-1 data, k..k+m-1 parity.
        what: how to ask for it.
        length: its bytes; data units may be shorter than their stripe, the rest is zeros.
    """

    number: int
    address: Address
    what: dict[str, Any]
    length: int


def place_of(layout: Layout, coord: str, index: int) -> Place:
    """Where unit `index` of a shard stands. Raises `Unrecoverable` if its group has no parity."""
    located = layout.locate(coord)
    if not layout.protects(located.group):
        raise Unrecoverable(f"{coord} is lost and its group {located.group} has no parity")
    stripes = layout.stripes(located.group)
    stripe = stripes.stripe_of(located.position, stripes.first_unit(located.position, located.segment) + index)
    return Place(located.group, stripe, stripes.data_positions(stripe).index(located.position))


def padding_of(layout: Layout, group: int, stripe: int) -> list[int]:
    """Data units of a stripe that are all zeros and stored nowhere."""
    stripes = layout.stripes(group)
    stored = {index for index, _, _ in stripes.contributors(stripe)}
    return [index for index in range(stripes.data) if index not in stored]


def stored_units(sources: Sources, group: int, stripe: int) -> Iterator[StoredUnit]:
    """The units of a stripe that somebody is known to hold, data first."""
    layout, stripes = sources.layout, sources.layout.stripes(group)
    for index, position, piece in stripes.contributors(stripe):
        coord = layout.members(group)[position].shards[piece.segment].coord
        address = sources.shards.get(coord)
        if address is not None:
            unit = piece.offset // stripes.unit_bytes
            yield StoredUnit(index, address, {"op": "shard_unit", "coord": coord, "unit": unit}, piece.length)
    length = stripes.stripe_bytes(stripe)
    for row, position in enumerate(stripes.parity_positions(stripe)):
        address = sources.parities.get((group, position))
        if address is not None:
            rank = stripes.parity_rank(position, stripe)
            what = {"op": "parity_unit", "tag": layout.tag(group), "position": position, "unit": rank}
            yield StoredUnit(stripes.data + row, address, what, length)
