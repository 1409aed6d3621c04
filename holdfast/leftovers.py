"""What dead jobs and killed commands leave on this machine: arenas, SMPs and scratch folders."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from holdfast import scratch
from holdfast.smp_daemon.shared.errors import DeadlineExceeded
from holdfast.smp_daemon.shared.limits import slowest_s
from holdfast.smp_daemon.shared.paths import BEGUN, arena_base, files_below, folders_with, known_owner
from holdfast.smp_daemon.shared.processes import await_end
from holdfast.smp_daemon.shared.quantities import duration
from holdfast.smp_daemon.shared.spawn import delete, is_arena, running_process, user_of

STOP_DEADLINE_S = 10.0
"""How long a killed process may take to end, in seconds, beside the time for the memory that it has mapped."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """An arena, or the scratch folder of a command that was killed.

    Attributes:
        job: the job of the arena; empty for a scratch folder.
        smps: its SMPs that still run.
        user: a process other than the SMPs that uses it, such as a trainer; 0: none does.
        untouched_s: for how long no file in it has changed.
    """

    path: Path
    job: str
    bytes: int
    smps: tuple[psutil.Process, ...]
    user: int = 0
    untouched_s: float = float("inf")


def find_leftovers(base: Path | None = None, *, job: str | None = None) -> Iterator[Leftover]:
    """Arenas below `base` whose trainers are all gone.

    Without a `job`, also scratch folders whose command was killed: no job needs them.
    """
    for found in find_arenas(base, job=job):
        if not found.user:
            yield found


def find_arenas(base: Path | None = None, *, job: str | None = None) -> Iterator[Leftover]:
    """This user's arenas below `base`, of `job` or of any, whether used or not; and scratch folders, as
    `find_leftovers`."""
    base = base or arena_base()
    if job is None:
        yield from filter(None, map(_abandoned, scratch.find_abandoned(base)))
    now = time.time()
    for arena in sorted({path for name in BEGUN for path in folders_with(name, base)}):
        owner = known_owner(arena)
        found_job = owner.job if owner else arena.name
        if (job is not None and found_job != job) or scratch.of_a_command(arena, base) is not None:
            continue
        if owner is None and not is_arena(arena):
            continue  # other software's, which has a file of that name
        try:
            if arena.lstat().st_uid != os.getuid():
                continue
        except OSError:
            continue  # its job has just finished, or it is another user's
        files = [status for _, status in files_below(arena)]
        if not files:
            continue  # likewise
        newest = max(file.st_mtime for file in files)
        smp = running_process(arena)
        smps = () if smp is None else (smp,)
        size, user = sum(file.st_blocks * 512 for file in files), user_of(arena, smps)
        yield Leftover(arena, found_job, size, smps, user, max(0.0, now - newest))


def _abandoned(folder: Path) -> Leftover | None:
    smps = tuple(filter(None, map(running_process, folders_with("smp.json", folder))))
    if user_of(folder, smps):
        return None  # the command was killed, but processes that it started still run
    size = sum(status.st_blocks * 512 for _, status in files_below(folder))
    return Leftover(folder, "", size, smps)


def remove(leftover: Leftover, *, zero: bool = False) -> None:
    """Kill the leftover's SMPs and delete its folder. `zero`: overwrite its slots first.

    Raises:
        DeadlineExceeded: an SMP did not end.
        ConfigError: something in the folder cannot be removed; the message names it.
    """
    for smp in leftover.smps:
        end(smp, leftover.bytes)
    delete(leftover.path, zero=zero)


def end(process: psutil.Process, mapped_bytes: int = 0) -> None:
    """Kill a process and wait until it has ended. It need not be reaped: not every container's init reaps. The kernel
    first takes apart what it has mapped, about 3 GB a second.

    Raises:
        DeadlineExceeded: it does not end.
    """
    deadline_s = STOP_DEADLINE_S + slowest_s(mapped_bytes)
    with suppress(ProcessLookupError, psutil.NoSuchProcess):  # it has ended already
        ended = os.pidfd_open(process.pid)
        try:
            process.kill()
            if not await_end(ended, deadline_s):
                raise DeadlineExceeded(f"process {process.pid} did not end within {duration(deadline_s)}")
        finally:
            os.close(ended)
