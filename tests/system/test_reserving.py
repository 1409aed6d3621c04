"""Memory for snapshots is reserved beside the training: nobody waits for it, and nothing is left half done."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import select
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from holdfast import InMemorySnapshot
from holdfast.cli.main import main
from holdfast.smp_daemon.ops.status import take_statuses
from holdfast.smp_daemon.service import Smp
from holdfast.smp_daemon.shared import budget as budget_module
from holdfast.smp_daemon.shared.board import REFUSED
from holdfast.smp_daemon.shared.budget import PART_BYTES, Budget
from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.errors import ArenaTooSmall, NoFreeSlot, ProtocolError, StaleEpoch
from holdfast.smp_daemon.shared.layout import Node, Shard, SnapshotId
from holdfast.smp_daemon.shared.limits import AT_ONCE_BYTES
from holdfast.smp_daemon.shared.messages import Seal
from holdfast.smp_daemon.shared.owners import FREE, Owners, taken
from holdfast.smp_daemon.shared.records import PART
from holdfast.smp_daemon.shared.system import System
from holdfast.smp_daemon.storage import arena as arena_module
from holdfast.smp_daemon.storage.arena import Arena
from holdfast.smp_daemon.storage.pool import Deleted, SlotMemory, SlotPool, SlotState
from holdfast.smp_daemon.storage.reserver import Reserver
from holdfast.smp_daemon.storage.store import Store
from holdfast.snapshot.resume.arrange import Protection, arrange
from holdfast.snapshot.resume.reserve import REST, Reserving
from tests.deadlines import DEADLINE_S
from tests.proof.crash_kit import next_life
from tests.smp_kit import IN_THREADS, JOB, Ground, Held, Run, SmpProcess, Trainer, Watched

MUCH = AT_ONCE_BYTES // 3 // 4
"""Elements of a shard. Three such shards are too large to be reserved at once."""

PAGE = 4096
SLICE = "reserve.slice"


def laid_out(smp: SmpProcess, elements: int = MUCH, epoch: int = 1) -> tuple[Run, int]:
    """A job of one large shard whose memory is being reserved, and how many slots it has so far."""
    run = Run([Trainer(smp, "dp0", elements)])
    run.epoch = epoch
    trainer = run["dp0"]
    run.layout = layout_of(trainer, epoch)
    trainer.client.join(epoch)
    return run, trainer.client.configure(run.layout, wait=False)


def layout_of(trainer: Trainer, epoch: int) -> Any:
    return arrange(JOB, epoch, [trainer.rank()], Protection(0, 0), 3)


def slot_files(arena: Path) -> list[Path]:
    return sorted(arena.glob("*.safetensors"))


def is_whole(path: Path) -> bool:
    """Whether all memory of a file has been reserved."""
    return path.stat().st_blocks * 512 >= path.stat().st_size


# ---------------------------------------------------------------------- an SMP


def test_an_smp_answers_while_it_reserves_and_gives_slots_as_they_come(ground: Ground) -> None:
    smp = ground.smp(rules=[(SLICE, None)])
    run, there = laid_out(smp)
    client = run["dp0"].client
    assert there == 0
    first = ground.points.wait_any(smp.name, SLICE)
    assert client.inventory().epoch == 1
    assert client.slots(1, "dp0") == []
    with pytest.raises(NoFreeSlot):
        client.take("dp0", ())
    first.go()
    second = ground.points.wait_any(smp.name, SLICE)
    assert client.board.ready(1) == 1
    assert len(client.slots(1, "dp0")) == len(slot_files(smp.arena)) == 1
    run["dp0"].take(SnapshotId(1, 1))
    second.go()
    ground.points.wait_any(smp.name, SLICE).go()
    assert (client.configure(run.layout), client.board.ready(1), client.board.ready(2)) == (3, 3, 0)
    assert all(map(is_whole, slot_files(smp.arena))) and len(slot_files(smp.arena)) == 3


def test_the_slot_of_what_is_persisted_is_made_before_the_second(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    (ground.base / "place").mkdir()
    monkeypatch.setenv("HOLDFAST_PERSIST", str(ground.base / "place"))
    smp = ground.smp(rules=[(SLICE, None)])
    run, there = laid_out(smp)
    client, counts = run["dp0"].client, [there]
    stop = ground.points.wait_any(smp.name, SLICE)
    for _ in range(3):
        stop.go()
        stop = ground.points.wait_any(smp.name, SLICE)
        counts.append(client.configure(run.layout, wait=False))
    stop.go()
    assert counts == [0, 1, 1, 2]
    assert client.configure(run.layout) == 3
    assert len(slot_files(smp.arena)) == 4


def test_a_slot_is_usable_once_it_is_prepared_and_not_before(ground: Ground) -> None:
    smp = ground.smp()
    run, there = laid_out(smp, 3000)
    client, seen = run["dp0"].client, list[tuple[int, int]]()

    def prepare(slots: list[memoryview]) -> None:
        seen.append((len(slots), reserving._usable))

    reserving = Reserving(client, run.layout, "dp0", there, prepare)
    assert reserving.look() == 3
    assert seen == [(1, 0), (2, 1), (3, 2)]


def test_ranks_of_a_node_rest_together(ground: Ground) -> None:
    """Registering stops all launches of the node: others must not use the time that one rests."""
    smp = ground.smp()
    run, there = laid_out(smp)
    client, held_s = run["dp0"].client, 0.01
    spans: list[tuple[float, float]] = []

    def register() -> None:
        reserving = Reserving(client, run.layout, "dp0", there, lambda slots: None)
        for _ in range(2):
            with reserving.turn():
                began = time.monotonic()
                time.sleep(held_s)
                spans.append((began, time.monotonic()))

    threads = [threading.Thread(target=register) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    spans.sort()
    assert len(spans) == 6
    assert all(later - end >= REST * held_s for (_, end), (later, _) in itertools.pairwise(spans))


def test_who_closes_ends_a_rest(ground: Ground) -> None:
    run, there = laid_out(ground.smp())
    reserving = Reserving(run["dp0"].client, run.layout, "dp0", there, lambda slots: None)
    reserving.close()
    with pytest.raises(StaleEpoch), reserving.turn():
        time.sleep(0.001)


def test_little_is_there_at_once(ground: Ground) -> None:
    smp = ground.smp(rules=[(SLICE, None)])
    assert laid_out(smp, 3000)[1] == 3


@pytest.mark.parametrize("before", [0, 1, 2], ids=["at the first slot", "at the second", "at the last"])
@pytest.mark.proves("every-failpoint")
def test_a_successor_reserves_what_a_killed_smp_had_not(ground: Ground, before: int) -> None:
    smp = ground.smp(rules=[(SLICE, None)])
    run, _ = laid_out(smp)
    for _ in range(before):
        ground.points.wait_any(smp.name, SLICE).go()
    ground.points.wait_any(smp.name, SLICE)
    smp.kill()
    parts = list(smp.arena.glob(f"*{PART}"))
    assert len(parts) == 1 and len(slot_files(smp.arena)) == before
    next_life(smp, [])
    smp.wait_ready()
    client = run["dp0"].client
    client.reconnect()
    client.join(1)
    assert client.configure(run.layout) == 3
    assert len(slot_files(smp.arena)) == 3 and all(map(is_whole, slot_files(smp.arena)))
    assert not list(smp.arena.glob(f"*{PART}"))
    run["dp0"].take(SnapshotId(1, 1))


def test_another_layout_takes_the_place_of_one_that_is_being_reserved(ground: Ground) -> None:
    smp = ground.smp(rules=[(SLICE, None)])
    run, _ = laid_out(smp)
    held = ground.points.wait_any(smp.name, SLICE)
    later, there = laid_out(smp, MUCH + 1000, epoch=2)
    assert there == 0
    with pytest.raises(StaleEpoch):
        run["dp0"].client.configure(run.layout)
    held.go()
    for _ in range(3):
        ground.points.wait_any(smp.name, SLICE).go()
    assert later["dp0"].client.configure(later.layout) == 3
    assert (run["dp0"].client.board.ready(1), later["dp0"].client.board.ready(2)) == (0, 3)
    lengths = {path.stat().st_size for path in slot_files(smp.arena)}
    assert lengths == {later["dp0"].form.total_bytes}


def go_on(ground: Ground, smp: SmpProcess, held: Held) -> None:
    """Let an SMP that is ending pass its failpoints until it has ended."""
    ended = os.pidfd_open(smp.process.pid)
    try:
        while True:
            held.go()
            if ended in select.select([ground.points.fileno(), ended], [], [], DEADLINE_S)[0]:
                return
            held = ground.points.wait_any(smp.name, SLICE)
    finally:
        os.close(ended)


def test_a_job_that_ends_meanwhile_leaves_nothing(ground: Ground) -> None:
    smp = ground.smp(rules=[(SLICE, None)])
    run, _ = laid_out(smp)
    held = ground.points.wait_any(smp.name, SLICE)
    later = ground.meanwhile(go_on, ground, smp, held)
    run["dp0"].client.finish(1)
    later.result(DEADLINE_S)
    assert not smp.arena.exists()


def test_it_is_shown_how_far_it_is(ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    smp = ground.smp(rules=[(SLICE, None)])
    run, _ = laid_out(smp)
    ground.points.wait_any(smp.name, SLICE).go()
    held = ground.points.wait_any(smp.name, SLICE)
    length = run["dp0"].form.total_bytes
    [status] = take_statuses(JOB, [smp.control])
    assert (status.planned_bytes, status.arena_bytes) == (3 * length, 2 * length)
    assert status.slots[SlotState.MAKING] == 2
    assert status.reserving == f"reserving: {2 * length / 1e9:.1f} of {3 * length / 1e9:.1f} GB"
    assert status.to_plain()["reserving"] == status.reserving
    main(["status", "--job", JOB, "--arena", str(smp.arena.parent)])
    assert f"{smp.name}: {status.reserving}" in capsys.readouterr().out
    held.go()
    ground.points.wait_any(smp.name, SLICE).go()
    assert run["dp0"].client.configure(run.layout) == 3
    [status] = take_statuses(JOB, [smp.control])
    assert (status.planned_bytes, status.arena_bytes, status.reserving) == (0, 3 * length, "")


# ---------------------------------------------------------------------- memory that runs out


class Scarce(System):
    """A machine on which others take the memory while it is being reserved."""

    def __init__(self, slots: int) -> None:
        """`slots`: how many slots can be reserved before that."""
        self._left = slots
        self.available: int | None = None

    def available_bytes(self) -> int:
        return super().available_bytes() if self.available is None else self.available

    def posix_fallocate(self, fd: int, offset: int, length: int, /) -> None:
        is_slot = length > 1 << 16  # and not the board
        if is_slot and self._left <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._left -= is_slot
        os.posix_fallocate(fd, offset, length)


@pytest.mark.parametrize("slots", [0, 1, 2])
def test_where_memory_runs_out_all_of_it_is_given_back_and_the_trainers_are_told(ground: Ground, slots: int) -> None:
    prepared = ground.prepare()
    smp = Smp(prepared.job, prepared.name, prepared.arena, prepared.host, environment=IN_THREADS, system=Scarce(slots))
    try:
        client = ground.keep(SmpClient(prepared.arena, JOB))
        trainer = Trainer(SimpleNamespace(client=lambda: client, job=JOB), "dp0", MUCH)  # type: ignore[arg-type]
        layout = layout_of(trainer, 1)
        client.join(1)
        client.configure(layout, wait=False)
        need, got = 3 * trainer.form.total_bytes, slots * trainer.form.total_bytes
        with pytest.raises(ArenaTooSmall, match=rf"{need:,} bytes .* [{got:,}\d,]+ of .* left"):
            client.configure(layout)
        assert client.board.ready(1) == REFUSED
        with pytest.raises(ArenaTooSmall, match=rf"{need:,} bytes more.*enlarge"):
            client.configure(layout, wait=False)
        assert got < need
        assert not list(prepared.arena.glob("*.safetensors*"))
        assert (smp.arena.budget.used, smp.arena.budget.owed) == (0, 0)
    finally:
        smp.stop(remove=True)
        smp.close()


# ---------------------------------------------------------------------- order and accounting


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consider no slots small enough to be reserved at once."""
    for module in ("arena", "pool"):
        monkeypatch.setattr(f"holdfast.smp_daemon.storage.{module}.is_at_once", lambda length: False)


