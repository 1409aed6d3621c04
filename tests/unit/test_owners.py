"""Who owns a slot: one mark beside it, which whoever wants the slot renames."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.smp_daemon.shared.errors import StaleEpoch
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.owners import BUSY, FREE, Owners, choices, held, is_taken, sealed, snapshot_in, taken
from holdfast.smp_daemon.shared.plain import encode_digested
from holdfast.smp_daemon.storage.arena import Arena
from holdfast.smp_daemon.storage.pool import Slot, SlotPool, SlotState
from tests.deadlines import DEADLINE_S

PAGE = 4096
FILE = "dp0.0.safetensors"
FIRST, SECOND, THIRD = (SnapshotId(1, step) for step in (1, 2, 3))

snapshots = st.builds(SnapshotId, st.integers(0, 3), st.integers(0, 3))
marks = st.one_of(
    st.sampled_from([FREE, BUSY]), st.builds(taken, st.integers(1, 3)), snapshots.map(sealed), snapshots.map(held)
)


# ---------------------------------------------------------------------- the choice


@given(st.dictionaries(st.text("abc", min_size=1), marks), st.sets(snapshots), st.integers(1, 3))
def test_a_trainer_takes_what_nobody_needs_and_nothing_else(
    found: dict[str, str], keep: set[SnapshotId], number: int
) -> None:
    given_back = {(file, taken(number)) for file in found}
    chosen = choices(found, keep, given_back)
    for file, owner in chosen:
        assert found[file] == owner and owner != BUSY and not owner.startswith("held")
        assert snapshot_in(owner) not in keep
        assert not is_taken(owner) or (file, owner) in given_back
    left = set(found.items()) - set(chosen)
    assert all(owner != FREE and (file, owner) not in given_back for file, owner in left)
    assert all(snapshot_in(owner) in {None, *keep} or owner.startswith("held") for _, owner in left)
    held_snapshots = [snapshot_in(owner) for _, owner in chosen]
    full = [snapshot for snapshot in held_snapshots if snapshot is not None]
    assert held_snapshots == [None] * (len(chosen) - len(full)) + sorted(full), "free ones first, then the oldest"


# ---------------------------------------------------------------------- one wins


def test_of_all_who_want_a_slot_at_once_one_gets_it(tmp_path: Path) -> None:
    for turn in range(30):
        owners = Owners(tmp_path, turn)
        owners.create(FILE, FREE)
        start = threading.Barrier(4, timeout=DEADLINE_S)
        won: list[int] = []

        def want(number: int, owners: Owners = owners, start: threading.Barrier = start, won: list[int] = won) -> None:
            start.wait()
            if owners.change(FILE, FREE, taken(number)):
                won.append(number)

        threads = [threading.Thread(target=want, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert len(won) == 1 and owners.has(FILE, taken(won[0]))
        owners.clear(FILE)
        assert owners.found() == {}


# ---------------------------------------------------------------------- the pool of a shard


class Place:
    """An arena in epoch 1 with three slots of a shard, the first of which hold snapshots, as a trainer sees it."""

    def __init__(self, path: Path, *snapshots: SnapshotId, zero: bool = False) -> None:
        self.arena = Arena(path, zero=zero)
        self.arena.own(1)
        self.trainer = Owners(path, 1)
        self.arena.reserve({self.pool: (PAGE, 3)})
        for snapshot in snapshots:
            slot = self.pool.assign(snapshot, PAGE)
            self.pool.view(slot)[:] = bytes([snapshot.step]) * PAGE
            self.pool.commit(slot, encode_digested({"snapshot": list(snapshot)}))

    @property
    def pool(self) -> SlotPool:
        return self.arena.shard_pool("dp0")

    def slot(self, snapshot: SnapshotId) -> Slot:
        slot = self.pool.find(snapshot)
        assert slot is not None
        return slot

    def take(self, snapshot: SnapshotId | None = None, number: int = 1) -> str:
        """The trainer takes a free slot, or one that holds a snapshot; return its file."""
        owner = FREE if snapshot is None else sealed(snapshot)
        found = self.trainer.found()
        file = next(file for file, of in sorted(found.items()) if (owner, 1) in of)
        assert self.trainer.change(file, owner, taken(number))
        return file

    def successor(self) -> list[SnapshotId]:
        """The SMP dies, and another takes over; return which snapshots it believes in."""
        self.arena.directory.close()
        self.arena = Arena(self.arena.path)
        believed = []
        for _, slot, record in self.arena.adopt():
            slot.state, slot.snapshot = SlotState.SEALED, SnapshotId(*record["snapshot"])
            believed.append(slot.snapshot)
        self.arena.own(1)
        return believed

    @property
    def states(self) -> list[SlotState]:
        return sorted(slot.state for slot in self.pool.slots)


def test_taking_a_slot_undoes_its_seal_before_a_byte_is_written(shm: Path) -> None:
    place = Place(shm / "a", FIRST, SECOND)
    place.take(FIRST)
    assert place.successor() == [SECOND]
    assert place.states == [SlotState.FREE, SlotState.SEALED, SlotState.WRITING]


def test_a_successor_leaves_the_trainer_what_it_has_taken_and_seals_it(shm: Path) -> None:
    place = Place(shm / "a", FIRST)
    file = place.take(number=7)
    inode = (place.arena.path / file).stat().st_ino
    assert place.successor() == [FIRST]
    assert (place.arena.path / file).stat().st_ino == inode
    with pytest.raises(StaleEpoch):
        place.pool.hand_over(file, 6, SECOND)
    slot = place.pool.hand_over(file, 7, SECOND)
    with pytest.raises(StaleEpoch):
        place.pool.hand_over(file, 7, SECOND)
    place.pool.commit(slot, encode_digested({"snapshot": list(SECOND)}))
    assert place.successor() == [FIRST, SECOND]


def test_what_was_handed_over_and_not_sealed_is_free_for_the_next(shm: Path) -> None:
    place = Place(shm / "a", FIRST, SECOND)
    place.pool.hand_over(place.take(FIRST), 1, THIRD)
    assert place.successor() == [SECOND]
    assert place.states == [SlotState.FREE, SlotState.FREE, SlotState.SEALED]
    assert len([owner for of in place.trainer.found().values() for owner, _ in of if owner == FREE]) == 2


def test_the_smp_does_nothing_to_what_the_trainer_has_just_taken(shm: Path) -> None:
    place = Place(shm / "a", FIRST, SECOND)
    first, second = place.slot(FIRST), place.slot(SECOND)
    files = {place.take(FIRST), place.take(SECOND), place.take()}
    free = next(slot for slot in place.pool.slots if slot.state is SlotState.FREE)
    assert not place.pool.discard(first)
    assert not place.pool.hold(second)
    assert not place.pool.remove(free)
    assert place.states == [SlotState.WRITING] * 3
    assert {owner for of in place.trainer.found().values() for owner, _ in of} == {taken(1)}
    assert {path.name for path in place.arena.path.glob("*.safetensors")} == files


def test_the_trainer_takes_nothing_that_the_smp_holds_or_writes(shm: Path) -> None:
    place = Place(shm / "a", FIRST)
    slot = place.slot(FIRST)
    name = place.pool.path(slot).name
    assert place.pool.hold(slot)
    assert not place.trainer.change(name, sealed(FIRST), taken(1))
    place.pool.hold(slot, False)
    receiving = place.pool.assign(SECOND, PAGE)
    assert not place.trainer.change(place.pool.path(receiving).name, FREE, taken(1))
    assert place.trainer.change(name, sealed(FIRST), taken(1))


def test_what_the_smp_holds_is_not_released(shm: Path) -> None:
    place = Place(shm / "a", FIRST)
    slot = place.slot(FIRST)
    for holds, state in ((True, SlotState.SEALED), (False, SlotState.FREE)):
        assert place.pool.hold(slot, holds)
        place.arena.release([], before=SECOND)
        assert slot.state is state


def test_what_the_smp_held_when_it_died_may_be_taken_again(shm: Path) -> None:
    place = Place(shm / "a", FIRST)
    assert place.pool.hold(place.slot(FIRST))
    assert place.successor() == [FIRST]
    place.take(FIRST)


def test_a_slot_that_is_taken_is_wiped_no_further(shm: Path) -> None:
    place = Place(shm / "a", FIRST, zero=True)
    slot = place.slot(FIRST)
    assert place.pool.discard(slot) and slot.unwiped
    assert place.trainer.change(place.pool.path(slot).name, FREE, taken(1))
    place.pool.wipe_next(slot)
    assert (slot.state, slot.unwiped) == (SlotState.WRITING, 0)
    assert bytes(place.pool.view(slot)) == b"\1" * PAGE


# ---------------------------------------------------------------------- a new epoch


def test_a_process_of_an_older_epoch_takes_nothing(shm: Path) -> None:
    place = Place(shm / "a", FIRST)
    chosen = {file: of[0][0] for file, of in place.trainer.found().items()}
    place.arena.fence(2)
    assert not any(place.trainer.change(file, owner, taken(1)) for file, owner in chosen.items())
    assert place.states == [SlotState.FREE, SlotState.FREE, SlotState.SEALED]
    place.trainer.epoch = 2
    assert all(place.trainer.change(file, owner, taken(1)) for file, owner in chosen.items())


def test_what_it_had_taken_is_deleted_and_it_writes_to_nothing(shm: Path) -> None:
    place = Place(shm / "a", FIRST, SECOND)
    slot = place.slot(FIRST)
    late = place.pool.view(slot)
    place.take(FIRST)
    place.arena.fence(2)
    late[:] = b"x" * PAGE
    assert place.states == [SlotState.FREE, SlotState.SEALED]
    assert b"x" not in {byte for path in place.arena.path.glob("*.safetensors") for byte in [path.read_bytes()[:1]]}
    assert {epoch for of in place.trainer.found().values() for _, epoch in of} == {2}


@pytest.mark.parametrize("carried", range(4))
def test_an_smp_that_dies_while_an_epoch_ends_leaves_every_slot_to_one_owner(shm: Path, carried: int) -> None:
    """It had carried the marks of some slots into the next epoch, which no record names yet."""
    place = Place(shm / "a", FIRST)
    place.take()
    owners = {file: of[0][0] for file, of in place.trainer.found().items()}
    for file, owner in list(owners.items())[:carried]:
        if not is_taken(owner):
            assert place.trainer.renew(file, owner, 2)
    assert place.successor() == [FIRST]
    assert place.trainer.found() == {file: [(owner, 1)] for file, owner in owners.items()}
    place.arena.fence(2)
    assert {epoch for of in place.trainer.found().values() for _, epoch in of} == {2}


def test_what_a_trainer_of_an_epoch_that_is_over_had_taken_is_deleted(shm: Path) -> None:
    """An SMP died after it had noted the new epoch, and before it had replaced the slot."""
    place = Place(shm / "a")
    file = place.take()
    late = place.pool.view(next(slot for slot in place.pool.slots if place.pool.path(slot).name == file))
    place.arena.directory.close()
    arena = Arena(place.arena.path)
    assert list(arena.adopt()) == []
    arena.own(2)
    late[:] = b"x" * PAGE
    assert not (place.arena.path / file).exists()
    assert {epoch for of in place.trainer.found().values() for _, epoch in of} == {2}
