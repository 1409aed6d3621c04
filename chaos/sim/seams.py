"""Where the simulation is put under the production code, for as long as a block runs: names in its modules that are
replaced, and points that are observed. Threads and clock of SMPs are handed to them (`chaos.sim.threads.SimSystem`).

Nothing of holdfast's own is replaced but what stands behind an interface: state, capture, copy engine and collectives
of a trainer (`chaos.sim.trainer`), and how an SMP's process is started.
"""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import queue
import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import holdfast.smp_daemon.service  # noqa: F401  # so that every module to patch is there
from holdfast.chaos.sim import threads, trainer
from holdfast.chaos.sim.memory import Disk, MemoryMmap, MemoryOs, MemoryPath, MemoryShutil
from holdfast.chaos.sim.network import SimSocket
from holdfast.chaos.sim.rpc import SimGrpc
from holdfast.chaos.sim.scheduler import active
from holdfast.chaos.sim.tasks import SimProcess
from holdfast.smp_daemon.shared import failpoints
from holdfast.smp_daemon.shared.credentials import Credentials
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.records import PART, digest_units, kind_of
from holdfast.smp_daemon.storage.arena import SHARD_SUFFIX, Arena
from holdfast.snapshot.copy.pace import Pace
from holdfast.snapshot.protecting import Protecting

THREADING = SimpleNamespace(
    Thread=threads.Thread,
    Lock=threads.Lock,
    RLock=threads.RLock,
    Condition=threads.Condition,
    Event=threads.Event,
)
TIME = SimpleNamespace(monotonic=threads.monotonic, sleep=threads.sleep)
QUEUE = SimpleNamespace(SimpleQueue=threads.SimpleQueue, Empty=queue.Empty)
SOCKET = SimpleNamespace(
    socket=SimSocket,
    **{
        name: getattr(socket, name)
        for name in ("AF_INET", "AF_UNIX", "SOCK_STREAM", "IPPROTO_TCP", "TCP_NODELAY", "SOL_SOCKET", "SO_REUSEADDR")
    },
    SHUT_RDWR=socket.SHUT_RDWR,
)

PAGE_BYTES = 64
"""Headers of slot files are padded to this, so that a shard is a few hundred bytes."""

REPLACED = {
    "local": ("os",),
    "net.listener": ("socket",),
    "recovery.inventories": ("ThreadPoolExecutor",),
    "shared.board": ("os", "mmap"),
    "shared.client": ("threading", "os", "mmap"),
    "shared.records": ("os",),
    "shared.transport": ("threading", "time", "socket"),
    "storage.arena": ("os",),
    "storage.pool": ("os", "mmap"),
}
"""Which names of which modules of `smp_daemon` are replaced by the simulation's."""


class Hooks:
    """What the run at hand listens to. `chaos.sim.world` fills it in."""

    failpoint: Callable[[str, int], None]
    start_smp: Callable[[MemoryPath], None]
    agreement: Callable[[], Any]
    captured: Callable[[Any, str, bytes], None]
    committed: Callable[[MemoryPath, str, Any], None]
    given_up: Callable[[Any, str], None]
    promised: Callable[[Any], None]
    unit_bytes: Callable[[int, int], int]
    is_due: Callable[[str], bool]
    locks: dict[str, SimProcess]


class _ObservedProtecting(Protecting):
    """Says what the job is promised as soon as it knows: what is freed from then on is judged by it."""

    def settle(self) -> None:
        super().settle()
        Hooks.promised(self.ledger.sure)


def failpoint(point: str, step: int = -1) -> None:
    """`smp_daemon.shared.failpoints.failpoint`: an await with a name, at which a crash may be planned."""
    active().point()
    Hooks.failpoint(point, step)


class SimFcntl:
    """`fcntl`, for the lock of an arena: a simulated process lets go of it when it dies."""

    LOCK_EX, LOCK_NB = fcntl.LOCK_EX, fcntl.LOCK_NB

    @staticmethod
    def flock(file: Any, how: int) -> None:
        process = active().current.process
        owner = Hooks.locks.get(file.name)
        if owner is not None and owner.alive and owner is not process:
            raise BlockingIOError("the lock is held")
        Hooks.locks[file.name] = process


class SimOs(MemoryOs):
    """`os`, with simulated processes' ids, and arenas in memory."""

    O_CLOEXEC, O_CREAT, O_EXCL, O_NOFOLLOW, O_RDWR = os.O_CLOEXEC, os.O_CREAT, os.O_EXCL, os.O_NOFOLLOW, os.O_RDWR
    O_RDONLY, O_NONBLOCK = os.O_RDONLY, os.O_NONBLOCK
    getuid = staticmethod(os.getuid)

    def getpid(self) -> int:
        return id(active().current.process)

    def pidfd_open(self, pid: int) -> SimProcess:
        for process in Hooks.locks.values():
            if id(process) == pid and process.alive:
                return process
        raise ProcessLookupError("no such process")

    def close(self, fd: object) -> None:
        """Descriptors are the files and processes themselves."""


class SimPsutil:
    """`psutil`, for when the process of an SMP was made."""

    class Process:
        """Of the calling process."""

        def create_time(self) -> float:
            return 0.0


