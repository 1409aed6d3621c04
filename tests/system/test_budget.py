"""A fixed amount of memory from the first second to the last: nothing grows, leaks or goes into a core dump."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from holdfast.cli.main import main
from holdfast.leftovers import find_leftovers
from holdfast.smp_daemon.shared import budget as budget_module
from holdfast.smp_daemon.shared.board import SnapshotOutcome
from holdfast.smp_daemon.shared.budget import RESERVE, wipe, wipe_file
from holdfast.smp_daemon.shared.errors import ArenaTooSmall, ConfigError
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.spawn import sweep
from holdfast.smp_daemon.shared.system import System
from holdfast.smp_daemon.storage import pool as pool_module
from holdfast.smp_daemon.storage.arena import Arena
from holdfast.smp_daemon.storage.pool import SlotPool
from holdfast.smp_daemon.storage.reserver import Reserver
from tests.deadlines import DEADLINE_S
from tests.scripts import started
from tests.smp_kit import Ground, Run, SmpProcess, Trainer, memory_of, read_line, run_on
from tests.system.test_arena import PAGE, TAG, at, crash, hold

ROOM = 64 * PAGE


# ---------------------------------------------------------------------- the arena


def taken(arena: Path) -> int:
    """Bytes that slots use, and that are reserved for more slots."""
    kept = [path for path in arena.iterdir() if path.suffix in (".safetensors", ".parity") or path.name == RESERVE]
    return sum(path.stat().st_blocks * 512 for path in kept)


def test_all_of_it_is_reserved_from_the_start_whatever_is_made_of_it(shm: Path) -> None:
    arena = Arena(shm / "arena", memory=ROOM)
    arena.reserve_rest()
    assert taken(arena.path) == ROOM
    pool, other = arena.shard_pool("dp0"), arena.parity_pool(TAG, 1)
    arena.reserve({pool: (3 * PAGE - 7, 2), other: (PAGE, 3)})
    assert taken(arena.path) == ROOM
    arena.reserve({pool: (PAGE, 2)})
    assert taken(arena.path) == ROOM
    assert arena.budget.left == arena.budget.held == ROOM - 2 * PAGE


def test_more_than_that_is_refused_and_nothing_is_made(shm: Path) -> None:
    arena = Arena(shm / "arena", memory=4 * PAGE)
    arena.reserve_rest()
    pool = arena.shard_pool("dp0")
    with pytest.raises(ArenaTooSmall, match=rf"HOLDFAST_MEMORY.* {4 * PAGE:,}: .* {6 * PAGE:,} or more"):
        arena.reserve({pool: (2 * PAGE, 3)})
    assert pool.slots == []
    arena.reserve({pool: (2 * PAGE, 2)})
    with pytest.raises(ArenaTooSmall):
        pool.create(1)
    assert taken(arena.path) == 4 * PAGE


def test_a_successor_counts_what_is_there(shm: Path) -> None:
    first = Arena(shm / "arena", memory=ROOM)
    first.reserve({first.shard_pool("dp0"): (PAGE, 3)})
    hold(first.shard_pool("dp0"), 1)
    second = crash(first)
    assert not (second.path / RESERVE).exists()  # it was started without a limit
    second.directory.close()
    third = Arena(shm / "arena", memory=8 * PAGE)
    list(third.adopt())
    third.reserve_rest()
    assert (third.budget.used, taken(third.path)) == (3 * PAGE, 8 * PAGE)


def test_where_it_cannot_be_reserved_the_error_says_so(shm: Path) -> None:
    status = os.statvfs(shm)
    arena = Arena(shm / "arena", memory=status.f_blocks * status.f_frsize + PAGE)
    with pytest.raises(ArenaTooSmall, match=r"allow less"):
        arena.reserve_rest()
    assert taken(arena.path) == 0


def test_a_successor_with_less_memory_than_is_held_says_so_and_touches_nothing(shm: Path) -> None:
    arena = Arena(shm / "arena", memory=ROOM)
    pool = arena.shard_pool("dp0")
    arena.reserve({pool: (PAGE, 6)})
    hold(pool, 1)
    arena.directory.close()
    successor = Arena(arena.path, memory=5 * PAGE)
    list(successor.adopt())
    with pytest.raises(ArenaTooSmall, match=r"holds .* and --memory .* allows"):
        successor.reserve_rest()
    assert [record for _, _, record in crash(successor).adopt()] == [{"snapshot": [1, 1]}]


@pytest.mark.parametrize("what", ["memory", "file system"])
def test_an_arena_larger_than_the_machine_is_refused_at_the_start(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    status = os.statvfs("/dev/shm")
    most = psutil.virtual_memory().total if what == "memory" else status.f_blocks * status.f_frsize
    monkeypatch.setenv("HOLDFAST_MEMORY", f"{most // 1024 + 4}KiB")
    smp = ground.prepare().launch()
    with pytest.raises(ConfigError, match=r"HOLDFAST_MEMORY.*allow less"):
        smp.wait_ready()
    assert not smp.arena.exists()


def test_more_than_this_process_may_use_is_refused_however_large_the_file_system(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget_module, "memory_bytes", lambda: ROOM - 1)
    arena = Arena(shm / "arena", memory=ROOM)
    with pytest.raises(ArenaTooSmall, match=rf"HOLDFAST_MEMORY.*control group.*{ROOM - 1:,}.*allow less"):
        arena.reserve_rest()
    assert taken(arena.path) == 0


def test_slots_for_which_the_machine_has_no_memory_are_refused(shm: Path) -> None:
    class Small(System):
        def available_bytes(self) -> int:
            return 3 * PAGE

    arena = Arena(shm / "arena", files=Small())
    with pytest.raises(ArenaTooSmall, match="unless the machine itself"):
        arena.reserve({arena.shard_pool("dp0"): (PAGE, 4)})
    assert taken(arena.path) == 0


def test_a_successor_that_may_use_less_than_is_held_does_not_start_and_the_next_finds_everything(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    smp = ground.smp()
    snapshot = run_on([smp], [[30000]]).protect(1)
    smp.kill()
    kept = sorted(path.name for path in smp.arena.iterdir())
    monkeypatch.setenv("HOLDFAST_MEMORY", "4KiB")
    with pytest.raises(ConfigError, match=r"holds .* and --memory .* allows 4,096"):
        smp.launch().wait_ready()
    assert sorted(path.name for path in smp.arena.iterdir()) == kept
    monkeypatch.delenv("HOLDFAST_MEMORY")
    smp.launch().wait_ready()
    assert snapshot in {each for each, _ in smp.client().inventory().shards}


# ---------------------------------------------------------------------- zeros


def bytes_of(pool: SlotPool) -> set[bytes]:
    return {path.read_bytes() for path in pool.arena.glob("*.safetensors")}


def wiped(arena: Arena) -> None:
    """What the reserver's thread does."""
    while (unwiped := arena.next_unwiped()) is not None:
        pool, slot = unwiped
        pool.wipe_next(slot)


