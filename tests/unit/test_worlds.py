"""Which ranks continue for which when the number of data-parallel ranks changes, and with which random streams."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.smp_daemon.shared.errors import StateMismatch
from holdfast.snapshot.resume.elastic import (
    check_change,
    group_of,
    members,
    preference,
    readers,
    stream_owners,
)
from holdfast.snapshot.state import rng, streams


def world(ranks: int, families: tuple[str, ...] = ("",)) -> list[str]:
    return [f"{name}-dp{i}" if name else f"dp{i}" for name in families for i in range(ranks)]


MEGATRON = ("pp0-tp0-cp0-ep0", "pp0-tp1-cp0-ep0")


def test_a_data_parallel_group_is_a_coordinate_without_its_data_parallel_place() -> None:
    assert group_of("pp0-tp1-cp0-ep0-dp12") == "pp0-tp1-cp0-ep0"
    assert group_of("dp3") == ""
    assert members(world(11, MEGATRON), "pp0-tp1-cp0-ep0-dp99")[-1] == "pp0-tp1-cp0-ep0-dp10"


def test_the_number_of_data_parallel_ranks_may_change_and_nothing_else() -> None:
    check_change(world(4, MEGATRON), world(3, MEGATRON))
    for old, new, why in [
        (world(4, MEGATRON), world(4), "only the number"),
        (world(2, MEGATRON), world(4, MEGATRON[:1]), "same tensor"),
        (["dp0", "rank1"], ["dp0"], "no data-parallel place"),
        (["pp0-tp0-cp0-ep1-dp1"], ["pp0-tp0-cp0-ep0-dp0"], "expert parallelism"),
        (["pp0-tp0-cp1-ep0-dp1"], ["pp0-tp0-cp0-ep0-dp0"], "expert parallelism"),
    ]:
        with pytest.raises(StateMismatch, match=why):
            check_change(old, new)


@given(st.integers(1, 12), st.integers(1, 12))
def test_whoever_stays_takes_its_own_and_the_others_take_the_firsts(before: int, after: int) -> None:
    old, new = world(before, MEGATRON), world(after, MEGATRON)
    for coord in new:
        assert preference(coord, old)[0] == (coord if coord in old else f"{group_of(coord)}-dp0")
        assert sorted(preference(coord, old)) == sorted(members(old, coord))
    read = [coord for index in range(len(new)) for coord in readers(old, len(new), index)]
    assert sorted(read) == sorted(old)


@given(st.lists(st.integers(1, 6), min_size=2, max_size=8))
def test_a_stream_is_carried_by_just_one_rank_until_its_own_is_back(sizes: list[int]) -> None:
    """Worlds of any sizes, one after another: no stream that ever existed is lost."""
    carried: dict[str, str] = {}
    ever = set(world(sizes[0], MEGATRON))
    for before, after in pairwise(sizes):
        old, new = world(before, MEGATRON), world(after, MEGATRON)
        share = stream_owners(old, new, carried)
        for carrier, taken in share.items():
            for coord, holder in taken.items():
                assert group_of(coord) == group_of(carrier)
                assert holder == (coord if coord in old else carried[coord])
        flat = [coord for taken in share.values() for coord in taken]
        assert len(flat) == len(set(flat))
        ever |= set(new)
        assert set(flat) == ever - set(new)
        carried = {coord: carrier for carrier, taken in share.items() for coord in taken}


def seeded(seed: int) -> dict[str, object]:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return rng.capture()


def drawn(state: dict[str, object]) -> tuple[float, float, float]:
    rng.restore(state)
    return random.random(), float(np.random.rand()), float(torch.rand(1))


@pytest.fixture(autouse=True)
def own_generators() -> Iterator[None]:
    before = rng.capture()
    yield
    rng.restore(before)


def test_a_new_rank_gets_a_stream_of_seed_coordinate_and_step() -> None:
    first = seeded(7)
    one = streams.for_new_rank(first, (), {}, "dp3", 5)
    torch.manual_seed(0)
    assert drawn(one) == drawn(streams.for_new_rank(first, (), {}, "dp3", 5))
    others = [("dp4", 5, 7), ("dp3", 6, 7), ("dp3", 5, 8)]
    values = {drawn(streams.for_new_rank(seeded(seed), (), {}, coord, step)) for coord, step, seed in others}
    assert len(values | {drawn(one), drawn(first)}) == 5


def test_the_seed_is_known_however_much_was_drawn() -> None:
    seeded(77)
    torch.rand(1000)
    assert streams.seed_of(rng.capture()) == 77


def test_what_is_known_of_a_rank_goes_on_and_what_all_hold_alike_is_the_jobs() -> None:
    first, known = seeded(1), seeded(2)
    assert drawn(streams.for_new_rank(first, (), known, "dp3", 5)) == drawn(known)
    assert drawn(streams.for_new_rank(first, set(first), known, "dp3", 5)) == drawn(first)
    mixed = drawn(streams.for_new_rank(first, {"numpy"}, known, "dp3", 5))
    assert mixed == (drawn(known)[0], drawn(first)[1], drawn(known)[2])


def test_of_one_rank_nobody_can_tell_what_is_the_jobs() -> None:
    first, known = seeded(1), seeded(2)
    one, other = streams.digests(first), streams.digests(known)
    assert streams.alike([one]) is None
    assert streams.alike([one, one]) == frozenset(one) and streams.alike([one, other]) == frozenset()
    assert drawn(streams.for_new_rank(first, None, known, "dp3", 5)) == drawn(known)
    mixed = drawn(streams.for_new_rank(first, None, {"numpy": known["numpy"]}, "dp3", 5))
    assert mixed == (drawn(first)[0], drawn(known)[1], drawn(first)[2])


def test_digests_tell_states_apart() -> None:
    one, two = seeded(1), seeded(1)
    assert streams.digests(one) == streams.digests(two)
    torch.rand(1)
    now = streams.digests(rng.capture())
    assert {name for name, digest in streams.digests(one).items() if now[name] != digest} == {"torch"}
