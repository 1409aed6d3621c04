"""Nothing is read or written beyond the ends of a unit: units are placed next to inaccessible pages.

A stray access kills the process, so each walk runs in its own process: this module, started as a program.
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import random
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.ec import Codec, choose_codec
from holdfast.ec.backends import TABLE_BYTES, IsalKernel, load
from holdfast.ec.codec import Buffer, Kernel, as_array
from holdfast.ec.matrix import Matrix
from tests.scripts import completed

ROOT = Path(__file__).parents[2]

PAGE = mmap.PAGESIZE
PROT_NONE = 0
FILL = 0xA5
ALIGNMENT = 64
LENGTHS = (*range(201), 4095, 4096, 4097, 65535)
PLACES = ("end", "start", "aligned", "both")
"""Where in its pages a unit lies; `aligned` is as near the end as vectors allow, `both` alternates."""

CODES = ((1, 3), (2, 1), (4, 2), (5, 5), (3, 9))
"""Together, these codes compute one to six results per call, and more."""
PLAIN_SUMS = ((2, 1), (3, 1), (9, 1))
MOST_UNITS = 12

AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq")
VARIANTS = {
    "base": (),
    "sse": ("ssse3", "sse4_1"),
    "avx": ("avx",),
    "avx2": ("avx2",),
    "avx512": AVX512,
    "avx2_gfni": ("avx2", "gfni"),
    "avx512_gfni": (*AVX512, "gfni"),
}
"""ISA-L's loops by instruction set, with the processor flags that they need."""


