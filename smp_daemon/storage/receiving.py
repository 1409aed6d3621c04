"""Bytes that come from elsewhere, into slots of this node: a shard that it lost, and parity that grows unit by unit,
whether its group sends them or this node fetches them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from holdfast.ec import choose_codec
from holdfast.smp_daemon.shared.belief import Claim, believe_slot
from holdfast.smp_daemon.shared.errors import DeadlineExceeded, NoFreeSlot, NotOurs, StaleEpoch
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.limits import CALL_DEADLINE_S, move_deadline
from holdfast.smp_daemon.shared.records import ShardRecord
from holdfast.smp_daemon.shared.slotfile import STAMP_BYTES, read_stamp
from holdfast.smp_daemon.shared.system import MACHINE, Threads
from holdfast.smp_daemon.storage.arena import Arena
from holdfast.smp_daemon.storage.holdings import Commit, Holdings, Key, ParityKey, ShardKey
from holdfast.smp_daemon.storage.parity import ParityGathering
from holdfast.smp_daemon.storage.pool import Slot, SlotPool, SlotState, no_room, too_small
from holdfast.smp_daemon.storage.reserver import Reserver


@dataclass(slots=True)
class GatheringSlot:
    """Parity that is being gathered here, and the slot it grows in."""

    pool: SlotPool
    slot: Slot
    view: memoryview
    parity: ParityGathering


class Receiving:
    """Slots that this SMP fills itself. Thread-safe. What is complete becomes one of the holdings."""

    def __init__(
        self,
        arena: Arena,
        lock: threading.Condition,
        holdings: Holdings,
        reserver: Reserver,
        backend: str,
        threads: Threads = MACHINE,
    ) -> None:
        """
        Args:
            lock: the store's lock, which guards the slots and everything here. It is not held while bytes come in.
            reserver: makes a slot in place of one that is taken away.
            backend: see `ec.choose_codec`.
        """
        self.arena = arena
        self.lock = lock
        self.holdings = holdings
        self._reserver = reserver
        self._backend = backend
        self.threads = threads
        self._gatherings: dict[ParityKey, GatheringSlot] = {}
        self._checked_headers: dict[str, tuple[int, bytes]] = {}

    def check_slot(self, key: ShardKey, layout: Layout, view: memoryview) -> None:
        """Raise `ProtocolError` unless the slot's header is that of this shard. Headers differ in their stamps only."""
        epoch, header = self._checked_headers.get(key.coord, (0, b""))
        if epoch != layout.epoch or _unstamped(view[: len(header) + STAMP_BYTES]) != header:
            form = believe_slot(view, Claim.of_shard(*key, layout))
            self._checked_headers[key.coord] = layout.epoch, _unstamped(form.header)
        elif read_stamp(view) != key.snapshot:
            raise NotOurs(f"{key.coord} is stamped {read_stamp(view)}, not {key.snapshot}")

    @contextmanager
    def shard(
        self, key: ShardKey, layout: Layout, check: Callable[[memoryview], Sequence[int]]
    ) -> Iterator[memoryview]:
        """A slot to receive a shard from elsewhere. It is committed if the block ends without an error, and freed
        otherwise.

        Args:
            check: raises if the received bytes are not a valid slot of that shard. Returns the digests that its units
                came with: fresh ones would hide what has changed since.

        Raises:
            StaleEpoch: the slot was taken away meanwhile, by a newer epoch, by another attempt, or by its trainer.
            NoFreeSlot: its trainer is writing it.
        """
        length, unit_bytes = layout.shard_bytes(key.coord), layout.unit_bytes
        with self._slot_for_key(key, length) as (pool, slot, view):
            pass  # the lock is not needed for more
        try:
            failpoint("receive.taken", key.snapshot.step)
            yield view
            digests = tuple(check(view))
            commit = Commit.of(ShardRecord(key.snapshot, key.coord, length, unit_bytes, digests, run=layout.run.id))
            failpoint("receive.checked", key.snapshot.step)
            with self.lock:
                if not pool.is_at(slot, view):
                    raise StaleEpoch(f"the slot that {key} was received into was taken away")
                self.holdings.commit(pool, slot, commit)
            failpoint("receive.done", key.snapshot.step)
        except BaseException:
            self.give_back(pool, slot, view)
            raise

    @contextmanager
    def parity(self, key: ParityKey, layout: Layout, group: int) -> Iterator[ParityGathering]:
        """The gathering of a parity that this node lacks, to add units to; its group may send some of them meanwhile.
        It is committed if the block leaves it complete. Makes a slot if none is free; see `make`.

        Raises:
            StaleEpoch: the slot was taken away meanwhile, by a newer epoch, or because the snapshot was given up.
        """
        with self.lock:
            known = self._gatherings.get(key)
        mine = known
        if mine is None:
            with self._slot_for_key(key, layout.stripes(group).parity_bytes(key.position)) as place:
                mine = self._begin(key, layout, group, *place)
        try:
            failpoint("repair_parity.taken", key.snapshot.step)
            yield mine.parity
            failpoint("repair_parity.accumulated", key.snapshot.step)
            if not self.commit(key, mine) and not self.holdings.holds(key):
                raise StaleEpoch(f"the slot that {key} was gathered in was taken away")
        except BaseException:
            with self.lock:
                if known is None and self._gatherings.get(key) is mine:
                    self._stop(key)
            raise

    def gather(self, key: ParityKey, layout: Layout, group: int) -> GatheringSlot:
        """The gathering of a parity, begun in a free slot if there is none. The caller holds the lock. Raises
        `NoFreeSlot`."""
        known = self._gatherings.get(key)
        if known is None:
            length = layout.stripes(group).parity_bytes(key.position)
            place = self.slot_for(self.holdings.pool(key), key.snapshot, length)
            failpoint("parity.taken", key.snapshot.step)
            known = self._begin(key, layout, group, *place)
        return known

    def _begin(
        self, key: ParityKey, layout: Layout, group: int, pool: SlotPool, slot: Slot, view: memoryview
    ) -> GatheringSlot:
        if (before := self._gatherings.get(key)) is not None:
            before.parity.cancel()  # its slot was taken away for this one
        stripes, run = layout.stripes(group), layout.run.id
        codec = choose_codec(stripes.data, stripes.parity, self._backend)
        parity = ParityGathering(key.snapshot, stripes, key.tag, key.position, codec, view, self.threads, run)
        self._gatherings[key] = GatheringSlot(pool, slot, view, parity)
        return self._gatherings[key]

    def commit(self, key: ParityKey, gathering: GatheringSlot) -> bool:
        """Commit a gathering that is complete. Returns False if another thread has, or if it was given up.

        Raises:
            StaleEpoch: its file is gone; it is given up.
        """
        commit = Commit.of(gathering.parity.record())
        with self.lock:
            is_mine = gathering.pool.is_at(gathering.slot, gathering.view)
            if self._gatherings.get(key) is not gathering or not is_mine:
                return False
            try:
                self.holdings.commit(gathering.pool, gathering.slot, commit)
            except StaleEpoch:
                self._stop(key)
                raise
            del self._gatherings[key]
            return True

    def forget(self, gone: Callable[[SnapshotId], bool]) -> None:
        """Give up the gatherings of snapshots for which `gone` is True, and free their slots."""
        with self.lock:
            for key in [key for key in self._gatherings if gone(key.snapshot)]:
                self._stop(key)

    def _stop(self, key: ParityKey) -> None:
        gathering = self._gatherings.pop(key)
        gathering.parity.cancel()  # first: nothing may write to the slot once it is free
        self.give_back(gathering.pool, gathering.slot, gathering.view)

    def slot_for(
        self, pool: SlotPool, snapshot: SnapshotId, length: int, made: Slot | None = None
    ) -> tuple[SlotPool, Slot, memoryview]:
        """A free slot to receive into. An earlier attempt at the same snapshot loses its slot, and writes into a file
        that no slot uses any more.

        Args:
            made: what `make` has just returned, which nobody else could take.

        Raises:
            NoFreeSlot: no slot is free (see `make`), or the trainer is writing that snapshot.
        """
        with self.lock:
            if made is not None:
                made.claimed = False
            if pool.find(snapshot, SlotState.WRITING) is not None:
                raise NoFreeSlot(f"{pool.name} of {snapshot} is not received: its trainer is writing it")
            earlier = pool.find(snapshot, SlotState.RECEIVING)
            if earlier is not None:
                pool.remove(earlier)
                self._reserver.make_good()
            self.arena.look(pool)  # bytes in a file without a name would be lost
            slot = pool.assign(snapshot, length)
            return pool, slot, pool.view(slot)

    def make(self, pool: SlotPool, length: int) -> Slot | None:
        """Make one more slot, which takes the memory of free slots of other pools, for `slot_for`. If another thread is
        making one, wait for that, and return None. Blocks for about as long as zeroing the slot takes; the caller must
        not hold the store's lock.

        Raises:
            ArenaTooSmall: there is no memory for it.
        """
        with self.lock:
            if (other := pool.being_made(length)) is not None:
                self.lock.wait_for(lambda: pool.being_made(length) is not other, move_deadline(length))
                return None
            pool.unplan(length)  # the slot is needed now, not when the background thread gets to it
            self.arena.make_room(length, pool)
            if length > (left := self.arena.room()):
                raise too_small(self.arena.path, length, left)
            slot = pool.plan(length)
            slot.claimed = True
        try:
            self._reserver.await_freed(length)
            self._reserver.make(pool, slot)
            return slot
        except OSError as error:
            with self.lock:
                pool.remove(slot)
                self._reserver.on_ready()  # while it was being made, it counted as missing
                self.lock.notify_all()
            raise no_room(self.arena.path, length, error, self.arena.files) from error

    @contextmanager
    def _slot_for_key(self, key: Key, length: int) -> Iterator[tuple[SlotPool, Slot, memoryview]]:
        """A slot to receive `key` into, made if none is free. The lock is held during the block. What is held of `key`
        is dropped. Raises as `slot_for` and `make`."""
        made = None
        while True:
            with self.lock:
                pool = self.holdings.pool(key)  # here, or two threads might make two pools for the same slots
                self.holdings.drop(key)
                try:
                    found = self.slot_for(pool, key.snapshot, length, made)
                except NoFreeSlot:
                    if pool.find(key.snapshot, SlotState.WRITING) is not None:
                        raise
                else:
                    yield found
                    return
            made = self.make(pool, length)

    def give_back(self, pool: SlotPool, slot: Slot, view: memoryview) -> None:
        """Free a slot from `slot_for`, unless it was taken away before."""
        with self.lock:
            if pool.is_at(slot, view):
                pool.discard(slot)
                self._reserver.make_good()
                self.lock.notify_all()  # a thread may wait for a free slot


