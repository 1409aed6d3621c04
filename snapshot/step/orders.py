"""The order to copy one snapshot, which is finished when it is made, and the copy that is made of it.

A copy goes one way, whatever becomes of it::

    WAITING → READING   the copy thread has a slot, and reads live tensors from now on
    READING → COPIED    it does not read them any more
    WAITING → COPIED    it has failed, and will never read them
    COPIED → SEALED     by the sealing thread
    COPIED → FAILED     by the thread that had it last; `error` says why

Beside that, any thread may give it up (`abort`): then it is not read, or not sealed, and ends as FAILED. The training
thread waits at its `fence`, and says by `confirm` that it may be sealed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum, auto

from holdfast.smp_daemon.shared.client import RecoveredShard
from holdfast.smp_daemon.shared.errors import DeadlineExceeded, HoldfastError, NoFreeSlot
from holdfast.smp_daemon.shared.goodput import Spent
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.slotfile import SlotFormat
from holdfast.smp_daemon.shared.system import MACHINE, System
from holdfast.smp_daemon.shared.trainer_slots import TakenSlot
from holdfast.snapshot.copy.engines import SlotTensor, Transfer
from holdfast.snapshot.copy.unit_digests import UnitDigests
from holdfast.snapshot.copy.witness import Witness
from holdfast.snapshot.state.inputs import Inputs


@dataclass(frozen=True, slots=True)
class Due:
    """A snapshot to take when the next step begins, as all ranks have agreed.

    Attributes:
        keep, protected, with_parity: see `Ledger`.
        encode: whether it is to be protected, and not only sealed.
        next_s: how long after it the next one is to be protected, in seconds; 0: unknown.
        spent: where the time of the run went until then.
        persist: a snapshot that the SMP is to persist; None: none.
        unit_bytes: length of the units that the layout cuts a slot into; 0: unknown.
    """

    snapshot: SnapshotId
    keep: tuple[SnapshotId, ...] = ()
    protected: SnapshotId | None = None
    with_parity: tuple[SnapshotId, ...] | None = None
    encode: bool = True
    next_s: float = 0.0
    spent: Spent = field(default_factory=Spent)
    persist: SnapshotId | None = None
    unit_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Live:
    """Live tensors, which are copied while the step runs.

    Attributes:
        pieces, bytes: the tensors, and their length.
        witness: watches them for changes; None: nothing is checked.
        reshaped: names those whose shape is no longer that of their pieces.
    """

    pieces: tuple[SlotTensor, ...]
    bytes: int
    witness: Witness | None = None
    reshaped: Callable[[], list[str]] = list


@dataclass(frozen=True, slots=True)
class CopyOrder:
    """What to write into a slot, except for live tensors.

    Attributes:
        ready: copies that were made when the step began.
        record: encodes the record leaf, given the digest of the first forward's inputs, or None if that is unknown.
        transfer: copies the state of the boundary into the slot.
        declared: whether the loop has said that the step begins where the snapshot was taken.
        alike: blocks until replicas have compared what they share; raises unless they hold the same.
        release: called when `ready` is not needed any more.
        read_back: reads the sealed slot, and raises unless a restart could load it; None: that is not tried.
    """

    due: Due
    coord: str
    form: SlotFormat
    ready: tuple[SlotTensor, ...]
    record: Callable[[str | None], bytes]
    transfer: Transfer
    declared: bool = False
    alike: Callable[[], None] = lambda: None
    release: Callable[[], None] = lambda: None
    read_back: Callable[[RecoveredShard], None] | None = None


class CopyState(IntEnum):
    """How far a copy has come."""

    WAITING = auto()
    READING = auto()
    COPIED = auto()
    SEALED = auto()
    FAILED = auto()


MOVES = {
    CopyState.WAITING: (CopyState.READING, CopyState.COPIED),
    CopyState.READING: (CopyState.COPIED,),
    CopyState.COPIED: (CopyState.SEALED, CopyState.FAILED),
}
"""What the picture above says. No other move is made."""


class SnapshotCopy:
    """One snapshot on its way into a slot. Thread-safe.

    Attributes:
        order: what to copy. `live`: the live tensors; None once they may change.
        state: how far it has come.
        error: why it was given up, or has failed; None if it was not.
        inputs: a sample of the inputs of the step's first forward; None: unknown.
        slot: the slot, between the two threads that fill and seal it.
        digests: those of the slot's units that were taken while it was filled; None: none.
        begun_s, filled_s, sealed_s: `time.monotonic` when the copy was ordered, the slot was filled, and it was sealed.
    """

    def __init__(self, order: CopyOrder, live: Live, system: System = MACHINE) -> None:
        self.order = order
        self.live: Live | None = live
        self._system = system
        # Guards `state`, `error` and `_confirmed`: a copy either begins to read or is given up before that, never both.
        self._changed = system.Condition()
        self.state = CopyState.WAITING
        self.error: HoldfastError | None = None
        self._confirmed = False
        self.inputs: Inputs | None = None
        self.slot: TakenSlot | None = None
        self.digests: UnitDigests | None = None
        self.begun_s, self.filled_s, self.sealed_s = system.monotonic(), 0.0, 0.0

    @property
    def snapshot(self) -> SnapshotId:
        """The snapshot that is copied."""
        return self.order.due.snapshot

    # ------------------------------------------------------------------ the two threads of `Copier`

    def read(self) -> Live:
        """Live tensors are read from now on: returns them. Raises the error that the copy was given up for."""
        with self._changed:
            self.check()
            assert self.live is not None  # a fence that dropped them has given the copy up
            self._move(CopyState.READING)
            return self.live

    def leave_live(self) -> None:
        """Live tensors are not read any more, or never will be: the training thread need not wait for that."""
        with self._changed:
            self._move(CopyState.COPIED)

    def fill(self, slot: TakenSlot, digests: UnitDigests | None = None) -> None:
        """The slot is filled, and may be sealed. `digests`: those of its units that were taken meanwhile."""
        self.slot, self.digests, self.filled_s = slot, digests, self._system.monotonic()

    def note_sealed(self) -> None:
        """The SMP has sealed the slot."""
        self.sealed_s = self._system.monotonic()

    def take_slot(self) -> TakenSlot:
        """The filled slot. This object lets go of it."""
        slot, self.slot = self.slot, None
        assert slot is not None  # it was filled
        return slot

    def end(self) -> None:
        """The copy is sealed, or has failed: whoever waits for it goes on."""
        with self._changed:
            self._move(CopyState.SEALED if self.error is None else CopyState.FAILED)

    def await_confirmed(self, seconds: float) -> bool:
        """Block until the copy may be sealed, or was given up; returns whether it was either in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_confirmed, seconds)

    def record(self) -> bytes:
        """The record leaf."""
        return self.order.record(None if self.inputs is None else self.inputs.digest())

    # ------------------------------------------------------------------ the training thread

    def fence(self, patience_s: float, deadline_s: float) -> bool:
        """Block until the live tensors may change. Returns whether the copy had begun.

        A copy that does not begin within `patience_s`, as its SMP is being replaced, is given up; so is one that takes
        longer than `deadline_s`.
        """
        with self._changed:
            begun = self._changed.wait_for(lambda: self.state is not CopyState.WAITING, patience_s)
            if not begun:
                self.error = self.error or NoFreeSlot(f"no slot was taken for {self.snapshot} in time")
        if begun:
            if not self.reached(CopyState.COPIED, deadline_s):
                self.abort(DeadlineExceeded(f"the copy of {self.snapshot} took over {deadline_s} s"))
            if self.live is not None and self.live.witness is not None:
                self.live.witness.end()
            self.order.transfer.fence()
        # The step may give the tensors other memory: their current memory is not to be kept until this is sealed.
        self.live = None
        return begun

    def note_inputs(self, inputs: Inputs) -> None:
        """The step's first forward runs on these. Call it before `confirm`."""
        self.inputs = inputs

    @property
    def awaits_inputs(self) -> bool:
        """Whether `note_inputs` is still of use."""
        return self.inputs is None and not self.is_confirmed

    def confirm(self) -> None:
        """The step has begun where the snapshot was taken, and `inputs` is set: it may be sealed.

        In a plain loop that is known once gradients of the forward that began the step are computed; autograd may call
        this in a thread of its own.
        """
        with self._changed:
            self._confirmed = True
            self._changed.notify_all()

    @property
    def is_confirmed(self) -> bool:
        """Whether nobody needs to wait for `confirm`."""
        return self._confirmed or self.error is not None

    # ------------------------------------------------------------------ any thread

    def abort(self, error: HoldfastError) -> None:
        """Give the snapshot up: whatever was written of it will not be sealed. The first error counts."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()

    def check(self) -> None:
        """Raise the error that the snapshot was given up for, if it was."""
        if self.error is not None:
            raise self.error

    def reached(self, state: CopyState, seconds: float) -> bool:
        """Block until the copy has come so far, or further; returns whether it has in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self.state >= state, seconds)

    @property
    def is_over(self) -> bool:
        """Whether the copy is sealed or has failed. An `error` that is read after this is its last."""
        return self.state >= CopyState.SEALED

    def _move(self, state: CopyState) -> None:
        """Go there, if a way leads there. Called with the lock held."""
        if state in MOVES.get(self.state, ()):
            self.state = state
            self._changed.notify_all()
