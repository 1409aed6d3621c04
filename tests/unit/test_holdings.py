"""What is sealed in an arena: damage is noted once and repaired in place; what is received gets a slot of its own."""

from __future__ import annotations

import json
import random
import re
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.smp_daemon.shared.counters import Counters
from holdfast.smp_daemon.shared.errors import ArenaTooSmall, DamagedSnapshot, NoFreeSlot, ProtocolError, StaleEpoch
from holdfast.smp_daemon.shared.identity import UNNAMED
from holdfast.smp_daemon.shared.layout import Layout, Node, Shard, SnapshotId
from holdfast.smp_daemon.shared.plain import to_plain
from holdfast.smp_daemon.shared.records import ParityRecord, ShardRecord, digest, digest_units
from holdfast.smp_daemon.shared.slotfile import Leaf, plan_slot, write_stamp
from holdfast.smp_daemon.storage.arena import Arena
from holdfast.smp_daemon.storage.holdings import Commit, Holdings, Key, ParityKey, ShardKey
from holdfast.smp_daemon.storage.parity import ParityGathering
from holdfast.smp_daemon.storage.pool import SlotMemory, SlotPool, SlotState
from holdfast.smp_daemon.storage.receiving import Receiving
from holdfast.smp_daemon.storage.reserver import Reserver
from tests.deadlines import DEADLINE_S
from tests.smp_kit import Watched

UNIT = 8
LENGTHS = {"dp0": 20, "dp1": 13, "dp2": 8}
LAYOUT = Layout(
    job="run",
    epoch=1,
    revision=0,
    nodes=tuple(
        Node(name, "127.0.0.1", 1, 2, (Shard(coord, length),))
        for name, (coord, length) in zip("abc", LENGTHS.items(), strict=True)
    ),
    groups=((0, 1, 2),),
    data=2,
    parity=1,
    unit_bytes=UNIT,
    slots=2,
)
TAG = LAYOUT.tag(0)
FIRST, SECOND, THIRD = (SnapshotId(1, step) for step in (1, 2, 3))
SHARD = ShardKey(FIRST, "dp0")
PARITY = ParityKey(FIRST, TAG, 0)


