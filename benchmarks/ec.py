"""``python -m benchmarks.ec``: how fast the erasure codes are, relative to copying the same bytes.

Times on a shared machine mean little. So each operation alternates with `memmove` of the same number of bytes in the
same number of threads, and the result is the ratio of their medians. `measure` does the timing; the other functions
choose what to measure, evaluate the results and print them.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Self

import numpy as np
import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from benchmarks import ec_smps
from benchmarks.pyeclib_codec import codec_of
from holdfast.bench.machine import describe, machine, rounded
from holdfast.cli.arguments import Parser, output_file
from holdfast.cli.main import main
from holdfast.cli.output import add_json, console_of, write_json
from holdfast.ec import Codec, describe_auto
from holdfast.ec.codec import Buffer, as_array
from holdfast.report import Report, say
from holdfast.smp_daemon.shared.errors import ConfigError

OPS = ("encode", "accumulate", "reconstruct")
KIB, MIB = 1 << 10, 1 << 20

BATCH_S = 0.004
"""How long a measurement repeats a short call, in seconds, since threads start up to 0.1 ms apart."""

WARM_UP_S = 0.1
"""Longer than preparing tables takes, in seconds: a first call that takes longer is slow for other reasons."""

MIN_SAMPLES = 3
SLOW_BYTES = 16 * MIB
"""The largest unit to measure slow backends with: with larger ones they take minutes, and are no faster per byte."""

BARRIER_DEADLINE_S = 60.0

LEGEND = (
    "A cell is the throughput as a part of memcpy's, and in brackets its GB/s: 10^9 bytes of data units read in a "
    "second, by all threads together. Medians; operation and memcpy took turns in one run, each thread on buffers of "
    "its own. Accumulate adds one data unit to all parities; reconstruct computes m lost data units from k others."
)


@dataclass(frozen=True, slots=True)
class EcBenchmark:
    """What to measure: every combination of the first four fields, and then four SMPs.

    Attributes:
        budget_s: time for one combination, unless `MIN_SAMPLES` take longer.
        protects: codes of the SMPs. shard_bytes: bytes on each. repeats: number of snapshots they protect.
    """

    codes: tuple[tuple[int, int], ...] = ((2, 1), (4, 1), (4, 2), (6, 2), (8, 2), (8, 3))
    unit_bytes: tuple[int, ...] = (64 * KIB, 1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB)
    backends: tuple[str, ...] = ("isal", "numpy", "pyeclib")
    threads: tuple[int, ...] = (1, 2)
    seed: int = 1234
    budget_s: float = 0.25
    protects: tuple[str, ...] = ("3+1", "2+2", "copies:1")
    shard_bytes: int = 256 * MIB
    repeats: int = 5


def quick(seed: int) -> EcBenchmark:
    """A benchmark of a few seconds."""
    return EcBenchmark(
        codes=((4, 1), (4, 2)),
        unit_bytes=(64 * KIB, MIB),
        seed=seed,
        budget_s=0.05,
        protects=("2+2",),
        shard_bytes=16 * MIB,
        repeats=1,
    )


@dataclass(frozen=True, slots=True)
class Setting:
    """One combination to measure."""

    op: str
    k: int
    m: int
    unit_bytes: int
    backend: str
    threads: int

    @property
    def bytes(self) -> int:
        """Data that one call reads, and that memcpy copies for comparison: one unit for accumulate, else k units."""
        return self.unit_bytes * (1 if self.op == "accumulate" else self.k)


@dataclass(frozen=True, slots=True)
class Row(Setting):
    """The result for one combination. GB are 10^9 bytes; `ratio` is gb_s / memcpy_gb_s."""

    gb_s: float
    memcpy_gb_s: float
    ratio: float

    @classmethod
    def of(cls, cell: Setting, op_s: Sequence[float], memcpy_s: Sequence[float]) -> Self:
        """The row for the seconds that each call and each copy took."""
        total = cell.bytes * cell.threads / 1e9
        gb_s, memcpy_gb_s = (rounded(total / statistics.median(seconds)) for seconds in (op_s, memcpy_s))
        return cls(**asdict(cell), gb_s=gb_s, memcpy_gb_s=memcpy_gb_s, ratio=rounded(gb_s / memcpy_gb_s))


@dataclass(frozen=True, slots=True)
class EcReport:
    """The result of a run of the benchmark. `notes` say what was left out."""

    date: str
    machine: dict[str, Any]
    seed: int
    backend_auto: str
    rows: list[Row]
    notes: list[str]
    protect: list[ec_smps.ProtectRow]
    rebuild: list[ec_smps.RebuildRow]

    def to_json(self) -> dict[str, Any]:
        """The JSON object that ``--json`` writes."""
        return {
            "date": self.date,
            "machine": self.machine,
            "seed": self.seed,
            "backend_auto": self.backend_auto,
            "rows": [asdict(row) for row in self.rows],
            "protect": [asdict(row) for row in self.protect],
            "rebuild": [asdict(row) for row in self.rebuild],
        }


def run(plan: EcBenchmark, console: Console) -> EcReport:
    """Measure everything, with a progress bar on a terminal.

    Raises:
        ConfigError: the buffers do not fit into memory.
    """
    unusable = {backend: reason for backend in plan.backends if (reason := why_unusable(backend))}
    todo = cells(plan, unusable)
    bar = Progress(
        TextColumn("{task.description:<44}"),
        BarColumn(bar_width=34),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )

    def tell(done: int, cell: Setting) -> None:
        bar.update(task, completed=done, description=_title(cell))
        if not console.is_terminal:
            console.print(f"[{done + 1}/{len(todo)}] {_title(cell)}")

    with bar:
        task = bar.add_task("", total=len(todo))
        rows = measure(plan, todo, tell)
        bar.update(task, completed=len(todo))
        bar.update(task, description="four SMPs protect and rebuild")
        ends = [ec_smps.measure(protect, plan.shard_bytes, plan.seed, plan.repeats) for protect in plan.protects]
    return EcReport(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine(),
        seed=plan.seed,
        backend_auto=describe_auto()[0],
        rows=rows,
        notes=notes(plan, unusable),
        protect=[protected for protected, _ in ends],
        rebuild=[row for _, rebuilt in ends for row in rebuilt],
    )


def cells(plan: EcBenchmark, unusable: Iterable[str]) -> list[Setting]:
    """All combinations to measure, sorted by unit size."""
    return [
        Setting(op, k, m, unit_bytes, backend, threads)
        for unit_bytes in plan.unit_bytes
        for op in OPS
        for k, m in plan.codes
        for backend in plan.backends
        for threads in plan.threads
        if backend not in unusable
        and (backend, op) != ("pyeclib", "accumulate")
        and not (unit_bytes > SLOW_BYTES and _slow(backend, m))
    ]


def why_unusable(backend: str) -> str:
    """Why a backend cannot be measured here; empty if it can."""
    try:
        codec_of(4, 2, backend)
    except (ValueError, ImportError) as error:
        return str(error)
    return ""


def _slow(backend: str, m: int) -> bool:
    return backend == "pyeclib" or (backend == "numpy" and m > 1)


def notes(plan: EcBenchmark, unusable: dict[str, str]) -> list[str]:
    """Sentences on what `cells` leaves out, and why."""
    found = [f"{backend} is left out: {reason}" for backend, reason in unusable.items()]
    if "pyeclib" in plan.backends and "pyeclib" not in unusable:
        found.append("pyeclib cannot accumulate single units; its backend does that by NumPy, so see there")
    if max(plan.unit_bytes) > SLOW_BYTES:
        found.append(f"to save time nothing slow is measured beyond {size(SLOW_BYTES)}: pyeclib, and numpy with m > 1")
    return found


def measure(plan: EcBenchmark, todo: Sequence[Setting], begin: Callable[[int, Setting], object]) -> list[Row]:
    """Measure the combinations in `todo`, size by size. Blocks for minutes.

    Args:
        begin: called before each combination, with the number of combinations that are done.

    Raises:
        ConfigError: the buffers do not fit into memory.
    """
    most_k, most_m, threads = max(k for k, _ in plan.codes), max(m for _, m in plan.codes), max(plan.threads)
    need = threads * (2 * most_k + most_m) * max(plan.unit_bytes)
    room = psutil.virtual_memory().available
    if 3 * need > room:  # pyeclib makes two more copies
        raise ConfigError(f"the buffers need about {3 * need:,} bytes and {room:,} are free: use --quick")
    random = np.random.default_rng(plan.seed)
    rows: list[Row] = []
    with ThreadPoolExecutor(threads) as pool:
        for unit_bytes in plan.unit_bytes:
            stripes = [_Stripe(most_k, most_m, unit_bytes, random) for _ in range(threads)]
            for cell in (cell for cell in todo if cell.unit_bytes == unit_bytes):
                begin(len(rows), cell)
                rows.append(_measure(cell, stripes[: cell.threads], pool, plan.budget_s))
            del stripes  # free the memory before the next ones are made
    return rows


class _Stripe:
    """Units of one size in shared memory, as in an arena: data, parity, and a target for memcpy. All are filled."""

    def __init__(self, k: int, m: int, unit_bytes: int, random: np.random.Generator) -> None:
        view = memoryview(mmap.mmap(-1, (2 * k + m) * unit_bytes))
        units = [view[start : start + unit_bytes] for start in range(0, view.nbytes, unit_bytes)]
        for unit in units:
            unit[:] = random.bytes(unit_bytes)
        self.data: list[Buffer] = units[:k]
        self.parity: list[Buffer] = units[k : k + m]
        self.copy: Buffer = view[(k + m) * unit_bytes :]

    def call(self, cell: Setting, codec: Codec) -> Callable[[], object]:
        """The operation of `cell` as a function without arguments."""
        data, parity = self.data[: cell.k], self.parity[: cell.m]
        if cell.op == "encode":
            return partial(codec.encode, data, parity)
        if cell.op == "accumulate":
            return partial(codec.accumulate, 0, data[0], dict(enumerate(parity)))
        units = dict(enumerate([*data, *parity]))
        lost = range(min(cell.k, cell.m))
        survivors = {index: unit for index, unit in units.items() if index not in lost}
        return partial(codec.reconstruct, survivors, {index: units[index] for index in lost})

    def memcpy(self, cell: Setting) -> Callable[[], object]:
        """A copy of as many bytes as `cell` reads, as a function without arguments."""
        target, source = as_array(self.copy).ctypes.data, as_array(self.data[0]).ctypes.data
        return partial(ctypes.memmove, target, source, cell.bytes)


def _measure(cell: Setting, stripes: Sequence[_Stripe], pool: ThreadPoolExecutor, budget_s: float) -> Row:
    codec = codec_of(cell.k, cell.m, cell.backend)
    calls = [stripe.call(cell, codec) for stripe in stripes]
    copies = [stripe.memcpy(cell) for stripe in stripes]
    copy_times, call_times = _times(pool, copies), _times(pool, calls)
    op_s: list[float] = []
    memcpy_s: list[float] = []
    end = time.perf_counter() + budget_s
    while len(op_s) < MIN_SAMPLES or time.perf_counter() < end:
        memcpy_s.append(_seconds(pool, copies, copy_times))
        op_s.append(_seconds(pool, calls, call_times))
    return Row.of(cell, op_s, memcpy_s)


def _times(pool: ThreadPoolExecutor, works: Sequence[Callable[[], object]]) -> int:
    """How often to repeat `works` in one measurement: from the fastest of four, as the first call prepares tables."""
    best = _seconds(pool, works, 1)
    for _ in range(3):
        if best < WARM_UP_S:
            best = min(best, _seconds(pool, works, repeats(best)))
    return repeats(best)


def _seconds(pool: ThreadPoolExecutor, works: Sequence[Callable[[], object]], times: int) -> float:
    """Seconds per call when each of `works` is called `times` times, all at the same time in threads of their own."""
    barrier = threading.Barrier(len(works))

    def call(work: Callable[[], object]) -> tuple[float, float]:
        barrier.wait(BARRIER_DEADLINE_S)
        began = time.perf_counter()
        for _ in range(times):
            work()
        return began, time.perf_counter()

    began, ended = zip(*pool.map(call, works), strict=True)
    return float(max(ended) - min(began)) / times


def repeats(once_s: float) -> int:
    """Number of calls in one measurement if a call takes `once_s` seconds."""
    return max(1, round(BATCH_S / once_s))


def goals(rows: Iterable[Row]) -> list[tuple[bool, str]]:
    """Whether ISA-L meets each goal, for each number of threads. The slowest matching row decides."""
    encodes = [row for row in rows if (row.op, row.backend) == ("encode", "isal")]
    wanted = [
        ("encode 4+2 at 1 MiB", 0.8, [r for r in encodes if (r.k, r.m, r.unit_bytes) == (4, 2, MIB)]),
        ("encode by XOR from 1 MiB up", 1.0, [r for r in encodes if r.m == 1 and r.unit_bytes >= MIB]),
    ]
    found = []
    for title, least, matching in wanted:
        for threads in sorted({row.threads for row in matching}):
            slowest = min((row for row in matching if row.threads == threads), key=lambda row: row.ratio)
            where = f"{slowest.k}+{slowest.m}, {size(slowest.unit_bytes)}"
            text = f"isal {title}, {_threads(threads)}: {slowest.ratio:.2f}x memcpy ({where}), goal {least:g}x"
            found.append((slowest.ratio >= least, text))
    return found


def compare(rows: Iterable[Row], op: str) -> Report:
    """The table of one operation: a line per code, backend and threads; a column per unit size."""
    mine = [row for row in rows if row.op == op]
    sizes = sorted({row.unit_bytes for row in mine})
    lines: dict[tuple[str, str, str], dict[int, str]] = {}
    for row in mine:
        line = lines.setdefault((f"{row.k}+{row.m}", row.backend, str(row.threads)), {})
        line[row.unit_bytes] = f"{row.ratio:.2f} ({row.gb_s:.{2 if row.gb_s < 10 else 1 if row.gb_s < 100 else 0}f})"
    header = ["code", "backend", "threads", *(size(unit_bytes) for unit_bytes in sizes)]
    return Report(header, [[*key, *(line.get(each, "–") for each in sizes)] for key, line in lines.items()], op, left=2)


def size(count: int) -> str:
    """A number of bytes as text, such as ``"64 KiB"``."""
    return f"{count // MIB} MiB" if count >= MIB else f"{count // KIB} KiB"


def tables(report: EcReport) -> list[Report]:
    """All tables."""
    ends = [ec_smps.protect_report(report.protect), ec_smps.rebuild_report(report.rebuild)]
    return [*(compare(report.rows, op) for op in OPS), *ends]


def show(console: Console, report: EcReport) -> None:
    """Print the tables and the goals."""
    say(console, _head(report), *tables(report), LEGEND, *report.notes)
    console.print()
    for met, text in verdicts(report):
        console.print(Text("  ✓ " if met else "  ✗ ", "green" if met else "bold red").append(text, "default"))


def verdicts(report: EcReport) -> list[tuple[bool, str]]:
    """Whether each goal is met: `goals` for the codes, then the goal for the SMPs' memory."""
    found = goals(report.rows)
    for row in report.protect:
        beyond = row.high_water_bytes - row.arena_bytes
        text = f"an SMP that protects by {row.protect} never had more than its arena and {beyond / MIB:.1f} MiB"
        found.append((beyond <= 64 * MIB, f"{text}, goal 64 MiB"))
    return found


