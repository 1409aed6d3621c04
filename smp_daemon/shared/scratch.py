"""Folders on tmpfs for as long as one command runs, beside the arenas of jobs.

Each is locked by the process that made it, so that `holdfast gc` can tell what a command left that was killed. A name
begins with a dot, as no job's does.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.paths import ARENA_ENV, arena_base

EMPTY_AGE_S = 60.0
"""One that is empty and younger may be about to be locked."""

_numbers = itertools.count()
_ours: set[Scratch] = set()


class Scratch:
    """One folder; a context manager that makes and removes it. Not thread-safe.

    Attributes:
        path: where it will be, is, or was.
    """

    def __init__(self, kind: str) -> None:
        self.path = arena_base() / f".{kind}-{os.getpid()}-{next(_numbers)}"
        self._lock = -1

    def __enter__(self) -> Self:
        """Make it. Raises `ConfigError` if it cannot be."""
        _ours.add(self)
        try:
            self.path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
            self.path.mkdir(mode=0o700)
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX)  # nobody holds it for longer than a look
        except OSError as error:
            self.remove()
            raise ConfigError(f"{self.path}: {error.strerror}: choose another folder with {ARENA_ENV}") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove it, and all that is in it. Harmless if it is not there."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        _ours.discard(self)


def remove_ours() -> None:
    """Remove all that this process has made and not removed."""
    pid = os.getpid()
    for each in list(_ours):
        if each.path.name.split("-")[1] == str(pid):  # and is no parent's, from before a fork
            each.remove()


def of_a_command(path: Path, base: Path) -> Path | None:
    """The scratch folder below `base` that `path` lies in; None: in none."""
    first = path.relative_to(base).parts[:1]
    return base / first[0] if first and first[0].startswith(".") else None


def is_abandoned(folder: Path) -> bool:
    """Whether the process that made a scratch folder has ended."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False  # it has just been removed, or is another user's
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return any(os.scandir(folder)) or time.time() - os.fstat(lock).st_mtime > EMPTY_AGE_S
    except OSError:
        return False
    finally:
        os.close(lock)


def find_abandoned(base: Path) -> Iterator[Path]:
    """Scratch folders in `base` whose commands have ended."""
    for folder in sorted(base.glob(".*-*-*")):
        if folder.is_dir() and is_abandoned(folder):
            yield folder
