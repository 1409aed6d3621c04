"""The sealed shards and complete parities of one SMP: reads, checks and repairs them.

A unit that does not match its digest is an erasure. It is noted as damaged, counted, and not handed out until it is
repaired in place with bytes that match.

What a predecessor left is held as soon as its records are read, and its bytes are *unverified* until somebody has
compared them with their digests. Nothing is handed out unread: whoever wants a unit reads it first (`checked_unit`), or
compares it with the digest that comes with it. So an unverified unit is as good as any other for a plan, which never
declares lost what merely nobody has read yet. `damaged_units` reads the rest.

Every public method is thread-safe; `lock` is the store's own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self, overload

import numpy as np

from holdfast.smp_daemon.shared.belief import Claim, believe, believe_unit, parity_part
from holdfast.smp_daemon.shared.counters import Counters
from holdfast.smp_daemon.shared.errors import DamagedSnapshot, NotHeld, NotOurs, ProtocolError
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.logs import Episodes, about, get_log
from holdfast.smp_daemon.shared.plain import encode_digested, from_plain, to_plain
from holdfast.smp_daemon.shared.records import ParityRecord, ShardRecord, digest
from holdfast.smp_daemon.storage.arena import Arena
from holdfast.smp_daemon.storage.pool import Slot, SlotPool, SlotState

log = get_log(__name__)


class ShardKey(NamedTuple):
    """Names a sealed shard."""

    snapshot: SnapshotId
    coord: str

    def __str__(self) -> str:
        return f"{self.coord} of {self.snapshot}"


class ParityKey(NamedTuple):
    """Names a complete parity slot."""

    snapshot: SnapshotId
    tag: str
    position: int

    def __str__(self) -> str:
        return f"parity {self.tag}-{self.position} of {self.snapshot}"


Key = ShardKey | ParityKey
Record = ShardRecord | ParityRecord


@dataclass(frozen=True, slots=True)
class Commit:
    """What commits a slot, made before the store's lock is taken: encoding takes longer for a larger node."""

    key: Key
    record: Record
    file: bytes

    @classmethod
    def of(cls, record: Record) -> Self:
        """Encode the commit record of a shard or of a complete parity."""
        return cls(_key_of(record), record, encode_digested(to_plain(record)))


