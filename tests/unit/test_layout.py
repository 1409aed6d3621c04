"""The layout of a job: what it refuses, its lookups, and its JSON form."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import zstandard
from hypothesis import given

from holdfast.smp_daemon.shared.errors import ProtocolError
from holdfast.smp_daemon.shared.layout import Layout, Located, Node, Shard, SnapshotId
from holdfast.smp_daemon.shared.limits import MAX_MESSAGE_BYTES, MAX_UNIT_BYTES, MAX_UNPACKED_BYTES, is_identifier
from holdfast.smp_daemon.shared.plain import encode_json, pack, to_plain, unpack
from tests.strategies import layouts, through_json


def node(name: str, *shards: Shard) -> Node:
    return Node(name, "10.0.0.1", 7000, 7001, shards)


GOOD = Layout(
    job="run",
    epoch=3,
    revision=0,
    nodes=(node("a", Shard("dp0", 10), Shard("dp1", 25)), node("b", Shard("dp2", 30)), node("c", Shard("dp3", 1))),
    groups=((2, 0), (1,)),
    data=7,
    parity=1,
    unit_bytes=8,
    slots=2,
)


def read_with(changes: dict[str, Any]) -> Layout:
    """The layout with these changes, as another process reads it."""
    return Layout.read(to_plain(GOOD) | to_plain(changes))


@pytest.mark.parametrize("name", ["", ".hidden", "-x", "a b", "a/b", "a\n", "ä", "x" * 65])
def test_what_cannot_be_a_file_name_cannot_name_a_job_a_node_or_a_shard(name: str) -> None:
    for changes in (
        {"job": name},
        {"nodes": (replace(GOOD.nodes[0], name=name), *GOOD.nodes[1:])},
        {"nodes": (*GOOD.nodes[:2], node("c", Shard(name, 1)))},
    ):
        with pytest.raises(ProtocolError, match=r"\$.*\.(job|name|coord)"):
            read_with(changes)


def test_the_longest_name_is_allowed() -> None:
    assert read_with({"job": "x" * 64}).job == "x" * 64


@pytest.mark.parametrize(
    "nodes",
    [
        (GOOD.nodes[0], GOOD.nodes[1], node("a", Shard("dp9", 1))),
        (GOOD.nodes[0], GOOD.nodes[1], node("c", Shard("dp0", 1))),
        (GOOD.nodes[0], GOOD.nodes[1], node("c", Shard("dp9", 1), Shard("dp9", 1))),
    ],
)
def test_a_node_or_a_shard_named_twice_is_refused(nodes: tuple[Node, ...]) -> None:
    with pytest.raises(ProtocolError, match="twice"):
        replace(GOOD, nodes=nodes)


@pytest.mark.parametrize("groups", [(), ((0, 1),), ((0, 1), (1, 2)), ((0, 1, 2, 3),), ((0, 1), (-1,)), ((0, 0, 1, 2),)])
def test_groups_that_are_no_partition_of_the_nodes_are_refused(groups: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ProtocolError, match="exactly one group"):
        replace(GOOD, groups=groups)


@pytest.mark.parametrize(
    "numbers",
    [
        {"unit_bytes": 0},
        {"unit_bytes": MAX_UNIT_BYTES + 1},
        {"slots": 1},
        {"slots": 17},
        {"parity": -1},
        {"data": 0},
        {"data": 255},
        {"data": 100, "parity": 156},
        {"revision": -1},
        {"nodes": (*GOOD.nodes[:2], node("c", Shard("dp3", 0)))},
    ],
)
def test_numbers_out_of_range_are_refused(numbers: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match=rf"{min(numbers)}|code"):
        read_with(numbers)


@pytest.mark.parametrize(
    "numbers",
    [
        {"unit_bytes": 1},
        {"unit_bytes": MAX_UNIT_BYTES},
        {"slots": 16},
        {"parity": 0},
        {"data": 1},
        {"data": 254},
        {"data": 100, "parity": 155},
        {"revision": 1},
    ],
)
def test_numbers_at_the_edge_of_their_range_are_allowed(numbers: dict[str, Any]) -> None:
    assert read_with(numbers) != GOOD


@given(layouts())
def test_every_node_stands_where_its_place_says(layout: Layout) -> None:
    for member in layout.nodes:
        group, position = layout.place(member.name)
        assert layout.members(group)[position] == member
        assert layout.node(member.name) == member


@given(layouts())
def test_every_shard_is_located_at_its_node_and_segment(layout: Layout) -> None:
    assert sorted(layout.coords) == sorted(shard.coord for member in layout.nodes for shard in member.shards)
    for coord in layout.coords:
        place = layout.locate(coord)
        shard = layout.members(place.group)[place.position].shards[place.segment]
        assert (shard.coord, shard.bytes) == (coord, place.bytes)
        assert layout.shard_bytes(coord) == shard.bytes


def test_groups_need_not_be_in_order() -> None:
    assert GOOD.place("a") == (0, 1)
    assert GOOD.locate("dp1") == Located(group=0, position=1, segment=1, bytes=25)


def test_who_is_not_part_of_the_job_is_refused_by_name() -> None:
    with pytest.raises(ProtocolError, match=r"'z' .*'run' .*epoch 3"):
        GOOD.node("z")
    with pytest.raises(ProtocolError, match="'z' is not"):
        GOOD.place("z")
    with pytest.raises(ProtocolError, match=r"'dp9' .*epoch 3"):
        GOOD.locate("dp9")


def test_a_group_protects_itself_if_it_has_another_node_and_parity() -> None:
    assert [GOOD.protects(group) for group in (0, 1)] == [True, False]
    assert not replace(GOOD, parity=0).protects(0)
    assert replace(GOOD, parity=2).protects(0)
    assert not replace(GOOD, parity=2).protects(1)


@pytest.mark.parametrize(
    ("size", "asked", "code"),
    [
        (6, (4, 2), (4, 2)),
        (9, (4, 2), (4, 2)),
        (5, (4, 2), (3, 2)),
        (4, (4, 2), (2, 2)),
        (3, (4, 2), (1, 2)),
        (2, (4, 2), (1, 1)),
        (1, (4, 2), (1, 0)),
        (3, (1, 2), (1, 2)),
        (3, (7, 1), (2, 1)),
        (3, (2, 0), (2, 0)),
        (1, (2, 0), (1, 0)),
    ],
)
def test_a_group_that_is_too_small_takes_fewer_data_units_and_then_less_parity(
    size: int, asked: tuple[int, int], code: tuple[int, int]
) -> None:
    layout = of_one_group(size, *asked)
    assert layout.code(0) == code
    assert layout.protects(0) == (code[1] > 0)


@given(layouts())
def test_every_group_that_protects_has_stripes_of_its_code(layout: Layout) -> None:
    for group in range(len(layout.groups)):
        data, parity = layout.code(group)
        assert 1 <= data <= layout.data and 0 <= parity <= layout.parity
        if layout.protects(group):
            stripes = layout.stripes(group)
            assert (stripes.data, stripes.parity, stripes.unit_bytes) == (data, parity, layout.unit_bytes)
            assert stripes.segments == tuple(tuple(s.bytes for s in n.shards) for n in layout.members(group))


@given(layouts())
def test_a_position_has_parity_if_a_stripe_puts_some_there(layout: Layout) -> None:
    for group, members in enumerate(layout.groups):
        for position in range(len(members)):
            there = layout.protects(group) and bool(layout.stripes(group).parity_stripes(position))
            assert layout.has_parity(group, position) == there
        assert not layout.has_parity(group, len(members)) and not layout.has_parity(group, -1)
    assert not layout.has_parity(len(layout.groups), 0) and not layout.has_parity(-1, 0)


def of_one_group(size: int, data: int = 2, parity: int = 1) -> Layout:
    nodes = tuple(node(f"n{i}", Shard(f"dp{i}", 10 + i)) for i in range(size))
    return replace(GOOD, nodes=nodes, groups=(tuple(range(size)),), data=data, parity=parity)


@given(layouts())
def test_a_group_is_found_by_its_tag(layout: Layout) -> None:
    tags = [layout.tag(group) for group in range(len(layout.groups))]
    assert len(set(tags)) == len(tags)
    assert all(is_identifier(tag) for tag in tags), "a parity slot's file is named after it"
    assert [layout.group_of(tag) for tag in tags] == list(range(len(tags)))
    assert layout.group_of("0" * 16) is None
    assert Layout.read(through_json(to_plain(layout))).tag(0) == tags[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": 4},
        {"revision": 2},
        {"slots": 3},
        {"data": 8},
        {"job": "another"},
        {"groups": ((1,), (2, 0))},
        {"nodes": (replace(GOOD.nodes[0], host="elsewhere", bulk_port=1, domains=("rack=r7",)), *GOOD.nodes[1:])},
        {"nodes": (GOOD.nodes[0], node("b", Shard("dp2", 31)), GOOD.nodes[2])},
    ],
    ids=lambda changes: "+".join(changes),
)
def test_what_does_not_change_a_groups_parity_does_not_change_its_tag(changes: dict[str, Any]) -> None:
    assert replace(GOOD, **changes).group_of(GOOD.tag(0)) is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"groups": ((0, 2), (1,))},
        {"groups": ((2, 0, 1),)},
        {"parity": 0},
        {"unit_bytes": 9},
        {"nodes": (node("a", Shard("dp0", 11), Shard("dp1", 25)), *GOOD.nodes[1:])},
        {"nodes": (node("a", Shard("dp1", 25), Shard("dp0", 10)), *GOOD.nodes[1:])},
        {"nodes": (node("a", Shard("dp0", 10), Shard("dp7", 25)), *GOOD.nodes[1:])},
        {"nodes": (node("a", Shard("dp0", 10)), *GOOD.nodes[1:])},
        {"nodes": (replace(GOOD.nodes[0], name="z"), *GOOD.nodes[1:])},
    ],
    ids=str,
)
def test_what_changes_a_groups_parity_changes_its_tag(changes: dict[str, Any]) -> None:
    assert replace(GOOD, **changes).group_of(GOOD.tag(0)) is None


def test_the_code_of_a_group_is_part_of_its_tag() -> None:
    tags = {of_one_group(4, data, parity).tag(0) for data, parity in ((3, 1), (2, 1), (2, 2), (1, 3))}
    assert len(tags) == 4
    assert of_one_group(4, 7, 1).tag(0) == of_one_group(4, 3, 1).tag(0)


def test_a_higher_epoch_is_newer_than_a_higher_step() -> None:
    assert sorted([SnapshotId(2, 1), SnapshotId(1, 9), SnapshotId(1, 2)]) == [(1, 2), (1, 9), (2, 1)]
    assert str(SnapshotId(2, 17)) == "step 17 (epoch 2)"


def test_a_node_serves_raw_bytes_on_each_of_its_cards_and_control_on_one() -> None:
    assert GOOD.nodes[0].bulk_addresses == (("10.0.0.1", 7001),)
    several = replace(GOOD.nodes[0], more_bulk=(("10.0.1.1", 7001), ("10.0.2.1", 9)))
    assert several.control == ("10.0.0.1", 7000)
    assert several.bulk == ("10.0.0.1", 7001)
    assert several.bulk_addresses == (("10.0.0.1", 7001), ("10.0.1.1", 7001), ("10.0.2.1", 9))
    layout = replace(GOOD, nodes=(several, *GOOD.nodes[1:]))
    assert Layout.read(to_plain(layout)) == layout
    assert layout.tag(0) == GOOD.tag(0)


@pytest.mark.parametrize(
    "more",
    [(("10.0.0.1", 7001),), tuple((f"10.0.{i}.1", 1) for i in range(1, 17)), (("h" * 256, 1),)],
    ids=["one twice", "17 addresses", "a long one"],
)
def test_a_layout_refuses_addresses_that_cannot_be(more: tuple[tuple[str, int], ...]) -> None:
    with pytest.raises(ProtocolError, match=r"node 'a'|more_bulk"):
        read_with({"nodes": (replace(GOOD.nodes[0], more_bulk=more), *GOOD.nodes[1:])})


def test_a_layout_of_a_release_that_knew_one_address_a_node_is_read() -> None:
    plain = to_plain(GOOD)
    for node in plain["nodes"]:
        del node["more_bulk"]
    assert Layout.read(plain) == GOOD


def test_a_layout_of_twelve_thousand_nodes_fits_into_a_message_and_comes_back() -> None:
    nodes = tuple(
        Node(f"node{i:05d}", f"10.0.{i // 250}.{i % 250}", 1, 2, tuple(Shard(f"n{i}-r{r}", 1 << 28) for r in range(8)))
        for i in range(12_504)
    )
    groups = tuple(tuple(range(first, first + 8)) for first in range(0, len(nodes), 8))
    layout = Layout("job", 3, 0, nodes, groups, 7, 1, 1 << 21, 3)
    message = {"layouts": [to_plain(layout)] * 2}
    assert len(encode_json(message)) > MAX_MESSAGE_BYTES, "or this shows nothing"
    packed = pack(message)
    assert len(packed) < MAX_MESSAGE_BYTES
    assert Layout.read(unpack(dict[str, Any], packed, "a message")["layouts"][1]) == layout


@pytest.mark.parametrize(
    "data",
    [
        zstandard.ZstdCompressor(write_content_size=False).compress(b"{}"),
        zstandard.ZstdCompressor().compress(b"{}" * 1000)[:-3],
        zstandard.ZstdCompressor().compress(b"[1]"),
        zstandard.FRAME_HEADER,
    ],
    ids=["of unknown length", "cut", "no object", "a beginning"],
)
def test_what_is_compressed_and_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a message"):
        unpack(dict[str, Any], data, "a message")


def test_what_is_too_long_when_it_is_unpacked_is_neither_sent_nor_read() -> None:
    text = b'{"a":"' + b" " * MAX_UNPACKED_BYTES + b'"}'
    with pytest.raises(ProtocolError, match="limits are"):
        pack({"a": " " * MAX_UNPACKED_BYTES})
    with pytest.raises(ProtocolError, match="the limit is"):
        unpack(dict[str, Any], zstandard.ZstdCompressor().compress(text), "a message")
