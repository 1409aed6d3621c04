"""The simulation as a command, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.proof.sim import campaign


def run(*arguments: str, deadline_s: float = 120.0) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "report.json"
        command = [sys.executable, "-m", "tests.proof.sim", *arguments, "--json", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        report: dict[str, Any] = json.loads(file.read_text())
        return report


@pytest.mark.slow  # `test_sim` runs more than a hundred of them
def test_two_thousand_seeds_keep_the_promise_and_reach_every_point() -> None:
    report = run("--seeds", "2000", deadline_s=600.0)
    assert report["seeds"] == 2000
    assert not [point for point, counts in report["points"].items() if not counts["hits"]]


@pytest.mark.needs("torch")
def test_two_processes_do_what_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "BATCH", 8)
    alone, together = (list(campaign.run(range(5000, 5030), jobs)) for jobs in (1, 2))
    assert [each.seeds for each in alone] == [8, 8, 8, 6]
    for each in (*alone, *together):
        each.cpu_s = 0.0
    assert alone == together
