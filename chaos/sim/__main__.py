"""``python -m holdfast.chaos.sim``: run many seeds, or one of them with its trace.

Exit status 0 only if no seed broke the promise. Speed is per second of one processor's time, and per second. Seeds are
run in batches; with ``--jobs``, each in one of so many processes; what comes out is the same.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from holdfast.chaos.sim.campaign import SeedTotals, run
from holdfast.chaos.sim.plan import POINTS_HERE
from holdfast.chaos.sim.run import simulate
from holdfast.chaos.sim.seams import installed

SAY_EVERY_S = 10.0


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, report."""
    parser = _parser()
    options = parser.parse_args(arguments)
    for name in ("seeds", "jobs"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: give 1 or more")
    if options.seed is not None:
        return _one(options.seed, options.trace)
    total, began = SeedTotals(), time.perf_counter()
    said = began
    for part in run(range(options.first, options.first + options.seeds), options.jobs):
        total.join(part)
        for seed, text in part.failures.items():
            print(f"seed {seed}: {text.splitlines()[0]}\n  {replay(seed)}", flush=True)
        now = time.perf_counter()
        if now - said > SAY_EVERY_S:
            said = now
            print(f"{total.seeds} seeds, {total.seeds / (now - began):.1f} a second", flush=True)
        if options.seconds and now - began > options.seconds:
            break
    result = summary(total, options.first, time.perf_counter() - began)
    print("\n".join(lines(result)))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if total.failures else 0


def replay(seed: int) -> str:
    """The command that shows what a seed did."""
    return f"python -m holdfast.chaos.sim --seed {seed} --trace"


def summary(total: SeedTotals, first: int, wall_s: float) -> dict[str, Any]:
    """All numbers, for machines."""
    return {
        "first": first,
        "seeds": total.seeds,
        "failures": {str(seed): text.splitlines()[0] for seed, text in total.failures.items()},
        "wall_s": round(wall_s, 1),
        "cpu_s": round(total.cpu_s, 1),
        "seeds_per_s": round(total.seeds / wall_s, 2),
        "seeds_per_cpu_s": round(total.seeds / total.cpu_s, 2),
        "awaits": total.awaits,
        "turns": total.turns,
        "simulated_s": round(total.simulated_s),
        "faults": dict(sorted(total.faults.items())),
        "points": {
            p: {"hits": total.hits[p], "crashes": total.crashes[p]} for p in sorted({*POINTS_HERE, *total.hits})
        },
        "checks": dict(sorted(total.checks.items())),
    }


def lines(result: dict[str, Any]) -> Iterable[str]:
    """The same, for readers."""
    yield f"{result['seeds']} seeds from {result['first']}: {len(result['failures'])} broke the promise"
    yield (
        f"{result['seeds_per_s']} seeds/s, {result['seeds_per_cpu_s']} per second of processor time; "
        f"{result['awaits']:,} awaits, {result['turns']:,} turns, {result['simulated_s']:,} s simulated"
    )
    yield "faults: " + ", ".join(f"{kind} {count:,}" for kind, count in result["faults"].items())
    yield "checks: " + ", ".join(f"{kind} {count:,}" for kind, count in result["checks"].items())
    yield f"{'point':24} {'hits':>10} {'crashes':>8}"
    for point, counts in result["points"].items():
        yield f"{point:24} {counts['hits']:>10,} {counts['crashes']:>8,}"
    never = [point for point, counts in result["points"].items() if not counts["hits"]]
    yield "every point was reached" if not never else f"never reached: {', '.join(never)}"
    for seed, text in result["failures"].items():
        yield f"seed {seed}: {text}"
        yield f"  {replay(int(seed))}"


def _one(seed: int, trace: bool) -> int:
    with installed():
        report = simulate(seed, print if trace else None)
    print(f"seed {seed}: {report.awaits} awaits, {report.turns} turns, {report.simulated_s:.1f} s simulated")
    for violation in report.violations:
        print(f"violation: {violation}")
    return 1 if report.violations else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m holdfast.chaos.sim", description="Simulate jobs under faults, from seeds."
    )
    parser.add_argument("--seeds", type=int, default=200, help="how many (default 200)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default 0)")
    parser.add_argument("--jobs", type=int, default=1, help="in so many processes at the same time (default 1)")
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="stop after so long, after the batches at hand; 0: never"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all counts there")
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--trace", action="store_true", help="with --seed: print what happens, and when")
    return parser


if __name__ == "__main__":
    sys.exit(main())
