"""Computes the job's layout from the descriptions of all ranks. Pure; every rank computes the same."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from holdfast.ec import choose_unit_bytes, crowded, plan_groups
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.failures import NODE_MTBF_S, SEVERAL_LOST
from holdfast.smp_daemon.shared.identity import UNNAMED, Run
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.layout import Layout, Node, Shard
from holdfast.smp_daemon.shared.limits import MAX_NAME_BYTES
from holdfast.smp_daemon.shared.quantities import duration

LARGEST_AUTO_GROUP = 8

TARGET, MONTH_S = 0.999, 30 * 86400.0
"""How likely snapshots in memory are to survive 30 days, at least, as `holdfast plan` aims at, and that time."""


@dataclass(frozen=True, slots=True)
class Protection:
    """How nodes protect each other: `parity` parity units for every `data` units; plain copies where `data` is 1.

    Attributes:
        data: k; 0: as many as groups of at most `LARGEST_AUTO_GROUP` nodes allow.
        parity: m; 0: nodes do not protect each other.
    """

    data: int
    parity: int

    def for_nodes(self, nodes: int) -> Protection:
        """The same, with `data` chosen for a job of `nodes` nodes."""
        if self.data:
            return self
        groups = -(-nodes // LARGEST_AUTO_GROUP)
        return Protection(max(1, nodes // groups - max(1, self.parity)), self.parity)


def parse_protect(text: str) -> Protection:
    """Parse ``"4+2"`` (k data and m parity units a stripe), ``"copies:2"``, ``"auto"`` (one parity unit, groups of at
    most 8 nodes) or ``"none"``.

    Raises:
        ConfigError: the text is anything else.
    """
    if text == "none":
        return Protection(data=0, parity=0)
    if text == "auto":
        return Protection(data=0, parity=1)
    match = re.fullmatch(r"(?:(\d+)\+|copies:)(\d+)", text)
    if match is None:
        raise ConfigError(f"protect={text!r}: say 'auto', 'none', k+m such as '4+2', or 'copies:2'")
    k, m = int(match[1] or 1), int(match[2])
    if k < 1 or m < 1 or k + m > 255:
        raise ConfigError(f"protect={text!r}: k and m must be at least 1, and k + m at most 255")
    return Protection(data=k, parity=m)


def node_of_rank(inventory: Inventory, coord: str, slot_bytes: int, domains: Sequence[str] = ()) -> Node:
    """One rank's description of itself for `arrange`: its node, whose SMP gave `inventory`, with that rank alone."""
    ports = inventory.control_port, inventory.bulk_port
    shards = (Shard(coord, slot_bytes),)
    return Node(inventory.node, inventory.host, *ports, shards, tuple(domains), inventory.more_bulk)


