"""Runs training scripts of other frameworks until they end or kill themselves."""

from __future__ import annotations

import signal
import subprocess
import sys


def run(script: str, stop: int, kind: str, ends: str = "kill", protected: bool = True) -> tuple[int, list[str]]:
    """Run a script; return its exit status and the lines that it printed, one for each batch and one at the end."""
    arguments = [str(stop), kind, ends, "protected" if protected else "alone"]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode in (0, 3, -signal.SIGKILL), done.stderr
    return done.returncode, [line for line in done.stdout.splitlines() if line[0].isdigit() or line.startswith("end")]
