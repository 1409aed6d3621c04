"""The judgement of `holdfast doctor`: turns facts into findings. Pure; `holdfast.doctor` gathers the facts."""

from __future__ import annotations

import ipaddress
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from holdfast.smp_daemon.shared.addresses import parse_hosts
from holdfast.smp_daemon.shared.credentials import MIN_TOKEN_BYTES, TLS_ENVS, TOKEN_FILE_ENV
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.paths import ARENA_ENV
from holdfast.smp_daemon.shared.quantities import duration

Verdict = Literal["ok", "note", "problem"]

LEAST_ROOM_BYTES = 1 << 30
LEAST_ROOM_SHARE = 0.25
"""Fraction of memory. A node needs room for three copies of the state of its ranks, and for parity."""

LEAST_FILES = 1024
FAST_CLOCKS = ("tsc", "arch_sys_counter", "kvm-clock", "hyperv_clocksource_tsc_page", "xen")

GET_ISAL = "pip install --force-reinstall pyeclib, or apt install libisal2"
ENLARGE = "mount -o remount,size=... /dev/shm; docker run --shm-size=...; Kubernetes: emptyDir medium Memory"
COMPILE = "apt install gcc, and pip install --force-reinstall --no-deps holdfast-train"
OWN_ADDRESSES = "export HOLDFAST_HOST=..., of this node, one for each network card: ip -brief addr"
MAKE_TOKEN = (
    "(umask 077; python -c 'import secrets; print(secrets.token_hex(32))' > ~/.holdfast-token); the same file on every "
    "node, and export HOLDFAST_TOKEN_FILE=~/.holdfast-token"
)

