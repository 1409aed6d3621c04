"""What a node lacks of a snapshot: what the layout wants it to hold, less what it holds. Pure.

It is asked whenever the two may differ: an SMP starts again in an arena with gaps, a node has taken over the shards of
a lost one, or nodes form other groups because one is missing or leaves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.plan import parity_repairer
from holdfast.smp_daemon.shared.sources import Sources
from holdfast.smp_daemon.storage.holdings import Key, ParityKey, ShardKey


class Stage(IntEnum):
    """What is done to a key, in the order in which it is: each stage needs what the earlier ones bring."""

    MEND = 0
    """Damaged units of what is held here are computed from the rest of their stripes."""
    SHARDS = 1
    """A shard comes from the node that holds it, or is computed if none does."""
    PARITY = 2
    """The parity of a position is computed from the shards of its group."""
    RELEASE = 3
    """The parity of a group that is no more is freed."""


class Task(NamedTuple):
    """What to do to `key`. `units`: the damaged ones."""

    stage: Stage
    key: Key
    units: tuple[int, ...] = ()


def lacking(
    layout: Layout, node: str, snapshot: SnapshotId, held: Mapping[Key, Sequence[int]], elsewhere: Sources | None = None
) -> list[Task]:
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
        key
        for group in range(len(layout.groups))
        for position, member in enumerate(layout.members(group))
        if (member.name == node or (elsewhere is not None and parity_repairer(layout, group, position) in shards))
        and layout.has_parity(group, position)
        and (key := ParityKey(snapshot, layout.tag(group), position)) not in held
        and (elsewhere is None or elsewhere.parity_holder(group, position) is None)
    ]
    own = [shard.coord for each in layout.nodes if each.name == node for shard in each.shards]
    former = clutter((key for key in held if isinstance(key, ParityKey)), snapshot, layout)
    return [
        *(Task(Stage.MEND, key, tuple(units)) for key, units in held.items() if units),
        *(Task(Stage.SHARDS, ShardKey(snapshot, c)) for c in own if c not in shards and c not in present),
        *(Task(Stage.PARITY, key) for key in parities),
        *(Task(Stage.RELEASE, key) for key in former),
    ]


def clutter(
    parities: Iterable[tuple[SnapshotId, str, int]], snapshot: SnapshotId, layout: Layout
) -> Collection[ParityKey]:
    """Those of `parities` that are of `snapshot`, for groups that `layout` does not have."""
    return [ParityKey(*each) for each in parities if each[0] == snapshot and layout.group_of(each[1]) is None]
