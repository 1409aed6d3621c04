"""What README and docs say of `benchmarks.stall`, from the newest results: ``docs/generate.py`` writes it."""

from __future__ import annotations

import re
from collections.abc import Callable

from benchmarks.hot import RESULTS
from benchmarks.stall import StallReport, describe_run, summary

MARKED = re.compile(r"(<!--stall ([a-z-]+)-->).*?(<!--/stall-->)", re.S)
"""A part of a page between two comments, which name what is written there."""


QUOTED = ("holdfast", "nothing")
"""The systems whose figures stand in sentences."""


def filled(text: str, folder: str) -> str:
    """A page with its marked parts as they should be now. `folder`: where results are, from the page."""
    return MARKED.sub(lambda found: found[1] + PARTS[found[2]](folder) + found[3], text)


def _newest(least_ranks: int) -> tuple[str, StallReport]:
    """The newest result, and its name, that has holdfast in every step, with some number of ranks from this one on, and
    for that a machine that was not too busy. What is noisy beside that, the table shows with its noise."""
    found = {path.stem: StallReport.read(path) for path in RESULTS.glob("stall-*.json")}
    fits = {name: report for name, report in found.items() if _losses(report, least_ranks) and not report.busy(QUOTED)}
    return max(fits.items(), key=lambda named: named[1].date)


def _losses(report: StallReport, least_ranks: int = 1) -> list[float]:
    """What a snapshot in every step costs with holdfast, in copies, by the number of ranks."""
    found = [row for row in report.rows if row["system"] == "holdfast" and row["every"] == 1]
    return [row["lost_ratio"] for row in sorted(found, key=lambda row: row["ranks"]) if row["ranks"] >= least_ranks]


LEAST = 0.05
"""A loss below so many copies is not told from none."""


def _alone(folder: str) -> str:
    loss = _losses(_newest(1)[1])[0]
    return f"less than {LEAST}" if loss < LEAST else f"{loss:.2f}"


def _alone_source(folder: str) -> str:
    return _link(folder, *_newest(1))


def _together(folder: str) -> str:
    losses = _losses(_newest(2)[1], 2)
    return " to ".join(dict.fromkeys(f"{loss:.1f}" for loss in (min(losses), max(losses))))


def _together_source(folder: str) -> str:
    return _link(folder, *_newest(2))


def _table(folder: str) -> str:
    name, report = _newest(2)
    table = summary(report.rows)
    lines = [
        f"{_link(folder, name, report)}, {describe_run(report).partition(': ')[2]}:",
        "",
        table.markdown().split("\n\n", 1)[1].strip(),
    ]
    if (RESULTS / f"{name}.svg").exists():
        lines += ["", f"![time lost to one snapshot]({folder}/{name}.svg)"]
    return "\n".join(["", *lines, ""])


def _stalls(folder: str) -> str:
    _, report = _newest(2)
    every = [row for row in report.rows if row["every"] == 1 and row["system"] != "nothing"]
    told = []
    for system in dict.fromkeys(row["system"] for row in every):
        stalls = [f"{row['stall_p50_ms']:.{row['stall_p50_ms'] < 10:d}f}" for row in every if row["system"] == system]
        told.append(f"{system} {', '.join(stalls)} ms")
    ranks = sorted({row["ranks"] for row in every})
    return (
        f"A snapshot every step stalls the loop (median), with {', '.join(map(str, ranks))} ranks: {'; '.join(told)}."
    )


def _link(folder: str, name: str, report: StallReport) -> str:
    return f"[{report.date[:10]}]({folder}/{name}.md)"


PARTS: dict[str, Callable[[str], str]] = {
    "alone": _alone,
    "alone-source": _alone_source,
    "together": _together,
    "together-source": _together_source,
    "table": _table,
    "stalls": _stalls,
}
