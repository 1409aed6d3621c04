"""The life cycle of slots, against every order of events that hypothesis can think of."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from holdfast.smp_daemon.shared.budget import Budget
from holdfast.smp_daemon.shared.errors import NoFreeSlot
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.owners import Owners
from holdfast.smp_daemon.storage.pool import Deleted, SlotPool, SlotState

few_snapshots = st.builds(SnapshotId, st.integers(1, 2), st.integers(1, 4))
lengths = st.sampled_from([8, 16])
picks = st.integers(0, 9)


def empty_pool() -> SlotPool:
    """A pool whose slots have no files: nothing here reads or writes one."""
    nowhere = Path("/dev/shm/no-arena")
    return SlotPool(nowhere, "dp0", "parity", Budget(nowhere, 0), Owners(nowhere), Deleted())


class Pools(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = empty_pool()

    def sealed(self) -> dict[int, SnapshotId | None]:
        return {slot.index: slot.snapshot for slot in self.pool.slots if slot.state is SlotState.SEALED}

    @precondition(lambda self: len(self.pool.slots) < 5)
    @rule(length=lengths)
    def add(self, length: int) -> None:
        slot = self.pool.add(length)
        assert (slot.state, slot.bytes) == (SlotState.FREE, length)

    @precondition(lambda self: self.pool.slots)
    @rule(pick=picks)
    def take_out(self, pick: int) -> None:
        self.pool.slots.pop(pick % len(self.pool.slots))

    @rule(snapshot=few_snapshots, length=lengths)
    def begin(self, snapshot: SnapshotId, length: int) -> None:
        sealed = self.sealed()
        free = [s.index for s in self.pool.slots if s.bytes == length and s.state is SlotState.FREE]
        own = [s.index for s in self.pool.slots if s.bytes == length and s.snapshot == snapshot]
        try:
            slot = self.pool.assign(snapshot, length)
        except NoFreeSlot:
            assert not free and not own
        else:
            assert slot.index in free + own
            assert (slot.state, slot.snapshot, slot.bytes) == (SlotState.RECEIVING, snapshot, length)
        others = {index: held for index, held in sealed.items() if held != snapshot}
        assert self.sealed() == others

    @precondition(lambda self: self.pool.slots)
    @rule(pick=picks)
    def seal(self, pick: int) -> None:
        slot = self.pool.slots[pick % len(self.pool.slots)]
        if slot.state in (SlotState.WRITING, SlotState.RECEIVING):
            self.pool.seal(slot)
            assert slot.index in self.sealed()
        else:
            before = slot.state
            with pytest.raises(ValueError, match="nothing is being"):
                self.pool.seal(slot)
            assert slot.state is before

    @precondition(lambda self: self.pool.slots)
    @rule(pick=picks)
    def free(self, pick: int) -> None:
        slot = self.pool.slots[pick % len(self.pool.slots)]
        slot.free()
        assert slot.state is SlotState.FREE

    @rule(keep=st.sets(few_snapshots, max_size=3), before=few_snapshots)
    def list_outdated(self, keep: set[SnapshotId], before: SnapshotId) -> None:
        listed = self.pool.outdated(keep, before)
        for slot in self.pool.slots:
            old = slot.snapshot is not None and slot.snapshot < before and slot.snapshot not in keep
            assert (slot in listed) == (old and slot.state is SlotState.SEALED)

    @rule(snapshot=few_snapshots)
    def find(self, snapshot: SnapshotId) -> None:
        found = self.pool.find(snapshot)
        assert (found is not None) == any(slot.snapshot == snapshot for slot in self.pool.slots)
        for state in SlotState:
            expected = found if found is not None and found.state is state else None
            assert self.pool.find(snapshot, state) is expected

    @invariant()
    def no_two_slots_hold_one_snapshot(self) -> None:
        held = [slot.snapshot for slot in self.pool.slots if slot.snapshot is not None]
        assert len(held) == len(set(held))

    @invariant()
    def a_slot_is_free_exactly_while_it_holds_no_snapshot(self) -> None:
        for slot in self.pool.slots:
            assert (slot.state is SlotState.FREE) == (slot.snapshot is None)

    @invariant()
    def no_two_slots_have_one_file(self) -> None:
        indices = [slot.index for slot in self.pool.slots]
        assert len(indices) == len(set(indices))


TestPools = Pools.TestCase
TestPools.settings = settings(stateful_step_count=40)


def pool_with(*held: SnapshotId) -> SlotPool:
    pool = empty_pool()
    for snapshot in held:
        pool.add(8)
        pool.seal(pool.assign(snapshot, 8))
    return pool


def test_a_full_pool_says_what_it_holds() -> None:
    pool = pool_with(SnapshotId(1, 10), SnapshotId(1, 20))
    with pytest.raises(NoFreeSlot, match=r"step 30 .* dp0: .* step 10 .*, step 20"):
        pool.assign(SnapshotId(1, 30), 8)


def test_an_empty_pool_says_that_it_holds_nothing() -> None:
    with pytest.raises(NoFreeSlot, match="hold nothing"):
        empty_pool().assign(SnapshotId(1, 1), 8)


def test_a_new_slot_takes_the_first_number_that_is_not_in_use() -> None:
    pool = pool_with(SnapshotId(1, 10), SnapshotId(1, 20), SnapshotId(1, 30))
    pool.slots.pop(1)
    assert [pool.add(8).index, pool.add(8).index] == [1, 3]
