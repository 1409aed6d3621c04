"""Which bytes of which shards make up a rank's tensors, in the same world or another. Pure.

A rank's part of a tensor is a set of runs of the whole tensor, flattened: one run for a contiguous range or for rows,
one run per row for columns. A tensor held whole is one run from end to end. A plan takes the runs that a rank wants
from the runs that shards hold; it is complete, or says what is missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from holdfast.smp_daemon.shared.errors import StateMismatch
from holdfast.smp_daemon.shared.logs import some
from holdfast.smp_daemon.shared.slotfile import DTYPE_BYTES, Leaf
from holdfast.snapshot.copy.tensors import Block, leaf_of
from holdfast.snapshot.state.live import LiveTensor
from holdfast.snapshot.state.record import HeldLeaf
from holdfast.snapshot.state.replicas import is_part_of, parse_part

Shape = tuple[int, ...]
Run = tuple[int, int, int]
"""Elements ``[first, last)`` of the flattened whole, and the element of its holder's memory where they begin."""


@dataclass(frozen=True, slots=True)
class Region:
    """The part of one tensor that a rank holds or wants.

    Attributes:
        key: the tensor's name in the whole job.
        whole: the shape of the whole tensor.
        runs: ascending, not empty, without overlaps.
    """

    key: str
    dtype: str
    whole: Shape
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """A region in the slot of `coord`, `offset` bytes from its start."""

    coord: str
    offset: int
    region: Region


@dataclass(frozen=True, slots=True)
class Read:
    """Copies `bytes` from offset `source` in the slot of `coord` to offset `target` in a tensor's memory. In bytes."""

    coord: str
    source: int
    target: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Fill:
    """A live tensor, and the reads that fill it."""

    item: LiveTensor
    reads: list[Read]


def block_runs(whole: Shape, start: Shape, shape: Shape) -> tuple[Run, ...]:
    """The runs of a block of a tensor. The holder's memory of the block is dense.

    Raises:
        ValueError: the block is not within the whole.
    """
    if not len(whole) == len(start) == len(shape) or any(
        not 0 <= begin <= begin + length <= size for begin, length, size in zip(start, shape, whole, strict=True)
    ):
        raise ValueError(f"a block of {list(shape)} at {list(start)} is not within {list(whole)}")
    if not math.prod(shape):
        return ()
    inner = len(whole)  # from this dimension on, the block covers the whole
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
    """The run of elements ``[first, last)`` of a flattened tensor; none if the range is empty."""
    return ((first, last, 0),) if first < last else ()


Index = dict[str, list[Held]]
"""What old shards hold, by key, what is preferred first."""


def index_of(held: Iterable[Held], order: Sequence[str]) -> Index:
    """An index of what is held. Shards of coordinates that come first in `order` are preferred."""
    rank = {coord: number for number, coord in enumerate(order)}
    index: Index = {}
    for item in sorted(held, key=lambda item: (rank[item.coord], item.offset)):
        index.setdefault(item.region.key, []).append(item)
    return index


def plan_reads(wanted: Region, index: Index) -> tuple[list[Read], str]:
    """The reads that fill one tensor; or none, and why it cannot be filled. The text is empty if it can.

    Every wanted element is read exactly once. Reads that are adjacent in both source and target are merged.
    """
    found = index.get(wanted.key)
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
        common, missing = _divided(missing, item.region.runs)
        for count, source, target in common:
            reads.append(Read(item.coord, item.offset + size * source, size * target, size * count))
    if missing:
        first, last, _ = missing[0]
        return [], f"{wanted.key}[{first}:{last}], flattened, is in no shard of the snapshot"
    return list(_joined(sorted(reads, key=lambda read: read.target))), ""


