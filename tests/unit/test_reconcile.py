"""What a node lacks of a snapshot, as a pure function."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest

from holdfast.smp_daemon.recovery.reconcile import Stage, Task, clutter, lacking
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.sources import Sources, as_laid_out
from holdfast.smp_daemon.storage.holdings import Key, ParityKey, ShardKey
from tests.system import test_regroup
from tests.system.test_regroup import SNAPSHOT

layout_of = partial(test_regroup.layout_of, least=100_000)
"""With so many bytes, every node has parity."""


def nobody(layout: Layout) -> Sources:
    return Sources(SNAPSHOT, layout, {}, {})


def fetch(coord: str) -> Task:
    return Task(Stage.SHARDS, ShardKey(SNAPSHOT, coord))


def compute(layout: Layout, group: int, position: int) -> Task:
    return Task(Stage.PARITY, ParityKey(SNAPSHOT, layout.tag(group), position))


def everything(layout: Layout, node: str) -> dict[Key, list[int]]:
    """What a node holds of a protected snapshot."""
    group, position = layout.place(node)
    keys: list[Key] = [ShardKey(SNAPSHOT, shard.coord) for shard in layout.node(node).shards]
    if layout.has_parity(group, position):
        keys.append(ParityKey(SNAPSHOT, layout.tag(group), position))
    return {key: [] for key in keys}


@pytest.mark.parametrize(("nodes", "data", "parity"), [(4, 3, 1), (5, 2, 2), (12, 2, 1), (3, 3, 0)])
def test_a_node_with_its_part_lacks_nothing_and_one_with_nothing_lacks_just_that(
    nodes: int, data: int, parity: int
) -> None:
    layout = layout_of(nodes, data, parity, per_node=2)
    for node in layout.nodes:
        held = everything(layout, node.name)
        assert lacking(layout, node.name, SNAPSHOT, held) == []
        actions = lacking(layout, node.name, SNAPSHOT, {})
        assert actions == [
            *(fetch(shard.coord) for shard in node.shards),
            *([compute(layout, *layout.place(node.name))] if parity else []),
        ]
        assert len(actions) == len(held)


def test_what_is_needed_for_more_comes_first_and_nothing_is_freed_before_all_is_here() -> None:
    layout, old = layout_of(4, 3, 1, per_node=2), layout_of(5, 3, 1, per_node=2)
    mine, former = ShardKey(SNAPSHOT, "dp0"), ParityKey(SNAPSHOT, old.tag(0), 0)
    actions = lacking(layout, "node0", SNAPSHOT, {former: [], mine: [7]})
    assert actions == [
        Task(Stage.MEND, mine, (7,)),
        fetch("dp1"),
        compute(layout, 0, 0),
        Task(Stage.RELEASE, former),
    ]
    assert all(first.stage <= second.stage for first, second in pairwise(actions))


def test_what_another_node_holds_is_not_lacking_unless_the_layout_is_new() -> None:
    layout = layout_of(4, 3, 1)
    elsewhere = Sources(SNAPSHOT, layout, {"dp1": ("10.0.0.9", 2)}, {0: {1: ("10.0.0.9", 2)}})
    assert lacking(layout, "node1", SNAPSHOT, {}, elsewhere) == []
    assert lacking(layout, "node1", SNAPSHOT, {}) == [fetch("dp1"), compute(layout, 0, 1)]
    assert lacking(layout, "node1", SNAPSHOT, {}, nobody(layout)) == [fetch("dp1"), compute(layout, 0, 1)]


def test_who_took_over_a_lost_nodes_shard_lacks_its_parity_too_unless_the_layout_is_new() -> None:
    layout = layout_of(4, 3, 1)
    held = everything(layout, "node0") | {ShardKey(SNAPSHOT, "dp2"): []}
    assert lacking(layout, "node0", SNAPSHOT, held, nobody(layout)) == [compute(layout, 0, 2)]
    assert lacking(layout, "node0", SNAPSHOT, held) == []


def test_a_node_that_no_layout_names_lacks_nothing() -> None:
    assert lacking(layout_of(4, 3, 1), "spare", SNAPSHOT, {}, nobody(layout_of(4, 3, 1))) == []


def test_parity_of_another_snapshot_is_no_clutter_of_this_one() -> None:
    layout, old = layout_of(4, 3, 1), layout_of(5, 3, 1)
    current, former = ParityKey(SNAPSHOT, layout.tag(0), 0), ParityKey(SNAPSHOT, old.tag(0), 0)
    other = ParityKey(SnapshotId(3, 9), old.tag(0), 0)
    assert clutter([current, former, other], SNAPSHOT, layout) == [former]


def test_once_a_layout_is_adopted_each_node_has_its_shards() -> None:
    layout = layout_of(4, 3, 1, per_node=2)
    sources = as_laid_out(SNAPSHOT, layout)
    assert sources.shards == {shard.coord: node.bulk for node in layout.nodes for shard in node.shards}
    assert sources.parity_holder(0, 0) is None
