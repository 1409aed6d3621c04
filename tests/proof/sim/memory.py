"""Arenas in memory: the files and directories of simulated nodes, behind the interfaces of the real ones.

A file is an inode, and a mapping of it is its memory itself: a process that has mapped a file keeps it when its name is
deleted or given to another file. A rename is atomic. A process that dies loses no files; a lost node loses its
directory.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections.abc import Callable, Iterator
from fnmatch import translate
from functools import lru_cache
from re import compile as compiled
from typing import Any, NamedTuple

ROOM_BYTES = 1 << 30
"""Free space that the file system reports."""

USER = os.getuid()
"""Owner of all files."""


class FileStatus(NamedTuple):
    """The fields of `os.stat_result` that are used."""

    st_ino: int
    st_size: int
    st_mode: int
    st_uid: int
    st_dev: int = 0


class Room(NamedTuple):
    """The fields of `os.statvfs_result` that are used."""

    f_bavail: int
    f_frsize: int


class Mapped(bytearray):
    """The memory of a file, used as an `mmap.mmap`. All processes that map the file share it."""

    def madvise(self, advice: int) -> None:
        """Does nothing: nothing is swapped or dumped here."""

    def close(self) -> None:
        """Does nothing: the memory belongs to the file."""


class File:
    """An inode."""

    __slots__ = ("content", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.content = Mapped()

    def __ge__(self, number: int) -> bool:
        """Descriptors of open files are 0 or more."""
        return number <= 0

    def __lt__(self, number: int) -> bool:
        return number > 0

    def status(self) -> FileStatus:
        """The status of the file, as `os.fstat` would return it."""
        return FileStatus(self.number, len(self.content), stat.S_IFREG | 0o600, USER)


class OpenDirectory(NamedTuple):
    """An open directory."""

    name: str
    status: FileStatus


class Disk:
    """All directories of one run, by path (the root's path is empty), each with its files by name."""

    def __init__(self) -> None:
        self.directories: dict[str, dict[str, File]] = {"": {}}
        self._numbers = itertools.count(1)

    def new_file(self) -> File:
        """Return an empty file without a name."""
        return File(next(self._numbers))

    def touch(self, path: str) -> None:
        """Make a file at this path if there is none. Raises `KeyError` if its directory is gone."""
        directory, _, name = path.rpartition("/")
        self.directories[directory].setdefault(name, self.new_file())

    def remove(self, path: str) -> None:
        """Remove a directory and everything below it."""
        for each in [each for each in self.directories if each == path or each.startswith(path + "/")]:
            del self.directories[each]


class MemoryPath:
    """The part of `pathlib.Path` that is used, on a `Disk`."""

    __slots__ = ("_directory", "_disk", "name")

    def __init__(self, disk: Disk, directory: str, name: str) -> None:
        self._disk = disk
        self._directory = directory
        self.name = name

    def __str__(self) -> str:
        return f"{self._directory}/{self.name}"

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MemoryPath) and (self._directory, self.name) == (other._directory, other.name)

    def __hash__(self) -> int:
        return hash((self._directory, self.name))

    def __lt__(self, other: MemoryPath) -> bool:
        return (self._directory, self.name) < (other._directory, other.name)

    def __truediv__(self, name: str) -> MemoryPath:
        return MemoryPath(self._disk, f"{self._directory}/{self.name}", name)

    @property
    def parent(self) -> MemoryPath:
        directory, _, name = self._directory.rpartition("/")
        return MemoryPath(self._disk, directory, name)

    def absolute(self) -> MemoryPath:
        return self

    def with_name(self, name: str) -> MemoryPath:
        return MemoryPath(self._disk, self._directory, name)

    def with_suffix(self, suffix: str) -> MemoryPath:
        return self.with_name(self.name.rpartition(".")[0] + suffix)

    # ------------------------------------------------------------------ names

    def _files(self) -> dict[str, File]:
        """The files of the directory that contains this path. Raises `FileNotFoundError`."""
        try:
            return self._disk.directories[self._directory]
        except KeyError:
            raise _missing(self) from None

    def file(self) -> File:
        """The inode at this path. Raises `FileNotFoundError`."""
        try:
            return self._disk.directories[self._directory][self.name]
        except KeyError:
            raise _missing(self) from None

    def create(self, *, exclusive: bool = False) -> File:
        """The inode at this path, made if there is none. Raises `FileNotFoundError`, `FileExistsError`."""
        files = self._files()
        known = files.get(self.name)
        if known is None:
            known = files[self.name] = self._disk.new_file()
        elif exclusive:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self))
        return known

    def exists(self) -> bool:
        return self.name in self._disk.directories.get(self._directory, ()) or str(self) in self._disk.directories

    def mkdir(self, mode: int = 0o700, parents: bool = False, exist_ok: bool = False) -> None:
        path = str(self)
        if path in self._disk.directories:
            if not exist_ok:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            return
        if self._directory not in self._disk.directories:
            if not parents:
                raise _missing(self)
            self.parent.mkdir(mode, parents=True)
        self._disk.directories[path] = {}

    def touch(self) -> None:
        self.create()

    def chmod(self, mode: int) -> None:
        """Does nothing: all files belong to this user alone."""

    def is_symlink(self) -> bool:
        return False

    def stat(self) -> FileStatus:
        return self.file().status()

    def lstat(self) -> FileStatus:
        """The status of a directory or a file. Raises `FileNotFoundError`."""
        if str(self) not in self._disk.directories:
            return self.stat()
        return FileStatus(0, 0, stat.S_IFDIR | 0o700, USER)

    def glob(self, pattern: str) -> Iterator[MemoryPath]:
        matches, path = _matcher(pattern), str(self)
        for name in list(self._disk.directories.get(path, ())):
            if matches(name):
                yield MemoryPath(self._disk, path, name)

    def unlink(self, missing_ok: bool = False) -> None:
        if self._disk.directories.get(self._directory, {}).pop(self.name, None) is None and not missing_ok:
            raise _missing(self)

    def replace(self, target: MemoryPath) -> None:
        file = self.file()
        target._files()[target.name] = file
        del self._files()[self.name]

    # ------------------------------------------------------------------ contents

    def read_bytes(self) -> bytes:
        return bytes(self.file().content)

    def read_text(self) -> str:
        return self.file().content.decode()

    def write_bytes(self, data: bytes) -> None:
        self.create().content = Mapped(data)


