"""From what every rank says of itself to the layout of the job. Pure; every rank computes the same."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ec import choose_unit_bytes, plan_groups
from smp_daemon.errors import ConfigError, ProtocolError
from smp_daemon.layout import Layout, Node, Shard

LARGEST_AUTO_GROUP = 8


@dataclass(frozen=True, slots=True)
class Protection:
    """How nodes protect each other: groups of at most `size` nodes with `parity` parities a stripe."""

    size: int
    parity: int


def parse_protect(text: str) -> Protection:
    """``"3+1"`` (k data and m parity units a stripe), ``"auto"`` (one parity, groups of at most 8), ``"none"``.

    Raises:
        ConfigError: anything else.
    """
    if text == "none":
        return Protection(size=LARGEST_AUTO_GROUP, parity=0)
    if text == "auto":
        return Protection(size=LARGEST_AUTO_GROUP, parity=1)
    match = re.fullmatch(r"(\d+)\+(\d+)", text)
    if match is None:
        raise ConfigError(f"protect={text!r}: say 'auto', 'none' or k+m, such as '3+1'")
    k, m = int(match[1]), int(match[2])
    if k < 1 or m < 1 or k + m > 255:
        raise ConfigError(f"protect={text!r}: k and m must be at least 1, and k + m at most 255")
    if m > 1:
        raise ConfigError(f"protect={text!r}: more than one parity unit a stripe is not available yet; use {k}+1")
    return Protection(size=k + m, parity=m)


@dataclass(frozen=True, slots=True)
class RankInfo:
    """What one rank says of itself: its coordinate, its node's SMP, the length of its slot file."""

    coord: str
    node: str
    host: str
    control_port: int
    bulk_port: int
    slot_bytes: int

    @classmethod
    def from_json(cls, data: Any) -> RankInfo:
        """Raises `ProtocolError` if `data` does not describe a rank."""
        try:
            rank = cls(**data)
        except TypeError as error:
            raise ProtocolError(f"not a rank's description: {error}") from error
        texts, numbers = (rank.coord, rank.node, rank.host), (rank.control_port, rank.bulk_port, rank.slot_bytes)
        if any(type(text) is not str for text in texts) or any(type(number) is not int for number in numbers):
            raise ProtocolError(f"not a rank's description: {rank}")
        return rank


def coordinate_key(coord: str) -> list[int | str]:
    """Sorts coordinates as a reader would: dp2 before dp10."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", coord))]


def arrange(job: str, epoch: int, ranks: Sequence[RankInfo], protection: Protection, slots: int) -> Layout:
    """The layout of `job` in `epoch`. Nodes are ordered by their first coordinate, whatever they are called.

    Raises:
        ConfigError: two ranks have one coordinate, or two SMPs one node name.
    """
    by_node: dict[str, list[RankInfo]] = {}
    for rank in sorted(ranks, key=lambda rank: coordinate_key(rank.coord)):
        by_node.setdefault(rank.node, []).append(rank)
    for name, members in by_node.items():
        if len({(r.host, r.control_port, r.bulk_port) for r in members}) > 1:
            raise ConfigError(f"two SMPs call their node {name!r}: give each host its own HOLDFAST_NODE")
    coords = [rank.coord for rank in ranks]
    for coord in coords:
        if coords.count(coord) > 1:
            raise ConfigError(f"two ranks have the coordinate {coord!r}")
    nodes = tuple(
        Node(
            name,
            members[0].host,
            members[0].control_port,
            members[0].bulk_port,
            tuple(Shard(rank.coord, rank.slot_bytes) for rank in members),
        )
        for name, members in by_node.items()
    )
    groups = plan_groups(len(nodes), protection.size)
    data = max(1, min(len(group) for group in groups) - protection.parity)
    return Layout(
        job=job,
        epoch=epoch,
        nodes=nodes,
        groups=groups,
        parity=protection.parity,
        unit_bytes=choose_unit_bytes(max(rank.slot_bytes for rank in ranks), data),
        slots=slots,
        backend="auto",
    )
