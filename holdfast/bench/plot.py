"""Draws the comparison of ``holdfast bench stall`` as SVG: training time lost to one snapshot, over one memcpy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.bench.stall import Report

WIDTH, ROW, LEFT, TOP = 760, 20, 210, 48
LEAST, MOST = 0.05, 50.0
"""Ends of the axis, which is logarithmic; what is less is drawn at the left end."""

TICKS = (0.1, 1.0, 10.0)
OURS, OTHERS = "#1b7f5c", "#9aa5b1"


def draw(report: Report) -> str:
    """An SVG: for each number of ranks a bar for each system, at the longest interval that was measured."""
    every = max((row["every"] for row in report.rows), default=1)
    parts: list[str] = []
    y = TOP
    for ranks in sorted({row["ranks"] for row in report.rows}):
        parts.append(_label(8, y + 14, f"{ranks} rank{'s' * (ranks > 1)}", bold=True))
        y += ROW
        for row in _bars(report.rows, ranks, every):
            parts += _bar(y, row)
            y += ROW
        y += ROW // 2
    title = f"Training time lost to one snapshot, in units of one memcpy of the state (every {every} steps)"
    axis = [
        f'<line x1="{_x(tick):.0f}" x2="{_x(tick):.0f}" y1="{TOP - 8}" y2="{y}" stroke="#d5dae0"/>'
        + _label(_x(tick) - 8, TOP - 12, f"{tick:g}")
        for tick in TICKS
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 8}" font-family="sans-serif">'
    background = f'<rect width="{WIDTH}" height="{y + 8}" fill="white"/>'
    return "\n".join([head, background, _label(8, 18, title, bold=True), *axis, *parts, "</svg>"]) + "\n"


def _bars(rows: Sequence[dict[str, Any]], ranks: int, every: int) -> list[dict[str, Any]]:
    chosen = [r for r in rows if (r["ranks"], r["every"]) == (ranks, every) and r["system"] != "nothing"]
    return sorted(chosen, key=lambda row: float(row["lost_ratio"]))


def _bar(y: int, row: dict[str, Any]) -> list[str]:
    ratio = float(row["lost_ratio"])
    colour = OURS if row["system"].startswith("holdfast") else OTHERS
    end = _x(ratio)
    return [
        _label(20, y + 14, row["system"]),
        f'<rect x="{LEFT}" y="{y + 3}" width="{max(1.0, end - LEFT):.0f}" height="{ROW - 6}" fill="{colour}"/>',
        _label(end + 6, y + 14, f"{ratio:.2f}"),
    ]


def _x(ratio: float) -> float:
    share = math.log(min(max(ratio, LEAST), MOST) / LEAST) / math.log(MOST / LEAST)
    return LEFT + share * (WIDTH - LEFT - 60)


def _label(x: float, y: float, text: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="12"{weight}>{escape(text)}</text>'
