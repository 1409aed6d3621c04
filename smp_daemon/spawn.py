"""Starting an SMP, and removing what dead jobs left behind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from smp_daemon.errors import BY_NAME, DeadlineExceeded, HoldfastError, ProtocolError, SmpUnavailable
from smp_daemon.paths import Owner, arena_base, read_owner

START_DEADLINE_S = 30.0
STOP_DEADLINE_S = 10.0


def start_smp(job: str, node: str, arena: Path, *, host: str = "127.0.0.1", insecure: bool = False) -> Owner:
    """Start an SMP that outlives this process, and wait until it serves.

    Raises:
        HoldfastError: what the SMP could not do, in its own words.
        DeadlineExceeded: it said nothing for `START_DEADLINE_S`.
    """
    command = [*smp_command(job, node, arena, host), "--detach", *(["--insecure"] if insecure else [])]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise DeadlineExceeded(f"the SMP did not start within {START_DEADLINE_S:.0f} s") from error
    return parse_report(done.stdout, done.stderr)


def smp_command(job: str, node: str, arena: Path, host: str) -> list[str]:
    """The command line that runs an SMP in the foreground."""
    return [
        sys.executable,
        "-m",
        "smp_daemon",
        *("--job", job),
        *("--node", node),
        *("--arena", str(arena)),
        *("--host", host),
    ]


def parse_report(text: str, errors: str = "") -> Owner:
    """What an SMP said when it started. Raises the error that it reported."""
    try:
        report = json.loads(text)
    except ValueError as error:
        raise SmpUnavailable(f"the SMP ended without a word: {errors.strip()[-2000:] or text!r}") from error
    if "error" in report:
        raise BY_NAME.get(report["error"], HoldfastError)(report["message"])
    return Owner(**report["ready"])


@dataclass(frozen=True, slots=True)
class Leftover:
    """An arena that nobody trains with: its directory, job, bytes, and its SMP if that still runs."""

    arena: Path
    job: str
    bytes: int
    smp: psutil.Process | None


def find_leftovers(
    base: Path | None = None, *, job: str | None = None, older_than_s: float = 0.0
) -> Iterator[Leftover]:
    """Arenas below `base` whose trainers are all gone, and which nothing wrote to for `older_than_s`."""
    base = base or arena_base()
    now = time.time()
    for path in sorted(base.glob("**/smp.json")):
        arena = path.parent
        try:
            owner = read_owner(arena)
        except (ProtocolError, TypeError):
            owner = None
        found_job = owner.job if owner else arena.name
        if job is not None and found_job != job:
            continue
        files = [file for file in arena.iterdir() if file.is_file()]
        newest = max((file.stat().st_mtime for file in files), default=0.0)
        if now - newest < older_than_s or _has_trainers(arena, owner):
            continue
        yield Leftover(arena, found_job, sum(file.stat().st_blocks * 512 for file in files), _running(owner))


def remove(leftover: Leftover) -> None:
    """End the leftover's SMP, if it runs, and delete its arena.

    Raises:
        DeadlineExceeded: the SMP did not end.
    """
    if leftover.smp is not None:
        leftover.smp.kill()
        try:
            leftover.smp.wait(STOP_DEADLINE_S)
        except psutil.TimeoutExpired as error:
            raise DeadlineExceeded(f"SMP {leftover.smp.pid} did not end within {STOP_DEADLINE_S:.0f} s") from error
    shutil.rmtree(leftover.arena)


def _running(owner: Owner | None) -> psutil.Process | None:
    """The owner's process, if it is still that process and not one that got its pid."""
    if owner is None:
        return None
    try:
        process = psutil.Process(owner.pid)
        same = abs(process.create_time() - owner.created) < 0.01 and process.status() != psutil.STATUS_ZOMBIE
        return process if same else None
    except psutil.NoSuchProcess:
        return None


def _has_trainers(arena: Path, owner: Owner | None) -> bool:
    """Whether another process than the SMP has files of the arena mapped."""
    needle = f"{arena}/"
    for process in psutil.process_iter():
        if owner is not None and process.pid == owner.pid:
            continue
        try:
            if needle in Path(f"/proc/{process.pid}/maps").read_text():
                return True
        except (OSError, psutil.Error):
            continue  # it ended, or it is another user's and cannot use this arena
    return False