MAKE_CERTIFICATE = "make another one, as SECURITY.md says: Certificates"
SOON_S = 30 * 86400.0
"""A certificate that expires sooner is worth a note, in seconds."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        check: name of the check.
        found, needed: what the machine has and what it should have, in words.
        fix: the command or action that repairs it; empty if nothing needs repair.
    """

    check: str
    found: str
    needed: str = ""
    verdict: Verdict = "ok"
    fix: str = ""

    def to_json(self) -> dict[str, Any]:
        """As JSON. `ok` is false for problems only; a note is ok and still has a fix."""
        return {
            "check": self.check,
            "ok": self.verdict != "problem",
            "found": self.found,
            "needed": self.needed,
            "fix": self.fix,
        }


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system."""

    point: Path
    kind: str
    options: frozenset[str]

    def option(self, name: str) -> str:
        """The value of a mount option; empty if it is not set."""
        return next((each.partition("=")[2] for each in self.options if each.startswith(f"{name}=")), "")


@dataclass(frozen=True, slots=True)
class NetworkCard:
    """A network card that is up, with its IPv4 addresses and its rate in bytes per second; 0: unknown."""

    name: str
    addresses: tuple[str, ...]
    rate: float

    def __str__(self) -> str:
        return f"{self.name}, {self.rate * 8 / 1e9:g} Gbit/s" if self.rate else f"{self.name}, of unknown rate"


@dataclass(frozen=True, slots=True)
class Secrets:
    """The credentials with which this node proves to other nodes that it belongs to the job.

    Attributes:
        source: where the token comes from, such as ``HOLDFAST_TOKEN_FILE=/run/token``; empty if there is none.
        token_bytes: length of the token. `token_mode`: permissions of its file; None: it is not in a file.
        unreadable: why the token file or a certificate cannot be read, by the variable that names the file.
        tls: which of the three variables for certificates are set.
        refused: why other nodes would refuse the certificate; empty if they would not, or it cannot be read.
        expires_s: in how many seconds it expires; None: unknown.
    """

    source: str = ""
    token_bytes: int = 0
    token_mode: int | None = None
    unreadable: dict[str, str] = field(default_factory=dict)
    tls: frozenset[str] = frozenset()
    refused: str = ""
    expires_s: float | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What `holdfast.doctor` saw on a machine.

    Attributes:
        packages: version of each package; None: not installed.
        auto: the backend that ``"auto"`` picks, and why it is not the fast one; empty if it is.
        unusable: for each backend, why it cannot be used; empty if it can.
        isal: path of the loaded ISA-L library; None: not loaded.
        arena: directory for arenas; it need not exist.
        parent: `arena` if it exists, else its nearest parent that does.
        room: free bytes there.
        cgroup_bytes, cgroup_used: memory limit and use of this process's control group; None: no limit.
        memlock_bytes: how much memory a process may lock; None: no limit.
        gpu: whether there is a CUDA device.
        shmem_huge: the kernel's setting for huge pages in shared memory.
        numa: bytes of memory on each NUMA node.
        populate: whether the kernel supports ``MADV_POPULATE_WRITE``.
        idle: whether a process may choose ``SCHED_IDLE``.
        streaming: whether copies are done by compiled code.
        receives: whether units are received and digested by compiled code.
        host, insecure: ``HOLDFAST_HOST`` and ``HOLDFAST_INSECURE``.
        bindings: by ``address:port``, why it cannot be listened on; empty if it can. Port 0: any port.
        cards: the network cards that are up, without loopback.
        clock: source of the monotonic clock. `synchronised`: whether the wall clock is synchronised; None: unknown.
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
    cgroup_bytes: int | None
    cgroup_used: int
    memlock_bytes: int | None
    gpu: bool
    shmem_huge: str
    numa: dict[int, int]
    swap_bytes: int
    files: int
    kernel: str
    populate: bool
    idle: bool
    streaming: bool
    receives: bool
    host: str
    insecure: bool
    bindings: dict[str, str]
    cards: tuple[NetworkCard, ...]
    clock: str
    synchronised: bool | None
    secrets: Secrets


def examine(facts: Facts) -> list[Finding]:
    """Judge all facts."""
    return [
        Finding("Python", facts.python, "3.11 or later"),
        *(_package(name, found) for name, found in facts.packages.items()),
        *_codes(facts),
        *_arena(facts),
        _cgroup(facts),
        _swap(facts),
        _huge(facts),
        _numa(facts),
        _memlock(facts),
        _files(facts.files),
        _kernel(facts),
        _idle(facts.idle),
        _copies(facts.streaming),
        _units(facts.receives),
        *_ports(facts),
        _clock(facts),
        _wall_clock(facts),
        *_token(facts),
    ]


def _unless(fine: bool, check: str, found: str, needed: str, fix: str, verdict: Verdict = "note") -> Finding:
    """A finding with its fix, unless all is well."""
    return Finding(check, found, needed) if fine else Finding(check, found, needed, verdict, fix)


def _package(name: str, found: str | None) -> Finding:
    if found is not None:
        return Finding(name, found, "installed")
    if name == "megatron-core":
        fix = "pip install 'holdfast-train[megatron]'"
        return Finding(name, "not installed", "for Megatron and the demo", "note", fix)
    if name == "pyeclib":
        return Finding(name, "not installed", "it carries ISA-L", "note", "pip install pyeclib")
    return Finding(name, "not installed", "installed", "problem", f"pip install {name}")


def _codes(facts: Facts) -> Iterator[Finding]:
    backend, reason = facts.auto
    needed = "the fast one"
    found = f"auto takes {backend}, {f'which is slow for m > 1: {reason}' if reason else 'the fast one'}"
    yield _unless(not reason, "erasure code", found, needed, GET_ISAL)
    for name, why in facts.unusable.items():
        where = f": {facts.isal}" if name == "isal" and facts.isal else ""
        yield _unless(not why, f"backend {name}", why or f"usable{where}", "usable, if it is to be chosen", GET_ISAL)


def _arena(facts: Facts) -> Iterator[Finding]:
    needed = "a directory that this user may write"
    found = f"{facts.arena}{'' if facts.writable else ': cannot be written'}"
    fix = f"chown {_user()} {shlex.quote(str(facts.parent))}, or set {ARENA_ENV}"
    yield _unless(facts.writable, "arena", found, needed, fix, "problem")
    is_tmpfs = facts.mount.kind == "tmpfs"
    found = f"{facts.mount.kind} on {facts.mount.point}{'' if is_tmpfs else ', not tmpfs'}"
    fix = f"snapshots belong in memory: set {ARENA_ENV} to a directory on tmpfs"
    yield _unless(is_tmpfs, "arena's file system", found, "tmpfs", fix, "problem")
    room = f"{facts.room:,} bytes"
    needed = f"{LEAST_ROOM_BYTES:,} bytes at least; 3.5 times the state of this node's ranks with 3 slots and 4+1"
    if facts.room < LEAST_ROOM_BYTES:
        yield Finding("arena's room", room, needed, "problem", ENLARGE)
    elif facts.room < facts.memory_bytes * LEAST_ROOM_SHARE:
        fix = f"enough for a state of about a quarter of that; for more {ENLARGE}"
        yield Finding("arena's room", f"{room} of {facts.memory_bytes:,} bytes of memory", needed, "note", fix)
    else:
        yield Finding("arena's room", room, needed)


def _cgroup(facts: Facts) -> Finding:
    check, needed = "cgroup memory", "no limit, or room for the arena beside the trainers: what lies on tmpfs counts"
    if facts.cgroup_bytes is None:
        return Finding(check, "no limit", needed)
    left = max(0, facts.cgroup_bytes - facts.cgroup_used)
    found = f"{left:,} of {facts.cgroup_bytes:,} bytes left"
    wanted = math.ceil((facts.cgroup_used + max(facts.room, LEAST_ROOM_BYTES)) / (1 << 30))
    fix = (
        f"docker update --memory {wanted}g --memory-swap {wanted}g CONTAINER; Kubernetes: resources.limits.memory: "
        f"{wanted}Gi; systemctl set-property UNIT MemoryMax={wanted}G; Slurm: --mem={wanted}G"
    )
    if left < LEAST_ROOM_BYTES:
        return Finding(check, found, needed, "problem", fix)
    if left < facts.room:
        return Finding(check, f"{found}, less than the arena's file system has", needed, "note", fix)
    return Finding(check, found, needed)


def _swap(facts: Facts) -> Finding:
    needed = "off, or not for the arena"
    if facts.swap_bytes == 0:
        return Finding("swap", "off", needed)
    found = f"on, {facts.swap_bytes:,} bytes"
    if "noswap" in facts.mount.options:
        return Finding("swap", f"{found}; not for the arena", needed)
    fix = f"swapoff -a, or mount -o remount,noswap {facts.mount.point} (Linux 6.4): snapshots may be swapped to disk"
    return Finding("swap", found, needed, "note", fix)


def _huge(facts: Facts) -> Finding:
    option = facts.mount.option("huge") or "never"
    found = f"shmem_enabled {facts.shmem_huge}, {facts.mount.point} huge={option}"
    asked = option == facts.shmem_huge == "advise"  # holdfast requests huge pages only if the kernel says advise
    given = facts.shmem_huge == "force" or (
        facts.shmem_huge != "deny" and (asked or option in ("always", "within_size"))
    )
    needed = "given to tmpfs: the first copy into a slot is faster, and a dead trainer's end is noticed sooner"
    fix = (
        f"mount -o remount,huge=advise {facts.mount.point} && "
        "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
    )
    return _unless(given, "huge pages", found, needed, fix)


def _numa(facts: Facts) -> Finding:
    check, needed = "NUMA", "one node, or slots spread over all: pages lie where the SMP touches them first"
    if len(facts.numa) < 2:
        return Finding(check, f"{len(facts.numa) or 1} node", needed)
    policy = facts.mount.option("mpol")
    found = f"{len(facts.numa)} nodes; pages of {facts.mount.point} are of {policy or 'the node where its SMP runs'}"
    nodes = ",".join(map(str, sorted(facts.numa)))
    fix = f"mount -o remount,mpol=interleave:{nodes} {facts.mount.point}; else some trainers copy to remote memory"
    return _unless(bool(policy), check, found, needed, fix)


def _memlock(facts: Facts) -> Finding:
    needed = "no limit, where slots are registered with CUDA or an RDMA card"
    found = "no limit" if facts.memlock_bytes is None else f"at most {facts.memlock_bytes:,} bytes"
    fine = facts.memlock_bytes is None or not facts.gpu
    fix = (
        "ulimit -l unlimited; docker run --ulimit memlock=-1; in a unit: LimitMEMLOCK=infinity; "
        "echo '* - memlock unlimited' > /etc/security/limits.d/holdfast.conf"
    )
    return _unless(fine, "locked memory", found if facts.gpu else f"{found}; no CUDA device here", needed, fix)


def _files(files: int) -> Finding:
    found, fix = f"at most {files:,}", f"ulimit -n {LEAST_FILES}, or more"
    return _unless(files >= LEAST_FILES, "open files", found, f"{LEAST_FILES:,} at least", fix)


def _kernel(facts: Facts) -> Finding:
    needed = "MADV_POPULATE_WRITE: Linux 5.14 or later"
    found = f"{facts.kernel}, has {'' if facts.populate else 'no '}MADV_POPULATE_WRITE"
    fix = "the first copy into each slot will be slow: Linux 5.14 or later"
    return _unless(facts.populate, "kernel", found, needed, fix)


def _idle(idle: bool) -> Finding:
    found = "may be set" if idle else "may not be set"
    fix = "HOLDFAST_PRIORITY=idle will mean nice 19 instead: allow sched_setscheduler (seccomp profile)"
    return _unless(idle, "SCHED_IDLE", found, "may be set, for HOLDFAST_PRIORITY=idle", fix)


def _copies(streaming: bool) -> Finding:
    needed = "by compiled code, on x86-64 with streaming stores"
    fix = f"they take up to 1.7 times as long: {COMPILE}"
    return _unless(streaming, "copies", needed if streaming else "by memmove", needed, fix)


def _units(receives: bool) -> Finding:
    needed = "received and digested by compiled code"
    found = needed if receives else "received and digested in Python"
    return _unless(receives, "units", found, needed, f"receiving them takes more processor time: {COMPILE}")


def _ports(facts: Facts) -> Iterator[Finding]:
    needed = "can be listened on"
    try:
        parse_hosts(facts.host)
    except ConfigError as error:
        yield Finding("HOLDFAST_HOST", str(error), "addresses of this node", "problem", OWN_ADDRESSES)
    for place, why in facts.bindings.items():
        address, _, port = place.rpartition(":")
        check = f"port {port} of {address}" if int(port) else f"address {address}"
        if not why:
            yield _card(facts.cards, address, Finding(check, "can be listened on", needed))
        elif int(port):
            fix = "HOLDFAST_HTTP=auto, or another; nothing, if this job's SMP is there already"
            yield Finding(check, why, needed, "note", fix)
        else:
            loopback = address.startswith("127.")
            fix = "ip link set lo up" if loopback else OWN_ADDRESSES
            yield Finding(check, why, needed, "problem", fix)


def _card(cards: Sequence[NetworkCard], address: str, finding: Finding) -> Finding:
    """The finding about an address, with the card that it belongs to, and whether another one is faster."""
    own = next((card for card in cards if address in card.addresses), None)
    if own is None:
        return finding
    found = f"{finding.found}: {own}"
    fastest = max(cards, key=lambda card: card.rate)
    if not own.rate or fastest.rate <= own.rate:
        return replace(finding, found=found)
    fast = ",".join(address for card in cards if card.rate == fastest.rate for address in card.addresses[:1])
    fix = f"export HOLDFAST_HOST={fast}, if other nodes reach it"
    return replace(finding, found=f"{found}; {fastest} is faster", verdict="note", fix=fix)


def _clock(facts: Facts) -> Finding:
    needed = f"one that is read without a system call: {', '.join(FAST_CLOCKS[:2])}, ..."
    fix = "echo tsc > /sys/devices/system/clocksource/clocksource0/current_clocksource"
    return _unless(facts.clock in ("", *FAST_CLOCKS), "monotonic clock", facts.clock or "unknown", needed, fix)


def _wall_clock(facts: Facts) -> Finding:
    needed = "for logs, and to tell which of two runs that never met began last; it may jump"
    said = {None: "cannot be told whether it is synchronised", True: "synchronised", False: "not synchronised"}
    fix = "timedatectl set-ntp true, or start chronyd"
    return _unless(facts.synchronised is not False, "wall clock", said[facts.synchronised], needed, fix)


def _token(facts: Facts) -> Iterator[Finding]:
    secrets = facts.secrets
    check, needed = "token", f"{MIN_TOKEN_BYTES} bytes or more that only this user can read, off loopback"
    away = not _is_loopback(facts.host)
    file = secrets.source.partition("=")[2]
    if TOKEN_FILE_ENV in secrets.unreadable:
        yield Finding(check, secrets.unreadable[TOKEN_FILE_ENV], needed, "problem", MAKE_TOKEN)
    elif secrets.source and secrets.token_bytes < MIN_TOKEN_BYTES:
        yield Finding(check, f"{secrets.token_bytes} bytes long", needed, "problem", MAKE_TOKEN)
    elif secrets.token_mode is not None and secrets.token_mode & 0o077:
        found = f"{secrets.source}: mode {secrets.token_mode:04o}, so others can read it"
        yield Finding(check, found, needed, "problem", f"chmod 600 {shlex.quote(file)}")
    elif secrets.source:
        yield Finding(check, secrets.source.partition("=")[0] + " is set", needed)
    elif away and not secrets.tls and not facts.insecure:
        yield Finding(check, f"none, and SMPs listen on {facts.host}", needed, "problem", MAKE_TOKEN)
    elif away and not secrets.tls:
        yield Finding(check, f"none, and SMPs listen on {facts.host}: HOLDFAST_INSECURE=1", needed, "note", MAKE_TOKEN)
    else:
        yield Finding(check, "none" if away else "none; on loopback there is no need", needed)
    yield _certificates(secrets)


def _certificates(secrets: Secrets) -> Finding:
    check, needed = "certificates", f"none, or all of {', '.join(TLS_ENVS)}"
    missing = [name for name in TLS_ENVS if name not in secrets.tls]
    bad = [f"{name}: {why}" for name, why in secrets.unreadable.items() if name in TLS_ENVS]
    if not secrets.tls:
        return Finding(check, "none", needed)
    if missing:
        fix = "; ".join(f"export {name}=/path/to/file.pem" for name in missing)
        return Finding(check, f"{', '.join(missing)} not set", needed, "problem", fix)
    if bad:
        names = [name for name in secrets.unreadable if name in TLS_ENVS]
        fix = "; ".join(f'chown {_user()} "${name}" && chmod 600 "${name}"' for name in names)
        return Finding(check, "; ".join(bad), needed, "problem", fix)
    if secrets.refused:
        return Finding(check, secrets.refused, "such that other nodes let this one in", "problem", MAKE_CERTIFICATE)
    if secrets.expires_s is None:
        return Finding(check, "all three can be read", needed)
    found = f"this node's is for the right name, of the right CA, and expires in {duration(secrets.expires_s)}"
    if secrets.expires_s < SOON_S:
        fix = f"{MAKE_CERTIFICATE}; an SMP reads it when it starts"
        return Finding(check, found, f"valid for {duration(SOON_S)} at least", "note", fix)
    return Finding(check, found, needed)


def _is_loopback(hosts: str) -> bool:
    try:
        return all(ipaddress.ip_address(host).is_loopback for host in parse_hosts(hosts))
    except ConfigError:
        return False


def _user() -> str:
    return "$(id -u)"
