"""The arena on real shared memory: what it reserves, adopts, fences, releases and leaves behind."""

from __future__ import annotations

import errno
import mmap
import os
import resource
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.smp_daemon.shared.board import Board
from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.errors import ArenaTooSmall, ConfigError
from holdfast.smp_daemon.shared.layout import Layout, Node, Shard, SnapshotId
from holdfast.smp_daemon.shared.plain import encode_digested
from holdfast.smp_daemon.shared.system import System
from holdfast.smp_daemon.storage import arena as arena_module
from holdfast.smp_daemon.storage import pool as pool_module
from holdfast.smp_daemon.storage.arena import Arena
from holdfast.smp_daemon.storage.pool import Slot, SlotPool, SlotState
from tests.smp_kit import just_before, limited, mounted

PAGE = mmap.PAGESIZE
SMALL_TMPFS = 16 * PAGE
TAG = "0123456789abcdef"


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A separate tmpfs of `SMALL_TMPFS` bytes."""
    with mounted(tmp_path, str(SMALL_TMPFS)):
        yield tmp_path


@pytest.fixture
def arena(shm: Path) -> Arena:
    return Arena(shm / "arena")


@pytest.fixture
def pool(arena: Arena) -> SlotPool:
    return arena.shard_pool("dp0")


def at(step: int, epoch: int = 1) -> SnapshotId:
    return SnapshotId(epoch, step)


def hold(pool: SlotPool, step: int, length: int = PAGE, epoch: int = 1) -> Slot:
    """Commit a slot of `pool` with the snapshot of `step`, each byte of it set to `step`."""
    slot = pool.assign(at(step, epoch), length)
    pool.view(slot)[:] = bytes([step]) * length
    pool.commit(slot, encode_digested({"snapshot": [epoch, step]}))
    return slot


def crash(arena: Arena) -> Arena:
    """The owner of `arena` dies, which releases its lock, and a successor takes over."""
    arena.directory.close()
    return Arena(arena.path)


def files(arena: Arena) -> list[str]:
    return sorted(path.name for path in arena.path.iterdir())


def states(pool: SlotPool) -> list[tuple[int, SlotState]]:
    return sorted((slot.index, slot.state) for slot in pool.slots)


def layout(epoch: int, revision: int = 0) -> Layout:
    node = Node("a", "127.0.0.1", 1, 2, (Shard("dp0", PAGE),))
    return Layout("run", epoch, revision, (node,), ((0,),), 1, 0, PAGE, 2)


# ---------------------------------------------------------------------- ownership


def test_an_arena_is_a_directory_for_its_user_alone(shm: Path) -> None:
    os.umask(os.umask(0o022))
    assert Arena(shm / "deep" / "arena").path.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="takes two users")
def test_a_trainer_of_another_user_is_told_whose_the_snapshots_are(shm: Path) -> None:
    Arena(shm / "arena").directory.close()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(12345)
            os.setuid(12345)
            SmpClient(shm / "arena", "test")
        except ConfigError as error:
            status = 0 if "belongs to user 0" in str(error) and "as user 12345" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_arena_of_another_user_is_refused(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Arena(shm / "arena").directory.close()
    monkeypatch.setattr(System, "getuid", staticmethod(lambda: 12345))
    with pytest.raises(ConfigError, match="belongs to user 0"):
        Arena(shm / "arena")


@pytest.mark.parametrize("name", ["train.py", "model.safetensors", "model-00001-of-00002.safetensors", "config.json"])
def test_a_directory_of_other_software_is_refused_and_left_as_it_is(shm: Path, name: str) -> None:
    """All that is in an arena is removed with it."""
    (shm / "arena").mkdir(mode=0o700)
    (shm / "arena" / name).write_text("precious")
    with pytest.raises(ConfigError, match=f"no arena.*{name}"):
        Arena(shm / "arena")
    assert (shm / "arena" / name).read_text() == "precious"


def test_what_lies_in_an_arena_keeps_no_successor_away(arena: Arena) -> None:
    (arena.path / "node.json").write_text("")
    (arena.path / "core.4711").write_text("")
    assert crash(arena).path == arena.path


def test_a_trainer_that_takes_a_slot_meanwhile_keeps_no_successor_away(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena.shard_pool("dp0").create(20)
    arena.own(1)
    arena.directory.close()
    (mark,) = arena.path.glob("*.own")
    taken = mark.with_name("dp0.0.safetensors.taken-1.1.own")
    monkeypatch.setattr(Path, "lstat", just_before(Path.lstat, mark.name, partial(mark.rename, taken)))
    Arena(arena.path)
    assert not mark.exists() and taken.exists()


def test_a_path_that_cannot_be_a_directory_is_refused(shm: Path) -> None:
    (shm / "file").write_text("")
    for path in (shm / "file", shm / "file" / "arena", Path("/proc/nowhere")):
        with pytest.raises(ConfigError, match="cannot make"):
            Arena(path)


def test_destroy_leaves_nothing(shm: Path) -> None:
    arena = Arena(shm / "arena")
    pool = arena.shard_pool("dp0")
    arena.reserve({pool: (PAGE, 2), arena.parity_pool(TAG, 1): (PAGE, 1)})
    hold(pool, 1)
    arena.layouts.add(layout(1))
    arena.destroy()
    assert list(shm.iterdir()) == []
    assert [slot for each in arena.pools() for slot in each.slots] == []


# ---------------------------------------------------------------------- reserving


def test_reserving_makes_slots_whose_memory_is_there(arena: Arena) -> None:
    shard, parity = arena.shard_pool("dp0.x"), arena.parity_pool(TAG, 1)
    arena.reserve({shard: (3 * PAGE + 1, 2), parity: (PAGE, 3)})
    made = [f"dp0.x.{i}.safetensors" for i in range(2)] + [f"{TAG}-1.{i}.parity" for i in range(3)]
    assert files(arena) == sorted(made)
    for pool, length in ((shard, 3 * PAGE + 1), (parity, PAGE)):
        for slot in pool.slots:
            status = pool.path(slot).stat()
            assert (status.st_size, status.st_mode & 0o777) == (length, 0o600)
            assert status.st_blocks * 512 >= length
            assert bytes(pool.view(slot)) == bytes(length)


def test_reserving_again_makes_only_what_is_missing(arena: Arena, pool: SlotPool) -> None:
    arena.reserve({pool: (PAGE, 2)})
    hold(pool, 1)
    before = {slot.index: pool.path(slot).stat().st_ino for slot in pool.slots}
    arena.reserve({pool: (PAGE, 3)})
    after = {slot.index: pool.path(slot).stat().st_ino for slot in pool.slots}
    assert len(after) == 3
    assert {index: after[index] for index in before} == before


def test_reserving_another_length_drops_free_slots_and_keeps_held_ones(arena: Arena) -> None:
    pool, unwanted = arena.shard_pool("dp0"), arena.shard_pool("dp1")
    arena.reserve({pool: (PAGE, 3), unwanted: (PAGE, 2)})
    held, writing = hold(pool, 1), pool.assign(at(2), PAGE)
    kept = hold(unwanted, 1)
    arena.reserve({pool: (2 * PAGE, 2)})
    assert sorted((slot.bytes, slot.state) for slot in pool.slots) == [
        (PAGE, SlotState.RECEIVING),
        (PAGE, SlotState.SEALED),
        (2 * PAGE, SlotState.FREE),
        (2 * PAGE, SlotState.FREE),
    ]
    assert held in pool.slots and writing in pool.slots
    assert unwanted.slots == [kept]
    assert bytes(pool.view(held)) == b"\x01" * PAGE
    assert len([name for name in files(arena) if name.endswith(".safetensors")]) == 5


def test_a_pool_that_needs_nothing_gets_nothing(arena: Arena) -> None:
    arena.reserve({arena.parity_pool(TAG, 0): (0, 3), arena.shard_pool("dp0"): (PAGE, 0)})
    assert files(arena) == []


def only(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Make every file system report `room` free bytes."""
    status = SimpleNamespace(f_bavail=room // PAGE, f_frsize=PAGE)
    monkeypatch.setattr(System, "statvfs", staticmethod(lambda path: status))


def test_without_room_for_all_nothing_is_made(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {arena.shard_pool("dp0"): (2 * PAGE, 2), arena.parity_pool(TAG, 0): (PAGE, 1)}
    only(monkeypatch, 4 * PAGE)
    with pytest.raises(ArenaTooSmall):
        arena.reserve(wanted)
    assert files(arena) == []
    assert [slot for pool in arena.pools() for slot in pool.slots] == []
    only(monkeypatch, 5 * PAGE)
    arena.reserve(wanted)
    assert len(files(arena)) == 3


def test_an_arena_that_is_too_small_says_the_need_the_room_and_the_fix(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, 3 * PAGE)
    with pytest.raises(ArenaTooSmall) as raised:
        arena.reserve({arena.shard_pool("dp0"): (1000 * PAGE, 2)})
    message = str(raised.value)
    assert f"{arena.path} needs {2000 * PAGE:,} bytes more" in message
    assert f"{3 * PAGE:,} left" in message
    for fix in ("mount -o remount,size=", "--shm-size", "emptyDir", "fewer slots"):
        assert fix in message


def test_slots_that_are_there_already_need_no_room(
    arena: Arena, pool: SlotPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena.reserve({pool: (PAGE, 2)})
    only(monkeypatch, 0)
    arena.reserve({pool: (PAGE, 2)})
    with pytest.raises(ArenaTooSmall, match=f"needs {PAGE:,} bytes"):
        arena.reserve({pool: (PAGE, 3)})


def test_what_a_full_file_system_refuses_is_counted_in_pages(small_tmpfs: Path) -> None:
    arena = Arena(small_tmpfs / "arena")
    pool = arena.shard_pool("dp0")
    with pytest.raises(ArenaTooSmall, match=f"needs {20 * PAGE:,} bytes more"):
        arena.reserve({pool: (1, 20)})
    assert pool.slots == []
    arena.reserve({pool: (1, 10)})
    assert len(pool.slots) == 10


def test_a_file_system_that_fills_up_meanwhile_gets_all_its_room_back(
    small_tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = Arena(small_tmpfs / "arena")
    pool = arena.shard_pool("dp0")
    arena.reserve({pool: (PAGE, 2)})
    for module in (arena_module, pool_module):
        monkeypatch.setattr(module, "room", lambda path, system: 1 << 40)
    with pytest.raises(ArenaTooSmall, match=f"needs {5 * PAGE:,} bytes more"):
        arena.reserve({pool: (PAGE, 2), arena.parity_pool(TAG, 0): (5 * PAGE, 4)})
    monkeypatch.undo()
    assert files(arena) == ["dp0.0.safetensors", "dp0.1.safetensors"]
    assert arena.parity_pool(TAG, 0).slots == []
    arena.reserve({pool: (PAGE, 2), arena.parity_pool(TAG, 0): (5 * PAGE, 2)})


def test_a_slot_that_cannot_be_mapped_takes_back_the_others(
    arena: Arena, pool: SlotPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *arguments: object) -> Any:
        raise OSError(errno.ENOMEM, "no")

    monkeypatch.setattr(pool_module, "SlotMemory", refuse)
    with pytest.raises(OSError, match="no"):
        arena.reserve({pool: (PAGE, 2)})
    assert (pool.slots, files(arena)) == ([], [])


def test_a_single_slot_on_a_full_file_system_is_refused_and_leaves_nothing(small_tmpfs: Path) -> None:
    arena = Arena(small_tmpfs / "arena")
    pool = arena.shard_pool("dp0")
    with pytest.raises(ArenaTooSmall, match=f"needs {SMALL_TMPFS + PAGE:,} bytes more"):
        pool.create(SMALL_TMPFS + PAGE)
    assert (pool.slots, files(arena)) == ([], [])
    assert pool.create(PAGE).index == 0


def test_on_a_full_file_system_a_board_is_refused_and_nothing_is_killed(small_tmpfs: Path) -> None:
    """A page that the kernel cannot give raises SIGBUS when it is first touched."""
    board = Board(small_tmpfs / "board", create=True)
    with pytest.raises(OSError, match="No space"):
        (small_tmpfs / "stranger").write_bytes(bytes(SMALL_TMPFS))
    with pytest.raises(ArenaTooSmall, match=r"board.*No space"):
        board.succeeded(2)
    (small_tmpfs / "stranger").unlink()
    assert board.succeeded(2).epoch == 2


def test_a_file_longer_than_this_process_may_write_names_the_limit(arena: Arena) -> None:
    with limited(resource.RLIMIT_FSIZE, PAGE), pytest.raises(ArenaTooSmall, match="ulimit -f"):
        arena.shard_pool("dp0").create(2 * PAGE)
    assert files(arena) == []


def test_another_failure_to_reserve_is_not_taken_for_a_lack_of_room(
    arena: Arena, pool: SlotPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.EINTR, "interrupted")

    monkeypatch.setattr(System, "posix_fallocate", staticmethod(refuse))
    with pytest.raises(OSError, match="interrupted"):
        pool.create(PAGE)
    assert (pool.slots, files(arena)) == ([], [])


# ---------------------------------------------------------------------- adoption


def test_a_successor_finds_exactly_the_committed_slots(arena: Arena) -> None:
    shard, parity = arena.shard_pool("pp0-dp1.x"), arena.parity_pool(TAG, 11)
    arena.reserve({shard: (2 * PAGE, 3), parity: (PAGE, 2)})
    hold(shard, 5, 2 * PAGE)
    shard.assign(at(6), 2 * PAGE)
    hold(parity, 5)
    successor = crash(arena)
    adopted = {(pool.name, slot.index, slot.bytes, record["snapshot"][1]) for pool, slot, record in successor.adopt()}
    assert adopted == {("pp0-dp1.x", 0, 2 * PAGE, 5), (f"{TAG}-11", 0, PAGE, 5)}
    assert states(successor.shard_pool("pp0-dp1.x")) == [(i, SlotState.FREE) for i in range(3)]
    assert states(successor.parity_pool(TAG, 11)) == [(i, SlotState.FREE) for i in range(2)]
    assert bytes(successor.shard_pool("pp0-dp1.x").view(successor.shard_pool("pp0-dp1.x").slots[0])) == b"\5" * 2 * PAGE


def test_a_crash_between_the_data_and_the_commit_record_leaves_the_slot_free(
    arena: Arena, pool: SlotPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena.reserve({pool: (PAGE, 1)})

    def die(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pool_module, "write", die)
    with pytest.raises(KeyboardInterrupt):
        hold(pool, 1)
    monkeypatch.undo()
    successor = crash(arena)
    assert list(successor.adopt()) == []
    assert hold(successor.shard_pool("dp0"), 2).index == 0


def test_parities_of_several_groups_are_told_apart(arena: Arena) -> None:
    for tag in (TAG, TAG[::-1]):
        pool = arena.parity_pool(tag, 1)
        pool.create(PAGE)
        hold(pool, 1)
    assert arena.parity_pool(TAG, 1) is not arena.parity_pool(TAG[::-1], 1)
    assert arena.parity_pool(TAG, 1) is not arena.parity_pool(TAG, 2)
    successor = crash(arena)
    pools = [pool for pool, _, _ in successor.adopt()]
    assert pools == [successor.parity_pool(tag, 1) for tag in sorted((TAG, TAG[::-1]))]


def test_a_successor_knows_the_layouts(arena: Arena) -> None:
    arena.layouts.add(layout(1))
    arena.layouts.add(layout(12))
    arena.layouts.add(layout(12, revision=3))
    (arena.path / "layout-13-0.json").write_text("{}")
    (arena.path / "layout-14.json").write_text("[")
    successor = crash(arena)
    successor.layouts.adopt(successor.directory.note_lost)
    assert files(successor) == ["layout-1-0.json", "layout-12-0.json", "layout-12-3.json"]
    assert dict(successor.layouts) == {(1, 0): layout(1), (12, 0): layout(12), (12, 3): layout(12, revision=3)}


# ---------------------------------------------------------------------- fencing


def test_a_fence_leaves_sealed_and_free_slots_as_they_are(arena: Arena) -> None:
    pool, parity = arena.shard_pool("dp0"), arena.parity_pool(TAG, 0)
    arena.reserve({pool: (PAGE, 3), parity: (PAGE, 1)})
    hold(pool, 1)
    writing, gathering = pool.assign(at(2), PAGE), parity.assign(at(2), PAGE)
    before = {slot.index: pool.path(slot).stat().st_ino for slot in pool.slots if slot is not writing}
    arena.fence(2)
    assert states(pool) == [(0, SlotState.SEALED), (2, SlotState.FREE)]
    assert parity.slots == [] and not pool.path(writing).exists() and not parity.path(gathering).exists()
    assert {slot.index: pool.path(slot).stat().st_ino for slot in pool.slots} == before
    assert [record for _, _, record in crash(arena).adopt()] == [{"snapshot": [1, 1]}]


def test_a_view_is_of_its_slot_until_the_slot_is_taken_away(arena: Arena, pool: SlotPool) -> None:
    arena.reserve({pool: (PAGE, 3)})
    first, second, third = pool.slots
    views = [pool.view(slot) for slot in pool.slots]
    assert pool.is_at(first, views[0]) and pool.is_at(first, views[0][8:16])
    assert not pool.is_at(first, views[1])
    pool.remove(second)
    assert list(map(pool.is_at, (first, second, third), views)) == [True, False, True]


def test_a_slot_that_a_fence_takes_away_is_made_again_once_there_is_room(small_tmpfs: Path) -> None:
    arena = Arena(small_tmpfs / "arena")
    pool = arena.shard_pool("dp0")
    arena.reserve({pool: (SMALL_TMPFS - PAGE, 1)})
    late_writer = pool.view(pool.assign(at(1), SMALL_TMPFS - PAGE))
    arena.fence(2)
    assert (pool.slots, files(arena)) == ([], [])
    with pytest.raises(ArenaTooSmall):
        arena.reserve({pool: (SMALL_TMPFS - PAGE, 1)})
    late_writer.release()
    arena.reserve({pool: (SMALL_TMPFS - PAGE, 1)})
    assert len(pool.slots) == 1


# ---------------------------------------------------------------------- releasing


def test_release_frees_what_is_old_and_keeps_what_must_be_kept(arena: Arena) -> None:
    pool, parity = arena.shard_pool("dp0"), arena.parity_pool(TAG, 0)
    arena.reserve({pool: (PAGE, 5), parity: (PAGE, 2)})
    for step in (1, 2, 3, 4):
        hold(pool, step)
    pool.assign(at(1, epoch=0), PAGE)
    hold(parity, 1)
    hold(parity, 2)
    arena.release(keep=[at(2)], before=at(4))
    assert [slot.snapshot for slot in pool.slots] == [None, at(2), None, at(4), at(1, epoch=0)]
    assert [slot.snapshot for slot in parity.slots] == [None, at(2)]
    assert len([name for name in files(arena) if name.endswith(".safetensors")]) == 5
    kept = {(each.name, record["snapshot"][1]) for each, _, record in crash(arena).adopt()}
    assert kept == {("dp0", 2), ("dp0", 4), (f"{TAG}-0", 2)}


def test_release_deletes_slots_that_nobody_reserved(arena: Arena) -> None:
    pool, unwanted = arena.shard_pool("dp0"), arena.shard_pool("dp1")
    arena.reserve({pool: (PAGE, 2), unwanted: (PAGE, 1)})
    hold(pool, 1)
    hold(pool, 2)
    hold(unwanted, 1)
    arena.reserve({pool: (2 * PAGE, 1)})
    arena.release(keep=[at(2)], before=at(3))
    assert sorted((slot.bytes, slot.snapshot) for slot in pool.slots if slot.snapshot) == [(PAGE, at(2))]
    assert unwanted.slots == []
    assert files(arena) == ["dp0.1.safetensors", "dp0.1.safetensors.json", "dp0.2.safetensors"]


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        ([], [(3, 0), (3, 1)]),
        ([(2, 9)], [(2, 0), (2, 1), (2, 2), (3, 0), (3, 1)]),
        ([(1, 5), (3, 1)], [(1, 0), (3, 0), (3, 1)]),
    ],
)
def test_layouts_stay_while_a_kept_snapshot_or_the_present_needs_them(
    arena: Arena, keep: list[tuple[int, int]], left: list[tuple[int, int]]
) -> None:
    for epoch, revision in ((1, 0), (2, 0), (2, 1), (2, 2), (3, 0), (3, 1)):
        arena.layouts.add(layout(epoch, revision))
    arena.release([SnapshotId(*each) for each in keep], before=at(1, epoch=3))
    assert sorted(arena.layouts) == left
    assert files(arena) == [f"layout-{epoch}-{revision}.json" for epoch, revision in left]


# ---------------------------------------------------------------------- making room


def test_room_is_made_of_free_slots_of_other_pools_the_largest_first(arena: Arena) -> None:
    pool, other, parity = arena.shard_pool("dp0"), arena.shard_pool("dp1"), arena.parity_pool(TAG, 0)
    arena.reserve({pool: (8 * PAGE, 2), other: (3 * PAGE, 3), parity: (PAGE, 3)})
    hold(other, 1, 3 * PAGE)
    other.assign(at(2), 3 * PAGE)
    hold(parity, 1)
    assert arena.make_room(4 * PAGE, pool) == 4 * PAGE
    assert [slot.state for slot in pool.slots] == [SlotState.FREE] * 2
    assert states(other) == [(0, SlotState.SEALED), (1, SlotState.RECEIVING)]
    assert states(parity) == [(0, SlotState.SEALED), (2, SlotState.FREE)]
    assert files(arena) == sorted(
        [f"dp0.{i}.safetensors" for i in range(2)]
        + [f"dp1.{i}.safetensors" for i in range(2)]
        + [f"{TAG}-0.{i}.parity" for i in (0, 2)]
        + ["dp1.0.safetensors.json", f"{TAG}-0.0.parity.json"]
    )


@pytest.mark.parametrize("setting", ["always within_size [advise] never deny force", "always [never] advise"])
def test_a_slot_is_whole_whatever_pages_the_kernel_gives(
    arena: Arena, pool: SlotPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    (tmp_path / "setting").write_text(setting)
    monkeypatch.setattr(pool_module, "SHMEM_HUGE", tmp_path / "setting")
    arena.reserve({pool: (5 * PAGE + 3, 2)})
    for slot in pool.slots:
        status = pool.path(slot).stat()
        assert status.st_size == 5 * PAGE + 3
        assert status.st_blocks * 512 >= 6 * PAGE
        pool.view(slot)[-1] = 7


def test_a_full_file_system_is_refused_though_huge_pages_were_asked_for(
    small_tmpfs: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = tmp_path_factory.mktemp("sys") / "setting"
    setting.write_text("[advise]")
    monkeypatch.setattr(pool_module, "SHMEM_HUGE", setting)
    for module in (arena_module, pool_module):
        monkeypatch.setattr(module, "room", lambda path, system: 1 << 40)
    arena = Arena(small_tmpfs / "job")
    with pytest.raises(ArenaTooSmall):
        arena.reserve({arena.shard_pool("dp0"): (2 * SMALL_TMPFS, 1)})
    assert not list((small_tmpfs / "job").glob("*.safetensors"))


def test_a_slot_whose_record_cannot_be_written_does_not_count_and_may_be_committed_later(
    arena: Arena, pool: SlotPool
) -> None:
    pool.create(PAGE)
    slot = pool.assign(at(1), PAGE)
    with limited(resource.RLIMIT_FSIZE, 0), pytest.raises(ArenaTooSmall, match="cannot be written"):
        pool.commit(slot, encode_digested({"step": 1}))
    assert slot.state is SlotState.RECEIVING
    assert not list(arena.path.glob("*.part"))
    pool.commit(slot, encode_digested({"step": 1}))
    assert pool.find(at(1), SlotState.SEALED) is slot and pool.record_path(slot).exists()
