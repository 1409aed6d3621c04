"""Which backend is chosen, what is refused, and that several threads may use a codec at once."""

from __future__ import annotations

import ctypes
import logging
import mmap
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from benchmarks.pyeclib_codec import codec_of
from holdfast.ec import Codec, backends, choose_codec, describe_auto
from holdfast.ec.backends import IsalKernel
from tests.deadlines import DEADLINE_S
from tests.unit.test_ec_codec import encode, random_units

ODD_UNIT = 4097

Addresses = ctypes.Array[ctypes.c_void_p]


def mapped(length: int) -> memoryview:
    return memoryview(mmap.mmap(-1, length))


@pytest.fixture
def candidates(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes the loader look for ISA-L under the given names only, as if for the first time."""

    def forget() -> None:
        backends.load.cache_clear()
        backends._auto.cache_clear()

    def offer(*names: str) -> None:
        monkeypatch.setattr(backends, "_candidates", lambda: list(names))
        forget()

    yield offer
    forget()


class ForeignLibrary:
    """ISA-L's interface in Python, over the field of `polynomial`."""

    def __init__(self, polynomial: int) -> None:
        self._polynomial = polynomial

    def ec_init_tables(self, columns: int, rows: int, factors: bytes, tables: Any) -> None:
        tables[: rows * columns] = list(factors)

    def ec_encode_data(
        self, length: int, columns: int, rows: int, tables: Any, sources: Addresses, outs: Addresses
    ) -> None:
        for row, out in enumerate(outs):
            ctypes.memset(out, 0, length)
            for column, source in enumerate(sources):
                self._add(length, tables[row * columns + column], source, out)

    def ec_encode_data_update(
        self, length: int, columns: int, rows: int, column: int, tables: Any, source: int, outs: Addresses
    ) -> None:
        for row, out in enumerate(outs):
            self._add(length, tables[row * columns + column], source, out)

    def _add(self, length: int, factor: int, source: Any, out: Any) -> None:
        total = bytes(
            old ^ self._product(factor, value)
            for old, value in zip(ctypes.string_at(out, length), ctypes.string_at(source, length), strict=True)
        )
        ctypes.memmove(out, total, length)

    def _product(self, a: int, b: int) -> int:
        total = 0
        while b:
            total ^= a if b & 1 else 0
            a, b = a << 1, b >> 1
            a ^= self._polynomial if a & 0x100 else 0
        return total


class TestTheChoice:
    def test_auto_takes_isal(self) -> None:
        assert [choose_codec(3, m).name for m in (1, 2)] == ["isal", "isal"]
        assert describe_auto() == ("isal", "")

    @pytest.mark.parametrize("backend", ["isal", "numpy"])
    @pytest.mark.parametrize("m", [1, 2])
    def test_a_named_backend_is_the_one_given(self, backend: str, m: int) -> None:
        codec = choose_codec(5, m, backend)
        assert (codec.name, codec.k, codec.m) == (backend, 5, m)

    def test_an_unknown_backend_is_refused_with_the_known_ones(self) -> None:
        with pytest.raises(ValueError, match=r"'jerasure': .*auto, isal, numpy"):
            choose_codec(2, 1, "jerasure")

    @pytest.mark.parametrize("backend", ["auto", "isal", "numpy"])
    @pytest.mark.parametrize(("k", "m"), [(0, 1), (-1, 1), (1, 0), (1, -1), (255, 1), (1, 255), (200, 56)])
    def test_a_code_out_of_range_is_refused(self, backend: str, k: int, m: int) -> None:
        with pytest.raises(ValueError, match=f"not k={k}, m={m}"):
            choose_codec(k, m, backend)

    def test_the_widest_codes_are_accepted(self) -> None:
        assert choose_codec(254, 1).k == 254
        assert choose_codec(1, 254).m == 254


class TestWithoutTheLibrary:
    def test_auto_takes_numpy_and_warns_once(
        self, candidates: Callable[..., None], caplog: pytest.LogCaptureFixture
    ) -> None:
        candidates()
        with caplog.at_level(logging.DEBUG):
            codecs = [choose_codec(3, 1), choose_codec(3, 2), choose_codec(5, 2, "auto")]
            described = describe_auto()
        assert [codec.name for codec in codecs] == ["numpy"] * 3
        assert described[0] == "numpy"
        assert "no usable ISA-L" in described[1]
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert "install pyeclib or libisal2" in record.getMessage()
        assert "\n" not in record.getMessage()

    def test_isal_by_name_is_refused_with_every_name_that_was_tried_and_the_fix(
        self, candidates: Callable[..., None]
    ) -> None:
        candidates("/nowhere/libisal.so.2", "libc.so.6")
        tried = r"/nowhere/libisal\.so\.2: .*libc\.so\.6: .*ec_init_tables"
        with pytest.raises(ValueError, match=rf"'isal' .*{tried}.*install .*libisal2"):
            choose_codec(3, 2, "isal")

    def test_the_first_usable_candidate_is_taken(self, candidates: Callable[..., None]) -> None:
        real = backends._candidates()
        candidates("/nowhere/libisal.so.2", *real)
        assert describe_auto() == ("isal", "")

    def test_the_wheel_carries_the_library_and_the_system_comes_last(self) -> None:
        assert "pyeclib.libs/libisal" in backends._candidates()[0]
        assert backends._candidates()[-1] == "libisal.so.2"


class TestAForeignLibrary:
    def test_another_field_is_refused(self, candidates: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(backends, "_bind", lambda _: ForeignLibrary(0x11B))
        candidates("libc.so.6")
        with pytest.raises(OSError, match=r"libc\.so\.6: .*another field"):
            backends.load()
        with pytest.raises(ValueError, match=r"'isal' .*: .* another field"):
            choose_codec(3, 2, "isal")
        assert choose_codec(3, 2).name == "numpy"

    def test_the_same_interface_and_field_are_accepted(
        self, candidates: Callable[..., None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        data = random_units(3, 65)
        expected = encode(choose_codec(3, 2, "numpy"), data)
        monkeypatch.setattr(backends, "_bind", lambda _: ForeignLibrary(0x11D))
        candidates("libc.so.6")
        assert encode(choose_codec(3, 2, "isal"), data) == expected


class Listening:
    """Records which functions of a library are called."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.called.append(name)
        return getattr(self._library, name)


class TestHowIsalIsCalled:
    @pytest.mark.parametrize("piece_bytes", [1, 63, 64, 4096, ODD_UNIT])
    @pytest.mark.parametrize(("k", "m"), [(1, 2), (3, 1), (3, 2)])
    def test_units_too_long_for_one_call_are_worked_on_in_pieces(
        self, monkeypatch: pytest.MonkeyPatch, k: int, m: int, piece_bytes: int
    ) -> None:
        length = ODD_UNIT if piece_bytes > 1 else 65
        data = random_units(k, length)
        expected = encode(choose_codec(k, m, "numpy"), data)
        monkeypatch.setattr(backends, "PIECE_BYTES", piece_bytes)
        library: Any = Listening(backends.load()._library)
        codec = Codec(k, m, IsalKernel(library))
        parity = {row: mapped(length) for row in range(m)}
        aligned = [mapped(length) for _ in data]
        for unit, value in zip(aligned, data, strict=True):
            unit[:] = value
        codec.encode(aligned, list(parity.values()))
        assert [bytes(unit) for unit in parity.values()] == expected
        for index, unit in enumerate(aligned):
            codec.accumulate(index, unit, parity)
        assert [bytes(unit) for unit in parity.values()] == [bytes(length)] * m
        pieces = -(-length // piece_bytes)
        assert library.called.count("ec_encode_data_update") == k * pieces
        assert library.called.count("ec_encode_data") == pieces


def run_in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run work(0), work(1) ... at once; raise here what one of them raises."""
    start = threading.Barrier(count)

    def begin(number: int) -> None:
        start.wait(DEADLINE_S)
        work(number)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(begin, range(count)))


def lets_others_run(call: Callable[[], object]) -> bool:
    """Whether another thread gets to run Python while `call` runs.

    This thread releases the GIL only if `call` does: the switch interval is an hour.
    """
    gate = threading.Lock()
    gate.acquire()
    progress: list[None] = []

    def proceed() -> None:
        gate.acquire()
        progress.append(None)

    thread = threading.Thread(target=proceed)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(3600)
    try:
        thread.start()
        gate.release()
        call()
        return bool(progress)
    finally:
        sys.setswitchinterval(interval)
        thread.join(DEADLINE_S)


class TestThreads:
    @pytest.mark.parametrize("backend", ["isal", "numpy", "pyeclib"])
    @pytest.mark.parametrize("m", [1, 3])
    def test_four_threads_may_use_one_codec(self, backend: str, m: int) -> None:
        k, length = 4, 50_001
        codec = codec_of(k, m, backend)
        reference = choose_codec(k, m, "numpy")
        stripes = [[*data, *encode(reference, data)] for data in (random_units(k, length, seed) for seed in range(4))]

        def work(number: int) -> None:
            stripe = stripes[number]
            for turn in range(30):
                assert encode(codec, stripe[:k]) == stripe[k:]
                lost = turn % (k + m)
                rebuilt = bytearray(length)
                left = {i: memoryview(unit) for i, unit in enumerate(stripe) if i != lost}
                codec.reconstruct(left, {lost: memoryview(rebuilt)})
                assert rebuilt == stripe[lost]
                total = [bytearray(length) for _ in range(m)]
                for index in range(k):
                    codec.accumulate(
                        index, memoryview(stripe[index]), dict(enumerate(memoryview(out) for out in total))
                    )
                assert total == stripe[k:]

        run_in_threads(4, work)

    def test_four_threads_may_load_the_library_at_once(self, candidates: Callable[..., None]) -> None:
        candidates(*backends._candidates())
        data = random_units(3, 65)
        expected = encode(choose_codec(3, 2, "numpy"), data)

        def work(_: int) -> None:
            assert encode(choose_codec(3, 2, "isal"), data) == expected

        run_in_threads(4, work)

    @pytest.mark.parametrize(
        ("backend", "m", "length"),
        [("isal", 1, 64 << 20), ("isal", 2, 64 << 20), ("numpy", 1, 64 << 20), ("numpy", 2, 8 << 20)],
    )
    def test_other_threads_run_during_a_long_encode(self, backend: str, m: int, length: int) -> None:
        codec = choose_codec(2, m, backend)
        units = [mapped(length) for _ in range(2 + m)]
        codec.encode(units[:2], units[2:])
        assert any(lets_others_run(lambda: codec.encode(units[:2], units[2:])) for _ in range(20))

    def test_other_threads_run_during_a_long_accumulate(self) -> None:
        codec = choose_codec(2, 2, "isal")
        unit, *parity = (mapped(64 << 20) for _ in range(3))
        codec.accumulate(1, unit, dict(enumerate(parity)))
        assert any(lets_others_run(lambda: codec.accumulate(1, unit, dict(enumerate(parity)))) for _ in range(20))

    def test_a_call_that_keeps_the_interpreter_lets_no_one_run(self) -> None:
        buffer = bytearray(64 << 20)
        place = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        memset = ctypes.PyDLL(None).memset
        memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
        assert not any(lets_others_run(lambda: memset(place, 1, len(buffer))) for _ in range(20))
