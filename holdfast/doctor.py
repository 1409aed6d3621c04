"""``holdfast doctor``: whether this machine is fit for holdfast.

`gather` looks at the machine and changes nothing; `holdfast.checks.examine`, which is pure, judges.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import resource
import socket
import stat
import threading
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
from rich.console import Console

from holdfast.checks import Facts, Finding, Mount, NetworkCard, Secrets, Verdict
from holdfast.ec import choose_codec, describe_auto
from holdfast.ec.backends import BACKENDS
from holdfast.report import Report
from holdfast.smp_daemon.shared.addresses import LOOPBACK
from holdfast.smp_daemon.shared.credentials import TLS_ENVS, TOKEN_ENV, TOKEN_FILE_ENV, check_certificates, load
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.memory import cgroup_memory, text_of
from holdfast.smp_daemon.shared.paths import arena_base
from holdfast.smp_daemon.shared.plain import Address
from holdfast.smp_daemon.shared.populate import populate
from holdfast.smp_daemon.shared.settings import HOST, HTTP, INSECURE, TLS_NAME
from holdfast.smp_daemon.shared.transport import is_compiled
from holdfast.smp_daemon.storage.pool import SHMEM_HUGE
from holdfast.snapshot.copy.runs import streams

MARKS: dict[Verdict, tuple[str, str]] = {"ok": ("✓", ""), "note": ("!", "yellow"), "problem": ("✗", "bold red")}
SYS = Path("/sys")
STA_UNSYNC = 0x40
MEGABIT_BYTES = 125_000
UNKNOWN_SPEED = 65_535
"""What a driver that does not know its speed may report, in Mbit/s."""


def gather() -> Facts:
    """Look at this machine."""
    auto = describe_auto()
    isal = _loaded("libisal")
    arena = arena_base().absolute()
    parent = next(path for path in (arena, *arena.parents) if path.exists())
    status = os.statvfs(parent)
    limit, used = cgroup_memory(text_of(Path("/proc/self/cgroup")))
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    host = HOST.text()
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
        cgroup_bytes=limit,
        cgroup_used=used,
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        gpu=Path("/dev/nvidiactl").exists(),
        shmem_huge=chosen(text_of(SHMEM_HUGE)),
        numa=numa_memory(),
        swap_bytes=psutil.swap_memory().total,
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        kernel=platform.release(),
        populate=_can_populate(),
        idle=_can_be_idle(),
        streaming=streams(),
        receives=is_compiled(),
        host=host,
        insecure=INSECURE.value(),
        bindings=_bindings(host, HTTP.value()),
        cards=network_cards(),
        clock=text_of(SYS / "devices/system/clocksource/clocksource0/current_clocksource"),
        synchronised=_is_synchronised(),
        secrets=secrets_of(os.environ),
    )


def chosen(text: str) -> str:
    """The word in brackets, which marks the active choice in a sysfs file."""
    return text.partition("[")[2].partition("]")[0]


def numa_memory(root: Path = SYS) -> dict[int, int]:
    """Bytes of memory on each NUMA node that has any."""
    found = {}
    for path in sorted((root / "devices/system/node").glob("node[0-9]*")):
        total = next((line.split()[3] for line in text_of(path / "meminfo").splitlines() if "MemTotal:" in line), "0")
        if int(total):
            found[int(path.name.removeprefix("node"))] = int(total) * 1024
    return found


def secrets_of(environment: Mapping[str, str]) -> Secrets:
    """Describe the credentials that the variables name. The contents of the files are not kept."""
    unreadable: dict[str, str] = {}
    source, length, mode = "", 0, None
    if file := environment.get(TOKEN_FILE_ENV):
        source = f"{TOKEN_FILE_ENV}={file}"
        try:
            mode = stat.S_IMODE(Path(file).stat().st_mode)
            length = len(Path(file).read_bytes().strip())
        except OSError as error:
            unreadable[TOKEN_FILE_ENV] = f"{file}: {error.strerror}"
    elif token := environment.get(TOKEN_ENV, "").strip():
        source, length = TOKEN_ENV, len(token.encode())
    certificates = {name: environment[name] for name in TLS_ENVS if environment.get(name)}
    for name, path in certificates.items():
        try:
            Path(path).read_bytes()
        except OSError as error:
            unreadable[name] = f"{path}: {error.strerror}"
    refused, expires_s = "", None
    if len(certificates) == len(TLS_ENVS) and not unreadable.keys() & certificates.keys():
        chosen_name = {name: environment[name] for name in (TLS_NAME.variable,) if name in environment}
        try:
            tls = load(certificates | chosen_name).tls
            assert tls is not None
            expires_s = check_certificates(tls).timestamp() - time.time()
        except ConfigError as error:
            refused = str(error)
    return Secrets(source, length, mode, unreadable, frozenset(certificates), refused, expires_s)


def why_not_bound(host: str, port: int) -> str:
    """Why an address cannot be listened on; empty if it can."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
    except OSError as error:
        return str(error.strerror or error)
    return ""


