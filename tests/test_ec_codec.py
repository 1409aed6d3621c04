"""Both backends of a code: the bytes they write, what they recover, and what they refuse."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ec import Codec, TooManyErasures, choose_codec
from ec.codec import check_equal_lengths
from ec.pyeclib_codec import MAX_UNIT_BYTES, PyECLibCodec
from ec.xor import XorCodec

UNIT_SIZES = (0, 1, 63, 64, 65, 4095, 4097)
BIG_UNIT = (1 << 20) + 7
FENCE = b"\xa5" * 96

quick = settings(deadline=None, derandomize=True, max_examples=60)

each_code = pytest.mark.parametrize(
    ("backend", "m"),
    [("numpy", 1), ("pyeclib", 1), ("pyeclib", 2)],
    ids=["numpy+1", "pyeclib+1", "pyeclib+2"],
)
each_backend = pytest.mark.parametrize("backend", ["numpy", "pyeclib"])


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


def others(codec: Codec, lost: Iterable[int]) -> list[int]:
    return sorted(set(range(codec.k + codec.m)) - set(lost))


def erasures(codec: Codec, at_most: int) -> Iterator[tuple[int, ...]]:
    for count in range(1, at_most + 1):
        yield from combinations(range(codec.k + codec.m), count)


def fenced(count: int, length: int) -> tuple[bytearray, list[memoryview]]:
    """Units of zeros in one buffer, each between two fences."""
    arena = bytearray(FENCE + (bytes(length) + FENCE) * count)
    stride = len(FENCE) + length
    starts = [len(FENCE) + i * stride for i in range(count)]
    return arena, [memoryview(arena)[start : start + length] for start in starts]


def fences_stand(arena: bytearray, count: int, length: int) -> bool:
    stride = len(FENCE) + length
    return all(arena[i * stride : i * stride + len(FENCE)] == FENCE for i in range(count + 1))


class TestTheBackendsAgree:
    @pytest.mark.parametrize("length", UNIT_SIZES)
    @pytest.mark.parametrize("k", range(1, 9))
    def test_numpy_writes_the_parity_that_pyeclib_writes(self, k: int, length: int) -> None:
        data = random_units(k, length)
        assert encode(XorCodec(k), data) == encode(PyECLibCodec(k, 1), data)

    @pytest.mark.parametrize("k", [1, 3, 8])
    def test_numpy_writes_the_parity_that_pyeclib_writes_for_a_big_unit(self, k: int) -> None:
        data = random_units(k, BIG_UNIT)
        assert encode(XorCodec(k), data) == encode(PyECLibCodec(k, 1), data)

    @quick
    @given(data=st.integers(0, 200).flatmap(lambda n: st.lists(st.binary(min_size=n, max_size=n), min_size=1)))
    def test_the_backends_agree_on_any_units(self, data: list[bytes]) -> None:
        assert encode(XorCodec(len(data)), data) == encode(PyECLibCodec(len(data), 1), data)

    def test_one_parity_is_the_xor_of_the_data(self) -> None:
        assert encode(XorCodec(3), [b"\x01\xf0", b"\x02\x0f", b"\x04\xff"]) == [b"\x07\x00"]

    @each_backend
    def test_the_only_parity_of_a_single_unit_is_its_copy(self, backend: str) -> None:
        assert encode(choose_codec(1, 1, backend), [b"copied"]) == [b"copied"]


class TestAccumulate:
    @each_code
    @pytest.mark.parametrize("k", range(1, 5))
    def test_every_order_gives_what_encode_gives(self, backend: str, m: int, k: int) -> None:
        codec = choose_codec(k, m, backend)
        data = random_units(k, 65)
        for order in permutations(range(k)):
            assert accumulate(codec, data, order) == encode(codec, data)

    @each_code
    @pytest.mark.parametrize("length", [*UNIT_SIZES, BIG_UNIT])
    def test_any_length_gives_what_encode_gives(self, backend: str, m: int, length: int) -> None:
        codec = choose_codec(3, m, backend)
        data = random_units(3, length)
        assert accumulate(codec, data, [2, 0, 1]) == encode(codec, data)

    @each_code
    @quick
    @given(order=st.integers(1, 8).flatmap(lambda k: st.permutations(range(k))), length=st.integers(0, 130))
    def test_a_shuffled_order_gives_what_encode_gives(
        self, backend: str, m: int, order: list[int], length: int
    ) -> None:
        codec = choose_codec(len(order), m, backend)
        data = random_units(len(order), length)
        assert accumulate(codec, data, order) == encode(codec, data)


class TestReconstruct:
    @each_code
    @pytest.mark.parametrize("length", [0, 1, 65])
    @pytest.mark.parametrize("k", range(1, 7))
    def test_every_loss_of_up_to_m_units_comes_back(self, backend: str, m: int, k: int, length: int) -> None:
        codec = choose_codec(k, m, backend)
        stripe = stripe_of(codec, length)
        for lost in erasures(codec, at_most=m):
            rebuilt = reconstruct(codec, stripe, others(codec, lost), lost)
            assert rebuilt == {index: stripe[index] for index in lost}

    @each_code
    @pytest.mark.parametrize("k", range(1, 7))
    def test_each_unit_comes_back_from_any_k_others(self, backend: str, m: int, k: int) -> None:
        codec = choose_codec(k, m, backend)
        stripe = stripe_of(codec, 33)
        for kept in combinations(range(k + m), k):
            for index in others(codec, kept):
                assert reconstruct(codec, stripe, kept, [index]) == {index: stripe[index]}

    @each_code
    def test_units_may_be_named_in_any_order(self, backend: str, m: int) -> None:
        codec = choose_codec(4, m, backend)
        stripe = stripe_of(codec, 64)
        assert reconstruct(codec, stripe, [4, 3, 0, 2], [1]) == {1: stripe[1]}

    @each_code
    @pytest.mark.parametrize("length", [4095, 4097, BIG_UNIT])
    def test_a_long_unit_comes_back(self, backend: str, m: int, length: int) -> None:
        codec = choose_codec(3, m, backend)
        stripe = stripe_of(codec, length)
        assert reconstruct(codec, stripe, others(codec, [1]), [1]) == {1: stripe[1]}

    @each_code
    def test_a_wanted_unit_that_survived_is_copied(self, backend: str, m: int) -> None:
        codec = choose_codec(3, m, backend)
        stripe = stripe_of(codec, 64)
        for index in range(3):
            assert reconstruct(codec, stripe, range(3), [index, 3]) == {index: stripe[index], 3: stripe[3]}

    @each_code
    def test_nothing_wanted_is_nothing_written(self, backend: str, m: int) -> None:
        codec = choose_codec(3, m, backend)
        assert reconstruct(codec, stripe_of(codec, 64), range(3), []) == {}

    @each_code
    @pytest.mark.parametrize("k", range(1, 7))
    def test_more_than_m_lost_units_are_too_many(self, backend: str, m: int, k: int) -> None:
        codec = choose_codec(k, m, backend)
        stripe = stripe_of(codec, 16)
        for lost in combinations(range(k + m), m + 1):
            with pytest.raises(TooManyErasures, match=f"^{k - 1} units .* {k} are needed"):
                reconstruct(codec, stripe, others(codec, lost), lost)

    @each_code
    def test_too_few_empty_units_are_too_many_erasures_as_well(self, backend: str, m: int) -> None:
        codec = choose_codec(3, m, backend)
        with pytest.raises(TooManyErasures):
            reconstruct(codec, stripe_of(codec, 0), [0, 1], [2])


class TestTheCallersBuffers:
    @each_code
    @pytest.mark.parametrize("length", [0, 1, 63, 65, 4097])
    def test_encode_writes_nothing_beside_its_parities(self, backend: str, m: int, length: int) -> None:
        codec = choose_codec(3, m, backend)
        data = random_units(3, length)
        arena, parity = fenced(m, length)
        codec.encode(views(data), parity)
        assert [bytes(part) for part in parity] == encode(codec, data)
        assert fences_stand(arena, m, length)

    @each_code
    @pytest.mark.parametrize("length", [0, 1, 63, 65, 4097])
    def test_accumulate_writes_nothing_beside_its_parities(self, backend: str, m: int, length: int) -> None:
        codec = choose_codec(3, m, backend)
        data = random_units(3, length)
        arena, parity = fenced(m, length)
        for index, unit in enumerate(views(data)):
            codec.accumulate(index, unit, dict(enumerate(parity)))
        assert [bytes(part) for part in parity] == encode(codec, data)
        assert fences_stand(arena, m, length)

    @each_code
    @pytest.mark.parametrize("length", [0, 1, 63, 65, 4097])
    def test_reconstruct_writes_nothing_beside_the_wanted(self, backend: str, m: int, length: int) -> None:
        codec = choose_codec(3, m, backend)
        stripe = stripe_of(codec, length)
        arena, wanted = fenced(m, length)
        survivors = {index: memoryview(stripe[index]) for index in range(m, 3 + m)}
        codec.reconstruct(survivors, dict(enumerate(wanted)))
        assert [bytes(unit) for unit in wanted] == stripe[:m]
        assert fences_stand(arena, m, length)

    @each_code
    def test_the_units_read_are_left_as_they_were(self, backend: str, m: int) -> None:
        codec = choose_codec(3, m, backend)
        stripe = [bytearray(unit) for unit in stripe_of(codec, 65)]
        before = [bytes(unit) for unit in stripe]
        codec.encode(views(stripe[:3]), views(filled(m, 65, 0)))
        codec.accumulate(0, memoryview(stripe[0]), dict(enumerate(views(filled(m, 65, 0)))))
        survivors = {index: memoryview(stripe[index]) for index in range(1, 4)}
        codec.reconstruct(survivors, {0: memoryview(bytearray(65))})
        assert stripe == before


class TestWhatIsRefused:
    @each_code
    def test_encode_refuses_data_of_two_lengths(self, backend: str, m: int) -> None:
        codec = choose_codec(2, m, backend)
        with pytest.raises(ValueError, match=r"one length, not \[3, 4\]"):
            codec.encode(views([b"abc", b"abcd"]), views(filled(m, 3, 0)))

    @each_code
    @pytest.mark.parametrize("length", [2, 4])
    def test_encode_refuses_parities_of_another_length(self, backend: str, m: int, length: int) -> None:
        codec = choose_codec(2, m, backend)
        with pytest.raises(ValueError, match="one length"):
            codec.encode(views([b"abc", b"abc"]), views(filled(m, length, 0)))

    @each_code
    @pytest.mark.parametrize("length", [2, 4])
    def test_accumulate_refuses_parities_of_another_length(self, backend: str, m: int, length: int) -> None:
        codec = choose_codec(2, m, backend)
        with pytest.raises(ValueError, match="one length"):
            codec.accumulate(0, memoryview(b"abc"), dict(enumerate(views(filled(m, length, 0)))))

    @each_code
    def test_reconstruct_refuses_survivors_of_two_lengths(self, backend: str, m: int) -> None:
        codec = choose_codec(2, m, backend)
        survivors = {1: memoryview(b"abc"), 2: memoryview(b"abcd")}
        with pytest.raises(ValueError, match="one length"):
            codec.reconstruct(survivors, {0: memoryview(bytearray(3))})

    @each_code
    @pytest.mark.parametrize("length", [2, 4])
    def test_reconstruct_refuses_a_wanted_unit_of_another_length(self, backend: str, m: int, length: int) -> None:
        codec = choose_codec(2, m, backend)
        survivors = {1: memoryview(b"abc"), 2: memoryview(b"abc")}
        with pytest.raises(ValueError, match="one length"):
            codec.reconstruct(survivors, {0: memoryview(bytearray(length))})

    @each_code
    @pytest.mark.parametrize("more", [(-1, 0), (1, 0), (0, -1), (0, 1)])
    def test_encode_refuses_a_wrong_number_of_units(self, backend: str, m: int, more: tuple[int, int]) -> None:
        codec = choose_codec(2, m, backend)
        data, parity = filled(2 + more[0], 3, 0), filled(m + more[1], 3, 0)
        with pytest.raises(ValueError, match=rf"(not|with) {len(data)} .*{len(parity)}"):
            codec.encode(views(data), views(parity))

    @each_code
    @pytest.mark.parametrize("rows", [[], [-1], [9]])
    def test_accumulate_refuses_parity_rows_that_do_not_exist(self, backend: str, m: int, rows: list[int]) -> None:
        codec = choose_codec(2, m, backend)
        with pytest.raises(ValueError, match=rf"2\+{m} .* data units 0\.\.1"):
            codec.accumulate(0, memoryview(b"abc"), {row: memoryview(bytearray(3)) for row in rows})

    @each_code
    @pytest.mark.parametrize("index", [-1, 2])
    def test_accumulate_refuses_a_unit_that_is_not_data(self, backend: str, m: int, index: int) -> None:
        codec = choose_codec(2, m, backend)
        with pytest.raises(ValueError, match=r"data units 0\.\.1"):
            codec.accumulate(index, memoryview(b"abc"), dict(enumerate(views(filled(m, 3, 0)))))

    @each_code
    @pytest.mark.parametrize("index", [-1, 9])
    def test_reconstruct_refuses_a_wanted_unit_outside_the_stripe(self, backend: str, m: int, index: int) -> None:
        codec = choose_codec(2, m, backend)
        survivors = dict(enumerate(views([b"abc", b"def"])))
        with pytest.raises(ValueError, match=rf"units 0\.\.{m + 1}, not \[{index}\]"):
            codec.reconstruct(survivors, {index: memoryview(bytearray(3))})

    @each_code
    @pytest.mark.parametrize("index", [-1, 9])
    def test_reconstruct_refuses_a_survivor_from_outside_the_stripe(self, backend: str, m: int, index: int) -> None:
        codec = choose_codec(2, m, backend)
        survivors = {1: memoryview(b"abc"), index: memoryview(b"def")}
        with pytest.raises(ValueError, match=rf"units 0\.\.{m + 1}, not \[{index}\]"):
            codec.reconstruct(survivors, {0: memoryview(bytearray(3))})

    def test_pyeclib_refuses_a_unit_too_long_for_its_library(self) -> None:
        unit = memoryview(bytearray(MAX_UNIT_BYTES + 1))
        with pytest.raises(ValueError, match=str(MAX_UNIT_BYTES)):
            PyECLibCodec(1, 1).encode([unit], [unit])

    def test_buffers_of_one_length_have_that_length(self) -> None:
        assert check_equal_lengths(views([b"abc", b"def"])) == 3

    def test_no_buffers_have_no_length(self) -> None:
        assert check_equal_lengths([]) == 0


class TestChooseCodec:
    def test_auto_takes_numpy_for_one_parity(self) -> None:
        assert choose_codec(3, 1).name == "numpy"

    def test_auto_takes_pyeclib_for_two_parities(self) -> None:
        assert choose_codec(3, 2).name == "pyeclib"

    @each_code
    def test_a_named_backend_is_the_one_given(self, backend: str, m: int) -> None:
        codec = choose_codec(5, m, backend)
        assert (codec.name, codec.k, codec.m) == (backend, 5, m)

    def test_an_unknown_backend_is_refused_with_the_known_ones(self) -> None:
        with pytest.raises(ValueError, match="'isal': use 'auto', 'numpy' or 'pyeclib'"):
            choose_codec(2, 1, "isal")

    def test_numpy_refuses_a_second_parity_and_names_who_can(self) -> None:
        with pytest.raises(ValueError, match="not m=2: use backend 'pyeclib'"):
            choose_codec(2, 2, "numpy")

    @pytest.mark.parametrize(("k", "m"), [(0, 1), (-1, 1), (1, 0), (1, -1), (255, 1), (1, 255)])
    def test_a_code_out_of_range_is_refused(self, k: int, m: int) -> None:
        with pytest.raises(ValueError, match=f"not k={k}, m={m}"):
            choose_codec(k, m)

    def test_the_widest_code_is_accepted(self) -> None:
        assert choose_codec(254, 1).k == 254
