"""Benchmarks that nothing else runs still run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.deadlines import DEADLINE_S

ROOT = Path(__file__).parents[2]

COMMANDS = {
    "node": "--quick --smps-only",
    "service": "--quick --only smps",
    "persist": "--width 32 --layers 1 --seconds 2 --every 1s",
    "scale": "--most 4 --played 8",
}


@pytest.mark.cluster
@pytest.mark.parametrize("name", COMMANDS)
def test_it_runs(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", *COMMANDS[name].split()]
    command += ["--markdown", str(tmp_path / "report.md")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=4 * DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert (tmp_path / "report.md").stat().st_size > 100


@pytest.mark.cluster
def test_the_checks_of_a_gpu_that_run_smps_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "B", "--dry", "--only", "B12", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=4 * DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
