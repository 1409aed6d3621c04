"""Interleavings of the threads of a trainer and its SMP, in one process. A seed decides where threads are held and
where they die.

All code is real: hook, copier, clients, sockets, SMP. The threads can only be stopped at *gates*: the failpoints of the
protocol, each message between a trainer and its SMP, each piece of a copy, and each write of a record. A held thread
continues after a drawn number of arrivals at gates, or after `HOLD_S`.

A `Life` represents one trainer process by its threads. It ends as by SIGKILL: its sockets break, and none of its
threads passes its next gate.
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
"""Longest time that a thread is held, so that threads which wait for it outside gates can continue."""

LONGEST_HOLD = 8
OWN_THREADS = "holdfast-"
"""Prefix of the names of a hook's threads."""

SMP_THREADS = ("accept", "connection", "protect", "regroup")

SMP = "smp"
"""The role of all threads of the SMPs."""


class Killed(BaseException):
    """Ends a thread at a gate; holdfast's code does not catch it."""


class _State(Enum):
    ALIVE = auto()
    FROZEN = auto()
    DEAD = auto()


class Life:
    """One trainer process. It ends when the thread called `fate[0]` arrives at its `fate[1]`-th gate, or at `die`.

    A zombie only freezes then: its training thread ends and its copies stop until `thaw`, but its sockets stay open,
    as those of a hanging process. Thread-safe.
    """

    def __init__(self, seed: str, fate: tuple[str, int] | None, *, zombie: bool = False) -> None:
        self.fate = fate
        self.arrivals: Counter[str] = Counter()
        self._seed = seed
        self._zombie = zombie
        self._state = _State.ALIVE
        self._changed = threading.Condition()  # guards all fields that change
        self._chances: dict[str, tuple[random.Random, float]] = {}
        self._streams: list[SocketStream] = []
        self._queues: list[MortalQueue] = []
        self._jobs: list[CopyJob] = []
        self._threads: set[threading.Thread] = set()
        self._thawed = False

    @property
    def over(self) -> bool:
        """Whether the life has ended or is frozen."""
        return self._state is not _State.ALIVE

    @property
    def frozen(self) -> bool:
        """Whether the life is frozen, as a zombie is at its end."""
        return self._state is _State.FROZEN

    def gate(self) -> None:
        """Pass a gate, called by threads of this life. May hold the thread; raises `Killed` if the life is over."""
        role = threading.current_thread().name
        with self._changed:
            self._check(role)
            self._hold(role)
            self._check(role)

    def pause(self) -> None:
        """Pass a gate, called by threads of SMPs. May hold the thread, and may end this life."""
        with self._changed:
            self._hold(SMP)

    def wait_for(self, happened: Callable[[], bool]) -> None:
        """Block until `happened()` is true, checked after each `tell`. Raises `Killed` if the life is over."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.over or happened(), DEADLINE_S):
                raise AssertionError(f"{threading.current_thread().name} waited for {DEADLINE_S:.0f} s")
            self._check(threading.current_thread().name)

    def tell(self) -> None:
        """Wake the threads in `wait_for`."""
        with self._changed:
            self._changed.notify_all()

    def die(self) -> None:
        """End the life, wherever its threads are."""
        with self._changed:
            self._end(_State.DEAD)

    def thaw(self) -> None:
        """Let a zombie's frozen copies continue to their end, although they are out of date by now."""
        with self._changed:
            self._thawed = True
            self._changed.notify_all()

    def bury(self) -> None:
        """End the life and wait until all its threads have ended."""
        self.die()
        for thread in self._threads:
            thread.join(DEADLINE_S)
            if thread.is_alive():
                raise AssertionError(f"{thread.name} outlives its process")

    def own(self, part: SocketStream | MortalQueue | CopyJob | threading.Thread) -> None:
        """Register a part that is broken, woken or awaited at the end."""
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
        """Number of other arrivals to wait for. Some roles of a life are often held, others never."""
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
            # This wakes the training thread at its fence. It may then change the state, so copies that have not begun
            # are aborted.
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
    """A `queue.SimpleQueue` whose reading thread dies with its life."""

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
        """Kill the thread that reads next."""
        self._queue.put(Killed)


class MortalEngine(CpuEngine):
    """An engine that copies half a piece at a time, with a gate before each half."""

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
    """Collectives among ranks that are threads of one life."""

    def __init__(self, life: Life, size: int) -> None:
        self.life = life
        self.size = size
        self._rounds: dict[int, dict[int, Any]] = {}

    def post(self, turn: int, rank: int, value: Any) -> None:
        self._rounds.setdefault(turn, {})[rank] = value
        self.life.tell()

    def collect(self, turn: int) -> list[Any]:
        """The values that all ranks posted in a turn, in rank order. Blocks."""
        self.life.wait_for(lambda: len(self._rounds[turn]) == self.size)
        return [self._rounds[turn][rank] for rank in range(self.size)]


class Member:
    """The `snapshot.collective.agreement.Agreement` of one thread of a `Circle`."""

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
        """Nothing to do, as no rank waits for long."""

    def meet(self, step: int) -> bool:
        return False

    def meet_at_end(self, deadline_s: float) -> bool:
        return False

    def close(self) -> None:
        """Nothing to release."""

    def _post(self, value: Any) -> int:
        self._turn += 1
        self._circle.life.gate()
        self._circle.post(self._turn, self.rank, value)
        return self._turn


# ---------------------------------------------------------------------- installing the gates


class _Here(threading.local):
    life: Life | None = None
    circle: Circle | None = None


_HERE = _Here()
_life: Life
_dead_arenas: set[Path] = set()


def current_life() -> Life:
    """The life that the calling thread belongs to, if it is a hook's own thread; otherwise the newest life."""
    return _HERE.life or _life


def begin_life(life: Life) -> None:
    """Make `life` the newest; threads that an older life made still belong to that one."""
    global _life
    _life = life


def join_circle(circle: Circle) -> None:
    """Make the calling thread a member of `circle`, as the rank at the end of its name."""
    _HERE.circle = circle


def rank() -> int:
    """The rank of the calling thread: 0, unless it is named after another coordinate."""
    name = threading.current_thread().name
    return int(name.removeprefix("dp")) if name.startswith("dp") else 0


@contextmanager
def gates() -> Iterator[list[BaseException]]:
    """Install the gates; yield a list that collects uncaught exceptions of threads other than `Killed`."""
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
            # torch keeps these hooks per process, so ended lives and other ranks would share them
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
    """The real system, except that queues belong to a life and end with it."""

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
    """End an SMP as SIGKILL would: it writes no more records, and its sockets break. Its arena can be taken over."""
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
    """End an SMP as a power failure of its node would: its arena is lost too."""
    arena = smp.store.arena
    _dead_arenas.add(arena.path)
    smp.close()
    shutil.rmtree(arena.path)
    arena._lock.close()