def _bindings(host: str, http: Address | None) -> dict[str, str]:
    wanted = dict.fromkeys([(LOOPBACK, 0), *((each.strip(), 0) for each in host.split(","))])
    if http is not None and http[1]:
        wanted[http] = None
    return {f"{address}:{port}": why_not_bound(address, port) for address, port in wanted}


def network_cards() -> tuple[NetworkCard, ...]:
    """The network cards that are up and have an IPv4 address, without loopback."""
    states = psutil.net_if_stats()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        own = tuple(each.address for each in addresses if each.family == socket.AF_INET)
        state = states.get(name)
        if own and state is not None and state.isup and "loopback" not in state.flags.split(","):
            known = 0 < state.speed < UNKNOWN_SPEED
            found.append(NetworkCard(name, own, state.speed * MEGABIT_BYTES if known else 0.0))
    return tuple(found)


def _is_synchronised() -> bool | None:
    """Whether the kernel says that the wall clock is synchronised; None: it does not say."""
    timex = (ctypes.c_char * 512)()  # struct timex; `status` follows five longs, the first a padded int
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(timex)
    except (OSError, AttributeError):
        return None
    if state < 0:
        return None
    status = ctypes.c_int.from_buffer(timex, 5 * ctypes.sizeof(ctypes.c_long)).value
    return not status & STA_UNSYNC


def why_unusable(backend: str) -> str:
    """Why this erasure code backend cannot be used here; empty if it can."""
    try:
        choose_codec(4, 2, backend)
    except ValueError as error:
        return str(error)
    return ""


def mount_of(path: Path, mounts: Iterable[Mount]) -> Mount:
    """The mount of the absolute `path`: the deepest one, and of several at one point the last. In a chroot, whose root
    need not be one, it may be none that is listed."""
    holding = [mount for mount in mounts if path.is_relative_to(mount.point)]
    unlisted = Mount(Path("/"), "an unknown file system", frozenset())
    return max(reversed(holding), key=lambda mount: len(mount.point.parts), default=unlisted)


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _loaded(prefix: str) -> str | None:
    """Path of the loaded shared library whose name starts with `prefix`; None: not loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        _, slash, path = line.partition("/")
        if Path(path).name.startswith(prefix):
            return slash + path
    return None


def _can_populate() -> bool:
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            populate(page)
        except OSError:
            return False
    return True


def _can_be_idle() -> bool:
    """Try it in a thread that then ends: Linux sets the policy for threads, not processes."""
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
    """Print the findings."""
    rows, styles = [], []
    for finding in findings:
        mark, style = MARKS[finding.verdict]
        rows += [(f"{mark} {finding.check}", finding.found)] + [("", f"→ {finding.fix}")] * bool(finding.fix)
        styles += [style] * (1 + bool(finding.fix))
    console.print(Report(("", ""), rows, left=2, styles=styles), crop=False)
