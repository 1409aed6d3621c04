"""The layout of a job: nodes, shards, groups and code. Pure data, the same on every node.

A shard is named by its coordinate, a string such as ``pp0-tp1-cp0-ep0-dp3``; the SMP does not look inside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Any, NamedTuple

import msgspec
import xxhash

from holdfast.ec import Stripes
from holdfast.smp_daemon.shared.addresses import ServesAt
from holdfast.smp_daemon.shared.errors import ProtocolError
from holdfast.smp_daemon.shared.identity import UNNAMED, Run, epoch_text
from holdfast.smp_daemon.shared.limits import (
    MAX_HOSTS,
    MAX_NODES,
    MAX_SHARD_BYTES,
    MAX_SLOTS,
    MAX_UNIT_BYTES,
    MAX_UNITS,
    MIN_SLOTS,
)
from holdfast.smp_daemon.shared.plain import Address, Count, Identifier, Port, Text, from_plain, to_plain


class SnapshotId(NamedTuple):
    """The name of a snapshot. Sorts by age within its run: first by epoch, then by step, a higher one being newer. An
    epoch is of one start only (`shared.identity`), so this names one snapshot among those of all runs."""

    epoch: Count
    step: Count

    def __str__(self) -> str:
        return f"step {self.step} (epoch {epoch_text(self.epoch)})"


@dataclass(frozen=True, slots=True)
class Shard:
    """One coordinate's slot file: `bytes` long."""

    coord: Identifier
    bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_SHARD_BYTES)]


@dataclass(frozen=True, slots=True)
class Node(ServesAt):
    """One node: its name, where its SMP listens, the shards that live on it, and the failure domains it is in."""

    name: Identifier
    host: Text
    control_port: Port
    bulk_port: Port
    shards: tuple[Shard, ...]
    domains: tuple[Text, ...] = ()
    more_bulk: tuple[Address, ...] = ()

    @property
    def state_bytes(self) -> int:
        """Total length of its shards."""
        return sum(shard.bytes for shard in self.shards)


