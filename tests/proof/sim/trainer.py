"""The collectives of simulated trainers, and trainers whose state is a few hundred bytes, so that many can be run.

`snapshot.hook.SnapshotHook`, its ledger, copier, outcomes, restore and reservation are the production ones. What they
reach through interfaces is small here: `SimAdapter` (state), `SimCapture` and `SimEngine` (copying it), `SimMember`
(collectives). Trainers with real modules, `sim.modules`, use only `SimMember`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from holdfast.smp_daemon.shared.errors import HoldfastError, ProtocolError, failure_of
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.slotfile import Leaf, SlotFormat, plan_slot
from holdfast.snapshot.collective.agreement import Agreement, Result, T, Values
from holdfast.snapshot.collective.mesh import AgreementLost
from holdfast.snapshot.copy.engines import CpuEngine, Sample, SlotTensor
from holdfast.snapshot.copy.errors import LayoutChanged
from holdfast.snapshot.copy.unit_digests import UnitDigests
from holdfast.snapshot.resume.attempt import Verdict, agree_on
from holdfast.snapshot.resume.loading import load_checked
from holdfast.snapshot.state.steppers import Steppers
from holdfast.snapshot.step.orders import CopyOrder, Due, Live, SnapshotCopy
from tests.proof.sim.scheduler import active
from tests.proof.sim.system import SYSTEM
from tests.proof.sim.threads import Signal

RECORD_CAPACITY = 64
COLLECTIVE_DEADLINE_S = 120.0
LEAF = "state"
PATIENCE_STEPS = 500
"""Number of extra steps within which there must be room for a snapshot once the faults are over."""

WAIT_S = 0.02
"""How much longer each of these extra steps takes, in simulated seconds."""


class TrainingLost(Exception):
    """Another rank is gone, so the step cannot be taken."""


class Circle:
    """The collectives of one life of the job."""

    def __init__(self, size: int, deadline_s: float = COLLECTIVE_DEADLINE_S) -> None:
        """`deadline_s`: how long a rank waits for the others."""
        self.size = size
        self._deadline_s = deadline_s
        self.lost = False
        self.changed = Signal()
        self._rounds: dict[tuple[str, int], dict[int, Any]] = {}

    def lose(self) -> None:
        """Let the other ranks notice that a rank is gone."""
        self.lost = True
        self.changed.notify()

    def post(self, turn: tuple[str, int], rank: int, value: Any) -> None:
        active().point()
        values = self._rounds.setdefault(turn, {})
        values[rank] = value
        if len(values) == self.size:  # waking all at every post would be in vain
            self.changed.notify()

    def collect(self, turn: tuple[str, int]) -> list[Any] | None:
        """Return what every rank posted in that turn, or None if a rank is gone. Blocks."""
        values = self._rounds[turn]
        self.changed.wait_for(lambda: self.lost or len(values) == self.size, self._deadline_s)
        if len(values) < self.size:
            return None
        return [values[rank] for rank in range(self.size)]


class SimMember(Agreement):
    """`snapshot.collective.agreement.Agreement` of one rank."""

    def __init__(self, circle: Circle, rank: int) -> None:
        self.rank = rank
        self._circle = circle
        self._turn = 0

    def gather(self, data: bytes, among: Sequence[int] | None = None) -> list[bytes]:
        return self._of(self._collect(self._post(data)), among)

    def tell(self, data: bytes, root: int) -> bytes:
        told: bytes = self._collect(self._post(data))[root]
        return told

    def minimum(self, values: Values, among: Sequence[int] | None = None) -> Result:
        turn = self._post(list(values() if callable(values) else values))
        return lambda: [min(each) for each in zip(*self._of(self._collect(turn), among), strict=True)]

    @staticmethod
    def _of(everyones: list[Any], among: Sequence[int] | None) -> list[Any]:
        return everyones if among is None else [everyones[rank] for rank in among]

    def patiently(self, work: Callable[[], T]) -> T:
        done = list[T]()
        failure = failure_of(lambda: done.append(work()), HoldfastError)
        self._collect(self._post(None))
        if failure is not None:
            raise failure
        return done[0]

    def spread(self, sets: object, pieces: Sequence[tuple[int, torch.Tensor]], nodes: object) -> None:
        turn = self._post({at: tensor.clone() for at, (rank, tensor) in enumerate(pieces) if rank == self.rank})
        everyones = self._collect(turn)
        for at, (rank, tensor) in enumerate(pieces):
            tensor.copy_(everyones[rank][at])

    def leave(self) -> None:
        """Does nothing: a rank that leaves ends soon, as its training has lost the others, too."""

    def meet(self, step: int) -> bool:
        return False

    def meet_at_end(self, deadline_s: float) -> bool:
        return False

    def close(self) -> None:
        """Does nothing: there is nothing to close."""

    def _post(self, value: Any) -> tuple[str, int]:
        self._turn += 1
        turn = ("agreement", self._turn)
        self._circle.post(turn, self.rank, value)
        return turn

    def _collect(self, turn: tuple[str, int]) -> list[Any]:
        values = self._circle.collect(turn)
        if values is None:
            raise AgreementLost("another rank is gone")
        return values


class Steps:
    """Counts the steps that a loop has `left` to make. The loop calls `begun` once a step has begun."""

    def __init__(self, count: int) -> None:
        self.left = count

    def begun(self) -> None:
        self.left -= 1


class QuietSteps(Steps):
    """The steps of a loop that no fault strikes: as many as asked for, and one that drains all pending snapshots.

    While there is no room for a snapshot, more steps are made, so that those asked for follow once there is room. All
    ranks see the room change at the beginning of the same step, so they all make the same number of steps.

    Args:
        every: steps from one snapshot to the next.
        has_no_room: whether a snapshot that is due would find no slot.
        wait_s: how much longer each step takes while there is no room.
    """

    def __init__(
        self,
        count: int,
        every: int,
        has_no_room: Callable[[], bool],
        drain: Callable[[], None],
        wait_s: float = WAIT_S,
    ) -> None:
        super().__init__(count + 1)
        self._every = every
        self._has_no_room = has_no_room
        self._drain = drain
        self._wait_s = wait_s
        self._patience = PATIENCE_STEPS

    def begun(self) -> None:
        if self._patience and self._has_no_room():
            self._patience -= 1
            self.left = max(self.left, self._every + 1)
            active().sleep(self._wait_s)
            return
        if self.left == 1:
            self._drain()
        super().begun()


class Bytes(bytes):
    """A rank's whole state."""

    def missing(self, slot: bytes) -> str:
        """Name what the slot lacks of this state; empty if nothing."""
        return "" if slot.find(self) >= 0 else "bytes"

    def differing(self, other: bytes) -> list[str]:
        """The names of the parts that differ; a state of bytes has only one."""
        return [] if self == other else ["bytes"]

    def lacking(self, other: bytes) -> list[str]:
        """The parts that the other state has and this one has not: all states have one part."""
        return []

    def of_a_new_rank(self, others: Collection[Bytes], before: Bytes | None, beside: Collection[Bytes]) -> Bytes:
        """There are no new ranks."""
        raise AssertionError("a job of bytes has always the same ranks")