class Place:
    """An arena and its holdings; after a crash, those of its successor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start()

    def start(self) -> None:
        self.counters = Counters()
        self.arena = Arena(self.path)
        self.arena.layouts.add(LAYOUT)  # nothing is believed that no layout names
        lock = threading.Condition(threading.RLock())
        self.reserver = Reserver(self.arena, lock, "normal")
        self.holdings = Holdings(self.arena, lock, self.counters)
        self.receiving = Receiving(self.arena, lock, self.holdings, self.reserver, "numpy")

    def crash(self) -> None:
        """The owner dies, which releases its lock, and a successor takes over."""
        self.arena.directory.close()
        self.start()
        self.holdings.adopt()

    def put_shard(self, key: ShardKey) -> bytes:
        """Seal a shard of random bytes, which are the same for the same key."""
        content = content_of(key)
        pool = self.arena.shard_pool(key.coord)
        pool.create(len(content))
        slot = pool.assign(key.snapshot, len(content))
        pool.view(slot)[:] = content
        self.holdings.commit(pool, slot, Commit.of(shard_record(key)))
        return content

    def put_parity(self, key: ParityKey = PARITY) -> bytes:
        """A parity slot with two units, of 8 and 5 bytes, and random bytes between them."""
        content = random.Random(str(key)).randbytes(2 * UNIT)
        pool = self.arena.parity_pool(key.tag, key.position)
        pool.create(len(content))
        slot = pool.assign(key.snapshot, len(content))
        pool.view(slot)[:] = content
        self.holdings.commit(pool, slot, Commit.of(parity_record(key, content)))
        return content

    def put(self, key: Key) -> bytes:
        return self.put_shard(key) if isinstance(key, ShardKey) else self.put_parity(key)

    def flip(self, key: Key, at: int) -> None:
        """Flip a bit, as a bad memory cell would."""
        self.view(key)[at] ^= 0x10

    def view(self, key: Key) -> memoryview:
        return self.holdings.open(key)[0]

    def pool(self, key: Key) -> SlotPool:
        if isinstance(key, ShardKey):
            return self.arena.shard_pool(key.coord)
        return self.arena.parity_pool(key.tag, key.position)

    def count(self, name: str) -> int:
        return self.counters.read()[name]


def content_of(key: ShardKey) -> bytes:
    return random.Random(str(key)).randbytes(LENGTHS[key.coord])


def shard_record(key: ShardKey, **changes: Any) -> ShardRecord:
    content = content_of(key)
    record = ShardRecord(key.snapshot, key.coord, len(content), UNIT, digest_units(memoryview(content), UNIT))
    return replace(record, **changes)


def parity_record(key: ParityKey, content: bytes, **changes: Any) -> ParityRecord:
    digests = digest(memoryview(content)[:8]), digest(memoryview(content)[8:13])
    sources = {1: 11, 2: 12}, {1: 13}
    record = ParityRecord(key.snapshot, key.tag, key.position, UNIT, (8, 5), digests, sources)
    return replace(record, **changes)


@pytest.fixture
def place(shm: Path) -> Place:
    return Place(shm / "arena")


# ---------------------------------------------------------------------- reading


def test_what_was_sealed_is_held_and_nothing_else(place: Place) -> None:
    content, parity = place.put_shard(SHARD), place.put_parity()
    assert place.holdings.held() == [SHARD, PARITY]
    assert place.holdings.holds(SHARD) and place.holdings.holds(PARITY)
    assert place.holdings.open(SHARD) == (memoryview(content), shard_record(SHARD))
    assert place.holdings.open(PARITY) == (memoryview(parity), parity_record(PARITY, parity))
    for other in (ShardKey(SECOND, "dp0"), ShardKey(FIRST, "dp1"), ParityKey(FIRST, TAG, 1), ParityKey(FIRST, "x", 0)):
        assert not place.holdings.holds(other)
        with pytest.raises(ProtocolError, match=re.escape(f"{other} is not held")):
            place.holdings.open(other)
    assert place.holdings.held() == [SHARD, PARITY]


def test_units_are_cut_from_where_they_stand(place: Place) -> None:
    content, parity = place.put_shard(SHARD), place.put_parity()
    for index, unit in enumerate((content[:8], content[8:16], content[16:])):
        found, record = place.holdings.checked_unit(SHARD, index)
        assert (bytes(found), record) == (unit, shard_record(SHARD))
        sent, sealed_with = place.holdings.shard_unit(SHARD, index)
        assert (bytes(sent), sealed_with) == (unit, digest(memoryview(unit)))
    assert bytes(place.holdings.checked_unit(PARITY, 0)[0]) == parity[:8]
    assert bytes(place.holdings.checked_unit(PARITY, 1)[0]) == parity[8:13]


@pytest.mark.parametrize("index", [-1, 3, 1 << 62])
def test_a_unit_that_there_is_not_is_refused(place: Place, index: int) -> None:
    place.put_shard(SHARD)
    with pytest.raises(ProtocolError, match=f"no unit {index}: .* has 3"):
        place.holdings.checked_unit(SHARD, index)
    assert place.count("units_damaged") == 0


# ---------------------------------------------------------------------- damage


@pytest.mark.parametrize("at", [8, 12, 15])
def test_damage_is_noted_once_and_counted_however_often_it_is_found(place: Place, at: int) -> None:
    place.put_shard(SHARD)
    place.flip(SHARD, at)
    for _ in range(3):
        with pytest.raises(DamagedSnapshot, match=r"unit 1 of dp0 .*digest"):
            place.holdings.checked_unit(SHARD, 1)
        assert place.holdings.damaged_units(SHARD) == [1]
    assert place.count("units_damaged") == 1
    assert place.holdings.holds(SHARD)
    assert place.holdings.checked_unit(SHARD, 0) and place.holdings.checked_unit(SHARD, 2)


@pytest.mark.parametrize("at", [13, 15])
def test_where_a_parity_slot_has_no_unit_nothing_can_be_damaged(place: Place, at: int) -> None:
    place.put_parity()
    place.flip(PARITY, at)
    assert place.holdings.damaged_units(PARITY) == []


def test_what_is_sent_is_sent_with_the_digest_it_was_sealed_with(place: Place) -> None:
    """The unit is not digested again; its receiver checks it."""
    content = place.put_shard(SHARD)
    place.flip(SHARD, 0)
    unit, sealed_with = place.holdings.shard_unit(SHARD, 0)
    assert sealed_with == digest(memoryview(content)[:8]) != digest(unit)


# ---------------------------------------------------------------------- repairs


def test_a_damaged_unit_is_mended_in_place(place: Place) -> None:
    content = place.put_shard(SHARD)
    pool = place.pool(SHARD)
    path = pool.path(pool.slots[0])
    inode = path.stat().st_ino
    place.flip(SHARD, 8)
    place.flip(SHARD, 16)
    assert place.holdings.damaged_units(SHARD) == [1, 2]
    place.holdings.repair(SHARD, 1, memoryview(content)[8:16])
    assert place.holdings.damaged_units(SHARD) == [2]
    place.holdings.repair(SHARD, 2, memoryview(content)[16:])
    assert place.holdings.damaged_units(SHARD) == []
    assert (path.read_bytes(), path.stat().st_ino) == (content, inode)
    assert (place.count("units_damaged"), place.count("units_repaired")) == (2, 2)


def test_what_is_held_is_what_its_trainer_finds_under_the_name(place: Place) -> None:
    """A trainer maps a slot by its name, and has it repaired where it found it."""
    contents = {key: place.put_shard(key) for key in (SHARD, ShardKey(SECOND, "dp0"))}
    pool = place.pool(SHARD)
    here, there = (pool.path(slot) for slot in pool.slots)
    swapped = here.with_name("aside")
    for old, new in ((here, swapped), (there, here), (swapped, there)):
        old.rename(new)
    for (key, content), path in zip(contents.items(), (here, there), strict=True):
        assert place.holdings.damaged_units(key) == [0, 1, 2]
        for index in range(3):
            place.holdings.repair(key, index, memoryview(content)[index * UNIT : (index + 1) * UNIT])
        assert path.read_bytes() == content
        assert place.holdings.damaged_units(key) == []


@pytest.mark.parametrize("key", [SHARD, PARITY], ids=["shard", "parity"])
@pytest.mark.parametrize("takes", ["deletes", "shortens", "links", "puts a directory"])
def test_a_slot_whose_file_somebody_takes_away_is_lost_and_made_again(place: Place, takes: str, key: Key) -> None:
    other = key._replace(snapshot=SECOND)
    length = len(place.put(key))
    place.put(other)
    pool = place.pool(key)
    path = pool.path(pool.slots[0])
    place.arena.reserve({pool: (length, 2)})
    path.rename(aside := path.with_name("aside"))
    if takes == "shortens":
        path.write_bytes(bytes(3))
    elif takes == "links":
        path.symlink_to(aside)
    elif takes == "puts a directory":
        path.mkdir()
    assert (place.holdings.holds(key), place.holdings.held()) == (False, [other])
    assert place.arena.directory.lost == {path.name}
    place.arena.reserve({pool: (length, 2)})
    assert (path.is_file(), path.is_symlink(), path.stat().st_size) == (True, False, length)
    place.put(key)
    assert set(place.holdings.held()) == {key, other}


def test_what_is_given_up_while_it_is_read_is_gone_and_not_damaged(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.put_shard(SHARD)
    view = place.view(SHARD)

    def slow_digest(unit: memoryview) -> int:
        place.holdings.drop(SHARD)
        view[0] ^= 1  # the next snapshot overwrites it
        return digest(unit)

    monkeypatch.setattr("holdfast.smp_daemon.shared.belief.digest", slow_digest)
    with pytest.raises(ProtocolError, match="any more"):
        place.holdings.checked_unit(SHARD, 0)
    assert place.count("units_damaged") == 0


def test_what_is_given_up_before_it_is_mended_is_not_written_to(place: Place) -> None:
    content = place.put_shard(SHARD)
    view = place.view(SHARD)
    place.flip(SHARD, 0)
    spoilt = bytes(view)
    place.holdings.drop(SHARD)
    with pytest.raises(ProtocolError, match="not held here"):
        place.holdings.repair(SHARD, 0, memoryview(content)[:8])
    assert bytes(view) == spoilt
    assert place.count("units_repaired") == 0


@pytest.mark.parametrize("wrong", ["other bytes", "still damaged", "too short", "too long", "empty", "another unit"])
def test_what_does_not_match_the_digest_is_not_written(place: Place, wrong: str) -> None:
    content = place.put_shard(SHARD)
    place.flip(SHARD, 9)
    damaged = bytes(place.view(SHARD))
    offered = {
        "other bytes": bytes(8),
        "still damaged": damaged[8:16],
        "too short": content[8:15],
        "too long": content[8:17],
        "empty": b"",
        "another unit": content[:8],
    }[wrong]
    assert place.holdings.damaged_units(SHARD) == [1]
    with pytest.raises(DamagedSnapshot, match="recomputed unit 1 of dp0"):
        place.holdings.repair(SHARD, 1, memoryview(offered))
    assert bytes(place.view(SHARD)) == damaged
    assert place.holdings.damaged_units(SHARD) == [1]
    assert (place.count("units_damaged"), place.count("units_repaired")) == (1, 0)


# ---------------------------------------------------------------------- releasing


def test_what_is_dropped_is_not_held_and_its_slot_is_free(place: Place) -> None:
    place.put_shard(SHARD)
    place.put_shard(ShardKey(SECOND, "dp0"))
    place.put_parity()
    pool = place.pool(SHARD)
    place.holdings.drop(SHARD)
    assert place.holdings.held() == [ShardKey(SECOND, "dp0"), PARITY]
    assert [(slot.state, slot.snapshot) for slot in pool.slots] == [(SlotState.FREE, None), (SlotState.SEALED, SECOND)]
    assert not pool.record_path(pool.slots[0]).exists() and pool.record_path(pool.slots[1]).exists()
    place.holdings.drop(PARITY)
    assert place.holdings.held() == [ShardKey(SECOND, "dp0")]
    place.crash()
    assert place.holdings.held() == [ShardKey(SECOND, "dp0")]


def test_dropping_what_is_not_held_is_harmless(place: Place) -> None:
    place.put_shard(SHARD)
    pool = place.arena.shard_pool("dp1")
    pool.create(13)
    pool.assign(FIRST, 13)
    for key in (ShardKey(SECOND, "dp0"), ShardKey(FIRST, "dp1"), PARITY):
        place.holdings.drop(key)
    assert place.holdings.held() == [SHARD]
    assert [slot.state for slot in pool.slots] == [SlotState.RECEIVING]


def test_damage_goes_with_what_it_was_found_in(place: Place) -> None:
    place.put_shard(SHARD)
    place.put_parity()
    place.flip(SHARD, 0)
    place.flip(PARITY, 0)
    assert (place.holdings.damaged_units(SHARD), place.holdings.damaged_units(PARITY)) == ([0], [0])
    place.holdings.drop(SHARD)
    place.put_shard(SHARD)
    place.flip(SHARD, 0)
    assert (place.holdings.damaged_units(SHARD), place.holdings.damaged_units(PARITY)) == ([0], [0])
    assert place.count("units_damaged") == 3


def test_what_the_arena_has_released_is_forgotten(place: Place) -> None:
    keys = [ShardKey(snapshot, "dp0") for snapshot in (FIRST, SECOND, THIRD)]
    for key in keys:
        place.put_shard(key)
    place.put_parity()
    place.arena.release([SECOND], before=THIRD)
    assert place.holdings.held() == keys[1:]


# ---------------------------------------------------------------------- receiving


def accept(view: memoryview) -> tuple[int, ...]:
    """A check that accepts everything."""
    return digest_units(view, LAYOUT.unit_bytes)


def receive(place: Place, key: ShardKey, **changes: Any) -> bytes:
    content = content_of(key)
    with place.receiving.shard(key, LAYOUT, changes.get("check", accept)) as view:
        assert view.nbytes == len(content)
        view[:] = content
    return content


def test_a_shard_that_was_received_is_held_with_digests_of_its_own(place: Place) -> None:
    content = receive(place, SHARD)
    assert place.holdings.open(SHARD) == (memoryview(content), shard_record(SHARD))
    place.crash()
    assert place.holdings.held() == [SHARD]


def test_while_it_is_received_it_is_not_held(place: Place) -> None:
    place.put_shard(SHARD)
    with place.receiving.shard(SHARD, LAYOUT, accept) as view:
        assert not place.holdings.holds(SHARD)
        view[:] = content_of(SHARD)
    assert place.holdings.holds(SHARD)
    assert len(place.pool(SHARD).slots) == 1


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_was_received_in_part_is_not_held_and_its_slot_is_free(place: Place, error: type[BaseException]) -> None:
    with pytest.raises(error), place.receiving.shard(SHARD, LAYOUT, accept) as view:
        view[:4] = b"half"
        raise error
    assert place.holdings.held() == []
    assert [slot.state for slot in place.pool(SHARD).slots] == [SlotState.FREE]
    receive(place, SHARD)
    assert len(place.pool(SHARD).slots) == 1


def test_what_is_received_is_never_held_in_a_file_without_a_name(place: Place) -> None:
    def delete(view: memoryview) -> tuple[int, ...]:
        path = next(pool.path(slot) for slot in pool.slots if slot.state is SlotState.RECEIVING)
        path.unlink()
        return accept(view)

    pool = place.pool(SHARD)
    pool.path(pool.create(LENGTHS["dp0"])).unlink()
    receive(place, SHARD)
    assert place.arena.directory.lost == {"dp0.0.safetensors"}
    with pytest.raises(StaleEpoch, match="deleted or replaced"):
        receive(place, ShardKey(SECOND, "dp0"), check=delete)
    receive(place, ShardKey(THIRD, "dp0"))
    place.crash()
    assert set(place.holdings.held()) == {SHARD, ShardKey(THIRD, "dp0")}


def test_a_second_attempt_takes_the_slot_of_the_first_which_writes_into_nothing(place: Place) -> None:
    with place.receiving.shard(SHARD, LAYOUT, accept) as second:
        pass  # leaves a slot with other bytes in it
    with pytest.raises(StaleEpoch, match=r"step 1 .*taken away"):
        with place.receiving.shard(SHARD, LAYOUT, accept) as first:
            with place.receiving.shard(SHARD, LAYOUT, accept) as second:
                second[:] = content_of(SHARD)
                first[:] = b"\xee" * 20
    assert bytes(place.view(SHARD)) == content_of(SHARD)
    assert place.holdings.damaged_units(SHARD) == []
    assert len(place.pool(SHARD).slots) == 1


def test_a_slot_that_a_fence_took_away_is_not_given_back_twice(place: Place) -> None:
    with pytest.raises(StaleEpoch):
        with place.receiving.shard(SHARD, LAYOUT, accept):
            place.arena.fence(2)
            place.pool(SHARD).create(20)
            taken = place.pool(SHARD).assign(SECOND, 20)
    assert (taken.state, taken.snapshot) == (SlotState.RECEIVING, SECOND)
    assert place.holdings.held() == []


def test_what_its_trainer_is_writing_is_not_received(place: Place) -> None:
    place.pool(SHARD).create(20)
    writing = place.pool(SHARD).assign(FIRST, 20)
    writing.state = SlotState.WRITING
    with pytest.raises(NoFreeSlot, match=r"dp0 .*trainer is writing"):
        with place.receiving.shard(SHARD, LAYOUT, accept):
            pass
    assert (writing.state, writing.snapshot) == (SlotState.WRITING, FIRST)


def fill(gathering: ParityGathering, *positions: int) -> None:
    """Accumulate the units of these positions, of one snapshot, into the parity of position 0."""
    stripes = LAYOUT.stripes(0)
    for stripe in stripes.parity_stripes(0):
        for _, position, piece in stripes.contributors(stripe):
            if position in positions:
                coord = LAYOUT.members(0)[position].shards[0].coord
                unit = memoryview(content_of(ShardKey(FIRST, coord)))[piece.offset : piece.offset + piece.length]
                gathering.accumulate(stripe, position, unit, digest(unit))


def test_a_parity_that_was_gathered_is_held(place: Place) -> None:
    with place.receiving.parity(PARITY, LAYOUT, 0) as gathering:
        fill(gathering, 0, 1, 2)
    second, third = (content_of(ShardKey(FIRST, coord))[:8] for coord in ("dp1", "dp2"))
    expected = bytes(a ^ b for a, b in zip(second, third, strict=True))
    unit, record = place.holdings.checked_unit(PARITY, 0)
    assert bytes(unit) == expected
    assert isinstance(record, ParityRecord) and record.sources[0].keys() == {1, 2}
    assert place.holdings.damaged_units(PARITY) == []


def test_what_the_group_has_sent_of_a_parity_is_not_lost_to_its_repair(place: Place) -> None:
    place.arena.reserve({place.pool(PARITY): (LAYOUT.stripes(0).parity_bytes(0), 1)})
    sent = place.receiving.gather(PARITY, LAYOUT, 0)
    fill(sent.parity, 1)
    with pytest.raises(ValueError, match="units of 1 stripes"), place.receiving.parity(PARITY, LAYOUT, 0):
        pass  # the others cannot be had yet
    with place.receiving.parity(PARITY, LAYOUT, 0) as gathering:
        fill(gathering, 2)
    assert gathering is sent.parity
    assert place.holdings.held() == [PARITY] and place.holdings.damaged_units(PARITY) == []


def test_a_parity_that_the_group_completes_during_its_repair_is_held_once(place: Place) -> None:
    with place.receiving.parity(PARITY, LAYOUT, 0) as gathering:
        fill(gathering, 0, 1, 2)
        assert place.receiving.commit(PARITY, place.receiving.gather(PARITY, LAYOUT, 0))
    assert place.holdings.held() == [PARITY] and place.holdings.damaged_units(PARITY) == []


def test_a_gathering_whose_file_somebody_deletes_is_given_up(place: Place) -> None:
    with pytest.raises(StaleEpoch, match="deleted or replaced"), place.receiving.parity(PARITY, LAYOUT, 0) as gathering:
        fill(gathering, 0, 1, 2)
        place.pool(PARITY).path(place.pool(PARITY).slots[0]).unlink()
    assert place.holdings.held() == []
    with place.receiving.parity(PARITY, LAYOUT, 0) as gathering:
        fill(gathering, 0, 1, 2)
    assert place.holdings.held() == [PARITY]


def test_a_parity_that_lacks_a_unit_is_not_held(place: Place) -> None:
    with pytest.raises(ValueError, match="units of 1 stripes"):
        with place.receiving.parity(PARITY, LAYOUT, 0):
            pass
    assert place.holdings.held() == []
    assert [slot.state for slot in place.pool(PARITY).slots] == [SlotState.FREE]


def test_what_is_gathered_of_a_snapshot_that_is_given_up_makes_room(place: Place) -> None:
    pool, stripes = place.pool(PARITY), LAYOUT.stripes(0)
    place.arena.reserve({pool: (stripes.parity_bytes(0), 1)})
    stripe, length = stripes.parity_stripes(0)[0], stripes.parity_bytes(0)
    with pytest.raises(StaleEpoch, match=r"step 1 .*given up"):
        with place.receiving.parity(PARITY, LAYOUT, 0) as gathering:
            place.receiving.forget(lambda snapshot: snapshot == SECOND)
            with pytest.raises(NoFreeSlot):
                place.receiving.slot_for(pool, SECOND, length)
            place.receiving.forget(lambda snapshot: snapshot == FIRST)
            _, slot, view = place.receiving.slot_for(pool, SECOND, length)
            before = bytes(view)
            _, position, piece = next(iter(stripes.contributors(stripe)))
            unit = memoryview(bytes(range(1, piece.length + 1)))
            gathering.accumulate(stripe, position, unit, digest(unit))
    assert (slot.state, slot.snapshot, bytes(view)) == (SlotState.RECEIVING, SECOND, before)


def wakes(place: Place, act: Callable[[], object]) -> bool:
    """Whether `act` wakes a thread that waits for the holdings' lock to be notified."""
    lock, waits = place.holdings._lock, threading.Event()

    def wait() -> bool:
        with lock:
            waits.set()
            return lock.wait(DEADLINE_S)

    with ThreadPoolExecutor(1) as threads:
        heard = threads.submit(wait)
        assert waits.wait(DEADLINE_S)
        act()  # needs the lock, so the thread is waiting by now
        return heard.result(DEADLINE_S)