def markdown(report: EcReport) -> str:
    """The report as a Markdown file."""
    parts = ["# Erasure codes, compared with memcpy", _head(report), LEGEND]
    parts += [table.markdown() for table in tables(report)]
    remarks = [*report.notes, *(f"{'✓' if met else '✗'} {text}" for met, text in verdicts(report))]
    parts.append("\n".join(f"* {remark}" for remark in remarks))
    return "\n\n".join(parts) + "\n"


def _head(report: EcReport) -> str:
    return f'{report.date}: {describe(report.machine)}; seed {report.seed}; "auto" is {report.backend_auto}.'


def _title(cell: Setting) -> str:
    return f"{size(cell.unit_bytes)} {cell.op} {cell.k}+{cell.m} {cell.backend}, {_threads(cell.threads)}"


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"


def make_parser() -> Parser:
    """The options."""
    parser = Parser(
        prog="python -m benchmarks.ec",
        description="Measures every operation of every erasure code backend, in turn with memcpy of the same bytes.",
    )
    parser.add_argument("--quick", action="store_true", help="a few cells, in seconds instead of minutes")
    parser.add_argument("--seed", type=int, default=1234, help="seed of the data (default 1234)")
    parser.add_argument("--markdown", type=output_file, metavar="FILE", help="also write the tables as Markdown")
    add_json(parser)
    parser.set_defaults(run=_command)
    return parser


def _command(parsed: argparse.Namespace) -> int:
    console = console_of(parsed)
    report = run(quick(parsed.seed) if parsed.quick else EcBenchmark(seed=parsed.seed), console)
    show(console, report)
    if parsed.markdown:
        parsed.markdown.write_text(markdown(report))
    write_json(parsed.json, report.to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main(parser=make_parser()))
