"""The sources of a snapshot: who holds what, and their way through JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import permutations

from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.layout import Layout, Node, Shard, SnapshotId
from holdfast.smp_daemon.shared.sources import sources_of

# ---------------------------------------------------------------------- from inventories

SNAPSHOT, OTHER = SnapshotId(1, 5), SnapshotId(1, 6)
LAYOUT = Layout(
    job="run",
    epoch=1,
    revision=0,
    nodes=tuple(Node(name, "host", 1, 2, (Shard(f"dp-{name}", 10),)) for name in "abcd"),
    groups=((0, 1), (3, 2)),
    data=1,
    parity=1,
    unit_bytes=8,
    slots=3,
)
TAGS = [LAYOUT.tag(group) for group in (0, 1)]


def inventory(
    node: str, bulk_port: int, shards: Iterable[tuple[SnapshotId, str]], parities: Iterable[tuple[SnapshotId, str, int]]
) -> Inventory:
    return Inventory(node, "host", 1, bulk_port, shards=frozenset(shards), parities=frozenset(parities))


def test_what_an_smp_holds_is_had_from_it() -> None:
    first = inventory("a", 10, [(SNAPSHOT, "dp-a"), (SNAPSHOT, "dp-c")], [(SNAPSHOT, TAGS[1], 0)])
    second = inventory("b", 11, [(SNAPSHOT, "dp-b")], [(SNAPSHOT, TAGS[0], 1), (SNAPSHOT, TAGS[1], 1)])
    found = sources_of([second, first], SNAPSHOT, LAYOUT)
    assert (found.snapshot, found.layout) == (SNAPSHOT, LAYOUT)
    assert found.shards == {"dp-a": ("host", 10), "dp-c": ("host", 10), "dp-b": ("host", 11)}
    assert found.parities == {1: {0: ("host", 10), 1: ("host", 11)}, 0: {1: ("host", 11)}}


def test_what_is_of_another_snapshot_or_of_a_group_of_another_layout_is_left_out() -> None:
    held = inventory("a", 10, [(OTHER, "dp-a")], [(OTHER, TAGS[0], 0), (SNAPSHOT, "0" * 16, 0)])
    found = sources_of([held], SNAPSHOT, LAYOUT)
    assert (found.shards, found.parities) == ({}, {})


def test_parity_is_found_by_its_tag_wherever_the_group_stands_in_the_layout() -> None:
    turned = replace(LAYOUT, revision=1, groups=(LAYOUT.groups[1], LAYOUT.groups[0]))
    held = inventory("a", 10, [], [(SNAPSHOT, TAGS[0], 1)])
    assert sources_of([held], SNAPSHOT, LAYOUT).parities == {0: {1: ("host", 10)}}
    assert sources_of([held], SNAPSHOT, turned).parities == {1: {1: ("host", 10)}}


def test_of_several_holders_the_first_by_name_is_asked_whoever_spoke_first() -> None:
    both = ([(SNAPSHOT, "dp-a")], [(SNAPSHOT, TAGS[0], 0)])
    holders = [inventory(name, port, *both) for name, port in (("b", 1), ("a", 2), ("c", 3))]
    for order in permutations(holders):
        found = sources_of(order, SNAPSHOT, LAYOUT)
        assert (found.shards, found.parities) == ({"dp-a": ("host", 2)}, {0: {0: ("host", 2)}})
