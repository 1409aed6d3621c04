"""Interleavings of a trainer's threads and its SMP's, in one process: where each is held, and where it dies, is drawn
from a seed.

Everything that runs is real: hook, copier, clients, sockets, SMP. Their threads only stop on their way at *gates*: the
named points of the protocol, each message between a trainer and its SMP, each piece of a copy, each record that is
written. A thread that is held goes on when so many others have come to a gate, and after `HOLD_S` in any case.

A `Life` is one trainer process as far as its threads go. Its end is that of SIGKILL: its sockets break, and no thread
of it goes beyond its next gate.
"""

from __future__ import annotations

import queue
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum, auto
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from holdfast.smp_daemon.service import Smp
from holdfast.smp_daemon.shared.errors import StaleEpoch
from holdfast.smp_daemon.shared.limits import CALL_DEADLINE_S
from holdfast.smp_daemon.shared.records import digest_units, write_json
from holdfast.smp_daemon.shared.system import System
from holdfast.smp_daemon.shared.transport import Message, SocketStream, call, connect
from holdfast.snapshot.collective.agreement import Alone, Result, T, Values
from holdfast.snapshot.copy.engines import CpuEngine, SlotTensor, Transfer
from holdfast.snapshot.step.copier import CopyJob
from tests.deadlines import DEADLINE_S

HOLD_S = 0.001
"""A thread is held no longer, so that threads which wait for it without a gate go on."""

LONGEST_HOLD = 8
OWN_THREADS = "holdfast-"
"""How the names of a hook's threads begin."""

SMP_THREADS = ("accept", "connection", "protect", "regroup")

SMP = "smp"
"""The role that all threads of the SMPs share."""


class Killed(BaseException):
    """Ends a thread where it stands; nothing of holdfast catches it."""


class _State(Enum):
    ALIVE = auto()
    FROZEN = auto()
    DEAD = auto()