def test_who_waits_hears_of_a_slot_that_is_given_back_and_of_what_is_taken_in(place: Place) -> None:
    pool = place.pool(SHARD)
    pool.create(20)
    _, slot, view = place.receiving.slot_for(pool, FIRST, 20)
    assert wakes(place, lambda: place.receiving.give_back(pool, slot, view))
    assert wakes(place, lambda: place.put_shard(SHARD))


# ---------------------------------------------------------------------- taking slots


def test_a_free_slot_of_its_own_is_taken_first(place: Place) -> None:
    pool, other = place.arena.shard_pool("dp0"), place.arena.shard_pool("dp1")
    place.arena.reserve({pool: (20, 2), other: (13, 2)})
    taken, slot, view = place.receiving.slot_for(pool, FIRST, 20)
    assert (taken, slot.index, slot.state, slot.snapshot) == (pool, 0, SlotState.RECEIVING, FIRST)
    assert pool.is_at(slot, view) and view.nbytes == 20
    assert (len(pool.slots), len(other.slots)) == (2, 2)


def test_memory_of_free_slots_of_others_is_used_before_more_is_taken(place: Place) -> None:
    pool, other, parity = place.arena.shard_pool("dp0"), place.arena.shard_pool("dp1"), place.pool(PARITY)
    place.arena.reserve({pool: (20, 1), other: (13, 3), parity: (16, 1)})
    held = other.assign(FIRST, 13)
    place.receiving.slot_for(pool, FIRST, 20)
    with pytest.raises(NoFreeSlot):
        place.receiving.slot_for(pool, SECOND, 20)
    _, slot, _ = place.receiving.slot_for(pool, SECOND, 20, place.receiving.make(pool, 20))
    assert (slot.index, slot.snapshot) == (1, SECOND)
    assert parity.slots == [] and len(other.slots) == 2
    assert held in other.slots and held.snapshot == FIRST
    place.receiving.slot_for(pool, THIRD, 20, place.receiving.make(pool, 20))
    assert other.slots == [held], "what somebody writes into is not taken"
    assert [slot.snapshot for slot in pool.slots] == [FIRST, SECOND, THIRD]


