"""From seal to outcome: what trainers have written is checked and committed, older snapshots are released, and a
snapshot whose group has all its parity is posted as protected.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from holdfast.smp_daemon.shared.belief import Claim, believe_slot
from holdfast.smp_daemon.shared.errors import NotOurs, ProtocolError, StaleEpoch
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.messages import Seal
from holdfast.smp_daemon.shared.records import ShardRecord, digest_units
from holdfast.smp_daemon.shared.slotfile import STAMP_BYTES, read_stamp
from holdfast.smp_daemon.storage.arena import Arena
from holdfast.smp_daemon.storage.codings import Coding, Codings
from holdfast.smp_daemon.storage.holdings import Commit, Holdings, Key, ShardKey
from holdfast.smp_daemon.storage.job_state import JobState
from holdfast.smp_daemon.storage.outcomes import Outcomes
from holdfast.smp_daemon.storage.pool import SlotState
from holdfast.smp_daemon.storage.receiving import Receiving
from holdfast.smp_daemon.storage.reserver import Reserver


class Sealing:
    """The shards that this node's trainers hand over. Thread-safe."""

    def __init__(
        self,
        arena: Arena,
        node: str,
        state: JobState,
        holdings: Holdings,
        codings: Codings,
        receiving: Receiving,
        reserver: Reserver,
        outcomes: Outcomes,
        held: Collection[SnapshotId],
        on_sealed: Callable[[SnapshotId, bool], None],
    ) -> None:
        """
        Args:
            held: the snapshots that are held at this moment, see `Store.hold`.
            on_sealed: see `Store`.
        """
        self._changed: threading.Condition = codings.changed
        self._arena = arena
        self._node = node
        self._state = state
        self._holdings = holdings
        self._codings = codings
        self._receiving = receiving
        self._reserver = reserver
        self._outcomes = outcomes
        self._held = held
        self._on_sealed = on_sealed
        self._checked_headers: dict[str, tuple[int, bytes]] = {}

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
        with self._changed:
            layout = self._state.configured(snapshot.epoch)
            layout.shard_bytes(coord)  # raises if the job has no such shard
            if request.protected is not None and request.protected not in keep:
                raise ProtocolError(f"{request.protected} is protected and must be kept")
            pool = self._arena.shard_pool(coord)
            self._holdings.look()
            slot = pool.hand_over(request.slot, request.taken, snapshot)
            self._outcomes.expect(snapshot)
            try:
                view = pool.view(slot)
                self._state.note_protected(request.protected)
                self._release(keep, keep if request.with_parity is None else request.with_parity, snapshot)
                failpoint("seal.released", snapshot.step)
                for other in [s for s in pool.slots if s.state is SlotState.RECEIVING and s.snapshot not in keep]:
                    self._arena.take_away(pool, other)
                    self._reserver.make_good()
                self._holdings.drop(ShardKey(snapshot, coord))  # if it was received before its trainer came to write it
            except Exception as error:  # a full file system, for example: a later snapshot is to find the slot free
                pool.discard(slot)
                self._outcomes.fail(snapshot, f"{coord} is not sealed: {error}")
                raise
        failpoint("seal.before", snapshot.step)
        try:
            self.check_slot(view, snapshot, coord, layout)
            if request.digests and len(request.digests) != (count := -(-slot.bytes // layout.unit_bytes)):
                raise ProtocolError(f"{len(request.digests)} digests for {coord}, which has {count} units")
            found = request.digests or digest_units(view, layout.unit_bytes)
            commit = Commit.of(ShardRecord(snapshot, coord, slot.bytes, layout.unit_bytes, found, run=layout.run.id))
            failpoint("seal.digested", snapshot.step)
            with self._changed:
                if not pool.is_at(slot, view) or slot.snapshot != snapshot:
                    raise StaleEpoch(f"the slot of {coord} was taken away while {snapshot} was sealed")
                self._holdings.commit(pool, slot, commit)
                self._outcomes.note_sealed(snapshot, coord)
                whole = self._is_sealed(snapshot, layout)
        except Exception as error:
            with self._changed:
                if pool.is_at(slot, view) and slot.snapshot == snapshot:
                    pool.discard(slot)
            self._outcomes.fail(snapshot, f"{coord} is not sealed: {error}")
            raise
        failpoint("seal.committed", snapshot.step)
        if whole:
            failpoint("seal.done", snapshot.step)
            group, _ = layout.place(self._node)
            self._on_sealed(snapshot, request.encode and layout.protects(group))
            if request.encode:
                self.post_if_protected(snapshot)

    def check_slot(self, view: memoryview, snapshot: SnapshotId, coord: str, layout: Layout) -> None:
        """Raise `ProtocolError` unless the slot's header is that of this shard. Headers differ in their stamps only."""
        length = 8 + int.from_bytes(view[:8], "little")
        unstamped = bytes(view[:8]) + bytes(view[8 + STAMP_BYTES : length])
        checked = (layout.epoch, unstamped)
        if self._checked_headers.get(coord) != checked:
            believe_slot(view, Claim.of_shard(snapshot, coord, layout))
            self._checked_headers[coord] = checked
        elif read_stamp(view) != snapshot:
            raise NotOurs(f"{coord} is stamped {read_stamp(view)}, not {snapshot}")

    def post_if_protected(self, snapshot: SnapshotId) -> None:
        """Post the snapshot as protected if all shards of this node are sealed and all parity of its group is
        committed."""
        with self._changed:
            layout = self._state.layout
            if layout is None or not self._outcomes.is_wanted(snapshot):
                return
            group, _ = layout.place(self._node)
            everyone = set(range(len(layout.groups[group]))) if layout.protects(group) else set()
            done = self._codings.is_done(Coding(snapshot, layout.tag(group)), everyone)
            if done and self._is_sealed(snapshot, layout):
                self._outcomes.protect(snapshot)

    def _is_sealed(self, snapshot: SnapshotId, layout: Layout) -> bool:
        return self._outcomes.is_sealed(snapshot, [shard.coord for shard in layout.node(self._node).shards])

    def _release(self, keep: Collection[SnapshotId], with_parity: Collection[SnapshotId], before: SnapshotId) -> None:
        parities = set(keep) & set(with_parity)

        def stays(key: Key) -> bool:
            wanted = {*keep, *self._held} if isinstance(key, ShardKey) else parities
            return key.snapshot in wanted or key.snapshot >= before

        self._holdings.look()
        self._leave_unprotected(lambda snapshot: snapshot not in parities and snapshot < before)
        self.forget(lambda snapshot: snapshot not in keep and snapshot < before)
        self._arena.release(keep, before, self._held, parities)
        self._reserver.make_good()
        self._holdings.keep_only(stays)
        self._changed.notify_all()

    def _leave_unprotected(self, given_up: Callable[[SnapshotId], bool]) -> None:
        """Stop making and repairing parity of these snapshots; those that are pending fail. Their sealed shards
        stay."""
        self._codings.forget(given_up)
        self._receiving.stop_repairs(given_up)
        self._outcomes.give_up(given_up)

    def forget(self, gone: Callable[[SnapshotId], bool]) -> None:
        """Stop all work for snapshots for which `gone` is True: they are given up."""
        self._codings.forget(gone)
        self._outcomes.forget(gone)
