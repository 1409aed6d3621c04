"""`benchmarks.stall`: a small real run, and how its rows are reported."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks import hot
from benchmarks.memory_copy import measure_copies
from benchmarks.stall import (
    SYSTEMS,
    StallBenchmark,
    StallReport,
    choose,
    compare,
    make_parser,
    markdown,
    run,
    summary,
    tables,
)
from benchmarks.stall_loop import noise_of
from holdfast import ConfigError
from holdfast.cli.main import main

ROW: dict[str, Any] = {
    "system": "holdfast",
    "protect": None,
    "ranks": 1,
    "every": 10,
    "stall_p50_ms": 0.5,
    "stall_p99_ms": 0.9,
    "lost_s": 0.02,
    "memcpy_floor_s": 0.1,
    "lost_ratio": 0.2,
    "noise": None,
    "processor_ratio": None,
    "inflation": 1.01,
    "survives_kill_s": 0.1,
    "survives_node_s": None,
    "extra_bytes": 300,
    "device_extra_bytes": 0,
    "restore_s": 0.05,
    "restored": True,
    "taken": 1.0,
    "state_bytes": 100,
}
OTHER = ROW | {"system": "other <async>", "lost_s": 0.7, "lost_ratio": 7.0}


def report(*rows: dict[str, Any]) -> StallReport:
    machine = {"cpu_model": "a processor", "cores": 2, "memory_bytes": 1, "kernel": "6.1"}
    return StallReport("2026-01-01", machine, list(rows), failed={"x, 2 ranks": "why"})


def test_a_small_run_measures_this_project(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page, plot = tmp_path / "out.json", tmp_path / "page.md", tmp_path / "plot.svg"
    arguments = ["--quick", "--json", str(out), "--markdown", str(page), "--plot", str(plot)]
    assert main(arguments, make_parser()) == 0, capsys.readouterr()
    result = json.loads(out.read_text())
    rows = {row["system"]: row for row in result["rows"]}
    ours = rows["holdfast"]
    assert ours["restored"]
    assert ours["taken"] > 0
    assert ours["state_bytes"] > 60_000_000
    assert 0 < ours["stall_p50_ms"] < 1000
    assert (ours["rounds"], ours["noise"]) == (1, None)
    assert math.isfinite(ours["processor_ratio"])  # a difference of two blocks, which other work on the machine moves
    assert 0 < ours["survives_kill_s"] < 30
    assert not rows["nothing"]["restored"]
    assert len(result["copies"]) == 3
    assert "holdfast" in page.read_text()
    ET.fromstring(plot.read_text())


def test_the_tables_of_a_result_can_be_read_on_80_columns() -> None:
    source = next((Path(__file__).parents[2] / "benchmarks" / "results").glob("stall-*.json"))
    for table in tables(StallReport.read(source)):
        lines = table.lines(80)
        assert max(map(len, lines)) <= 80
        if len(table.columns) > 4:  # then one line is not enough, and each system has a block with its name above
            assert [line for line in lines if not line.startswith(" ")] == [row[0] for row in table.rows]


def test_one_table_has_every_number_of_ranks_and_every_interval() -> None:
    protected = ROW | {"system": "holdfast, protected", "ranks": 2, "every": 1, "lost_ratio": 5.0, "taken": 0.5}
    found = summary([OTHER, ROW, protected, ROW | {"system": "nothing"}])
    assert found.columns == ["lost / copy", "1 rank, every 10 steps", "2 ranks, every step"]
    assert found.rows == [
        ["holdfast", "0.20", "–"],
        ["holdfast, protected", "–", "5.00 (50% taken)"],
        ["other <async>", "7.00", "–"],
    ]


def test_noise_stands_beside_what_is_lost_and_says_when_a_machine_is_too_busy() -> None:
    calm = ROW | {"noise": 0.03, "processor_ratio": 0.9}
    nothing = calm | {"system": "nothing", "lost_ratio": -0.01}
    found = report(nothing, calm)
    assert summary(found.rows).rows == [["holdfast", "0.20 ± 0.03"], ["nothing", "-0.01 ± 0.03"]]
    assert compare(found.rows, 1, 10).records()[1]["processor / copy"] == "0.900"
    assert not found.busy() and "too busy" not in markdown(found)
    for noisy in (nothing | {"lost_ratio": 0.4}, calm | {"noise": 0.4}):
        assert len(report(noisy).busy()) == 1
        assert "too busy" in markdown(report(noisy))
    assert not report(calm | {"lost_ratio": 5.0, "noise": 0.24}).busy()  # 5 in 100 of it
    others = report(nothing, calm, calm | {"system": "other", "noise": 0.4})
    assert others.busy() and not others.busy(("holdfast", "nothing"))  # what is quoted was calm


def test_rounds_go_on_until_a_row_is_steady() -> None:
    assert noise_of([1.0]) == math.inf
    assert noise_of([1.0, 1.0, 1.0]) == 0.0
    assert noise_of([0.0, 2.0] * 8) == pytest.approx(1.253 * 1.033 / 4, rel=0.01)


def test_figures_of_other_code_are_noticed_and_comments_are_no_other_code(tmp_path: Path) -> None:
    root, results = tmp_path / "root", tmp_path / "results"
    results.mkdir()
    for name in hot.HOT:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text((hot.ROOT / name).read_text())
    hot.check(root, results)  # no result knows yet what it is of
    for day, of in (("2026-01-01", "another"), ("2026-01-02", hot.digest(root))):
        told = report().to_json() | {"date": day, "hot": of}
        (results / f"stall-{day}.json").write_text(json.dumps(told))
    copier, stream = root / "snapshot/step/copier.py", root / "snapshot/stream.c"
    copier.write_text("# another comment\n" + copier.read_text())
    stream.write_text("/* another\n comment */\n" + stream.read_text())
    hot.check(root, results)
    copier.write_text(copier.read_text() + "\nMORE = 1\n")
    with pytest.raises(ConfigError, match="2026-01-02"):
        hot.check(root, results)


def test_a_result_can_be_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, page, plot = tmp_path / "result.json", tmp_path / "page.md", tmp_path / "plot.svg"
    source.write_text(json.dumps(report(ROW, OTHER).to_json()))
    command = ["--from", str(source), "--markdown", str(page), "--plot", str(plot)]
    assert main(command, make_parser()) == 0  # failures in the stored report are no failure of this command
    assert page.read_text() == markdown(report(ROW, OTHER))
    ET.fromstring(plot.read_text())
    source.write_text('{"date": 1}')
    assert main(command, make_parser()) == 2
    assert "not a result" in capsys.readouterr().err


def test_what_is_committed_is_what_the_program_makes_of_its_result() -> None:
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    for source in results.glob("stall-*.json"):
        assert source.with_suffix(".md").read_text() == markdown(StallReport.read(source))


def test_systems_are_chosen_by_name() -> None:
    assert [system.key for system in choose("holdfast,nvrx")] == ["holdfast", "nvrx"]
    with pytest.raises(ConfigError, match="'nobody'"):
        choose("nobody")


def test_every_peer_has_its_requirements() -> None:
    folder = Path(__file__).parents[2] / "benchmarks" / "systems"
    for system in SYSTEMS:
        assert (folder / f"{system.spec.partition(':')[0].rpartition('.')[2]}.py").exists()
        assert system.peer is None or (folder / "requirements" / f"{system.peer}.txt").exists()
    assert StallBenchmark(SYSTEMS).rounds > 0


def test_copies_are_compared_with_memcpy() -> None:
    rows = measure_copies(48)
    assert [row.tensors for row in rows] == [1, 208, 208]
    assert all(row.ratio > 0 for row in rows)


def test_memory_of_gpus_stands_beside_the_rest_where_there_is_any() -> None:
    assert "GPU memory / state" not in compare([ROW], 1, 10).columns
    row, _ = compare([ROW | {"device_extra_bytes": 50}, OTHER], 1, 10).records()
    assert row["GPU memory / state"] == "0.500"


@pytest.mark.skipif(torch.cuda.device_count() >= 99, reason="this machine has 99 GPUs")
def test_more_ranks_than_gpus_are_refused_before_anything_is_started() -> None:
    with pytest.raises(ConfigError, match=r"99 ranks .* GPUs"):
        run(StallBenchmark(choose("none"), (99,), device="cuda"), Console(quiet=True))