class Life:
    """One trainer process: it lives until the thread called `fate[0]` comes to its `fate[1]`-th gate, or `die`.

    A zombie is only frozen then: its training thread is gone, its copies stand still until `thaw`. Its sockets stay
    open, as those of a process that hangs.
    """

    def __init__(self, seed: str, fate: tuple[str, int] | None, *, zombie: bool = False) -> None:
        self.fate = fate
        self.arrivals: Counter[str] = Counter()
        self._seed = seed
        self._zombie = zombie
        self._state = _State.ALIVE
        self._changed = threading.Condition()
        self._chances: dict[str, tuple[random.Random, float]] = {}
        self._streams: list[SocketStream] = []
        self._queues: list[MortalQueue] = []
        self._jobs: list[CopyJob] = []
        self._threads: set[threading.Thread] = set()
        self._thawed = False

    @property
    def over(self) -> bool:
        """Whether its end has come."""
        return self._state is not _State.ALIVE

    @property
    def frozen(self) -> bool:
        """Whether it is a zombie."""
        return self._state is _State.FROZEN

    def gate(self) -> None:
        """A thread of this life comes by: it may be held. Raises `Killed` if the life is over."""
        role = threading.current_thread().name
        with self._changed:
            self._check(role)
            self._hold(role)
            self._check(role)

    def pause(self) -> None:
        """A thread of an SMP comes by: it may be held, and what it does may be what this life ends at."""
        with self._changed:
            self._hold(SMP)

    def wait_for(self, happened: Callable[[], bool]) -> None:
        """Block until it has, as `tell` says. Raises `Killed` if the life is over."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.over or happened(), DEADLINE_S):
                raise AssertionError(f"{threading.current_thread().name} waited for {DEADLINE_S:.0f} s")
            self._check(threading.current_thread().name)

    def tell(self) -> None:
        """Something happened that another thread may wait for."""
        with self._changed:
            self._changed.notify_all()

    def die(self) -> None:
        """The end, wherever its threads are."""
        with self._changed:
            self._end(_State.DEAD)

    def thaw(self) -> None:
        """What stood still goes on, to its end: it is long out of date."""
        with self._changed:
            self._thawed = True
            self._changed.notify_all()

    def bury(self) -> None:
        """See all of its threads end."""
        self.die()
        for thread in self._threads:
            thread.join(DEADLINE_S)
            if thread.is_alive():
                raise AssertionError(f"{thread.name} outlives its process")

    def own(self, part: SocketStream | MortalQueue | CopyJob | threading.Thread) -> None:
        """What breaks, or is woken, at the end."""
        with self._changed:
            match part:
                case SocketStream():
                    self._streams.append(part)
                case MortalQueue():
                    self._queues.append(part)
                case CopyJob():
                    self._jobs.append(part)
                case _:
                    self._threads.add(part)
            if self._state is _State.DEAD:
                self._end(_State.DEAD)

    def _hold(self, role: str) -> None:
        self.arrivals[role] += 1
        self._changed.notify_all()
        if self.fate == (role, self.arrivals[role]) and not self.over:
            self._end(_State.FROZEN if self._zombie else _State.DEAD)
        others = 0 if self.over else self._draw(role)
        if others:
            goal = self.arrivals.total() + others
            self._changed.wait_for(lambda: self.over or self.arrivals.total() >= goal, HOLD_S)

    def _draw(self, role: str) -> int:
        """How many others go first. Some roles of a life are slow, some never wait."""
        if role not in self._chances:
            source = random.Random(f"{self._seed} {role}")
            self._chances[role] = source, source.choice((0.0, 0.03, 0.2))
        source, chance = self._chances[role]
        return source.randint(1, LONGEST_HOLD) if source.random() < chance else 0

    def _check(self, role: str) -> None:
        if self._state is _State.FROZEN and role.startswith(OWN_THREADS):
            if not self._changed.wait_for(lambda: self._thawed or self._state is _State.DEAD, DEADLINE_S):
                raise AssertionError(f"{role} was never thawed")
            if self._thawed:
                return
        if self.over:
            raise Killed

    def _end(self, state: _State) -> None:
        if self._state is not _State.DEAD:
            self._state = state
        for job in self._jobs:
            # The training thread is woken at its fence, which lets go of what a copy that has not begun would read.
            if not job.sure.is_set() or not job.reading.is_set():
                job.abort(StaleEpoch("the trainer is gone"))
            job.free()
            job.done.set()
        if state is _State.DEAD:
            for stream in self._streams:
                stream.close()
            for each in self._queues:
                each.poison()
        self._changed.notify_all()


class MortalQueue:
    """`queue.SimpleQueue`, whose reader dies with its life."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        life.own(self)

    def put(self, job: CopyJob | None) -> None:
        if job is not None:
            self.life.own(job)
        self._queue.put(job)

    def get(self) -> CopyJob | None:
        _HERE.life = self.life
        self.life.own(threading.current_thread())
        job: CopyJob | type[Killed] | None = self._queue.get(timeout=DEADLINE_S)
        if isinstance(job, type):
            raise Killed
        self.life.gate()
        return job

    def poison(self) -> None:
        """Whoever reads it next dies."""
        self._queue.put(Killed)


class MortalEngine(CpuEngine):
    """Copies half a piece at a time, with a gate before each half."""

    def __init__(self) -> None:
        super().__init__()
        self._halves: dict[int, tuple[Sequence[SlotTensor], list[tuple[SlotTensor]]]] = {}

    def mark(self) -> Transfer:
        current_life().gate()
        return self

    def copy(self, pieces: Sequence[SlotTensor], slot: memoryview, pause: Callable[[int], None]) -> None:
        life = current_life()
        for half in self._halves_of(pieces):
            life.gate()
            super().copy(half, slot, pause)
        life.gate()

    def fence(self) -> None:
        current_life().gate()

    def finish(self) -> None:
        current_life().gate()

    def load(self, pieces: Sequence[SlotTensor], slot: memoryview) -> None:
        current_life().gate()
        super().load(pieces, slot)
        current_life().gate()

    def _halves_of(self, pieces: Sequence[SlotTensor]) -> list[tuple[SlotTensor]]:
        known = self._halves.get(id(pieces))
        if known is None:
            if len(self._halves) > 8:
                self._halves.clear()
            known = self._halves[id(pieces)] = pieces, [(half,) for piece in pieces for half in _halves(piece)]
        return known[1]


