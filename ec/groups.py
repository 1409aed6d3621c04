"""Which nodes protect each other, such that no failure domain holds more nodes of a group than the group can lose.

A *domain* is a set of nodes that fail, or are evicted, together: a rack, a switch, a power feed, a pipeline. A node
carries a label for each of its domains, such as ``rack=r7``. The planner does not distinguish kinds of labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache, partial

MOST_ROUNDS = 20
"""Maximum number of passes over the nodes in which `plan_groups` improves the first deal."""


@dataclass(frozen=True, slots=True)
class Crowding:
    """A group that would lose more than `limit` nodes with one domain."""

    group: int
    label: str
    nodes: int
    limit: int

    def __str__(self) -> str:
        return f"group {self.group} has {self.nodes} nodes of {self.label} and survives the loss of {self.limit}"


def plan_groups(
    nodes: int, size: int, limit: int = 1, domains: Sequence[Collection[str]] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Split nodes 0..nodes-1 into groups of at least `size`, as many and as even as possible.

    Fewer than `size` nodes form one group. With `domains`, at most `limit` nodes of a group share a label, if possible:
    with labels of one kind this succeeds whenever a solution exists; with several kinds, nodes are exchanged until no
    exchange helps. `crowded` reports the groups where it failed. If no node has a label, neighbours stay together.

    Args:
        domains: the labels of each node.

    Raises:
        ValueError: `nodes` or `limit` < 1, `size` < 2, or the number of `domains` is not `nodes`.
    """
    if nodes < 1:
        raise ValueError(f"a job has at least one node, not {nodes}")
    if size < 2:
        raise ValueError(f"a group has at least two nodes, not {size}")
    if limit < 1:
        raise ValueError(f"a group survives the loss of at least one node, not {limit}")
    count = max(1, nodes // size)
    if domains is not None and len(domains) != nodes:
        raise ValueError(f"{nodes} nodes and the domains of {len(domains)}")
    if not any(domains or ()):
        short, longer = divmod(nodes, count)
        sizes = [short + (i < longer) for i in range(count)]
        starts = [sum(sizes[:i]) for i in range(count)]
        return tuple(tuple(range(s, s + n)) for s, n in zip(starts, sizes, strict=True))
    labels = [frozenset(labels) for labels in domains or ()]
    groups = _deal(labels, count)
    _exchange(groups, labels, limit)
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def crowded(
    groups: Sequence[Collection[int]], domains: Sequence[Collection[str]], limits: Sequence[int]
) -> list[Crowding]:
    """Groups that have more nodes in one domain than their limit."""
    return [
        Crowding(index, label, held, limits[index])
        for index, group in enumerate(groups)
        for label, held in sorted(Counter(label for node in group for label in set(domains[node])).items())
        if held > limits[index]
    ]


def _deal(labels: Sequence[frozenset[str]], count: int) -> list[list[int]]:
    """Deal nodes out like cards, the largest domains first and each domain's nodes together, so that no group gets two
    nodes of a domain before every group has one."""
    sizes = Counter(label for node in labels for label in node)
    order = sorted(
        range(len(labels)), key=lambda node: (sorted((-sizes[label], label) for label in labels[node]), node)
    )
    groups: list[list[int]] = [[] for _ in range(count)]
    for place, node in enumerate(order):
        groups[place % count].append(node)
    return groups


def _exchange(groups: list[list[int]], labels: Sequence[frozenset[str]], limit: int) -> None:
    """Exchange nodes between groups as long as that reduces the number of nodes above `limit`."""
    counts = [Counter(label for node in group for label in labels[node]) for group in groups]
    falls = [cache(partial(_fall, held, limit)) for held in counts]  # many nodes have the same labels

    def gain(a: int, node_a: int, b: int, node_b: int) -> int:
        """By how much the number of nodes above `limit` falls if the two nodes change places."""
        mine, other = labels[node_a], labels[node_b]
        return falls[a](mine, other) + falls[b](other, mine)

    for _ in range(MOST_ROUNDS):
        moved = False
        for a, group in enumerate(groups):
            for node in list(group):
                if node not in group or all(counts[a][label] <= limit for label in labels[node]):
                    continue
                partners = ((b, other) for b in range(len(groups)) if b != a for other in groups[b])
                b, other = max(partners, key=lambda each: gain(a, node, *each), default=(a, node))
                if gain(a, node, b, other) <= 0:
                    continue
                group[group.index(node)] = other
                groups[b][groups[b].index(other)] = node
                counts[a].update(labels[other])
                counts[a].subtract(labels[node])
                counts[b].update(labels[node])
                counts[b].subtract(labels[other])
                falls[a].cache_clear()
                falls[b].cache_clear()
                moved = True
        if not moved:
            return


def _fall(held: Counter[str], limit: int, leaving: frozenset[str], coming: frozenset[str]) -> int:
    """By how much the nodes above `limit` in a group fall if one with other labels takes the place of one."""
    fall = sum(held[label] > limit for label in leaving - coming)
    return fall - sum(held[label] >= limit for label in coming - leaving)
