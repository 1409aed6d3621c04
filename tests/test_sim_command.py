"""The simulation as a command, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_some_seeds_keep_the_promise(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "chaos.sim", "--seeds", "8", "--first", "500", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(file.read_text())["seeds"] == 8
