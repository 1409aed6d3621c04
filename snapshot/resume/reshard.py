"""Which bytes of which old shards make up a new rank's tensors. Pure.

Whatever a rank holds of a tensor is a set of runs of the whole tensor, flattened: one run for a contiguous range or for
rows, one a row for columns. What is held whole is one run from end to end. A plan takes the runs that a new rank wants
from those that old shards hold; it is complete, or says what is missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from holdfast.smp_daemon.shared.slotfile import DTYPE_BYTES

Shape = tuple[int, ...]
Run = tuple[int, int, int]
"""Elements ``[first, last)`` of the flattened whole, and where in its holder's memory they begin."""


@dataclass(frozen=True, slots=True)
class Region:
    """What somebody holds, or wants, of one tensor.

    Attributes:
        key: names the tensor in the whole job.
        whole: its shape there.
        runs: ascending, none of them empty, no two overlap.
    """

    key: str
    dtype: str
    whole: Shape
    runs: tuple[Run, ...]

    @property
    def elements(self) -> int:
        """How many elements of the whole these are."""
        return sum(last - first for first, last, _ in self.runs)


@dataclass(frozen=True, slots=True)
class Held:
    """A region in the slot of `coord`, `offset` bytes from its start."""

    coord: str
    offset: int
    region: Region


@dataclass(frozen=True, slots=True)
class Read:
    """`bytes` at `source` of the slot of `coord` go to `target` of a tensor's memory. All in bytes."""

    coord: str
    source: int
    target: int
    bytes: int


def block_runs(whole: Shape, start: Shape, shape: Shape) -> tuple[Run, ...]:
    """The runs of a block of a tensor; its holder has it dense.

    Raises:
        ValueError: it is not within the whole.
    """
    if not len(whole) == len(start) == len(shape) or any(
        not 0 <= begin <= begin + length <= size for begin, length, size in zip(start, shape, whole, strict=True)
    ):
        raise ValueError(f"a block of {list(shape)} at {list(start)} is not within {list(whole)}")
    if not math.prod(shape):
        return ()
    inner = len(whole)  # from this dimension on all of it is held
    while inner and shape[inner - 1] == whole[inner - 1]:
        inner -= 1
    outer, length = max(0, inner - 1), math.prod(shape[max(0, inner - 1) :])
    strides = [math.prod(whole[dimension + 1 :]) for dimension in range(len(whole))]
    base = sum(begin * stride for begin, stride in zip(start, strides, strict=True))
    runs = []
    for number, place in enumerate(product(*map(range, shape[:outer]))):
        first = base + sum(index * stride for index, stride in zip(place, strides, strict=False))
        runs.append((first, first + length, number * length))
    return tuple(runs)


def range_runs(first: int, last: int) -> tuple[Run, ...]:
    """The run of elements ``[first, last)`` of a flattened tensor; none if it is empty."""
    return ((first, last, 0),) if first < last else ()


class Index:
    """What old shards hold, by key. Those of the coordinate that comes first in `order` are preferred."""

    def __init__(self, held: Iterable[Held], order: Sequence[str]) -> None:
        rank = {coord: number for number, coord in enumerate(order)}
        self._by_key: dict[str, list[Held]] = {}
        for item in held:
            self._by_key.setdefault(item.region.key, []).append(item)
        for items in self._by_key.values():
            items.sort(key=lambda item: (rank[item.coord], item.offset))

    @property
    def keys(self) -> frozenset[str]:
        """Of everything that is held."""
        return frozenset(self._by_key)

    def of(self, key: str) -> Sequence[Held]:
        """Who holds something of it."""
        return self._by_key.get(key, ())


def plan_reads(wanted: Region, index: Index) -> tuple[list[Read], str]:
    """What to read for one tensor, and why that is not all of it; an empty text if it is.

    Every wanted element is read exactly once, and two reads never touch in both places.
    """
    found = index.of(wanted.key)
    if not found:
        return [], f"{wanted.key} is not in the snapshot"
    fitting = [item for item in found if (item.region.whole, item.region.dtype) == (wanted.whole, wanted.dtype)]
    if not fitting:
        other = found[0].region
        return [], (
            f"{wanted.key} is {other.dtype}{list(other.whole)} in the snapshot, "
            f"{wanted.dtype}{list(wanted.whole)} in this job"
        )
    size = DTYPE_BYTES[wanted.dtype]
    reads: list[Read] = []
    missing = list(wanted.runs)
    for item in fitting:
        if not missing:
            break
        for common, source, target in _common(item.region.runs, missing):
            reads.append(Read(item.coord, item.offset + size * source, size * target, size * common))
        missing = list(_without(missing, item.region.runs))
    if missing:
        first, last, _ = missing[0]
        return [], f"{wanted.key}[{first}:{last}], flattened, is in no shard of the snapshot"
    return list(_joined(sorted(reads, key=lambda read: read.target))), ""


def unclaimed(index: Index, wanted: Mapping[str, object] | Iterable[str]) -> list[str]:
    """Keys that are held and that nobody wants, in order."""
    return sorted(index.keys.difference(wanted))


def _common(held: Sequence[Run], wanted: Sequence[Run]) -> Iterator[tuple[int, int, int]]:
    """(elements, where they begin with the holder, where with who wants them) of what is in both."""
    mine, theirs = iter(held), iter(wanted)
    have, want = next(mine, None), next(theirs, None)
    while have is not None and want is not None:
        first, last = max(have[0], want[0]), min(have[1], want[1])
        if first < last:
            yield last - first, have[2] + first - have[0], want[2] + first - want[0]
        if have[1] <= want[1]:
            have = next(mine, None)
        else:
            want = next(theirs, None)


def _without(wanted: Sequence[Run], held: Sequence[Run]) -> Iterator[Run]:
    """What of `wanted` is not in `held`."""
    position = 0
    for first, last, target in wanted:
        reached = first
        while position < len(held) and held[position][1] <= first:
            position += 1
        following = position
        while following < len(held) and held[following][0] < last:
            begin, end, _ = held[following]
            if reached < begin:
                yield reached, begin, target + reached - first
            reached = max(reached, end)
            following += 1
        if reached < last:
            yield reached, last, target + reached - first


def _joined(reads: Iterable[Read]) -> Iterator[Read]:
    """Reads that follow each other in both places, made one."""
    last: Read | None = None
    for read in reads:
        if last is not None and _follows(last, read):
            last = Read(last.coord, last.source, last.target, last.bytes + read.bytes)
            continue
        if last is not None:
            yield last
        last = read
    if last is not None:
        yield last


def _follows(one: Read, other: Read) -> bool:
    ends = one.source + one.bytes, one.target + one.bytes
    return one.coord == other.coord and (other.source, other.target) == ends
