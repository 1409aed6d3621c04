"""Which replica keeps which part of the state that data-parallel replicas hold alike. Pure.

All shared leaves, in the order of their names, form one run of bytes. It is cut into as many contiguous ranges as
there are replicas. Cuts are allowed at multiples of `ALIGN_BYTES` from the start of a leaf, and at a leaf's end; each
is made at the allowed place nearest to the ideal one. So every part begins at a whole, aligned element, and every share
is within `ALIGN_BYTES` of ``total / replicas``.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.slotfile import DTYPE_BYTES, Leaf

ALIGN_BYTES = 64
"""A cache line, and a multiple of every dtype's size."""

_NUMBER = "(0|[1-9][0-9]{0,17})"
_PART = re.compile(f"(.+)@{_NUMBER}:{_NUMBER}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Part:
    """Elements ``[start, stop)`` of the flattened leaf `name`."""

    name: str
    start: int
    stop: int


def share(leaves: Sequence[Leaf], replicas: int, index: int) -> tuple[Part, ...]:
    """The parts of `leaves` that replica `index` of `replicas` keeps, in the order of their names.

    Every element is kept by exactly one replica, whatever the order of `leaves`. The bytes of two replicas differ by at
    most ``2 * ALIGN_BYTES``. Leaves without bytes are kept by replica 0. A replica's share may be empty.

    Raises:
        ConfigError: there is no such replica, or two leaves have the same name.
    """
    if not 0 <= index < replicas:
        raise ConfigError(f"there is no replica {index} of {replicas}: they count from 0 and are at least 1")
    by_name = _by_name(leaves)
    ordered = [by_name[name] for name in sorted(by_name)]
    ends = list(accumulate(leaf.bytes for leaf in ordered))
    first, last = _cut(ends, replicas, index), _cut(ends, replicas, index + 1)
    parts = []
    for leaf, end in zip(ordered, ends, strict=True):
        begin, size = end - leaf.bytes, DTYPE_BYTES[leaf.dtype]
        start, stop = max(first, begin), min(last, end)
        if start < stop or (not leaf.bytes and index == 0):
            parts.append(
                Part(leaf.name, (start - begin) // size, (stop - begin) // size) if leaf.bytes else whole(leaf)
            )
    return tuple(parts)


def whole(leaf: Leaf) -> Part:
    """The part that covers all of `leaf`."""
    return Part(leaf.name, 0, math.prod(leaf.shape))


def part_name(part: Part, leaf: Leaf) -> str:
    """The name under which `part` of `leaf` is stored: the leaf's own if it is whole, else ``name@start:stop``.

    A whole leaf whose own name already looks like that gets the suffix too. So no two parts of any leaves share a name,
    as long as all names of a slot come from here.
    """
    if part == whole(leaf) and parse_part(leaf.name) is None:
        return leaf.name
    return f"{part.name}@{part.start}:{part.stop}"


def parse_part(name: str) -> tuple[str, int, int] | None:
    """The leaf name, start and stop that `part_name` put into `name`; None for the plain name of a whole leaf."""
    match = _PART.fullmatch(name)
    if match is None or int(match[2]) > int(match[3]):
        return None
    return match[1], int(match[2]), int(match[3])


def same_on_all(digests: Sequence[Mapping[str, object]]) -> frozenset[str]:
    """The names that every rank has with the same digest. All else is private, and never shared.

    Args:
        digests: for each rank, the digest of each of its leaves, or generators, by name.
    """
    found = [frozenset(each.items()) for each in digests]
    return frozenset(name for name, _ in frozenset.intersection(*found)) if found else frozenset()


def _by_name(leaves: Sequence[Leaf]) -> dict[str, Leaf]:
    by_name: dict[str, Leaf] = {}
    for leaf in leaves:
        if leaf.name in by_name:
            raise ConfigError(f"two shared leaves are called {leaf.name!r}: give each tensor a name of its own")
        by_name[leaf.name] = leaf
    return by_name


def _cut(ends: Sequence[int], replicas: int, index: int) -> int:
    """The offset in the run of bytes where the range of replica `index` begins; `ends` are the ends of its leaves."""
    total = ends[-1] if ends else 0
    ideal = total * index  # in units of 1/replicas bytes: exact
    place = bisect_right(ends, ideal // replicas)
    if place == len(ends):
        return total
    begin = ends[place - 1] if place else 0
    low = begin + (ideal // replicas - begin) // ALIGN_BYTES * ALIGN_BYTES
    high = min(low + ALIGN_BYTES, ends[place])
    return low if ideal - low * replicas <= high * replicas - ideal else high
