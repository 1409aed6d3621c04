"""Runs are cut, gathered into batches and copied as plain slicing would, and nothing outside them is touched.

A stray access may kill the process, so copies between inaccessible pages run in a process of their own: this module,
started as a program.
"""

from __future__ import annotations

import ctypes
import faulthandler
import random
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.ec.codec import as_array
from holdfast.snapshot.copy import runs
from tests.scripts import completed
from tests.system.test_ec_guard import FILL, PAGE, ROOT, Enclosure, address

BLOCK = 4 * PAGE
"""Runs of this length or more are copied with streaming stores from the next line of 64 bytes on."""
LENGTHS = (
    *range(131),
    *(count * BLOCK + beside for count in (1, 2) for beside in (*range(-66, 67), PAGE, BLOCK - 1)),
)
SHIFTS = (0, 1, 16, 63)

Row = tuple[int, int, int]


def no_library() -> None:
    """`runs._library` where there was no compiler."""


@pytest.fixture(params=["streaming", "memmove"])
def copier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of what copies."""
    if request.param == "memmove":
        monkeypatch.setattr(runs, "_library", no_library)
    elif runs._library() is None:
        pytest.skip("holdfast was installed without a compiler")
    return str(request.param)


@st.composite
def tables(draw: st.DrawFn) -> tuple[int, list[Row]]:
    """A limit, and rows whose lengths lie around its multiples."""
    limit = draw(st.integers(1, 40))
    near = st.builds(lambda count, beside: max(0, count * limit + beside), st.integers(0, 4), st.integers(-1, 1))
    rows = draw(st.lists(st.tuples(st.integers(0, 2**47), st.integers(0, 2**47), near | st.integers(0, 200))))
    return limit, rows


def steps(table: runs.Runs) -> list[tuple[int, int]]:
    """Every byte that is copied, as (from, to), in order."""
    return [(source + i, target + i) for source, target, length in table.tolist() for i in range(length)]


@given(tables())
def test_split_runs_are_the_same_bytes_in_runs_within_the_limit(drawn: tuple[int, list[Row]]) -> None:
    limit, rows = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "PIECE_BYTES", limit)
        whole = runs.make_runs(rows)
        cut = runs.split(whole)
    assert cut.dtype == np.uint64
    assert steps(cut) == steps(whole)
    assert all(0 < length <= limit for length in cut[:, 2].tolist())
    assert len(cut) == sum(-(-length // limit) for _, _, length in rows)


@given(tables())
def test_batches_are_the_same_runs_and_about_as_long_as_the_limit(drawn: tuple[int, list[Row]]) -> None:
    limit, rows = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "PIECE_BYTES", limit)
        whole = runs.make_runs(rows)
        batches = runs.batches(whole)
    assert [step for batch in batches for step in steps(batch)] == steps(whole)
    counts = [int(batch[:, 2].sum()) for batch in batches]
    assert all(0 < count <= limit for count in counts)
    assert all(count + int(after[0, 2]) > limit for count, after in zip(counts, batches[1:], strict=False))


def test_runs_of_nothing_are_left_out() -> None:
    table = runs.make_runs([(1, 2, 0), (3, 4, 5), (6, 7, 0)])
    assert table.tolist() == [[3, 4, 5]]
    assert runs.make_runs([(1, 2, 0)]).shape == (0, 3)
    assert runs.batches(runs.make_runs([])) == []


def test_addresses_above_half_of_the_range_stay_exact() -> None:
    high = 2**64 - 4 * runs.PIECE_BYTES
    cut = runs.split(runs.make_runs([(high + 1, high + 3, 2 * runs.PIECE_BYTES + 5)]))
    assert cut.tolist() == [
        [high + 1 + i * runs.PIECE_BYTES, high + 3 + i * runs.PIECE_BYTES, length]
        for i, length in enumerate((runs.PIECE_BYTES, runs.PIECE_BYTES, 5))
    ]


def in_memory(rows: Sequence[Row], source: bytes, target: bytearray) -> runs.Runs:
    """`rows` as runs, with their offsets turned into addresses."""
    base_source, base_target = address(memoryview(source)), address(memoryview(target))
    return runs.make_runs([(base_source + a, base_target + b, length) for a, b, length in rows])


@pytest.mark.parametrize("seed", range(40))
def test_a_copy_is_what_slicing_gives(copier: str, seed: int) -> None:
    numbers = random.Random(seed)
    source = numbers.randbytes(3 * BLOCK)
    rows, end = [], numbers.randrange(70)
    for _ in range(numbers.randrange(12)):
        length = numbers.choice([numbers.randrange(200), numbers.randrange(2 * BLOCK), BLOCK + numbers.randrange(64)])
        rows.append((numbers.randrange(len(source) - length + 1), end, length))
        end += length + numbers.randrange(70)
    target = bytearray([FILL]) * (end + 70)
    sliced = bytearray(target)
    for at, to, length in rows:
        sliced[to : to + length] = source[at : at + length]
    runs.copy(in_memory(rows, source, target))
    assert target == sliced


def test_every_batch_may_be_copied_by_itself(copier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "PIECE_BYTES", 1000)
    source = random.Random(1).randbytes(3 * BLOCK)
    target = bytearray(len(source))
    for batch in runs.batches(in_memory([(0, 5, BLOCK), (BLOCK, BLOCK + 5, 2 * BLOCK - 5)], source, target)):
        runs.copy(batch)
    assert target == bytes(5) + source[:-5]


def test_every_other_run_of_a_table_can_be_copied(copier: str) -> None:
    source, target = bytes(range(64)), bytearray(64)
    runs.copy(in_memory([(i, i, 1) for i in range(64)], source, target)[::2])
    assert target == bytes(0 if i % 2 else i for i in range(64))


def test_no_runs_are_no_copy(copier: str) -> None:
    source, target = bytes(range(1, 65)), bytearray(64)
    table = in_memory([(0, 0, 64)], source, target)
    for none in (table[:0], runs.make_runs([])):
        runs.copy(none)
    assert target == bytes(64)


def test_this_installation_has_the_compiled_library() -> None:
    if shutil.which("cc") is None and runs._library() is None:
        pytest.skip("there is no compiler here")
    assert runs._library() is not None, "snapshot/stream.c was not compiled: install holdfast again"
    assert runs.streams()


def test_an_installation_without_the_library_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_library", no_library)
    assert not runs.streams()


# ------------------------------------------------------------------ between inaccessible pages


def walk(copy: Callable[[runs.Runs], None]) -> None:
    """Copy a run of every length, from and to either end of its pages and just beside it."""
    pages = -(-(max(LENGTHS) + max(SHIFTS)) // PAGE)
    source, target = Enclosure(pages), Enclosure(pages)
    data = as_array(source.inside)
    data[:] = np.frombuffer(random.Random(5).randbytes(data.nbytes), np.uint8)
    room = as_array(target.inside)
    for length in LENGTHS:
        for ends, shift, other in product(product(("start", "end"), repeat=2), SHIFTS, (0, 1)):
            at, to = (place(end, length, by, room.nbytes) for end, by in zip(ends, (other, shift), strict=True))
            print(f"{length} bytes from {ends[0]}, {other} to {ends[1]}, {shift}", flush=True)
            room[:] = FILL
            copy(runs.make_runs([(address(source.inside) + at, address(target.inside) + to, length)]))
            assert (room[to : to + length] == data[at : at + length]).all(), "the result is wrong"
            assert (room[:to] == FILL).all() and (room[to + length :] == FILL).all(), "a byte beside it was written"
    print("done", flush=True)


def place(end: str, length: int, shift: int, room: int) -> int:
    return shift if end == "start" else room - length - shift


def careless(mistake: str) -> Callable[[runs.Runs], None]:
    """A copy that writes a byte too many."""

    def copy(table: runs.Runs) -> None:
        runs.copy(table + np.array([0, 0, mistake == "long"], np.uint64))
        for target in table[:, 1].tolist() if mistake == "early" else ():
            ctypes.memset(target - 1, 0, 1)

    return copy


def main(copier: str) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    if copier == "memmove":
        runs._library = no_library  # type: ignore[assignment]
    walk(careless(copier) if copier in ("long", "early") else runs.copy)


def walked(copier: str) -> tuple[int, str, str]:
    """Exit status, last step and errors of a walk."""
    command = [sys.executable, "-m", "tests.unit.test_runs", copier]
    ended = completed(command, cwd=ROOT)
    return ended.returncode, (ended.stdout.splitlines() or [""])[-1], ended.stderr


def test_no_copy_leaves_its_runs(copier: str) -> None:
    assert walked(copier) == (0, "done", "")


@pytest.mark.parametrize("mistake", ["long", "early"])
def test_a_walk_notices_one_byte_outside(mistake: str) -> None:
    status, step, errors = walked(mistake)
    assert step != "done"
    assert status == -signal.SIGSEGV or "was written" in errors, errors


if __name__ == "__main__":
    main(*sys.argv[1:])
