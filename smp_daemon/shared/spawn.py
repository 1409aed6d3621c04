"""Starting an SMP, which one serves an arena, and removing arenas that none can use."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import psutil

from holdfast.smp_daemon.shared.budget import wipe_file
from holdfast.smp_daemon.shared.errors import (
    BY_NAME,
    ArenaInUse,
    ConfigError,
    DeadlineExceeded,
    HoldfastError,
    ProtocolError,
    SmpUnavailable,
)
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.paths import (
    BEGUN,
    GONE,
    OURS,
    Owner,
    files_below,
    known_owner,
    read_owner,
    socket_path,
)
from holdfast.smp_daemon.shared.plain import from_plain
from holdfast.smp_daemon.shared.processes import own_command, start_ticks
from holdfast.smp_daemon.shared.system import MACHINE, Files, Network, Processes, System, opened, remove_tree
from holdfast.smp_daemon.shared.uids import peer_of

START_DEADLINE_S = 120.0
"""Timeout for the start of an SMP, whatever its arena holds and reserves: it serves first, and then works on bytes. A
start takes half a second, but longer if all ranks of a node read their modules from a file server at the same time. An
SMP that cannot start reports that at once."""

RUBBISH_AGE_S = 60.0
"""How old an arena without usable data must be before another SMP removes it: its own SMP may be about to start."""

LOOK_EVERY_S = 0.05
"""Pause before a process that waits for another's start looks again whether an SMP serves."""

LOOK_DEADLINE_S = 1.0
"""Timeout for a connection to a unix socket, which the kernel makes at once unless hundreds wait for it."""

DELETED = " (deleted)"
"""Ends the path of a deleted file in ``/proc/<pid>/maps``."""

log = get_log(__name__)


def start_smp(
    job: str,
    node: str,
    arena: Path,
    *,
    host: str = "127.0.0.1",
    ports: tuple[int, int] = (0, 0),
    deadline_s: float = START_DEADLINE_S,
    system: System = MACHINE,
) -> Owner:
    """Start an SMP that outlives this process, unless one serves `arena`. Blocks until one does, and returns it.

    If several processes call this for one arena, one of them starts an SMP, and all return as soon as it serves. If
    that process is killed meanwhile, its SMP serves all the same, and the others find it.

    Args:
        ports: for gRPC and for raw bytes; 0: the predecessor's in this arena, or any free one.
        deadline_s: how long to wait.

    Raises:
        HoldfastError: the error that the SMP reported.
        DeadlineExceeded: none serves by then.
        ArenaInUse: one owns `arena` then, and does not serve.
    """
    command = [*smp_command(job, node, arena, host), "--detach", "--port", str(ports[0]), "--bulk-port", str(ports[1])]
    return found_or_started(command, arena, deadline_s, system)[0]


def found_or_started(
    command: Sequence[str], arena: Path, deadline_s: float = START_DEADLINE_S, system: System = MACHINE
) -> tuple[Owner, bool]:
    """`start_smp` by a command of one's own, which detaches. Returns also whether it was run."""
    until_s = system.monotonic() + deadline_s
    refused: ArenaInUse | None = None
    with _turn_to_start(arena, system) as is_my_turn:
        while (left_s := until_s - system.monotonic()) > 0:
            mine = is_my_turn()  # before the look: whoever had the turn may have started one just now
            if serves(arena, system) and (owner := known_owner(arena, system)) is not None:
                return owner, False
            if mine and not (refused is not None and _is_owned(arena, system)):
                try:
                    return launch(command, left_s, system), True
                except ArenaInUse as error:
                    refused = error
            system.sleep(LOOK_EVERY_S)
    raise refused or DeadlineExceeded(f"no SMP serves {arena} after {deadline_s:.0f} s")


def _is_owned(arena: Path, files: Files) -> bool:
    """Whether an SMP owns `arena`. One that does not serve yet was started by a process that was killed meanwhile, or
    by an operator; one that serves no more is about to end, and may be freeing memory."""
    try:
        with _locked(arena, fcntl.LOCK_SH | fcntl.LOCK_NB, files):
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False


