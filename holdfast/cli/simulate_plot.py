"""Draws ``holdfast simulate`` as SVG: how much of the time trains at each size, and where the rest goes."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from html import escape
from typing import Any

WIDTH, ROW, LEFT, RIGHT, TOP = 900, 18, 250, 70, 30
CURVES, NAMES = 260, 250
"""Height of the curves above the bars; width of what stands beside them."""

PARTS = (
    ("ettr", "kept steps", "#1b7f5c"),
    ("save", "saving", "#5b8def"),
    ("lost", "lost steps", "#c8553d"),
    ("recovery", "recovery", "#e0a83b"),
    ("waiting", "waiting", "#9aa5b1"),
)
OURS = ("#0b5d41", "#1b7f5c", "#45a583", "#7cc5ab")
OTHERS = ("#c8553d", "#e0a83b", "#5b8def", "#8b6fc0", "#9aa5b1")
GRID = "#d5dae0"

Rows = Sequence[dict[str, Any]]


def draw(rows: Rows, what: str) -> str:
    """An SVG of rows as in the JSON of ``holdfast simulate``.

    Above, the effective training time ratio over the number of GPUs, which is on a logarithmic axis, with bars of one
    standard error; below, for each size, a bar of all time for each strategy.
    """
    names = list(dict.fromkeys(row["strategy"] for row in rows))
    below = TOP + max(CURVES + 20, 16 * len(names))
    sizes = sorted({row["gpus"] for row in rows})
    parts = [_label(8, 18, "Effective training time ratio over the number of GPUs", bold=True)]
    parts += _curves(rows, names, sizes)
    y = below + 24
    parts.append(_label(8, y, "Where all the time goes", bold=True))
    x = LEFT
    for _, title, colour in PARTS:
        parts += [_box(x, y - 10, 10, 10, colour), _label(x + 14, y, title)]
        x += 110
    y += 12
    for gpus in sizes:
        parts.append(_label(8, y + 13, f"{gpus:,} GPUs", bold=True))
        y += ROW
        for row in (row for row in rows if row["gpus"] == gpus):
            parts += _bar(y, row)
            y += ROW
        y += ROW // 2
    for line in textwrap.wrap(what, 150):
        parts.append(_label(8, y + 12, line, size=10))
        y += 14
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 12}" font-family="sans-serif">'
    return "\n".join([head, _box(0, 0, WIDTH, y + 12, "white"), *parts, "</svg>"]) + "\n"


def _curves(rows: Rows, names: Sequence[str], sizes: Sequence[int]) -> list[str]:
    low, high = math.log(sizes[0]), math.log(sizes[-1])

    def x_of(gpus: int) -> float:
        share = (math.log(gpus) - low) / (high - low) if high > low else 0.5
        return 60 + share * (WIDTH - 60 - NAMES)

    def y_of(ratio: float) -> float:
        return TOP + (1 - ratio) * CURVES

    parts = []
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(_line(60, y_of(tick), WIDTH - NAMES, y_of(tick), GRID))
        parts.append(_label(24, y_of(tick) + 4, f"{tick:.2f}"))
    parts += [_label(x_of(gpus) - 20, TOP + CURVES + 16, f"{gpus:,}") for gpus in sizes]
    colours, dashes = _styles(names)
    for place, name in enumerate(names):
        points = sorted((r for r in rows if r["strategy"] == name), key=lambda row: int(row["gpus"]))
        path = " ".join(f"{x_of(row['gpus']):.1f},{y_of(row['ettr']['mean']):.1f}" for row in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colours[name]}" stroke-width="2"{dashes[name]}/>')
        for row in points:
            x, y, error = x_of(row["gpus"]), y_of(row["ettr"]["mean"]), (row["ettr"]["error"] or 0.0) * CURVES
            parts.append(_line(x, y - error, x, y + error, colours[name]))
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colours[name]}"/>')
        y = TOP + 10 + place * 16
        parts += [
            _box(WIDTH - NAMES + 15, y - 8, 10, 10, colours[name]),
            _label(WIDTH - NAMES + 30, y + 1, name, size=11),
        ]
    return parts


def _styles(names: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """The colour of each, this system's in shades of its own; where they come round again, lines are dashed."""
    colours, dashes = {}, {}
    for mine, palette in ((True, OURS), (False, OTHERS)):
        for place, name in enumerate(name for name in names if name.startswith("holdfast") == mine):
            colours[name] = palette[place % len(palette)]
            dashes[name] = (
                f' stroke-dasharray="{max(1, 6 // (place // len(palette)))} 3"' if place >= len(palette) else ""
            )
    return colours, dashes


def _bar(y: int, row: dict[str, Any]) -> list[str]:
    parts = [_label(20, y + 13, row["strategy"], size=11)]
    x, whole = float(LEFT), WIDTH - LEFT - RIGHT
    for key, _, colour in PARTS:
        width = row[key]["mean"] * whole
        parts.append(_box(x, y + 2, width, ROW - 4, colour))
        x += width
    return [*parts, _label(WIDTH - RIGHT + 6, y + 13, f"{row['ettr']['mean']:.2%}")]


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _label(x: float, y: float, text: str, *, bold: bool = False, size: int = 12) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}"{weight}>{escape(text)}</text>'
