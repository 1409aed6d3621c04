"""Commands that run in a session of their own, ended with all that they started in it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from holdfast.smp_daemon.shared.errors import ConfigError, DeadlineExceeded

TAIL_LINES = 60


LOOK_EVERY_S = 1.0


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    deadline_s: float,
    what: str,
    meanwhile: Callable[[float], None] = lambda seconds: None,
) -> int:
    """Run a command to its end, what it prints going to `log`; its exit status. Blocks.

    Args:
        what: names the run in errors.
        meanwhile: called every `LOOK_EVERY_S`, with the seconds that it has run.

    Raises:
        ConfigError: it cannot be started.
        DeadlineExceeded: it took too long, and was ended; the message ends with what it printed.
    """
    process, began = start(command, environment, log), time.monotonic()
    try:
        while (ran_s := time.monotonic() - began) < deadline_s:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(min(LOOK_EVERY_S, deadline_s - ran_s))
            meanwhile(time.monotonic() - began)
        raise DeadlineExceeded(f"the {what} took over {deadline_s:.0f} s\n{tail(log)}")
    finally:
        end(process)


def start(
    command: Sequence[str], environment: Mapping[str, str], log: Path, folder: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, in `folder` or where this process is; what it prints is added to `log`.

    Raises:
        ConfigError: it cannot be started.
    """
    with log.open("ab") as out:
        try:
            return subprocess.Popen(
                command,
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"{command[0]} cannot be started: {error}") from error


def end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a process that leads its session, and of the session; what left it, as SMPs do, stays."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # nothing is left
    process.wait()


def tail(log: Path) -> str:
    """The last lines of what was printed."""
    return "\n".join(log.read_text(errors="replace").strip().splitlines()[-TAIL_LINES:])