class Holdings:
    """The sealed shards and complete parities in an arena. `unverified_bytes`: how many are `unverified`."""

    def __init__(self, arena: Arena, lock: threading.Condition, counters: Counters) -> None:
        self.arena = arena
        self.counters = counters
        # The store's lock. It guards the records, damage and repairs noted here, together with their slots. Bytes are
        # read without it, so a slot may be freed while it is read; the reader then sees bytes that match no digest.
        self._lock = lock
        self._records: dict[Key, Record] = {}
        self._damaged: set[tuple[Key, int]] = set()
        self._repair_count = 0
        self._unverified: dict[Key, set[int]] = {}  # units of a predecessor that nobody has read here yet
        self.unverified_bytes = 0
        self._episodes = Episodes(log)

    def look(self) -> None:
        """Forget what slots held that their trainers have taken, that are released, or whose files are gone."""
        with self._lock:
            for pool in self.arena.pools():
                self._look(pool)

    def _look(self, pool: SlotPool) -> None:
        self.arena.look(pool)
        there = {slot.snapshot for slot in pool.slots if slot.state is SlotState.SEALED}
        for key in [key for key in self._records if self.pool(key) is pool and key.snapshot not in there]:
            self._forget(key)

    def files(self) -> Iterator[tuple[Path, Record]]:
        """The files of commit records whose slots are there, and what is in each. The caller holds the lock."""
        self.look()
        for key, record in self._records.items():
            pool = self.pool(key)
            if (slot := pool.find(key.snapshot, SlotState.SEALED)) is not None:
                yield pool.record_path(slot), record

    def held(self) -> list[Key]:
        """The keys of everything held."""
        with self._lock:
            self.look()
            return list(self._records)

    def holds(self, key: Key) -> bool:
        """Whether the shard or parity is here, sealed."""
        with self._lock:
            self._look_at(key)
            return key in self._records

    def _look_at(self, key: Key) -> None:
        if key in self._records:
            self._look(self.pool(key))

    @overload
    def open(self, key: ShardKey) -> tuple[memoryview, ShardRecord]: ...

    @overload
    def open(self, key: Key) -> tuple[memoryview, Record]: ...

    def open(self, key: Key) -> tuple[memoryview, Any]:
        """The mapped bytes and the commit record, of bytes that may be believed: every path that reads what is held
        here comes through this. Raises `NotHeld` if `key` is not held here, `NotOurs` if it is not believed."""
        with self._lock:
            self._look_at(key)
            record = self._records.get(key)
            slot = self.pool(key).find(key.snapshot, SlotState.SEALED) if record is not None else None
            if record is None or slot is None:
                raise NotHeld(f"{key} is not held here")
            self._believe(key, record)
            return self.pool(key).view(slot), record

    def _expected(self, key: Key, claim: Claim) -> Claim:
        """What the bytes of `key` should be, by the layouts that this node knows. Raises `NotOurs`.

        If it knows none, as that file was damaged, they are compared with their name alone: whoever asks for them has
        the layout, and compares their lengths.
        """
        for layout in self.arena.layouts.values():
            if layout.epoch != key.snapshot.epoch:
                continue
            if isinstance(key, ShardKey):
                return Claim.of_shard(key.snapshot, key.coord, layout)
            if layout.group_of(key.tag) is not None:
                return Claim.of_parity(key.snapshot, key.tag, key.position, layout)
        part = key.coord if isinstance(key, ShardKey) else parity_part(key.tag, key.position)
        return replace(claim, snapshot=key.snapshot, part=part)

    def _believe(self, key: Key, record: Record) -> None:
        claim = Claim.of_record(record)
        believe(claim, self._expected(key, claim))

    def shard_unit(self, key: ShardKey, index: int) -> tuple[memoryview, int]:
        """A unit of a shard, to be sent, and the digest it was sealed with. The unit is checked by the receiver."""
        view, record = self.open(key)
        offset, length = record.unit(index)
        return view[offset : offset + length], record.digests[index]

    def checked_unit(self, key: Key, index: int) -> tuple[memoryview, Record]:
        """Check a unit; return it and the record that contains its digest.

        Raises:
            ProtocolError: there is no such unit here.
            DamagedSnapshot: the unit does not match its digest; from now on it counts as erased.
        """
        repairs = self._repair_count
        view, record = self.open(key)
        if not 0 <= index < len(record.digests):
            raise ProtocolError(f"there is no unit {index}: {key} has {len(record.digests)}")
        offset, length = record.unit(index)
        unit = view[offset : offset + length]
        try:
            believe_unit(unit, record.digests[index], f"unit {index} of {key}")
        except DamagedSnapshot:
            if not self._note_damage(key, index, record, repairs):
                return self.checked_unit(key, index)
            raise
        finally:
            self._note_verified(key, index, record)
        return unit, record

    def damaged_units(
        self, key: Key, pace: Callable[[int], None] = lambda count: None, *, unread: bool = False
    ) -> list[int]:
        """Read and check all units; return those that do not match their digests. Blocks for about one read of the
        bytes.

        Args:
            pace: called with the length of each unit in bytes before it is read. What it raises is raised.
            unread: only those that a predecessor left and that nobody has read since.

        Raises:
            NotHeld: it was released meanwhile.
        """
        if unread:
            failpoint("adopt.verify", key.snapshot.step)
        _, record = self.open(key)
        damaged = []
        for index in range(len(record.digests)):
            if (length := record.unit(index)[1]) and (not unread or index in self._unverified.get(key, ())):
                pace(length)
                try:
                    self.checked_unit(key, index)
                except DamagedSnapshot:
                    damaged.append(index)
        return damaged

    def verify(self, pace: Callable[[int], None], among: Collection[SnapshotId] | None = None) -> None:
        """Read what a predecessor left and nobody has read since, in order of need; damage is noted. Blocks for about
        one read of these bytes.

        Args:
            pace: as for `damaged_units`.
            among: only of these snapshots; None: of all.
        """
        for key in self.unverified():
            if among is None or key.snapshot in among:
                with suppress(NotHeld, NotOurs):  # it was released meanwhile
                    self.damaged_units(key, pace, unread=True)

    def unverified(self) -> list[Key]:
        """What a predecessor left and nobody has read completely since, in order of need: the newest first, and shards
        before parity."""
        with self._lock:
            return sorted(self._unverified, key=lambda key: (key.snapshot, isinstance(key, ShardKey)), reverse=True)

    def known_damage(self, key: Key) -> list[int]:
        """The units that are known not to match their digests and are not repaired. Reads no bytes."""
        with self._lock:
            return sorted(index for of, index in self._damaged if of == key)

    def repair(self, key: Key, index: int, content: memoryview) -> None:
        """Put a unit's bytes back in place.

        Raises:
            DamagedSnapshot: `content` does not match the digest that the unit was sealed with.
            NotHeld: `key` is not held here any more.
        """
        with self._lock:  # otherwise the slot could be reused before the copy is made
            view, record = self.open(key)
            offset, length = record.unit(index)
            if content.nbytes != length or digest(content) != record.digests[index]:
                raise DamagedSnapshot(f"the recomputed unit {index} of {key} does not match its digest")
            with self._keeping(key):
                failpoint("repair.before", key.snapshot.step)
                np.copyto(np.frombuffer(view[offset : offset + length], np.uint8), np.frombuffer(content, np.uint8))
            self._damaged.discard((key, index))
            self._repair_count += 1
            left = any(of == key for of, _ in self._damaged)
        failpoint("repair.done", key.snapshot.step)
        self.counters.add(units_repaired=1)
        if not left:
            self._episodes.end(key, "all units of %s are whole again", key, extra=about(key.snapshot))

    @contextmanager
    def _keeping(self, key: Key) -> Iterator[None]:
        """Keep the trainer from taking a slot during the block. Raises `NotHeld` if it has just taken it."""
        pool = self.pool(key)
        slot = pool.find(key.snapshot, SlotState.SEALED)
        was_held = slot is not None and slot.held
        if slot is None or not (was_held or pool.hold(slot)):
            raise NotHeld(f"{key} is not held here any more")
        yield
        if not was_held:
            pool.hold(slot, False)

    def hold(self, keys: Collection[ShardKey]) -> bool:
        """Keep the trainers from taking these shards, until `let_go`. Returns False, and holds none, if one is not
        here, or any is held already."""
        with self._lock:
            self.look()
            if any(slot.held for pool in self.arena.shards.values() for slot in pool.slots):
                return False
            slots = [(self.pool(key), self.pool(key).find(key.snapshot, SlotState.SEALED)) for key in keys]
            done = all(slot is not None and pool.hold(slot) for pool, slot in slots)
            if not done:
                self._let_go(slots)
            return done

    def let_go(self, snapshot: SnapshotId) -> None:
        """Stop holding the shards of a snapshot. Harmless if they are not held."""
        with self._lock:
            pools = self.arena.shards.values()
            self._let_go([(pool, pool.find(snapshot, SlotState.SEALED)) for pool in pools])

    def _let_go(self, slots: Iterable[tuple[SlotPool, Slot | None]]) -> None:
        for pool, slot in slots:
            if slot is not None and slot.held:
                pool.hold(slot, False)

    def drop(self, key: Key) -> None:
        """Free the slot and forget its record: it is damaged beyond repair, or not needed."""
        with self._lock:
            pool = self.pool(key)
            slot = pool.find(key.snapshot, SlotState.SEALED)
            if slot is not None:
                pool.discard(slot)
                failpoint("drop.done", key.snapshot.step)
            self._forget(key)

    # ------------------------------------------------------------------ committing

    def commit(self, pool: SlotPool, slot: Slot, commit: Commit) -> None:
        """Commit a shard or a complete parity: from now on it is held, sealed. Nothing is held that is not believed, so
        nothing else is read, sent or counted. Raises `NotOurs`."""
        with self._lock:
            self._believe(commit.key, commit.record)
            pool.commit(slot, commit.file)
            self._records[commit.key] = commit.record
            self._lock.notify_all()

    def adopt(self) -> None:
        """Take over what a predecessor left in the arena. Reads the records, and no bytes: these are `unverified`."""
        for pool, slot, data in self.arena.adopt():
            try:
                self._adopt_slot(pool, slot, data)
            except ProtocolError as error:
                log.warning("slot %s freed: %s", pool.path(slot).name, error, extra=about(file=pool.path(slot).name))
                pool.discard(slot)

    # ------------------------------------------------------------------ inside

    def _adopt_slot(self, pool: SlotPool, slot: Slot, data: Any) -> None:
        record: Record
        if pool in self.arena.parities.values():
            record = from_plain(ParityRecord, data, "a parity's commit record")
        else:
            record = from_plain(ShardRecord, data, "a shard's commit record")
        key = _key_of(record)
        if self.pool(key) is not pool or not _fits(record, slot.bytes):
            raise ProtocolError(f"the commit record of {key} does not fit its slot")
        self._believe(key, record)
        slot.snapshot = record.snapshot
        slot.state = SlotState.SEALED
        self._records[key] = record
        self._unverified[key] = {index for index in range(len(record.digests)) if record.unit(index)[1]}
        self.unverified_bytes += sum(record.unit(index)[1] for index in self._unverified[key])
        failpoint("adopt.slot", key.snapshot.step)

    def pool(self, key: Key) -> SlotPool:
        """The pool of the slots for `key`."""
        if isinstance(key, ShardKey):
            return self.arena.shard_pool(key.coord)
        return self.arena.parity_pool(key.tag, key.position)

    def _forget(self, key: Key) -> None:
        record = self._records.pop(key, None)
        if record is not None:
            self.unverified_bytes -= sum(record.unit(index)[1] for index in self._unverified.pop(key, ()))
        self._damaged = {(of, index) for of, index in self._damaged if of != key}

    def _note_verified(self, key: Key, index: int, record: Record) -> None:
        if key not in self._unverified:
            return  # sealed or received here; without the lock, as every unit that is read comes along
        with self._lock:
            left = self._unverified.get(key)
            if left is None or index not in left or self._records.get(key) is not record:
                return
            left.remove(index)
            self.unverified_bytes -= record.unit(index)[1]
            if not left:
                del self._unverified[key]

    def _note_damage(self, key: Key, index: int, record: Record, repairs: int) -> bool:
        """Note a damaged unit, unless something was repaired since there were that many `repairs`: then it may have
        been this unit, and has to be read again. Returns whether it is damaged.

        Raise `NotHeld` if the slot was given up while the unit was read: then the unit is not damaged, but gone.
        """
        with self._lock:
            self._look_at(key)  # its trainer may have overwritten it
            if self._records.get(key) is not record:
                raise NotHeld(f"{key} is not held here any more")
            if (key, index) in self._damaged:
                return True
            if self._repair_count != repairs:
                return False
            self._damaged.add((key, index))
        self.counters.add(units_damaged=1)
        text, extra = "unit %d of %s is damaged", about(key.snapshot, unit=index)
        self._episodes.begin(key, text, index, key, extra=extra)
        return True


def _key_of(record: Record) -> Key:
    if isinstance(record, ShardRecord):
        return ShardKey(record.snapshot, record.coord)
    return ParityKey(record.snapshot, record.group, record.position)


def _fits(record: Record, length: int) -> bool:
    if isinstance(record, ShardRecord):
        return record.bytes == length and len(record.digests) == -(-length // record.unit_bytes)
    return all(sum(record.unit(i)) <= length for i in range(len(record.digests)))
