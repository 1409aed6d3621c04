"""Reports of ``holdfast chaos``: Markdown, and a self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from holdfast.bench.machine import describe, machine
from holdfast.chaos.recovery import phases
from tests.proof.chaos.verdict import ScenarioVerdict

WIDTH, HEIGHT = 420, 70
BAR = 260
COLOURS = {
    "detect": "#000000",
    "restart": "#0072b2",
    "plan": "#56b4e9",
    "fetch": "#e69f00",
    "load": "#009e73",
    "first step": "#cc79a7",
}
"""The palette of Okabe and Ito, whose colours colour-blind people can tell apart."""

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: .4rem .6rem; }
tr { border-top: 1px solid #8884; } .bad { color: #d55e00; font-weight: bold; } .good { color: #009e73; }
small { opacity: .75; } svg { display: block; } code { font-size: .9em; }
"""


def page(verdicts: Sequence[ScenarioVerdict], figures: Mapping[str, Any]) -> str:
    """The HTML page."""
    rows = "\n".join(_row(verdict) for verdict in verdicts)
    counts = ", ".join(f"{escape(name)} <b>{escape(value)}</b>" for name, value in told(figures))
    legend = " ".join(
        f'<span style="color:{colour}">■</span> {name.replace("_", " ")}' for name, colour in COLOURS.items()
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>holdfast chaos</title><style>{STYLE}</style></head><body>
<h1>What was broken, and what came of it</h1>
<p>{escape(_when())}</p><p>{counts}</p>
<p><small>Curves: the loss of rank 0; a red line is a fault, and where a curve goes back, steps were done again.
Bars: seconds of each recovery: {legend}.</small></p>
<table><tr><th>scenario</th><th>faults</th><th>loss</th><th>recoveries</th><th>verdict</th></tr>
{rows}
</table></body></html>
"""


def markdown(verdicts: Sequence[ScenarioVerdict], figures: Mapping[str, Any]) -> str:
    """The figures, and a table of the verdicts, as Markdown."""
    lines = ["# What was broken, and what came of it", "", _when(), ""]
    lines += [f"* {name}: {value}" for name, value in told(figures)]
    lines += ["", "| scenario | faults | restarts | steps again | seconds | verdict |", "|---|---|---:|---:|---:|---|"]
    for verdict in verdicts:
        kinds = ", ".join(f"{f.kind} {'+'.join(map(str, f.targets))}".strip() for f in verdict.scenario.faults)
        again = sum(verdict.steps_again)
        cells = (verdict.scenario.name, kinds, verdict.restarts, again, f"{verdict.seconds:.1f}", result(verdict))
        lines.append("| " + " | ".join(str(cell).replace("|", "/").replace("\n", " ") for cell in cells) + " |")
    return "\n".join([*lines, ""])


def told(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and value of each figure, in words. Last come the checks, with how often each looked at something."""
    checks = ", ".join(f"{check} {count}" for check, count in figures["checks"].items())
    plain = {name: str(value) for name, value in figures.items() if name not in ("replay", "checks")}
    return [(name.replace("_", " "), value) for name, value in (plain | {"checks": checks}).items()]


def result(verdict: ScenarioVerdict) -> str:
    """The outcome in a few words."""
    if verdict.skipped:
        return f"skipped: {verdict.skipped}"
    if verdict.problems:
        return "; ".join(verdict.problems)[:300]
    return "failed loudly, as it must" if verdict.scenario.beyond_parity else "identical"


def _when() -> str:
    return f"{datetime.now(UTC).isoformat(timespec='seconds')}, {describe(machine())}"


def _row(verdict: ScenarioVerdict) -> str:
    scenario = verdict.scenario
    faults = "<br>".join(
        escape(f"{f.kind} {'+'.join(map(str, f.targets))} at {f.point}" + (f" of step {f.step}" if f.step else ""))
        for f in scenario.faults
    )
    mark = "good" if verdict.held else "bad"
    peer = f"<br><small>{escape(scenario.peer)}</small>" if scenario.peer else ""
    replay = f"<br><code>{escape(verdict.replay)}</code>" if verdict.replay else ""
    return (
        f"<tr><td><b>{escape(scenario.name)}</b><br>{escape(scenario.what)}{peer}</td><td><small>{faults}</small></td>"
        f"<td>{_curve(verdict)}</td><td>{_bars(verdict)}</td>"
        f'<td class="{mark}">{escape(result(verdict))}{replay}</td></tr>'
    )


def _curve(verdict: ScenarioVerdict) -> str:
    """SVG of the losses of rank 0 over time, with a line for each start of the job and a mark for each fault."""
    steps = verdict.history.of("step", rank=0)
    if not steps:
        return ""
    faults = verdict.history.of("fault")
    times = [event["at"] for event in [*steps, *faults]]
    losses = [float.fromhex(event["loss"]) for event in steps if event["loss"] != "none"]
    low, high = min(losses), max(losses)
    begin, end = float(min(times)), float(max(times))

    def x(at: float) -> float:
        return WIDTH * (at - begin) / ((end - begin) or 1.0)

    def y(loss: float) -> float:
        return 4 + (HEIGHT - 8) * (high - loss) / ((high - low) or 1.0)

    lines = []
    for generation in sorted({event["generation"] for event in steps}):
        points = [(x(e["at"]), y(float.fromhex(e["loss"]))) for e in steps if e["generation"] == generation]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        lines.append(f'<polyline points="{path}" fill="none" stroke="#0072b2" stroke-width="1.5"/>')
        lines += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="1.8" fill="#0072b2"/>' for px, py in points]
    for event in faults:
        at = x(event["at"])
        what = escape(f"{event['fault']} {'+'.join(map(str, event['targets']))}")
        lines.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{HEIGHT}" stroke="#d55e00"><title>{what}</title></line>'
        )
    return f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="loss over time">{"".join(lines)}</svg>'


def _bars(verdict: ScenarioVerdict) -> str:
    """SVG with one bar for each recovery."""
    found = [phases(verdict.history, n, restart) for n, restart in enumerate(verdict.history.restarts, 1)]
    longest = max((sum(each.values()) for each in found), default=0.0)
    bars = []
    for each in found:
        if not each:
            bars.append("<small>killed again</small>")
            continue
        left, parts = 0.0, []
        for name, seconds in each.items():
            width = BAR * seconds / longest
            parts.append(
                f'<rect x="{left:.1f}" width="{width:.1f}" height="10" fill="{COLOURS[name.replace("_", " ")]}"/>'
            )
            left += width
        total = f"{sum(each.values()):.2f} s"
        bars.append(f'<svg width="{BAR}" height="12" role="img" aria-label="{total}">{"".join(parts)}</svg>')
        bars.append(f"<small>{total}</small>")
    return "".join(bars)
