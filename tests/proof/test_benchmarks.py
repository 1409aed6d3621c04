"""Benchmarks that nothing else runs still run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.deadlines import DEADLINE_S

ROOT = Path(__file__).parents[2]

COMMANDS = {
    "node": "--quick --smps-only --markdown",
    "service": "--quick --only smps --markdown",
    "persist": "--width 32 --layers 1 --seconds 2 --every 1s --markdown",
    "scale": "--most 4 --played 8 --markdown",
    "gpu": "B --dry --only B12 --out",
}


@pytest.mark.cluster
@pytest.mark.parametrize("name", COMMANDS)
def test_it_runs(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", *COMMANDS[name].split(), str(tmp_path / "report")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=4 * DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    [report] = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert report.stat().st_size > 100