def _await_end(process: SimProcess, deadline_s: float) -> bool:
    """`smp_daemon.shared.pidfds.await_end` of a simulated process."""
    ended = threads.Event()
    process.on_death[id(ended)] = ended.set
    ended.wait(deadline_s)
    process.on_death.pop(id(ended), None)
    return not process.alive


def _record_point(path: MemoryPath, data: Any, when: str) -> None:
    """`records._failpoint`: the oracle learns of a record once it counts; who dies in the middle leaves half of it."""
    kind = kind_of(path.name)
    point = f"record.{kind}.{when}"
    if when == "done":
        Hooks.committed(path, kind, data)
    if when != "part" or not Hooks.is_due(point):
        failpoint(point)
        return
    part = path.with_name(path.name + PART)
    whole = part.read_text()
    part.write_text('{"cut')
    failpoint(point)
    part.write_text(whole)  # it lives on


def _release(self: Arena, keep: Collection[SnapshotId], before: SnapshotId, held: Collection[SnapshotId] = ()) -> None:
    """`Arena.release`, which is told what the trainers keep: whatever of a shard it frees, they gave up."""
    for pool in self.pools():
        if pool.suffix == SHARD_SUFFIX:
            for slot in pool.outdated({*keep, *held}, before):
                Hooks.given_up(slot.snapshot, pool.name)
    release(self, keep, before, frozenset(held))


release = Arena.release


def _digest_units(data: memoryview, unit_bytes: int) -> tuple[int, ...]:
    failpoint("seal.digest")
    return digest_units(data, unit_bytes)


def _start_smp(job: str, node: str, arena: MemoryPath, **options: object) -> None:
    Hooks.start_smp(arena)


@contextmanager
def _without_collector() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


@contextmanager
def installed() -> Iterator[None]:
    """Run holdfast on simulated threads, time, sockets and files, without its log.

    The collector of garbage does not run by itself in the block: it would look again and again at all that was there
    before. `chaos.sim.run.simulate` calls it.
    """
    system = SimOs()
    replacements: dict[str, Any] = {
        "threading": THREADING,
        "time": TIME,
        "queue": QUEUE,
        "socket": SOCKET,
        "ThreadPoolExecutor": threads.ThreadPoolExecutor,
        "os": system,
        "mmap": MemoryMmap,
    }
    targets: dict[str, Any] = {
        f"holdfast.smp_daemon.{module}.{name}": replacements[name]
        for module, names in REPLACED.items()
        for name in names
    }
    targets |= {
        "holdfast.smp_daemon.net.peers.grpc": SimGrpc,
        "holdfast.smp_daemon.storage.arena.fcntl": SimFcntl,
        "holdfast.smp_daemon.storage.arena.Arena.release": _release,
        "holdfast.smp_daemon.storage.pool.SHMEM_HUGE": MemoryPath(Disk(), "/sys", "shmem_enabled"),
        "holdfast.smp_daemon.storage.arena.shutil": MemoryShutil,
        "holdfast.smp_daemon.service.psutil": SimPsutil,
        "holdfast.smp_daemon.shared.transport.Path": MemoryPath,
        "holdfast.smp_daemon.shared.transport.current": Credentials,
        "holdfast.smp_daemon.node.core.current": Credentials,
        "holdfast.smp_daemon.net.peers.current": Credentials,
        "holdfast.smp_daemon.net.authenticator.is_of_this_user": lambda sock: True,
        "holdfast.smp_daemon.shared.client.await_end": _await_end,
        "holdfast.smp_daemon.shared.slotfile.PAGE_BYTES": PAGE_BYTES,
        "holdfast.smp_daemon.storage.store.digest_units": _digest_units,
        "holdfast.smp_daemon.shared.records._failpoint": _record_point,
        "holdfast.snapshot.resume.arrange.choose_unit_bytes": lambda longest, data: Hooks.unit_bytes(longest, data),
        "holdfast.snapshot.connect.start_smp": _start_smp,
        "holdfast.snapshot.step.copier.threading": THREADING,
        "holdfast.snapshot.step.copier.queue": QUEUE,
        "holdfast.snapshot.resume.loading.ThreadPoolExecutor": threads.ThreadPoolExecutor,
        "holdfast.snapshot.copy.pace.threading": THREADING,
        "holdfast.snapshot.resume.restore.time": TIME,
        "holdfast.snapshot.resume.restore._load": trainer.load,
        "holdfast.snapshot.session.time": TIME,
        "holdfast.snapshot.protecting.time": TIME,
        "holdfast.snapshot.protecting.Pace": lambda: Pace(threads.monotonic, threads.Event.wait),  # type: ignore[arg-type]
        "holdfast.snapshot.session.Protecting": _ObservedProtecting,
        "holdfast.snapshot.session.Capture": trainer.SimCapture,
        "holdfast.snapshot.session.Boundary": trainer.SimBoundary,
        "holdfast.snapshot.rank.choose_engine": lambda devices: trainer.SimEngine(),
        "holdfast.snapshot.rank.default_agreement": lambda: Hooks.agreement(),
        "holdfast.chaos.sim.trainer.captured": lambda *what: Hooks.captured(*what),
    }
    with ExitStack() as stack:
        stack.enter_context(_without_collector())
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable()
        stack.callback(failpoints.observe, None)
        failpoints.observe(failpoint)
        for target, new in targets.items():
            stack.enter_context(patch(target, new))
        yield
