"""The simulation in processes of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.proof.sim import campaign


@pytest.mark.slow  # `test_sim` runs more than a hundred of them
def test_two_thousand_seeds_keep_the_promise_and_reach_every_point(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "tests.proof.sim", "--seeds", "2000", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600.0, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
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