class SimAdapter:
    """One rank's state: bytes that each step computes from the bytes before. The first ones differ from life to life,
    so no two runs of a job ever have the same state."""

    def __init__(
        self, coord: str, length: int, secret: str, life: int, on_load: Callable[[SnapshotId, Bytes], None]
    ) -> None:
        self.coord = coord
        self.live = bytearray(_expand(f"{secret} {life} {coord}".encode(), length))
        self.step = 0
        self._secret = secret
        self._on_load = on_load

    def train(self) -> None:
        """``optim.step()``: every byte changes. An await in the middle exposes code that still reads the old bytes."""
        self.step += 1
        fresh = _expand(hashlib.blake2b(bytes(self.live) + self._secret.encode()).digest(), len(self.live))
        half = len(fresh) // 2
        self.live[:half] = fresh[:half]
        active().point()
        self.live[half:] = fresh[half:]

    def resize(self, length: int) -> None:
        """Let the state grow or shrink, so that a new layout is needed."""
        self.live = bytearray(_expand(bytes(self.live), length))

    def take_over(self, snapshot: SnapshotId, content: bytes) -> None:
        """Take over what was restored."""
        self._on_load(snapshot, Bytes(content))
        self.live = bytearray(content)
        self.step = snapshot.step

    def coordinate(self) -> str:
        return self.coord

    def tensors(self) -> Iterator[Any]:
        return iter(())

    def modules(self) -> Sequence[Any]:
        return ()

    def optimizers(self) -> Sequence[Any]:
        return ()

    def scalers(self) -> Sequence[Any]:
        return ()

    def steppers(self) -> Steppers:
        return Steppers((), (), ())

    def generators(self) -> Mapping[str, Any]:
        return {}

    def named(self) -> Sequence[Any]:
        return ()


def _expand(seed: bytes, length: int) -> bytes:
    return hashlib.shake_128(seed).digest(length)


class SimBoundary:
    """`snapshot.step.boundary.Boundary` for a loop that says itself when a step begins and ends."""

    declared = False

    def __init__(self, *arguments: object) -> None:
        pass

    def remove(self) -> None:
        """Does nothing: nothing was hooked."""


