"""Plots of ``--plot``: everything measured is drawn, inside the figure, in bars as long as their numbers."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

from benchmarks import stall
from benchmarks.fleet import __main__ as fleet
from benchmarks.plots import SHARES, draw_simulation, draw_stall, write
from benchmarks.stall import StallReport
from holdfast.cli.arguments import Parser
from holdfast.cli.main import main


def bars_of(figure: Figure, axes: int = -1) -> list[tuple[float, float]]:
    """Where each bar begins and ends, in drawing order."""
    found = [each for each in figure.axes[axes].containers if isinstance(each, BarContainer)]
    return [(bar.get_x(), bar.get_x() + bar.get_width()) for container in found for bar in container]


def texts_of(figure: Figure, folder: Path) -> list[str]:
    """All texts of the figure, as they are in the file."""
    write(figure, folder / "plot")
    return [element.text for element in ET.fromstring((folder / "plot").read_text()).iter() if element.text]


def check_inside(figure: Figure) -> None:
    """No text extends beyond the figure's edge by more than a letter."""
    figure.draw_without_rendering()
    width, height = figure.bbox.size
    for axes in figure.axes:
        box = axes.get_tightbbox()
        assert box is not None
        assert box.x0 >= -10 and box.x1 <= width + 10 and box.y0 >= -10 and box.y1 <= height + 10, axes.get_title()


def stall_row(system: str, ratio: float) -> dict[str, Any]:
    return {"system": system, "ranks": 1, "every": 10, "lost_ratio": ratio, "noise": None, "taken": 1.0}


def stall_report(*rows: dict[str, Any]) -> StallReport:
    machine = {"cpu_model": "a processor", "cores": 2, "memory_bytes": 1, "kernel": "6.1", "load_average": 0.25}
    return StallReport("2026-01-01", machine, list(rows), failed={})


def test_a_system_that_loses_more_has_a_longer_bar(tmp_path: Path) -> None:
    rows = stall_row("other <async>", 7.0), stall_row("nothing", 0.0), stall_row("holdfast", 0.2)
    figure = draw_stall(stall_report(*rows))
    assert [end for _, end in bars_of(figure)] == pytest.approx([0.2, 7.0])
    assert {"other <async>", "holdfast", "1 rank", "0.20", "7.00"} <= set(texts_of(figure, tmp_path))
    check_inside(figure)


def test_a_loss_beyond_the_axis_is_drawn_at_its_end(tmp_path: Path) -> None:
    figure = draw_stall(stall_report(stall_row("holdfast", 0.0), stall_row("other", 1e4)))
    assert [end for _, end in bars_of(figure)] == pytest.approx([0.05, 50.0], rel=0.05)
    assert "10000.00" in texts_of(figure, tmp_path)


def test_every_interval_has_a_panel_and_every_axis_a_title(tmp_path: Path) -> None:
    protected = stall_row("holdfast, protected", 7.0) | {"ranks": 2, "every": 1, "taken": 0.375}
    figure = draw_stall(stall_report(stall_row("holdfast", 0.2), stall_row("holdfast", 0.1) | {"every": 1}, protected))
    assert [axes.get_title().partition("every ")[2] for axes in figure.axes] == ["step", "10 steps"]
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in figure.axes)
    assert [end for _, end in bars_of(figure, 0)] == pytest.approx([0.1, 7.0])
    found = set(texts_of(figure, tmp_path))
    assert {"7.00 (38% taken)", "1 rank", "2 ranks"} <= found
    assert any(text.startswith("2026-01-01: a processor, 2 cores, ") for text in found)
    check_inside(figure)


def test_a_plot_of_nothing_is_a_plot(tmp_path: Path) -> None:
    assert any("copy" in text for text in texts_of(draw_stall(stall_report()), tmp_path))


def test_the_shares_of_all_time_add_up_to_a_whole_line(tmp_path: Path) -> None:
    shares = {"ettr": 0.5, "save": 0.1, "lost": 0.2, "recovery": 0.15, "waiting": 0.05}
    estimates = {part: {"mean": share, "error": 0.01} for part, share in shares.items()}
    rows = [{"gpus": gpus, "strategy": "a <b>", "spares": 0, **estimates} for gpus in (8, 64)]
    figure = draw_simulation(rows, "what it rests on")
    bars = bars_of(figure)
    assert len(bars) == 2 * len(SHARES)
    starts, ends = [0.0, 0.5, 0.6, 0.8, 0.95], [0.5, 0.6, 0.8, 0.95, 1.0]
    for row in (0, 1):
        assert bars[row::2] == [pytest.approx(each) for each in zip(starts, ends, strict=True)]
    assert {"a <b>", "8 GPUs", "64 GPUs", "lost steps", "what it rests on"} <= set(texts_of(figure, tmp_path))
    check_inside(figure)


def test_a_strategy_is_drawn_over_all_sizes_with_its_error() -> None:
    def row(gpus: int, ratio: float) -> dict[str, Any]:
        part = {"mean": ratio, "error": 0.03}
        return {"gpus": gpus, "strategy": "x"} | dict.fromkeys(("ettr", "save", "lost", "recovery", "waiting"), part)

    above = draw_simulation([row(64, 0.2), row(8, 0.4)], "").axes[0]
    [drawn] = above.containers
    assert [tuple(point) for point in drawn[0].get_xydata()] == [(8, 0.4), (64, 0.2)]
    [segments] = [bars.get_segments() for bars in drawn[2]]
    assert [sorted(segment[:, 1]) for segment in segments] == [pytest.approx([m - 0.03, m + 0.03]) for m in (0.4, 0.2)]


def test_one_size_and_one_seed_can_be_drawn(tmp_path: Path) -> None:
    part = {"mean": 0.2, "error": None}
    row = {"gpus": 8, "strategy": "x"} | dict.fromkeys(("ettr", "save", "lost", "recovery", "waiting"), part)
    assert "8 GPUs" in texts_of(draw_simulation([row], ""), tmp_path)


def test_the_same_rows_draw_the_same_bytes(tmp_path: Path) -> None:
    for name in ("first", "again"):
        write(draw_stall(stall_report(stall_row("holdfast", 0.2))), tmp_path / name)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "again").read_bytes()


@pytest.mark.parametrize("parser", [stall.make_parser(), fleet.make_parser()], ids=["stall", "fleet"])
def test_without_matplotlib_the_extra_to_install_is_named_before_any_work(
    parser: Parser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    assert main(["--plot", str(tmp_path / "plot.svg")], parser) == 2
    printed = capsys.readouterr()
    assert "pip install 'holdfast-train[plots]'" in printed.err
    assert not printed.out
