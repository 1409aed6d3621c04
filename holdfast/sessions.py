"""Run commands in sessions of their own, and kill their process groups at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from holdfast.smp_daemon.shared.errors import ConfigError, DeadlineExceeded
from holdfast.smp_daemon.shared.settings import GIVE_UP, PERSIST, REQUIRE, RESTORE_STEP, RUN

TAIL_LINES = 60

LOOK_EVERY_S = 1.0
"""Interval between calls of `meanwhile` in `run`, in seconds."""


GOES_ON_FROM = frozenset(each.variable for each in (PERSIST, RUN, GIVE_UP, RESTORE_STEP, REQUIRE))
"""Variables that say what a start goes on from, and where that is persisted."""


def trial_environment() -> dict[str, str]:
    """This process's environment, for a job that is only tried: it begins from nothing, and persists nothing."""
    return {name: text for name, text in os.environ.items() if name not in GOES_ON_FROM}


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    deadline_s: float,
    what: str,
    meanwhile: Callable[[float], None] = lambda seconds: None,
) -> int:
    """Run a command to its end with its output appended to `log`; return its exit status. Blocks.

    Args:
        what: name of the run in errors.
        meanwhile: called every `LOOK_EVERY_S` with the seconds that the command has run.

    Raises:
        ConfigError: the command cannot be started.
        DeadlineExceeded: the command ran too long and was killed; the message ends with its output.
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
    """Start a command in a session of its own, in `folder` or the current directory. Its output is appended to `log`.

    Raises:
        ConfigError: the command cannot be started.
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
    """Kill a process that `start` started, and its process group. Processes that left the group, as SMPs do, stay."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # nothing is left
    process.wait()


def tail(log: Path) -> str:
    """The last lines of the output in `log`."""
    return "\n".join(log.read_text(errors="replace").strip().splitlines()[-TAIL_LINES:])
