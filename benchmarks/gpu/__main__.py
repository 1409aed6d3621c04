"""``python -m benchmarks.gpu A``: runs the checks of one part in sequence, prints a line for each, writes a report.

``--dry`` runs the same program against an emulated device on a machine without a GPU, so that programming errors waste
no GPU time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import beside, fast, right
from benchmarks.gpu.machine import Machine, run_check

Check = Callable[[Machine], dict[str, Any]]

PARTS: Mapping[str, Mapping[str, Check]] = {"A": right.CHECKS, "B": fast.CHECKS, "C": beside.CHECKS}
DEADLINE_S = 110.0
"""Timeout for one check; a whole part should take less than ten minutes."""


def main() -> int:
    """Return exit status 0 only if every check passes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("part", choices=PARTS, nargs="?")
    parser.add_argument("--dry", action="store_true", help="without a device")
    parser.add_argument("--only", nargs="*", help="these checks")
    parser.add_argument("--check", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="where the report goes")
    asked = parser.parse_args()
    if not asked.dry and not torch.cuda.is_available():
        print(
            "torch sees no GPU here (torch.cuda.is_available() is false); make gpu-dry runs without one",
            file=sys.stderr,
        )
        return 2
    machine = Machine(asked.dry)
    if asked.check:
        every = {name: check for checks in PARTS.values() for name, check in checks.items()}
        print(json.dumps(every[asked.check](machine)))
        return 0
    results = {}
    for name in PARTS[asked.part or "A"]:
        if asked.only and name not in asked.only:
            continue
        began = time.monotonic()
        found = run_check(name, machine, DEADLINE_S)
        results[name] = {**found, "seconds": round(time.monotonic() - began, 1)}
        _say(name, results[name])
    if asked.part == "C" and not asked.only:
        results["C"] = {**beside.compare(machine, results), "seconds": 0.0}
        _say("C", results["C"])
    asked.out.mkdir(parents=True, exist_ok=True)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    report = asked.out / f"gpu-{asked.part or 'A'}-{'dry-' * asked.dry}{today}"
    report.with_suffix(".json").write_text(json.dumps({"date": today, **machine.facts(), "checks": results}, indent=1))
    report.with_suffix(".md").write_text(_table(today, machine, results))
    return 0 if all(result["passes"] for result in results.values()) else 1


def _say(name: str, result: dict[str, Any]) -> None:
    print(f"{'✓' if result['passes'] else '✗'} {name:4} {result['seconds']:5.1f} s  {_words(result)}", flush=True)


def _words(result: dict[str, Any]) -> str:
    said = {name: value for name, value in result.items() if name not in ("passes", "seconds")}
    return ", ".join(f"{name} ({_words(v)})" if isinstance(v, dict) else f"{name} {v}" for name, v in said.items())


def _table(today: str, machine: Machine, results: dict[str, dict[str, Any]]) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in machine.facts().items())
    rows = [
        f"| {name} | {'✓' if r['passes'] else '✗'} | {_words(r)} | {r['seconds']} s |" for name, r in results.items()
    ]
    return "\n".join([f"{today}: {facts}", "", "| check | | figures | took |", "|---|---|---|---|", *rows, ""])


if __name__ == "__main__":
    sys.exit(main())