def test_where_there_is_no_memory_nothing_is_taken_from_those_who_hold_some(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.put_shard(ShardKey(FIRST, "dp1"))
    monkeypatch.setattr(place.arena, "room", lambda: 0)
    with pytest.raises(ArenaTooSmall):
        receive(place, SHARD)
    assert place.pool(SHARD).slots == []
    assert place.holdings.held() == [ShardKey(FIRST, "dp1")]
    assert place.holdings.damaged_units(ShardKey(FIRST, "dp1")) == []


def test_nobody_waits_while_a_slot_to_receive_into_is_made(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.smp_daemon.storage.arena.is_at_once", lambda length: False)
    slow = Watched(monkeypatch, SlotMemory, "reserve", place.holdings._lock, hold=True)
    with ThreadPoolExecutor(2) as threads:
        receiving = [threads.submit(receive, place, ShardKey(snapshot, "dp0")) for snapshot in (FIRST, SECOND)]
        assert slow.begun.wait(DEADLINE_S)
        assert place.holdings.held() == [], "this takes the store's lock"
        [slot] = place.pool(SHARD).slots
        assert slot.state is SlotState.MAKING, "two that want a slot of one pool make one after the other"
        assert place.arena.next_planned() is None, "the background thread leaves it to them"
        slow.go_on.set()
        for each in receiving:
            each.result(DEADLINE_S)
    assert set(place.holdings.held()) == {SHARD, ShardKey(SECOND, "dp0")}
    assert slow.held == [False, False]


def test_two_threads_that_receive_the_first_of_a_shard_share_its_pool(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Watched(monkeypatch, Arena, "shard_pool", place.holdings._lock)
    receive(place, SHARD)
    assert asked.held and all(asked.held), "the pool is made under the store's lock"


def test_a_slot_that_a_thread_makes_for_itself_is_left_to_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Watched(monkeypatch, SlotMemory, "reserve", place.holdings._lock, hold=True)
    pool, other = place.pool(SHARD), place.arena.shard_pool("dp1")
    with ThreadPoolExecutor(1) as threads:
        making = threads.submit(place.receiving.make, pool, 20)
        assert slow.begun.wait(DEADLINE_S)
        with place.holdings._lock:
            place.arena.reserve({})  # a layout without this shard
        slow.go_on.set()
        made = making.result(DEADLINE_S)
    assert made is not None and made.state is SlotState.FREE
    place.arena.reserve({})
    place.arena.make_room(20, other)
    with pytest.raises(NoFreeSlot):
        place.receiving.slot_for(pool, SECOND, 20)
    assert place.receiving.slot_for(pool, FIRST, 20, made)[1] is made
    assert not made.claimed


def test_who_takes_a_large_slot_away_reserves_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.pool(SHARD).create(20)
    pool, _, earlier = place.receiving.slot_for(place.pool(SHARD), FIRST, 20)
    for module in ("arena", "pool"):
        monkeypatch.setattr(f"holdfast.smp_daemon.storage.{module}.is_at_once", lambda length: False)
    monkeypatch.setattr(SlotMemory, "reserve", lambda *arguments: pytest.fail("memory is reserved"))
    with pytest.raises(NoFreeSlot):
        place.receiving.slot_for(pool, FIRST, 20)
    assert pool.slots == []
    earlier[:] = bytes(20)  # whoever has it writes to nothing


# ---------------------------------------------------------------------- adopting


def verify(place: Place) -> None:
    for key in place.holdings.unverified():
        place.holdings.damaged_units(key, unread=True)


def test_a_successor_reads_nothing_before_it_holds_what_was_sealed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.put_shard(SHARD)
    place.put_shard(ShardKey(SECOND, "dp0"))
    place.put_parity()
    with monkeypatch.context() as patched:
        patched.setattr("holdfast.smp_daemon.shared.belief.digest", lambda unit: pytest.fail("it is read"))
        place.crash()
    assert place.holdings.unverified() == [ShardKey(SECOND, "dp0"), SHARD, PARITY], "the newest first, shards first"
    assert place.holdings.unverified_bytes == 20 + 20 + 13
    assert place.holdings.checked_unit(SHARD, 2)
    assert place.holdings.unverified_bytes == 20 + 16 + 13
    lengths: list[int] = []
    place.holdings.damaged_units(SHARD, lengths.append, unread=True)
    assert lengths == [8, 8], "what somebody has read is not read again"
    assert place.holdings.unverified() == [ShardKey(SECOND, "dp0"), PARITY]
    place.holdings.drop(PARITY)
    assert place.holdings.unverified_bytes == 20
    verify(place)
    assert (place.holdings.unverified(), place.holdings.unverified_bytes) == ([], 0)
    assert place.count("units_damaged") == 0


def test_an_unverified_unit_that_is_damaged_is_not_handed_out(place: Place) -> None:
    place.put_shard(SHARD)
    place.flip(SHARD, 9)
    place.crash()
    with pytest.raises(DamagedSnapshot):
        place.holdings.checked_unit(SHARD, 1)
    assert (place.holdings.known_damage(SHARD), place.holdings.unverified_bytes) == ([1], 12)


def test_a_unit_that_is_mended_while_another_thread_reads_it_is_not_damaged(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = place.put_shard(SHARD)
    place.flip(SHARD, 0)
    place.holdings.damaged_units(SHARD)

    def slow_digest(unit: memoryview) -> int:
        spoilt = digest(unit)
        if place.holdings.known_damage(SHARD):
            place.holdings.repair(SHARD, 0, memoryview(content)[:8])
        return spoilt

    monkeypatch.setattr("holdfast.smp_daemon.shared.belief.digest", slow_digest)
    assert place.holdings.checked_unit(SHARD, 0)
    assert place.holdings.known_damage(SHARD) == []
    assert (place.count("units_damaged"), place.count("units_repaired")) == (1, 1)


def test_damage_is_noted_when_what_was_adopted_is_verified_and_can_be_mended(place: Place) -> None:
    content, parity = place.put_shard(SHARD), place.put_parity()
    place.flip(SHARD, 3)
    place.flip(SHARD, 19)
    place.flip(PARITY, 8)
    place.crash()
    assert set(place.holdings.held()) == {SHARD, PARITY}
    verify(place)
    assert place.count("units_damaged") == 3
    assert (place.holdings.damaged_units(SHARD), place.holdings.damaged_units(PARITY)) == ([0, 2], [1])
    assert place.count("units_damaged") == 3, "it was noted before"
    place.holdings.repair(SHARD, 0, memoryview(content)[:8])
    place.holdings.repair(SHARD, 2, memoryview(content)[16:])
    place.holdings.repair(PARITY, 1, memoryview(parity)[8:13])
    place.crash()
    verify(place)
    assert place.count("units_damaged") == 0
    assert (bytes(place.view(SHARD)), bytes(place.view(PARITY))) == (content, parity)


@pytest.mark.parametrize(
    "record",
    [
        pytest.param({"kind": "shard"}, id="not a record"),
        pytest.param(to_plain(shard_record(ShardKey(FIRST, "dp1"))), id="another shard's"),
        pytest.param(to_plain(shard_record(SHARD, bytes=21)), id="longer than the slot"),
        pytest.param(to_plain(shard_record(SHARD, bytes=1 << 40, unit_bytes=1 << 39)), id="huge"),
        pytest.param(to_plain(parity_record(PARITY, bytes(16))), id="a parity's"),
        pytest.param([1, 2], id="no object"),
    ],
)
def test_a_record_that_does_not_fit_its_shard_frees_the_slot(place: Place, record: Any) -> None:
    place.put_shard(SHARD)
    place.put_shard(ShardKey(SECOND, "dp0"))
    pool = place.pool(SHARD)
    pool.record_path(pool.slots[0]).write_text(json.dumps(record))
    place.crash()
    assert place.holdings.held() == [ShardKey(SECOND, "dp0")]
    assert [slot.state for slot in place.pool(SHARD).slots] == [SlotState.FREE, SlotState.SEALED]
    assert not pool.record_path(pool.slots[0]).exists()


@pytest.mark.parametrize(
    "changes",
    [{"group": "0" * 16}, {"position": 1}, {"unit_bytes": 12, "lengths": (8, 5)}, {"lengths": (8, 8), "unit_bytes": 9}],
    ids=str,
)
def test_a_record_that_does_not_fit_its_parity_frees_the_slot(place: Place, changes: dict[str, Any]) -> None:
    content = place.put_parity()
    pool = place.pool(PARITY)
    pool.record_path(pool.slots[0]).write_text(json.dumps(to_plain(parity_record(PARITY, content, **changes))))
    place.crash()
    assert place.holdings.held() == []
    assert [slot.state for slot in place.pool(PARITY).slots] == [SlotState.FREE]


# ---------------------------------------------------------------------- several at once


def test_damage_that_several_find_at_once_is_counted_once(place: Place) -> None:
    place.put_shard(SHARD)
    place.flip(SHARD, 0)
    ready = threading.Barrier(4, timeout=DEADLINE_S)

    def find(_: int) -> None:
        ready.wait()
        for _ in range(50):
            place.holdings.damaged_units(SHARD)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(find, range(4), timeout=DEADLINE_S))
    assert place.count("units_damaged") == 1


def test_a_slot_whose_header_says_it_is_as_long_as_the_slot_is_refused_without_a_copy_of_it(tmp_path: Path) -> None:
    """One bit of its length may flip between the copy and the seal, and a slot takes more memory than is left."""
    form = plan_slot("run", "dp0", [Leaf("weight", "U8", (64 << 20,))], 100, UNNAMED.id)
    nodes = (Node("a", "127.0.0.1", 1, 2, (Shard("dp0", form.total_bytes),)),)
    layout = replace(LAYOUT, nodes=nodes, groups=((0,),), unit_bytes=1 << 20)
    place, slot = Place(tmp_path / "arena"), bytearray(form.header.ljust(form.total_bytes))
    for damaged in (False, True):
        write_stamp(memoryview(slot), FIRST)
        slot[7] = damaged
        tracemalloc.start()
        with pytest.raises(ProtocolError, match="claims") if damaged else nullcontext():
            place.receiving.check_slot(SHARD, layout, memoryview(slot))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
        tracemalloc.stop()
