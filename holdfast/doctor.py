"""``holdfast doctor``: what this machine has, and what holdfast makes of it.

`gather` looks, and changes nothing; `examine` judges, purely.
"""

from __future__ import annotations

import mmap
import os
import platform
import resource
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ec import choose_codec, describe_auto
from ec.backends import BACKENDS
from smp_daemon.arena import MADV_POPULATE_WRITE
from smp_daemon.paths import ARENA_ENV, arena_base
from snapshot.runs import streams

Verdict = Literal["ok", "note", "problem"]
MARKS: dict[Verdict, tuple[str, str]] = {"ok": ("✓", "green"), "note": ("!", "yellow"), "problem": ("✗", "bold red")}

LEAST_ROOM_BYTES = 1 << 30
LEAST_ROOM_SHARE = 0.25
"""Of memory: a node needs room for three times the state of its ranks, and for its parity."""

LEAST_FILES = 1024

GET_ISAL = "pip install --force-reinstall pyeclib, or apt install libisal2"
ENLARGE = "mount -o remount,size=... /dev/shm; docker run --shm-size=...; Kubernetes: emptyDir medium Memory"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `fix` says what to do about it, and is empty if it is ok."""

    name: str
    value: str
    verdict: Verdict = "ok"
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system."""

    point: Path
    kind: str
    options: frozenset[str]


@dataclass(frozen=True, slots=True)
class Facts:
    """What was seen.

    Attributes:
        packages: version, or None if not installed.
        auto: the backend that ``"auto"`` takes, and why it is not the fast one.
        unusable: for each backend why it cannot be used; empty if it can.
        isal: path of the loaded ISA-L, if there is one.
        arena: where arenas will be; it need not exist.
        parent: the nearest directory that does.
        room: bytes that may still be written there.
        populate: whether the kernel knows ``MADV_POPULATE_WRITE``.
        idle: whether a process may choose ``SCHED_IDLE``.
        streaming: whether copies use streaming stores.
    """

    python: str
    packages: dict[str, str | None]
    auto: tuple[str, str]
    unusable: dict[str, str]
    isal: str | None
    arena: Path
    parent: Path
    writable: bool
    mount: Mount
    room: int
    memory_bytes: int
    swap_bytes: int
    files: int
    kernel: str
    populate: bool
    idle: bool
    streaming: bool


def examine(facts: Facts) -> list[Finding]:
    """Judge all of it."""
    return [
        Finding("Python", facts.python),
        *(_package(name, found) for name, found in facts.packages.items()),
        *_codes(facts),
        *_arena(facts),
        _swap(facts),
        _files(facts.files),
        _kernel(facts),
        _idle(facts.idle),
        _copies(facts.streaming),
    ]


def _package(name: str, found: str | None) -> Finding:
    if found is not None:
        return Finding(name, found)
    if name == "megatron-core":
        return Finding(name, "not installed", "note", "for Megatron and the demo: pip install 'holdfast[megatron]'")
    if name == "pyeclib":
        return Finding(name, "not installed", "note", "it carries ISA-L: pip install pyeclib")
    return Finding(name, "not installed", "problem", f"pip install {name}")


def _codes(facts: Facts) -> Iterator[Finding]:
    backend, reason = facts.auto
    if reason:
        yield Finding("erasure code", f"auto takes {backend}, which is slow for m > 1: {reason}", "note", GET_ISAL)
    else:
        yield Finding("erasure code", f"auto takes {backend}, the fast one")
    for name, why in facts.unusable.items():
        where = f": {facts.isal}" if name == "isal" and facts.isal else ""
        yield Finding(f"backend {name}", why, "note", GET_ISAL) if why else Finding(f"backend {name}", f"usable{where}")


def _arena(facts: Facts) -> Iterator[Finding]:
    if facts.writable:
        yield Finding("arena", str(facts.arena))
    else:
        fix = f"make {facts.parent} writable, or set {ARENA_ENV}"
        yield Finding("arena", f"{facts.arena}: cannot be written", "problem", fix)
    kind = f"{facts.mount.kind} on {facts.mount.point}"
    if facts.mount.kind == "tmpfs":
        yield Finding("arena's file system", kind)
    else:
        fix = f"snapshots belong in memory: set {ARENA_ENV} to a directory on tmpfs"
        yield Finding("arena's file system", f"{kind}, not tmpfs", "problem", fix)
    room = f"{facts.room:,} bytes"
    if facts.room < LEAST_ROOM_BYTES:
        yield Finding("arena's room", room, "problem", ENLARGE)
    elif facts.room < facts.memory_bytes * LEAST_ROOM_SHARE:
        fix = f"enough for a state of about a quarter of that; for more {ENLARGE}"
        yield Finding("arena's room", f"{room} of {facts.memory_bytes:,} bytes of memory", "note", fix)
    else:
        yield Finding("arena's room", room)


