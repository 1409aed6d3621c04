"""How many node failures each snapshot tolerates right now: a pure function of the SMPs' inventories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

from holdfast.ec import Stripes
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.plan import candidates, choose_sources, newest_protected
from holdfast.smp_daemon.shared.sources import Address, Sources

MOST_TRIED = 3
"""The most failures of one group that are tried out, and so the most that a group is ever reported to tolerate."""

CACHED = 4096
"""Number of groups whose results are remembered: enough for all groups of a job, before and after a change."""


@dataclass(frozen=True, slots=True)
class GroupRedundancy:
    """The redundancy of one group, for one snapshot.

    Attributes:
        nodes: its members, by position. `silent`: those whose SMP does not answer.
        tolerates: how many more of its nodes may be lost, whichever they are; -1: its part cannot be recovered even
            now.
    """

    nodes: tuple[str, ...]
    silent: tuple[str, ...]
    tolerates: int


@dataclass(frozen=True, slots=True)
class Redundancy:
    """The redundancy of one snapshot.

    Attributes:
        protected: whether the whole job agreed that it is protected.
        groups: the groups in the order of the layout.
    """

    snapshot: SnapshotId
    protected: bool
    groups: tuple[GroupRedundancy, ...]

    @property
    def tolerates(self) -> int:
        """How many more nodes may be lost, whichever they are; -1: it cannot be recovered."""
        return min(group.tolerates for group in self.groups)


def redundancies(inventories: Sequence[Inventory]) -> list[Redundancy]:
    """The redundancy of each snapshot that a restart might go back to, the newest first."""
    protected = newest_protected(inventories)
    found = []
    for snapshot in candidates(inventories, protected):
        sources = choose_sources(inventories, snapshot)
        if sources is not None:
            answering = {inventory.node for inventory in inventories}
            groups = tuple(
                GroupRedundancy(
                    tuple(node.name for node in sources.layout.members(group)),
                    tuple(node.name for node in sources.layout.members(group) if node.name not in answering),
                    tolerates(sources, group),
                )
                for group in range(len(sources.layout.groups))
            )
            found.append(Redundancy(snapshot, snapshot == protected, groups))
    return found


def safest(found: Sequence[Redundancy]) -> Redundancy | None:
    """The newest of the snapshots that tolerate the most failures: a restart can rely on it, whatever is lost next."""
    return max(found, key=lambda each: (each.tolerates, each.snapshot), default=None)


def tolerates(sources: Sources, group: int) -> int:
    """How many more SMPs may be lost, whichever they are, before the group's part cannot be recovered; -1: it cannot be
    recovered even now."""
    layout = sources.layout
    members = layout.members(group)
    shards = tuple(tuple(sources.shards.get(shard.coord) for shard in node.shards) for node in members)
    parities = tuple(sources.parity_holder(group, position) for position in range(len(members)))
    numbers: dict[Address | None, int | None] = {None: None}
    for at in (*(at for row in shards for at in row), *parities):
        numbers.setdefault(at, len(numbers) - 1)
    return _tolerates(
        layout.stripes(group) if layout.protects(group) else None,
        tuple(tuple(numbers[at] for at in row) for row in shards),
        tuple(numbers[at] for at in parities),
    )


@lru_cache(CACHED)
def _tolerates(
    stripes: Stripes | None, shards: tuple[tuple[int | None, ...], ...], parities: tuple[int | None, ...]
) -> int:
    """Like `tolerates`, with holders numbered in order of appearance, so that most groups of a large job are equal and
    the cache helps. `stripes`: None if the group has no parity."""
    holders = sorted({at for row in (*shards, parities) for at in row if at is not None})
    # No stripe loses more units than positions lose something. So what parity surely covers is not tried out, which
    # takes minutes in a group of a hundred nodes.
    places = [{*row, at} for row, at in zip(shards, parities, strict=True)]
    most = sorted((sum(at in place for place in places) for at in holders), reverse=True)
    spare = (stripes.parity if stripes is not None else 0) - sum(None in place for place in places)

    def survives(gone: Sequence[int]) -> bool:
        lost = [
            (position, segment)
            for position, row in enumerate(shards)
            for segment, at in enumerate(row)
            if at is None or at in gone
        ]
        without = [position for position, at in enumerate(parities) if at is None or at in gone]
        return not lost or (stripes is not None and stripes.decodable(lost, without))

    count = -1
    for losses in range(min(MOST_TRIED, len(holders)) + 1):
        if sum(most[:losses]) > spare and not all(survives(gone) for gone in combinations(holders, losses)):
            break
        count = losses
    return count
