"""Draws a recommendation of ``holdfast tune`` as SVG: waste against the interval, survival against memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from holdfast.cli.plan import amount
from holdfast.planner.costs import Costs
from holdfast.planner.curves import Curves, Point, curves, nines
from holdfast.planner.recommend import Recommendation
from holdfast.snapshot.interval.durations import duration

WIDTH, HEIGHT, TOP, BOTTOM = 460, 330, 48, 284
LEFT, RIGHT = 56, 440
OURS, OTHERS, GRID, RULE, MEASURED = "#1b7f5c", "#9aa5b1", "#d5dae0", "#b0702a", "#8a3ffc"
COLOURS = ("#4c78a8", "#1b7f5c", "#b0702a", "#8a3ffc")
"""Of m = 1, 2, 3, 4."""
TIMES = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 180, 600, 1800, 3600, 10800, 36000, 86400, 259200, 864000, 2592000)


@dataclass(frozen=True, slots=True)
class _Axes:
    """Where values lie in one of the two panels; x is logarithmic, y too if `log_y`."""

    offset: int
    x: tuple[float, float]
    y: tuple[float, float]
    log_y: bool

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = math.log(x / self.x[0]) / math.log(self.x[1] / self.x[0])
        y = min(max(y, self.y[0]), self.y[1])
        up = math.log(y / self.y[0]) / math.log(self.y[1] / self.y[0]) if self.log_y else (y - self.y[0]) / self._height
        return self.offset + LEFT + across * (RIGHT - LEFT), BOTTOM - up * (BOTTOM - TOP)

    @property
    def _height(self) -> float:
        return self.y[1] - self.y[0]


def draw(found: Recommendation, costs: Costs) -> str:
    """An SVG of two panels. Left: the first-order curve, Monte Carlo with two standard errors, Young's and Daly's
    intervals, the chosen point, and what was measured. Right: each code's nines for 30 days over its memory."""
    parts = [*_waste(found, curves(found, costs)), *_survival(found)]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * WIDTH}" height="{HEIGHT}" font-family="sans-serif">'
    background = f'<rect width="{2 * WIDTH}" height="{HEIGHT}" fill="white"/>'
    return "\n".join([head, background, *parts, "</svg>"]) + "\n"


def _waste(found: Recommendation, data: Curves) -> list[str]:
    every = [*data.predicted, *data.played, data.chosen, *(point for _, point in data.rules)]
    every += [data.measured] if data.measured else []
    seen = [point.waste for point in every if point.waste > 0]
    axes = _Axes(
        0,
        (min(p.interval_s for p in every) * 0.9, max(p.interval_s for p in every) * 1.1),
        (min(seen, default=1e-6) * 0.8, max(seen, default=1.0) * 1.2),
        log_y=True,
    )
    parts = [_label(8, 18, "Time lost (share) against the interval between snapshots", bold=True)]
    parts += _ticks_x(axes, _thin([mark for mark in TIMES if axes.x[0] <= mark <= axes.x[1]]), duration)
    parts += _ticks_y(axes, _decades(*axes.y), "{:.2g}")
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (axes.at(p.interval_s, p.waste) for p in data.predicted))
    parts.append(f'<polyline points="{line}" fill="none" stroke="{OTHERS}" stroke-width="2"/>')
    for point in data.played:
        parts += _dot(axes, point, OTHERS, 3)
    for place, (name, point) in enumerate(data.rules):
        x, y = axes.at(point.interval_s, point.waste)
        text = f"{name} {duration(point.interval_s)}"
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{y:.1f}" stroke="{RULE}" stroke-dasharray="3 3"/>'
        )
        parts.append(_label(x + 4, TOP + 12 + 14 * place, text, RULE))
    if data.measured:
        parts += _dot(axes, data.measured, MEASURED, 4)
        x, y = axes.at(data.measured.interval_s, data.measured.waste)
        parts.append(_label(x + 7, y - 5, "measured", MEASURED))
    parts += _dot(axes, data.chosen, OURS, 5)
    x, y = axes.at(data.chosen.interval_s, data.chosen.waste)
    parts.append(_label(x - 20, y + 20, f"chosen {duration(data.chosen.interval_s)}", OURS, bold=True))
    parts.append(
        _label(LEFT, HEIGHT - 8, f"line: first order; dots: Monte Carlo, two standard errors, seed {found.seed}")
    )
    return parts


