"""By which broadcasts what one replica has reaches all others: everyone gets it, and it enters each node once."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from holdfast.snapshot.collective.agreement import Hop, groups, hops


def test_on_one_node_or_one_on_each_a_broadcast_does() -> None:
    assert hops(1, [0, 1, 2], ["a", "a", "a"]) == [Hop(1, (0, 1, 2))]
    assert hops(1, [0, 1, 2], ["a", "b", "c"]) == [Hop(1, (0, 1, 2))]


def test_else_it_goes_from_node_to_node_and_then_within() -> None:
    nodes = ["a", "a", "b", "b", "c"]
    assert groups(range(5), nodes) == [(0, 2, 4), (0, 1), (2, 3)]
    assert hops(1, range(5), nodes) == [Hop(1, (0, 1)), Hop(0, (0, 2, 4)), Hop(2, (2, 3))]
    assert hops(4, range(5), nodes) == [Hop(4, (0, 2, 4)), Hop(0, (0, 1)), Hop(2, (2, 3))]


@pytest.mark.parametrize("seed", range(100))
def test_everyone_gets_it_and_it_enters_each_node_once(seed: int) -> None:
    draw = random.Random(seed)
    world = draw.randint(1, 12)
    nodes = [f"node{draw.randrange(4)}" for _ in range(world)]
    members = draw.sample(range(world), draw.randint(1, world))
    owner = draw.choice(members)
    has, entered = {owner}, Counter({nodes[owner]: 1})
    for root, ranks in hops(owner, members, nodes):
        assert ranks in groups(members, nodes)
        assert root in has, "nobody gives what it has not got"
        for rank in set(ranks) - has:
            entered[nodes[rank]] += nodes[rank] != nodes[root]
        if len({nodes[rank] for rank in ranks}) > 1:
            assert len({nodes[rank] for rank in ranks}) == len(ranks), "one of each node"
        has |= set(ranks)
    assert has == set(members)
    assert set(entered.values()) == {1}
