"""Where an SMP's arena is, and the files in it through which others find the SMP."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.smp_daemon.shared.addresses import LOOPBACK, ServesAt
from holdfast.smp_daemon.shared.errors import ConfigError, HoldfastError, ProtocolError
from holdfast.smp_daemon.shared.limits import is_identifier
from holdfast.smp_daemon.shared.logs import Episodes, get_log
from holdfast.smp_daemon.shared.plain import Address, from_plain
from holdfast.smp_daemon.shared.records import read_json
from holdfast.smp_daemon.shared.settings import ARENA
from holdfast.smp_daemon.shared.system import MACHINE, Files

ARENA_ENV = ARENA.variable
SOCKET = "smp.sock"
GONE = "gone-"
"""Begins the names of files in an arena that were deleted, and whose memory is still to be given back."""

OURS = re.compile(
    r"(board|reserve|smp\.(json|sock|log(\.1)?)|node\.json|layout-.*\.json|gone-\d+\.\w+"
    r"|.+\.\d+\.(safetensors|parity)(\.json|\..+\.own)?)(\.part)?"
)
"""Names in an arena, and hardly in any other directory: a model's files end in safetensors, too."""

BEGUN = ("board", "node.json", "smp.json")
"""Names of which every arena has one, from shortly after its SMP started."""

SCRATCH = re.compile(r"\.[a-z]+-\d+-\d+")
"""Names of the folders of `holdfast.scratch`: no job's name begins with a dot."""

SEARCH_DEPTH = 2
"""How far below the directory with the arenas one may lie: in that of a virtual node."""

log = get_log(__name__)
_damaged = Episodes(log)


def arena_base() -> Path:
    """The directory that holds this user's arenas: ``HOLDFAST_ARENA``, or ``/dev/shm/holdfast-<uid>``."""
    return ARENA.value()


def arena_path(job: str, base: str | Path | None = None) -> Path:
    """The arena of `job` on this node: an absolute path, since scripts change directory.

    Raises:
        ConfigError: the job id is not a valid name.
    """
    given = Path(base) if isinstance(base, str) else base or arena_base()
    return given.absolute() / checked(job, "a job id")


def checked(name: str, what: str) -> str:
    """The name, if it may be that of a job or a node: `what`. Raises `ConfigError`."""
    if not is_identifier(name):
        raise ConfigError(f"{name!r} cannot be {what}: use 1-64 of A-Z a-z 0-9 . _ -, starting with a letter or digit")
    return name


def socket_path(arena: Path) -> Path:
    """The unix socket on which the arena's SMP talks to its trainers."""
    return arena / SOCKET


def not_private(path: Path, uid: int) -> str:
    """Why this directory is not one that user `uid` alone may use, and what to do about it; empty if it is."""
    status = path.lstat()
    if path.is_symlink():
        return f"is a link: set {ARENA_ENV} to where it leads"
    if status.st_uid != uid:
        return (
            f"belongs to user {status.st_uid}, and this process runs as user {uid}: start the job as that user to go "
            f"on with its snapshots, or choose another arena with {ARENA_ENV} to begin anew"
        )
    return "is not for its user alone: run chmod 700 on it" if status.st_mode & 0o777 != 0o700 else ""


@dataclass(frozen=True, slots=True)
class Owner(ServesAt):
    """The SMP that owns an arena, as recorded in ``smp.json``.

    Attributes:
        start_ticks: when its process started, which tells it from another with a reused pid: `processes.start_ticks`.
        http_host, http_port: where it serves its page; port 0: nowhere.
        version: its version of holdfast.
    """

    pid: int
    start_ticks: int
    job: str
    node: str
    host: str
    control_port: int
    bulk_port: int
    http_port: int = 0
    http_host: str = LOOPBACK
    version: str = ""
    more_bulk: tuple[Address, ...] = ()

    @property
    def url(self) -> str:
        """URL of its page, as reached from this machine."""
        return f"http://{LOOPBACK if self.http_host == '0.0.0.0' else self.http_host}:{self.http_port}/"


def read_owner(arena: Path, files: Files = MACHINE) -> Owner | None:
    """The owner of `arena`, or None if it never had one. Raises `ProtocolError` if ``smp.json`` cannot be read."""
    data = read_json(arena / "smp.json", files)
    return from_plain(Owner, data, f"an owner, in {arena / 'smp.json'}") if data else None


def known_owner(arena: Path, files: Files = MACHINE) -> Owner | None:
    """The owner of `arena`; None if it never had one, or while ``smp.json`` is damaged, until the SMP that serves there
    writes it again."""
    try:
        return read_owner(arena, files)
    except ProtocolError:
        return None


def folders_with(name: str, base: Path) -> list[Path]:
    """The directories that hold something of this name, sorted, as far as an arena may be one: `base`, what is in it,
    and what is in that, as the arenas of virtual nodes are; in scratch folders at any depth. Directories that are
    removed during the search, or that this user may not read, are left out."""
    return [folder for folder, names in _folders(base) if name in names]


def closed_to_us(path: Path) -> list[Path]:
    """The directories, at or below `path`, that this user may not read, sorted: other users' arenas, for example."""
    errors: list[OSError] = []
    for _ in _folders(path, errors.append):
        pass
    return sorted(Path(error.filename) for error in errors if isinstance(error, PermissionError))


def _folders(
    base: Path, on_error: Callable[[OSError], object] = lambda error: None
) -> Iterator[tuple[Path, frozenset[str]]]:
    """The directories in which `folders_with` looks, sorted, and the names in each."""
    above = base.parent
    for folder, folders, files in os.walk(base, onerror=on_error):
        path = Path(folder)
        yield path, frozenset((*folders, *files))
        deep = len(path.relative_to(base).parts) >= SEARCH_DEPTH
        folders[:] = [] if deep and not any(map(SCRATCH.fullmatch, path.relative_to(above).parts)) else sorted(folders)


def files_below(base: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """The plain files in the directories where `folders_with` looks, with their status. What an SMP or another command
    renames or removes during the search is left out."""
    for folder, names in _folders(base):
        for path in (folder / name for name in sorted(names)):
            try:
                status = path.lstat()
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode):
                yield path, status


def find_owners(base: Path | None = None, job: str | None = None) -> Iterator[Owner]:
    """The owners of the arenas of `job`, or of any job, below `base`, sorted by path. A damaged ``smp.json`` is
    skipped, and named in the log once."""
    for arena in folders_with("smp.json", base or arena_base()):
        try:
            owner = read_owner(arena)
        except HoldfastError as error:
            _damaged.begin(
                arena, "an SMP is left out, as it cannot be found: %s; its next start writes that file", error
            )
            continue
        if owner is not None and (job is None or owner.job == job):
            yield owner
