"""From the ranks' descriptions of themselves to one layout, the same on every rank."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.ec.stripes import DEFAULT_UNIT_BYTES
from holdfast.planner.failures import from_profile
from holdfast.planner.profiles import PUBLISHED, profile
from holdfast.planner.survival import Domains, judge
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.layout import Layout, Node, Shard
from holdfast.snapshot.resume.arrange import (
    TARGET,
    Protection,
    arrange,
    coordinate_key,
    parse_domains,
    parse_protect,
    shortfalls,
)

AUTO = Protection(data=0, parity=1)


def rank(index: int, node: str, slot_bytes: int = 8192, domains: tuple[str, ...] = ()) -> Node:
    return Node(node, f"host-{node}", 7000, 7001, (Shard(f"pp0-dp{index}", slot_bytes),), domains)


def job(ranks: int, per_node: int, prefix: str = "node") -> list[Node]:
    return [rank(i, f"{prefix}{i // per_node}") for i in range(ranks)]


def arranged(ranks: list[Node], protection: Protection = AUTO) -> Layout:
    return arrange("run", 3, ranks, protection, slots=2)


@given(st.integers(1, 24), st.integers(1, 4), st.randoms(use_true_random=False))
def test_the_order_in_which_ranks_speak_does_not_matter(ranks: int, per_node: int, random: Any) -> None:
    everyone = job(ranks, per_node)
    shuffled = random.sample(everyone, len(everyone))
    assert arranged(shuffled) == arranged(everyone)


@given(st.integers(2, 24), st.integers(1, 4), st.randoms(use_true_random=False))
def test_nodes_are_ordered_by_coordinates_whatever_they_are_called(ranks: int, per_node: int, random: Any) -> None:
    everyone = job(ranks, per_node)
    names = sorted({r.name for r in everyone})
    renamed = dict(zip(names, random.sample(names, len(names)), strict=True))
    layout = arranged([replace(r, name=renamed[r.name]) for r in everyone])
    assert layout.coords == tuple(f"pp0-dp{i}" for i in range(ranks))
    assert [n.name for n in layout.nodes] == list(dict.fromkeys(renamed[r.name] for r in everyone))


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
def test_any_texts_can_be_sorted_as_coordinates(coords: list[str]) -> None:
    assert len(sorted(coords, key=coordinate_key)) == len(coords)


def test_every_rank_is_in_the_layout_with_its_node_and_its_length() -> None:
    layout = arranged([rank(0, "a", 5000), rank(1, "a", 70_000), rank(2, "b", 9000)])
    assert {(s.coord, n.name, n.host, s.bytes) for n in layout.nodes for s in n.shards} == {
        ("pp0-dp0", "a", "host-a", 5000),
        ("pp0-dp1", "a", "host-a", 70_000),
        ("pp0-dp2", "b", "host-b", 9000),
    }
    assert (layout.job, layout.epoch, layout.revision, layout.slots) == ("run", 3, 0, 2)
    assert (layout.data, layout.parity) == (1, 1)
    assert (layout.nodes[0].control_port, layout.nodes[0].bulk_port) == (7000, 7001)


@pytest.mark.parametrize(
    ("nodes", "protection", "groups"),
    [
        (1, AUTO, [1]),
        (2, AUTO, [2]),
        (8, AUTO, [8]),
        (9, AUTO, [5, 4]),
        (8, Protection(3, 1), [4, 4]),
        (5, Protection(3, 1), [5]),
        (3, Protection(3, 1), [3]),
        (6, Protection(4, 2), [6]),
        (11, Protection(4, 2), [11]),
        (13, Protection(4, 2), [7, 6]),
        (7, Protection(1, 2), [4, 3]),
        (1, Protection(1, 2), [1]),
        (3, Protection(0, 0), [3]),
    ],
)
def test_nodes_are_grouped_as_protection_asks(nodes: int, protection: Protection, groups: list[int]) -> None:
    layout = arranged(job(nodes, 1), protection)
    assert [len(group) for group in layout.groups] == groups
    assert [layout.protects(g) for g in range(len(groups))] == [n > 1 and protection.parity > 0 for n in groups]


@pytest.mark.parametrize("nodes", range(2, 41))
def test_auto_keeps_groups_at_eight_nodes_and_gives_each_a_parity(nodes: int) -> None:
    layout = arranged(job(nodes, 1), parse_protect("auto"))
    sizes = [len(group) for group in layout.groups]
    assert len(sizes) == -(-nodes // 8)
    assert max(sizes) - min(sizes) <= 1 and max(sizes) <= 8
    assert {layout.code(g) for g in range(len(sizes))} == {(min(sizes) - 1, 1)}
    assert layout.data == min(sizes) - 1, "as much data to a parity as there is room for"
    assert len(shortfalls(layout)) == (nodes > 2), "what one parity does not survive is told"


@pytest.mark.parametrize("nodes", range(1, 41))
def test_protection_that_is_said_in_numbers_does_not_depend_on_the_nodes(nodes: int) -> None:
    assert Protection(4, 2).for_nodes(nodes) == Protection(4, 2)
    none = parse_protect("none").for_nodes(nodes)
    assert (none.data >= 1, none.parity) == (True, 0)
    layout = arranged(job(nodes, 1), Protection(4, 2))
    assert len(layout.groups) == max(1, nodes // 6)
    assert all(layout.code(g) == (4, 2) for g in range(len(layout.groups))) == (nodes >= 6)


def test_a_node_is_in_every_domain_of_its_ranks() -> None:
    ranks = [rank(0, "a", domains=("rack=r2", "dp=0")), rank(1, "a", domains=("dp=1", "rack=r2")), rank(2, "b")]
    assert [node.domains for node in arranged(ranks).nodes] == [("dp=0", "dp=1", "rack=r2"), ()]


def test_no_group_has_more_nodes_of_a_domain_than_it_can_lose() -> None:
    """Adjacent racks of four nodes; without domains, each group of four would be in one rack."""
    ranks = [rank(i, f"node{i}", domains=(f"rack=r{i // 4}",)) for i in range(16)]
    for protection, most in ((Protection(3, 1), 1), (Protection(6, 2), 2)):
        layout = arranged(ranks, protection)
        racks = [[node.domains[0] for node in layout.members(g)] for g in range(len(layout.groups))]
        assert max(group.count(rack) for group in racks for rack in group) == most
        assert shortfalls(layout) == []
    blind = arranged([replace(each, domains=()) for each in ranks], Protection(3, 1))
    assert blind.groups[0] == (0, 1, 2, 3)


def test_groups_that_can_lose_two_are_not_torn_apart_to_lose_one() -> None:
    """Racks and power feeds at once: no split works unless a group may have two nodes of each domain."""
    places = [(0, 2), (0, 3), (1, 3), (1, 1), (0, 3), (0, 3), (1, 0), (1, 2)]
    ranks = [rank(i, f"node{i}", domains=(f"rack=r{r}", f"feed=f{f}")) for i, (r, f) in enumerate(places)]
    layout = arranged(ranks, Protection(2, 2))
    assert [len(group) for group in layout.groups] == [4, 4]
    assert shortfalls(layout) == []


@pytest.mark.parametrize(
    ("longest", "nodes", "unit_bytes"),
    [
        (1, 4, 4096),
        (8192, 3, 4096),
        (3 * 40_960, 4, 40_960),
        (3 * 40_960 + 1, 4, 45_056),
        (40_960, 2, 40_960),
        (1 << 30, 2, DEFAULT_UNIT_BYTES),
    ],
)
def test_units_spread_the_longest_shard_over_the_group(longest: int, nodes: int, unit_bytes: int) -> None:
    ranks = [*job(nodes - 1, 1), rank(99, "last", longest)]
    assert (
        arranged(
            [replace(r, shards=(Shard(r.shards[0].coord, min(r.state_bytes, longest)),)) for r in ranks]
        ).unit_bytes
        == unit_bytes
    )


@pytest.mark.parametrize(
    ("text", "protection"),
    [
        ("none", Protection(0, 0)),
        ("auto", Protection(0, 1)),
        ("3+1", Protection(3, 1)),
        ("1+1", Protection(1, 1)),
        ("4+2", Protection(4, 2)),
        ("10+4", Protection(10, 4)),
        ("2+5", Protection(2, 5)),
        ("254+1", Protection(254, 1)),
        ("1+254", Protection(1, 254)),
        ("copies:1", Protection(1, 1)),
        ("copies:2", Protection(1, 2)),
        ("copies:254", Protection(1, 254)),
    ],
)
def test_protection_is_said_in_four_ways(text: str, protection: Protection) -> None:
    assert parse_protect(text) == protection


@pytest.mark.parametrize(
    "text",
    [
        *("", "3", "3+", "+1", "3 + 1", "3+1+1", "-3+1", "all", "None", "3+1\n"),
        *("copies", "copies:", "copies:-1", "copies:two", "copies: 2", "Copies:2", "2 copies", "2+copies:1"),
    ],
)
def test_other_words_for_protection_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"'auto', 'none', "):
        parse_protect(text)


@pytest.mark.parametrize("text", ["0+1", "3+0", "0+0", "255+1", "1000+1", "254+2", "copies:0", "copies:255"])
def test_a_code_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"least 1, .*most 255"):
        parse_protect(text)


# ---------------------------------------------------------------------- warnings for operators


def test_a_layout_that_protects_as_asked_has_no_shortfalls() -> None:
    assert shortfalls(arranged(job(6, 1), Protection(4, 2))) == []
    assert shortfalls(arranged(job(7, 1), Protection(4, 2))) == []
    assert shortfalls(arranged(job(3, 1), Protection(1, 2))) == []


def test_one_parity_is_told_with_what_it_gives_and_what_would_give_more() -> None:
    (said,) = shortfalls(arranged(job(128, 1), parse_protect("auto")))
    for word in ("7+1", "91.5%", "HOLDFAST_DOMAINS", "6+2", "HOLDFAST_PERSIST", "--nodes 128"):
        assert word in said
    (said,) = shortfalls(arranged(job(8, 1), parse_protect("auto")))
    assert "99.4%" in said and "HOLDFAST_DOMAINS" not in said, "one group has both nodes, whatever they are called"
    assert shortfalls(arranged(job(128, 1), parse_protect("6+2"))) == []
    assert shortfalls(arranged(job(8, 1), parse_protect("auto")), 1e9) == [], "its nodes fail once in 30 years"
    racks = [rank(i, f"node{i}", domains=(f"rack=r{i // 2}",)) for i in range(128)]
    assert shortfalls(arranged(racks, parse_protect("auto"))) == []


@pytest.mark.parametrize("nodes", [8, 64, 128, 512])
def test_what_is_told_is_what_the_plan_says(nodes: int) -> None:
    code = parse_protect("auto").for_nodes(nodes)
    judged = judge(code.data, 1, nodes, from_profile(profile(PUBLISHED)), Domains(), 600.0)
    (said,) = shortfalls(arranged(job(nodes, 1), parse_protect("auto")))
    (told,) = re.findall(r"([\d.]+)%, if", said)
    assert float(told) == pytest.approx(100 * judged.survival, abs=0.1)
    two = judge(code.data - 1, 2, nodes, from_profile(profile(PUBLISHED)), Domains(), 600.0)
    assert two.survival > TARGET, "as is said of m = 2"


def test_without_protection_that_is_said_once_however_many_nodes_there_are() -> None:
    for nodes in (1, 3, 9):
        (said,) = shortfalls(arranged(job(nodes, 1), parse_protect("none")))
        assert said.startswith("protect='none': ")
        assert "loss of" in said


def test_one_node_alone_is_told_that_nobody_protects_it() -> None:
    for protection in (AUTO, Protection(3, 1), Protection(4, 2), Protection(1, 2)):
        (said,) = shortfalls(arranged(job(2, 2), protection))
        assert "node0 has no other" in said


def test_too_few_nodes_are_told_what_they_get_instead() -> None:
    (said,) = shortfalls(arranged(job(2, 1), Protection(2, 2)))
    assert "2 nodes (node0, node1) takes 1+1, not 2+2" in said
    (said,) = shortfalls(arranged(job(5, 1), Protection(1, 5)))
    assert "takes 1+4, not 1+5" in said


def test_fewer_data_units_a_stripe_cost_memory_and_no_safety() -> None:
    layout = arranged(job(4, 1), Protection(4, 2))
    assert layout.code(0) == (2, 2)
    assert shortfalls(layout) == []


def test_a_group_that_one_domain_takes_too_much_of_is_told() -> None:
    ranks = [rank(i, f"node{i}", domains=(f"rack=r{i % 2}", f"host=h{i}")) for i in range(4)]
    crowded = shortfalls(arranged(ranks, Protection(3, 1)))
    assert ["2 nodes of rack=r0" in crowded[0], "2 nodes of rack=r1" in crowded[1]] == [True, True]
    assert shortfalls(arranged(ranks, Protection(2, 2))) == []
    assert shortfalls(arranged(ranks, Protection(1, 1))) == []


def test_a_group_that_is_too_small_is_crowded_sooner() -> None:
    ranks = [rank(i, f"node{i}", domains=("rack=r7",)) for i in range(2)]
    small, crowded = shortfalls(arranged(ranks, Protection(2, 2)))
    assert "takes 1+1, not 2+2" in small and "2 nodes of rack=r7" in crowded


# ---------------------------------------------------------------------- domains

COORD = "pp1-tp0-cp0-ep0-dp12"


@pytest.mark.parametrize(
    ("text", "domains"),
    [
        ("", ()),
        (" , ,", ()),
        ("rack=r7", ("rack=r7",)),
        ("switch=s3, rack=r7", ("rack=r7", "switch=s3")),
        ("rack=r7,rack=r7,rack=r8", ("rack=r7", "rack=r8")),
        ("@dp", ("dp=12",)),
        ("rack=r7,@pp,@dp", ("dp=12", "pp=1", "rack=r7")),
        ("dp=12,@dp", ("dp=12",)),
        ("rack=row 7", None),
        ("zone=eu-west/1:a", ("zone=eu-west/1:a",)),
        ("rack=" + "x" * 507, ("rack=" + "x" * 507,)),
        ("rack=" + "x" * 508, None),
        ("rack", None),
        ("=r7", None),
        ("rack=", None),
        ("rack=r=7", None),
        ("a@b=c", None),
        ("rack=r7;switch=s3", None),
        ("rack = r7", None),
    ],
)
def test_domains_are_said_as_kind_and_name(text: str, domains: tuple[str, ...] | None) -> None:
    if domains is None:
        with pytest.raises(ConfigError, match=r"HOLDFAST_DOMAINS: .*kind=name"):
            parse_domains(text, COORD)
    else:
        assert parse_domains(text, COORD) == domains


@pytest.mark.parametrize("text", ["@rack", "@", "@d", "rack=r7,@DP", "@dp12", "@@dp"])
def test_a_dimension_that_a_rank_does_not_have_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"pp1-.*-dp12 has no dimension"):
        parse_domains(text, COORD)


def test_the_domains_of_ranks_that_are_taken_away_at_once_spread_over_groups() -> None:
    """``@dp`` on two pipeline stages: no group has more than one node of a replica."""
    ranks = [
        Node(f"node{p}{d}", "h", 1, p * 8 + d, (Shard(f"pp{p}-dp{d}", 8192),), parse_domains("@dp", f"pp{p}-dp{d}"))
        for p in range(2)
        for d in range(4)
    ]
    layout = arranged(ranks, Protection(3, 1))
    replicas = [sorted(node.domains for node in layout.members(g)) for g in (0, 1)]
    assert replicas == [[("dp=0",), ("dp=1",), ("dp=2",), ("dp=3",)]] * 2