def _swap(facts: Facts) -> Finding:
    if facts.swap_bytes == 0:
        return Finding("swap", "off")
    value = f"on, {facts.swap_bytes:,} bytes"
    if "noswap" in facts.mount.options:
        return Finding("swap", f"{value}; not for the arena")
    fix = "snapshots may be swapped to disk, which is slow: swapoff -a, or mount the tmpfs with noswap (Linux 6.4)"
    return Finding("swap", value, "note", fix)


def _files(files: int) -> Finding:
    if files < LEAST_FILES:
        return Finding("open files", f"at most {files:,}", "note", f"ulimit -n {LEAST_FILES}, or more")
    return Finding("open files", f"at most {files:,}")


def _kernel(facts: Facts) -> Finding:
    if facts.populate:
        return Finding("kernel", f"{facts.kernel}, has MADV_POPULATE_WRITE")
    fix = "the first copy into each slot will be slow: Linux 5.14 or later"
    return Finding("kernel", f"{facts.kernel}, has no MADV_POPULATE_WRITE", "note", fix)


def _idle(idle: bool) -> Finding:
    if idle:
        return Finding("SCHED_IDLE", "may be set")
    fix = "HOLDFAST_PRIORITY=idle will mean nice 19 instead: allow sched_setscheduler (seccomp profile)"
    return Finding("SCHED_IDLE", "may not be set", "note", fix)


def _copies(streaming: bool) -> Finding:
    if streaming:
        return Finding("copies", "by streaming stores")
    fix = "they take up to 1.7 times as long: install a C compiler, and holdfast again"
    return Finding("copies", "by memmove", "note", fix)


def gather() -> Facts:
    """Look at this machine."""
    auto = describe_auto()
    isal = _loaded("libisal")
    arena = arena_base().absolute()
    parent = next(path for path in (arena, *arena.parents) if path.exists())
    status = os.statvfs(parent)
    mounts = [
        Mount(Path(each.mountpoint), each.fstype, frozenset(each.opts.split(",")))
        for each in psutil.disk_partitions(all=True)
    ]
    return Facts(
        python=platform.python_version(),
        packages={name: _version(name) for name in ("torch", "megatron-core", "pyeclib", "grpcio")},
        auto=auto,
        unusable={name: why_unusable(name) for name in BACKENDS if name != "auto"},
        isal=isal,
        arena=arena,
        parent=parent,
        writable=os.access(parent, os.W_OK | os.X_OK),
        mount=mount_of(parent.resolve(), mounts),
        room=status.f_bavail * status.f_frsize,
        memory_bytes=psutil.virtual_memory().total,
        swap_bytes=psutil.swap_memory().total,
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        kernel=platform.release(),
        populate=_can_populate(),
        idle=_can_be_idle(),
        streaming=streams(),
    )


def why_unusable(backend: str) -> str:
    """Why this backend of the erasure codes cannot be used here; empty if it can."""
    try:
        choose_codec(4, 2, backend)
    except ValueError as error:
        return str(error)
    return ""


def mount_of(path: Path, mounts: Iterable[Mount]) -> Mount:
    """Where the absolute `path` lies: the deepest mount that holds it, and of several at one point the last."""
    holding = [mount for mount in mounts if path.is_relative_to(mount.point)]
    return max(reversed(holding), key=lambda mount: len(mount.point.parts))


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _loaded(prefix: str) -> str | None:
    """The path of a shared library that this process has loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        _, slash, path = line.partition("/")
        if Path(path).name.startswith(prefix):
            return slash + path
    return None


def _can_populate() -> bool:
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            page.madvise(MADV_POPULATE_WRITE)
        except OSError:
            return False
    return True


def _can_be_idle() -> bool:
    """Tried by a thread that then ends: Linux schedules threads, not processes."""
    done = []

    def attempt() -> None:
        try:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        except OSError:
            return
        done.append(True)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return bool(done)


def show(console: Console, findings: Iterable[Finding]) -> None:
    """Print them."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        mark, style = MARKS[finding.verdict]
        table.add_row(Text(mark, style), Text(finding.name), Text(finding.value))
        if finding.fix:
            table.add_row("", "", Text(f"→ {finding.fix}", style))
    console.print(table)
