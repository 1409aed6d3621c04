"""``python -m tests.proof.sim``: run many seeds, or one seed with its trace.

The exit status is 0 only if no seed broke the promise and, with ``--again``, no seed behaved differently. Speed is
given per second, and per second of processor time. Seeds are run in batches. With ``--jobs N``, N batches run at a
time, each in a process of its own; the results are the same. For the first seeds that break the promise, the shortest
history that still does is searched for, printed, and written to a file for ``--replay``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from holdfast.smp_daemon.shared.errors import ProtocolError
from tests.proof.sim.campaign import SeedTotals, again, run
from tests.proof.sim.checks import CHECKS
from tests.proof.sim.plan import POINTS_HERE, draw
from tests.proof.sim.run import simulate
from tests.proof.sim.seams import installed
from tests.proof.sim.shrink import read_case, shrink, tell
from tests.proof.sim.sized import draw_sized

SAY_EVERY_S = 10.0
CASES = Path("build") / "sim"
SHRUNK = 3
"""Number of failing seeds whose history is shortened; each takes seconds."""


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, report."""
    parser = _parser()
    options = parser.parse_args(arguments)
    for name in ("seeds", "jobs"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: give 1 or more")
    if options.replay is not None:
        return _replay(options.replay, options.trace)
    if options.seed is not None:
        return _one(options.seed, options.trace, options.cases, options.sized)
    total, began = SeedTotals(), time.perf_counter()
    said = began
    for part in run(range(options.first, options.first + options.seeds), options.jobs, options.sized):
        total.join(part)
        for seed, violated in part.failures.items():
            print(f"seed {seed}: {violated}\n  {replay(seed, options.sized)}", flush=True)
        now = time.perf_counter()
        if now - said > SAY_EVERY_S:
            said = now
            print(f"{total.seeds} seeds, {total.seeds / (now - began):.1f} a second", flush=True)
            _write(options.json, summary(total, options.first, now - began, options.sized))
        if options.seconds and now - began > options.seconds:
            break
    result = summary(total, options.first, time.perf_counter() - began, options.sized)
    if options.again:
        result["again"] = options.again
        result["differ"] = again(range(options.first, options.first + options.again), options.sized)
    print("\n".join(lines(result)))
    _write(options.json, result)
    with installed():
        for seed in list(total.failures)[:SHRUNK]:
            _shorten(seed, options.cases, options.sized)
    return 1 if total.failures or result.get("differ") else 0


def replay(seed: int, sized: bool = False) -> str:
    """The command that shows what a seed did."""
    return f"python -m tests.proof.sim {'--sized ' * sized}--seed {seed} --trace"


def _shorten(seed: int, folder: Path, sized: bool) -> None:
    case = shrink((draw_sized if sized else draw)(seed))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"seed-{seed}.json"
    case.write(path)
    print(f"\nseed {seed}, shortened:")
    print("\n".join(tell(case)))
    print(f"replay it with: python -m tests.proof.sim --replay {path}", flush=True)


def _write(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n")


def summary(total: SeedTotals, first: int, wall_s: float, sized: bool = False) -> dict[str, Any]:
    """All results as plain data, for the file of ``--json``."""
    return {
        "first": first,
        "sized": sized,
        "seeds": total.seeds,
        "failures": {str(seed): str(violated) for seed, violated in total.failures.items()},
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
        "checks": {check: total.checks[check] for check in CHECKS},
        "states": dict(sorted(total.states.items())),
    }


def lines(result: dict[str, Any]) -> Iterable[str]:
    """The results of `summary` as lines of text."""
    yield f"{result['seeds']} seeds from {result['first']}: {len(result['failures'])} broke the promise"
    yield (
        f"{result['seeds_per_s']} seeds/s, {result['seeds_per_cpu_s']} per second of processor time; "
        f"{result['awaits']:,} awaits, {result['turns']:,} turns, {result['simulated_s']:,} s simulated"
    )
    yield "faults: " + ", ".join(f"{kind} {count:,}" for kind, count in result["faults"].items())
    yield "checks, and how often each looked at something:"
    for check, count in result["checks"].items():
        yield f"{check:12} {count:>12,}  {CHECKS[check]}"
    yield "seeds with real modules: " + ", ".join(f"{kind} {count:,}" for kind, count in result["states"].items())
    yield f"{'point':24} {'hits':>10} {'crashes':>8}"
    for point, counts in result["points"].items():
        yield f"{point:24} {counts['hits']:>10,} {counts['crashes']:>8,}"
    never = [point for point, counts in result["points"].items() if not counts["hits"]]
    yield "every point was reached" if not never else f"never reached: {', '.join(never)}"
    if "again" in result:
        differ = ", ".join(map(str, result["differ"])) or "none"
        yield f"of {result['again']} seeds run again in another interpreter, these differ: {differ}"
    for seed, text in result["failures"].items():
        yield f"seed {seed}: {text}"
        yield f"  {replay(int(seed), result['sized'])}"


def _one(seed: int, trace: bool, cases: Path, sized: bool) -> int:
    with installed():
        report = simulate(seed, print if trace else None, sized=sized)
        print(f"seed {seed}: {report.awaits} awaits, {report.turns} turns, {report.simulated_s:.1f} s simulated")
        for check, message in report.violations:
            print(f"violation of {check!r}: {message}")
        if report.violations and not trace:
            _shorten(seed, cases, sized)
    return 1 if report.violations else 0


def _replay(path: Path, trace: bool) -> int:
    """Return the exit status: 1 if the case still breaks the promise, 2 if it cannot be read."""
    try:
        case = read_case(path)
    except (OSError, ProtocolError) as error:
        print(f"cannot read {path}: {error}", file=sys.stderr)
        return 2
    with installed():
        broken = case.play(print if trace else None).violations
        print("\n".join(tell(case)))
    if not broken:
        print("this history no longer breaks the promise")
    return 1 if broken else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.proof.sim", description="Simulate jobs under faults, from seeds."
    )
    parser.add_argument("--seeds", type=int, default=200, help="number of seeds (default 200)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes (default 1)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.0,
        help="stop after this many seconds, once the running batches are done; 0: never",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all counts to this file, also during the run")
    parser.add_argument(
        "--again", type=int, default=0, metavar="N", help="run the first N again in another interpreter, and compare"
    )
    parser.add_argument(
        "--sized", action="store_true", help="nodes of real size: work on bytes and starts of processes take time"
    )
    parser.add_argument("--seed", type=int, help="run only this seed")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run the case in this file")
    parser.add_argument("--trace", action="store_true", help="with --seed or --replay: print what happens, and when")
    parser.add_argument(
        "--cases",
        type=Path,
        default=CASES,
        metavar="FOLDER",
        help=f"folder for the shortened histories of failing seeds (default {CASES})",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
