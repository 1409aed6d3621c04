"""From what the ranks say of themselves to one layout, the same on every rank."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_daemon.errors import ConfigError, ProtocolError
from smp_daemon.layout import Layout
from snapshot.arrange import Protection, RankInfo, arrange, coordinate_key, parse_protect
from tests.strategies import through_json

quick = settings(deadline=None, derandomize=True, max_examples=100)

AUTO = Protection(size=8, parity=1)
RANK = RankInfo(coord="dp0", node="a", host="10.0.0.1", control_port=1, bulk_port=2, slot_bytes=8192)


def rank(index: int, node: str, slot_bytes: int = 8192) -> RankInfo:
    return RankInfo(f"pp0-dp{index}", node, f"host-{node}", 7000, 7001, slot_bytes)


def job(ranks: int, per_node: int, prefix: str = "node") -> list[RankInfo]:
    return [rank(i, f"{prefix}{i // per_node}") for i in range(ranks)]


def arranged(ranks: list[RankInfo], protection: Protection = AUTO) -> Layout:
    return arrange("run", 3, ranks, protection, slots=2)


@quick
@given(st.integers(1, 24), st.integers(1, 4), st.randoms(use_true_random=False))
def test_the_order_in_which_ranks_speak_does_not_matter(ranks: int, per_node: int, random: Any) -> None:
    everyone = job(ranks, per_node)
    shuffled = random.sample(everyone, len(everyone))
    assert arranged(shuffled) == arranged(everyone)


@quick
@given(st.integers(2, 24), st.integers(1, 4), st.randoms(use_true_random=False))
def test_nodes_are_ordered_by_coordinates_whatever_they_are_called(ranks: int, per_node: int, random: Any) -> None:
    everyone = job(ranks, per_node)
    names = sorted({r.node for r in everyone})
    renamed = dict(zip(names, random.sample(names, len(names)), strict=True))
    layout = arranged([replace(r, node=renamed[r.node]) for r in everyone])
    assert layout.coords == tuple(f"pp0-dp{i}" for i in range(ranks))
    assert [n.name for n in layout.nodes] == list(dict.fromkeys(renamed[r.node] for r in everyone))


def test_dp2_comes_before_dp10() -> None:
    layout = arranged([rank(10, "a"), rank(2, "b"), rank(1, "c")])
    assert layout.coords == ("pp0-dp1", "pp0-dp2", "pp0-dp10")
    coords = ["pp1-dp0", "pp0-dp10", "pp0-dp2", "pp0", "10", "9"]
    assert sorted(coords, key=coordinate_key) == ["9", "10", "pp0", "pp0-dp2", "pp0-dp10", "pp1-dp0"]


def test_a_node_takes_the_place_of_its_first_coordinate() -> None:
    layout = arranged([rank(0, "z"), rank(5, "z"), rank(1, "a"), rank(2, "a")])
    assert [(n.name, [s.coord for s in n.shards]) for n in layout.nodes] == [
        ("z", ["pp0-dp0", "pp0-dp5"]),
        ("a", ["pp0-dp1", "pp0-dp2"]),
    ]


@given(st.lists(st.text("dp-1٣²½Ⅷ", max_size=5), max_size=6))
@quick
def test_any_texts_can_be_sorted_as_coordinates(coords: list[str]) -> None:
    assert len(sorted(coords, key=coordinate_key)) == len(coords)


def test_every_rank_is_in_the_layout_with_its_node_and_its_length() -> None:
    layout = arranged([rank(0, "a", 5000), rank(1, "a", 70_000), rank(2, "b", 9000)])
    assert {(s.coord, n.name, n.host, s.bytes) for n in layout.nodes for s in n.shards} == {
        ("pp0-dp0", "a", "host-a", 5000),
        ("pp0-dp1", "a", "host-a", 70_000),
        ("pp0-dp2", "b", "host-b", 9000),
    }
    assert (layout.job, layout.epoch, layout.parity, layout.slots) == ("run", 3, 1, 2)
    assert (layout.nodes[0].control_port, layout.nodes[0].bulk_port) == (7000, 7001)


def test_two_ranks_with_one_coordinate_are_refused() -> None:
    with pytest.raises(ConfigError, match="two ranks have the coordinate 'pp0-dp1'"):
        arranged([rank(0, "a"), rank(1, "b"), rank(1, "c")])
    with pytest.raises(ConfigError, match="two ranks have the coordinate 'pp0-dp1'"):
        arranged([rank(1, "a"), rank(1, "a")])


@pytest.mark.parametrize("other", [{"host": "elsewhere"}, {"control_port": 9}, {"bulk_port": 9}])
def test_two_smps_with_one_node_name_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="'a': give each host its own HOLDFAST_NODE"):
        arranged([rank(0, "a"), replace(rank(1, "a"), **other)])


@pytest.mark.parametrize(
    ("nodes", "protection", "groups"),
    [
        (1, AUTO, [1]),
        (2, AUTO, [2]),
        (8, AUTO, [8]),
        (9, AUTO, [5, 4]),
        (8, Protection(4, 1), [4, 4]),
        (5, Protection(4, 1), [3, 2]),
        (3, Protection(8, 0), [3]),
    ],
)
def test_nodes_are_grouped_as_protection_asks(nodes: int, protection: Protection, groups: list[int]) -> None:
    layout = arranged(job(nodes, 1), protection)
    assert [len(group) for group in layout.groups] == groups
    assert [layout.protects(g) for g in range(len(groups))] == [n > 1 and protection.parity == 1 for n in groups]


@pytest.mark.parametrize(
    ("longest", "nodes", "unit_bytes"),
    [
        (1, 4, 4096),
        (8192, 3, 4096),
        (3 * 40_960, 4, 40_960),
        (3 * 40_960 + 1, 4, 45_056),
        (40_960, 2, 40_960),
        (1 << 30, 2, 4 << 20),
    ],
)
def test_units_spread_the_longest_shard_over_the_group(longest: int, nodes: int, unit_bytes: int) -> None:
    ranks = [*job(nodes - 1, 1), rank(99, "last", longest)]
    assert arranged([replace(r, slot_bytes=min(r.slot_bytes, longest)) for r in ranks]).unit_bytes == unit_bytes


@pytest.mark.parametrize("coord", ["", "a b", "../up", "dp²"])
def test_a_coordinate_that_cannot_be_a_file_name_is_refused(coord: str) -> None:
    with pytest.raises(ProtocolError, match="cannot name"):
        arranged([replace(RANK, coord=coord)])


@pytest.mark.parametrize(
    ("text", "protection"),
    [
        ("none", Protection(8, 0)),
        ("auto", Protection(8, 1)),
        ("3+1", Protection(4, 1)),
        ("1+1", Protection(2, 1)),
        ("254+1", Protection(255, 1)),
    ],
)
def test_protection_is_said_in_three_ways(text: str, protection: Protection) -> None:
    assert parse_protect(text) == protection


@pytest.mark.parametrize("text", ["", "3", "3+", "+1", "3 + 1", "3+1+1", "-3+1", "all", "None", "3+1\n"])
def test_other_words_for_protection_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"say 'auto', 'none' or k\+m"):
        parse_protect(text)


@pytest.mark.parametrize("text", ["0+1", "3+0", "0+0", "255+1", "1000+1"])
def test_a_code_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="at most 255"):
        parse_protect(text)


def test_more_than_one_parity_is_not_offered_yet() -> None:
    with pytest.raises(ConfigError, match=r"not available yet; use 4\+1"):
        parse_protect("4+2")


def test_a_rank_comes_back_from_json() -> None:
    assert RankInfo.from_json(through_json(asdict(RANK))) == RANK


@pytest.mark.parametrize("data", [None, 5, "rank", [], [1], {}, {**asdict(RANK), "more": 1}])
def test_what_does_not_describe_a_rank_is_refused(data: Any) -> None:
    with pytest.raises(ProtocolError, match="not a rank's description"):
        RankInfo.from_json(data)


@pytest.mark.parametrize("key", sorted(asdict(RANK)))
@pytest.mark.parametrize("value", [None, 1.5, [], {}, True])
def test_a_rank_with_a_value_of_another_kind_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ProtocolError, match="not a rank's description"):
        RankInfo.from_json({**asdict(RANK), key: value})
    lacking = {name: kept for name, kept in asdict(RANK).items() if name != key}
    with pytest.raises(ProtocolError, match="not a rank's description"):
        RankInfo.from_json(lacking)