@contextmanager
def _turn_to_start(arena: Path, files: Files) -> Iterator[Callable[[], bool]]:
    """Several processes may want to start an SMP in `arena`: one at a time has the turn. Starts of other arenas do not
    wait for it.

    Gives a function that takes the turn if nobody has it, and says whether this process has it. It never blocks. The
    turn is a lock on a file beside the arena, which may not exist yet. The process that has the turn removes the file,
    so a lock on a file that has lost its name is not the turn.
    """
    path, fd, mine = _turn_path(arena), -1, False

    def is_mine() -> bool:
        nonlocal fd, mine
        while not mine:
            try:
                if fd < 0:
                    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                    fd = files.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                files.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                mine = path.stat().st_ino == files.fstat(fd).st_ino
            except BlockingIOError:
                return False
            except FileNotFoundError:
                mine = False  # it was removed between the two looks
            except OSError as error:
                problem = f"cannot use {path.parent}: {error.strerror}; choose another with HOLDFAST_ARENA"
                raise ConfigError(problem) from error
            if not mine and fd >= 0:
                files.close(fd)
                fd = -1
        return True

    try:
        yield is_mine
    finally:
        if mine:
            path.unlink(missing_ok=True)
            files.flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor, too, and keeps it
        if fd >= 0:
            files.close(fd)


def _turn_path(arena: Path) -> Path:
    return arena.with_name(f".{arena.name}.start")


def launch(command: Sequence[str], deadline_s: float, processes: Processes = MACHINE) -> Owner:
    """Run a command that starts an SMP and then exits. Returns what the SMP reports.

    Raises:
        HoldfastError: the error that the SMP reported.
        DeadlineExceeded: the command did not end within `deadline_s`.
    """
    try:
        output, errors = processes.run(command, deadline_s)
    except TimeoutError as error:
        raise DeadlineExceeded(f"the SMP did not start within {deadline_s:.0f} s") from error
    except PermissionError as error:
        raise ConfigError(
            f"user {os.getuid()} cannot start an SMP, as it may not run {command[0]}: {error.strerror}. Install "
            "holdfast where that user may read it, or start the SMP by other means"
        ) from error
    except OSError as error:
        raise SmpUnavailable(f"no SMP can be started: {command[0]}: {error.strerror}") from error
    return parse_report(output, errors)


@contextmanager
def _locked(directory: Path, how: int, files: Files = MACHINE) -> Iterator[None]:
    """Hold a lock on the directory itself, so that no lock file stays behind. Raises `OSError`."""
    with opened(directory, os.O_RDONLY | os.O_DIRECTORY, files) as fd:
        files.flock(fd, how)
        yield


def smp_command(job: str, node: str, arena: Path, host: str, module: str = "holdfast.smp_daemon") -> list[str]:
    """The command line that runs an SMP, or a stand-in for it, in the foreground."""
    return own_command(module, *smp_options(job, node, arena, host))


def smp_options(job: str, node: str, arena: Path, host: str) -> list[str]:
    """The options without which no SMP starts."""
    return ["--job", job, "--node", node, "--arena", str(arena), "--host", host]


def parse_report(text: str, errors: str = "") -> Owner:
    """Parse the report of an SMP that was started. Raises the error that it reported."""
    try:
        report = json.loads(text)
    except ValueError as error:
        raise SmpUnavailable(f"the SMP ended without a report: {errors.strip()[-2000:] or repr(text)}") from error
    if "error" in report:
        raise BY_NAME.get(report["error"], HoldfastError)(report["message"])
    return from_plain(Owner, report["ready"], "what an SMP says when it serves")


def is_arena(path: Path) -> bool:
    """Whether a directory is, or was, an arena: this user's, closed to others, with files of known names only."""
    try:
        status = path.stat()
        names = [entry.name for entry in path.iterdir()]
    except OSError:
        return False  # it was just removed, or is another user's
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        return False
    return all(map(OURS.fullmatch, names)) and any(name in BEGUN for name in names)


def delete(arena: Path, *, zero: bool = False) -> None:
    """Delete the folder of an arena that no SMP serves. `zero`: overwrite its slots first.

    Raises:
        ConfigError: something in it cannot be removed; the message names it.
    """
    try:
        if zero:
            for path, _ in files_below(arena):
                if path.suffix in (".safetensors", ".parity") or path.name.startswith(GONE):
                    wipe_file(path)
        remove_tree(arena)
        _turn_path(arena).unlink(missing_ok=True)  # left by a starter that was killed
    except OSError as error:
        raise ConfigError(f"{arena} cannot be removed: {error}: remove it") from error


