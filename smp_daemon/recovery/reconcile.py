"""What a node lacks of a snapshot: what the layout wants it to hold, less what it holds. Pure.

It is asked whenever the two may differ: an SMP starts again in an arena with gaps, a node has taken over the shards of
a lost one, or nodes form other groups because one is missing or leaves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.plan import parity_repairer
from holdfast.smp_daemon.shared.sources import Sources
from holdfast.smp_daemon.storage.holdings import Key, ParityKey, ShardKey


class Stage(IntEnum):
    """The order in which actions are carried out. Each needs what the earlier ones bring."""

    MEND = 0
    SHARDS = 1
    PARITY = 2
    RELEASE = 3


@dataclass(frozen=True, slots=True)
class MendUnits:
    """Compute damaged units of what is held here from the rest of their stripes."""

    stage: ClassVar[Stage] = Stage.MEND
    key: Key
    units: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FetchShard:
    """Get a shard from the node that holds it, or compute it if none does."""

    stage: ClassVar[Stage] = Stage.SHARDS
    coord: str


@dataclass(frozen=True, slots=True)
class ComputeParity:
    """Compute the parity of a position from the shards of its group."""

    stage: ClassVar[Stage] = Stage.PARITY
    group: int
    position: int


@dataclass(frozen=True, slots=True)
class FreeParity:
    """Free the parity of a group that is no more."""

    stage: ClassVar[Stage] = Stage.RELEASE
    key: ParityKey


Action = MendUnits | FetchShard | ComputeParity | FreeParity


def lacking(
    layout: Layout,
    node: str,
    snapshot: SnapshotId,
    held: Mapping[Key, Sequence[int]],
    elsewhere: Sources | None = None,
) -> list[Action]:
    """What has to be done so that `node` holds its part of a snapshot in `layout`, in the order of `Stage`.

    Args:
        held: everything of the snapshot that is held here, with the units of it that are known to be damaged.
        elsewhere: what all nodes hold. Then what another node holds is not lacking here, since its rank moved there;
            and this node is to have the parity of lost nodes whose shards it took over. None: the layout is new, so
            each node is to have exactly what it says.
    """
    shards = {key.coord for key in held if isinstance(key, ShardKey)}
    present = elsewhere.shards if elsewhere is not None else {}
    parities = [
        (group, position)
        for group in range(len(layout.groups))
        for position, member in enumerate(layout.members(group))
        if (member.name == node or (elsewhere is not None and parity_repairer(layout, group, position) in shards))
        and layout.has_parity(group, position)
        and ParityKey(snapshot, layout.tag(group), position) not in held
        and (elsewhere is None or elsewhere.parity_holder(group, position) is None)
    ]
    own = [shard.coord for each in layout.nodes if each.name == node for shard in each.shards]
    return [
        *(MendUnits(key, tuple(units)) for key, units in held.items() if units),
        *(FetchShard(coord) for coord in own if coord not in shards and coord not in present),
        *(ComputeParity(group, position) for group, position in parities),
        *(FreeParity(key) for key in clutter((key for key in held if isinstance(key, ParityKey)), snapshot, layout)),
    ]


def clutter(
    parities: Iterable[tuple[SnapshotId, str, int]], snapshot: SnapshotId, layout: Layout
) -> Collection[ParityKey]:
    """Those of `parities` that are of `snapshot`, for groups that `layout` does not have."""
    return [ParityKey(*each) for each in parities if each[0] == snapshot and layout.group_of(each[1]) is None]