class SimCapture:
    """`snapshot.step.capture.Capture` for a `SimAdapter`."""

    def __init__(
        self,
        adapter: SimAdapter,
        agreement: SimMember,
        engine: SimEngine,
        job: str,
        coord: str,
        loop: object,
        notes: object,
        run: str,
        system: object,
    ) -> None:
        self._adapter = adapter
        self._engine = engine
        self._job = job
        self._coord = coord
        self._run = run
        self._form: SlotFormat | None = None
        self.on_begin: Callable[[SnapshotId, str, Bytes], None] = captured

    def plan(self, snapshot: SnapshotId) -> SlotFormat:
        self._form = _form(self._job, self._coord, self._run, len(self._adapter.live))
        return self._form

    def entered(self) -> None:
        """Does nothing: there are no generators."""

    def drawn(self) -> list[str]:
        return []

    def mark(self, *, buffers: bool = False) -> None:
        """Does nothing: there are no generators."""

    def begin(self, due: Due, *, declared: bool) -> SnapshotCopy:
        form, live, snapshot = self._form, self._adapter.live, due.snapshot
        if form is None or form.offsets[LEAF][1].bytes != len(live):
            raise LayoutChanged("the state has another length")
        self.on_begin(snapshot, self._coord, Bytes(live))
        piece = SlotTensor(live, form.offsets[LEAF][0], len(live))  # type: ignore[arg-type]  # for `SimEngine` alone
        order = CopyOrder(
            due,
            self._coord,
            form,
            (),
            lambda inputs: json.dumps({"step": snapshot.step}).encode(),
            self._engine.mark(),
            declared,
        )
        return SnapshotCopy(order, Live((piece,), len(live)), SYSTEM)

    def let_go(self) -> None:
        """Does nothing: memory does not move."""


def captured(snapshot: SnapshotId, coord: str, content: Bytes) -> None:
    """Called for every snapshot that begins. `sim.seams` replaces it, so that the oracle hears of them."""
    raise RuntimeError("nobody listens")


@lru_cache(1024)
def _form(job: str, coord: str, run: str, length: int) -> SlotFormat:
    return plan_slot(job, coord, [Leaf(LEAF, "U8", (length,))], RECORD_CAPACITY, run)


class SimEngine:
    """`snapshot.copy.engines.CopyEngine` for bytes, and its own `Transfer`. It copies each piece in two halves, with
    awaits before each half and at the end."""

    queues = False

    def __init__(self) -> None:
        # As on a CPU, though it notes none, so the sealing thread takes them all; or as on a device.
        self.digests = active().random.random() < 0.5

    def enter_thread(self) -> None:
        """Does nothing: all threads are alike."""

    def capturing(self) -> bool:
        return False

    def prepare(self, slots: Sequence[memoryview], turn: object) -> None:
        """Does nothing: a mapped slot is ready."""

    def cover(self, devices: object) -> None:
        """Does nothing: there is only one device."""

    def mark(self) -> SimEngine:
        active().point()
        return self

    def copy(
        self,
        pieces: Sequence[SlotTensor],
        slot: memoryview,
        pause: Callable[[int], bool | None],
        digests: UnitDigests | None = None,
    ) -> None:
        for piece in pieces:
            live: Any = piece.tensor
            half = piece.bytes // 2
            for begin, end in ((0, half), (half, piece.bytes)):
                pause(end - begin)
                active().work("copy", end - begin)
                active().point()
                slot[piece.offset + begin : piece.offset + end] = live[begin:end]

    def sample(self, pieces: Sequence[SlotTensor], turn: int) -> Sample:
        raise NotImplementedError("copies of plain bytes have no witness")

    def guard(self) -> None:
        """Does nothing: no copy is in progress once `copy` has returned."""

    def fence(self) -> None:
        """Does nothing: no copy is in progress."""

    def finish(self) -> None:
        active().point()

    def settle(self) -> None:
        """Does nothing: no copy is in progress."""

    def close(self) -> None:
        """Does nothing: nothing is held."""


def load(
    attempt: Any, agreement: SimMember, adapter: SimAdapter, engine: SimEngine
) -> tuple[HoldfastError | None, Verdict]:
    """`resume.attempt.load` for a `SimAdapter`: the same checks, copies, agreements and errors, for one tensor."""
    problem: HoldfastError | None = None
    try:
        form = attempt.open().form
        offset, leaf = form.offsets[LEAF]
    except HoldfastError as error:
        problem = error
    verdict = agree_on(agreement, problem)
    if not verdict.fits:
        raise problem or ProtocolError("the snapshot does not fit on another rank")
    if not verdict.whole:
        return problem, verdict
    live = torch.zeros(leaf.bytes, dtype=torch.uint8)
    pieces = [SlotTensor(live, offset, leaf.bytes)]
    failure = failure_of(
        lambda: load_checked(CpuEngine(), pieces, attempt.shard, attempt.repair, midway=attempt.midway, system=SYSTEM),
        HoldfastError,
    )
    verdict = agree_on(agreement, failure)
    if verdict.whole:
        active().work("copy", leaf.bytes)
        adapter.take_over(attempt.snapshot, live.numpy().tobytes())
    return failure, verdict
