"""``benchmarks.ec``: what it measures, counts and shows. No test here depends on the speed of the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from benchmarks.ec import (
    KIB,
    MIB,
    OPS,
    EcBenchmark,
    EcReport,
    Row,
    Setting,
    _Stripe,
    cells,
    compare,
    goals,
    measure,
    notes,
    repeats,
    verdicts,
    why_unusable,
)
from benchmarks.ec_smps import ProtectRow, RebuildRow
from benchmarks.pyeclib_codec import codec_of
from holdfast import ConfigError
from holdfast.ec import choose_codec

ROOT = Path(__file__).parents[2]
KEYS = ["op", "k", "m", "unit_bytes", "backend", "threads", "gb_s", "memcpy_gb_s", "ratio"]


PROTECTED = ProtectRow("2+2", 4, 64 * MIB, 0.5, 0.13, 12.0, 0.011, 128 * MIB, 96 * MIB, 150 * MIB)
REBUILT = RebuildRow("2+2", "chain", 16 * MIB, 0.05, 12.0, 0.03, 16 * MIB, (8 * MIB, 0, 8 * MIB), (0, 0, 8 * MIB))


def row(**changes: Any) -> Row:
    fine = Row("encode", 4, 2, MIB, "isal", 1, gb_s=10.0, memcpy_gb_s=10.0, ratio=1.0)
    return replace(fine, **changes)


def report(*rows: Row) -> EcReport:
    machine = {"cpu_model": "Some CPU", "cores": 2, "memory_bytes": 1 << 34, "kernel": "6.1"}
    return EcReport(
        "2026-11-21T12:00:00+00:00", machine, 7, "isal", list(rows), ["something is left out"], [PROTECTED], [REBUILT]
    )


def check(result: dict[str, Any]) -> None:
    """What holds for every result of ``--quick``."""
    assert list(result) == ["date", "machine", "seed", "backend_auto", "rows", "protect", "rebuild"]
    assert list(result["machine"]) == ["cpu_model", "cores", "memory_bytes", "kernel"]
    assert {row["op"] for row in result["rows"]} == set(OPS)
    assert [row["protect"] for row in result["protect"]] == ["2+2"]
    assert result["protect"][0]["sent_bytes"] >= 2 * result["protect"][0]["bytes"]
    by_method = {row["method"]: row for row in result["rebuild"]}
    assert by_method["chain"]["received_bytes"] < by_method["decode"]["received_bytes"]
    assert sum(by_method["chain"]["helpers_received_bytes"]) > 0 == sum(by_method["decode"]["helpers_received_bytes"])
    assert {row["threads"] for row in result["rows"]} == {1, 2}
    assert {row["backend"] for row in result["rows"]} >= {"numpy", result["backend_auto"]}
    for each in result["rows"]:
        assert list(each) == KEYS
        assert each["gb_s"] > 0
        assert each["ratio"] == pytest.approx(each["gb_s"] / each["memcpy_gb_s"], rel=1e-3)


def test_the_command_measures_and_writes_json_and_markdown(tmp_path: Path) -> None:
    kept = tmp_path / "ec.md"
    done = subprocess.run(
        [*(sys.executable, "-m", "benchmarks.ec", "--quick"), "--json", "-", "--markdown", str(kept)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    check(result)
    for text in (done.stderr, kept.read_text()):
        assert result["date"] in text
        assert all(op in text for op in OPS)
        assert "pyeclib" in text


@pytest.mark.parametrize("backend", ["isal", "numpy", "pyeclib"])
@pytest.mark.parametrize(("k", "m"), [(2, 1), (4, 2), (8, 3)])
def test_what_is_timed_computes_what_it_should(backend: str, k: int, m: int) -> None:
    if why_unusable(backend):
        pytest.skip(why_unusable(backend))
    stripe = _Stripe(k, m, 4096, np.random.default_rng(1))
    codec = codec_of(k, m, backend)
    cell = Setting("encode", k, m, 4096, backend, threads=1)
    data = [bytes(unit) for unit in stripe.data]
    expected = [memoryview(bytearray(4096)) for _ in range(m)]
    choose_codec(k, m, "numpy").encode(stripe.data, expected)

    stripe.call(cell, codec)()
    assert stripe.parity == expected

    for unit in stripe.data[:m]:
        unit[:] = bytes(4096)
    stripe.call(replace(cell, op="reconstruct"), codec)()
    assert [bytes(unit) for unit in stripe.data] == data

    stripe.call(replace(cell, op="accumulate"), codec)()
    choose_codec(k, m, "numpy").accumulate(0, stripe.data[0], dict(enumerate(expected)))
    assert stripe.parity == expected

    stripe.memcpy(cell)()
    assert bytes(stripe.copy)[:4096] == data[0]


def test_every_thread_has_room_to_copy_all_data() -> None:
    stripe = _Stripe(4, 2, 4096, np.random.default_rng(1))
    stripe.memcpy(Setting("encode", 4, 2, 4096, "numpy", threads=1))()
    assert stripe.copy.nbytes == 4 * 4096
    assert bytes(stripe.copy) == b"".join(bytes(unit) for unit in stripe.data)


def test_a_row_is_the_ratio_of_medians() -> None:
    cell = Setting("encode", 4, 2, 10**6, "isal", threads=2)
    found = Row.of(cell, op_s=[0.001, 0.002, 9.0], memcpy_s=[0.001, 0.0001, 7.0])
    assert (found.gb_s, found.memcpy_gb_s, found.ratio) == (4.0, 8.0, 0.5)


@pytest.mark.parametrize(("op", "units"), [("encode", 4), ("accumulate", 1), ("reconstruct", 4)])
def test_the_bytes_of_a_cell_are_the_data_read(op: str, units: int) -> None:
    assert Setting(op, 4, 2, 1000, "isal", threads=2).bytes == units * 1000


def test_short_calls_are_repeated_and_long_ones_are_not() -> None:
    assert repeats(10e-6) > 100
    assert repeats(1.0) == 1


def test_what_is_left_out_is_said() -> None:
    plan = EcBenchmark()
    todo = cells(plan, unusable=())
    assert len({*todo}) == len(todo)
    assert [cell.unit_bytes for cell in todo] == sorted(cell.unit_bytes for cell in todo)
    assert {(cell.k, cell.m) for cell in todo} == set(plan.codes)
    assert not [cell for cell in todo if (cell.backend, cell.op) == ("pyeclib", "accumulate")]
    largest = [cell for cell in todo if cell.unit_bytes == 64 * MIB]
    assert {(cell.backend, cell.m == 1) for cell in largest} == {("isal", True), ("isal", False), ("numpy", True)}
    text = "\n".join(notes(plan, {}))
    assert "accumulate single units" in text
    assert "beyond 16 MiB" in text


def test_an_unusable_backend_is_left_out_and_named() -> None:
    assert {cell.backend for cell in cells(EcBenchmark(), {"isal"})} == {"numpy", "pyeclib"}
    (said,) = (note for note in notes(EcBenchmark(), {"isal": "no such library"}) if "isal " in note)
    assert said.endswith("no such library")


def test_too_little_memory_is_refused_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 30))
    with pytest.raises(ConfigError, match="use --quick"):
        measure(EcBenchmark(), [], lambda n, cell: None)


def test_the_table_has_a_line_per_code_backend_and_threads_and_a_column_per_size() -> None:
    rows = [
        row(unit_bytes=64 * KIB, ratio=0.5, gb_s=9.876),
        row(unit_bytes=MIB, ratio=1.234, gb_s=20.0),
        row(unit_bytes=MIB, threads=2, gb_s=123.4),
        row(op="accumulate"),
    ]
    found = compare(rows, "encode")
    assert found.columns == ["code", "backend", "threads", "64 KiB", "1 MiB"]
    assert found.rows == [
        ["4+2", "isal", "1", "0.50 (9.88)", "1.23 (20.0)"],
        ["4+2", "isal", "2", "–", "1.00 (123)"],
    ]


def test_goals_are_judged_by_the_slowest() -> None:
    found = goals(
        [
            row(ratio=0.81),
            row(k=4, m=1, ratio=1.2),
            row(k=2, m=1, ratio=0.97, unit_bytes=4 * MIB),
            row(k=2, m=1, ratio=0.2, unit_bytes=64 * KIB),
            row(k=4, m=1, ratio=1.0, threads=2),
            row(k=4, m=1, ratio=0.1, backend="numpy"),
            row(k=4, m=1, ratio=0.1, op="accumulate"),
        ]
    )
    assert [met for met, _ in found] == [True, False, True]
    assert "4+2 at 1 MiB, 1 thread: 0.81x" in found[0][1]
    assert "0.97x memcpy (2+1, 4 MiB)" in found[1][1]
    assert "2 threads" in found[2][1]
    assert not goals([row(ratio=0.79)])[0][0]


def test_memory_beyond_the_goal_is_told() -> None:
    told = {text: met for met, text in verdicts(report(row()))}
    assert [met for text, met in told.items() if "54.0 MiB" in text] == [True]
    greedy = replace(report(row()), protect=[replace(PROTECTED, high_water_bytes=200 * MIB)])
    assert [met for met, text in verdicts(greedy) if "104.0 MiB" in text] == [False]