class Enclosure:
    """Pages between two inaccessible ones."""

    def __init__(self, pages: int) -> None:
        whole = mmap.mmap(-1, (pages + 2) * PAGE)
        self.inside = memoryview(whole)[PAGE : (pages + 1) * PAGE]
        start = address(memoryview(whole))
        libc = ctypes.CDLL(None, use_errno=True)
        for fence in (start, start + (pages + 1) * PAGE):
            if libc.mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(PAGE), PROT_NONE):
                raise OSError(ctypes.get_errno(), "mprotect")

    def unit(self, length: int, place: str) -> Buffer:
        room = self.inside.nbytes - length
        start = {"end": room, "start": 0, "aligned": room // ALIGNMENT * ALIGNMENT}[place]
        return self.inside[start : start + length]


class Ground:
    """Enclosed units of one length."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._enclosures = [Enclosure(max(1, -(-length // PAGE))) for _ in range(MOST_UNITS)]

    def units(self, place: str, count: int) -> list[Buffer]:
        places = [PLACES[i % 2] for i in range(count)] if place == "both" else [place] * count
        return [enclosure.unit(self._length, here) for enclosure, here in zip(self._enclosures, places, strict=False)]

    def fill(self) -> None:
        for enclosure in self._enclosures:
            as_array(enclosure.inside)[:] = FILL

    def is_whole_beside(self, units: Sequence[Buffer]) -> bool:
        return all(
            enclosure.inside.nbytes - unit.nbytes == filled_bytes(enclosure.inside) - filled_bytes(unit)
            for enclosure, unit in zip(self._enclosures, units, strict=False)
        )


@dataclass(frozen=True)
class Case:
    """The bytes of a stripe, and the enclosed units that they are put into."""

    codec: Codec
    stripe: Sequence[bytes]
    units: Sequence[Buffer]

    def put(self, *, lost: Sequence[int]) -> None:
        for index, value in enumerate(self.stripe):
            self.units[index][:] = bytes(len(value)) if index in lost else value


def encode(case: Case) -> None:
    k, m = case.codec.k, case.codec.m
    case.put(lost=range(k, k + m))
    case.codec.encode(case.units[:k], case.units[k:])


def accumulate(case: Case) -> None:
    k, m = case.codec.k, case.codec.m
    case.put(lost=range(k, k + m))
    for index in reversed(range(k)):
        case.codec.accumulate(index, case.units[index], dict(enumerate(case.units[k:])))


def reconstruct(case: Case) -> None:
    k, m = case.codec.k, case.codec.m
    lost = range(min(k, m))
    case.put(lost=lost)
    units = dict(enumerate(case.units))
    case.codec.reconstruct({i: units[i] for i in units if i not in lost}, {i: units[i] for i in lost})


def add_scaled(case: Case) -> None:
    k, m = case.codec.k, case.codec.m
    case.put(lost=[0])
    for index, factor in case.codec.coefficients(range(1, k + m), 0).items():
        case.codec.add_scaled(factor, case.units[index], case.units[0])


OPERATIONS: tuple[Callable[[Case], None], ...] = (encode, accumulate, reconstruct, add_scaled)


def walk(kernel: Kernel, codes: Sequence[tuple[int, int]], places: Sequence[str]) -> None:
    """Run every operation of every code at every length and place; print each one's name before it begins."""
    source = random.Random(5)
    data = [source.randbytes(max(LENGTHS)) for _ in range(MOST_UNITS)]
    for length in LENGTHS:
        ground = Ground(length)
        for k, m in codes:
            stripe = stripe_of(k, m, [unit[:length] for unit in data[:k]])
            for place in places:
                case = Case(Codec(k, m, kernel), stripe, ground.units(place, k + m))
                for operation in OPERATIONS:
                    print(f"{operation.__name__} of {k}+{m}, {length} bytes, {place}", flush=True)
                    ground.fill()
                    operation(case)
                    assert [bytes(unit) for unit in case.units] == stripe, "the result is wrong"
                    assert ground.is_whole_beside(case.units), "a byte beside a unit was written"
    print("done", flush=True)


def stripe_of(k: int, m: int, data: Sequence[bytes]) -> list[bytes]:
    parity = [bytearray(len(data[0])) for _ in range(m)]
    choose_codec(k, m, "numpy").encode([memoryview(unit) for unit in data], [memoryview(unit) for unit in parity])
    return [*data, *map(bytes, parity)]


def address(buffer: Buffer) -> int:
    return int(as_array(buffer).ctypes.data)


def pointers(buffers: Sequence[Buffer]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(buffers))(*map(address, buffers))


def filled_bytes(buffer: Buffer) -> int:
    return bytes(buffer).count(FILL)


def library() -> ctypes.CDLL:
    return load()._library


class Variant(IsalKernel):
    """ISA-L's loops for one instruction set, whichever one the library would choose."""

    def __init__(self, variant: str) -> None:
        super().__init__(library())
        self._encode = getattr(self._library, f"ec_encode_data_{variant}")
        self._update = getattr(self._library, f"ec_encode_data_update_{variant}")
        self._init = getattr(self._library, f"ec_init_tables_{'gfni' if variant.endswith('gfni') else 'base'}")
        self._encode.argtypes = self._library.ec_encode_data.argtypes
        self._update.argtypes = self._library.ec_encode_data_update.argtypes
        self._init.argtypes = self._library.ec_init_tables.argtypes

    def combine(self, matrix: Matrix, sources: Sequence[Buffer], outs: Sequence[Buffer]) -> None:
        rows, columns = matrix.shape
        tables = self._expanded(matrix.tobytes(), rows, columns)
        self._encode(outs[0].nbytes, columns, rows, tables, pointers(sources), pointers(outs))

    def add(self, column: Sequence[int], source: Buffer, outs: Sequence[Buffer]) -> None:
        tables = self._expanded(bytes(column), len(column), 1)
        self._update(source.nbytes, 1, len(column), 0, tables, address(source), pointers(outs))

    def _expanded(self, factors: bytes, rows: int, columns: int) -> ctypes.Array[ctypes.c_ubyte]:
        tables = (ctypes.c_ubyte * (TABLE_BYTES * rows * columns))()
        self._init(columns, rows, factors, tables)
        return tables


class Careless(IsalKernel):
    """Makes one mistake per call."""

    def __init__(self, mistake: str) -> None:
        super().__init__(library())
        self._mistake = mistake

    def combine(self, matrix: Matrix, sources: Sequence[Buffer], outs: Sequence[Buffer]) -> None:
        super().combine(matrix, sources, outs)
        first, end = address(sources[-1]), address(sources[-1]) + sources[-1].nbytes
        if self._mistake == "read-after":
            ctypes.string_at(end, 1)
        elif self._mistake == "read-before":
            ctypes.string_at(first - 1, 1)
        elif self._mistake == "write-before":
            ctypes.memset(address(outs[0]) - 1, 0, 1)
        else:
            outs[0][0] ^= 1


def main(loop: str, variant: str) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    if loop == "ec_encode_data":
        walk(Variant(variant), (*CODES, *PLAIN_SUMS), PLACES)
    elif loop == "careless":
        walk(Careless(variant), CODES, PLACES)
    else:
        walk(load(), (*CODES, *PLAIN_SUMS), PLACES)


@dataclass(frozen=True)
class Walk:
    """How a walk ended."""

    returncode: int
    steps: Sequence[str]
    stderr: str

    def __str__(self) -> str:
        how = f"killed by {signal.Signals(-self.returncode).name}" if self.returncode < 0 else f"exit {self.returncode}"
        return f"{how} in step {len(self.steps)}, {self.steps[-1:]}\n{self.stderr}"


def walked(loop: str, variant: str = "") -> Walk:
    command = [sys.executable, "-m", "tests.system.test_ec_guard", loop, variant]
    run = completed(command, cwd=ROOT)
    return Walk(run.returncode, run.stdout.splitlines(), run.stderr)


def skip_unless_there_is(symbol: str, variant: str) -> None:
    if not hasattr(library(), symbol):
        pytest.skip(f"this ISA-L has no {symbol}")
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    missing = [flag for flag in VARIANTS[variant] if flag not in flags]
    if missing:
        pytest.skip(f"this processor has no {', '.join(missing)}")


def test_no_operation_leaves_its_units() -> None:
    ended = walked("isal")
    assert ended.returncode == 0, str(ended)
    assert len(ended.steps) == len(LENGTHS) * (len(CODES) + len(PLAIN_SUMS)) * len(PLACES) * len(OPERATIONS) + 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_variant_of_the_general_loops_leaves_its_units(variant: str) -> None:
    skip_unless_there_is(f"ec_encode_data_{variant}", variant)
    ended = walked("ec_encode_data", variant)
    assert ended.returncode == 0, str(ended)


@pytest.mark.parametrize(
    ("mistake", "where"), [("read-after", "1+3, 1 bytes, end"), ("read-before", "1+3, 1 bytes, start")]
)
def test_a_walk_dies_of_one_byte_read_outside(mistake: str, where: str) -> None:
    ended = walked("careless", mistake)
    assert ended.returncode == -signal.SIGSEGV and ended.steps[-1].endswith(where), str(ended)
    assert "SIGSEGV" in str(ended)
    assert "Segmentation fault" in ended.stderr


@pytest.mark.parametrize(
    ("mistake", "told"),
    [("write-before", "beside a unit"), ("flip", "result is wrong")],
)
def test_a_walk_notices_one_wrong_byte(mistake: str, told: str) -> None:
    ended = walked("careless", mistake)
    assert ended.returncode == 1, str(ended)
    assert told in ended.stderr


if __name__ == "__main__":
    main(*sys.argv[1:])
