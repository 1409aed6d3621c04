"""Access to the place of persisted snapshots: a directory, or any URL that fsspec knows. No other module touches them.

Paths are relative to the place, with slashes. Every call blocks for as long as the storage takes, possibly for ever:
call them in a thread that nobody waits for without a deadline. Failures are raised as `PlaceError`.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit, urlunsplit

from holdfast.smp_daemon.shared.errors import ConfigError, HoldfastError, PlaceError

FLUSH_BYTES = 64 << 20
"""Number of bytes after which a local file is flushed to disk while it is written. One large flush at its end would
hold up everything else on that disk."""


def open_place(url: str) -> PersistPlace:
    """The place that `url`, a path or a URL, names. Reads and writes nothing yet, but for some storages it connects,
    which blocks.

    Raises:
        ConfigError: a package that fsspec needs for that kind of URL is not installed, or there is no such kind.
        PlaceError: the storage cannot be reached.
    """
    if not url:
        raise ConfigError("the place for persisted snapshots is empty: give a directory or a URL such as s3://...")
    path = _directory(url)
    return PersistPlace(url) if path is None else Directory(path)


def place_name(url: str) -> str:
    """`PersistPlace.name` of the place that `url` names. Pure."""
    return _shown(url) if (path := _directory(url)) is None else str(path)


def caution(url: str) -> str:
    """Why nothing can be persisted at a place, or may be lost with this node, in words; empty if nothing is known
    against the place. Blocks if the storage hangs."""
    path = _directory(url)
    if path is None:
        return f"{_shown(url)} is this process's memory" if url.startswith("memory:") else ""
    try:
        if not path.is_dir():
            return _absent(path)
        on_root = path.stat().st_dev == Path("/").stat().st_dev
    except OSError as error:  # closed to this user, for example, or its server has gone
        return f"{path} cannot be looked at: {error.strerror}"
    return f"{path} is on the root file system: is the storage mounted?" if on_root else ""


def _absent(path: Path) -> str:
    return f"{path} is not a directory that is there: mount the storage, or make it there"


def _directory(url: str) -> Path | None:
    """The directory that a path or a ``file://`` URL names; None: `url` is for fsspec."""
    if url.startswith("file://"):
        return Path(urlsplit(url).path)
    return None if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*:(:|//)", url) else Path(url).absolute()


@contextmanager
def _reported(what: str) -> Iterator[None]:
    """Turn any exception of a storage into a `PlaceError`: fsspec's backends may raise anything."""
    try:
        yield
    except HoldfastError:
        raise
    except Exception as error:
        raise PlaceError(f"{what}: {type(error).__name__}: {error}") from error


class PersistPlace:
    """A place reached through fsspec. Files appear when they are closed, as in every object store.

    Attributes:
        name: the name to show to people; without passwords.
    """

    def __init__(self, url: str) -> None:
        """Raises as `open_place`."""
        import fsspec

        self.name = _shown(url)
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{self.name} cannot be used: {error}") from error
        except Exception as error:
            raise PlaceError(f"{self.name} cannot be reached: {type(error).__name__}: {error}") from error

    def files(self, path: str) -> dict[str, int]:
        """Names and lengths of the files in a directory; empty if there is no such directory."""
        return {_last(entry): int(entry["size"] or 0) for entry in self._list(path) if entry["type"] == "file"}

    def directories(self, path: str) -> list[str]:
        """Names of the directories in a directory; empty if there is no such directory."""
        return [_last(entry) for entry in self._list(path) if entry["type"] == "directory"]

    def read(self, path: str, most: int) -> bytes:
        """The contents of a small file. Raises `PlaceError` if it is longer than `most` bytes."""
        with _reported(f"{self.name}/{path} cannot be read"):
            with self._fs.open(self._at(path), "rb") as file:  # object stores refuse a part of an empty file
                content: bytes = file.read(most + 1)
        if len(content) > most:
            raise PlaceError(f"{path} is longer than {most} bytes")
        return content

    def read_part(self, path: str, start: int, count: int) -> bytes:
        """`count` bytes of a file from `start`; fewer where the file ends. Thread-safe."""
        with _reported(f"{self.name}/{path} cannot be read"):
            # by name: s3fs has the version in second place
            content: bytes = self._fs.cat_file(self._at(path), start=start, end=start + count)
            return content

    def write(self, path: str, parts: Iterable[bytes]) -> None:
        """Write a file, part by part. It appears, whole, once all parts are written; and not at all if that fails, or
        `parts` raises."""
        with _reported(f"{self.name}/{path} cannot be written"):
            self._fs.makedirs(self._fs._parent(self._at(path)), exist_ok=True)
            file = self._fs.open(self._at(path), "wb")
            try:
                for part in parts:
                    file.write(part)
            except BaseException:
                _discard(file)
                raise
            file.close()

    def remove(self, path: str) -> None:
        """Remove a file, or a directory with its contents; harmless if it is not there."""
        with _reported(f"{self.name}/{path} cannot be removed"), suppress(FileNotFoundError):
            self._fs.rm(self._at(path), recursive=True)

    def _list(self, path: str) -> list[dict[str, Any]]:
        with _reported(f"{self.name}/{path} cannot be listed"), suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            found: list[dict[str, Any]] = self._fs.ls(self._at(path), detail=True)
            return [entry for entry in found if _last(entry)]
        return []

    def _at(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}"


class Directory(PersistPlace):
    """A directory on a file system that all nodes share. What is written is on its disk before it appears."""

    def __init__(self, root: Path) -> None:
        from fsspec.implementations.local import LocalFileSystem

        self._fs, self._root, self.name = LocalFileSystem(), str(root), str(root)

    def _list(self, path: str) -> list[dict[str, Any]]:
        """fsspec would list a file that is in the way of the directory as if it were in it."""
        with _reported(f"{self._at(path)} cannot be listed"), suppress(FileNotFoundError):
            with os.scandir(self._path(path)) as entries:
                return [found for each in entries if (found := _entry(each)) is not None]
        return []

    def write(self, path: str, parts: Iterable[bytes]) -> None:
        with _reported(f"{self._at(path)} cannot be written"):
            target = self._path(path)
            new = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")  # two nodes may write the same file
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                _write_flushed(new, parts)
                new.replace(target)
                _sync_directory(target.parent)
            except BaseException:
                new.unlink(missing_ok=True)
                raise

    def _path(self, path: str) -> Path:
        """Raises `PlaceError` if the place is not there, as if its storage is not mounted: what is written would go
        with the node, and what it has would be taken for nothing."""
        if not Path(self._root).is_dir():
            raise PlaceError(_absent(Path(self._root)))
        return Path(self._at(path))


def _entry(entry: os.DirEntry[str]) -> dict[str, Any] | None:
    """As fsspec lists it; None if another node has renamed or removed it meanwhile."""
    try:
        kind = "directory" if entry.is_dir() else "file" if entry.is_file() else ""
        return {"name": entry.name, "type": kind, "size": entry.stat().st_size if kind == "file" else 0}
    except FileNotFoundError:
        return None


def _discard(file: Any) -> None:
    """Give up an fsspec file that is being written. If it appears all the same, no list names it."""
    with suppress(Exception):  # the failure that led here is the one to report
        file.discard()
    with suppress(Exception):
        file.closed = True  # otherwise it would be flushed when it is garbage-collected


def _write_flushed(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file, and wait for the disk every `FLUSH_BYTES`, so that no gigabytes of unwritten pages pile up."""
    dirty = 0
    with path.open("wb", buffering=0) as file:
        for part in parts:
            view = memoryview(part)
            while view:
                view = view[file.write(view) :]
            dirty += len(part)
            if dirty >= FLUSH_BYTES:
                _to_disk(file)
                dirty = 0
        _to_disk(file)


def _to_disk(file: IO[bytes]) -> None:
    os.fsync(file.fileno())
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot do it for directories
            raise
    finally:
        os.close(fd)


def _last(entry: dict[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rpartition("/")[2]


def _shown(url: str) -> str:
    """A URL without user, password and query, which may hold secrets."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", "")) if host != parts.netloc or parts.query else url
