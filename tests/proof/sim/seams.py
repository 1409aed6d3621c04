"""What the simulation replaces in the production code while a block runs, and the failpoints that it observes.

The machine is not replaced but handed over (`sim.system`). Replaced are names of holdfast's own: state, capture,
copy engine and collectives of a trainer (`sim.trainer`), the start of an SMP's process, sizes that would make
state large, and functions that the oracle observes.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch

import holdfast.smp_daemon.service  # noqa: F401  # so that every module to patch is there
from holdfast.smp_daemon.net.links import Links
from holdfast.smp_daemon.persist.persister import Persister
from holdfast.smp_daemon.persist.reading import StoredShards
from holdfast.smp_daemon.recovery.fetch import Fetcher, UnitSource, WantedUnit
from holdfast.smp_daemon.shared import failpoints
from holdfast.smp_daemon.shared.budget import wipe
from holdfast.smp_daemon.shared.client import SmpConnection
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.messages import PeerRequest
from holdfast.smp_daemon.shared.owners import Owners, is_taken, snapshot_in
from holdfast.smp_daemon.shared.plain import decode_digested
from holdfast.smp_daemon.shared.records import PART, digest, digest_units, kind_of
from holdfast.smp_daemon.shared.sources import Address
from holdfast.smp_daemon.shared.spawn import start_smp
from holdfast.smp_daemon.shared.transport import Message
from holdfast.smp_daemon.storage.arena import SHARD_SUFFIX, Arena
from holdfast.smp_daemon.storage.pool import SlotMemory
from holdfast.snapshot.protecting import Protecting
from holdfast.snapshot.resume import restore
from holdfast.snapshot.step.boundary import Boundary
from holdfast.snapshot.step.orders import Due, SnapshotCopy
from tests.proof.sim import trainer
from tests.proof.sim.memory import Disk, MemoryPath
from tests.proof.sim.modules import Generators, ObservedCapture, SimScript, SteppingEngine
from tests.proof.sim.scheduler import active

PAGE_BYTES = 64
"""Headers of slot files are padded to this size, so that a shard takes a few hundred bytes."""


SLICE_S = 0.02
"""How long it takes to reserve one slice of a slot in the background, in simulated seconds."""

DEEPEST = 100_000
"""Recursion limit. Calls on a stack count together with those on the stacks that it was made from."""


class Hooks:
    """Callbacks of the current run. `sim.world` and `sim.faults` set them."""

    failpoint: Callable[[str, int], None]
    start_smp: Callable[[MemoryPath], None]
    connected: Callable[[float], None]
    answered: Callable[[str, float, float], None]
    agreement: Callable[[], Any]
    captured: Callable[[Any, str, Any], None]
    begun: Callable[[Any, str], None]
    goes_back: Callable[[Any], None]
    committed: Callable[[MemoryPath, str, Any], None]
    given_up: Callable[[Any, str], None]
    promised: Callable[[Any], None]
    wanted: Callable[[Any, bool], None]
    unit_bytes: Callable[[int, int], int]
    at_once: Callable[[int], bool]
    works: Callable[[str, int, bool], None]
    fetched: Callable[[int, Callable[[], None]], None]
    slices: Callable[[int], Iterable[tuple[int, int]]]
    is_due: Callable[[str], bool]
    enters: Callable[[], None]
    stored: Callable[[Any], None]


class _ObservedProtecting(Protecting):
    """Tells the oracle which snapshots are to be protected, and what the job is promised as soon as the job knows it:
    from then on, what is freed is judged by it."""

    def apply_reports(self) -> None:
        super().apply_reports()
        Hooks.promised(self.ledger)

    def take(self, due: Due, **options: Any) -> SnapshotCopy | None:
        Hooks.wanted(due.snapshot, due.encode)
        return super().take(due, **options)


def failpoint(point: str, step: int = -1) -> None:
    """`smp_daemon.shared.failpoints.failpoint` as a named await, at which a crash may be planned."""
    if point == "reserve.slice":
        active().sleep(SLICE_S)
    active().point()
    Hooks.failpoint(point, step)


def _record_point(path: MemoryPath, content: bytes, when: str, step: int) -> None:
    """`records._failpoint`. Tells the oracle of a record once it counts; a process that dies in the middle of writing
    one leaves half of it."""
    kind = kind_of(path.name)
    point = f"record.{kind}.{when}"
    if when == "done":
        Hooks.committed(path, kind, decode_digested(content))
    if when != "part" or not Hooks.is_due(point):
        failpoint(point)
        return
    part = path.with_name(path.name + PART)
    whole = part.read_text()
    part.write_bytes(b'{"cut')
    failpoint(point)
    part.write_bytes(whole.encode())  # the process survived


def _release(
    self: Arena,
    keep: Collection[SnapshotId],
    before: SnapshotId,
    with_parity: Collection[SnapshotId] | None = None,
) -> None:
    """`Arena.release`. It is told what the trainers keep, so they gave up every slot of a shard that it frees."""
    for pool in self.pools():
        if pool.suffix == SHARD_SUFFIX:
            for slot in pool.outdated(keep, before):
                Hooks.given_up(slot.snapshot, pool.name)
    release(self, keep, before, with_parity)


release = Arena.release


def _change(self: Owners, file: str, old: str, new: str, **options: Any) -> bool:
    """`Owners.change`, with which others may be faster. A trainer takes a slot with a snapshot only if the trainers
    have given that up."""
    active().point()
    changed = change(self, file, old, new, **options)
    if changed and is_taken(new) and (snapshot := snapshot_in(old)) is not None:
        Hooks.given_up(snapshot, file.rsplit(".", 2)[0])
    return changed


change = Owners.change


def _digest_units(data: memoryview, unit_bytes: int) -> tuple[int, ...]:
    Hooks.works("digest", data.nbytes, False)
    failpoint("seal.digest")
    return digest_units(data, unit_bytes)


def _checked_digest(unit: memoryview) -> int:
    Hooks.works("digest", unit.nbytes, False)
    return digest(unit)


def _wipe(view: memoryview) -> None:
    Hooks.works("wipe", view.nbytes, False)
    wipe(view)


def _reserve(self: SlotMemory, start: int, count: int) -> None:
    """`SlotMemory.reserve`. What is small is reserved while others wait."""
    Hooks.works("populate", count, Hooks.at_once(count))
    reserve(self, start, count)


reserve = SlotMemory.reserve


def _ask(self: SmpConnection, message: Any, deadline_s: float) -> Message:
    """`SmpConnection._ask`, timed."""
    began_s = active().now
    try:
        return ask(self, message, deadline_s)
    finally:
        stream = self._stream
        if not active().unwinding and (stream is None or stream.goes_on is None):
            Hooks.answered(type(message).__name__, began_s, deadline_s)


ask = SmpConnection._ask


def _send(self: Links, address: Address, message: PeerRequest, payload: memoryview | None = None) -> None:
    """`Links.send`: of a series of units, the others take their time, too."""
    if payload is not None and active().costs is not None:
        self.connect(address, message.job)
        sock: Any = self._streams[address]._sock
        with suppress(OSError):  # the connection ends meanwhile, as the sender is about to notice
            sock.send_series(payload.nbytes)
    send(self, address, message, payload)


send = Links.send


def _get(self: UnitSource, unit: WantedUnit, *arguments: Any) -> int:
    """`Fetcher.get` and `StoredShards.get`: of a series of units, the others take their time, too."""
    found = GETS[type(self)](self, unit, *arguments)
    if active().current.name == "fetch":
        Hooks.fetched(unit.out.nbytes, self._counters.moved if isinstance(self, Fetcher) else lambda: None)
    return found


GETS: dict[type[UnitSource], Callable[..., int]] = {Fetcher: Fetcher.get, StoredShards: StoredShards.get}


def _start_smp(job: str, node: str, arena: MemoryPath, **options: Any) -> None:
    """`spawn.start_smp`, or a start that takes no time, for which no process waits for another."""
    if active().costs is None:
        Hooks.start_smp(arena)
    else:
        began_s = active().now
        try:
            start_smp(job, node, arena, **options)  # type: ignore[arg-type]  # a `MemoryPath`
        finally:
            if not active().unwinding:
                Hooks.connected(began_s)


load = vars(restore)["load"]


def _load(attempt: Any, agreement: Any, adapter: Any, engine: Any) -> Any:
    """`restore.load`, or `trainer.load` for the state of a few bytes."""
    return (trainer.load if isinstance(adapter, trainer.SimAdapter) else load)(attempt, agreement, adapter, engine)


def _repair_parity(client: Any, plan: Any, *arguments: Any) -> Any:
    """`restore.repair_parity`: the trainers have agreed which snapshot to go back to, and want its parity."""
    Hooks.goes_back(plan.snapshot)
    return repair_parity(client, plan, *arguments)


repair_parity = restore.repair_parity


def _reach_of(*what: Any) -> Any:
    """`restore.reach_of`: the trainers know what the SMPs hold, and decide what to go on with."""
    Hooks.enters()
    return reach_of(*what)


reach_of = vars(restore)["reach_of"]


def _persisted(self: Persister, snapshot: SnapshotId, stored: int) -> None:
    """`Persister._done`: an SMP has seen that a snapshot is complete on storage."""
    Hooks.stored(snapshot)
    persisted(self, snapshot, stored)


persisted = Persister._done


def _capture(adapter: Any, *arguments: Any) -> Any:
    """`Capture`, observed by the oracle, or `trainer.SimCapture` for the state of a few bytes."""
    if isinstance(adapter, trainer.SimAdapter):
        return trainer.SimCapture(adapter, *arguments)
    capture = ObservedCapture(adapter, *arguments)
    capture.on_begin = Hooks.begun
    return capture


def _boundary(optimizers: Any, *arguments: Any) -> Any:
    """`Boundary`, or `trainer.SimBoundary` if there are no optimizers."""
    return Boundary(optimizers, *arguments) if optimizers else trainer.SimBoundary()


def _is_scripts_frame(frame: FrameType) -> bool:
    """`variables.is_users_frame`: the script of one trainer is the user's, and the simulation around all of them, whose
    variables hold the other scripts, is not."""
    return frame.f_globals.get("__name__") == SimScript.__module__


@contextmanager
def _without_collector() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


@contextmanager
def _on_one_core() -> Iterator[None]:
    """Let torch compute on the calling thread only: the modules are tiny, and helper threads spin while they wait."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _deep() -> Iterator[None]:
    """Raise the recursion limit. A new stack counts its calls on top of those of the stack that it was made from, which
    did the same: in a large job they add up."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, DEEPEST))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


@contextmanager
def installed() -> Iterator[None]:
    """Run holdfast on simulated threads, time, sockets and files, without its log.

    The garbage collector does not run by itself in the block: it would examine again and again everything that existed
    before. `sim.run.play` runs it now and then.
    """
    replaced: dict[str, Any] = {
        "holdfast.smp_daemon.storage.arena.Arena.release": _release,
        "holdfast.smp_daemon.shared.owners.Owners.change": _change,
        "holdfast.smp_daemon.storage.pool.SHMEM_HUGE": MemoryPath(Disk(), "/sys", "shmem_enabled"),
        "holdfast.smp_daemon.shared.slotfile.PAGE_BYTES": PAGE_BYTES,
        "holdfast.smp_daemon.storage.store.digest_units": _digest_units,
        "holdfast.smp_daemon.shared.belief.digest": _checked_digest,
        "holdfast.smp_daemon.storage.pool.wipe": _wipe,
        "holdfast.smp_daemon.shared.budget.wipe": _wipe,
        "holdfast.smp_daemon.storage.pool.SlotMemory.reserve": _reserve,
        "holdfast.smp_daemon.shared.records._failpoint": _record_point,
        "holdfast.snapshot.resume.arrange.choose_unit_bytes": lambda longest, data: Hooks.unit_bytes(longest, data),
        "holdfast.smp_daemon.storage.arena.is_at_once": lambda length: Hooks.at_once(length),
        "holdfast.snapshot.resume.reserve.is_at_once": lambda length: Hooks.at_once(length),
        "holdfast.smp_daemon.storage.reserver.slices": lambda length: Hooks.slices(length),
        "holdfast.smp_daemon.shared.client.SmpConnection._ask": _ask,
        "holdfast.smp_daemon.net.links.Links.send": _send,
        "holdfast.smp_daemon.recovery.fetch.Fetcher.get": _get,
        "holdfast.smp_daemon.persist.reading.StoredShards.get": _get,
        "holdfast.snapshot.connect.start_smp": _start_smp,
        "holdfast.snapshot.resume.restore.load": _load,
        "holdfast.snapshot.resume.restore.reach_of": _reach_of,
        "holdfast.smp_daemon.persist.persister.Persister._done": _persisted,
        "holdfast.snapshot.resume.restore.repair_parity": _repair_parity,
        "holdfast.snapshot.hook.Protecting": _ObservedProtecting,
        "holdfast.snapshot.hook.Capture": _capture,
        "holdfast.snapshot.loop.Boundary": _boundary,
        "holdfast.snapshot.script.variables.is_users_frame": _is_scripts_frame,
        "holdfast.snapshot.rank.DeviceEngines": lambda devices: SteppingEngine() if devices else trainer.SimEngine(),
        "holdfast.snapshot.rank.default_agreement": lambda: Hooks.agreement(),
        "tests.proof.sim.trainer.captured": lambda *what: Hooks.captured(*what),
    }
    with ExitStack() as stack:
        stack.enter_context(_without_collector())
        stack.enter_context(_on_one_core())
        stack.enter_context(_deep())
        stack.enter_context(Generators.kept())
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable()
        stack.callback(failpoints.observe, None)
        failpoints.observe(failpoint)
        for target, new in replaced.items():
            stack.enter_context(patch(target, new))
        yield