def make(arena: Arena, pool: SlotPool, slot: Any) -> None:
    with pool.open_part(slot) as memory:
        pool.reserve(slot, slot.bytes)
        memory.reserve(0, slot.bytes)
        pool.made(slot, memory)


def test_every_pool_has_a_slot_before_any_has_two_and_large_ones_come_first(tmp_path: Path, beside: None) -> None:
    arena = Arena(tmp_path / "arena")
    small, large, parity = arena.shard_pool("dp0"), arena.shard_pool("dp1"), arena.parity_pool("tag", 0)
    arena.reserve({small: (PAGE, 4), large: (3 * PAGE, 2), parity: (2 * PAGE, 2)})
    made, ready = [], [arena.ready()]
    while (planned := arena.next_planned()) is not None:
        make(arena, *planned)
        made.append(planned[0])
        ready.append(arena.ready())
    assert made == [large, parity, small, large, parity, small, small, small]
    assert ready == [0, 0, 0, 1, 1, 1, 2, 3, None]


def top_up(arena: Arena) -> None:
    """Reserve the rest of the budget at once."""
    while arena.budget.reserve_next(arena.free_bytes, nullcontext()):
        pass


def test_what_is_claimed_is_taken_from_what_is_held_piece_by_piece(tmp_path: Path, beside: None) -> None:
    arena = Arena(tmp_path / "arena", memory=10 * PAGE)
    top_up(arena)
    pool = arena.shard_pool("dp0")
    arena.reserve({pool: (4 * PAGE, 2)})
    budget = arena.budget
    assert (budget.used, budget.owed, budget.held, budget.left) == (8 * PAGE, 8 * PAGE, 10 * PAGE, 2 * PAGE)
    first, second = pool.slots
    pool.reserve(first, 3 * PAGE)
    assert (budget.owed, budget.held) == (5 * PAGE, 7 * PAGE)
    pool.remove(first)
    assert (budget.used, budget.owed) == (4 * PAGE, 4 * PAGE)
    make(arena, pool, second)
    assert (budget.used, budget.owed, budget.held) == (4 * PAGE, 0, 6 * PAGE)
    top_up(arena)
    assert budget.held == 6 * PAGE
    with pytest.raises(ArenaTooSmall, match="HOLDFAST_MEMORY"):
        arena.reserve({pool: (4 * PAGE, 3)})