def sweep(base: Path, *, zero: bool = False, older_than_s: float = RUBBISH_AGE_S) -> list[Path]:
    """Remove arenas in `base` that no restart can use: dead ones that no trainer ever joined, or whose SMP was killed
    while it removed them. Others stay, whatever their age: `holdfast gc` removes those. Returns the removed paths.
    """
    removed: list[Path] = []
    try:
        arenas = sorted(base.iterdir())
    except OSError as error:  # no files left to this process, say: what is left undone here may end no SMP that serves
        log.warning("arenas that no restart can use are not looked for in %s: %s", base, error)
        return removed
    for arena in arenas:
        try:
            if (
                not is_arena(arena)
                or os.path.lexists(arena / "node.json")
                or time.time() - arena.stat().st_mtime < older_than_s
            ):
                continue
            with _locked(arena, fcntl.LOCK_EX | fcntl.LOCK_NB):
                files = [status for _, status in files_below(arena)]
                newest = max((file.st_mtime for file in files), default=time.time())
                joined = os.path.lexists(arena / "node.json")
                if not joined and time.time() - newest >= older_than_s and not user_of(arena):
                    delete(arena, zero=zero)
                    removed.append(arena)
                    size = sum(file.st_blocks * 512 for file in files)
                    log.warning("removed %s, an arena that no restart can use: %d bytes", arena, size)
        except (OSError, ConfigError) as error:
            log.info("%s is left alone: %s", arena, error)  # an SMP owns it, or it is another user's, or just gone
    return removed


def running_owner(arena: Path) -> Owner | None:
    """The owner of `arena` if its process runs, else None. Raises `ProtocolError` if one runs and ``smp.json`` is
    lost."""
    try:
        owner = read_owner(arena)
        problem = f"{arena / 'smp.json'} is gone"
    except ProtocolError as error:
        owner, problem = None, str(error)
    if owner is None and (smp := _listening(arena)) is not None:
        raise ProtocolError(
            f"{problem}. SMP {smp.pid} serves there: end it with `holdfast smp stop`, and the next one writes that file"
        )
    return owner if process_of(owner) is not None else None


def running_process(arena: Path) -> psutil.Process | None:
    """The process of the SMP of `arena`; None if it does not run."""
    owner = known_owner(arena)
    return _listening(arena) if owner is None else process_of(owner)


def serves(arena: Path, network: Network = MACHINE) -> bool:
    """Whether a process listens on the socket of `arena`."""
    return _listening(arena, network) is not None


def _listening(arena: Path, network: Network = MACHINE) -> psutil.Process | None:
    """The process that listens on the socket of `arena`, whatever ``smp.json`` says."""
    with closing(network.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as sock:
        sock.settimeout(LOOK_DEADLINE_S)
        try:
            sock.connect(str(socket_path(arena)))
            pid, _ = peer_of(sock)
            return psutil.Process(pid)
        except (OSError, psutil.NoSuchProcess):
            return None


def process_of(owner: Owner | None) -> psutil.Process | None:
    """The owner's process if it still runs, told by its start time from one that reuses its pid."""
    if owner is None:
        return None
    try:
        process = psutil.Process(owner.pid)
        same = start_ticks(owner.pid) == owner.start_ticks and process.status() != psutil.STATUS_ZOMBIE
        return process if same else None
    except (psutil.NoSuchProcess, ProcessLookupError):
        return None


def user_of(folder: Path, smps: Sequence[psutil.Process] = ()) -> int:
    """The pid of a process other than the SMPs that has files below the folder mapped; 0 if there is none. Deleted ones
    do not count: they were in an earlier arena of that name."""
    needle, others = f"{folder.resolve()}/", {smp.pid for smp in smps}
    for process in psutil.process_iter():
        if process.pid in others:
            continue
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            if any(needle in line and not line.endswith(DELETED) for line in maps):
                return process.pid
        except (OSError, psutil.Error):
            continue  # it ended, or is another user's and cannot use this arena
    return 0
