"""Who sends to whom: pure.

Every route here goes by distances that are powers of two, so a rank has to do with the same few others in all of them,
and opens 2 log2(P) connections at most, whatever it takes part in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


def distances(size: int) -> list[int]:
    """How far each rank of `size` sends in each round of a dissemination, after which all have heard of all.

    In a round with distance d, rank r sends what it knows to r + d, and hears from r - d (modulo `size`). What is
    gathered so must be idempotent: unless `size` is a power of two, some is heard of twice. (Hensgen, Finkel, Manber,
    "Two algorithms for barrier synchronization", IJPP 17(1), 1988.)
    """
    return [1 << i for i in range((size - 1).bit_length())]


class Branch(NamedTuple):
    """A place in a binomial tree, as ranks.

    Attributes:
        parent: None at the root.
        children: the nearest first. The subtree of each has as many ranks as it is far from here, or as there are left;
            with those of the nearer ones they follow each other without a gap.
    """

    parent: int | None
    children: tuple[int, ...]


def branch(rank: int, root: int, size: int) -> Branch:
    """Where `rank` stands in the tree of `size` ranks that starts from `root`."""
    place = (rank - root) % size
    reach = place & -place or size
    away = [distance for distance in distances(size) if distance < reach and place + distance < size]
    parent = None if place == 0 else (rank - reach) % size
    return Branch(parent, tuple((rank + distance) % size for distance in away))


def sockets_needed(size: int) -> int:
    """Connections that a rank of `size` may come to have for all of the above."""
    return min(size - 1, 2 * len(distances(size)))


# ---------------------------------------------------------------------- routes of a spread
#
# A broadcast among ranks of several nodes may bring the same bytes into a node as often as it has ranks there. So where
# a set of replicas has several on a node and is on several nodes, bytes go from their owner to the others on its node,
# from the first rank of that node to the first of every other, and from each of these to the rest of its node.


class Hop(NamedTuple):
    """One broadcast: from a rank to all of some ranks, itself among them. These ascend."""

    root: int
    ranks: tuple[int, ...]


def hops(owner: int, members: Sequence[int], nodes: Sequence[str]) -> list[Hop]:
    """Which broadcasts bring what `owner` has to all `members`, in this order.

    Args:
        members: the ranks of a set of replicas.
        nodes: of every rank.
    """
    by_node: dict[str, list[int]] = {}
    for rank in sorted(members):
        by_node.setdefault(nodes[rank], []).append(rank)
    if len(by_node) in (1, len(members)):
        return [Hop(owner, tuple(sorted(members)))]
    within = [tuple(ranks) for ranks in by_node.values() if len(ranks) > 1]
    own = next((ranks for ranks in within if owner in ranks), None)
    firsts = tuple(sorted(ranks[0] for ranks in by_node.values()))
    path = [Hop(owner, own)] if own is not None else []
    path.append(Hop(owner if own is None else own[0], firsts))
    return path + [Hop(ranks[0], ranks) for ranks in within if ranks != own]