def test_slots_are_wiped_by_a_thread_part_by_part_and_may_be_taken_meanwhile(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "WIPE_BYTES", PAGE // 4)
    lock = threading.Condition(threading.RLock())
    arena = Arena(shm / "arena", zero=True)
    reserver, pool = Reserver(arena, lock, "normal"), arena.shard_pool("dp0")
    with lock:
        arena.reserve({pool: (PAGE, 2)})
        hold(pool, 7)
        arena.release([], at(8))
        assert {slot.unwiped for slot in pool.slots} == {0, PAGE}, "the thread waits for the lock"
        pool.wipe_next(pool.slots[0])
        assert bytes(pool.view(pool.slots[0])) == b"\7" * (3 * PAGE // 4) + bytes(PAGE // 4)
        first, second = (pool.assign(at(step), PAGE) for step in (8, 9))
        assert not first.unwiped and arena.next_unwiped() is None, "it will be overwritten anyway"
        pool.discard(second)
    thread = reserver._thread
    assert thread is not None
    thread.join(DEADLINE_S)
    assert bytes(pool.view(second)) == bytes(PAGE)
    assert bytes(pool.view(first))[:1] == b"\7", "what somebody writes is left alone"
    reserver.close()


def test_what_is_given_up_is_overwritten_with_zeros_if_asked_to(shm: Path) -> None:
    for zero in (False, True):
        arena = Arena(shm / f"arena{zero}", zero=zero)
        pool = arena.shard_pool("dp0")
        arena.reserve({pool: (PAGE, 1)})
        hold(pool, 7)
        arena.release([], at(8))
        wiped(arena)
        assert bytes_of(pool) == {bytes([0 if zero else 7]) * PAGE}
        slot = pool.assign(at(9), PAGE)
        pool.view(slot)[:] = bytes([9]) * PAGE
        pool.discard(slot)
        wiped(arena)
        assert bytes_of(pool) == {bytes([0 if zero else 9]) * PAGE}


def test_so_is_what_a_killed_one_had_not_sealed_and_what_is_removed(shm: Path) -> None:
    arena = Arena(shm / "arena", zero=True)
    pool = arena.shard_pool("dp0")
    arena.reserve({pool: (PAGE, 2)})
    hold(pool, 6)
    slot = pool.assign(at(7), PAGE)
    pool.view(slot)[:] = bytes([7]) * PAGE
    views = [pool.view(slot), pool.view(pool.slots[0])]
    arena.directory.close()
    second = Arena(arena.path, zero=True)
    list(second.adopt())
    wiped(second)
    assert bytes(views[0]) == bytes(PAGE)
    third_pool = second.shard_pool("dp0")
    third_pool.slots[0].state, third_pool.slots[0].snapshot = pool.slots[0].state, at(6)
    second.destroy()
    assert [bytes(view) for view in views] == [bytes(PAGE)] * 2


def test_memory_and_files_are_wiped(shm: Path) -> None:
    view = memoryview(bytearray(b"secret"))
    wipe(view)
    assert bytes(view) == bytes(6)
    (shm / "file").write_bytes(b"secret")
    wipe_file(shm / "file")
    assert (shm / "file").read_bytes() == bytes(6)
    (shm / "file").write_bytes(b"")
    wipe_file(shm / "file")
    wipe_file(shm / "missing")


# ---------------------------------------------------------------------- killed processes


def test_what_is_left_of_a_removal_counts_for_nothing(shm: Path) -> None:
    arena = Arena(shm / "arena")
    pool = arena.shard_pool("dp0")
    arena.reserve({pool: (PAGE, 2)})
    hold(pool, 1)
    (arena.path / "layout-1-0.json.part").write_text("{")
    second = crash(arena)
    assert not list(second.path.glob("*.part"))
    second.clear()
    assert [path.name for path in second.path.iterdir()] == []


def test_a_sweep_removes_what_nothing_can_be_restored_from_and_nothing_else(ground: Ground) -> None:
    base = ground.base / "arenas"
    for name in ("joined", "halfway", "locked", "young"):
        smp = ground.prepare(name)
        smp.arena = base / name
        smp.launch().wait_ready()
        if name != "young":
            run_on([smp], [[3000]]).protect(1)
        if name != "locked":
            smp.kill()
        if name != "joined":
            (smp.arena / "node.json").unlink(missing_ok=True)
        if name != "young":
            age(smp.arena)
    for client in ground._clients:
        client.close()
    assert sweep(base) == []  # this process still maps boards and slots
    copies = ground.base / "copies"
    for name in ("joined", "halfway", "young"):
        shutil.copytree(base / name, copies / name, ignore=shutil.ignore_patterns("smp.sock"))
        if name != "young":
            age(copies / name)
    assert sweep(copies) == [copies / "halfway"]
    assert sorted(path.name for path in copies.iterdir()) == ["joined", "young"]


def age(arena: Path) -> None:
    for path in (*arena.iterdir(), arena):
        os.utime(path, (time.time() - 100, time.time() - 100))


def test_an_smp_that_starts_sweeps(ground: Ground) -> None:
    (ground.base / "node0" / "rubbish").mkdir(parents=True, mode=0o700)
    (ground.base / "node0" / "rubbish" / "board").touch()
    (ground.base / "node0" / "rubbish" / "dp0.0.safetensors").write_bytes(bytes(PAGE))
    age(ground.base / "node0" / "rubbish")
    ground.smp().client().stop(remove=False, force=False)
    assert not (ground.base / "node0" / "rubbish").exists()


@pytest.mark.parametrize("names", [["board", "theirs"], ["smp.log"], ["dp0.0.safetensors", "notes.json"]])
def test_what_is_no_arena_of_ours_is_left_alone(shm: Path, names: list[str]) -> None:
    (shm / "other").mkdir(mode=0o700)
    for name in names:
        (shm / "other" / name).touch()
    age(shm / "other")
    assert sweep(shm) == []
    assert list(find_leftovers(shm)) == []


def test_a_sweep_of_what_cannot_be_listed_is_left_undone(shm: Path) -> None:
    assert sweep(shm / "missing") == []


def test_gc_sees_an_arena_that_has_no_owner_yet(ground: Ground) -> None:
    (ground.base / "arenas" / "begun").mkdir(parents=True, mode=0o700)
    (ground.base / "arenas" / "begun" / "board").touch()
    (ground.base / "arenas" / "begun" / RESERVE).write_bytes(bytes(PAGE))
    assert [leftover.job for leftover in find_leftovers(ground.base / "arenas")] == ["begun"]
    assert main(["gc", "--arena", str(ground.base / "arenas"), "--older-than", "0", "--zero"]) == 0
    assert not (ground.base / "arenas" / "begun").exists()


TRAINER = """
import sys
from pathlib import Path
from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.layout import SnapshotId
client = SmpClient(Path(sys.argv[1]), sys.argv[2])
client.join(int(sys.argv[3]))
slot = client.take("dp0", [SnapshotId(1, 1)]).view
slot[: slot.nbytes // 2] = b"x" * (slot.nbytes // 2)
print("writing", flush=True)
sys.stdin.read()
"""


@contextmanager
def writing_trainer(smp: SmpProcess, epoch: int) -> Iterator[subprocess.Popen[str]]:
    """A process in the middle of writing a slot."""
    with started([sys.executable, "-c", TRAINER, str(smp.arena), smp.job, str(epoch)]) as process:
        assert read_line(process.stdout) == "writing\n"
        yield process


@pytest.mark.parametrize("memory", ["0", "1MB"])
def test_whoever_is_killed_nothing_leaks(ground: Ground, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_MEMORY", memory)
    [smp], run = ground.job([[3000]])
    snapshot = run.protect(1)
    before = memory_of(smp.arena)
    if memory == "1MB":
        assert before >= 10**6
    for epoch, victims in enumerate(["trainer", "smp", "both"], 2):
        Run([Trainer(smp, "dp0")]).start(epoch)
        with writing_trainer(smp, epoch) as process:
            if victims != "trainer":
                smp.kill()
            if victims != "smp":
                process.kill()
                process.wait(DEADLINE_S)
            if victims != "trainer":
                smp.launch().wait_ready()
        again = smp.client()
        assert {shard for shard, _ in again.inventory().shards} == {snapshot}
        assert again.outcome(SnapshotId(epoch, 9)) is not SnapshotOutcome.PROTECTED
        again.close()
        assert memory_of(smp.arena) <= before + (16 << 10)  # another layout
    view = Trainer(smp, "dp0").recover(run.plan(smp.client().inventory())).view
    assert bytes(view) == run["dp0"].image(snapshot)


def test_a_job_that_needs_more_is_told_by_how_much(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_MEMORY", "64KiB")
    smps = ground.smps(2)
    with pytest.raises(
        ArenaTooSmall, match=r"--memory .HOLDFAST_MEMORY. .* 65,536: .* [0-9,]+ or more.* smp stop.* SMP [0-9]+ keeps"
    ):
        run_on(smps, [[30000], [30000]])
    assert memory_of(smps[0].arena) <= 65536 + 16 * PAGE


# ---------------------------------------------------------------------- core dumps


def flags_of(pid: int, arena: Path) -> dict[str, set[str]]:
    """The kernel's flags of every mapping of a file in the arena by a process, by file name."""
    found: dict[str, set[str]] = {}
    name = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if f"{arena}/" in line:
            name = Path(line.split(maxsplit=5)[5]).name
        elif line.startswith("VmFlags:") and name:
            found[name] = set(line.split()[1:])
            name = ""
    return found


def test_no_core_dump_holds_any_of_it(ground: Ground) -> None:
    [smp], run = ground.job([[3000]])
    run.protect(1)
    for pid in (smp.process.pid, os.getpid()):
        mapped = flags_of(pid, smp.arena)
        assert {"board", "dp0.0.safetensors"} <= mapped.keys()
        assert all("dd" in flags for flags in mapped.values()), mapped
