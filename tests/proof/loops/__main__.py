"""``python -m tests.proof.loops``: draw training loops from seeds, run each undisturbed and killed, and compare.

Exits with 0 only if each loop was identical, or was refused or warned about in a text that names the cause.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tests.proof.loops.campaign import Total, run
from tests.proof.loops.judge import Result, TrialOutcome

SAY_EVERY_S = 10.0


def main(arguments: list[str] | None = None) -> int:
    """Run the command, print and write the results, and return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    for name in ("seeds", "jobs"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: give 1 or more")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` blocks end what was started
    total, began = Total(), time.perf_counter()
    said = began
    for result in run(range(options.first, options.first + options.seeds), options.jobs):
        total.results.append(result)
        if options.show:
            print(shown(result), flush=True)
        elif result.failed:
            print(f"seed {result.seed}: {result.outcome.value}: {result.why}\n  {replay(result.seed)}", flush=True)
        now = time.perf_counter()
        if now - said > SAY_EVERY_S:
            said = now
            print(f"{len(total.results)} seeds, {len(total.results) / (now - began):.1f} a second", flush=True)
    summary = summarised(total, options.first, time.perf_counter() - began)
    print(line(summary))
    if options.json:
        options.json.write_text(json.dumps(summary, indent=2) + "\n")
    if options.markdown:
        options.markdown.write_text("\n".join(markdown(total, summary)) + "\n")
    return 1 if total.failed else 0


def replay(seed: int) -> str:
    """The command that runs a seed again and shows it."""
    return f"python -m tests.proof.loops --seeds 1 --first {seed} --show"


def summarised(total: Total, first: int, wall_s: float) -> dict[str, Any]:
    """All results, as JSON data."""
    return {
        "first": first,
        **{outcome.value: total.count(outcome) for outcome in TrialOutcome},
        "wall_s": round(wall_s, 1),
        "machine": machine(),
        "seeds": [result.to_json() for result in total.results],
    }


def machine() -> str:
    """A description of this machine and its versions."""
    found = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    name = found[1] if found else platform.machine()
    return (
        f"{name}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}, torch {torch.__version__}"
    )


def line(summary: dict[str, Any]) -> str:
    """The counts, as one line of text."""
    counts = ", ".join(f"{summary[outcome.value]} {outcome.value}" for outcome in TrialOutcome)
    return f"{len(summary['seeds'])} seeds from {summary['first']}: {counts}; {summary['wall_s']} s"


def shown(result: Result) -> str:
    """One seed's program, messages and outcome, as text."""
    said = "\n".join(f"# said: {text}" for text in result.said) or "# said: nothing"
    log = "\n".join(f"# {text}" for text in result.log.splitlines()) if result.failed else ""
    return f"{result.history}{said}\n{log}\n# restored: {result.restored}\n# {result.outcome.value}: {result.why}\n"


def markdown(total: Total, summary: dict[str, Any]) -> Iterable[str]:
    """The lines of a report in Markdown."""
    yield "# Training loops drawn from seeds, undisturbed and killed"
    yield ""
    yield f"{line(summary)}; {summary['machine']}."
    yield ""
    yield (
        "`make loops` makes this report. A loop is *identical* if every loss, and all state at its end, equals that of "
        "the same loop without holdfast to the last bit; *refused* if holdfast refused or warned and named the cause; "
        "otherwise *silent*. *unprotected*: it never went back to a snapshot. Each seed draws a model, an optimizer, "
        "data, and at most three further features; a loop is counted once for each of its features."
    )
    yield ""
    yield f"| feature | {' | '.join(outcome.value for outcome in TrialOutcome)} |"
    yield f"|---|{'---:|' * len(TrialOutcome)}"
    for feature, counts in total.by_feature().items():
        yield f"| {feature} | {' | '.join(str(counts[outcome] or '') for outcome in TrialOutcome)} |"
    if total.failed:
        yield ""
        yield "## Failures"
        yield ""
    for result in total.failed:
        yield f"* seed {result.seed}, {result.outcome.value}: {result.why} (`{replay(result.seed)}`)"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.proof.loops",
        description="Draw training loops from seeds, run each undisturbed and killed, and compare.",
    )
    parser.add_argument("--seeds", type=int, default=200, help="number of seeds (default 200)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--jobs", type=int, default=1, help="number of worker processes (default 1)")
    parser.add_argument(
        "--show", action="store_true", help="print each loop, holdfast's messages about it and the outcome"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write a report there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
