"""Figures for ``--plot``: SVG by matplotlib, with text kept as text. The same numbers give the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.extras import require
from holdfast.planner.costs import Costs
from holdfast.planner.curves import IntervalPoint, curves, nines
from holdfast.planner.recommend import Recommendation
from holdfast.smp_daemon.shared.quantities import amount, duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


INCH = 100
"""Pixels per inch; matplotlib measures figures in inches."""
OURS, OTHERS, RULE, MEASURED = "#1b7f5c", "#9aa5b1", "#b0702a", "#8a3ffc"
PARITIES = ("#4c78a8", "#1b7f5c", "#b0702a", "#8a3ffc")
"""Colours for m = 1, 2, 3, 4."""
TIMES = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 180, 600, 1800, 3600, 10800, 36000, 86400, 259200, 864000, 2592000)


def check_plots(target: Path | None) -> None:
    """Refuse ``--plot`` if it cannot work, before the hours of work whose result it would draw.

    Raises:
        ConfigError: a file is named and matplotlib is not installed.
    """
    if target is not None:
        require("plots", f"--plot {target}", "leave --plot out")


def write(figure: Figure, target: Path) -> None:
    """Write a figure as SVG, whatever the file is called."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "holdfast"}):
        figure.savefig(target, format="svg", metadata={"Date": None})


def draw_tune(found: Recommendation, costs: Costs) -> Figure:
    """Draw two panels. Left: the first-order curve, Monte Carlo with two standard errors, Young's and Daly's intervals,
    the chosen point and the measured one. Right: for each code, nines of survival for 30 days over its memory."""
    figure = figure_of(1100, 400)
    left, right = figure.subplots(1, 2)
    _waste(left, found, costs)
    _survival(right, found)
    return figure


def _waste(axes: Axes, found: Recommendation, costs: Costs) -> None:
    from matplotlib.ticker import LogLocator

    data = curves(found, costs)
    axes.set(title="Time lost (share) against the interval between snapshots", xscale="log", yscale="log")
    axes.plot([p.interval_s for p in data.predicted], [p.waste for p in data.predicted], color=OTHERS, linewidth=2)
    for point in data.played:
        _dot(axes, point, OTHERS, 3)
    for place, (name, point) in enumerate(data.rules):
        axes.axvline(point.interval_s, color=RULE, linestyle=":", linewidth=1)
        text = f" {name} {duration(point.interval_s)}"
        axes.text(point.interval_s, 0.95 - 0.06 * place, text, color=RULE, transform=axes.get_xaxis_transform())
    if data.measured:
        _dot(axes, data.measured, MEASURED, 4)
        _note(axes, data.measured.interval_s, data.measured.waste, "measured", MEASURED, (7, 5))
    _dot(axes, data.chosen, OURS, 5)
    chosen = f"chosen {duration(data.chosen.interval_s)}"
    _note(axes, data.chosen.interval_s, data.chosen.waste, chosen, OURS, (-20, 10), weight="bold")
    axes.set_xlabel(f"line: first order; dots: Monte Carlo, two standard errors, seed {found.seed}")
    low, high = axes.get_xlim()
    marks = [mark for mark in TIMES if low <= mark <= high]
    marks = marks[:: max(1, -(-len(marks) // 6))]
    axes.set_xticks(marks, [duration(mark) for mark in marks])
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:.2g}")
    axes.minorticks_off()
    axes.margins(y=0.1)


def _survival(axes: Axes, found: Recommendation) -> None:
    axes.set(title="Nines of survival for 30 days against memory of a node", xscale="log")
    for code, size in found.others:
        copies = code.parity > 0 and code.data == 1
        colour = PARITIES[min(code.parity, len(PARITIES)) - 1] if code.parity else OTHERS
        axes.plot(size, nines(code.risk), "s" if copies else "o", color=colour, markersize=7 if copies else 5)
        if copies:
            _note(axes, size, nines(code.risk), f"copies:{code.parity}", colour, (-12, 7))
    size = next(size for code, size in found.others if code == found.code)
    axes.plot(size, nines(found.code.risk), "o", color=OURS, markersize=13, fillstyle="none", markeredgewidth=2)
    _note(axes, size, nines(found.code.risk), str(found.code), OURS, (-10, -20), weight="bold")
    sizes = [size for _, size in found.others]
    low, high = min(sizes), max(sizes)
    marks = sorted({low * (high / low) ** (i / 3) for i in range(4)})
    axes.set(xlim=(low * 0.9, high * 1.2), ylim=(0.0, max(1.0, axes.get_ylim()[1] * 1.05)))
    axes.set_xticks(marks, [amount(mark) for mark in marks])
    axes.minorticks_off()
    for place, colour in enumerate(PARITIES):
        axes.text(0.12 * place, -0.15, f"m = {place + 1}", color=colour, transform=axes.transAxes)
    axes.text(0.5, -0.15, "squares: copies", transform=axes.transAxes)


def figure_of(width: int, height: int) -> Figure:
    """An empty figure, its size in pixels. It belongs to no window and no global state of matplotlib, so it is freed
    with its last reference."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width / INCH, height / INCH), layout="constrained")


def _dot(axes: Axes, point: IntervalPoint, colour: str, radius: float) -> None:
    """A point with two standard errors."""
    error = [[2 * point.error], [2 * point.error]] if point.error else None
    axes.errorbar(point.interval_s, point.waste, error, fmt="o", color=colour, markersize=2 * radius)


def _note(
    axes: Axes, x: float, y: float, text: str, colour: str, offset: tuple[int, int], *, weight: str = "normal"
) -> None:
    """Text beside a point, `offset` points away from it."""
    axes.annotate(text, (x, y), xytext=offset, textcoords="offset points", color=colour, weight=weight)