def _unstamped(header: memoryview | bytes) -> bytes:
    return bytes(header[:8]) + bytes(header[8 + STAMP_BYTES :])


def buffers_for(links: int) -> int:
    """Number of buffers of an SMP whose peers each send over `links` connections."""
    return 2 * links + 1


class BufferPool:
    """Buffers, each as long as the longest unit it has held. Thread-safe: a buffer that is not in the queue belongs to
    the thread that took it."""

    def __init__(self, count: int, threads: Threads = MACHINE) -> None:
        self._free: queue.SimpleQueue[bytearray] = threads.SimpleQueue()
        for _ in range(count):
            self._free.put(bytearray())

    @contextmanager
    def borrow(self, length: int) -> Iterator[memoryview]:
        """A buffer of `length` bytes with arbitrary content. Blocks until one is free.

        The borrower must not wait for another SMP, except for the bytes that fill the buffer.

        Raises:
            DeadlineExceeded: none became free in time.
        """
        try:
            buffer = self._free.get(timeout=CALL_DEADLINE_S)
        except queue.Empty:
            raise DeadlineExceeded(f"no buffer for a unit became free in {CALL_DEADLINE_S:.0f} s") from None
        try:
            if len(buffer) < length:
                buffer = bytearray(length)
            yield memoryview(buffer)[:length]
        finally:
            self._free.put(buffer)
