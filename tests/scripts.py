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


def run(script: str, stop: int, kind: str, ends: str = "kill", protected: bool = True) -> tuple[int, list[str]]:
    """Run a training script of another framework, which ends or kills itself; return its exit status and the lines that
    it printed, one for each batch and one at the end."""
    arguments = [str(stop), kind, ends, "protected" if protected else "alone"]
    done = completed([sys.executable, "-c", script, *arguments])
    assert done.returncode in (0, 3, -signal.SIGKILL), done.stderr
    return done.returncode, [line for line in done.stdout.splitlines() if line[0].isdigit() or line.startswith("end")]
