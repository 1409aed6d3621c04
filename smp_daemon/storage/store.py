"""The snapshots of one SMP, and the rules by which their state changes. No sockets here: `smp_daemon.service` calls in.
Sealed shards and parity are kept by `smp_daemon.storage.holdings`.

Every public method is thread-safe. `changed` is notified whenever something happens that a thread may wait for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from itertools import chain
from pathlib import Path

from holdfast.smp_daemon.shared.board import REFUSED, Board
from holdfast.smp_daemon.shared.counters import Counters
from holdfast.smp_daemon.shared.errors import ArenaTooSmall, ProtocolError, StaleEpoch
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.identity import epoch_text
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.messages import Seal, SlotFile
from holdfast.smp_daemon.shared.plain import encode_digested, to_plain
from holdfast.smp_daemon.shared.records import ShardRecord, digest_units
from holdfast.smp_daemon.shared.starts import Start
from holdfast.smp_daemon.shared.system import MACHINE, Network
from holdfast.smp_daemon.storage.arena import Arena
from holdfast.smp_daemon.storage.codings import Coding, Codings
from holdfast.smp_daemon.storage.holdings import Commit, Holdings, Key, ShardKey
from holdfast.smp_daemon.storage.job_state import JobState, Outcomes, Predecessor
from holdfast.smp_daemon.storage.pool import SlotPool, SlotState
from holdfast.smp_daemon.storage.receiving import Receiving
from holdfast.smp_daemon.storage.reserver import Reserver


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
        self.backend = backend
        # The store's lock, also called `changed`. It guards everything here, in the arena and its pools, in `holdings`
        # and in `codings`. Connection threads take it, and so do the threads that protect, persist, scrub, rejoin,
        # regroup and reserve memory. It is reentrant because callbacks call back in. Order: `Monitor._regrouping_lock`
        # and `_taking` of `coding.sending` are taken before it. The locks of the persister, of a
        # `ParityGathering`, of `Recoveries`, of the channels to peers, of counters and of logs are taken after it: a
        # thread that holds one of them must not take this one. Bytes are copied, digested, sent, reserved and mapped in
        # without it, however many there are, and their memory is given back without it: trainers wait for it in every
        # step. Exceptions are of bounded length: one unit is repaired, slots are made and deleted if `is_at_once`
        # (`Arena.reserve`), and a slot is wiped part by part. docs/size.md lists what grows.
        self.changed = network.Condition(network.RLock())
        self.counters = Counters(network, lambda: self.outcomes.board.note_move())
        self.reserver = Reserver(arena, self.changed, priority, network, self.counters.moved)
        self.reserver.on_ready = self._post_ready
        self.holdings = Holdings(arena, self.changed, self.counters)
        self.receiving = Receiving(arena, self.changed, self.holdings, self.reserver, backend, network)
        self.state = JobState(arena, job, node, self.changed)
        self.outcomes = Outcomes(
            self.changed,
            Board(arena.path / "board", create=True, files=arena.files),
            self.state,
            on_protected=on_protected,
        )
        self.codings = Codings(
            self.receiving, node, self.state, on_parity, lambda snapshot: self.post_if_protected(snapshot)
        )
        self._on_sealed = on_sealed
        self._on_epoch = on_epoch
        self._spare = spare
        with self.changed:  # the reserver's thread may begin before all is adopted
            self._adopt()
            self.arena.reserve_rest()
            self.reserver.go_on()

    # ------------------------------------------------------------------ epochs and layouts

    def own_keys(self) -> list[Key]:
        """The keys of everything held here of this node's run."""
        with self.changed:
            run = self.state.run
            own = {at.epoch for at in self.arena.layouts.values() if run is not None and at.run.id == run.id}
            return [key for key in self.holdings.held() if key.snapshot.epoch in own]

    def join(self, epoch: int, start: Start | None = None) -> None:
        """Enter `epoch`. A newer epoch takes every slot that is being written away from its writer.

        Args:
            start: the start of the job that begins this epoch; None if only the layout changes.

        Raises:
            StaleEpoch: a newer epoch has begun here.
        """
        with self.changed:
            if epoch < self.state.epoch:
                raise StaleEpoch(f"epoch {epoch_text(epoch)} is over: {self.state.where}")
            if epoch == self.state.epoch == self.outcomes.board.epoch:  # else an attempt at it failed before the board
                return
            self.codings.forget(lambda snapshot: True)
            self.arena.fence(epoch)
            held = {key.snapshot for key in self.holdings.held()}
            failpoint("join.fenced")
            self.state.begin(epoch, start)
            failpoint("join.noted")
            self.outcomes.enter(held, is_start=start is not None)
            failpoint("join.done")
            self.changed.notify_all()
        self._on_epoch(epoch)

    def configure(self, layout: Layout) -> int:
        """Reserve the slots that this node needs in `layout`; many bytes are reserved in the background. Harmless if
        called again. Returns how many slots of every shard, and of parity, trainers may use by now.

        Raises:
            StaleEpoch: the layout is of another epoch.
            ArenaTooSmall: there is no room; nothing was reserved.
            ProtocolError: the layout is of another job, does not name this node, or differs from the epoch's layout.
        """
        with self.changed:
            self.state.check_epoch(layout.epoch)
            if layout.job != self.job:
                raise ProtocolError(f"this SMP serves job {self.job!r}, not {layout.job!r}")
            if self.state.record.start is not None and self.state.record.start.run.id != layout.run.id:
                raise ProtocolError(f"this node takes part in run {self.state.record.start.run}, not in {layout.run}")
            if self.state.layout is not None:
                if self.state.layout != layout:
                    raise ProtocolError(f"epoch {epoch_text(layout.epoch)} has another layout already")
                return self._ready(layout)
            self._reserve(layout)
            failpoint("configure.reserved")
            self.arena.layouts.add(layout)
            self._post_ready()
            failpoint("configure.done")
            self.changed.notify_all()
            return self._ready(layout)

    def _post_ready(self) -> None:
        """Post how many slots trainers may use. The caller holds the lock, or no other thread has the store yet."""
        if self.state.layout is not None:
            self.outcomes.board.post_ready(REFUSED if self.reserver.error else self._ready(self.state.layout))

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

    def seal(self, request: Seal) -> None:
        """Free older snapshots that are not to be kept; check what the trainer has written, and commit it. Without
        digests blocks for about one read of the bytes. Those of the writer are compared with the bytes when these are
        first sent, restored or scrubbed.

        Raises:
            StaleEpoch: the slot was taken away, by a newer epoch for example.
            ProtocolError: header, stamp or the number of digests do not fit.
            ArenaTooSmall: a record cannot be written. After this or any other error the slot is free again.
        """
        snapshot, coord, keep = request.snapshot, request.coord, request.keep
        key = ShardKey(snapshot, coord)
        with self.changed:
            layout = self.state.configured(snapshot.epoch)
            layout.shard_bytes(coord)  # raises if the job has no such shard
            if request.protected is not None and request.protected not in keep:
                raise ProtocolError(f"{request.protected} is protected and must be kept")
            pool = self.arena.shard_pool(coord)
            self.holdings.look()
            slot = pool.hand_over(request.slot, request.taken, snapshot)
            self.outcomes.expect(snapshot)
            try:
                view = pool.view(slot)
                self.state.note_protected(request.protected)
                self._release(keep, keep if request.with_parity is None else request.with_parity, snapshot)
                failpoint("seal.released", snapshot.step)
                for other in [s for s in pool.slots if s.state is SlotState.RECEIVING and s.snapshot not in keep]:
                    pool.remove(other)
                    self.reserver.make_good()
                self.holdings.drop(key)  # if it was received before its trainer came to write it
            except Exception as error:  # a full file system, for example: a later snapshot is to find the slot free
                pool.discard(slot)
                self.outcomes.fail(snapshot, f"{coord} is not sealed: {error}")
                raise
        failpoint("seal.before", snapshot.step)
        try:
            self.receiving.check_slot(key, layout, view)
            if request.digests and len(request.digests) != (count := -(-slot.bytes // layout.unit_bytes)):
                raise ProtocolError(f"{len(request.digests)} digests for {coord}, which has {count} units")
            found = request.digests or digest_units(view, layout.unit_bytes)
            commit = Commit.of(ShardRecord(snapshot, coord, slot.bytes, layout.unit_bytes, found, run=layout.run.id))
            failpoint("seal.digested", snapshot.step)
            with self.changed:
                if not pool.is_at(slot, view) or slot.snapshot != snapshot:
                    raise StaleEpoch(f"the slot of {coord} was taken away while {snapshot} was sealed")
                self.holdings.commit(pool, slot, commit)
                self.outcomes.note_sealed(snapshot, coord)
                whole = self._is_sealed(snapshot, layout)
        except Exception as error:
            with self.changed:
                if pool.is_at(slot, view) and slot.snapshot == snapshot:
                    pool.discard(slot)
            self.outcomes.fail(snapshot, f"{coord} is not sealed: {error}")
            raise
        failpoint("seal.committed", snapshot.step)
        if whole:
            failpoint("seal.done", snapshot.step)
            group, _ = layout.place(self.node)
            self._on_sealed(snapshot, request.encode and layout.protects(group))
            if request.encode:
                self.post_if_protected(snapshot)

    def post_if_protected(self, snapshot: SnapshotId) -> None:
        """Post the snapshot as protected if all shards of this node are sealed and all parity of its group is
        committed."""
        with self.changed:
            layout = self.state.layout
            if layout is None or not self.outcomes.is_wanted(snapshot):
                return
            group, _ = layout.place(self.node)
            everyone = set(range(len(layout.groups[group]))) if layout.protects(group) else set()
            done = self.codings.is_done(Coding(snapshot, layout.tag(group)), everyone)
            if done and self._is_sealed(snapshot, layout):
                self.outcomes.protect(snapshot)

    def _is_sealed(self, snapshot: SnapshotId, layout: Layout) -> bool:
        return self.outcomes.is_sealed(snapshot, [shard.coord for shard in layout.node(self.node).shards])

    def _release(self, keep: Collection[SnapshotId], with_parity: Collection[SnapshotId], before: SnapshotId) -> None:
        parities = set(keep) & set(with_parity)
        self._leave_unprotected(lambda snapshot: snapshot not in parities and snapshot < before)
        self.outcomes.forget(lambda snapshot: snapshot not in keep and snapshot < before)
        self.arena.release(keep, before, parities)
        self.reserver.make_good()
        self.holdings.look()
        self.changed.notify_all()

    def _leave_unprotected(self, given_up: Callable[[SnapshotId], bool]) -> None:
        """Stop making and repairing parity of these snapshots; those that are pending fail. Their sealed shards
        stay."""
        self.codings.forget(given_up)
        self.outcomes.give_up(given_up)

    def place(self, coord: str, near: int | None) -> None:
        """Allocate future slots for `coord` on NUMA node `near`; None: on any."""
        with self.changed:
            self.arena.shard_pool(coord).near = near

    def slots(self, epoch: int, coord: str) -> tuple[SlotFile, ...]:
        """Where the slots are that were made for shards of `coord` so far, whatever they hold.

        Raises:
            StaleEpoch: `epoch` is not the current one.
            ProtocolError: the job has no such shard.
        """
        with self.changed:
            self.state.configured(epoch).shard_bytes(coord)
            pool = self.arena.shard_pool(coord)
            self.arena.look(pool)
            return tuple(SlotFile(**pool.place(slot)) for slot in self.arena.reserved(pool))

    # ------------------------------------------------------------------ bytes from elsewhere

    def hold(self, snapshot: SnapshotId) -> bool:
        """Keep this node's shards of a snapshot until `Holdings.let_go`, whatever the trainers say. Returns False if
        some are not here, or if a snapshot is held already.

        Holding needs a spare slot: see `Store`.
        """
        with self.changed:
            wanted = self.state.layout.node(self.node).shards if self.state.layout is not None else ()
            return self.holdings.hold([ShardKey(snapshot, shard.coord) for shard in wanted])

    def give_up(self, runs: Collection[str]) -> None:
        """Give these runs up: drop what is held of them here, and tell every later start that they are over."""
        with self.changed:
            self.state.note_given_up(runs)  # first, so that what is left after a crash is not taken for a run's state
            epochs = {layout.epoch for layout in self.arena.layouts.values() if layout.run.id in self.state.given_up}
            for key in [key for key in self.holdings.held() if key.snapshot.epoch in epochs]:
                self.holdings.drop(key)
            self.changed.notify_all()

    def write_lost(self) -> None:
        """Write those JSON files again that a successor needs and that are gone; they are encoded without the lock. Not
        once `retire` is called. Raises as `ArenaDirectory.write_again`."""
        lacks = self.arena.directory.lacks
        with self.changed:
            lost = [each for each in self._files() if lacks(each[0])]
        for each in lost:
            content = encode_digested(to_plain(each[1]))
            with self.changed:
                if each in self._files() and lacks(each[0]):
                    self.arena.directory.write_again(each[0], content)

    def _files(self) -> Iterator[tuple[Path, object]]:
        return chain(self.state.files(), self.arena.layouts.files(), self.holdings.files())

    def retire(self) -> None:
        """Remove everything, because the job is over. Later calls that name an epoch fail with `StaleEpoch`."""
        with self.changed:
            self.codings.forget(lambda snapshot: True)
            self.outcomes.forget(lambda snapshot: True)
            self.state.epoch = sys.maxsize
            self.arena.empty()
            self.changed.notify_all()
        self.arena.deleted.free(self.changed)
        with self.changed:
            self.arena.destroy()

    # ------------------------------------------------------------------ inside

    def _reserve(self, layout: Layout) -> None:
        count = layout.slots + self._spare
        shards = layout.node(self.node).shards
        wanted: dict[SlotPool, tuple[int, int]] = {self.arena.shard_pool(s.coord): (s.bytes, count) for s in shards}
        group, position = layout.place(self.node)
        if layout.protects(group):
            pool = self.arena.parity_pool(layout.tag(group), position)
            wanted[pool] = (layout.stripes(group).parity_bytes(position), layout.slots_of_parity)
        self.arena.reserve(wanted)
        self.reserver.start()

    def _adopt(self) -> None:
        failpoint("adopt.before")
        predecessor = self.state.adopt()
        if predecessor is Predecessor.NONE:
            self.arena.clear()
            return
        if predecessor is Predecessor.KNOWN:
            self.outcomes.adopt()
        self.holdings.adopt()
        if predecessor is Predecessor.FORGOTTEN:
            # What is held has records and digests of its own, so it stays. Lost are: the epoch, the newest protected
            # snapshot, and the record of the last start. All other nodes were told the same, and a start takes the
            # newest that any of them knows. The newest epoch of what is left is never newer than the lost one. If it is
            # older, a late writer of it may write here, as it may on a node that has lost all its memory: nothing of
            # that counts, since the other nodes do not let it in. The board's epoch has no digest and is not believed.
            held = [key.snapshot.epoch for key in self.holdings.held()]
            self.state.epoch = max([*held, *(epoch for epoch, _ in self.arena.layouts)])
            self.outcomes.adopt()
            self.state.write()
        self.arena.own(self.state.epoch)
        failpoint("adopt.done")
        self.arena.budget.check_limit(self.arena.room())  # refused before anything is deleted
        if self.state.layout is not None:
            try:
                self._reserve(self.state.layout)
            except ArenaTooSmall as error:  # go on: other nodes need the shards and parity that are held here
                self.reserver.give_up(str(error))
        self._post_ready()
