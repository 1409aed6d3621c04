"""Two threads: one copies snapshots into slots while the step runs, the other has them sealed.

The training thread hands over a `CopyJob` as a step begins, and calls `CopyJob.fence` before ``optim.step()`` changes
what is being copied. It does not talk to the SMP for that, and waits for it at most `patience_s`: a copy that has no
slot by then is given up. A copy never waits until the one before it is sealed.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.smp_daemon.shared.client import RecoveredShard, SmpClient
from holdfast.smp_daemon.shared.errors import (
    DeadlineExceeded,
    HoldfastError,
    NoFreeSlot,
    SmpUnavailable,
    StaleEpoch,
    VersionMismatch,
)
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.logs import Episodes, about, get_log
from holdfast.smp_daemon.shared.slotfile import SlotFormat, write_stamp
from holdfast.smp_daemon.shared.system import MACHINE, System
from holdfast.snapshot.copy.engines import CopyEngine, SlotTensor, Transfer
from holdfast.snapshot.copy.errors import GivenUp, LayoutChanged
from holdfast.snapshot.copy.pace import Pace
from holdfast.snapshot.copy.witness import Witness
from holdfast.snapshot.state.inputs import Inputs

FINAL_DEADLINE_S = 3600.0
"""How long gradients of the forward that began a step may take to be computed, in seconds."""

FORWARD_S = 5.0
"""How long a snapshot of a step that has begun waits for its first forward's inputs, in seconds, before it is sealed
without them."""

log = get_log(__name__)


@dataclass(slots=True)
class CopyJob:
    """One snapshot on its way into a slot.

    Attributes:
        moving, moving_bytes: live tensors, copied while the step runs, and their length. `fence` drops the tensors.
        ready: copies that were made when the step began.
        record: encodes the record leaf, given the digest of the first forward's inputs, or None if that is unknown.
        transfer: copies the state of the boundary into the slot.
        witness: watches `moving` for changes; None: nothing is checked.
        reshaped: names the live tensors whose shape is no longer that of their pieces.
        alike: blocks until replicas have compared what they share; raises unless they hold the same.
        release: called when `ready` is not needed any more.
        read_back: reads the sealed slot, and raises unless a restart could load it; None: that is not tried.
        with_parity: those of `keep` whose parity is kept, or is still being made; None: all.
        encode: whether the snapshot is to be protected, and not only sealed.
        next_s: how long after it the next one is to be protected, in seconds; 0: unknown.
        persist: a snapshot that the SMP is to persist; None: none.
        reading: set once the live state is read, or never will be.
        copied: set once the live state is not read any more, whatever became of the copy.
        inputs: a sample of the inputs of the step's first forward; None: unknown.
        declared: whether the loop has said that the step begins where the snapshot was taken.
        confirmed: set once the step has begun, and `inputs` is set: in a plain loop, as gradients of the forward that
            began it are computed. The snapshot is not sealed before that; but if the loop has `declared` the step, and
            no forward comes, it is sealed after `FORWARD_S`.
        slot: the slot's memory, until the sealing thread takes it.
        done: set once the snapshot is sealed, or has failed with `error`.
        begun_s, filled_s, sealed_s: `time.monotonic` when the job was made, the slot was filled, and it was sealed.
    """

    snapshot: SnapshotId
    coord: str
    keep: tuple[SnapshotId, ...]
    protected: SnapshotId | None
    form: SlotFormat
    moving: tuple[SlotTensor, ...]
    moving_bytes: int
    ready: tuple[SlotTensor, ...]
    record: Callable[[str | None], bytes]
    transfer: Transfer
    witness: Witness | None = None
    reshaped: Callable[[], list[str]] = list
    alike: Callable[[], None] = lambda: None
    release: list[Callable[[], None]] = field(default_factory=list)
    read_back: Callable[[RecoveredShard], None] | None = None
    with_parity: tuple[SnapshotId, ...] | None = None
    encode: bool = True
    next_s: float = 0.0
    persist: SnapshotId | None = None
    inputs: Inputs | None = None
    declared: bool = False
    error: HoldfastError | None = None
    slot: memoryview = field(default_factory=lambda: memoryview(b""))
    system: System = MACHINE
    copied: threading.Event = field(init=False)
    confirmed: threading.Event = field(init=False)
    done: threading.Event = field(init=False)
    begun_s: float = field(init=False)
    filled_s: float = 0.0
    sealed_s: float = 0.0
    reading: threading.Event = field(init=False)
    # Held while `read` sets `reading` or `error` is set, so that a copy given up before it began reads nothing.
    lock: threading.Lock = field(init=False)

    def __post_init__(self) -> None:
        system = self.system
        self.copied, self.confirmed, self.done, self.reading = (system.Event() for _ in range(4))
        self.lock = system.Lock()
        self.begun_s = system.monotonic()

    def read(self) -> None:
        """Copy thread: live tensors are read from now on. Raises the error that the snapshot was given up for."""
        with self.lock:
            self.check()
            self.reading.set()

    def free(self) -> None:
        """The copy thread no longer reads live tensors, or never will: the training thread need not wait for that."""
        self.reading.set()
        self.copied.set()

    def fence(self, patience_s: float, deadline_s: float) -> bool:
        """Training thread: block until the live tensors may change. Returns whether the copy had begun.

        A copy that does not begin within `patience_s`, because it has no slot, is given up; so is one that takes longer
        than `deadline_s`.
        """
        begun = self.reading.wait(patience_s)
        if not begun:
            with self.lock:
                begun = self.reading.is_set()
                if not begun:
                    self.error = self.error or NoFreeSlot(f"the SMP gave no slot for {self.snapshot} in time")
        if begun and not self.copied.wait(deadline_s):
            self.abort(DeadlineExceeded(f"the copy of {self.snapshot} took over {deadline_s} s"))
        if begun and self.witness is not None:
            self.witness.end()
        if begun:
            self.transfer.fence()
        # The step may give the tensors other memory: their current memory is not to be kept until this is sealed.
        self.moving, self.witness, self.reshaped = (), None, list
        return begun

    def abort(self, error: HoldfastError) -> None:
        """Give the snapshot up: whatever was written of it will not be sealed."""
        with self.lock:
            self.error = self.error or error
        self.confirmed.set()

    def check(self) -> None:
        """Raise the error that the snapshot was given up for, if it was."""
        if self.error is not None:
            raise self.error


class Copier:
    """The two threads. They process jobs in order."""

    def __init__(
        self,
        client: SmpClient,
        sealing: SmpClient,
        engine: CopyEngine,
        pace: Pace,
        reattach: Callable[[], None],
        on_done: Callable[[CopyJob], None] = lambda job: None,
        system: System = MACHINE,
    ) -> None:
        """
        Args:
            client, sealing: a connection to the SMP for each thread, so that slots are handed out while it seals.
            reattach: called by the copy thread before the first job after the SMP went away.
            on_done: called with each job that is over, by one of the two threads.
        """
        self._client = client
        self._monotonic = system.monotonic
        self._sealing = sealing
        self._engine = engine
        self._pace = pace
        self._reattach = reattach
        self._on_done = on_done
        # Both threads write `_attached`. `_stuck`, `_ahead`, `_newest`, `_coord` and
        # `_stride` belong to the copy thread, and to `close` and `let_go` once it has ended.
        self._attached = True
        self._stuck: CopyJob | None = None
        self._episodes = Episodes(log)
        self._ahead: tuple[SnapshotId, memoryview, int | None] | None = None
        self._newest: SnapshotId | None = None
        self._coord = ""
        self._stride = 0
        self._jobs: queue.SimpleQueue[CopyJob | str | None] = system.SimpleQueue()
        self._copies: queue.SimpleQueue[CopyJob | None] = system.SimpleQueue()
        self._threads = [
            system.Thread(target=self._run_copies, name="holdfast-copy", daemon=True),
            system.Thread(target=self._run_seals, name="holdfast-seal", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def let_go(self) -> None:
        """Forget every slot. Call it after `close`."""
        self._ahead = None

    def say(self, text: str) -> None:
        """Have the SMP show a text to operators, after the copies that were submitted. Returns at once. Any thread may
        call it."""
        self._jobs.put(text)

    def submit(self, job: CopyJob) -> None:
        """Begin `job` as soon as the copy before it is done. Returns at once."""
        self._jobs.put(job)

    def close(self, deadline_s: float) -> None:
        """Finish what was submitted, and end the threads. Raises `DeadlineExceeded` if that takes too long."""
        self._jobs.put(None)
        for thread in self._threads:
            thread.join(deadline_s)
            if thread.is_alive():
                raise DeadlineExceeded(f"the thread {thread.name} did not end within {deadline_s:.0f} s")
        if self._ahead is not None:
            try:
                self._client.abandon(self._ahead[0], self._coord, unused=True)
            except HoldfastError as error:
                log.info("a slot was not given back: %s", error)  # the SMP takes it back when the connection ends

    def _run_copies(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, str):
                self._tell(job)
            elif self._attempt(job, self._copy):
                self._begin_ahead(job)
                self._copies.put(job)
            else:
                self._end(job)
        self._copies.put(None)

    def _tell(self, text: str) -> None:
        try:
            self._client.say(text)
        except HoldfastError as error:
            log.info("the SMP does not show %r to operators: %s", text, error)

    def _run_seals(self) -> None:
        while (job := self._copies.get()) is not None:
            if self._attempt(job, self._seal):
                text = "snapshots are taken again: %s"
                self._episodes.end("snapshots", text, job.snapshot, extra=about(job.snapshot))
                self._episodes.end("version", "the SMP of this node is of a version that can be talked to again")
            self._end(job)

    def _end(self, job: CopyJob) -> None:
        self._on_done(job)
        job.done.set()

    def _attempt(self, job: CopyJob, work: Callable[[CopyJob], None]) -> bool:
        """Do `work`, and return whether it succeeded; if not, the job is given up with its error."""
        try:
            work(job)
            return True
        except HoldfastError as error:
            if isinstance(error, SmpUnavailable | DeadlineExceeded):  # either thread clears it, the copying one sets it
                self._attached = False
            if isinstance(error, LayoutChanged):
                log.info("%s needs a new layout: %s", job.snapshot, error, extra=about(job.snapshot))
            elif isinstance(error, GivenUp):
                log.info("%s is given up: %s", job.snapshot, error, extra=about(job.snapshot))
            else:
                text, extra = "no snapshot of %s: %s", about(job.snapshot, error=type(error).__name__)
                # An SMP replaced by another version was away first, and logged as such: the version needs a key of its
                # own.
                key = "version" if isinstance(error, VersionMismatch) else "snapshots"
                self._episodes.begin(key, text, job.snapshot, error, level=logging.ERROR, extra=extra)
            job.abort(error)
        except Exception as error:  # a bug of ours must not kill the thread that the training loop waits for
            log.exception("snapshot of %s failed", job.snapshot, extra=about(job.snapshot))
            job.abort(HoldfastError(f"{type(error).__name__}: {error}"))
        finally:
            job.free()
        return False

    def _copy(self, job: CopyJob) -> None:
        self._engine.enter_thread()
        if self._stuck is not None:
            self._settle(self._stuck)
        if not self._attached:
            self._ahead = None
            self._reattach()
            self._attached = True
        if job.persist is not None:
            self._client.persist(job.persist)  # before asking for a slot, which may be the one that holds it
        slot = self._take_slot(job)
        try:
            self._fill(job, slot)
        except Exception:
            self._settle(job)
            raise
        job.slot, job.filled_s = slot, self._monotonic()

    def _settle(self, job: CopyJob) -> None:
        """Make sure that nothing writes to the slot of a copy that has failed, and give it back. Until that succeeds,
        each job tries it first, and no other slot is asked for: the SMP would then give this one away."""
        self._stuck = job
        try:
            job.transfer.settle()
        except HoldfastError as error:
            raise HoldfastError(f"no snapshots are taken, as a device may still write to a slot: {error}") from error
        self._stuck = None
        self._client.abandon(job.snapshot, job.coord)

    def _seal(self, job: CopyJob) -> None:
        self._engine.enter_thread()
        slot, job.slot = job.slot, memoryview(b"")
        try:
            if not job.confirmed.wait(FORWARD_S if job.declared else FINAL_DEADLINE_S) and not job.declared:
                raise DeadlineExceeded(f"no step followed {job.snapshot} within {FINAL_DEADLINE_S:.0f} s")
            job.check()
            self._write_record(job, slot)
            job.alike()
        except HoldfastError:
            self._sealing.abandon(job.snapshot, job.coord)
            raise
        self._sealing.seal(job.snapshot, job.coord, job.protected, encode=job.encode, next_s=job.next_s)
        job.sealed_s = self._monotonic()
        if job.read_back is not None:
            self._read_back(job, job.read_back, slot)

    def _read_back(self, job: CopyJob, read: Callable[[RecoveredShard], None], slot: memoryview) -> None:
        """Read what was sealed. If that fails, this rank reports that the snapshot has failed, and it is given up."""
        try:
            read(self._client.sealed_shard(job.snapshot, job.coord, slot))
        except StaleEpoch as error:  # the next snapshot is read instead
            log.info("%s is not read back: %s", job.snapshot, error, extra=about(job.snapshot))
        except HoldfastError as error:
            self.say(f"{job.snapshot} was sealed, and a restart could not load it: {error}")
            raise

    def _write_record(self, job: CopyJob, slot: memoryview) -> None:
        offset, capacity = job.form.record
        record = job.record(None if job.inputs is None else job.inputs.digest())
        if len(record) > capacity:
            raise LayoutChanged(f"the plain values of {job.snapshot} take {len(record)} bytes, the slot has {capacity}")
        slot[offset : offset + capacity] = record.ljust(capacity)

    def _begin_ahead(self, job: CopyJob) -> None:
        """Ask for a slot for the snapshot that will probably follow, before the SMP is busy sealing this one."""
        if self._stride < 1:
            return
        guess = SnapshotId(job.snapshot.epoch, job.snapshot.step + self._stride)
        connection = self._client.connection
        try:
            with_parity = job.with_parity
            if with_parity is not None and job.encode:
                with_parity = (*with_parity, job.snapshot)
            keep = (*job.keep, job.snapshot)
            slot = self._client.begin(guess, job.coord, keep, job.protected, with_parity, ahead=True)
        except NoFreeSlot:
            return  # one may be free by the time the next snapshot is taken
        except HoldfastError as error:
            text = "no slot ahead of time: %s"  # if it still matters then, the next copy reports it
            self._episodes.begin("ahead", text, error, level=logging.INFO, extra=about(guess))
            return
        self._episodes.end("ahead", "slots are prepared ahead of time again", extra=about(guess))
        self._ahead = guess, slot, connection
        self._coord = job.coord

    def _take_slot(self, job: CopyJob) -> memoryview:
        if self._newest is not None and self._newest.epoch == job.snapshot.epoch:
            self._stride = job.snapshot.step - self._newest.step
        self._newest = job.snapshot
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            guess, slot, connection = ahead
            if connection is not None and connection == self._client.connection:
                if guess == job.snapshot:
                    return slot
                self._client.abandon(guess, job.coord, unused=True)  # the SMP takes back slots of older connections
        return self._client.begin(job.snapshot, job.coord, job.keep, job.protected, job.with_parity)

    def _fill(self, job: CopyJob, slot: memoryview) -> None:
        step = job.snapshot.step
        failpoint("copy.before", step)
        slot[: len(job.form.header)] = job.form.header
        write_stamp(slot, job.snapshot)

        def pause(count: int) -> None:
            job.check()
            if count:
                self._pace.wait(count)

        moving, witness, reshaped = job.moving, job.witness, job.reshaped  # `CopyJob.fence` drops them
        job.read()
        self._pace.begin(job.moving_bytes)
        job.transfer.copy(moving, slot, pause)
        failpoint("copy.middle", step)
        if names := reshaped():
            raise LayoutChanged(f"{', '.join(names)}: of another shape than when the layout was made")
        if witness is not None:
            witness.look(job.transfer)
        job.transfer.guard()
        job.free()
        job.transfer.copy(job.ready, slot, lambda count: None)
        failpoint("copy.done", step)
        job.check()
        job.transfer.finish()
        if witness is not None:
            witness.check(slot)