def test_what_is_needed_at_once_is_not_waited_for(tmp_path: Path, beside: None) -> None:
    """Bytes that come from elsewhere take the place of a planned slot."""
    arena = Arena(tmp_path / "arena")
    pool = arena.shard_pool("dp0")
    arena.reserve({pool: (PAGE, 2)})
    pool.unplan(PAGE)
    pool.create(PAGE)
    assert [slot.state for slot in pool.slots] == [SlotState.MAKING, SlotState.FREE]
    assert arena.ready() == 1
    pool.unplan(PAGE)
    pool.unplan(PAGE)
    assert [slot.state for slot in pool.slots] == [SlotState.FREE]


def test_a_slot_that_bytes_from_elsewhere_took_comes_back_once_they_are_given_up(tmp_path: Path, beside: None) -> None:
    arena = Arena(tmp_path / "arena", memory=3 * PAGE)
    own, other = arena.shard_pool("dp0"), arena.parity_pool("tag", 0)
    arena.reserve({own: (PAGE, 3)})
    for slot in own.slots:
        make(arena, own, slot)
    arena.make_room(2 * PAGE, other)
    received = other.create(2 * PAGE)
    received.state = SlotState.RECEIVING
    arena.plan_missing()
    assert len(own.slots) == 1, "there is no memory yet"
    other.discard(received)
    arena.plan_missing()
    assert other.slots == []
    assert [slot.state for slot in own.slots] == [SlotState.FREE, SlotState.MAKING, SlotState.MAKING]


