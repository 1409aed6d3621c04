"""The broadcasts by which one replica's bytes reach all others: everyone gets them, and they enter each node once."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from holdfast.snapshot.collective.mesh import Hop, branch, distances, hops, sockets_needed


def test_on_one_node_or_one_on_each_a_broadcast_does() -> None:
    assert hops(1, [0, 1, 2], ["a", "a", "a"]) == [Hop(1, (0, 1, 2))]
    assert hops(1, [0, 1, 2], ["a", "b", "c"]) == [Hop(1, (0, 1, 2))]


def test_else_it_goes_from_node_to_node_and_then_within() -> None:
    nodes = ["a", "a", "b", "b", "c"]
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
        assert root in has, "nobody gives what it has not got"
        for rank in set(ranks) - has:
            entered[nodes[rank]] += nodes[rank] != nodes[root]
        if len({nodes[rank] for rank in ranks}) > 1:
            assert len({nodes[rank] for rank in ranks}) == len(ranks), "one of each node"
        has |= set(ranks)
    assert has == set(members)
    assert set(entered.values()) == {1}


@pytest.mark.parametrize("size", [*range(1, 40), 16_384, 100_000])
def test_after_a_dissemination_all_have_heard_of_all(size: int) -> None:
    reach = 1  # how many ranks each has heard of, itself and those before it: the same for all
    for distance in distances(size):
        assert distance <= reach, "what is between would never be heard of"
        reach += distance
    assert reach >= size
    assert len(distances(size)) == (size - 1).bit_length()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 12, 33])
@pytest.mark.parametrize("root", [0, 1, 5])
def test_a_tree_has_everyone_once_in_order_and_by_few_connections(size: int, root: int) -> None:
    root %= size

    def subtree(rank: int) -> list[int]:
        return [rank, *(each for child in branch(rank, root, size).children for each in subtree(child))]

    assert subtree(root) == [(root + i) % size for i in range(size)]
    for rank in range(size):
        here = branch(rank, root, size)
        assert all(branch(child, root, size).parent == rank for child in here.children)
        away = {(other - rank) % size for other in (*here.children, *([] if here.parent is None else [here.parent]))}
        assert away <= {sign * d % size for d in distances(size) for sign in (1, -1)}
        assert len(away) <= sockets_needed(size)


def test_sixteen_thousand_ranks_take_few_connections() -> None:
    assert sockets_needed(16_384) == 28
    assert sockets_needed(3) == 2
