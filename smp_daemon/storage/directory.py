"""The directory of an arena: made, locked, and cleared of what is damaged or in the way."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.logs import about, get_log
from holdfast.smp_daemon.shared.paths import ARENA_ENV, BEGUN, OURS, SOCKET, not_private
from holdfast.smp_daemon.shared.records import PART
from holdfast.smp_daemon.shared.system import MACHINE, Files

OVERFLOW_UID = 65534
"""The uid that the kernel reports in a container for a host user that is not mapped there."""

log = get_log(__name__)


class ArenaDirectory:
    """The directory of an arena, and the lock on it, which no damage to a file in it can undo. The kernel releases the
    lock when its owner dies. Not thread-safe: the store's lock guards it.

    Attributes:
        lost: names of files that were found damaged, and removed.
    """

    def __init__(self, path: Path, files: Files, made: bool) -> None:
        """Lock it. `made`: for this owner. Raises `OSError`, and `BlockingIOError` if another process has it."""
        self.lost: set[str] = set()
        self._path = path
        self._files = files
        self._made = made
        self._fd: Any = None
        self._close = files.close
        self._fd = files.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._number = files.fstat(self._fd).st_ino
        files.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @property
    def is_gone(self) -> bool:
        """Whether the directory was deleted or moved away, or another SMP has made one in its place."""
        try:
            return self._path.lstat().st_ino != self._number
        except FileNotFoundError:
            return True

    def unmake(self) -> None:
        """The start failed: remove the directory if it was made for it, so that nothing stays behind."""
        if self._made:
            self._files.rmtree(self._path)

    def clear_the_way(self, delete_later: Callable[[Path, int], bool]) -> None:
        """Remove what a predecessor was killed over, and what is no file of ours although it has the name of one.

        Args:
            delete_later: takes over an unfinished file of so many bytes, if its memory takes long to give back.
                Returns whether it does.

        Raises:
            ConfigError: something cannot be removed.
        """
        for path in sorted(self._path.glob("*")):
            status = path.lstat()
            if not OURS.fullmatch(path.name) or path.name.startswith("smp.log"):
                continue  # not read by an SMP; a log that cannot be written is reported as such
            if path.name.endswith(PART):
                if not (stat.S_ISREG(status.st_mode) and delete_later(path, status.st_size)):
                    put_away(path, self._files)
            elif path.name == SOCKET and stat.S_ISSOCK(status.st_mode):
                continue  # whoever listens at it is replaced by `bind_unix`
            elif not stat.S_ISREG(status.st_mode) or status.st_uid != self._files.getuid():
                self.note_lost(path, "it is not a regular file of this user")
            elif status.st_mode & 0o600 != 0o600:
                path.chmod(0o600)
                log.warning("%s could not be read and written by its owner: its mode is set again", path)

    def note_lost(self, path: Path, why: object) -> None:
        """Remove a damaged file, and say so. Raises `ConfigError` if it cannot be removed."""
        self.lost.add(path.name)
        log.warning("%s is lost, and is removed: %s", path, why, extra=about(file=path.name))
        put_away(path, self._files)

    def close(self) -> None:
        """Release it; harmless if it is released already."""
        fd, self._fd = self._fd, None
        if fd is not None:
            self._close(fd)

    __del__ = close


def own(path: Path, files: Files) -> ArenaDirectory:
    """Make the arena's directory if there is none, and lock it. Raises `ConfigError`."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _check_parent(path.parent, files.getuid())
            made = not path.exists()
            path.mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(
                f"cannot make the arena {path}: {error.strerror}; choose another with HOLDFAST_ARENA"
            ) from error
        failpoint("arena.made")
        try:
            _check_content(path)
            if wrong := not_private(path, files.getuid()):
                raise ConfigError(f"the arena {path} {wrong}")
            directory = ArenaDirectory(path, files, made)
        except FileNotFoundError:
            continue  # its last owner has just removed it
        except BlockingIOError as error:
            raise ConfigError(f"another SMP owns the arena {path}: use it, or stop it first") from error
        except OSError as error:
            raise ConfigError(
                f"cannot lock the arena {path}: {error.strerror}; choose another with {ARENA_ENV}"
            ) from error
        if not directory.is_gone:
            return directory
        directory.close()  # as above


def put_away(path: Path, files: Files = MACHINE) -> None:
    """Remove whatever has this name; a directory with all that is in it. Links are not followed.

    Raises:
        ConfigError: it cannot be removed.
    """
    try:
        if stat.S_ISDIR(path.lstat().st_mode):
            files.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        pass  # it is gone already
    except OSError as error:
        raise ConfigError(
            f"{path} is in the way of this node's SMP, which cannot remove it: {error}: remove it"
        ) from error


def _check_parent(path: Path, uid: int) -> None:
    """Raise `ConfigError` if the directory with the arena belongs to another user, who could replace the arena."""
    status = path.lstat()
    if status.st_uid not in (uid, 0, OVERFLOW_UID):
        raise ConfigError(
            f"{path} belongs to user {status.st_uid}, who could replace the arena in it: choose another with "
            f"{ARENA_ENV}, or start the job as that user"
        )
    if not status.st_mode & 0o022 or status.st_mode & stat.S_ISVTX or stat.S_ISLNK(status.st_mode):
        return
    if status.st_mode & 0o002:
        raise ConfigError(f"every user may write to {path}, and so replace the arena in it: chmod +t or go-w it")
    log.warning("its group may write to %s, and so replace the arena in it: run chmod g-w on it", path)


def _check_content(path: Path) -> None:
    """Raise `ConfigError` if the directory is another software's: all that is in an arena is removed with it."""
    names = sorted(each.name for each in path.glob("*"))
    foreign = next((name for name in names if not OURS.fullmatch(name)), None)
    if foreign is not None and not any(name in BEGUN for name in names):
        raise ConfigError(
            f"{path} is no arena, and has files such as {foreign}: choose a directory for arenas alone with {ARENA_ENV}"
        )
