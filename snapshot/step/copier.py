"""Two threads: one copies snapshots into slots while the step runs, the other has them sealed.

The training thread hands over a `SnapshotCopy` as a step begins, and calls its `fence` before ``optim.step()`` changes
what is being copied. The copy thread takes a slot itself, and asks the SMP for nothing unless that went away; a copy
that has not begun by the fence is given up after `patience_s`. A copy never waits until the one before it is sealed.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable

from holdfast.smp_daemon.shared.client import RecoveredShard, SmpClient
from holdfast.smp_daemon.shared.errors import (
    DeadlineExceeded,
    HoldfastError,
    SmpUnavailable,
    StaleEpoch,
    VersionMismatch,
)
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.limits import slowest_s
from holdfast.smp_daemon.shared.logs import Episodes, about, get_log
from holdfast.smp_daemon.shared.slotfile import write_stamp
from holdfast.smp_daemon.shared.system import MACHINE, System
from holdfast.smp_daemon.shared.trainer_slots import TakenSlot
from holdfast.snapshot.copy.engines import CopyEngine
from holdfast.snapshot.copy.errors import GivenUp, LayoutChanged
from holdfast.snapshot.copy.pace import Pace
from holdfast.snapshot.copy.unit_digests import UnitDigests
from holdfast.snapshot.step.orders import CopyOrder, SnapshotCopy

FINAL_DEADLINE_S = 3600.0
"""How long gradients of the forward that began a step may take to be computed, in seconds."""

FORWARD_S = 60.0
"""How long a snapshot of a step that has begun waits for its first forward's inputs, in seconds, before it is sealed
without them."""

log = get_log(__name__)


class Copier:
    """The two threads. They process jobs in order."""

    def __init__(
        self,
        client: SmpClient,
        sealing: SmpClient,
        engine: CopyEngine,
        pace: Pace,
        reattach: Callable[[], None],
        on_done: Callable[[SnapshotCopy], None] = lambda copy: None,
        system: System = MACHINE,
    ) -> None:
        """
        Args:
            client, sealing: a connection to the SMP for each thread, so that the copying one need not wait for a seal.
            reattach: called by the copy thread before the first job after the SMP went away.
            on_done: called with each copy that is over, by one of the two threads.
        """
        self._client = client
        self._monotonic = system.monotonic
        self._sealing = sealing
        self._engine = engine
        self._pace = pace
        self._reattach = reattach
        self._on_done = on_done
        # Both threads write `_attached`: whether no call has failed since the last `reattach`. `_stuck` belongs to the
        # copy thread.
        self._attached = True
        self._stuck: tuple[CopyOrder, TakenSlot] | None = None
        self._episodes = Episodes(log)
        self._slot_bytes = 0
        self._jobs: queue.SimpleQueue[SnapshotCopy | str | None] = system.SimpleQueue()
        self._copies: queue.SimpleQueue[SnapshotCopy | None] = system.SimpleQueue()
        self._threads = [
            system.Thread(target=self._run_copies, name="holdfast-copy", daemon=True),
            system.Thread(target=self._run_seals, name="holdfast-seal", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def say(self, text: str) -> None:
        """Have the SMP show a text to operators, after the copies that were submitted. Returns at once. Any thread may
        call it."""
        self._jobs.put(text)

    def submit(self, copy: SnapshotCopy) -> None:
        """Begin `copy` as soon as the one before it is done. Returns at once."""
        self._slot_bytes = copy.order.form.total_bytes
        self._jobs.put(copy)

    def close(self, deadline_s: float) -> None:
        """Finish what was submitted, and end the threads. Raises `DeadlineExceeded` if that takes too long: for each
        thread `deadline_s`, and as long as the SMP may take to digest what is sealed."""
        self._jobs.put(None)
        copying, sealing = self._threads
        for thread, limit_s in ((copying, deadline_s), (sealing, deadline_s + slowest_s(self._slot_bytes))):
            thread.join(limit_s)
            if thread.is_alive():
                raise DeadlineExceeded(f"the thread {thread.name} did not end within {limit_s:.0f} s")

    def _run_copies(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, str):
                self._tell(job)
            elif self._attempt(job, self._copy):
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
        while (copy := self._copies.get()) is not None:
            if self._attempt(copy, self._seal):
                text = "snapshots are taken again: %s"
                self._episodes.end("snapshots", text, copy.snapshot, extra=about(copy.snapshot))
                self._episodes.end("version", "the SMP of this node is of a version that can be talked to again")
            self._end(copy)

    def _end(self, copy: SnapshotCopy) -> None:
        copy.order.release()
        self._on_done(copy)
        copy.end()

    def _attempt(self, copy: SnapshotCopy, work: Callable[[SnapshotCopy], None]) -> bool:
        """Do `work`, and return whether it succeeded; if not, the copy is given up with its error."""
        snapshot = copy.snapshot
        try:
            work(copy)
            return True
        except HoldfastError as error:
            if isinstance(error, SmpUnavailable | DeadlineExceeded):  # either thread clears it, the copying one sets it
                self._attached = False
            if isinstance(error, LayoutChanged):
                log.info("%s needs a new layout: %s", snapshot, error, extra=about(snapshot))
            elif isinstance(error, GivenUp):
                log.info("%s is given up: %s", snapshot, error, extra=about(snapshot))
            else:
                text, extra = "no snapshot of %s: %s", about(snapshot, error=type(error).__name__)
                # An SMP replaced by another version was away first, and logged as such: the version needs a key of its
                # own.
                key = "version" if isinstance(error, VersionMismatch) else "snapshots"
                self._episodes.begin(key, text, snapshot, error, level=logging.ERROR, extra=extra)
            copy.abort(error)
        except Exception as error:  # a bug of ours must not kill the thread that the training loop waits for
            log.exception("snapshot of %s failed", snapshot, extra=about(snapshot))
            copy.abort(HoldfastError(f"{type(error).__name__}: {error}"))
        finally:
            copy.leave_live()
        return False

    def _copy(self, copy: SnapshotCopy) -> None:
        self._engine.enter_thread()
        if self._stuck is not None:
            self._await_device(*self._stuck)
        if not self._attached or self._client.connection is None:
            self._reattach()
            self._attached = True
        order, due = copy.order, copy.order.due
        if due.persist is not None:
            self._client.persist(due.persist)  # before asking for a slot, which may be the one that holds it
        slot = self._client.take(order.coord, due.keep)
        try:
            digests = self._fill(copy, slot.view)
        except Exception:
            self._await_device(order, slot)
            raise
        copy.fill(slot, digests)

    def _await_device(self, order: CopyOrder, slot: TakenSlot) -> None:
        """Make sure that nothing writes to the slot of a copy that has failed, and give it back. Until that succeeds,
        each copy tries it first, and no other slot is taken."""
        self._stuck = order, slot
        try:
            order.transfer.settle()
        except HoldfastError as error:
            raise HoldfastError(f"no snapshots are taken, as a device may still write to a slot: {error}") from error
        self._stuck = None
        self._client.give_back(slot)

    def _seal(self, copy: SnapshotCopy) -> None:
        self._engine.enter_thread()
        order, due, slot = copy.order, copy.order.due, copy.take_slot()
        try:
            if not copy.await_confirmed(FORWARD_S if order.declared else FINAL_DEADLINE_S) and not order.declared:
                raise DeadlineExceeded(f"no step followed {due.snapshot} within {FINAL_DEADLINE_S:.0f} s")
            copy.check()
            self._write_record(copy, slot.view)
            digests = () if copy.digests is None else copy.digests.complete(slot.view)
            order.alike()
            self._sealing.seal(
                due.snapshot,
                order.coord,
                slot,
                due.keep,
                due.protected,
                due.with_parity,
                encode=due.encode,
                next_s=due.next_s,
                spent=due.spent,
                digests=digests,
            )
        except HoldfastError:
            self._client.give_back(slot)
            raise
        copy.note_sealed()
        if order.read_back is not None:
            self._read_back(order, order.read_back, slot)

    def _read_back(self, order: CopyOrder, read: Callable[[RecoveredShard], None], slot: TakenSlot) -> None:
        """Read what was sealed. If that fails, this rank reports that the snapshot has failed, and it is given up."""
        snapshot = order.due.snapshot
        try:
            read(self._client.sealed_shard(snapshot, order.coord, slot))
        except StaleEpoch as error:  # the next snapshot is read instead
            log.info("%s is not read back: %s", snapshot, error, extra=about(snapshot))
        except HoldfastError as error:
            self.say(f"{snapshot} was sealed, and a restart could not load it: {error}")
            raise

    def _write_record(self, copy: SnapshotCopy, slot: memoryview) -> None:
        offset, capacity = copy.order.form.record
        record = copy.record()
        if len(record) > capacity:
            raise LayoutChanged(
                f"the plain values of {copy.snapshot} take {len(record)} bytes, the slot has {capacity}"
            )
        slot[offset : offset + capacity] = record.ljust(capacity)

    def _fill(self, copy: SnapshotCopy, slot: memoryview) -> UnitDigests | None:
        """Write everything but the record. Returns the digests that were taken on the way; None: none were, and the
        SMP is to read the slot for them."""
        form, transfer, step = copy.order.form, copy.order.transfer, copy.snapshot.step
        unit_bytes = copy.order.due.unit_bytes
        digests = UnitDigests(form.total_bytes, unit_bytes) if self._engine.digests and unit_bytes else None
        failpoint("copy.before", step)
        slot[: len(form.header)] = form.header
        write_stamp(slot, copy.snapshot)

        def pause(count: int) -> bool:
            copy.check()
            return self._pace.wait(count)

        live = copy.read()
        self._pace.begin(live.bytes)
        transfer.copy(live.pieces, slot, pause, digests)
        failpoint("copy.middle", step)
        if names := live.reshaped():
            raise LayoutChanged(f"{', '.join(names)}: of another shape than when the layout was made")
        if live.witness is not None:
            live.witness.look(transfer)
        transfer.guard()
        copy.leave_live()
        transfer.copy(copy.order.ready, slot, lambda count: True)
        failpoint("copy.done", step)
        copy.check()
        transfer.finish()
        if live.witness is not None:
            live.witness.check(slot)
        return digests