@dataclass(frozen=True)
class Layout:
    """The layout of a job in one epoch. Groups hold indices into `nodes`; a node's place in its group is its position.
    The types of its fields are checked where it comes from another process.

    Attributes:
        revision: 0 as the trainers arranged it, then the number of times that the SMPs have regrouped.
        data: k, data units per stripe; fewer in a group that is too small for k + m.
        parity: m, parity units per stripe, fewer in a group of m nodes or less; 0 means that nodes do not protect each
            other.
        slots: slot files per shard.
        parity_slots: parity slots per node; None: as many as `slots`.
        run: the run that the epoch belongs to.
        left: nodes of earlier revisions that were drained, so they do not count as missing.
    """

    job: Identifier
    epoch: Count
    revision: Count
    nodes: tuple[Node, ...]
    groups: tuple[tuple[int, ...], ...]
    data: Annotated[int, msgspec.Meta(ge=1)]
    parity: Annotated[int, msgspec.Meta(ge=0)]
    unit_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_UNIT_BYTES)]
    slots: Annotated[int, msgspec.Meta(ge=MIN_SLOTS, le=MAX_SLOTS)]
    left: tuple[Identifier, ...] = ()
    parity_slots: Count | None = None
    run: Run = UNNAMED

    def __post_init__(self) -> None:
        names = [n.name for n in self.nodes]
        coords = [s.coord for n in self.nodes for s in n.shards]
        if len(set(names)) != len(names) or len(set(coords)) != len(coords):
            raise ProtocolError("a layout names a node or a shard twice")
        if sorted(i for g in self.groups for i in g) != list(range(len(self.nodes))):
            raise ProtocolError("every node of a layout belongs to exactly one group")
        if not 1 <= self.slots_of_parity <= self.slots or self.data + self.parity > 255:
            raise ProtocolError("a layout's parity slots, or its code, are out of range")
        if len(self.nodes) + len(self.left) > MAX_NODES:
            raise ProtocolError(f"a layout has more than {MAX_NODES} nodes")
        for node in self.nodes:
            if sum(-(-s.bytes // self.unit_bytes) for s in node.shards) > MAX_UNITS:
                raise ProtocolError(f"node {node.name!r} has more than {MAX_UNITS} units: use longer ones")
            at = node.bulk_addresses
            if len(at) > MAX_HOSTS or len(set(at)) != len(at):
                raise ProtocolError(f"node {node.name!r} has more than {MAX_HOSTS} addresses, or one twice")

    @property
    def slots_of_parity(self) -> int:
        """Parity slots per node."""
        return self.slots if self.parity_slots is None else self.parity_slots

    @property
    def coords(self) -> tuple[str, ...]:
        """Every coordinate of the job, node by node."""
        return tuple(s.coord for n in self.nodes for s in n.shards)

    def node(self, name: str) -> Node:
        """The node called `name`."""
        group, position = self.place(name)
        return self.members(group)[position]

    def place(self, name: str) -> tuple[int, int]:
        """(group, position) of the node called `name`."""
        try:
            return self._places[name]
        except KeyError:
            raise ProtocolError(
                f"node {name!r} is not part of job {self.job!r} in epoch {epoch_text(self.epoch)}"
            ) from None

    def members(self, group: int) -> tuple[Node, ...]:
        """The nodes of a group, by position."""
        return tuple(self.nodes[i] for i in self.groups[group])

    def code(self, group: int) -> tuple[int, int]:
        """(k, m) of a group: `data` and `parity`, or less in a group that is too small; m = 0 if it has no parity."""
        size = len(self.groups[group])
        parity = min(self.parity, size - 1)
        return max(1, min(self.data, size - parity)), parity

    def protects(self, group: int) -> bool:
        """Whether the nodes of `group` protect each other."""
        return self.code(group)[1] > 0

    def has_parity(self, group: int, position: int) -> bool:
        """Whether that position exists and has parity."""
        if not 0 <= group < len(self.groups) or not 0 <= position < len(self.groups[group]):
            return False
        return self.protects(group) and self.stripes(group).parity_bytes(position) > 0

    def stripes(self, group: int) -> Stripes:
        """The stripes of a group, which must have parity (`protects`)."""
        return self._stripes[group]

    def tag(self, group: int) -> str:
        """The tag of a group, a digest of its content: equal in two layouts exactly if the group's parity is equal."""
        return self._tags[group]

    def group_of(self, tag: str) -> int | None:
        """The group with that tag, or None if this layout has none."""
        return self._by_tag.get(tag)

    @cached_property
    def moved_bytes(self) -> int:
        """What a node copies or sends for one snapshot, at most: each byte goes to one node for each parity."""
        return max(node.state_bytes for node in self.nodes) * max(1, self.parity)

    def shard_bytes(self, coord: str) -> int:
        """Length of the slot file of `coord`."""
        return self.locate(coord).bytes

    def ways_to(self, bulk: Address) -> tuple[Address, ...]:
        """All raw-byte addresses of the node whose first one is `bulk`; only `bulk` if no node of the layout has it."""
        return self._ways.get(bulk, (bulk,))

    def locate(self, coord: str) -> Located:
        """The place of `coord` in the layout."""
        try:
            return self._located[coord]
        except KeyError:
            raise ProtocolError(f"shard {coord!r} is not part of epoch {epoch_text(self.epoch)}") from None

    @cached_property
    def digest(self) -> str:
        """Digest of the whole layout, so that a layout need not be sent to a process that knows it."""
        return xxhash.xxh3_64_hexdigest(json.dumps(to_plain(self)).encode())

    @cached_property
    def _stripes(self) -> dict[int, Stripes]:
        return {
            g: Stripes(
                tuple(tuple(s.bytes for s in node.shards) for node in self.members(g)),
                *self.code(g),
                self.unit_bytes,
            )
            for g in range(len(self.groups))
            if self.protects(g)
        }

    @cached_property
    def _ways(self) -> dict[Address, tuple[Address, ...]]:
        return {node.bulk: node.bulk_addresses for node in self.nodes}

    @cached_property
    def _places(self) -> dict[str, tuple[int, int]]:
        return {self.nodes[i].name: (g, p) for g, members in enumerate(self.groups) for p, i in enumerate(members)}

    @cached_property
    def _tags(self) -> tuple[str, ...]:
        def content(group: int) -> list[Any]:
            members = [[node.name, [[s.coord, s.bytes] for s in node.shards]] for node in self.members(group)]
            return [self.code(group), self.unit_bytes, members]

        contents = map(content, range(len(self.groups)))
        return tuple(xxhash.xxh3_64_hexdigest(json.dumps(each).encode()) for each in contents)

    @cached_property
    def _by_tag(self) -> Mapping[str, int]:
        return {tag: group for group, tag in enumerate(self._tags)}

    @cached_property
    def _located(self) -> dict[str, Located]:
        return {
            shard.coord: Located(g, p, i, shard.bytes)
            for g in range(len(self.groups))
            for p, node in enumerate(self.members(g))
            for i, shard in enumerate(node.shards)
        }

    @classmethod
    def read(cls, data: object) -> Layout:
        """`from_plain` for a layout, with a cache: every rank receives the layouts of all nodes, and most are equal."""
        try:
            return _read(json.dumps(data))
        except (TypeError, ValueError, RecursionError) as error:
            raise ProtocolError(f"not a layout: {error!r}") from error


@lru_cache(16)
def _read(text: str) -> Layout:
    return from_plain(Layout, json.loads(text), "a layout")


class Located(NamedTuple):
    """The place of a shard: its group, its node's position in the group, its index among the node's shards, and its
    length."""

    group: int
    position: int
    segment: int
    bytes: int