def _survival(found: Recommendation) -> list[str]:
    codes = [(code, size, nines(code.risk)) for code, size in found.others]
    sizes = [size for _, size, _ in codes]
    most = max(1.0, max(height for *_, height in codes))
    axes = _Axes(WIDTH, (min(sizes) * 0.9, max(sizes) * 1.2), (0.0, most * 1.05), log_y=False)
    parts = [_label(WIDTH + 8, 18, "Nines of survival for 30 days against memory of a node", bold=True)]
    parts += _ticks_x(axes, _spread(sizes), amount)
    parts += _ticks_y(axes, [float(n) for n in range(0, math.ceil(most) + 1, max(1, round(most / 6)))], "{:g}")
    for code, size, height in codes:
        x, y = axes.at(size, height)
        colour = COLOURS[min(code.parity, len(COLOURS)) - 1] if code.parity else OTHERS
        title = f"<title>{escape(str(code))}: {code.survival:.12g}</title>"
        if code.parity and code.data == 1:
            parts.append(f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" fill="{colour}">{title}</rect>')
            parts.append(_label(x - 12, y - 8, f"copies:{code.parity}", colour))
        else:
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}">{title}</circle>')
    x, y = axes.at(next(size for code, size, _ in codes if code == found.code), nines(found.code.risk))
    parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7" fill="none" stroke="{OURS}" stroke-width="2"/>')
    below = y + 22 if y < BOTTOM - 30 else y - 14  # the dots beside it rise to the right
    parts.append(_label(x - 16, below, str(found.code), OURS, bold=True))
    for m, colour in enumerate(COLOURS, 1):
        parts.append(_label(WIDTH + LEFT + 56 * (m - 1), HEIGHT - 8, f"m = {m}", colour))
    parts.append(_label(WIDTH + LEFT + 230, HEIGHT - 8, "squares: copies"))
    return parts


def _dot(axes: _Axes, point: Point, colour: str, radius: int) -> list[str]:
    x, y = axes.at(point.interval_s, point.waste)
    parts = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"/>']
    if point.error:
        _, low = axes.at(point.interval_s, point.waste - 2 * point.error)
        _, high = axes.at(point.interval_s, point.waste + 2 * point.error)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="{colour}"/>')
    return parts


def _decades(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten between the two."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    marks = [n * 10.0**e for e in range(first, last + 1) for n in (1, 2, 5) if low <= n * 10.0**e <= high]
    return _thin(marks)


def _thin(marks: list[float]) -> list[float]:
    """6 of them at most."""
    return marks[:: max(1, -(-len(marks) // 6))]


def _spread(sizes: Sequence[float]) -> list[float]:
    """Least and most, and two between."""
    low, high = min(sizes), max(sizes)
    return sorted({low * (high / low) ** (i / 3) for i in range(4)}) if high > low else [low]


def _ticks_x(axes: _Axes, marks: Sequence[float], text: Callable[[float], str]) -> list[str]:
    parts = []
    for mark in marks:
        x, _ = axes.at(mark, axes.y[0])
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{BOTTOM}" stroke="{GRID}"/>')
        parts.append(_label(x - 16, BOTTOM + 16, text(mark)))
    return parts


def _ticks_y(axes: _Axes, marks: Sequence[float], form: str) -> list[str]:
    parts = []
    for mark in marks:
        x, y = axes.at(axes.x[0], mark)
        parts.append(f'<line x1="{x:.1f}" x2="{axes.offset + RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>')
        parts.append(_label(axes.offset + 16, y + 4, form.format(mark)))
    return parts


def _label(x: float, y: float, text: str, colour: str = "black", *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="12" fill="{colour}"{weight}>{escape(text)}</text>'
