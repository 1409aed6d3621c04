"""Which nodes share a group."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ec import plan_groups

quick = settings(deadline=None, derandomize=True, max_examples=300)

node_counts = st.integers(1, 400)
group_sizes = st.integers(2, 40)


def lengths(nodes: int, size: int) -> list[int]:
    return [len(group) for group in plan_groups(nodes, size)]


def can_avoid_a_group_of_one(nodes: int, size: int) -> bool:
    return any(2 * count <= nodes <= size * count for count in range(1, nodes + 1))


@quick
@given(node_counts, group_sizes)
def test_every_node_is_in_one_group_beside_its_neighbours(nodes: int, size: int) -> None:
    assert list(chain.from_iterable(plan_groups(nodes, size))) == list(range(nodes))


@quick
@given(node_counts, group_sizes)
def test_groups_differ_by_at_most_one_node(nodes: int, size: int) -> None:
    assert max(lengths(nodes, size)) - min(lengths(nodes, size)) <= 1


@quick
@given(st.integers(2, 400), group_sizes)
def test_no_node_is_left_alone(nodes: int, size: int) -> None:
    assert min(lengths(nodes, size)) >= 2


@quick
@given(st.integers(2, 400), group_sizes)
def test_a_group_is_above_size_only_to_leave_no_node_alone(nodes: int, size: int) -> None:
    longest_allowed = size if can_avoid_a_group_of_one(nodes, size) else size + 1
    assert max(lengths(nodes, size)) <= longest_allowed


@quick
@given(st.integers(2, 400), group_sizes)
def test_groups_are_as_few_as_their_size_allows(nodes: int, size: int) -> None:
    assert (len(plan_groups(nodes, size)) - 1) * size < nodes


@pytest.mark.parametrize("nodes", range(1, 41))
@pytest.mark.parametrize("size", range(2, 8))
def test_small_jobs_keep_every_promise(nodes: int, size: int) -> None:
    assert sum(lengths(nodes, size)) == nodes
    assert min(lengths(nodes, size)) >= min(2, nodes)
    assert max(lengths(nodes, size)) <= size + (size == 2 and nodes % 2)


@pytest.mark.parametrize(
    ("nodes", "size", "groups"),
    [
        (1, 4, ((0,),)),
        (2, 4, ((0, 1),)),
        (3, 2, ((0, 1, 2),)),
        (4, 4, ((0, 1, 2, 3),)),
        (5, 4, ((0, 1, 2), (3, 4))),
        (5, 2, ((0, 1, 2), (3, 4))),
        (7, 3, ((0, 1, 2), (3, 4), (5, 6))),
    ],
)
def test_these_jobs_split_like_this(nodes: int, size: int, groups: tuple[tuple[int, ...], ...]) -> None:
    assert plan_groups(nodes, size) == groups


@pytest.mark.parametrize("nodes", [0, -1])
def test_a_job_without_nodes_is_refused(nodes: int) -> None:
    with pytest.raises(ValueError, match=f"at least one node, not {nodes}"):
        plan_groups(nodes, 4)


@pytest.mark.parametrize("size", [1, 0, -1])
def test_a_group_of_fewer_than_two_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"at least two nodes, not {size}"):
        plan_groups(4, size)
