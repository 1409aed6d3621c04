"""``python -m benchmarks.gpu`` runs without a device, on an emulated one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.gpu import beside, machine, written
from benchmarks.gpu.machine import OF_CHECKS, Machine, arena, arenas_in, end_all, run_check
from holdfast.smp_daemon.shared.paths import ARENA_ENV
from tests.deadlines import DEADLINE_S

ROOT = Path(__file__).parents[2]

LONG_S = 30.0
"""Timeout of a check that is stopped, in seconds."""


@pytest.mark.cluster
def test_a_dry_run_prints_a_line_for_each_check_and_writes_a_report(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "A", "--dry", "--only", "A0", "A6", "A7", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=4 * DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [["✓", name] for name in ("A0", "A6", "A7")]
    [report] = tmp_path.iterdir()
    assert last.endswith(str(report))
    found = written.read(report)
    assert found["facts"]["device"].startswith("none")
    assert found["checks"].keys() == {"A0", "A6", "A7"}
    assert report.read_text().count("| ✓ |") == 3


def test_the_report_has_all_parts_and_is_there_after_each_check(tmp_path: Path) -> None:
    path, facts = tmp_path / "sub" / "report.md", {"device": "H100"}
    written.Written(path, facts).add("A0", {"passes": True, "seconds": 1.0})
    assert written.read(path)["checks"].keys() == {"A0"}
    failure = "Traceback:\n```json\na | b"
    written.Written(path, facts).add("B1", {"passes": False, "failure": failure, "seconds": 2.0})
    assert written.read(path)["checks"].keys() == {"A0", "B1"}
    assert path.read_text().count("\n| ") == 3, "one line for each, and one for their names"
    result = {"passes": True, "seconds": 2.0}
    written.Written(path, {"device": "H200"}).add("B1", result)
    assert written.read(path) == {"facts": {"device": "H200"}, "checks": {"B1": result}}


@pytest.mark.cluster
def test_a_check_that_takes_too_long_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "BESIDE_OTHERS", 1)
    with arena() as base:
        monkeypatch.setenv(ARENA_ENV, str(base))
        found: dict[str, Any] = {}
        thread = threading.Thread(target=lambda: found.update(run_check("A10", Machine(dry=True), LONG_S)))
        thread.start()
        limit, smps = time.monotonic() + LONG_S, list[psutil.Process]()
        while not smps and time.monotonic() < limit:
            time.sleep(0.05)
            smps = [smp for each in arenas_in(base) for smp in each.smps]
        [check] = [each for each in psutil.Process().children() if "--check" in each.cmdline()]
        check.suspend()  # so it takes too long, however fast this machine
        thread.join(LONG_S + DEADLINE_S)
        assert "took over" in found["failure"]
        assert smps and not any(map(is_alive, smps))
        assert not list(base.iterdir())


def test_what_a_check_has_started_ends_with_it_whoever_its_parent_is(tmp_path: Path) -> None:
    """Such a process might still be about to start an SMP."""
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    orphaned = ["sh", "-c", "sleep 1000 >/dev/null & echo $!"]  # its parent has ended before it
    checks = {"of the check": f"{outer}:{inner}", "of the one around it": str(outer), "of neither": ""}
    started = {
        name: psutil.Process(int(subprocess.check_output(orphaned, env={**os.environ, OF_CHECKS: value})))
        for name, value in checks.items()
    }
    try:
        for base, wanted in ((inner, ["of the one around it", "of neither"]), (outer, ["of neither"])):
            end_all(base)
            assert [name for name, each in started.items() if is_alive(each)] == wanted
    finally:
        for each in filter(is_alive, started.values()):
            each.kill()


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


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
