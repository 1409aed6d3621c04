"""Which nodes share a group, and how many of them the loss of a failure domain takes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.ec import crowded, plan_groups

ROOT = Path(__file__).parents[2]

Groups = Sequence[Collection[int]]
Domains = list[list[str]]

node_counts = st.integers(1, 400)
group_sizes = st.integers(2, 40)
limits = st.integers(1, 4)


@st.composite
def racks(draw: st.DrawFn, most: int = 80) -> Domains:
    """Nodes with at most one label each, all of the same kind, in any order."""
    held = draw(st.lists(st.integers(0, 12), min_size=1, max_size=12))
    nodes = [[f"rack={rack}"] for rack, count in enumerate(held) for _ in range(count)]
    nodes += [[] for _ in range(draw(st.integers(0 if nodes else 1, 12)))]
    return draw(st.permutations(nodes[:most]))


@st.composite
def tangles(draw: st.DrawFn) -> Domains:
    """Nodes with labels of several kinds."""
    counts = [draw(st.integers(1, 8)) for _ in range(draw(st.integers(1, 3)))]
    nodes = draw(st.integers(1, 40))
    return [[f"{kind}={draw(st.integers(0, count))}" for kind, count in enumerate(counts)] for _ in range(nodes)]


def grid(rows: int, columns: int, racks_per_switch: int) -> Domains:
    """A rack in each row, a data-parallel replica in each column, a switch over some racks."""
    return [
        [f"rack={row}", f"switch={row // racks_per_switch}", f"dp={column}"]
        for row in range(rows)
        for column in range(columns)
    ]


def largest_domain(domains: Domains) -> int:
    return max(Counter(chain.from_iterable(domains)).values(), default=0)


def taken(groups: Groups, domains: Domains, label: str) -> list[int]:
    """How many nodes each group loses with a domain."""
    lost = {node for node, labels in enumerate(domains) if label in labels}
    return [len(lost & set(group)) for group in groups]


def is_split(groups: Groups, nodes: int, size: int) -> bool:
    """Whether each node is in one group, and groups are as even and as many as at least `size` nodes each allow."""
    held = [len(group) for group in groups]
    return (
        sorted(chain.from_iterable(groups)) == list(range(nodes))
        and len(groups) == max(1, nodes // size)
        and max(held) - min(held) <= 1
        and (min(held) >= size or len(groups) == 1)
    )


class TestTheSplit:
    @given(node_counts, group_sizes)
    def test_groups_are_even_and_at_least_as_large_as_asked(self, nodes: int, size: int) -> None:
        assert is_split(plan_groups(nodes, size), nodes, size)

    @given(node_counts, group_sizes)
    def test_without_domains_neighbours_stay_together(self, nodes: int, size: int) -> None:
        assert list(chain.from_iterable(plan_groups(nodes, size))) == list(range(nodes))

    @given(st.one_of(racks(), tangles()), st.integers(2, 12), limits)
    def test_domains_change_who_is_in_a_group_and_not_how_many(self, domains: Domains, size: int, limit: int) -> None:
        assert is_split(plan_groups(len(domains), size, limit, domains), len(domains), size)

    @pytest.mark.parametrize(
        ("nodes", "size", "groups"),
        [
            (1, 4, ((0,),)),
            (2, 4, ((0, 1),)),
            (3, 2, ((0, 1, 2),)),
            (4, 4, ((0, 1, 2, 3),)),
            (5, 4, ((0, 1, 2, 3, 4),)),
            (5, 2, ((0, 1, 2), (3, 4))),
            (7, 3, ((0, 1, 2, 3), (4, 5, 6))),
            (8, 4, ((0, 1, 2, 3), (4, 5, 6, 7))),
        ],
    )
    def test_these_jobs_split_like_this(self, nodes: int, size: int, groups: tuple[tuple[int, ...], ...]) -> None:
        assert plan_groups(nodes, size) == groups

    def test_groups_and_their_nodes_are_in_order(self) -> None:
        groups = plan_groups(64, 5, 2, grid(8, 8, 2))
        assert [sorted(group) for group in groups] == [list(group) for group in groups]
        assert sorted(groups) == list(groups)


class TestOneKindOfDomain:
    @given(racks(), st.integers(2, 12), limits)
    def test_nothing_is_crowded_exactly_when_that_is_possible(self, domains: Domains, size: int, limit: int) -> None:
        groups = plan_groups(len(domains), size, limit, domains)
        possible = largest_domain(domains) <= limit * len(groups)
        assert (not crowded(groups, domains, [limit] * len(groups))) == possible

    @given(racks(), st.integers(2, 12), limits)
    def test_the_loss_of_a_domain_is_shared_evenly(self, domains: Domains, size: int, limit: int) -> None:
        groups = plan_groups(len(domains), size, limit, domains)
        for label in set(chain.from_iterable(domains)):
            held = taken(groups, domains, label)
            assert max(held) - min(held) <= 1


class TestSeveralKindsOfDomains:
    @pytest.mark.parametrize(("size", "limit"), [(4, 1), (4, 2), (5, 2), (8, 2), (8, 3), (12, 4)])
    @pytest.mark.parametrize(("rows", "columns"), [(8, 8), (16, 8), (12, 10)])
    def test_a_grid_of_racks_switches_and_replicas_is_parted(
        self, rows: int, columns: int, size: int, limit: int
    ) -> None:
        domains = grid(rows, columns, racks_per_switch=2)
        groups = plan_groups(len(domains), size, limit, domains)
        assert is_split(groups, len(domains), size)
        assert largest_domain(domains) <= limit * len(groups)
        assert crowded(groups, domains, [limit] * len(groups)) == []
        for label in set(chain.from_iterable(domains)):
            assert max(taken(groups, domains, label)) <= limit

    def test_dealing_alone_would_not_part_such_a_grid(self) -> None:
        domains = grid(8, 8, racks_per_switch=2)
        dealt = [list(range(64))[first::8] for first in range(8)]
        assert crowded(dealt, domains, [2] * 8)

    @pytest.mark.parametrize("seed", range(5))
    def test_shuffled_nodes_are_parted_as_well(self, seed: int) -> None:
        domains = grid(12, 10, racks_per_switch=2)
        random.Random(seed).shuffle(domains)
        groups = plan_groups(120, 8, 2, domains)
        assert crowded(groups, domains, [2] * len(groups)) == []

    @given(tangles(), st.integers(2, 8), limits)
    def test_no_exchange_of_two_nodes_would_help_any_more(self, domains: Domains, size: int, limit: int) -> None:
        groups = plan_groups(len(domains), size, limit, domains)
        left = excess(groups, domains, limit)
        for a, b in combinations(range(len(groups)), 2):
            for place_a, node_a in enumerate(groups[a]):
                for place_b, node_b in enumerate(groups[b]):
                    exchanged = [list(group) for group in groups]
                    exchanged[a][place_a], exchanged[b][place_b] = node_b, node_a
                    assert excess(exchanged, domains, limit) >= left

    def test_a_thousand_nodes_are_parted(self) -> None:
        domains = [[f"rack={n // 8}", f"switch={n // 32}", f"dp={n % 25}"] for n in range(1000)]
        groups = plan_groups(1000, 8, 1, domains)
        assert is_split(groups, 1000, 8)
        assert crowded(groups, domains, [1] * len(groups)) == []

    @given(tangles(), st.integers(2, 8), limits, st.randoms(use_true_random=False))
    def test_every_node_computes_the_same_groups(
        self, domains: Domains, size: int, limit: int, order: random.Random
    ) -> None:
        groups = plan_groups(len(domains), size, limit, domains)
        otherwise_told = [order.sample(labels, len(labels)) for labels in domains]
        assert plan_groups(len(domains), size, limit, otherwise_told) == groups

    def test_the_groups_do_not_hang_on_how_strings_are_hashed(self) -> None:
        program = (
            "from holdfast.ec import plan_groups\n"
            "from tests.unit.test_ec_groups import grid\n"
            "print(plan_groups(120, 8, 1, grid(12, 10, 3)))"
        )
        printed = {told_with_hash_seed(program, seed) for seed in ("1", "2")}
        assert printed == {f"{plan_groups(120, 8, 1, grid(12, 10, 3))}\n"}


def excess(groups: Groups, domains: Domains, limit: int) -> int:
    """By how many nodes groups are over the limit, summed over all domains."""
    labels = set(chain.from_iterable(domains))
    return sum(max(0, held - limit) for label in labels for held in taken(groups, domains, label))


def told_with_hash_seed(program: str, seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    return run.stdout


class TestCrowded:
    @given(tangles(), st.data())
    def test_it_tells_exactly_the_domains_that_take_too_many(self, domains: Domains, data: st.DataObject) -> None:
        order = data.draw(st.permutations(range(len(domains))))
        count = data.draw(st.integers(1, 4))
        groups = [order[first::count] for first in range(count)]
        allowed = data.draw(st.lists(limits, min_size=count, max_size=count))
        expected = {
            (index, label, held, allowed[index])
            for label in set(chain.from_iterable(domains))
            for index, held in enumerate(taken(groups, domains, label))
            if held > allowed[index]
        }
        told = [(found.group, found.label, found.nodes, found.limit) for found in crowded(groups, domains, allowed)]
        assert told == sorted(expected)

    def test_it_says_which_group_and_what_it_survives(self) -> None:
        domains = [["rack=a", "power=x"], ["rack=a"], ["rack=b", "power=x"], ["rack=b"]]
        found = crowded([(0, 1), (2, 3)], domains, [1, 2])
        (told,) = map(str, found)
        assert "group 0 has 2 nodes " in told and "rack=a" in told and told.endswith(" 1")

    def test_a_node_that_says_its_label_twice_counts_once(self) -> None:
        domains = [["rack=a", "rack=a"], ["rack=b"]]
        assert crowded([(0, 1)], domains, [1]) == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((0, 4), "one node, not 0"),
        ((4, 1), "two nodes, not 1"),
        ((4, 2, 0), "one node, not 0"),
        *(((4, 2, 1, [["rack=a"]] * count), f"4 nodes .*{count}") for count in (0, 3, 5)),
    ],
)
def test_what_makes_no_group_is_refused(arguments: tuple[Any, ...], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        plan_groups(*arguments)
