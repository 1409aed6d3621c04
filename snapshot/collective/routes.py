"""Which rank sends to which. Pure.

Every route here uses distances that are powers of two. So a rank exchanges messages with the same few ranks in all of
them, and opens 2 log2(P) connections at most, whatever it takes part in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


def distances(size: int) -> list[int]:
    """How far each rank of `size` sends in each round of a dissemination, after which all ranks have heard from all.

    In a round with distance d, rank r sends what it knows to r + d, and receives from r - d (modulo `size`). The
    operation must be idempotent: unless `size` is a power of two, some values arrive twice. (Hensgen, Finkel, Manber,
    "Two algorithms for barrier synchronization", IJPP 17(1), 1988.)
    """
    return [1 << i for i in range((size - 1).bit_length())]


class Branch(NamedTuple):
    """A rank's neighbours in a binomial tree.

    Attributes:
        parent: None at the root.
        children: the nearest first. The subtree of a child has as many ranks as the child is away from here, or as many
            as are left. So the subtrees, in this order, cover consecutive ranks.
    """

    parent: int | None
    children: tuple[int, ...]


def branch(rank: int, root: int, size: int) -> Branch:
    """The neighbours of `rank` in the tree of `size` ranks whose root is `root`."""
    place = (rank - root) % size
    reach = place & -place or size
    away = [distance for distance in distances(size) if distance < reach and place + distance < size]
    parent = None if place == 0 else (rank - reach) % size
    return Branch(parent, tuple((rank + distance) % size for distance in away))


def sockets_needed(size: int) -> int:
    """Maximum number of connections that a rank of `size` opens for all of the above."""
    return min(size - 1, 2 * len(distances(size)))


# ---------------------------------------------------------------------- routes of a spread
#
# A broadcast among ranks of several nodes may bring the same bytes into a node once for each rank there. So if a set of
# replicas spans several nodes and has several ranks on one of them, bytes go from their owner to the other ranks on its
# node, from the first rank of that node to the first rank of every other node, and from there to the rest of that node.


class Hop(NamedTuple):
    """One broadcast, from `root` to `ranks`, which ascend and include the root."""

    root: int
    ranks: tuple[int, ...]


def hops(owner: int, members: Sequence[int], nodes: Sequence[str]) -> list[Hop]:
    """The broadcasts, in order, that bring the data of `owner` to all `members`.

    Args:
        members: the ranks of a set of replicas.
        nodes: the node of every rank.
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
