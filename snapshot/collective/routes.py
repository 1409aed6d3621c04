"""By which broadcasts what one replica has reaches all others, so that it enters each node once. Pure.

A broadcast among ranks of several nodes may bring the same bytes into a node as often as it has ranks there. So where a
set of replicas has several on a node and is on several nodes, bytes go from their owner to the others on its node, from
the first rank of that node to the first of every other, and from each of these to the rest of its node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Hop(NamedTuple):
    """One broadcast: from a rank to all of some ranks, itself among them. These ascend."""

    root: int
    ranks: tuple[int, ...]


def groups(members: Sequence[int], nodes: Sequence[str]) -> list[tuple[int, ...]]:
    """All ranks that ever broadcast together, in the same order on every rank.

    Args:
        members: the ranks of a set of replicas.
        nodes: of every rank.
    """
    by_node = _by_node(members, nodes)
    firsts = tuple(sorted(ranks[0] for ranks in by_node))
    if len(by_node) in (1, len(members)):
        return [tuple(sorted(members))]
    return [firsts, *(ranks for ranks in by_node if len(ranks) > 1)]


def hops(owner: int, members: Sequence[int], nodes: Sequence[str]) -> list[Hop]:
    """Which broadcasts bring what `owner` has to all `members`, in this order; each is among one of `groups`."""
    found = groups(members, nodes)
    if len(found) == 1 and owner in found[0]:
        return [Hop(owner, found[0])]
    firsts, *within = found
    own = next((ranks for ranks in within if owner in ranks), None)
    path = [Hop(owner, own)] if own is not None else []
    path.append(Hop(owner if own is None else own[0], firsts))
    return path + [Hop(ranks[0], ranks) for ranks in within if ranks != own]


def _by_node(members: Sequence[int], nodes: Sequence[str]) -> list[tuple[int, ...]]:
    found: dict[str, list[int]] = {}
    for rank in sorted(members):
        found.setdefault(nodes[rank], []).append(rank)
    return [tuple(ranks) for ranks in found.values()]
