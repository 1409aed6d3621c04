"""The snapshots of one SMP, and the rules by which their state changes. No sockets here: `smp_daemon.service` calls in.
Sealed shards and parity are kept by `smp_daemon.storage.holdings`.

Every public method is thread-safe. `changed` is notified whenever something happens that a thread may wait for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.smp_daemon.shared.belief import Claim, believe_slot
from holdfast.smp_daemon.shared.board import REFUSED, Board, SnapshotOutcome
from holdfast.smp_daemon.shared.counters import Counters
from holdfast.smp_daemon.shared.errors import (
    ArenaTooSmall,
    ConfigError,
    HoldfastError,
    NotOurs,
    ProtocolError,
    StaleEpoch,
    VersionMismatch,
)
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.identity import Run, epoch_text
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.limits import MAX_UNIT_BYTES
from holdfast.smp_daemon.shared.logs import Episodes, about, get_log
from holdfast.smp_daemon.shared.plain import Count, Identifier, decode_json, from_plain, to_plain
from holdfast.smp_daemon.shared.records import ShardRecord, digest_units, read_json, read_small, write_json
from holdfast.smp_daemon.shared.settings import ARENA, NODE
from holdfast.smp_daemon.shared.slotfile import STAMP_BYTES, read_stamp
from holdfast.smp_daemon.shared.starts import WELL, Record, Start, TrainerEnd
from holdfast.smp_daemon.shared.system import MACHINE, Files, Network
from holdfast.smp_daemon.shared.versions import ARENA_FORMAT, FIRST_FORMAT, RELEASE
from holdfast.smp_daemon.storage.arena import Arena
from holdfast.smp_daemon.storage.codings import Coding, Codings
from holdfast.smp_daemon.storage.holdings import Commit, Holdings, Key, ShardKey
from holdfast.smp_daemon.storage.pool import Slot, SlotFilePool, SlotState
from holdfast.smp_daemon.storage.reserver import Reserver

log = get_log(__name__)


@dataclass(slots=True)
class SnapshotProgress:
    """The progress of one snapshot of this epoch on this node."""

    sealed: set[str] = field(default_factory=set)
    outcome: SnapshotOutcome = SnapshotOutcome.PENDING


@dataclass(frozen=True, slots=True)
class _NodeFile:
    """The contents of ``node.json``, kept for a successor."""

    job: str
    node: str
    epoch: Count
    protected: SnapshotId | None
    record: Record
    given_up: tuple[Identifier, ...] = ()
    format: Count = ARENA_FORMAT
    release: str = RELEASE


class Store:
    """The snapshots of one SMP: what is being written, sealed, protected and released.

    Args:
        backend: erasure code backend, see `ec.choose_codec`.
        on_sealed: called, in the thread that sealed the last one, once all shards of this node are sealed, with whether
            they must be encoded.
        on_parity: called once this node's own parity of a snapshot is committed in an epoch, to tell the group in that
            layout.
        on_protected: called with the lock held once a snapshot is protected, as far as this node's group is concerned.
        on_epoch: called with the new epoch once it has begun.
        spare: slots for each shard beyond those that the layout names, for snapshots that are held (see `hold`).
        priority: of the thread that reserves memory, see `smp_daemon.shared.priority`.
    """

    def __init__(
        self,
        arena: Arena,
        job: str,
        node: str,
        *,
        backend: str = "auto",
        on_sealed: Callable[[SnapshotId, bool], None],
        on_parity: Callable[[int, SnapshotId, Layout], None],
        on_protected: Callable[[SnapshotId], None],
        on_epoch: Callable[[int], None],
        spare: int = 0,
        priority: str = "normal",
        network: Network = MACHINE,
    ) -> None:
        self.network = network
        self.arena = arena
        self.job = job
        self.node = node
        # The store's lock, also called `changed`. It guards everything here, in the arena and its pools, in `holdings`
        # and in `codings`. Connection threads take it, and so do the threads that protect, persist, scrub, rejoin,
        # regroup and reserve memory. It is reentrant because callbacks call back in. Order: `Monitor._regrouping_lock`,
        # `Holdings.verify_lock` and `_taking` of `coding.sending` are taken before it. The locks of the persister, of a
        # `ParityGathering`, of `Recoveries`, of the channels to peers, of counters and of logs are taken after it: a
        # thread that holds one of them must not take this one. Bytes are copied, digested, sent, reserved and mapped in
        # without it, however many there are, and their memory is given back without it: trainers wait for it in every
        # step. Exceptions are of bounded length: one unit is repaired, slots are made and deleted if `is_at_once`
        # (`Arena.reserve`, `Arena.take_away`), and a slot is wiped part by part. docs/size.md lists what grows.
        self.changed = network.Condition(network.RLock())
        self.counters = Counters(network, lambda: self.board.note_move())
        self.reserver = Reserver(arena, self.changed, priority, network, self.counters.moved)
        self.reserver.on_ready = self._post_ready
        self.holdings = Holdings(arena, self.changed, self.counters, backend, self.reserver, network)
        self.board = Board(arena.path / "board", create=True, files=arena.files)
        self.epoch = 0
        self.protected: SnapshotId | None = None
        self.record = Record()
        self.given_up: frozenset[str] = frozenset()
        self._never_acknowledged: set[SnapshotId] = set()
        self.codings = Codings(
            arena,
            node,
            self.changed,
            self.holdings,
            epoch=lambda: self.epoch,
            on_own=on_parity,
            on_done=self._settle,
            clocks=network,
        )
        self._failures = Episodes(log)
        self._on_sealed = on_sealed
        self._on_protected = on_protected
        self._on_epoch = on_epoch
        self._spare = spare
        self._held: set[SnapshotId] = set()
        self._given_up: Callable[[SnapshotId], bool] = lambda snapshot: False  # whose parity is not wanted any more
        self._progress: dict[SnapshotId, SnapshotProgress] = {}
        self._checked_headers: dict[str, tuple[int, bytes]] = {}
        with self.changed:  # the reserver's thread may begin before all is adopted
            self._adopt()
            self.arena.settle()
            self.reserver.go_on()

    # ------------------------------------------------------------------ epochs and layouts

    @property
    def layout(self) -> Layout | None:
        """The layout of the current epoch as the trainers arranged it, once it is configured."""
        return self.arena.layouts.get((self.epoch, 0))

    def newest_layout(self) -> Layout | None:
        """The newest layout known: of the newest epoch, as its SMPs last regrouped it."""
        with self.changed:
            return self.arena.layouts[max(self.arena.layouts)] if self.arena.layouts else None

    def longest_unit(self) -> int:
        """The greatest length of a unit of this job, in bytes, as far as this node knows."""
        with self.changed:
            return max((layout.unit_bytes for layout in self.arena.layouts.values()), default=MAX_UNIT_BYTES)

    @property
    def run(self) -> Run | None:
        """The run that this node takes part in, or took part in last; None: none.

        An SMP that was told of no start, as it came later or has lost ``node.json``, knows it by its newest layout.
        """
        with self.changed:
            if self.record.start is not None:
                return self.record.start.run
            newest = self.newest_layout()
            return newest.run if newest is not None else None

    def own_keys(self) -> list[Key]:
        """The keys of everything held here of this node's run."""
        with self.changed:
            run = self.run
            own = {at.epoch for at in self.arena.layouts.values() if run is not None and at.run.id == run.id}
            return [key for key in self.holdings.held() if key.snapshot.epoch in own]

    def newest_shards(self) -> list[ShardKey]:
        """The shards held here of the newest snapshot of this node's run that has any."""
        shards = [key for key in self.own_keys() if isinstance(key, ShardKey)]
        newest = max((key.snapshot for key in shards), default=None)
        return [key for key in shards if key.snapshot == newest]

    def check_epoch(self, epoch: int) -> None:
        """Raise `StaleEpoch` unless `epoch` is the current one."""
        if epoch != self.epoch:
            raise StaleEpoch(f"epoch {epoch_text(epoch)} may not write: {self._where}")

    @property
    def _where(self) -> str:
        return f"job {self.job!r} is in epoch {epoch_text(self.epoch)}"

    def join(self, epoch: int, start: Start | None = None) -> None:
        """Enter `epoch`. A newer epoch takes every slot that is being written away from its writer.

        Args:
            start: the start of the job that begins this epoch; None if only the layout changes.

        Raises:
            StaleEpoch: a newer epoch has begun here.
        """
        with self.changed:
            if epoch < self.epoch:
                raise StaleEpoch(f"epoch {epoch_text(epoch)} is over: {self._where}")
            if epoch == self.epoch:
                return
            self._never_acknowledged = self.never_acknowledged()
            self._forget(lambda snapshot: True)
            self._given_up = lambda snapshot: False
            self.arena.fence(epoch)
            self.holdings.look()
            failpoint("join.fenced")
            self.epoch = epoch
            if start is not None:
                run = self.run
                if run is not None and run.id != start.run.id:
                    self.protected = None  # what was promised of another run says nothing of this one
                self.record = Record(start)
                self.given_up -= {start.run.id}  # somebody has chosen it again
            self._write_node()
            failpoint("join.noted")
            self.board = self.board.succeeded(epoch)
            failpoint("join.done")
            self.changed.notify_all()
        self._on_epoch(epoch)

    def ended(self, epoch: int, coord: str, end: TrainerEnd) -> None:
        """Record how the trainer `coord` of this epoch ended; the first report counts. Raises `StaleEpoch`."""
        with self.changed:
            self.check_epoch(epoch)
            if self.record.start is None or coord in self.record.ends:
                return
            end = TrainerEnd(max(end.step, self.record.start.base), end.failure)
            self.record = self.record.ended(coord, end)
            self._write_node()
        if end.failure != WELL:
            text, extra = "%s ended at step %d: %s", {"coord": coord, "reason": end.failure}
            log.warning(text, coord, end.step, end.failure, extra=about(SnapshotId(epoch, end.step), **extra))

    def goes_on(self, epoch: int, coord: str) -> None:
        """Note that the trainer `coord` of this epoch lives: a record that it was killed is removed. Raises
        `StaleEpoch`."""
        with self.changed:
            self.check_epoch(epoch)
            record = self.record.goes_on(coord)
            if record != self.record:
                self.record = record
                self._write_node()

    def configure(self, layout: Layout) -> int:
        """Reserve the slots that this node needs in `layout`; many bytes are reserved in the background. Harmless if
        called again. Returns how many slots of every shard, and of parity, trainers may use by now.

        Raises:
            StaleEpoch: the layout is of another epoch.
            ArenaTooSmall: there is no room; nothing was reserved.
            ProtocolError: the layout is of another job, does not name this node, or differs from the epoch's layout.
        """
        with self.changed:
            self.check_epoch(layout.epoch)
            if layout.job != self.job:
                raise ProtocolError(f"this SMP serves job {self.job!r}, not {layout.job!r}")
            if self.record.start is not None and self.record.start.run.id != layout.run.id:
                raise ProtocolError(f"this node takes part in run {self.record.start.run}, not in {layout.run}")
            if self.layout is not None:
                if self.layout != layout:
                    raise ProtocolError(f"epoch {epoch_text(layout.epoch)} has another layout already")
                return self._ready(layout)
            self._reserve(layout)
            failpoint("configure.reserved")
            self.arena.add_layout(layout)
            self._post_ready()
            failpoint("configure.done")
            self.changed.notify_all()
            return self._ready(layout)

    def await_reserved(self, epoch: int, count: int, deadline_s: float) -> int:
        """Block until trainers may use `count` slots of every shard, and of parity, or until the deadline. Returns how
        many they may use.

        Raises:
            StaleEpoch: a newer epoch has begun.
            ArenaTooSmall: there was no memory for them.
        """
        with self.changed:
            layout = self._configured(epoch)
            self.changed.wait_for(
                lambda: self.epoch != epoch or bool(self.reserver.error) or self._ready(layout) >= count, deadline_s
            )
            self.check_epoch(epoch)
            return self._ready(layout)

    def _post_ready(self) -> None:
        """Post how many slots trainers may use. The caller holds the lock, or no other thread has the store yet."""
        if self.layout is not None:
            self.board.post_ready(REFUSED if self.reserver.error else self._ready(self.layout))

    def _ready(self, layout: Layout) -> int:
        if self.reserver.error:
            raise ArenaTooSmall(self.reserver.error)
        ready = self.arena.ready()
        if ready is None:
            return layout.slots
        # Trainers that have two slots may order that a snapshot is held, which takes a spare slot (see `hold`). Until
        # all slots are made, the spare ones are kept back from those that exist.
        return min(max(min(ready, 1), ready - self._spare), layout.slots)

    # ------------------------------------------------------------------ from seal to outcome

    def place(self, coord: str, near: int | None) -> None:
        """Allocate future slots for `coord` on NUMA node `near`; None: on any."""
        with self.changed:
            self.arena.shard_pool(coord).near = near

    def slots(self, epoch: int, coord: str) -> list[tuple[SlotFilePool, Slot]]:
        """The slots made for shards of `coord` so far, whatever they hold.

        Raises:
            StaleEpoch: `epoch` is not the current one.
            ProtocolError: the job has no such shard.
        """
        with self.changed:
            self._configured(epoch).shard_bytes(coord)
            pool = self.arena.shard_pool(coord)
            return [(pool, slot) for slot in self.arena.reserved(pool)]

    def seal(
        self,
        snapshot: SnapshotId,
        coord: str,
        slot_file: str,
        taken: int,
        keep: Collection[SnapshotId],
        protected: SnapshotId | None = None,
        with_parity: Collection[SnapshotId] | None = None,
        *,
        encode: bool = True,
        digests: tuple[int, ...] = (),
    ) -> None:
        """Free older snapshots that are not in `keep`; check what the trainer of `coord` has written, and commit it.
        Without `digests` blocks for about one read of the bytes.

        Args:
            slot_file, taken: the slot, and by which mark the trainer owns it.
            protected: the newest snapshot that the whole job knows to be protected. It must be in `keep`.
            with_parity: the snapshots of `keep` that keep their parity, or are still to get it; None: all.
            encode: whether the snapshot is to be protected; the same for every shard of the job.
            digests: digests of all units, taken by the writer while it wrote them: they are compared with the bytes
                when these are first sent, restored or scrubbed. Empty: the bytes are read for them now.

        Raises:
            StaleEpoch: the slot was taken away, by a newer epoch for example.
            ProtocolError: header, stamp or the number of digests do not fit; the slot is free again.
        """
        with self.changed:
            layout = self._configured(snapshot.epoch)
            layout.shard_bytes(coord)  # raises if the job has no such shard
            if protected is not None and protected not in keep:
                raise ProtocolError(f"{protected} is protected and must be kept")
            pool = self.arena.shard_pool(coord)
            self.holdings.look()
            slot = pool.hand_over(slot_file, taken, snapshot)
            self._note_protected(protected)
            self._release(keep, keep if with_parity is None else with_parity, snapshot)
            failpoint("seal.released", snapshot.step)
            for other in [s for s in pool.slots if s.state is SlotState.RECEIVING and s.snapshot not in keep]:
                self.arena.take_away(pool, other)
                self.reserver.make_good()
            self.holdings.drop(ShardKey(snapshot, coord))  # if it was received before its trainer came to write it
            self._progress.setdefault(snapshot, SnapshotProgress())
            self.board.post(snapshot.step, SnapshotOutcome.PENDING)
            view = pool.view(slot)
        failpoint("seal.before", snapshot.step)
        try:
            self._check_slot(view, snapshot, coord, layout)
            if digests and len(digests) != (count := -(-slot.bytes // layout.unit_bytes)):
                raise ProtocolError(f"{len(digests)} digests for {coord}, which has {count} units")
            found = digests or digest_units(view, layout.unit_bytes)
            commit = Commit.of(ShardRecord(snapshot, coord, slot.bytes, layout.unit_bytes, found, run=layout.run.id))
            failpoint("seal.digested", snapshot.step)
            with self.changed:
                if not pool.is_at(slot, view) or slot.snapshot != snapshot:
                    raise StaleEpoch(f"the slot of {coord} was taken away while {snapshot} was sealed")
                self.holdings.commit(pool, slot, commit)
                progress = self._progress.setdefault(snapshot, SnapshotProgress())
                progress.sealed.add(coord)
                whole = progress.sealed == {s.coord for s in layout.node(self.node).shards}
        except HoldfastError as error:
            with self.changed:
                if pool.is_at(slot, view) and slot.snapshot == snapshot:
                    pool.discard(slot)
            self.fail(snapshot, f"{coord} is not sealed: {error}")
            raise
        failpoint("seal.committed", snapshot.step)
        if whole:
            failpoint("seal.done", snapshot.step)
            group, _ = layout.place(self.node)
            self._on_sealed(snapshot, encode and layout.protects(group))
            if encode:
                self._settle(snapshot)

    def never_acknowledged(self) -> set[SnapshotId]:
        """Snapshots held here that cannot have been reported to trainers as protected, because this node never posted
        that.

        Covers the current epoch, and snapshots of the previous one until they are restored.
        """
        with self.changed:
            held = {key.snapshot for key in self.holdings.held()}
            current = {snapshot for snapshot in held if snapshot.epoch == self.epoch and self._is_open(snapshot)}
            return current | self._never_acknowledged & held

    def note_restored(self, snapshot: SnapshotId) -> None:
        """Note that a snapshot is being restored: it will be reported as protected, and is no longer
        `never_acknowledged`."""
        with self.changed:
            self._never_acknowledged.discard(snapshot)

    def is_wanted(self, snapshot: SnapshotId) -> bool:
        """Whether a snapshot of this epoch may still become protected: it is pending and was not given up."""
        with self.changed:
            progress = self._progress.get(snapshot)
            return snapshot.epoch == self.epoch and progress is not None and progress.outcome is SnapshotOutcome.PENDING

    def is_given_up(self, snapshot: SnapshotId) -> bool:
        """Whether the trainers of this epoch have said that a snapshot needs no parity any more."""
        with self.changed:
            return self._given_up(snapshot)

    def fail(self, snapshot: SnapshotId, reason: str) -> None:
        """Post that `snapshot` will not be protected. The trainers will agree to give it up."""
        with self.changed:
            progress = self._progress.get(snapshot)
            if progress is None or progress.outcome is not SnapshotOutcome.PENDING or snapshot.epoch != self.epoch:
                return
            progress.outcome = SnapshotOutcome.FAILED
            self.board.post(snapshot.step, SnapshotOutcome.FAILED)
            failpoint("outcome.failed", snapshot.step)
            self.changed.notify_all()
        self._failures.begin("snapshots", "%s failed: %s", snapshot, reason, extra=about(snapshot, reason=reason))

    def await_outcome(self, snapshot: SnapshotId, deadline_s: float) -> SnapshotOutcome:
        """Block until `snapshot` is protected or has failed, or until the deadline. Returns its outcome."""

        def outcome() -> SnapshotOutcome:
            progress = self._progress.get(snapshot)
            if progress is not None:
                return progress.outcome
            over = snapshot.epoch != self.epoch or self._given_up(snapshot)
            return SnapshotOutcome.FAILED if over else self.board.outcome(*snapshot)

        with self.changed:
            self.changed.wait_for(lambda: outcome() is not SnapshotOutcome.PENDING, deadline_s)
            return outcome()

    # ------------------------------------------------------------------ bytes from elsewhere

    def receiving_shard(self, key: ShardKey, layout: Layout) -> AbstractContextManager[memoryview]:
        """See `Holdings.receiving_shard`."""
        return self.holdings.receiving_shard(
            key, layout, lambda view: self._check_slot(view, key.snapshot, key.coord, layout)
        )

    def keep_layout(self, layout: Layout) -> None:
        """Remember a layout that was not configured here, because this node is about to hold bytes coded in it."""
        with self.changed:
            if (layout.epoch, layout.revision) not in self.arena.layouts:
                self.arena.add_layout(layout)

    def hold(self, snapshot: SnapshotId) -> bool:
        """Keep this node's shards of a snapshot until `let_go`, whatever the trainers say. Returns False if some are
        not here, or if a snapshot is held already.

        Holding needs a spare slot: see `Store`.
        """
        with self.changed:
            wanted = self.layout.node(self.node).shards if self.layout is not None else ()
            if self._held or not all(self.holdings.holds(ShardKey(snapshot, shard.coord)) for shard in wanted):
                return False
            if not self.holdings.hold([ShardKey(snapshot, shard.coord) for shard in wanted]):
                return False
            self._held.add(snapshot)
            return True

    def let_go(self, snapshot: SnapshotId) -> None:
        """Stop holding a snapshot, so that its slots may be taken. Harmless if it was not held."""
        with self.changed:
            self._held.discard(snapshot)
            self.holdings.let_go(snapshot)

    def give_up(self, runs: Collection[str]) -> None:
        """Give these runs up: drop what is held of them here, and tell every later start that they are over."""
        with self.changed:
            if not set(runs) <= self.given_up:
                self.given_up |= set(runs)
                self._write_node()  # first, so that what is left after a crash between is not taken for a run's state
            epochs = {layout.epoch for layout in self.arena.layouts.values() if layout.run.id in self.given_up}
            for key in [key for key in self.holdings.held() if key.snapshot.epoch in epochs]:
                self.holdings.drop(key)
            self.changed.notify_all()

    def retire(self) -> None:
        """Remove everything, because the job is over. Later calls that name an epoch fail with `StaleEpoch`."""
        with self.changed:
            self._forget(lambda snapshot: True)
            self.epoch = sys.maxsize
            self.arena.empty()
            self.changed.notify_all()
        self.arena.deleted.free(self.changed)
        with self.changed:
            self.arena.destroy()

    # ------------------------------------------------------------------ inside

    def _reserve(self, layout: Layout) -> None:
        count = layout.slots + self._spare
        shards = layout.node(self.node).shards
        wanted: dict[SlotFilePool, tuple[int, int]] = {self.arena.shard_pool(s.coord): (s.bytes, count) for s in shards}
        group, position = layout.place(self.node)
        if layout.protects(group):
            pool = self.arena.parity_pool(layout.tag(group), position)
            wanted[pool] = (layout.stripes(group).parity_bytes(position), layout.slots_of_parity)
        self.arena.reserve(wanted)
        self.reserver.start()

    def _configured(self, epoch: int) -> Layout:
        self.check_epoch(epoch)
        if self.layout is None:
            raise ProtocolError(f"epoch {epoch_text(epoch)} is not configured yet")
        return self.layout

    def _check_slot(self, view: memoryview, snapshot: SnapshotId, coord: str, layout: Layout) -> None:
        """Raise `ProtocolError` unless the slot's header is that of this shard. Headers differ in their stamps only."""
        length = 8 + int.from_bytes(view[:8], "little")
        unstamped = bytes(view[:8]) + bytes(view[8 + STAMP_BYTES : length])
        checked = (layout.epoch, unstamped)
        if self._checked_headers.get(coord) != checked:
            believe_slot(view, Claim.of_shard(snapshot, coord, layout))
            self._checked_headers[coord] = checked
        elif read_stamp(view) != snapshot:
            raise NotOurs(f"{coord} is stamped {read_stamp(view)}, not {snapshot}")

    def _settle(self, snapshot: SnapshotId) -> None:
        """Post the snapshot as protected if all shards of this node are sealed and all parity of its group is
        committed."""
        with self.changed:
            progress = self._progress.get(snapshot)
            layout = self.layout
            if progress is None or layout is None or progress.outcome is not SnapshotOutcome.PENDING:
                return
            group, _ = layout.place(self.node)
            everyone = set(range(len(layout.groups[group]))) if layout.protects(group) else set()
            sealed = progress.sealed == {s.coord for s in layout.node(self.node).shards}
            if sealed and self.codings.is_done(Coding(snapshot, layout.tag(group)), everyone):
                progress.outcome = SnapshotOutcome.PROTECTED
                self.board.post(snapshot.step, SnapshotOutcome.PROTECTED)
                failpoint("outcome.protected", snapshot.step)
                self._on_protected(snapshot)
                self.changed.notify_all()
                self._failures.end("snapshots", "snapshots are protected again: %s", snapshot, extra=about(snapshot))

    def _release(self, keep: Collection[SnapshotId], with_parity: Collection[SnapshotId], before: SnapshotId) -> None:
        parities = set(keep) & set(with_parity)

        def stays(key: Key) -> bool:
            wanted = {*keep, *self._held} if isinstance(key, ShardKey) else parities
            return key.snapshot in wanted or key.snapshot >= before

        self.holdings.look()
        self._forget(lambda snapshot: snapshot not in keep and snapshot < before)
        self._given_up = lambda snapshot: snapshot not in parities and snapshot < before
        self._leave_unprotected(self._given_up)
        self.arena.release(keep, before, self._held, parities)
        self.reserver.make_good()
        self.holdings.keep_only(stays)
        self.changed.notify_all()

    def _leave_unprotected(self, given_up: Callable[[SnapshotId], bool]) -> None:
        """Stop making and repairing parity of these snapshots; those that are pending fail. Their sealed shards
        stay."""
        self.codings.forget(given_up)
        self.holdings.stop_repairs(given_up)
        for snapshot, progress in self._progress.items():
            if given_up(snapshot) and progress.outcome is SnapshotOutcome.PENDING:
                progress.outcome = SnapshotOutcome.FAILED
                self.board.post(snapshot.step, SnapshotOutcome.FAILED)

    def _is_open(self, snapshot: SnapshotId) -> bool:
        """Whether this node took part in a snapshot of this epoch, and has not posted it as protected."""
        progress = self._progress.get(snapshot)
        outcome = progress.outcome if progress is not None else self.board.posted(snapshot.step)
        return outcome is not None and outcome is not SnapshotOutcome.PROTECTED

    def _forget(self, gone: Callable[[SnapshotId], bool]) -> None:
        """Stop all work for snapshots for which `gone` is True: they are given up."""
        self.codings.forget(gone)
        self._progress = {k: v for k, v in self._progress.items() if not gone(k)}

    def _note_protected(self, snapshot: SnapshotId | None) -> None:
        if snapshot is not None and (self.protected is None or snapshot > self.protected):
            self.protected = snapshot
            self.record = self.record.protected(snapshot)
            self._write_node()

    def _write_node(self) -> None:
        write_json(
            self.arena.path / "node.json",
            to_plain(
                _NodeFile(self.job, self.node, self.epoch, self.protected, self.record, tuple(sorted(self.given_up)))
            ),
        )

    def _adopt(self) -> None:
        """Take over what a predecessor left in the arena."""
        failpoint("adopt.before")
        path = self.arena.path / "node.json"
        try:
            known = self._read_node(path)
            damaged = known is None and path.name in self.arena.lost
        except ProtocolError as error:
            log.warning("%s is lost, and is written anew: %s", path, error, extra=about(file=path.name))
            known, damaged = None, True
        if known is not None or damaged:
            self.arena.adopt_layouts()
        if known is None and not self._is_ours():
            self.arena.clear()
            return
        if known is not None:
            self.epoch, self.protected, self.record = known.epoch, known.protected, known.record
            self.given_up = frozenset(known.given_up)
            self._adopt_board()
        self.holdings.adopt()
        if known is None:
            # What is held has records and digests of its own, so it stays. Lost are: the epoch, the newest protected
            # snapshot, and the record of the last start. All other nodes were told the same, and a start takes the
            # newest that any of them knows. The newest epoch of what is left is never newer than the lost one. If it is
            # older, a late writer of it may write here, as it may on a node that has lost all its memory: nothing of
            # that counts, since the other nodes do not let it in. The board's epoch has no digest and is not believed.
            held = [key.snapshot.epoch for key in self.holdings.held()]
            self.epoch = max([*held, *(epoch for epoch, _ in self.arena.layouts)])
            self._adopt_board()
            self._write_node()
        self.arena.own(self.epoch)
        failpoint("adopt.done")
        self.arena.budget.check_limit(self.arena.room())  # refused before anything is deleted
        if self.layout is not None:
            try:
                self._reserve(self.layout)
            except ArenaTooSmall as error:  # go on: other nodes need the shards and parity that are held here
                self.reserver.give_up(str(error))
        self._post_ready()

    def _read_node(self, path: Path) -> _NodeFile | None:
        """What a predecessor knew; None if there was none, or it had begun to remove the arena.

        Raises:
            VersionMismatch: it wrote the arena in another format.
            ConfigError: the arena is another job's or node's.
            ProtocolError: the file is damaged.
        """
        try:
            data = read_json(path, self.arena.files)
        except ProtocolError:
            self._check_format(_without_digest(path, self.arena.files), FIRST_FORMAT)
            raise
        if data is None:
            return None
        self._check_format(data, ARENA_FORMAT)
        known = from_plain(_NodeFile, data, "what an SMP has written of its node")
        if known.job != self.job:
            raise ConfigError(
                f"the arena {self.arena.path} belongs to job {known.job!r} on node {known.node!r}, not to job "
                f"{self.job!r}: choose another"
            )
        if known.node != self.node:
            raise ConfigError(
                f"the arena {self.arena.path} belongs to job {known.job!r} on node {known.node!r}, and this node is "
                f"called {self.node!r}. If its name has changed, as that of a container does, set {NODE.variable}="
                f"{known.node}, and the job goes on with what the arena holds, perhaps the only copy; otherwise choose "
                f"another with {ARENA.variable}"
            )
        return known

    def _check_format(self, node: object, unsaid: int) -> None:
        if isinstance(node, dict) and (written := node.get("format", unsaid)) != ARENA_FORMAT:
            raise VersionMismatch(
                f"the arena {self.arena.path} was written by holdfast {node.get('release')} in format {written}, and "
                f"holdfast {RELEASE} reads format {ARENA_FORMAT}: start the SMP of that version. Only if other nodes "
                "protect this one may the arena be deleted, with `holdfast gc`, and rebuilt from their parity "
                "(docs/operating.md)"
            )

    def _is_ours(self) -> bool:
        """Whether a layout in the arena names this job and this node, as ``node.json`` would."""
        layouts = self.arena.layouts.values()
        return any(each.job == self.job and self.node in {node.name for node in each.nodes} for each in layouts)

    def _adopt_board(self) -> None:
        if self.board.epoch == self.epoch:
            self.board.fail_pending()
            self.board.post_repair(None)  # trainers order again what the predecessor had not done
        else:
            self.board.reset(self.epoch)  # the predecessor wrote a new epoch to `node.json`, and died before the board
        failpoint("adopt.board")


def _without_digest(path: Path, files: Files) -> object:
    """The JSON in a file of the first format; None if it is no such file."""
    content = read_small(path, files) or b""
    try:
        return None if b"\n" in content else decode_json(dict, content, "")
    except ProtocolError:
        return None