def _halves(piece: SlotTensor) -> Iterator[SlotTensor]:
    count = piece.tensor.numel()
    if count < 2 or not piece.is_plain:
        yield piece
        return
    flat = piece.tensor.detach().view(-1)
    first = count // 2 * flat.element_size()
    yield SlotTensor(flat[: count // 2], piece.offset, first)
    yield SlotTensor(flat[count // 2 :], piece.offset + first, piece.bytes - first)


class Circle:
    """The collectives of ranks that are threads of one life."""

    def __init__(self, life: Life, size: int) -> None:
        self.life = life
        self.size = size
        self._rounds: dict[int, dict[int, Any]] = {}

    def post(self, turn: int, rank: int, value: Any) -> None:
        self._rounds.setdefault(turn, {})[rank] = value
        self.life.tell()

    def collect(self, turn: int) -> list[Any]:
        """What every rank posted in that turn, in rank order. Blocks."""
        self.life.wait_for(lambda: len(self._rounds[turn]) == self.size)
        return [self._rounds[turn][rank] for rank in range(self.size)]


class Member:
    """`snapshot.collective.agreement.Agreement` of one thread of a `Circle`."""

    def __init__(self, circle: Circle, rank: int) -> None:
        self._circle = circle
        self.rank = rank
        self._turn = 0

    def gather(self, data: bytes, among: Sequence[int] | None = None) -> list[bytes]:
        everyone = self._circle.collect(self._post(data))
        return everyone if among is None else [everyone[rank] for rank in among]

    def tell(self, data: bytes, root: int) -> bytes:
        told: bytes = self._circle.collect(self._post(data))[root]
        return told

    def minimum(self, values: Values, among: Sequence[int] | None = None) -> Result:
        turn = self._post(list(values() if callable(values) else values))
        return lambda: [min(each) for each in zip(*self._circle.collect(turn), strict=True)]

    def patiently(self, work: Callable[[], T]) -> T:
        return work()

    def leave(self) -> None:
        """Nobody waits for long."""

    def meet(self, step: int) -> bool:
        return False

    def meet_at_end(self, deadline_s: float) -> bool:
        return False

    def close(self) -> None:
        """Nothing to give back."""

    def _post(self, value: Any) -> int:
        self._turn += 1
        self._circle.life.gate()
        self._circle.post(self._turn, self.rank, value)
        return self._turn


# ---------------------------------------------------------------------- where the gates stand


class _Here(threading.local):
    life: Life | None = None
    circle: Circle | None = None


_HERE = _Here()
_life: Life
_dead_arenas: set[Path] = set()


def current_life() -> Life:
    """Of the calling thread, if that is a hook's own; else the youngest."""
    return _HERE.life or _life


def begin_life(life: Life) -> None:
    """From now on threads belong to `life`, but for those that an older one made."""
    global _life
    _life = life


def join_circle(circle: Circle) -> None:
    """The calling thread trains as the rank of the number that its name ends with."""
    _HERE.circle = circle


def rank() -> int:
    """Of the calling thread: 0, unless its name is that of another coordinate."""
    name = threading.current_thread().name
    return int(name.removeprefix("dp")) if name.startswith("dp") else 0


@contextmanager
def gates() -> Iterator[list[BaseException]]:
    """Put the gates up, and collect what ends a thread that is neither killed nor caught."""
    begin_life(Life("nobody", None))
    bugs: list[BaseException] = []

    def note(failed: threading.ExceptHookArgs) -> None:
        error = failed.exc_value
        if error is not None and not isinstance(error, Killed):
            bugs.append(error)

    def reached(point: str, step: int = -1) -> None:
        current_life().gate()

    def smp_reached(point: str, step: int = -1) -> None:
        _life.pause()

    with ExitStack() as stack:
        for target, new in {
            "holdfast.snapshot.step.copier.failpoint": reached,
            "holdfast.snapshot.resume.restore.failpoint": reached,
            "holdfast.snapshot.hook.SnapshotHook.system": MortalSystem(),
            "holdfast.snapshot.copy.engines.CpuEngine": MortalEngine,
            "holdfast.snapshot.rank.default_agreement": lambda: (
                Member(_HERE.circle, rank()) if _HERE.circle else Alone()
            ),
            "holdfast.integrations.adapters.torch_native.TorchAdapter.coordinate": lambda self: f"dp{rank()}",
            # torch keeps these for a process, of which lives that are over, and the ranks of one, are others
            "holdfast.snapshot.state.steppers.register_optimizer_step_pre_hook": _hook_nobody,
            "holdfast.snapshot.state.steppers.register_optimizer_step_post_hook": _hook_nobody,
            "holdfast.smp_daemon.shared.client.call": _call,
            "holdfast.smp_daemon.shared.client.connect": _connect,
            "holdfast.smp_daemon.storage.store.failpoint": smp_reached,
            "holdfast.smp_daemon.coding.protect.failpoint": smp_reached,
            "holdfast.smp_daemon.recovery.rebuild.failpoint": smp_reached,
            "holdfast.smp_daemon.storage.store.digest_units": _digest_units,
            "holdfast.smp_daemon.storage.store.write_json": _write_json,
            "holdfast.smp_daemon.storage.arena.write_json": _write_json,
            "holdfast.smp_daemon.storage.pool.write_json": _write_json,
            "threading.excepthook": note,
        }.items():
            stack.enter_context(patch(target, new))
        yield bugs


class MortalSystem(System):
    """This machine, but that a queue of a life ends with it."""

    SimpleQueue: Any = staticmethod(lambda: MortalQueue(current_life()))


def _hook_nobody(hook: object) -> SimpleNamespace:
    return SimpleNamespace(remove=lambda: None)


def _call(stream: SocketStream, message: Message, payload: memoryview | None = None) -> tuple[Message, int]:
    life = current_life()
    life.gate()
    reply = call(stream, message, payload)
    life.gate()
    return reply


def _connect(address: Path, deadline_s: float = CALL_DEADLINE_S, *, system: System) -> SocketStream:
    stream = connect(address, deadline_s, system=system)
    current_life().own(stream)
    return stream


def _digest_units(data: memoryview, unit_bytes: int) -> tuple[int, ...]:
    _life.pause()
    return digest_units(data, unit_bytes)


def _write_json(path: Path, data: Any) -> None:
    _life.pause()
    if path.parent in _dead_arenas:
        raise Killed
    write_json(path, data)
    _life.pause()


def kill_smp(smp: Smp) -> None:
    """As SIGKILL would: it writes no further record, its sockets break. Its arena stays, and may be taken over."""
    arena = smp.store.arena
    _dead_arenas.add(arena.path)
    smp.close()
    for thread in threading.enumerate():
        if thread.name in SMP_THREADS:
            thread.join(DEADLINE_S)
            if thread.is_alive():
                raise AssertionError(f"{thread.name} outlives its SMP")
    arena._lock.close()
    _dead_arenas.remove(arena.path)


def lose_smp(smp: Smp) -> None:
    """As a power failure of its node would: its arena is gone, too."""
    arena = smp.store.arena
    _dead_arenas.add(arena.path)
    smp.close()
    shutil.rmtree(arena.path)
    arena._lock.close()
