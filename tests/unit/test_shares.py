"""Shares of replicated state: every element once, balanced, aligned, under names that are unambiguous."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.smp_daemon.shared.slotfile import DTYPE_BYTES, Leaf
from holdfast.snapshot.state.replicas import ALIGN_BYTES, Part, parse_part, part_name, same_on_all, share, whole

shapes = st.one_of(
    st.just(()),
    st.lists(st.integers(0, 6), min_size=1, max_size=3).map(tuple),
    st.integers(0, 5000).map(lambda n: (n,)),
)
runs = st.lists(
    st.builds(Leaf, st.text("ab@:01.", min_size=1, max_size=6), st.sampled_from(sorted(DTYPE_BYTES)), shapes),
    max_size=12,
    unique_by=lambda leaf: leaf.name,
)
replica_counts = st.integers(1, 40)
odd_names = st.one_of(st.text("a@:0123456789", min_size=1, max_size=12), st.text(min_size=1, max_size=8))


def all_shares(leaves: Sequence[Leaf], replicas: int) -> list[tuple[Part, ...]]:
    return [share(leaves, replicas, index) for index in range(replicas)]


def share_bytes(leaves: Sequence[Leaf], parts: Sequence[Part]) -> int:
    sizes = {leaf.name: DTYPE_BYTES[leaf.dtype] for leaf in leaves}
    return sum((part.stop - part.start) * sizes[part.name] for part in parts)


# ---------------------------------------------------------------- who keeps what


@given(runs, replica_counts)
def test_every_element_is_kept_exactly_once(leaves: list[Leaf], replicas: int) -> None:
    shares = all_shares(leaves, replicas)
    for leaf in leaves:
        count = [0] * math.prod(leaf.shape)
        for part in (part for parts in shares for part in parts if part.name == leaf.name):
            for element in range(part.start, part.stop):
                count[element] += 1
        assert set(count) <= {1}


@given(runs, replica_counts)
def test_every_share_is_within_64_bytes_of_its_due(leaves: list[Leaf], replicas: int) -> None:
    total = sum(leaf.bytes for leaf in leaves)
    held = [share_bytes(leaves, parts) for parts in all_shares(leaves, replicas)]
    assert sum(held) == total
    assert all(abs(count * replicas - total) <= ALIGN_BYTES * replicas for count in held)
    assert max(held) - min(held) <= 2 * ALIGN_BYTES


@given(runs, replica_counts)
def test_a_part_begins_aligned_in_its_leaf_and_is_never_empty_unless_the_leaf_is(
    leaves: list[Leaf], replicas: int
) -> None:
    by_name = {leaf.name: leaf for leaf in leaves}
    for parts in all_shares(leaves, replicas):
        for part in parts:
            leaf = by_name[part.name]
            size, count = DTYPE_BYTES[leaf.dtype], math.prod(leaf.shape)
            assert part.start * size % ALIGN_BYTES == 0
            assert part.stop == count or part.stop * size % ALIGN_BYTES == 0
            assert part.start < part.stop or count == 0


@given(runs, replica_counts, st.randoms(use_true_random=False))
def test_the_order_of_the_leaves_does_not_matter(leaves: list[Leaf], replicas: int, order: random.Random) -> None:
    shuffled = list(leaves)
    order.shuffle(shuffled)
    assert all_shares(shuffled, replicas) == all_shares(leaves, replicas)


@given(runs)
def test_a_single_replica_keeps_everything_whole(leaves: list[Leaf]) -> None:
    assert share(leaves, 1, 0) == tuple(whole(leaf) for leaf in sorted(leaves, key=lambda leaf: leaf.name))


@given(runs, replica_counts)
def test_a_replica_keeps_one_contiguous_range_and_the_ranges_follow_each_other(
    leaves: list[Leaf], replicas: int
) -> None:
    parts = [part for one in all_shares(leaves, replicas) for part in one if part.start < part.stop]
    assert parts == sorted(parts, key=lambda part: (part.name, part.start))


def test_leaves_without_bytes_are_kept_by_replica_0() -> None:
    leaves = [Leaf("z", "F32", (0, 3)), Leaf("a", "F32", (100,)), Leaf("b", "U8", (0,))]
    first, *others = all_shares(leaves, 3)
    assert [part for part in first if part.name != "a"] == [Part("b", 0, 0), Part("z", 0, 0)]
    assert {part.name for parts in others for part in parts} == {"a"}


def test_more_replicas_than_bytes_leave_some_with_nothing() -> None:
    shares = all_shares([Leaf("a", "U8", (3,)), Leaf("b", "I64", ())], 50)
    assert [part for parts in shares for part in parts if part.name == "a"] == [Part("a", 0, 3)]
    assert sum(1 for parts in shares if parts) == 2


def test_a_cut_is_where_the_docstring_says() -> None:
    """360 + 100 bytes for two: the ideal cut at 230 moves to 256, the 64th element of the first leaf."""
    leaves = [Leaf("a", "F32", (9, 10)), Leaf("b", "U8", (100,))]
    assert all_shares(leaves, 2) == [(Part("a", 0, 64),), (Part("a", 64, 90), Part("b", 0, 100))]


def test_a_cut_takes_the_end_of_a_leaf_if_that_is_nearer() -> None:
    leaves = [Leaf("a", "U8", (100,)), Leaf("b", "U8", (108,))]
    assert all_shares(leaves, 2) == [(Part("a", 0, 100),), (Part("b", 0, 108),)]


def test_no_leaves_are_nobodys() -> None:
    assert all_shares([], 3) == [(), (), ()]


# ---------------------------------------------------------------- names


def test_a_whole_leaf_keeps_its_name_and_a_part_says_where_it_is() -> None:
    leaf = Leaf("layer.weight", "F32", (10, 20))
    assert part_name(whole(leaf), leaf) == "layer.weight"
    assert part_name(Part("layer.weight", 16, 200), leaf) == "layer.weight@16:200"
    assert parse_part("layer.weight") is None
    assert parse_part("layer.weight@16:200") == ("layer.weight", 16, 200)


def test_a_leaf_that_is_called_like_a_part_is_told_apart() -> None:
    odd, plain = Leaf("w@0:16", "F32", (64,)), Leaf("w", "F32", (64,))
    assert part_name(whole(odd), odd) == "w@0:16@0:64"
    assert part_name(Part("w", 0, 16), plain) == "w@0:16"
    assert parse_part("w@0:16@0:64") == ("w@0:16", 0, 64)


@given(odd_names, st.integers(0, 10**9), st.integers(0, 10**9))
def test_a_part_comes_back_from_its_name(name: str, start: int, length: int) -> None:
    leaf = Leaf(name, "U8", (10**10,))
    assert parse_part(part_name(Part(name, start, start + length), leaf)) == (name, start, start + length)


@given(odd_names, st.integers(0, 20))
def test_a_whole_leaf_comes_back_from_its_name(name: str, count: int) -> None:
    leaf = Leaf(name, "U8", (count,))
    stored = part_name(whole(leaf), leaf)
    assert (parse_part(stored) or (stored, 0, count)) == (name, 0, count)


@pytest.mark.parametrize(
    "name",
    ["", "w", "@", "@0:1", "w@", "w@1", "w@1:", "w@:1", "w@2:1", "w@01:2", "w@1:2 ", "w@-1:2", "w@٣:٤", "user@host"],
)
def test_what_we_did_not_write_is_a_leafs_own_name(name: str) -> None:
    assert parse_part(name) is None


# ---------------------------------------------------------------- what is the same on all


def test_what_all_replicas_have_alike_is_believed() -> None:
    digests = [{"w": 1, "rng": 2, "only": 3}, {"w": 1, "rng": 9}, {"rng": 2, "w": 1}]
    assert same_on_all(digests) == {"w"}
    assert same_on_all(digests[:1]) == {"w", "rng", "only"}
    assert same_on_all([]) == frozenset()
    assert same_on_all([{"w": 1}, {}]) == frozenset()
    assert same_on_all([{}, {"w": 1}]) == frozenset()
