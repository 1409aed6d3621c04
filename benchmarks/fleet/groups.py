"""Which nodes protect each other, and which losses they survive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from holdfast.ec import plan_groups
from holdfast.smp_daemon.shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of nodes. In each, up to `parity` nodes may lose their memory.

    Attributes:
        of: for each node, the number of its group.
    """

    of: tuple[int, ...]
    parity: int

    def survives(self, lost: Collection[int]) -> bool:
        """Whether no data is lost if these nodes lose their memory at once."""
        return all(count <= self.parity for count in Counter(self.of[node] for node in set(lost)).values())


def place(nodes: int, size: int, parity: int, rack: int, *, spread: bool) -> Groups:
    """Groups of at least `size` nodes, as this system plans them (`ec.plan_groups`).

    Args:
        spread: whether to spread the nodes of a rack over groups, as far as `parity` requires it and the racks allow;
            if not, neighbours form groups.

    Raises:
        ConfigError: there are fewer nodes than `size`.
    """
    if size > nodes:
        raise ConfigError(f"groups of {size} nodes, and there are {nodes}: use a smaller code or more nodes")
    racks = [(f"rack={node // rack}",) for node in range(nodes)] if spread and rack > 1 else None
    of = [0] * nodes
    for index, group in enumerate(plan_groups(nodes, size, parity, racks)):
        for node in group:
            of[node] = index
    return Groups(tuple(of), parity)