def coordinate_key(coord: str) -> list[int | str]:
    """Sort key that orders coordinates as a reader would: dp2 before dp10."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", coord))]


def arrange(
    job: str,
    epoch: int,
    ranks: Sequence[Node],
    protection: Protection,
    slots: int,
    parity_slots: int | None = None,
    run: Run = UNNAMED,
) -> Layout:
    """The layout of `job` in `epoch`, which is of `run`. Nodes are ordered by their first coordinate, not by name.

    Args:
        ranks: from `node_of_rank`. Their coordinates, and the addresses of their SMPs, were compared as they entered.
    """
    by_node: dict[str, list[Node]] = {}
    for rank in sorted(ranks, key=lambda rank: coordinate_key(rank.shards[0].coord)):
        by_node.setdefault(rank.name, []).append(rank)
    nodes = tuple(
        replace(
            members[0],
            shards=tuple(chain.from_iterable(rank.shards for rank in members)),
            domains=tuple(sorted({label for rank in members for label in rank.domains})),
        )
        for members in by_node.values()
    )
    chosen = protection.for_nodes(len(nodes))
    domains = [node.domains for node in nodes]
    return Layout(
        job=job,
        epoch=epoch,
        revision=0,
        nodes=nodes,
        groups=plan_groups(len(nodes), max(2, chosen.data + chosen.parity), max(1, chosen.parity), domains),
        data=chosen.data,
        parity=chosen.parity,
        unit_bytes=choose_unit_bytes(max(rank.state_bytes for rank in ranks), chosen.data),
        slots=slots,
        parity_slots=parity_slots,
        run=run,
    )


def shortfalls(layout: Layout, node_mtbf_s: float = NODE_MTBF_S) -> list[str]:
    """What an operator should know: where the nodes protect less than was requested, or than is usual.

    Args:
        node_mtbf_s: mean time between failures of one node, in seconds.
    """
    if not layout.parity:
        return ["protect='none': snapshots survive the death of processes, not the loss of a node"]
    found = []
    for group, members in enumerate(layout.groups):
        data, parity = layout.code(group)
        names = ", ".join(node.name for node in layout.members(group)[:4])
        if len(members) == 1:
            found.append(f"{names} has no other node to protect it: snapshots survive process crashes only")
        elif parity < layout.parity:
            found.append(
                f"a group of {len(members)} nodes ({names}) takes {data}+{parity}, not {layout.data}+{layout.parity}"
            )
    found += _odds(layout, node_mtbf_s)
    limits = [max(1, layout.code(group)[1]) for group in range(len(layout.groups))]
    crowdings = crowded(layout.groups, [node.domains for node in layout.nodes], limits)
    return found + [str(crowding) for crowding in crowdings]


def _odds(layout: Layout, node_mtbf_s: float) -> Iterator[str]:
    """How likely memory is to survive, if one parity unit makes that less than `TARGET`. Two nodes that fail at once
    are what loses most: with labels of domains they are in different groups, or `crowded` names them."""
    nodes = len(layout.nodes)
    labelled = any(node.domains for node in layout.nodes)
    several = len(layout.groups) > 1
    survives = math.exp(-nodes * SEVERAL_LOST / node_mtbf_s * MONTH_S)
    if layout.parity != 1 or nodes < 3 or labelled or survives >= TARGET:
        return
    fixes = ["say with HOLDFAST_DOMAINS which nodes fail together"] if several else []
    fixes += [f"protect='{max(1, layout.data - 1)}+2' survives that", "HOLDFAST_PERSIST goes back to storage"]
    yield (
        f"{layout.data}+1 on {nodes} nodes keeps what is in memory for 30 days with {survives:.1%}, if a node fails "
        f"every {duration(node_mtbf_s)} and {SEVERAL_LOST:.0%} of failures take two of a group at once: "
        f"{'; '.join(fixes)} (`holdfast plan --nodes {nodes}`)"
    )


def parse_domains(text: str, coord: str) -> tuple[str, ...]:
    """The failure domains of a rank's node, from a text like ``"rack=r7,switch=s3,@dp"``.

    ``@dp`` stands for the rank's own place in that dimension of its coordinate, ``dp=3``: for operators who take a
    whole replica away at once.

    Raises:
        ConfigError: the text has another form, or names a dimension that `coord` does not have.
    """
    own = dict(re.findall(r"([a-z]+)(\d+)", coord))
    labels = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        if word.startswith("@"):
            if word[1:] not in own:
                raise ConfigError(f"HOLDFAST_DOMAINS: {coord} has no dimension {word[1:]!r}; it has {sorted(own)}")
            labels.append(f"{word[1:]}={own[word[1:]]}")
        elif re.fullmatch(r"[^=@,\s]+=[^=,\s]+", word) and len(word) <= MAX_NAME_BYTES:
            labels.append(word)
        else:
            raise ConfigError(f"HOLDFAST_DOMAINS: {word!r} is neither kind=name, such as rack=r7, nor @dimension")
    return tuple(sorted(set(labels)))