def plan_fills(live: Iterable[LiveTensor], index: Index, *, divided: bool) -> tuple[list[Fill], list[str]]:
    """The reads that fill each live tensor, and why some cannot be filled.

    Args:
        divided: whether a tensor's block counts, so that each is a part of the whole. Else a rank's part is all there
            is of it.

    Raises:
        StateMismatch: see `region_of`.
    """
    fills, problems = [], []
    for item in live:
        leaf = leaf_of(item.name, item.tensor)
        whole, runs = region_of(item.name, leaf.shape, item.block if divided else None)
        reads, problem = plan_reads(Region(item.name, leaf.dtype, whole, runs), index)
        problems += [problem] * bool(problem)
        fills.append(Fill(item, reads))
    return fills, problems


def refuse_unfit(problems: Sequence[str]) -> None:
    """Raise `StateMismatch` if there is any."""
    if problems:
        raise StateMismatch(f"the snapshot does not fit this job: {some(problems)}")


def held_in(
    coord: str, leaves: Iterable[HeldLeaf], shared: Mapping[str, Leaf], blocks: Mapping[str, Any]
) -> Iterator[Held]:
    """The regions in the slot of `coord`.

    Args:
        shared: the leaves that its replicas share, whole, by name.
        blocks: which part of a whole each divided leaf is, by name.

    Raises:
        StateMismatch: see `region_of`; or a part is not what its name says.
    """
    for name, dtype, shape, offset in leaves:
        if is_part_of(name, shared):
            base, first, last = parse_part(name) or (name, 0, shared[name].elements)
            if last - first != math.prod(shape) or last > shared[base].elements:
                raise StateMismatch(f"{name} of {coord}, of shape {list(shape)}, is no part of {shared[base]}")
            yield Held(coord, offset, Region(base, dtype, shared[base].shape, range_runs(first, last)))
            continue
        block = blocks.get(name)
        region = region_of(name, tuple(shape), Block(tuple(block[0]), tuple(block[1])) if block else None)
        yield Held(coord, offset, Region(name, dtype, *region))


def region_of(name: str, shape: tuple[int, ...], block: Block | None) -> tuple[tuple[int, ...], tuple[Run, ...]]:
    """The shape of the whole tensor, and the runs of a rank's part of it.

    Raises:
        StateMismatch: the part is not a block of the whole.
    """
    if block is None:
        return shape, range_runs(0, math.prod(shape))
    try:
        return block.whole, block_runs(block.whole, block.start, shape)
    except ValueError as error:
        raise StateMismatch(
            f"{name} is divided among ranks in a way that is not known here, so the number of ranks cannot change: "
            f"{error}. Start with the same parallel sizes"
        ) from error


def unclaimed(index: Index, wanted: Iterable[str]) -> list[str]:
    """Which keys are held but not wanted, in order and in words."""
    return [f"{key} is not in this job" for key in sorted(index.keys() - set(wanted))]


def _divided(wanted: Sequence[Run], held: Sequence[Run]) -> tuple[list[tuple[int, int, int]], list[Run]]:
    """The parts of `wanted` that are in `held`, as (number of elements, their offset in the holder's memory, their
    offset in the wanted one), and the runs that are not."""
    common, rest, position = [], [], 0
    for first, last, target in wanted:
        while position < len(held) and held[position][1] <= first:
            position += 1
        reached, following = first, position
        while following < len(held) and held[following][0] < last:
            begin, end, source = held[following]
            low = max(begin, first)
            if reached < low:
                rest.append((reached, low, target + reached - first))
            reached = min(end, last)
            common.append((reached - low, source + low - begin, target + low - first))
            following += 1
        if reached < last:
            rest.append((reached, last, target + reached - first))
    return common, rest


def _joined(reads: Iterable[Read]) -> Iterator[Read]:
    """Merges reads that are adjacent in both source and target."""
    last: Read | None = None
    for read in reads:
        if last is not None:
            ends = last.coord, last.source + last.bytes, last.target + last.bytes
            if (read.coord, read.source, read.target) == ends:
                last = Read(last.coord, last.source, last.target, last.bytes + read.bytes)
                continue
            yield last
        last = read
    if last is not None:
        yield last
