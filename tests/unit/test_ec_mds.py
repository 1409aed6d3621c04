"""Any k of k + m units recover the others: every erasure pattern of every k <= 12 and m <= 4, to the last byte."""

from __future__ import annotations

import mmap
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product

import pytest

from holdfast.ec import Codec, TooManyErasures, choose_codec
from tests.sampling import chosen

CODES = list(product(range(1, 13), range(1, 5)))
SAMPLE = CODES[::6]
PATTERNS = 12_541
UNIT_SIZES = (0, 1, 63, 64, 65, 4095, 4097)
BIG_UNIT = (1 << 20) + 7
SPOILT = bytes([0xA5]) * BIG_UNIT

each_code = pytest.mark.parametrize(("k", "m"), CODES)
sampled_code = pytest.mark.parametrize(("k", "m"), chosen(CODES, SAMPLE))
sampled_code_and_the_largest = pytest.mark.parametrize(("k", "m"), chosen(CODES, [*SAMPLE, CODES[-1]]))


def patterns(k: int, m: int) -> Iterator[tuple[int, ...]]:
    """Every set of up to m units that can be lost."""
    for count in range(m + 1):
        yield from combinations(range(k + m), count)


def mapped(length: int, start: int) -> memoryview:
    """Memory that begins `start` bytes into a page."""
    return memoryview(mmap.mmap(-1, start + length or 1))[start : start + length]


@dataclass
class Stripe:
    """One stripe, its expected contents, and room to recover lost units in."""

    codec: Codec
    units: Sequence[memoryview]
    expected: Sequence[bytearray]
    room: Sequence[memoryview]

    def comes_back(self, lost: Sequence[int]) -> bool:
        """Whether the first k remaining units recover the lost ones."""
        left = [index for index in range(len(self.units)) if index not in lost][: self.codec.k]
        wanted = dict(zip(lost, self.room, strict=False))
        for out in wanted.values():
            out[:] = SPOILT[: out.nbytes]
        self.codec.reconstruct({index: self.units[index] for index in left}, wanted)
        return all(self.expected[index] == out for index, out in wanted.items())


def encoded(k: int, m: int, length: int, start: int) -> Stripe:
    codec = choose_codec(k, m, "isal")
    units = [mapped(length, start) for _ in range(k + m)]
    source = random.Random(k << 16 | m)
    for unit in units[:k]:
        unit[:] = source.randbytes(length)
    codec.encode(units[:k], units[k:])
    return Stripe(codec, units, [bytearray(unit) for unit in units], [mapped(length, start) for _ in range(m)])


def test_there_are_as_many_patterns_as_combinatorics_says() -> None:
    every = [(k, m, lost) for k, m in CODES for lost in patterns(k, m)]
    assert len(set(every)) == len(every) == PATTERNS


@pytest.mark.parametrize("start", [0, 1], ids=["aligned", "unaligned"])
@sampled_code_and_the_largest
@pytest.mark.proves("nodes-are-lost")
def test_every_pattern_comes_back(k: int, m: int, start: int) -> None:
    stripes = [encoded(k, m, length, start) for length in UNIT_SIZES]
    for lost in patterns(k, m):
        assert [stripe.comes_back(lost) for stripe in stripes] == [True] * len(UNIT_SIZES), lost


@sampled_code
def test_every_pattern_of_big_units_comes_back(k: int, m: int) -> None:
    stripe = encoded(k, m, BIG_UNIT, 0)
    for lost in patterns(k, m):
        assert stripe.comes_back(lost), lost


@each_code
def test_fewer_than_k_units_are_too_few_for_any_other(k: int, m: int) -> None:
    stripe = encoded(k, m, 16, 0)
    for left in combinations(range(k + m), k - 1):
        lost = next(index for index in range(k + m) if index not in left)
        with pytest.raises(TooManyErasures, match=f"^{k - 1} units .* {k} are needed"):
            stripe.codec.reconstruct({index: stripe.units[index] for index in left}, {lost: stripe.room[0]})