class MemoryFiles:
    """`smp_daemon.shared.system.Files` in memory. A descriptor is the `File` itself, and a mapping its memory."""

    def getuid(self) -> int:
        return USER

    def available_bytes(self) -> int:
        return ROOM_BYTES

    def close(self, fd: object) -> None:
        """Does nothing: descriptors are the files and processes themselves."""

    def open(self, path: Any, flags: int, mode: int = 0o600) -> Any:
        if flags & os.O_DIRECTORY:
            return OpenDirectory(str(path), path.lstat())
        return path.create(exclusive=bool(flags & os.O_EXCL)) if flags & os.O_CREAT else path.file()

    def ftruncate(self, file: Any, length: int) -> None:
        self.posix_fallocate(file, 0, length)

    def posix_fallocate(self, file: Any, offset: int, length: int) -> None:
        if len(file.content) < length:
            file.content += bytes(length - len(file.content))

    def fstat(self, file: Any) -> Any:
        return file.status() if isinstance(file, File) else file.status

    def read(self, file: Any, length: int) -> bytes:
        return bytes(file.content[:length])

    def statvfs(self, path: Any) -> Any:
        return Room(ROOM_BYTES, 1)

    def map(self, file: Any, length: int) -> Any:
        if len(file.content) < length:
            raise ValueError("mmap length is greater than file size")
        return file.content

    def rmtree(self, path: Any) -> None:
        path._disk.remove(str(path))


@lru_cache(64)
def _matcher(pattern: str) -> Callable[[str], Any]:
    return compiled(translate(pattern)).match


def _missing(path: Any) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
