"""State that data-parallel replicas hold alike is kept once among them: each copies its share, a restore gathers them.

Replicas are never trusted to hold the same. Leaves that an adapter calls replicated are digested on every replica when
memory is laid out, and shared only if all digests agree.

All shared leaves, in the order of their names, form one run of bytes. It is cut into as many contiguous ranges as
there are replicas. Cuts are allowed at multiples of `ALIGN_BYTES` from the start of a leaf, and at a leaf's end; each
is made at the allowed place nearest to the ideal one. So every part begins at a whole, aligned element, and every share
is within `ALIGN_BYTES` of ``total / replicas``.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import xxhash

from holdfast.smp_daemon.shared.plain import Count, from_plain
from holdfast.smp_daemon.shared.records import digest
from holdfast.smp_daemon.shared.slotfile import DTYPE_BYTES, Leaf
from holdfast.snapshot.collective.agreement import Agreement
from holdfast.snapshot.copy.engines import Sample
from holdfast.snapshot.copy.errors import LayoutChanged
from holdfast.snapshot.copy.tensors import flat, leaf_of, octets
from holdfast.snapshot.state.live import LiveTensor


@dataclass(frozen=True, slots=True)
class Sharing:
    """The caller's share of the leaves that its replicas hold alike.

    Attributes:
        leaves: all shared leaves, whole, by name.
        parts: the caller's part of each that it has one of.
        sets, number: how many sets of replicas there are, and which is the caller's. 0 sets: nobody shares anything.
    """

    leaves: Mapping[str, Leaf] = field(default_factory=dict)
    parts: Mapping[str, Part] = field(default_factory=dict)
    sets: int = 0
    number: int = 0

    def compare(self, agreement: Agreement, sample: Sample | None) -> Callable[[], None]:
        """Begin to compare a sample of the shared leaves. A collective call that returns at once.

        Args:
            sample: the caller's sample; None: it has none, and the comparison fails for its replicas.

        Returns:
            A function that blocks for the outcome, and raises `ReplicasDiffer` unless the caller's replicas hold the
            same.
        """
        if not self.sets:
            return lambda: None

        def values() -> list[int]:
            """For each set the digest and its negative: their minima are opposite if all digests are alike."""
            values = [1 << 62] * 2 * self.sets
            found = 0 if sample is None else digest(sample.read().data) >> 2
            values[2 * self.number : 2 * self.number + 2] = [found, -1 if sample is None else -found]
            return values

        minimum = agreement.minimum(values)

        def check() -> None:
            least, most = minimum()[2 * self.number :][:2]
            if least != -most:
                raise ReplicasDiffer(
                    "data-parallel replicas no longer hold the same state: from now on each keeps all of its own"
                )

        return check

    def divide(self, tensors: Iterator[LiveTensor]) -> Iterator[LiveTensor]:
        """`tensors`, with shared tensors cut down to the caller's parts if they still match their leaves."""
        for item in tensors:
            leaf = self.leaves.get(item.name)
            if leaf is None or leaf_of(item.name, item.tensor) != leaf:
                yield item
                continue
            if (part := self.parts.get(item.name)) is not None:
                name = part_name(part, leaf)
                whole = name == item.name
                yield LiveTensor(name, item.tensor if whole else flat(item.tensor)[part.start : part.stop], item.change)

    def plain(self) -> dict[str, Any]:
        """The shared leaves, for the record."""
        return {name: [leaf.dtype, list(leaf.shape)] for name, leaf in self.leaves.items()}


class ReplicasDiffer(LayoutChanged):
    """Replicas no longer hold the same bits in the leaves that they share."""


ALONE = Sharing()


def agree_on_shares(agreement: Agreement, replica_set: str, tensors: Iterator[LiveTensor]) -> Sharing:
    """Compare the leaves of the caller's replicas, and divide those that are alike. A collective call; reads all leaves
    that might be shared.

    Args:
        replica_set: the same on ranks that are supposed to be replicas of each other.
    """
    sets = [text.decode() for text in agreement.gather(replica_set.encode())]
    if len(set(sets)) == len(sets):
        return ALONE
    members = [rank for rank, other in enumerate(sets) if other == replica_set]
    items = [item for item in tensors if item.replicated and item.tensor.numel() and item.tensor.is_contiguous()]
    candidates = {item.name: item.tensor for item in items}
    mine = {item.name: digest(octets(item.tensor).cpu().numpy().data) for item in items} if len(members) > 1 else {}
    names = _held_by_all(agreement, mine, members)
    if agreement.minimum([-len(names)])() == [0]:
        return ALONE
    ordered = sorted(set(sets))
    number = ordered.index(replica_set)
    leaves = {name: leaf_of(name, candidates[name]) for name in sorted(names)}
    parts = share(list(leaves.values()), len(members), members.index(agreement.rank))
    return Sharing(leaves, {part.name: part for part in parts}, len(ordered), number)


def _held_by_all(agreement: Agreement, mine: Mapping[str, int], members: Sequence[int]) -> frozenset[str]:
    """Names of the leaves that all `members` hold alike; `mine`: the caller's digests. A collective call of all."""
    names = sorted(mine)
    of_names = xxhash.xxh3_64_intdigest("\0".join(names).encode()) >> 2
    least, most = agreement.minimum([of_names, -of_names], members)()
    if agreement.everywhere(least == -most):
        # A digest is alike everywhere if its minimum equals its maximum, so ranks need not exchange their digests.
        digests = [mine[name] >> 2 for name in names]
        found = agreement.minimum([*digests, *(-digest for digest in digests)], members)()
        pairs = zip(names, found[: len(names)], found[len(names) :], strict=True)
        return frozenset(name for name, least, most in pairs if least == -most)
    everyone = [json.loads(text) for text in agreement.gather(json.dumps(mine).encode(), members)]
    return same_on_all(everyone)


def shared_leaves_of(data: object) -> dict[str, Leaf]:
    """The leaves from what `Sharing.plain` returned. Raises `ProtocolError` if `data` has another form."""
    told = from_plain(dict[str, tuple[str, tuple[Count, ...]]], data, "a list of shared leaves")
    return {name: Leaf(name, dtype, shape) for name, (dtype, shape) in told.items()}


def is_part_of(name: str, shared: Mapping[str, Leaf]) -> bool:
    """Whether the leaf `name` of a slot is a shared leaf, or a part of one."""
    part = parse_part(name)
    return name in shared or (part is not None and part[0] in shared)


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
    most ``2 * ALIGN_BYTES``. Leaves without bytes are kept by replica 0. A share may be empty, and has at most one part
    of each leaf.
    """
    ordered = sorted(leaves, key=lambda leaf: leaf.name)
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
