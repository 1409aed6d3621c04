"""Scratch folders on tmpfs, beside the arenas of jobs, each for as long as one command runs.

The process that makes a folder locks it, so that `holdfast gc` can recognize the folders of killed commands. Their
names begin with a dot, which no job's name does.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.paths import ARENA_ENV, SCRATCH, arena_base
from holdfast.smp_daemon.shared.system import opened

EMPTY_AGE_S = 60.0
"""How old an empty folder must be to count as abandoned: a younger one may be about to be locked."""

_numbers = itertools.count()
_ours: set[Scratch] = set()


class Scratch:
    """One folder; a context manager that makes and removes it. Not thread-safe.

    Attributes:
        path: path of the folder, also before it is made and after it is removed.
    """

    def __init__(self, kind: str) -> None:
        self.path = arena_base() / f".{kind}-{os.getpid()}-{next(_numbers)}"
        self._lock = -1

    def __enter__(self) -> Self:
        """Make and lock the folder. Raises `ConfigError` if that fails."""
        _ours.add(self)
        try:
            self.path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
            self.path.mkdir(mode=0o700)
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX)  # others hold it only for the moment of a check
        except OSError as error:
            self.remove()
            raise ConfigError(f"{self.path}: {error.strerror}: choose another folder with {ARENA_ENV}") from error
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the folder and everything in it. Harmless if it does not exist."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        _ours.discard(self)


def ours() -> frozenset[Scratch]:
    """The folders that this process has made and not removed yet."""
    return frozenset(_ours)


def remove_ours(but: frozenset[Scratch] = frozenset()) -> None:
    """Remove every folder that this process has made and not removed yet, but these."""
    pid = os.getpid()
    for each in ours() - but:
        if each.path.name.split("-")[1] == str(pid):  # not one that a parent made before a fork
            each.remove()


def of_a_command(path: Path, base: Path) -> Path | None:
    """The scratch folder below `base` that contains `path`; None if there is none."""
    first = path.relative_to(base).parts[:1]
    return base / first[0] if first and SCRATCH.fullmatch(first[0]) else None


def is_abandoned(folder: Path) -> bool:
    """Whether this user's process that made a scratch folder has ended: its lock is free, and it is not about to be
    locked."""
    try:
        with opened(folder, os.O_RDONLY | os.O_DIRECTORY) as lock:
            status = os.fstat(lock)
            if status.st_uid != os.getuid() or status.st_mode & 0o077:
                return False  # a folder of that name which no command made
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return any(os.scandir(folder)) or time.time() - status.st_mtime > EMPTY_AGE_S
    except OSError:
        return False  # its command runs, or it was just removed, or it is another user's


def find_abandoned(base: Path) -> Iterator[Path]:
    """Scratch folders of this user in `base` whose commands have ended."""
    for folder in sorted(base.glob(".*")):
        if SCRATCH.fullmatch(folder.name) and is_abandoned(folder):
            yield folder
