"""Runs programs in a Python of their own until they end."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

from tests.deadlines import DEADLINE_S


def python(
    code: str, *arguments: object, deadline_s: float = DEADLINE_S, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run `code`, which must end well; `options` are those of `subprocess.run`."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done


def run(script: str, stop: int, kind: str, ends: str = "kill", protected: bool = True) -> tuple[int, list[str]]:
    """Run a training script of another framework, which ends or kills itself; return its exit status and the lines that
    it printed, one for each batch and one at the end."""
    arguments = [str(stop), kind, ends, "protected" if protected else "alone"]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode in (0, 3, -signal.SIGKILL), done.stderr
    return done.returncode, [line for line in done.stdout.splitlines() if line[0].isdigit() or line.startswith("end")]
