"""Runs programs until they end."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.deadlines import DEADLINE_S


def completed(
    command: Sequence[str | Path], *, timeout: float = DEADLINE_S, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command until it ends, and keep what it says; `options` are those of `subprocess.run`."""
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=check, **options)


@contextmanager
def started(command: Sequence[str | Path], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process to talk to, which is killed at the end of the block; `options` are those of `subprocess.Popen`."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def python(code: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `code`, which must end well; `options` are those of `completed`."""
    done = completed([sys.executable, "-c", code, *map(str, arguments)], **options)
    assert done.returncode == 0, done.stderr
    return done


STATUS = {"raise": 3, "late": 3, "asked": 0}
"""How a training script ends that is told to end so; otherwise it kills itself."""


def run(script: str, stop: int, kind: str, ends: str = "kill", protected: bool = True) -> list[str]:
    """Run a training script of another framework, which ends in batch `stop`, as it must; return the lines that it
    printed, one for each batch and one at the end."""
    done = completed([sys.executable, "-c", script, str(stop), kind, ends, "protected" if protected else "alone"])
    assert done.returncode == (STATUS.get(ends, -signal.SIGKILL) if stop >= 0 else 0), done.stderr
    return [line for line in done.stdout.splitlines() if line[0].isdigit() or line.startswith("end")]
