"""``python -m benchmarks.gpu A``: runs the checks of one part in sequence, prints a line for each, writes a report.

A part takes less than ten minutes: what it has no time for is left out, and said. The report, one Markdown file, is
written after each check, and holds the results of all parts that ran here. ``--dry`` runs the same program against an
emulated device on a machine without a GPU, so that programming errors waste no GPU time; that machine may be busy with
other things.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import beside, fast, right
from benchmarks.gpu.machine import Machine, run_check
from benchmarks.gpu.written import Written

Check = Callable[[Machine], dict[str, Any]]

PARTS: Mapping[str, Mapping[str, Check]] = {
    "A": right.CHECKS,
    "A-jobs": right.JOBS,
    "B": fast.CHECKS,
    "B-steps": fast.STEPS,
    "C": beside.CHECKS,
}
DEADLINE_S = 110.0
"""Timeout for one check."""

PART_S = 570.0
"""How long a part may take: machines are lent for commands of ten minutes."""


def main() -> int:
    """Return exit status 0 only if every check passes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("part", choices=PARTS, nargs="?", default="A")
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
        every = {name: check for checks in (*PARTS.values(), fast.PARTS_OF_CHECKS) for name, check in checks.items()}
        print(json.dumps(every[asked.check](machine)))
        return 0
    written = Written(asked.out / f"gpu-{'dry-' * asked.dry}report.md", machine.facts())
    results = {}
    ends_s = time.monotonic() + machine.limit_s(PART_S)
    for name in PARTS[asked.part]:
        if asked.only and name not in asked.only:
            continue
        began_s = time.monotonic()
        if ends_s <= began_s:
            found: dict[str, Any] = {"passes": False, "failure": f"no time left: run it with --only {name}"}
        else:
            found = run_check(name, machine, min(DEADLINE_S, ends_s - began_s))
        results[name] = {**found, "seconds": round(time.monotonic() - began_s, 1)}
        written.add(name, results[name])
    if asked.part == "C" and not asked.only:
        results["C"] = {**beside.compare(machine, results), "seconds": 0.0}
        written.add("C", results["C"])
    print(f"the report: {written.path}", flush=True)
    return 0 if all(result["passes"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
