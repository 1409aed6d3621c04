"""What one SMP holds and the rules by which it changes. No sockets: those call in from `smp_daemon.service`.

Every public method is thread-safe. `changed` is notified whenever something that a waiter may wait for happened.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ec import choose_codec
from smp_daemon.arena import Arena, Pool
from smp_daemon.board import Board, Outcome
from smp_daemon.errors import (
    DamagedSnapshot,
    DeadlineExceeded,
    NoFreeSlot,
    ProtocolError,
    StaleEpoch,
)
from smp_daemon.layout import Layout, SnapshotId
from smp_daemon.limits import CALL_DEADLINE_S
from smp_daemon.parity import ParityGathering
from smp_daemon.points import reach
from smp_daemon.records import (
    ParityRecord,
    ShardRecord,
    digest_units,
    parity_from_json,
    parity_to_json,
    read_json,
    shard_from_json,
    shard_to_json,
    write_json,
)
from smp_daemon.slotfile import STAMP_BYTES, read_format, read_stamp
from smp_daemon.slots import Slot, SlotState

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Progress:
    """How far a snapshot of this epoch has come on this node."""

    sealed: set[str] = field(default_factory=set)
    parities_done: set[int] = field(default_factory=set)
    gathering: tuple[Pool, Slot, ParityGathering] | None = None
    outcome: Outcome = Outcome.PENDING


class Store:
    """The holdings of one SMP.

    Args:
        on_sealed: called (in the thread that sealed) once all shards of this node are sealed and must be encoded.
        on_parity: called once this node's own parity of a snapshot is committed, to tell the group.
    """

    def __init__(
        self,
        arena: Arena,
        job: str,
        node: str,
        *,
        on_sealed: Callable[[SnapshotId], None],
        on_parity: Callable[[SnapshotId], None],
    ) -> None:
        self.arena = arena
        self.job = job
        self.node = node
        self.changed = threading.Condition(threading.RLock())
        self.board = Board(arena.path / "board", create=True)
        self.epoch = 0
        self.protected: SnapshotId | None = None
        self._on_sealed = on_sealed
        self._on_parity = on_parity
        self._progress: dict[SnapshotId, Progress] = {}
        self._shard_records: dict[tuple[SnapshotId, str], ShardRecord] = {}
        self._parity_records: dict[tuple[SnapshotId, int, int], ParityRecord] = {}
        self._checked_headers: dict[str, bytes] = {}
        self._adopt()

    # ------------------------------------------------------------------ epochs and layouts

    @property
    def layout(self) -> Layout | None:
        """The layout of the current epoch, once it is configured."""
        return self.arena.layouts.get(self.epoch)

    def check_epoch(self, epoch: int) -> None:
        """Raises `StaleEpoch` unless `epoch` is the current one."""
        if epoch != self.epoch:
            raise StaleEpoch(f"epoch {epoch} may not write: job {self.job!r} is in epoch {self.epoch}")

    def join(self, epoch: int) -> None:
        """Enter `epoch`; a newer one takes every slot that is being written away from its writer.

        Raises:
            StaleEpoch: a newer epoch has begun here.
        """
        with self.changed:
            if epoch < self.epoch:
                raise StaleEpoch(f"epoch {epoch} is over: job {self.job!r} is in epoch {self.epoch}")
            if epoch == self.epoch:
                return
            for snapshot in list(self._progress):
                self._forget(snapshot)
            self.arena.fence()
            self.epoch = epoch
            self._write_node()
            self.board.reset(epoch)
            self.changed.notify_all()

    def configure(self, layout: Layout) -> None:
        """Reserve what this node needs in `layout`; harmless if that has been done.

        Raises:
            StaleEpoch: the layout is of another epoch.
            ArenaTooSmall: there is no room; nothing was reserved.
            ProtocolError: the layout is of another job, does not name this node, or another one holds already.
        """
        with self.changed:
            self.check_epoch(layout.epoch)
            if layout.job != self.job:
                raise ProtocolError(f"this SMP serves job {self.job!r}, not {layout.job!r}")
            if self.layout is not None:
                if self.layout != layout:
                    raise ProtocolError(f"epoch {layout.epoch} has another layout already")
                return
            self._reserve(layout)
            self.arena.add_layout(layout)
            self.changed.notify_all()

    # ------------------------------------------------------------------ a snapshot's way

    def begin(
        self, snapshot: SnapshotId, coord: str, keep: Collection[SnapshotId], protected: SnapshotId | None
    ) -> tuple[Pool, Slot]:
        """Hand out a slot for `coord`; older snapshots that are not in `keep` are freed first.

        Args:
            protected: the newest snapshot that the whole job knows to be protected. It must be in `keep`.

        Raises:
            StaleEpoch, NoFreeSlot, ProtocolError.
        """
        with self.changed:
            layout = self._configured(snapshot.epoch)
            if protected is not None and protected not in keep:
                raise ProtocolError(f"{protected} is protected and must be kept")
            if protected is not None and protected != self.protected:
                self.protected = protected
                self._write_node()
            self._release(keep, snapshot)
            pool = self.arena.shard_pool(coord)
            for slot in [s for s in pool.slots if s.state is SlotState.WRITING]:
                if slot.snapshot is not None and slot.snapshot.epoch < snapshot.epoch:
                    pool.replace(slot)  # it is being received, for a trainer that did not wait for it
                else:
                    pool.discard(slot)
            slot = pool.begin(snapshot, layout.shard_bytes(coord))
            self._progress.setdefault(snapshot, Progress())
            self.board.post(snapshot.step, Outcome.PENDING)
            return pool, slot

    def abandon(self, snapshot: SnapshotId, coord: str) -> None:
        """The writer of `coord` is gone or gave up: an unsealed slot becomes free."""
        with self.changed:
            pool = self.arena.shard_pool(coord)
            slot = pool.find(snapshot, SlotState.WRITING)
            if slot is not None:
                pool.abandon(slot)
                self.fail(snapshot, f"the writer of {coord} went away")

    def seal(self, snapshot: SnapshotId, coord: str) -> None:
        """Check what was written for `coord`, compute digests, commit. Blocks for about one read of the bytes.

        Raises:
            StaleEpoch: a newer epoch has taken the slot away.
            ProtocolError: header or stamp do not fit; the slot is free again.
        """
        with self.changed:
            layout = self._configured(snapshot.epoch)
            pool = self.arena.shard_pool(coord)
            slot = pool.find(snapshot, SlotState.WRITING)
            if slot is None:
                raise StaleEpoch(f"{coord} has no slot that is being written for {snapshot}")
            view = pool.view(slot)
        try:
            self._check_slot(view, snapshot, coord)
        except ProtocolError:
            self.abandon(snapshot, coord)
            raise
        record = ShardRecord(snapshot, coord, slot.bytes, layout.unit_bytes, digest_units(view, layout.unit_bytes))
        with self.changed:
            if pool.find(snapshot, SlotState.WRITING) is not slot:
                raise StaleEpoch(f"the slot of {coord} was taken away while {snapshot} was sealed")
            self._commit_shard(pool, slot, record)
            progress = self._progress.setdefault(snapshot, Progress())
            progress.sealed.add(coord)
            whole = progress.sealed == {s.coord for s in layout.node(self.node).shards}
        if whole:
            reach("seal.done", snapshot.step)
            group, _ = layout.place(self.node)
            if layout.protects(group):
                gathering = self._gather(snapshot)
                if gathering is not None and gathering.complete:
                    self._commit_parity(snapshot)  # all that it would hold is padding
                self._on_sealed(snapshot)
            self._settle(snapshot)

    def fold(self, snapshot: SnapshotId, stripe: int, position: int, unit: memoryview, unit_digest: int) -> None:
        """Fold a group member's data unit into this node's parity of `snapshot`.

        Blocks until the epoch is configured and a parity slot is free.

        Raises:
            StaleEpoch, ProtocolError, DamagedSnapshot, DeadlineExceeded.
        """
        gathering = self._gather(snapshot)
        if gathering is None:
            return
        gathering.fold(stripe, position, unit, unit_digest)
        if gathering.complete:
            self._commit_parity(snapshot)

    def parity_done(self, snapshot: SnapshotId, position: int) -> None:
        """The group member at `position` has committed its parity of `snapshot`."""
        with self.changed:
            if snapshot.epoch != self.epoch:
                raise StaleEpoch(f"{snapshot} is not of epoch {self.epoch}")
            self._progress.setdefault(snapshot, Progress()).parities_done.add(position)
        self._settle(snapshot)

    def fail(self, snapshot: SnapshotId, reason: str) -> None:
        """`snapshot` will not be protected. The trainers will agree to give it up."""
        with self.changed:
            progress = self._progress.get(snapshot)
            if progress is None or progress.outcome is not Outcome.PENDING or snapshot.epoch != self.epoch:
                return
            progress.outcome = Outcome.FAILED
            self.board.post(snapshot.step, Outcome.FAILED)
            self.changed.notify_all()
        log.warning("%s failed: %s", snapshot, reason)

    def await_outcome(self, snapshot: SnapshotId, deadline_s: float) -> Outcome:
        """Block until `snapshot` is protected or has failed, or until the deadline; what became of it."""

        def outcome() -> Outcome:
            progress = self._progress.get(snapshot)
            return progress.outcome if progress else Outcome.FAILED

        with self.changed:
            self.changed.wait_for(lambda: outcome() is not Outcome.PENDING, deadline_s)
            return outcome()

    # ------------------------------------------------------------------ holdings

    def holdings(self) -> tuple[frozenset[tuple[SnapshotId, str]], frozenset[tuple[SnapshotId, int, int]]]:
        """Sealed shards and complete parities, as `smp_daemon.inventory` lists them."""
        with self.changed:
            return frozenset(self._shard_records), frozenset(self._parity_records)

    def shard(self, snapshot: SnapshotId, coord: str) -> tuple[memoryview, ShardRecord]:
        """The bytes and the commit record of a sealed shard. Raises `ProtocolError` if it is not here."""
        with self.changed:
            slot = self.arena.shard_pool(coord).find(snapshot, SlotState.SEALED)
            if slot is None:
                raise ProtocolError(f"node {self.node!r} does not hold {coord} of {snapshot}")
            return self.arena.shard_pool(coord).view(slot), self._shard_records[snapshot, coord]

    def parity(self, snapshot: SnapshotId, group: int, position: int) -> tuple[memoryview, ParityRecord]:
        """The bytes and the commit record of a parity slot. Raises `ProtocolError` if it is not here."""
        with self.changed:
            pool = self.arena.parity_pool(group, position)
            slot = pool.find(snapshot, SlotState.SEALED)
            if slot is None:
                raise ProtocolError(f"node {self.node!r} does not hold parity {group}-{position} of {snapshot}")
            return pool.view(slot), self._parity_records[snapshot, group, position]

    def verified(self, snapshot: SnapshotId, coord: str) -> str | None:
        """The file name of a sealed shard whose digests were just checked, or None if it is not here.

        Raises:
            DamagedSnapshot: its bytes have changed since it was sealed; this node no longer holds it.
        """
        with self.changed:
            pool = self.arena.shard_pool(coord)
            slot = pool.find(snapshot, SlotState.SEALED)
            if slot is None:
                return None
            record = self._shard_records[snapshot, coord]
        if digest_units(pool.view(slot), record.unit_bytes) == record.digests:
            return pool.path(slot).name
        self.drop_shard(snapshot, coord)
        raise DamagedSnapshot(f"{coord} of {snapshot} on node {self.node!r} does not match its digests")

    def drop_shard(self, snapshot: SnapshotId, coord: str) -> None:
        """A sealed shard is damaged: this node does not hold it any more. Harmless if it never did."""
        with self.changed:
            self._drop(self.arena.shard_pool(coord), snapshot)
            self._shard_records.pop((snapshot, coord), None)

    def drop_parity(self, snapshot: SnapshotId, group: int, position: int) -> None:
        """A parity slot is damaged: this node does not hold it any more. Harmless if it never did."""
        with self.changed:
            self._drop(self.arena.parity_pool(group, position), snapshot)
            self._parity_records.pop((snapshot, group, position), None)

    @contextmanager
    def receiving_shard(self, snapshot: SnapshotId, coord: str, layout: Layout) -> Iterator[memoryview]:
        """A slot to receive a shard from elsewhere; committed with fresh digests if the block ends well.

        Raises:
            StaleEpoch: the slot was taken away meanwhile, by a newer epoch or by another attempt.
        """
        length = layout.shard_bytes(coord)
        with self.changed:
            self.drop_shard(snapshot, coord)
            pool, slot, view = self._take(self.arena.shard_pool(coord), snapshot, length)
        try:
            yield view
            self._check_slot(view, snapshot, coord)
            record = ShardRecord(snapshot, coord, length, layout.unit_bytes, digest_units(view, layout.unit_bytes))
            with self.changed:
                _check_mine(pool, slot, view, snapshot)
                self._commit_shard(pool, slot, record)
        except BaseException:
            self._give_back(pool, slot, view)
            raise

    @contextmanager
    def receiving_parity(
        self, snapshot: SnapshotId, group: int, position: int, layout: Layout
    ) -> Iterator[ParityGathering]:
        """A gathering of parity of an older epoch; committed if the block leaves it complete.

        Raises:
            StaleEpoch: the slot was taken away meanwhile, by a newer epoch or by another attempt.
        """
        stripes = layout.stripes(group)
        with self.changed:
            self.drop_parity(snapshot, group, position)
            pool, slot, view = self._take(
                self.arena.parity_pool(group, position), snapshot, stripes.parity_bytes(position)
            )
        codec = choose_codec(stripes.data, stripes.parity, layout.backend)
        try:
            gathering = ParityGathering(snapshot, stripes, group, position, codec, view)
            yield gathering
            record = gathering.record()
            with self.changed:
                _check_mine(pool, slot, view, snapshot)
                pool.commit(slot, parity_to_json(record))
                self._parity_records[snapshot, group, position] = record
                self.changed.notify_all()
        except BaseException:
            self._give_back(pool, slot, view)
            raise

    def keep_layout(self, layout: Layout) -> None:
        """Remember the layout of an older epoch, whose bytes this node is about to hold."""
        with self.changed:
            if layout.epoch not in self.arena.layouts:
                self.arena.add_layout(layout)

    def retire(self) -> None:
        """The job is over: remove everything. Whoever is still at work for it is turned away."""
        with self.changed:
            for snapshot in list(self._progress):
                self._forget(snapshot)
            self.epoch = sys.maxsize
            self.arena.destroy()
            self.changed.notify_all()

    # ------------------------------------------------------------------ inside

    def _reserve(self, layout: Layout) -> None:
        wanted = {self.arena.shard_pool(s.coord): (s.bytes, layout.slots) for s in layout.node(self.node).shards}
        group, position = layout.place(self.node)
        if layout.protects(group):
            pool = self.arena.parity_pool(group, position)
            wanted[pool] = (layout.stripes(group).parity_bytes(position), layout.slots)
        self.arena.reserve(wanted)

    def _configured(self, epoch: int) -> Layout:
        self.check_epoch(epoch)
        if self.layout is None:
            raise ProtocolError(f"epoch {epoch} is not configured yet")
        return self.layout

    def _check_slot(self, view: memoryview, snapshot: SnapshotId, coord: str) -> None:
        stamp = read_stamp(view)
        if stamp != snapshot:
            raise ProtocolError(f"{coord} is stamped {stamp}, not {snapshot}")
        length = 8 + int.from_bytes(view[:8], "little")
        unstamped = bytes(view[:8]) + bytes(view[8 + STAMP_BYTES : length])
        if self._checked_headers.get(coord) != unstamped:
            _, metadata = read_format(view)
            if (metadata.get("job"), metadata.get("coord")) != (self.job, coord):
                raise ProtocolError(f"the slot of {coord} says that it is {metadata}")
            self._checked_headers[coord] = unstamped

    def _gather(self, snapshot: SnapshotId) -> ParityGathering | None:
        """The gathering of this node's parity of `snapshot`; None if it is committed. Waits for a free slot."""
        deadline = time.monotonic() + CALL_DEADLINE_S
        with self.changed:
            while True:
                if snapshot.epoch < self.epoch:
                    raise StaleEpoch(f"{snapshot} is over: this node is in epoch {self.epoch}")
                layout = self.layout
                if layout is not None and layout.epoch == snapshot.epoch:
                    group, position = layout.place(self.node)
                    if (snapshot, group, position) in self._parity_records:
                        return None
                    progress = self._progress.setdefault(snapshot, Progress())
                    if progress.gathering is not None:
                        return progress.gathering[2]
                    try:
                        return self._start_gathering(progress, snapshot, layout, group, position)
                    except NoFreeSlot:
                        pass  # the next `begin` releases one
                left = deadline - time.monotonic()
                if left <= 0 or not self.changed.wait(left):
                    raise DeadlineExceeded(f"no parity slot became free for {snapshot} in {CALL_DEADLINE_S:.0f} s")

    def _start_gathering(
        self, progress: Progress, snapshot: SnapshotId, layout: Layout, group: int, position: int
    ) -> ParityGathering | None:
        stripes = layout.stripes(group)
        if not stripes.parity_bytes(position):
            progress.parities_done.add(position)
            self._on_parity(snapshot)
            return None
        pool = self.arena.parity_pool(group, position)
        slot = pool.begin(snapshot, stripes.parity_bytes(position))
        codec = choose_codec(stripes.data, stripes.parity, layout.backend)
        gathering = ParityGathering(snapshot, stripes, group, position, codec, pool.view(slot))
        progress.gathering = (pool, slot, gathering)
        return gathering

    def _commit_parity(self, snapshot: SnapshotId) -> None:
        with self.changed:
            progress = self._progress.get(snapshot)
            if progress is None or progress.gathering is None:
                return
            pool, slot, gathering = progress.gathering
        record = gathering.record()
        with self.changed:
            if progress.gathering is None or self._progress.get(snapshot) is not progress:
                return  # another thread folded in the last unit too, or the snapshot was given up
            pool.commit(slot, parity_to_json(record))
            self._parity_records[snapshot, record.group, record.position] = record
            progress.gathering = None
            progress.parities_done.add(record.position)
        self._on_parity(snapshot)
        self._settle(snapshot)

    def _settle(self, snapshot: SnapshotId) -> None:
        """Post the snapshot as protected if all of it is there."""
        with self.changed:
            progress = self._progress.get(snapshot)
            layout = self.layout
            if progress is None or layout is None or progress.outcome is not Outcome.PENDING:
                return
            group, _ = layout.place(self.node)
            everyone = set(range(len(layout.groups[group]))) if layout.protects(group) else set()
            sealed = progress.sealed == {s.coord for s in layout.node(self.node).shards}
            if sealed and progress.parities_done >= everyone:
                progress.outcome = Outcome.PROTECTED
                self.board.post(snapshot.step, Outcome.PROTECTED)
                self.changed.notify_all()

    def _commit_shard(self, pool: Pool, slot: Slot, record: ShardRecord) -> None:
        pool.commit(slot, shard_to_json(record))
        self._shard_records[record.snapshot, record.coord] = record
        self.changed.notify_all()

    def _take(self, pool: Pool, snapshot: SnapshotId, length: int) -> tuple[Pool, Slot, memoryview]:
        """A slot to receive into. An earlier attempt that is still at work loses its slot, and writes into nothing."""
        earlier = pool.find(snapshot, SlotState.WRITING)
        if earlier is not None:
            pool.replace(earlier)
        try:
            slot = pool.begin(snapshot, length)
        except NoFreeSlot:
            pool.create(length)
            slot = pool.begin(snapshot, length)
        return pool, slot, pool.view(slot)

    def _give_back(self, pool: Pool, slot: Slot, view: memoryview) -> None:
        with self.changed:
            if pool.is_at(slot, view):
                pool.discard(slot)

    def _drop(self, pool: Pool, snapshot: SnapshotId) -> None:
        slot = pool.find(snapshot, SlotState.SEALED)
        if slot is not None:
            pool.discard(slot)

    def _release(self, keep: Collection[SnapshotId], before: SnapshotId) -> None:
        for snapshot in [s for s in self._progress if s < before and s not in keep]:
            self._forget(snapshot)
        self.arena.release(keep, before)

        def stays(snapshot: SnapshotId) -> bool:
            return snapshot in keep or snapshot >= before

        self._shard_records = {k: v for k, v in self._shard_records.items() if stays(k[0])}
        self._parity_records = {k: v for k, v in self._parity_records.items() if stays(k[0])}
        self.changed.notify_all()

    def _forget(self, snapshot: SnapshotId) -> None:
        progress = self._progress.pop(snapshot)
        if progress.gathering is not None:
            pool, slot, gathering = progress.gathering
            gathering.cancel()
            pool.discard(slot)

    def _write_node(self) -> None:
        write_json(
            self.arena.path / "node.json",
            {
                "job": self.job,
                "node": self.node,
                "epoch": self.epoch,
                "protected": list(self.protected) if self.protected else None,
            },
        )

    def _adopt(self) -> None:
        """Take over what a predecessor left in the arena; what does not match its digests is freed."""
        known: Any = read_json(self.arena.path / "node.json")
        if known is None:
            return
        if known["job"] != self.job or known["node"] != self.node:
            raise ProtocolError(
                f"the arena {self.arena.path} belongs to job {known['job']!r} on node {known['node']!r}: "
                "choose another, or remove it with `holdfast gc`"
            )
        self.epoch = int(known["epoch"])
        self.protected = SnapshotId(*known["protected"]) if known["protected"] else None
        if self.board.epoch == self.epoch:
            self.board.fail_pending()
        else:
            self.board.reset(self.epoch)  # the predecessor died after it had noted an epoch and before it said so
        for pool, slot, data in self.arena.adopt():
            try:
                self._adopt_slot(pool, slot, data)
            except (ProtocolError, DamagedSnapshot) as error:
                log.warning("slot %s freed: %s", pool.path(slot).name, error)
                pool.discard(slot)
        if self.layout is not None:
            self._reserve(self.layout)

    def _adopt_slot(self, pool: Pool, slot: Slot, data: Any) -> None:
        parity = pool in self.arena.parities.values()
        record = parity_from_json(data) if parity else shard_from_json(data)
        if digest_units(pool.view(slot), record.unit_bytes) != record.digests:
            raise DamagedSnapshot(f"{record.snapshot} does not match its digests")
        slot.snapshot = record.snapshot
        slot.state = SlotState.SEALED
        if isinstance(record, ShardRecord):
            self._shard_records[record.snapshot, record.coord] = record
        else:
            self._parity_records[record.snapshot, record.group, record.position] = record


def _check_mine(pool: Pool, slot: Slot, view: memoryview, snapshot: SnapshotId) -> None:
    if not pool.is_at(slot, view):
        raise StaleEpoch(f"the slot that {snapshot} was received into was taken away")
