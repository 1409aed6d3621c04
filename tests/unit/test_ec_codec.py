"""What every backend of a code does: the bytes it writes, what it recovers, and what it refuses."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, combinations, permutations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.pyeclib_codec import codec_of
from holdfast.ec import Codec, TooManyErasures
from holdfast.ec.backends import NumpyKernel, load
from holdfast.ec.codec import Kernel, check_equal_lengths
from holdfast.ec.matrix import multiplication_table, multiply
from tests.sampling import chosen

UNIT_SIZES = (0, 1, 63, 64, 65, 4095, 4097)
BIG_UNIT = (1 << 20) + 7


def speaks(backend: str, k: int, m: int) -> bool:
    """Whether the backend supports the code: pyeclib has no plain copies."""
    return backend != "pyeclib" or k > 1 or m == 1


BACKENDS = ("isal", "numpy", "pyeclib")
PROVED = list(product(range(1, 13), range(1, 5)))
WIDE = [(1, 9), (9, 9), (40, 3), (251, 4), (254, 1)]

each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_code = pytest.mark.parametrize(("backend", "m"), list(product(BACKENDS, (1, 2, 3))))
OF_PYECLIB = [(k, m) for k, m in PROVED if speaks("pyeclib", k, m)]
sampled_pyeclib_code = pytest.mark.parametrize(("k", "m"), chosen(OF_PYECLIB, OF_PYECLIB[::6]))


def random_units(count: int, length: int, seed: int = 7) -> list[bytes]:
    source = random.Random(seed)
    return [source.randbytes(length) for _ in range(count)]


def views(buffers: Iterable[bytes | bytearray]) -> list[memoryview]:
    return [memoryview(buffer) for buffer in buffers]


def filled(count: int, length: int, value: int) -> list[bytearray]:
    return [bytearray([value]) * length for _ in range(count)]


def encode(codec: Codec, data: Sequence[bytes]) -> list[bytes]:
    parity = filled(codec.m, len(data[0]), 0xFF)
    codec.encode(views(data), views(parity))
    return [bytes(part) for part in parity]


def accumulate(codec: Codec, data: Sequence[bytes], order: Iterable[int]) -> list[bytes]:
    parity = filled(codec.m, len(data[0]), 0)
    for index in order:
        codec.accumulate(index, memoryview(data[index]), dict(enumerate(views(parity))))
    return [bytes(part) for part in parity]


def stripe_of(codec: Codec, length: int) -> list[bytes]:
    data = random_units(codec.k, length)
    return data + encode(codec, data)


def reconstruct(codec: Codec, stripe: Sequence[bytes], kept: Iterable[int], wanted: Iterable[int]) -> dict[int, bytes]:
    length = len(stripe[0])
    out = {index: bytearray(b"\xff") * length for index in wanted}
    codec.reconstruct(
        {index: memoryview(stripe[index]) for index in kept},
        {index: memoryview(buffer) for index, buffer in out.items()},
    )
    return {index: bytes(buffer) for index, buffer in out.items()}


def summed(codec: Codec, units: Sequence[bytes], terms: Iterable[tuple[int, int]]) -> bytes:
    """The sum of `units`, each times its factor."""
    total = bytearray(len(units[0]))
    for index, factor in terms:
        codec.add_scaled(factor, memoryview(units[index]), memoryview(total))
    return bytes(total)


def others(codec: Codec, lost: Iterable[int]) -> list[int]:
    return sorted(set(range(codec.k + codec.m)) - set(lost))


def erasures(codec: Codec, at_most: int) -> Iterator[tuple[int, ...]]:
    for count in range(1, at_most + 1):
        yield from combinations(range(codec.k + codec.m), count)


class TestTheBackendsAgree:
    @pytest.mark.parametrize("length", [*UNIT_SIZES, BIG_UNIT])
    @sampled_pyeclib_code
    def test_everyone_writes_the_parity_that_pyeclib_writes(self, k: int, m: int, length: int) -> None:
        data = random_units(k, length)
        expected = encode(codec_of(k, m, "pyeclib"), data)
        assert encode(codec_of(k, m, "isal"), data) == expected
        assert encode(codec_of(k, m, "numpy"), data) == expected

    @pytest.mark.parametrize("length", [65, 4097])
    @sampled_pyeclib_code
    def test_everyone_rebuilds_what_pyeclib_rebuilds(self, k: int, m: int, length: int) -> None:
        codecs = [codec_of(k, m, backend) for backend in BACKENDS]
        source = random.Random(k * m)
        stripe = stripe_of(codecs[0], length)
        for lost in source.sample(list(erasures(codecs[0], at_most=m)), min(k, 8)):
            rebuilt = [reconstruct(codec, stripe, others(codec, lost), lost) for codec in codecs]
            assert rebuilt == [{index: stripe[index] for index in lost}] * 3

    @pytest.mark.parametrize("length", [0, 1, 65, 4097])
    @pytest.mark.parametrize(("k", "m"), WIDE)
    def test_isal_and_numpy_write_the_same_parity_of_wide_codes(self, k: int, m: int, length: int) -> None:
        data = random_units(k, length)
        assert encode(codec_of(k, m, "isal"), data) == encode(codec_of(k, m, "numpy"), data)

    @given(st.integers(1, 9), st.integers(0, 300), st.integers(1, 20).flatmap(lambda k: st.permutations(range(k))))
    def test_isal_and_numpy_agree_on_any_units(self, m: int, length: int, order: list[int]) -> None:
        isal, numpy = (codec_of(len(order), m, backend) for backend in ("isal", "numpy"))
        data = random_units(len(order), length)
        stripe = data + encode(numpy, data)
        assert encode(isal, data) == stripe[len(order) :]
        assert accumulate(isal, data, order) == accumulate(numpy, data, order) == stripe[len(order) :]
        kept = sorted(random.Random(length).sample(range(len(stripe)), len(order)))
        lost = others(numpy, kept)
        assert reconstruct(isal, stripe, kept, lost) == reconstruct(numpy, stripe, kept, lost)


class TestTheKernels:
    @pytest.mark.parametrize("make", [load, NumpyKernel], ids=["isal", "numpy"])
    @given(st.data(), st.integers(1, 7), st.integers(1, 7), st.integers(1, 100))
    def test_they_sum_by_any_matrix(
        self, make: Callable[[], Kernel], data: st.DataObject, rows: int, columns: int, length: int
    ) -> None:
        factors = st.lists(st.sampled_from([0, 0, 1, 1, 2, 255]), min_size=columns, max_size=columns)
        matrix = np.array(data.draw(st.lists(factors, min_size=rows, max_size=rows)), dtype=np.uint8)
        sources, outs = random_units(columns, length), filled(rows, length, 0xFF)
        expected = multiply(matrix, np.array([list(source) for source in sources], dtype=np.uint8))
        make().combine(matrix, views(sources), views(outs))
        assert [list(out) for out in outs] == expected.tolist()
        make().add([int(row[0]) for row in matrix], memoryview(sources[0]), views(outs))
        first = multiply(matrix[:, :1], np.array([list(sources[0])], dtype=np.uint8))
        assert [list(out) for out in outs] == (expected ^ first).tolist()


class TestAccumulate:
    @each_code
    def test_each_parity_may_stand_alone_or_with_any_others(self, backend: str, m: int) -> None:
        codec = codec_of(4, m, backend)
        data = random_units(4, 65)
        expected = encode(codec, data)
        for rows in chain.from_iterable(permutations(range(m), count) for count in range(1, m + 1)):
            parity = dict(zip(rows, filled(m, 65, 0), strict=False))
            for index in (2, 0, 3, 1):
                codec.accumulate(index, memoryview(data[index]), {row: memoryview(parity[row]) for row in rows})
            assert parity == {row: expected[row] for row in rows}

    @each_code
    @pytest.mark.parametrize("length", [*UNIT_SIZES, BIG_UNIT])
    def test_any_length_gives_what_encode_gives(self, backend: str, m: int, length: int) -> None:
        codec = codec_of(3, m, backend)
        data = random_units(3, length)
        assert accumulate(codec, data, [2, 0, 1]) == encode(codec, data)


class TestReconstruct:
    @each_code
    def test_units_may_be_named_in_any_order(self, backend: str, m: int) -> None:
        codec = codec_of(4, m, backend)
        stripe = stripe_of(codec, 64)
        assert reconstruct(codec, stripe, [4, 3, 0, 2], [1]) == {1: stripe[1]}

    @each_code
    def test_a_wanted_unit_that_survived_is_copied(self, backend: str, m: int) -> None:
        codec = codec_of(3, m, backend)
        stripe = stripe_of(codec, 64)
        for index in range(3):
            assert reconstruct(codec, stripe, range(3), [index, 3]) == {index: stripe[index], 3: stripe[3]}

    @each_code
    def test_nothing_wanted_is_nothing_written(self, backend: str, m: int) -> None:
        codec = codec_of(3, m, backend)
        assert reconstruct(codec, stripe_of(codec, 64), range(3), []) == {}

    @each_code
    def test_too_few_empty_units_are_too_many_erasures_as_well(self, backend: str, m: int) -> None:
        codec = codec_of(3, m, backend)
        with pytest.raises(TooManyErasures):
            reconstruct(codec, stripe_of(codec, 0), [0, 1], [2])


class TestPartialSums:
    @pytest.mark.parametrize(("k", "m"), list(product(range(1, 7), range(1, 4))))
    def test_sums_in_any_order_give_every_lost_unit_of_every_pattern(self, k: int, m: int) -> None:
        codec = codec_of(k, m, "isal")
        stripe = stripe_of(codec, 65)
        source = random.Random(k << 8 | m)
        for lost in erasures(codec, at_most=m):
            for index in lost:
                terms = list(codec.coefficients(source.sample(others(codec, lost), k + m - len(lost)), index).items())
                assert summed(codec, stripe, source.sample(terms, len(terms))) == stripe[index]

    @each_backend
    @pytest.mark.parametrize("length", UNIT_SIZES)
    def test_sums_made_in_several_places_add_up_to_the_unit(self, backend: str, length: int) -> None:
        codec = codec_of(4, 3, backend)
        stripe = stripe_of(codec, length)
        terms = list(codec.coefficients(others(codec, [1, 3]), 3).items())
        halves = [summed(codec, stripe, terms[:2]), summed(codec, stripe, terms[2:])]
        assert summed(codec, halves, [(0, 1), (1, 1)]) == stripe[3]

    @pytest.mark.parametrize(("k", "m"), [(1, 1), (1, 3), (4, 1), (4, 3)])
    def test_a_data_unit_that_survives_is_itself(self, k: int, m: int) -> None:
        codec = codec_of(k, m, "isal")
        for survivors in (range(k + m), *combinations(range(k + m), k)):
            for index in set(survivors) & set(range(k)):
                assert codec.coefficients(survivors, index) == {index: 1}

    def test_a_parity_is_its_row_of_data_and_a_parity_that_takes_part_is_itself(self) -> None:
        codec = codec_of(2, 2, "isal")
        assert codec.coefficients(range(4), 2) == {0: 142, 1: 244}
        assert codec.coefficients([1, 2], 2) == {2: 1}

    def test_more_survivors_than_k_are_not_asked_for_more_than_k(self) -> None:
        codec = codec_of(3, 3, "isal")
        assert codec.coefficients([5, 4, 3, 2, 1], 0).keys() == {1, 2, 3}

    @pytest.mark.parametrize("survivors", [[], [1], [1, 4]])
    def test_fewer_than_k_survivors_are_too_few(self, survivors: list[int]) -> None:
        with pytest.raises(TooManyErasures, match=f"^{len(survivors)} units"):
            codec_of(3, 2, "isal").coefficients(survivors, 0)

    @pytest.mark.parametrize(("survivors", "wanted"), [([0, 1, 9], 2), ([0, 1, 3], 5), ([0, 1, 3], -1)])
    def test_numbers_outside_the_stripe_are_refused(self, survivors: list[int], wanted: int) -> None:
        with pytest.raises(ValueError, match=r"3\+2 code has units 0\.\.4"):
            codec_of(3, 2, "isal").coefficients(survivors, wanted)

    @each_backend
    @pytest.mark.parametrize("factor", [0, 1, 2, 255])
    def test_add_scaled_adds_a_multiple_of_each_byte(self, backend: str, factor: int) -> None:
        out = bytearray(b"\x11" * 256)
        codec_of(2, 1, backend).add_scaled(factor, memoryview(bytes(range(256))), memoryview(out))
        assert list(out) == [0x11 ^ int(multiplication_table()[factor, value]) for value in range(256)]

    @each_backend
    @pytest.mark.parametrize(
        ("factor", "length", "message"),
        [(-1, 3, "a byte, not -1"), (256, 3, "a byte, not 256"), (1, 4, r"one length, not \[3, 4\]")],
    )
    def test_add_scaled_refuses_what_is_no_byte_and_two_lengths(
        self, backend: str, factor: int, length: int, message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            codec_of(2, 1, backend).add_scaled(factor, memoryview(b"abc"), memoryview(bytearray(length)))


class TestTheCallersBuffers:
    @each_code
    def test_the_units_read_are_left_as_they_were(self, backend: str, m: int) -> None:
        codec = codec_of(3, m, backend)
        stripe = [bytearray(unit) for unit in stripe_of(codec, 65)]
        before = [bytes(unit) for unit in stripe]
        codec.encode(views(stripe[:3]), views(filled(m, 65, 0)))
        codec.accumulate(0, memoryview(stripe[0]), dict(enumerate(views(filled(m, 65, 0)))))
        survivors = {index: memoryview(stripe[index]) for index in range(1, 4)}
        codec.reconstruct(survivors, {0: memoryview(bytearray(65))})
        assert stripe == before


CALLS_WITH_OTHER_LENGTHS: list[Callable[[Codec, int], None]] = [
    lambda codec, m: codec.encode(views([b"abc", b"abcd"]), views(filled(m, 3, 0))),
    lambda codec, m: codec.encode(views([b"abc", b"abc"]), views(filled(m, 4, 0))),
    lambda codec, m: codec.accumulate(0, memoryview(b"abc"), dict(enumerate(views(filled(m, 2, 0))))),
    lambda codec, m: codec.reconstruct(dict(enumerate(views([b"abc", b"abcd"]), 1)), {0: memoryview(bytearray(3))}),
    lambda codec, m: codec.reconstruct(dict(enumerate(views([b"abc", b"abc"]), 1)), {0: memoryview(bytearray(2))}),
]


class TestWhatIsRefused:
    @each_code
    @pytest.mark.parametrize("length", [64, 65])
    def test_results_are_not_written_into_read_only_memory(self, backend: str, m: int, length: int) -> None:
        codec = codec_of(2, m, backend)
        data, constant = views(random_units(2, length)), bytes(length)
        parity = {row: memoryview(constant) for row in range(m)}
        survivors = {1: data[1], 2: data[0]}
        calls: list[Callable[[], None]] = [
            lambda: codec.encode(data, list(parity.values())),
            lambda: codec.accumulate(0, data[0], parity),
            lambda: codec.add_scaled(3, data[0], memoryview(constant)),
            lambda: codec.reconstruct(survivors, {0: memoryview(constant)}),
            lambda: codec.reconstruct(survivors, {1: memoryview(constant)}),
        ]
        for call in calls:
            with pytest.raises((ValueError, TypeError), match="read-only"):
                call()
        assert constant == bytes(length)

    @pytest.mark.parametrize(("backend", "m"), list(product(("isal", "numpy"), (1, 2))))
    def test_units_with_gaps_are_refused(self, backend: str, m: int) -> None:
        codec = codec_of(2, m, backend)
        with pytest.raises(BufferError, match="contiguous"):
            codec.encode([memoryview(bytes(6))[::2]] * 2, views(filled(m, 3, 0)))
        with pytest.raises(BufferError, match="contiguous"):
            codec.encode(views([bytes(3)] * 2), [memoryview(bytearray(6))[::2]] * m)

    @each_code
    @pytest.mark.parametrize("call", CALLS_WITH_OTHER_LENGTHS)
    def test_units_of_two_lengths_are_refused(self, backend: str, m: int, call: Callable[[Codec, int], None]) -> None:
        with pytest.raises(ValueError, match="one length"):
            call(codec_of(2, m, backend), m)

    @each_code
    @pytest.mark.parametrize("more", [(-1, 0), (1, 0), (0, -1), (0, 1)])
    def test_encode_refuses_a_wrong_number_of_units(self, backend: str, m: int, more: tuple[int, int]) -> None:
        codec = codec_of(2, m, backend)
        data, parity = filled(2 + more[0], 3, 0), filled(m + more[1], 3, 0)
        with pytest.raises(ValueError, match=rf"(not|with) {len(data)} .*{len(parity)}"):
            codec.encode(views(data), views(parity))

    @each_code
    @pytest.mark.parametrize(("index", "rows"), [(0, []), (0, [-1]), (0, [9]), (-1, [0]), (2, [0])])
    def test_accumulate_refuses_units_that_do_not_exist(
        self, backend: str, m: int, index: int, rows: list[int]
    ) -> None:
        codec = codec_of(2, m, backend)
        with pytest.raises(ValueError, match=r"data units 0\.\.1"):
            codec.accumulate(index, memoryview(b"abc"), {row: memoryview(bytearray(3)) for row in rows})

    @each_code
    @pytest.mark.parametrize("index", [-1, 9])
    def test_reconstruct_refuses_units_outside_the_stripe(self, backend: str, m: int, index: int) -> None:
        codec = codec_of(2, m, backend)
        one, other = views([b"abc", b"def"])
        for survivors, wanted in (({0: one, 1: other}, index), ({1: one, index: other}, 0)):
            with pytest.raises(ValueError, match=rf"units 0\.\.{m + 1}, not \[{index}\]"):
                codec.reconstruct(survivors, {wanted: memoryview(bytearray(3))})

    def test_no_buffers_have_no_length(self) -> None:
        assert check_equal_lengths([]) == 0
