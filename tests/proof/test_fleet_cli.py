"""`benchmarks.fleet`: the table, the page, the drawing, and errors."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fleet import published
from benchmarks.fleet.__main__ import make_parser
from holdfast.cli.main import main

SMALL = ["--gpus", "1024,4096", "--days", "20", "--seeds", "2", "--model", "70b"]


def rows_of(arguments: list[str], tmp_path: Path) -> list[dict[str, Any]]:
    out = tmp_path / "out.json"
    assert main([*arguments, "--json", str(out)], make_parser()) == 0
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    return rows


def test_a_small_sweep_prints_writes_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, plot = tmp_path / "page.md", tmp_path / "plot.svg"
    rows = rows_of([*SMALL, "--markdown", str(page), "--plot", str(plot)], tmp_path)
    names = [row["strategy"] for row in rows if row["gpus"] == 1024]
    assert names == [
        *("holdfast by default", "holdfast 6+2", "gemini 2 copies", "disk, sync", "disk, async", "nothing"),
    ]
    for row in rows:
        assert sum(row[part]["mean"] for part in ("ettr", "save", "lost", "recovery", "waiting")) == pytest.approx(1)
    by_name = {row["strategy"]: row for row in rows if row["gpus"] == 4096}
    assert by_name["nothing"]["ettr"]["mean"] < by_name["disk, sync"]["ettr"]["mean"]
    assert by_name["disk, sync"]["ettr"]["mean"] < by_name["holdfast 6+2"]["ettr"]["mean"]
    ours, pairs = by_name["holdfast by default"], by_name["gemini 2 copies"]
    assert ours["memory_bytes"] / pairs["memory_bytes"] == pytest.approx(3 * (8 / 7) / 4)
    assert by_name["holdfast 6+2"]["network_bytes"] == 2 * pairs["network_bytes"]
    printed = capsys.readouterr().out
    assert "seeds 1234/0 to 1234/1" in printed
    assert "4,096 GPUs, 512 nodes" in printed and "4,096 GPUs, 512 nodes" in page.read_text()
    for name in names:
        assert name in printed and f"| {name} |" in page.read_text()
    texts = [element.text for element in ET.fromstring(plot.read_text()).iter() if element.text]
    assert {*names, "1,024 GPUs", "4,096 GPUs", "lost steps"} <= set(texts)


def test_codes_intervals_and_spares_are_multiplied(tmp_path: Path) -> None:
    options = ["--strategies", "holdfast", "--protect", "6+2,copies:2", "--every", "auto,400", "--spares", "auto,0,1"]
    rows = [row for row in rows_of([*SMALL, *options], tmp_path) if row["gpus"] == 1024]
    assert len(rows) == 12
    assert len({row["strategy"] for row in rows}) == 12
    assert {row["strategy"] for row in rows} >= {"holdfast copies:2, every 400, no spares", "holdfast 6+2, 1 spare"}
    assert {row["spares"] for row in rows} == {0, 1}
    rarely = next(row for row in rows if row["strategy"] == "holdfast 6+2, every 400")
    often = next(row for row in rows if row["strategy"] == "holdfast 6+2")
    assert rarely["lost_steps"]["mean"] > often["lost_steps"]["mean"]


@pytest.mark.parametrize("interference", ["5%", "0%"])
@pytest.mark.parametrize(
    ("gpus", "model", "seeds"), [(8, "7b", 60), (64, "70b", 40), (1024, "70b", 8), (16384, "70b", 4)]
)
def test_the_default_loses_less_than_every_other_strategy(
    gpus: int, model: str, seeds: int, interference: str, tmp_path: Path
) -> None:
    """Each saves as often as its authors say, whether sending slows training down or is free; where it is not, holdfast
    as often as it can is one of them."""
    options = ["--gpus", str(gpus), "--model", model, "--seeds", str(seeds), "--interference", interference]
    every = "auto" if interference == "0%" else "auto,1"
    ours, *others = rows_of([*options, "--protect", "auto", "--every", every], tmp_path)
    assert ours["strategy"] == "holdfast by default"
    assert {other["strategy"] for other in others} >= {"gemini 2 copies", "disk, sync", "disk, async", "nothing"}
    for other in others:
        assert ours["ettr"]["mean"] > other["ettr"]["mean"], other["strategy"]


@pytest.mark.parametrize(("gpus", "seeds"), [(64, 40), (1024, 8), (16384, 4)])
def test_the_default_is_as_good_as_whole_copies_in_less_memory(gpus: int, seeds: int, tmp_path: Path) -> None:
    """Copies at the same interval send as much. At 64 GPUs they survive a lost rack, which one group does not."""
    options = ["--gpus", str(gpus), "--model", "70b", "--seeds", str(seeds), "--strategies", "holdfast"]
    ours, copies = rows_of([*options, "--protect", "auto,copies:1"], tmp_path)
    assert ours["ettr"]["mean"] == pytest.approx(copies["ettr"]["mean"], abs=1e-4)
    assert ours["network_rate"] == copies["network_rate"]
    assert ours["memory_bytes"] < 0.6 * copies["memory_bytes"]


def test_racks_and_bursts_and_times_to_restart_change_what_comes_out(tmp_path: Path) -> None:
    base = [*SMALL, "--strategies", "gemini,holdfast", "--profile", "rsc-1"]
    plain = rows_of(base, tmp_path)
    for options in (["--rack", "8"], ["--bursts", "0.6"], ["--restart", "20min"], ["--seed", "5"], ["--step", "9s"]):
        assert rows_of([*base, *options], tmp_path) != plain, options
    slow = rows_of([*base, "--restart", "20min"], tmp_path)
    assert all(one["ettr"]["mean"] < other["ettr"]["mean"] for one, other in zip(slow, plain, strict=True))


def test_published_numbers_are_repeated_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    arguments = ["--gpus", "1024", "--strategies", "nothing", "--published", "--json", str(out)]
    point = next(point for point in published.POINTS if "GEMINI" in point.source)
    monkeypatch.setattr(published, "POINTS", (point,))
    assert main(arguments, make_parser()) == 0
    [check] = json.loads(out.read_text())["published"]
    assert check["holds"] and check["simulated"] == pytest.approx(0.933, abs=0.01)
    assert "GEMINI" in capsys.readouterr().out
    monkeypatch.setattr(published, "POINTS", (replace(point, published=0.867),))  # for a ring, not for groups
    assert main(arguments, make_parser()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", "1001"], "1001 GPUs"),
        (["--gpus", "many"], "--gpus 'many'"),
        (["--gpus", "0"], "0 GPUs"),
        (["--gpus", "32"], "groups of 8 nodes"),
        (["--profile", "mine"], "'mine' is not"),
        (["--protect", "none"], "--protect none"),
        (["--interference", "2"], "--interference"),
        (["--protect", "6-2"], "'6-2'"),
        (["--every", "0"], "every 0 steps"),
        (["--spares", "-1"], "-1 spares"),
        (["--strategies", "luck"], "no 'luck'"),
        (["--days", "0"], "0.0 days"),
        (["--seeds", "0"], "nothing to simulate"),
        (["--rack", "0"], "racks of 0 nodes"),
        (["--bursts", "0"], "shape of 0.0"),
        (["--step", "0s"], "--step: '0s': give more than 0"),
        (["--step", "6"], "--step: '6' has no unit"),
    ],
)
def test_what_cannot_be_ends_with_a_message(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*options], make_parser()) == 2
    assert re.search(re.escape(message), capsys.readouterr().err)