def test_a_large_slot_loses_its_name_at_once_and_its_memory_without_the_lock_once_nobody_reads_it(
    tmp_path: Path, beside: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena, lock = Arena(tmp_path / "arena", zero=True), threading.Condition(threading.RLock())
    reserver, pool = Reserver(arena, lock, "normal"), arena.shard_pool("dp0")
    arena.reserve({pool: (PAGE, 1)})
    make(arena, pool, pool.slots[0])
    slot, view = pool.slots[0], pool.view(pool.slots[0])
    view[:] = b"7" * PAGE
    slot.state = SlotState.WRITING
    freeing = Watched(monkeypatch, Deleted, "_free", lock)
    with lock:
        pool.remove(slot)
        assert slot_files(arena.path) == [] and arena.deleted.bytes == PAGE
    assert freeing.ended.wait(DEADLINE_S)
    assert bytes(view) == bytes(PAGE), "what is read is overwritten, and not freed"
    [gone] = arena.path.glob("gone-*")
    view.release()
    with lock:
        assert lock.wait_for(lambda: not arena.deleted.bytes, DEADLINE_S)
    assert not gone.exists() and not any(freeing.held)
    reserver.close()


def test_what_a_killed_one_had_not_given_back_the_next_gives_back(tmp_path: Path, beside: None) -> None:
    arena = Arena(tmp_path / "arena")
    pool = arena.shard_pool("dp0")
    arena.reserve({pool: (PAGE, 1)})
    make(arena, pool, pool.slots[0])
    pool.remove(pool.slots[0])
    arena.directory.close()
    successor = Arena(arena.path)
    assert successor.deleted.bytes == PAGE and list(arena.path.glob("gone-*"))
    successor.deleted.free(threading.Condition())
    assert list(arena.path.iterdir()) == []


def test_room_that_is_being_given_back_counts_and_is_waited_for(
    tmp_path: Path, beside: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_module, "room", lambda path, system: 0)
    arena, lock = Arena(tmp_path / "arena"), threading.Condition(threading.RLock())
    old, new = arena.shard_pool("dp0"), arena.shard_pool("dp1")
    make(arena, old, old.plan(PAGE))
    arena.reserve({new: (PAGE, 1)})
    assert [slot.state for slot in new.slots] == [SlotState.MAKING] and old.slots == []
    with pytest.raises(ArenaTooSmall):
        arena.reserve({new: (PAGE, 2)})
    reserver = Reserver(arena, lock, "normal")
    with lock:
        reserver.start()
        assert lock.wait_for(lambda: arena.ready() is None, DEADLINE_S)
    assert not arena.deleted.bytes
    reserver.close()


def test_slots_are_made_although_no_thread_could_be_started_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena, lock = Arena(tmp_path / "arena"), threading.Condition(threading.RLock())
    reserver = Reserver(arena, lock, "normal")
    with lock, monkeypatch.context() as crowded:
        crowded.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        slot = arena.shard_pool("dp0").plan(PAGE)
        with pytest.raises(RuntimeError):
            reserver.start()
    with lock:
        reserver.start()
        assert lock.wait_for(lambda: slot.state is SlotState.FREE, DEADLINE_S)
    reserver.close()


def test_slots_are_made_although_the_thread_that_makes_them_failed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena, lock, ended = Arena(tmp_path / "arena"), threading.Condition(threading.RLock()), threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda failed: ended.set())
    reserver = Reserver(arena, lock, "normal")
    with monkeypatch.context() as failing:
        failing.setattr(arena, "next_unwiped", Mock(side_effect=OSError(errno.ENOMEM, "it cannot be mapped")))
        with lock:
            slot = arena.shard_pool("dp0").plan(PAGE)
            reserver.start()
            assert lock.wait_for(lambda: slot.state is SlotState.FREE, DEADLINE_S)
        assert ended.wait(DEADLINE_S)
    with lock:
        slot = arena.shard_pool("dp0").plan(PAGE)
        reserver.start()
        assert lock.wait_for(lambda: slot.state is SlotState.FREE, DEADLINE_S)
    reserver.close()


