"""Figures for ``--plot``: SVG by matplotlib, with text kept as text. The same numbers give the same bytes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.extras import require
from holdfast.planner.costs import Costs
from holdfast.planner.curves import IntervalPoint, curves, nines
from holdfast.planner.recommend import Recommendation
from holdfast.smp_daemon.shared.quantities import amount, duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from holdfast.bench.stall import StallReport

Rows = Sequence[dict[str, Any]]

INCH = 100
"""Pixels per inch; matplotlib measures figures in inches."""
OURS, OTHERS, RULE, MEASURED = "#1b7f5c", "#9aa5b1", "#b0702a", "#8a3ffc"
PARITIES = ("#4c78a8", "#1b7f5c", "#b0702a", "#8a3ffc")
"""Colours for m = 1, 2, 3, 4."""
SHARES = (
    ("ettr", "kept steps", "#1b7f5c"),
    ("save", "saving", "#5b8def"),
    ("lost", "lost steps", "#c8553d"),
    ("recovery", "recovery", "#e0a83b"),
    ("waiting", "waiting", "#9aa5b1"),
)
OUR_LINES = ("#0b5d41", "#1b7f5c", "#45a583", "#7cc5ab")
OTHER_LINES = ("#c8553d", "#e0a83b", "#5b8def", "#8b6fc0", "#9aa5b1")
DASHES = ("-", "--", ":", "-.")
LEAST, MOST = 0.05, 50.0
"""The bars of `draw_stall` are clipped to this range."""
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
    figure = _figure(1100, 400)
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


def draw_simulation(rows: Rows, what: str) -> Figure:
    """Draw rows as they are in the JSON of ``holdfast simulate``.

    Above: the effective training time ratio over the number of GPUs, with bars of one standard error. Below: for each
    size and strategy, a bar that divides up all time. At the bottom: `what`, the description of the simulation.
    """
    names = list(dict.fromkeys(row["strategy"] for row in rows))
    sizes = sorted({row["gpus"] for row in rows})
    words = textwrap.wrap(what, 140)
    bars = 22 * (len(rows) + 2 * len(sizes))
    figure = _figure(1000, 340 + bars + 16 * len(words))
    above, below = figure.subplots(2, 1, height_ratios=[300, bars])
    above.set(title="Effective training time ratio over the number of GPUs", xscale="log", ylim=(0, 1.02))
    for name, (colour, dashes) in _styles(names).items():
        points = sorted((row for row in rows if row["strategy"] == name), key=lambda row: int(row["gpus"]))
        means, errors = ([row["ettr"][key] or 0.0 for row in points] for key in ("mean", "error"))
        line = {"color": colour, "linestyle": dashes, "linewidth": 2, "marker": "o", "markersize": 4, "label": name}
        above.errorbar([row["gpus"] for row in points], means, errors, **line)
    above.set_xticks(sizes, [f"{gpus:,}" for gpus in sizes])
    above.minorticks_off()
    above.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    _shares(below, rows, sizes)
    figure.supxlabel("\n".join(words), size=8, x=0.01, ha="left")
    return figure


def _shares(axes: Axes, rows: Rows, sizes: Sequence[int]) -> None:
    """For each row a bar that divides up all time, grouped by size."""
    groups = [(f"{gpus:,} GPUs", [row for row in rows if row["gpus"] == gpus]) for gpus in sizes]
    lines = _lines(axes, groups, "strategy")
    left = [0.0] * len(lines)
    for key, title, colour in SHARES:
        widths = [row[key]["mean"] for _, row in lines]
        axes.barh([at for at, _ in lines], widths, 0.75, left, color=colour, label=title)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for at, row in lines:
        axes.text(1.01, at, f"{row['ettr']['mean']:.2%}", va="center")
    axes.set(title="Where all the time goes", xlim=(0, 1))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.04), ncols=len(SHARES), frameon=False)


def _lines(axes: Axes, groups: Sequence[tuple[str, Rows]], name: str) -> list[tuple[int, dict[str, Any]]]:
    """Label the y axis from the top down: for each group a line with its name in bold, then a line for each row with
    the row's name. Returns the rows with their positions."""
    heads: list[int] = []
    texts: list[str] = []
    lines: list[tuple[int, dict[str, Any]]] = []
    for head, rows in groups:
        heads.append(len(texts))
        texts.append(head)
        for row in rows:
            lines.append((len(texts), row))
            texts.append(row[name])
    axes.set_yticks(range(len(texts)), texts)
    axes.set_ylim(max(1, len(texts)) - 0.5, -0.5)
    for at in heads:
        axes.get_yticklabels()[at].set_fontweight("bold")
    return lines


def _styles(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and dashes of each strategy. Ours have shades of their own; when colours repeat, the dashes differ."""
    found = {}
    for mine, palette in ((True, OUR_LINES), (False, OTHER_LINES)):
        for place, name in enumerate(name for name in names if name.startswith("holdfast") == mine):
            found[name] = palette[place % len(palette)], DASHES[min(place // len(palette), len(DASHES) - 1)]
    return {name: found[name] for name in names}


def draw_stall(report: StallReport) -> Figure:
    """Draw a panel for each interval, with a bar for each system and number of ranks: training time lost to one
    snapshot, relative to one copy of the state. The axis is logarithmic; smaller values are drawn at its left end. The
    caption says when and on what machine the figures were measured."""
    from holdfast.bench.stall import describe_run, every_text

    rows = [row for row in report.rows if row["system"] != "nothing"]
    intervals = sorted({row["every"] for row in rows}) or [1]
    cells = {every: [row for row in rows if row["every"] == every] for every in intervals}
    lines = max(len(of) + len({row["ranks"] for row in of}) for of in cells.values())
    figure = _figure(820 * len(intervals), 150 + 22 * max(8, lines))
    figure.suptitle("Training time lost to one snapshot")
    panels = figure.subplots(1, len(intervals), squeeze=False)[0]
    for axes, (every, of) in zip(panels, cells.items(), strict=True):
        _losses(axes, of, f"a snapshot {every_text(every)}")
    figure.supxlabel(describe_run(report), size=8, x=0.01, ha="left")
    return figure


def _losses(axes: Axes, rows: Rows, title: str) -> None:
    """One panel of `draw_stall`."""
    from holdfast.bench.stall import lost, ranks_text

    rows = sorted(rows, key=lambda row: float(row["lost_ratio"]))
    counts = sorted({row["ranks"] for row in rows})
    groups = [(ranks_text(n), [row for row in rows if row["ranks"] == n]) for n in counts]
    for at, row in _lines(axes, groups, "system"):
        end = min(max(float(row["lost_ratio"]), LEAST * 1.02), MOST)
        colour = OURS if row["system"].startswith("holdfast") else OTHERS
        axes.barh(at, end - LEAST, 0.7, LEAST, color=colour)
        axes.text(end * 1.05, at, lost(row), va="center")
    axes.set(title=title, xscale="log", xlim=(LEAST, MOST * 6))
    axes.set_xticks([0.1, 1.0, 10.0], ["0.1", "1", "10"])
    axes.set_xlabel("lost time / time of one copy of the state, log scale")
    axes.set_ylabel("system, by ranks on the machine")


def _figure(width: int, height: int) -> Figure:
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
