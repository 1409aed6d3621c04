"""``python -m benchmarks.gpu`` runs without a device, against one that is not there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deadlines import DEADLINE_S

ROOT = Path(__file__).parent.parent


@pytest.mark.cluster
def test_a_dry_run_prints_a_line_for_each_check_and_writes_a_report(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "A", "--dry", "--only", "A0", "A6", "A7", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=4 * DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [["✓", name] for name in ("A0", "A6", "A7")]
    [report] = tmp_path.glob("gpu-A-dry-*.json")
    written = json.loads(report.read_text())
    assert written["device"] == "none: a dry run"
    assert written["checks"].keys() == {"A0", "A6", "A7"}
    assert report.with_suffix(".md").read_text().count("| ✓ |") == 3
