"""What is safe against what, right now: a pure function of the SMPs' inventories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.plan import candidates, choose_sources, newest_protected
from holdfast.smp_daemon.shared.sources import Sources

MOST_TRIED = 3
"""So many lost nodes of a group are tried out; a group that stands more is said to stand these."""


@dataclass(frozen=True, slots=True)
class GroupStanding:
    """One group, for one snapshot.

    Attributes:
        nodes: its members, by position. `silent`: those whose SMP does not answer.
        stands: how many more nodes of it may be lost, whichever they are; -1: its part of the snapshot cannot be had.
    """

    nodes: tuple[str, ...]
    silent: tuple[str, ...]
    stands: int


@dataclass(frozen=True, slots=True)
class Standing:
    """One snapshot.

    Attributes:
        protected: whether the whole job agreed that it is.
        groups: in order of the layout.
    """

    snapshot: SnapshotId
    protected: bool
    groups: tuple[GroupStanding, ...]

    @property
    def stands(self) -> int:
        """How many more nodes may be lost, whichever they are; -1: it cannot be had."""
        return min(group.stands for group in self.groups)


def standings(inventories: Sequence[Inventory]) -> list[Standing]:
    """How each snapshot that a restart might go back to stands, the newest first."""
    protected = newest_protected(inventories)
    found = []
    for snapshot in candidates(inventories, protected):
        sources = choose_sources(inventories, snapshot)
        if sources is not None:
            answering = {inventory.node for inventory in inventories}
            groups = tuple(
                GroupStanding(
                    tuple(node.name for node in sources.layout.members(group)),
                    tuple(node.name for node in sources.layout.members(group) if node.name not in answering),
                    stands(sources, group),
                )
                for group in range(len(sources.layout.groups))
            )
            found.append(Standing(snapshot, snapshot == protected, groups))
    return found


def safest(found: Sequence[Standing]) -> Standing | None:
    """The newest snapshot that stands most: what a restart is sure of, whatever is lost next."""
    return max(found, key=lambda standing: (standing.stands, standing.snapshot), default=None)


def stands(sources: Sources, group: int) -> int:
    """How many more SMPs may be lost, whichever they are, before that group's part cannot be had; -1: it cannot now."""
    layout = sources.layout
    members = layout.members(group)
    shards = {
        (position, segment): sources.shards.get(shard.coord)
        for position, node in enumerate(members)
        for segment, shard in enumerate(node.shards)
    }
    parities = {position: sources.parities.get((group, position)) for position in range(len(members))}
    holders = sorted({at for at in [*shards.values(), *parities.values()] if at is not None})

    def survives(gone: Sequence[tuple[str, int]]) -> bool:
        lost = [place for place, at in shards.items() if at is None or at in gone]
        without = [position for position, at in parities.items() if at is None or at in gone]
        return not lost or (layout.protects(group) and layout.stripes(group).decodable(lost, without))

    count = -1
    for losses in range(min(MOST_TRIED, len(holders)) + 1):
        if not all(survives(gone) for gone in combinations(holders, losses)):
            break
        count = losses
    return count
