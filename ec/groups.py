"""Which nodes protect each other."""

from __future__ import annotations


def plan_groups(nodes: int, size: int) -> tuple[tuple[int, ...], ...]:
    """Split nodes 0..nodes-1 into groups of about `size`, as even as possible, none above `size`.

    Neighbours stay together. A group of one would protect nothing: where an even split would leave one, there is
    one group less, and groups may be one longer than `size`.

    Raises:
        ValueError: `nodes` < 1 or `size` < 2.
    """
    if nodes < 1:
        raise ValueError(f"a job has at least one node, not {nodes}")
    if size < 2:
        raise ValueError(f"a group has at least two nodes, not {size}")
    count = -(-nodes // size)
    if count > 1 and nodes // count < 2:
        count -= 1
    short, longer = divmod(nodes, count)
    sizes = [short + (i < longer) for i in range(count)]
    starts = [sum(sizes[:i]) for i in range(count)]
    return tuple(tuple(range(s, s + n)) for s, n in zip(starts, sizes, strict=True))