def test_a_budget_is_reserved_part_by_part_without_the_lock_and_slots_take_from_it_meanwhile(
    tmp_path: Path, beside: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget_module, "PART_BYTES", 2 * PAGE)
    arena, lock = Arena(tmp_path / "arena", memory=8 * PAGE), threading.Condition(threading.RLock())
    pool, reserver = arena.shard_pool("dp0"), Reserver(arena, lock, "normal")
    slow = Watched(monkeypatch, Budget, "reserve_part", lock, hold=True)
    arena.reserve_rest()
    with lock:
        reserver.go_on()
    assert slow.begun.wait(DEADLINE_S)
    with lock:
        pool.create(7 * PAGE)
        slow.go_on.set()
    if (thread := reserver._thread) is not None:
        thread.join(DEADLINE_S)
    assert slow.calls == [(0, 2 * PAGE, False)]
    assert (arena.path / "reserve").stat().st_blocks * 512 == arena.budget.held == arena.budget.left == PAGE
    reserver.close()


def test_memory_that_runs_out_while_a_budget_is_reserved_is_said_and_tried_again_once_there_is_some(
    tmp_path: Path, beside: None, caplog: pytest.LogCaptureFixture
) -> None:
    system = Scarce(0)
    system.available = 8 * PAGE
    arena, lock = Arena(tmp_path / "arena", memory=8 * PAGE, files=system), threading.Condition(threading.RLock())
    reserver = Reserver(arena, lock, "normal", system)
    arena.reserve_rest()
    system.available = 4 * PAGE

    def run() -> None:
        with lock:
            reserver.make_good()
        if (thread := reserver._thread) is not None:
            thread.join(DEADLINE_S)

    run()
    assert "not all reserved" in reserver.short in caplog.text and (arena.budget.held, reserver.error) == (0, "")
    caplog.clear()
    run()
    assert not caplog.text, "it is said once"
    system.available = 8 * PAGE
    run()
    assert (arena.budget.held, reserver.short) == (8 * PAGE, "")
    reserver.close()


