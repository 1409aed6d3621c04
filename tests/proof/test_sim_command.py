"""The simulation as a command, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest


def run(*arguments: str, deadline_s: float = 120.0) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "report.json"
        command = [sys.executable, "-m", "tests.proof.sim", *arguments, "--json", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        report: dict[str, Any] = json.loads(file.read_text())
        return report


@pytest.mark.slow  # `test_two_processes_do_what_one_does` and `test_sim` run a few hundred of them
def test_two_thousand_seeds_keep_the_promise_and_reach_every_point() -> None:
    report = run("--seeds", "2000", deadline_s=600.0)
    assert report["seeds"] == 2000
    assert not [point for point, counts in report["points"].items() if not counts["hits"]]


@pytest.mark.needs("torch")
def test_two_processes_do_what_one_does() -> None:
    arguments = ("--seeds", "110", "--first", "5000")  # more than one batch
    alone, together = run(*arguments), run(*arguments, "--jobs", "2")
    for name in ("seeds", "awaits", "turns", "simulated_s", "faults", "points", "checks"):
        assert alone[name] == together[name], name
