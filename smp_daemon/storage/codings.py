"""The parity that is being gathered on this node, and which members of each group have committed theirs.

Every public method is thread-safe. `changed` is `Store.changed`, the store's lock; here it guards the committed
positions. The locks of a `ParityGathering` guard its bytes, so units are accumulated while other threads hold the
store's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from holdfast.smp_daemon.shared.errors import NoFreeSlot, ProtocolError
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.limits import CALL_DEADLINE_S, MAX_CODINGS
from holdfast.smp_daemon.storage.holdings import ParityKey
from holdfast.smp_daemon.storage.job_state import JobState
from holdfast.smp_daemon.storage.receiving import GatheringSlot, Receiving

SLOT_WAIT_S = CALL_DEADLINE_S / 2
"""How long a peer's unit waits for a slot before the peer is told that there is none yet: well within the time after
which it would take this node for dead."""


class Coding(NamedTuple):
    """The parity of one snapshot in one group, named by its tag (see `Layout.tag`)."""

    snapshot: SnapshotId
    tag: str


class Codings:
    """All codings that this node takes part in."""

    def __init__(
        self,
        receiving: Receiving,
        node: str,
        state: JobState,
        on_own: Callable[[int, SnapshotId, Layout], None],
        on_done: Callable[[SnapshotId], None],
    ) -> None:
        """
        Args:
            on_own: called once this node's own parity is committed in an epoch, to tell the group in that layout.
                Without the store's lock: a message for each member takes a while.
            on_done: called whenever a member's parity of a snapshot is committed.
        """
        self.changed = receiving.lock
        self._receiving = receiving
        self._holdings = receiving.holdings
        self._node = node
        self._state = state
        self._on_own = on_own
        self._on_done = on_done
        self._done: dict[Coding, set[int]] = {}
        # Own parities that the group is yet to be told of: noted with the store's lock, told without it.
        self._untold: list[tuple[int, SnapshotId, Layout]] = []

    def accumulate(
        self, epoch: int, coding: Coding, stripe: int, position: int, unit: memoryview, unit_digest: int
    ) -> None:
        """Accumulate a group member's complete data unit into this node's parity. `unit_digest`: its xxh3-64.

        Call `await_gathering` first: it waits for a slot.

        Raises:
            StaleEpoch, ProtocolError, NoFreeSlot.
        """
        self._state.check_epoch(epoch)
        found = self._gather(coding)
        if found is None:
            self._tell_group()
            return
        key, gathering = found
        gathering.parity.accumulate(stripe, position, unit, unit_digest)
        self._holdings.counters.add(units_accumulated=1)
        failpoint("parity.accumulated", coding.snapshot.step)
        if gathering.parity.complete:
            self._commit_parity(key, gathering)

    def await_gathering(self, epoch: int, coding: Coding) -> None:
        """Block until this node knows the group and has a slot for its parity, `SLOT_WAIT_S` at most. Parity of padding
        alone is done at once.

        Raises:
            NoFreeSlot: not yet: a slot becomes free once this node's trainers have sealed a later snapshot. When that
                is depends on their bytes, so whoever asks decides how long it goes on asking.
            StaleEpoch, ProtocolError.
        """
        deadline = self._receiving.threads.monotonic() + SLOT_WAIT_S
        with self.changed:
            while True:
                if epoch < self._state.epoch:
                    self._state.check_epoch(epoch)
                if epoch == self._state.epoch and self.find_layout(coding) is not None:
                    try:
                        found = self._gather(coding)
                        break
                    except NoFreeSlot:
                        pass  # the next `seal` releases a slot
                left = deadline - self._receiving.threads.monotonic()
                if left <= 0 or not self.changed.wait(left):
                    raise NoFreeSlot(f"node {self._node!r} has no slot yet for the parity of {coding.snapshot}")
        if found is not None and found[1].parity.complete:
            self._commit_parity(*found)
        self._tell_group()

    def parity_done(self, epoch: int, coding: Coding, position: int) -> None:
        """Note that the group member at `position` has committed its parity. Raises `StaleEpoch`, `ProtocolError`."""
        with self.changed:
            self._state.check_epoch(epoch)
            if coding not in self._done and len(self._done) >= MAX_CODINGS:
                raise ProtocolError(f"node {self._node!r} tracks {MAX_CODINGS} parities already, which is the limit")
            self._done.setdefault(coding, set()).add(position)
            failpoint("parity.told", coding.snapshot.step)
            self.changed.notify_all()
        self._on_done(coding.snapshot)

    def find_layout(self, coding: Coding) -> Layout | None:
        """The layout that contains the group of `coding`; None if this node knows none."""
        with self.changed:
            for (epoch, _), layout in self._receiving.arena.layouts.items():
                if epoch == coding.snapshot.epoch and layout.group_of(coding.tag) is not None:
                    return layout
        return None

    def is_done(self, coding: Coding, positions: Collection[int]) -> bool:
        """Whether the members at `positions` have committed their parity."""
        with self.changed:
            return self._done.get(coding, set()) >= set(positions)

    def forget(self, gone: Callable[[SnapshotId], bool]) -> None:
        """Stop all work for snapshots for which `gone` is True: they are given up."""
        with self.changed:
            self._receiving.forget(gone)
            self._done = {coding: done for coding, done in self._done.items() if not gone(coding.snapshot)}

    def _gather(self, coding: Coding) -> tuple[ParityKey, GatheringSlot] | None:
        """The gathering of this node's parity, begun if needed; None if the parity is committed. Raises `NoFreeSlot` if
        every parity slot holds a snapshot that is kept."""
        with self.changed:
            layout, group, key = self._own_parity(coding)
            if not layout.stripes(group).parity_bytes(key.position) or self._holdings.holds(key):
                self._own_parity_done(coding, key.position, layout)
                return None
            return key, self._receiving.gather(key, layout, group)

    def _own_parity(self, coding: Coding) -> tuple[Layout, int, ParityKey]:
        layout = self.find_layout(coding)
        group = layout.group_of(coding.tag) if layout is not None else None
        if layout is None or group is None or not layout.protects(group):
            raise ProtocolError(f"node {self._node!r} knows no parity of group {coding.tag} of {coding.snapshot}")
        members = [node.name for node in layout.members(group)]
        if self._node not in members:
            raise ProtocolError(f"node {self._node!r} is not in group {coding.tag}")
        return layout, group, ParityKey(*coding, members.index(self._node))

    def _commit_parity(self, key: ParityKey, gathering: GatheringSlot) -> None:
        failpoint("parity.complete", key.snapshot.step)
        if self._receiving.commit(key, gathering):
            failpoint("parity.committed", key.snapshot.step)
        coding = Coding(key.snapshot, key.tag)
        with self.changed:
            layout = self.find_layout(coding)
            if layout is None or not self._holdings.holds(key):
                return  # it was given up
            self._own_parity_done(coding, key.position, layout)
        self._tell_group()
        self._on_done(key.snapshot)

    def _own_parity_done(self, coding: Coding, position: int, layout: Layout) -> None:
        done = self._done.setdefault(coding, set())
        if position not in done:
            done.add(position)
            self.changed.notify_all()
            self._untold.append((self._state.epoch, coding.snapshot, layout))

    def _tell_group(self) -> None:
        """Tell the group of what `_own_parity_done` has noted. The caller does not hold the store's lock."""
        with self.changed:
            untold, self._untold = self._untold, []
        for told in untold:
            self._on_own(*told)
