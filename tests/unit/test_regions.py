"""Which bytes of old shards make up new ones: compared with tensors that are really cut and put together."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.snapshot.resume.regions import Held, Read, Region, block_runs, index_of, plan_reads, range_runs, unclaimed

Cut = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a block begins, and its shape."""


def chunks(size: int, parts: int) -> list[tuple[int, int]]:
    """(begin, length) of each part, cut as by `torch.chunk` and FSDP2; the last may be empty."""
    each = -(-size // parts)
    return [(min(size, i * each), max(0, min(each, size - i * each))) for i in range(parts)]


def along(whole: tuple[int, ...], dimension: int, parts: int) -> list[Cut]:
    """Every rank's block of a tensor that is cut along one dimension."""
    found = []
    for begin, length in chunks(whole[dimension], parts):
        start, shape = [0] * len(whole), list(whole)
        start[dimension], shape[dimension] = begin, length
        found.append((tuple(start), tuple(shape)))
    return found


def region(whole: tuple[int, ...], cut: Cut, key: str = "w") -> Region:
    return Region(key, "F32", whole, block_runs(whole, *cut))


def taken(whole: torch.Tensor, cut: Cut) -> torch.Tensor:
    for dimension, (begin, length) in enumerate(zip(*cut, strict=True)):
        whole = whole.narrow(dimension, begin, length)
    return whole.contiguous()


def carry_out(reads: list[Read], slots: dict[str, bytes], length: int) -> bytes:
    """Carry out `reads`: 0xEE where nothing was read, and an error where something was read twice."""
    out, seen = bytearray(b"\xee" * length), bytearray(length)
    for read in reads:
        assert not any(seen[read.target : read.target + read.bytes]), "twice"
        out[read.target : read.target + read.bytes] = slots[read.coord][read.source : read.source + read.bytes]
        seen[read.target : read.target + read.bytes] = b"\1" * read.bytes
    return bytes(out)


wholes = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)


@given(wholes, st.integers(1, 6), st.integers(1, 6), st.data())
def test_blocks_of_any_cut_are_made_of_those_of_any_other(
    whole: tuple[int, ...], before: int, after: int, data: st.DataObject
) -> None:
    content = torch.arange(math.prod(whole), dtype=torch.float32).reshape(whole)
    old = along(whole, data.draw(st.integers(0, len(whole) - 1)), before)
    new = along(whole, data.draw(st.integers(0, len(whole) - 1)), after)
    prefix = data.draw(st.integers(0, 5)) * 4
    slots = {f"dp{i}": bytes(prefix) + taken(content, cut).numpy().tobytes() for i, cut in enumerate(old)}
    order = data.draw(st.permutations(list(slots)))
    index = index_of((Held(f"dp{i}", prefix, region(whole, cut)) for i, cut in enumerate(old)), order)
    for cut in new:
        expected = taken(content, cut).numpy().tobytes()
        reads, problem = plan_reads(region(whole, cut), index)
        assert problem == ""
        assert carry_out(reads, slots, len(expected)) == expected


@given(st.integers(1, 60), st.lists(st.integers(0, 60), max_size=6), st.lists(st.integers(0, 60), max_size=6))
def test_ranges_of_a_flattened_tensor_are_cut_anew(size: int, before: list[int], after: list[int]) -> None:
    content = torch.arange(size, dtype=torch.float32)
    old = sorted({0, size, *(cut for cut in before if cut < size)})
    new = sorted({0, size, *(cut for cut in after if cut < size)})
    slots = {f"dp{i}": content[a:b].numpy().tobytes() for i, (a, b) in enumerate(pairwise(old))}
    held = [Held(f"dp{i}", 0, Region("w", "F32", (size,), range_runs(a, b))) for i, (a, b) in enumerate(pairwise(old))]
    index = index_of(held, list(slots))
    for a, b in pairwise(new):
        reads, problem = plan_reads(Region("w", "F32", (size,), range_runs(a, b)), index)
        assert problem == ""
        assert carry_out(reads, slots, 4 * (b - a)) == content[a:b].numpy().tobytes()
        assert len(reads) <= len(old)


@given(st.integers(2, 30), st.integers(1, 5), st.data())
def test_a_hole_is_named_and_nothing_is_read(size: int, parts: int, data: st.DataObject) -> None:
    held = [
        Held(f"dp{i}", 0, Region("w", "F32", (size,), range_runs(a, a + n)))
        for i, (a, n) in enumerate(chunks(size, parts))
        if n
    ]
    lost = data.draw(st.integers(0, len(held) - 1))
    index = index_of(held[:lost] + held[lost + 1 :], [f"dp{i}" for i in range(parts)])
    reads, problem = plan_reads(Region("w", "F32", (size,), range_runs(0, size)), index)
    assert reads == []
    first, last, _ = held[lost].region.runs[0]
    assert problem.startswith("w is not" if len(held) == 1 else f"w[{first}:{last}], flattened, ")


def test_what_several_hold_comes_from_the_preferred_one() -> None:
    whole = Region("w", "F32", (9,), range_runs(0, 9))
    index = index_of([Held("dp0", 0, whole), Held("dp1", 8, whole)], ["dp1", "dp0"])
    assert plan_reads(whole, index) == ([Read("dp1", 8, 0, 36)], "")


def test_parts_that_follow_each_other_are_one_read() -> None:
    held = [Held("dp0", 100 + 4 * a, Region("w", "F32", (9,), range_runs(a, b))) for a, b in ((0, 4), (4, 9))]
    reads, _ = plan_reads(Region("w", "F32", (9,), range_runs(2, 8)), index_of(held, ["dp0"]))
    assert reads == [Read("dp0", 108, 0, 24)]


def test_rows_are_one_run_and_columns_one_a_row() -> None:
    assert block_runs((4, 6), (1, 0), (2, 6)) == ((6, 18, 0),)
    assert block_runs((4, 6), (0, 2), (4, 3)) == ((2, 5, 0), (8, 11, 3), (14, 17, 6), (20, 23, 9))
    assert block_runs((), (), ()) == ((0, 1, 0),)
    assert block_runs((4, 6), (4, 0), (0, 6)) == ()


@pytest.mark.parametrize(
    ("start", "shape"), [((3, 0), (2, 6)), ((0,), (4,)), ((-1, 0), (1, 6)), ((), ()), ((0, 0), (4, 7))]
)
def test_a_block_that_is_not_within_the_whole_is_refused(start: tuple[int, ...], shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="is not within"):
        block_runs((4, 6), start, shape)


def test_another_whole_or_dtype_is_no_match() -> None:
    index = index_of([Held("dp0", 0, Region("w", "F32", (9,), range_runs(0, 9)))], ["dp0"])
    _, shape = plan_reads(Region("w", "F32", (3, 3), range_runs(0, 9)), index)
    _, dtype = plan_reads(Region("w", "F64", (9,), range_runs(0, 9)), index)
    assert re.match(r"w is F32\[9\] .*, F32\[3, 3\] ", shape)
    assert re.match(r"w is F32\[9\] .*, F64\[9\] ", dtype)


def test_what_nobody_wants_is_listed() -> None:
    index = index_of([Held("dp0", 0, Region(key, "F32", (1,), range_runs(0, 1))) for key in "bac"], ["dp0"])
    assert unclaimed(index, {"b"}) == ["a is not in this job", "c is not in this job"]