def test_an_smp_serves_before_its_budget_is_reserved(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_MEMORY", "129MiB")
    smp = ground.smp(rules=[(SLICE, None)])
    ground.points.wait_any(smp.name, SLICE).go()
    held = ground.points.wait_any(smp.name, SLICE)
    [status] = take_statuses(JOB, [smp.control])
    assert status.reserving == f"reserving: {2 * PART_BYTES / 1e9:.1f} of {(129 << 20) / 1e9:.1f} GB"
    assert (smp.arena / "reserve").stat().st_size == PART_BYTES
    held.go()


def await_reserved(store: Store) -> None:
    with store.changed:
        assert store.changed.wait_for(lambda: store.arena.ready() is None, DEADLINE_S)


def test_no_trainer_waits_while_a_large_slot_that_was_taken_away_is_made_again(
    tmp_path: Path, beside: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer begins a snapshot while this SMP still receives its shard: a rejoin that was overtaken."""

    def none(*arguments: object) -> None:
        pass

    store = Store(Arena(tmp_path / "a"), JOB, "n0", on_sealed=none, on_parity=none, on_protected=none, on_epoch=none)
    layout = arrange(JOB, 1, [Node("n0", "127.0.0.1", 1, 2, (Shard("dp0", PAGE),))], Protection(0, 0), 2)
    store.join(1)
    store.configure(layout)
    await_reserved(store)
    pool = store.arena.shard_pool("dp0")
    _, _, late = store.receiving.slot_for(pool, SnapshotId(1, 5), PAGE)
    slow = Watched(monkeypatch, SlotMemory, "reserve", store.changed, hold=True)
    owners = Owners(store.arena.path, 1)
    [slot] = [slot for slot in pool.slots if owners.change(pool.path(slot).name, FREE, taken(1))]
    with pytest.raises(ProtocolError):  # nothing was written
        store.seal(Seal(snapshot=SnapshotId(1, 6), coord="dp0", slot=pool.path(slot).name, taken=1, keep=()))
    assert sorted(each.state for each in pool.slots) == [SlotState.FREE, SlotState.MAKING]
    late[:] = b"x" * PAGE
    slow.go_on.set()
    await_reserved(store)
    assert [each.state for each in pool.slots] == [SlotState.FREE] * 2
    assert slow.held == [False]
    assert bytes(pool.view(slot)) == bytes(PAGE), "whoever received writes to nothing"
    store.reserver.close()


# ---------------------------------------------------------------------- trainers


def large_job() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    model.frozen = torch.nn.Parameter(torch.zeros(MUCH), requires_grad=False)
    return model, torch.optim.SGD(model[0].parameters(), lr=0.1)


def step(model: Any, optim: torch.optim.Optimizer, drained: InMemorySnapshot | None = None) -> None:
    """With `drained`, wait before the optimizer's step until all snapshots taken so far are protected."""
    model(torch.ones(4, 8)).sum().backward()
    assert drained is None or drained.drain(DEADLINE_S)
    optim.step()
    optim.zero_grad()


@pytest.fixture
def here(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SmpProcess]:
    """Make this process train on the node of an SMP that stops at `points`."""

    def start(*points: str) -> SmpProcess:
        smp = ground.smp(rules=[(point, None) for point in points])
        monkeypatch.setenv("HOLDFAST_JOB", JOB)
        monkeypatch.setenv("HOLDFAST_NODE", smp.name)
        monkeypatch.setenv("HOLDFAST_ARENA", str(smp.arena.parent))
        return smp

    return start


def said(caplog: pytest.LogCaptureFixture, text: str, level: int = logging.WARNING) -> int:
    return sum(text in record.getMessage() for record in caplog.records if record.levelno >= level)


def test_training_goes_on_until_there_is_memory_and_snapshots_begin_then(
    ground: Ground, here: Callable[..., SmpProcess], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    smp = here(SLICE)
    model, optim = large_job()
    with InMemorySnapshot(model, optim, protect="none") as snap:
        for _ in range(5):
            step(model, optim)
        held = ground.points.wait_any(smp.name, SLICE)
        step(model, optim)
        assert (snap.statistics.taken, snap.statistics.skipped) == (0, 6)
        assert said(caplog, "is being reserved", logging.INFO) == 1
        held.go()
        held = ground.points.wait_any(smp.name, SLICE)  # the first slot is reserved, the second is not
        while not snap.statistics.taken:
            step(model, optim)
        assert said(caplog, "taken from step", logging.INFO) == 1
        step(model, optim, drained=snap)
        for _ in range(5):
            step(model, optim)
        assert snap.statistics.taken == 1  # the snapshot holds the only slot
        held.go()
        ground.points.wait_any(smp.name, SLICE).go()
        while snap.statistics.taken < 4:
            step(model, optim)
        assert snap.statistics.failed == 0
        assert said(caplog, "reserved", logging.INFO) == 2


def test_a_job_that_ends_before_is_told(
    ground: Ground, here: Callable[..., SmpProcess], caplog: pytest.LogCaptureFixture
) -> None:
    smp = here(SLICE)
    model, optim = large_job()
    with InMemorySnapshot(model, optim, protect="none"):
        step(model, optim)
        step(model, optim)
        held = ground.points.wait_any(smp.name, SLICE)
        later = ground.meanwhile(go_on, ground, smp, held)
    later.result(DEADLINE_S)
    assert said(caplog, "ends without a snapshot") == 1


def test_an_smp_that_dies_while_it_reserves_is_followed_by_one_that_does(
    ground: Ground, here: Callable[..., SmpProcess], caplog: pytest.LogCaptureFixture
) -> None:
    smp = here(SLICE)
    model, optim = large_job()
    with InMemorySnapshot(model, optim, protect="none") as snap:
        step(model, optim)
        step(model, optim)
        ground.points.wait_any(smp.name, SLICE)
        smp.kill()  # this process starts another
        while snap.statistics.taken < 4:
            step(model, optim)
        step(model, optim, drained=snap)


def test_a_trainer_without_memory_is_told_why_on_its_way(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = ground.prepare()
    smp = Smp(prepared.job, prepared.name, prepared.arena, prepared.host, environment=IN_THREADS, system=Scarce(0))
    monkeypatch.setenv("HOLDFAST_JOB", JOB)
    monkeypatch.setenv("HOLDFAST_ARENA", str(prepared.arena.parent))
    model, optim = large_job()
    try:
        with pytest.raises(ArenaTooSmall, match="ran out"), InMemorySnapshot(model, optim, protect="none"):
            limit = time.monotonic() + DEADLINE_S
            while time.monotonic() < limit:
                step(model, optim)
    finally:
        smp.stop(remove=True)
        smp.close()
