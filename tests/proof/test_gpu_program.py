"""``python -m benchmarks.gpu`` runs without a device, on an emulated one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import beside
from benchmarks.gpu.machine import Machine
from tests.deadlines import DEADLINE_S

ROOT = Path(__file__).parents[2]


@pytest.mark.cluster
def test_a_dry_run_prints_a_line_for_each_check_and_writes_a_report(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "A", "--dry", "--only", "A0", "A6", "A7", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=4 * DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [["✓", name] for name in ("A0", "A6", "A7")]
    [report] = tmp_path.glob("gpu-A-dry-*.json")
    written = json.loads(report.read_text())
    assert written["device"].startswith("none")
    assert written["checks"].keys() == {"A0", "A6", "A7"}
    assert report.with_suffix(".md").read_text().count("| ✓ |") == 3


ROW = {"stall_p50_ms": 1.0, "lost_ratio": 0.2}


@pytest.mark.parametrize(
    ("others", "passes"),
    [
        ([{"stall_p50_ms": 10.0, "lost_ratio": 0.8}], True),
        ([{"stall_p50_ms": 9.0, "lost_ratio": 0.8}], False),
        ([{"stall_p50_ms": 10.0, "lost_ratio": 0.7}], False),
        ([{"stall_p50_ms": 99.0, "lost_ratio": 0.7}, {"stall_p50_ms": 10.0, "lost_ratio": 9.0}], False),
        ([{"stall_p50_ms": 10.0, "lost_ratio": 0.8}, {"stall_p50_ms": 99.0, "lost_ratio": 9.0}], True),
    ],
)
def test_a_snapshot_is_held_against_the_best_of_the_others_in_each_way(others: list[Any], passes: bool) -> None:
    results = {"C3": {"every 1": ROW}, **{f"C{4 + i}": {"every 1": other} for i, other in enumerate(others)}}
    assert beside.compare(Machine(dry=False), results)["passes"] is passes


def test_a_comparison_without_others_does_not_pass() -> None:
    results: dict[str, Any] = {"C3": {"every 1": ROW}, "C6": {"skipped": "not installed", "passes": True}}
    assert not beside.compare(Machine(dry=False), results)["passes"]
