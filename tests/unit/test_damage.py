"""Damage in an arena's small files while no SMP runs: the next SMP starts, names what is lost, and goes on. What it
holds is what was sealed; what it lost is its own node's loss.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.smp_daemon.coding import scrub as scrubbing
from holdfast.smp_daemon.coding.scrub import verify_adopted
from holdfast.smp_daemon.shared.errors import ArenaTooSmall, ConfigError, ProtocolError
from holdfast.smp_daemon.shared.layout import Layout, Node, Shard, SnapshotId
from holdfast.smp_daemon.shared.messages import Seal
from holdfast.smp_daemon.shared.owners import Owners, choices, taken
from holdfast.smp_daemon.shared.pacer import Pacer
from holdfast.smp_daemon.shared.plain import decode_digested, encode_digested, to_plain
from holdfast.smp_daemon.shared.records import ParityRecord, digest, digest_units, write_json
from holdfast.smp_daemon.shared.slotfile import Leaf, plan_slot, write_stamp
from holdfast.smp_daemon.shared.system import System
from holdfast.smp_daemon.storage.arena import Arena
from holdfast.smp_daemon.storage.holdings import Commit, Key, ParityKey, ShardKey
from holdfast.smp_daemon.storage.store import Store
from tests.deadlines import DEADLINE_S

JOB, NODE, UNIT = "run", "a", 1 << 10
FORM = plan_slot(JOB, "dp0", [Leaf("w", "F32", (700,))], 200)
LAYOUT = Layout(
    JOB,
    1,
    0,
    tuple(
        Node(name, "127.0.0.1", 1, 2 + i, (Shard(f"dp{i}", FORM.total_bytes),)) for i, name in enumerate((NODE, "b"))
    ),
    ((0, 1),),
    1,
    1,
    UNIT,
    2,
)
SNAPSHOTS = (SnapshotId(1, 1), SnapshotId(1, 2))
TAG = LAYOUT.tag(0)
PARITY_KEY = ParityKey(SNAPSHOTS[1], TAG, 0)
SHARD_FILES = "dp0.{}.safetensors"


def content_of(snapshot: SnapshotId) -> bytes:
    slot = bytearray(random.Random(str(snapshot)).randbytes(FORM.total_bytes))
    slot[: len(FORM.header)] = FORM.header
    write_stamp(memoryview(slot), snapshot)
    return bytes(slot)


class Life:
    """An SMP's store in an arena; `die` releases the arena as the end of its process would."""

    def __init__(self, path: Path) -> None:
        def ignore(*_: object) -> None:
            """The rest of an SMP is not there."""

        self.arena = Arena(path, memory=1 << 20)
        self.store = Store(
            self.arena, JOB, NODE, on_sealed=ignore, on_parity=ignore, on_protected=ignore, on_epoch=ignore
        )

    def seal(self, snapshot: SnapshotId, keep: tuple[SnapshotId, ...] = (), digests: tuple[int, ...] = ()) -> None:
        pool, owners = self.arena.shard_pool("dp0"), Owners(self.arena.path, self.store.state.epoch)
        marks = {file: owner for file, [(owner, _)] in owners.found().items()}
        file, owner = choices(marks, keep)[0]
        assert owners.change(file, owner, taken(1))
        pool.view(next(slot for slot in pool.slots if pool.path(slot).name == file))[:] = content_of(snapshot)
        newest = max(keep, default=None)
        self.store.seal(
            Seal(snapshot=snapshot, coord="dp0", slot=file, taken=1, keep=keep, protected=newest, digests=digests)
        )

    def die(self) -> None:
        self.store.reserver.close()
        self.arena.directory.close()


@pytest.fixture
def arena(shm: Path) -> Path:
    """What an SMP leaves that held two snapshots and a parity, and had 1 MiB of memory in reserve."""
    life = Life(shm / "base" / JOB)
    life.store.join(1)
    life.store.configure(LAYOUT)
    life.seal(SNAPSHOTS[0])
    life.seal(SNAPSHOTS[1], keep=SNAPSHOTS[:1])
    pool = life.arena.parity_pool(TAG, 0)
    slot = pool.assign(SNAPSHOTS[1], pool.slots[0].bytes)
    view = pool.view(slot)
    count = len(view) // UNIT
    digests = tuple(digest(view[i * UNIT : (i + 1) * UNIT]) for i in range(count))
    record = ParityRecord(SNAPSHOTS[1], TAG, 0, UNIT, (UNIT,) * count, digests, ({1: 7},) * count)
    life.store.holdings.commit(pool, slot, Commit.of(record))
    life.die()
    (life.arena.path / "smp.json").write_bytes(encode_digested({"pid": 1}))
    (life.arena.path / "smp.sock").write_bytes(b"x" * 64)
    return life.arena.path


def rewrite(path: Path, change: Callable[[bytearray], object]) -> None:
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)


def flip(at: float, bit: int = 4) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        def change(content: bytearray) -> None:
            if content:
                content[int(at * (len(content) - 1))] ^= 1 << bit

        rewrite(path, change)

    return damage


def instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def make_full_directory(path: Path) -> None:
    (path / "inner").mkdir(parents=True)
    (path / "inner" / "link").symlink_to(path.parent.parent / "canary")


def move_behind_a_link(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to(path.with_name("moved"))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "one bit at its beginning": flip(0.0),
    "one bit in the middle": flip(0.5, 0),
    "one bit at its end": flip(1.0, 1),
    "cut to nothing": lambda path: os.truncate(path, 0),
    "cut in half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "longer": lambda path: os.truncate(path, path.stat().st_size + 4096),
    "noise": lambda path: path.write_bytes(random.Random("noise").randbytes(max(10, path.stat().st_size))),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "brackets": lambda path: path.write_bytes(b"[" * 100_000),
    "JSON of another shape": lambda path: write_json(path, [1, {"epoch": -1}]),
    "gone": lambda path: path.unlink(),
    "a directory": instead(lambda path: path.mkdir()),
    "a directory with files": instead(make_full_directory),
    "a pipe": instead(lambda path: os.mkfifo(path, 0o600)),
    "a link": move_behind_a_link,
    "a link to nothing": instead(lambda path: path.symlink_to("/nonexistent")),
    "a link to a file of others": instead(lambda path: path.symlink_to(path.parent.parent / "canary")),
    "mode 0": lambda path: path.chmod(0),
}
FILES = {
    "node.json": "node.json",
    "smp.json": "smp.json",
    "smp.sock": "smp.sock",
    "board": "board",
    "reserve": "reserve",
    "layout": "layout-1-0.json",
    "record of a shard": SHARD_FILES.format(1) + ".json",
    "record of parity": f"{TAG}-0.0.parity.json",
    "shard": SHARD_FILES.format(1),
    "parity": f"{TAG}-0.0.parity",
}


@pytest.fixture
def canary(arena: Path) -> Iterator[None]:
    (arena.parent / "canary").write_text("not ours")
    yield
    assert (arena.parent / "canary").read_text() == "not ours"


@pytest.mark.usefixtures("canary")
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("file", FILES)
def test_an_smp_starts_on_any_damage_and_holds_only_what_was_sealed(arena: Path, file: str, damage: str) -> None:
    DAMAGE[damage](arena / FILES[file])
    life = Life(arena)
    store, holdings = life.store, life.store.holdings
    held = set(holdings.held())
    verify_adopted(store, lambda count: None)
    everything: set[Key] = {ShardKey(SNAPSHOTS[0], "dp0"), ShardKey(SNAPSHOTS[1], "dp0"), PARITY_KEY}
    at_stake: dict[str, set[Key]] = {"shard": {ShardKey(SNAPSHOTS[1], "dp0")}, "parity": {PARITY_KEY}}
    lost = at_stake.get(file.split()[-1], set())
    if file == "node.json" and damage == "gone":  # the first file that goes when a job ends
        assert (held, store.state.epoch, store.state.protected) == (set(), 0, None)
    else:
        assert everything - lost <= held <= everything
        assert store.state.epoch == 1
        assert store.state.protected in ({None, SNAPSHOTS[0]} if file == "node.json" else {SNAPSHOTS[0]})
    assert [path for path in arena.glob("*.*.json") if not path.with_suffix("").exists()] == [], "records without slots"
    for key in held:
        if isinstance(key, ShardKey) and not holdings.known_damage(key):
            assert holdings.open(key)[0] == content_of(key.snapshot)
    # It serves: an older epoch is fenced, the next start takes a snapshot, and a successor finds that, all of it whole.
    store.join(2)
    store.configure(Layout(JOB, 2, 0, LAYOUT.nodes, LAYOUT.groups, 1, 1, UNIT, 2))
    life.seal(SnapshotId(2, 3), keep=tuple(key.snapshot for key in held if isinstance(key, ShardKey))[:1])
    life.arena.reserve_rest()
    life.die()
    after = Life(arena)
    assert after.arena.directory.lost == set()
    assert (after.store.state.epoch, after.store.holdings.holds(ShardKey(SnapshotId(2, 3), "dp0"))) == (2, True)
    assert after.arena.budget.held == after.arena.budget.left
    after.die()


@pytest.mark.parametrize("file", ["node.json", "layout", "record of a shard", "record of parity"])
def test_every_flipped_bit_of_a_small_file_is_noticed(arena: Path, file: str, caplog: pytest.LogCaptureFixture) -> None:
    path = arena / FILES[file]
    content = path.read_bytes()
    bits = random.Random(file).sample(range(8 * len(content)), 12)
    for bit in bits:
        copy = arena.with_name("copy")
        shutil.copytree(arena, copy)
        flip_bit(copy / path.name, bit)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            life = Life(copy)
        assert path.name in caplog.text, f"bit {bit}"
        assert life.store.state.epoch == 1
        life.die()
        shutil.rmtree(copy)


def flip_bit(path: Path, bit: int) -> None:
    def change(content: bytearray) -> None:
        content[bit // 8] ^= 1 << bit % 8

    rewrite(path, change)


def test_every_bit_of_a_digested_file_counts() -> None:
    content = bytearray(encode_digested({"protected": [1, 12], "epoch": 3}))
    assert decode_digested(bytes(content)) == {"protected": [1, 12], "epoch": 3}
    for bit in range(8 * len(content)):
        content[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Exception, match="digest"):
            decode_digested(bytes(content))
        content[bit // 8] ^= 1 << bit % 8


def test_without_node_json_the_epoch_is_the_newest_of_what_is_left(arena: Path) -> None:
    life = Life(arena)
    life.store.join(7)
    life.store.configure(Layout(JOB, 7, 0, LAYOUT.nodes, LAYOUT.groups, 1, 1, UNIT, 2))
    life.die()
    sealed = SnapshotId(7, 3)
    for lost in ([], ["layout-7-0.json"]):  # then only the record of a shard says that there was epoch 7
        for name in ("node.json", *lost):
            flip(0.5)(arena / name)
        life = Life(arena)
        assert life.store.state.epoch == 7
        if not lost:
            life.seal(sealed, keep=SNAPSHOTS[1:])
        assert life.store.holdings.holds(ShardKey(sealed, "dp0"))
        assert life.store.holdings.holds(ShardKey(SNAPSHOTS[1], "dp0"))
        life.die()


def test_a_reserve_that_lost_its_memory_gets_it_back(arena: Path) -> None:
    length = (arena / "reserve").stat().st_size
    for each in (0, length):
        os.truncate(arena / "reserve", each)
    life = Life(arena)
    life.arena.reserve_rest()
    assert (arena / "reserve").stat().st_blocks * 512 == life.arena.budget.left > 0
    life.die()


@pytest.mark.parametrize("whose", [{"job": "other"}, {"nodes": (Node("c", "127.0.0.1", 1, 2, ()),), "groups": ((0,),)}])
def test_without_node_json_what_is_not_known_to_be_of_this_job_and_node_is_not_used(
    arena: Path, whose: dict[str, Any]
) -> None:
    fields = {**{name: getattr(LAYOUT, name) for name in ("job", "nodes", "groups")}, **whose}
    other = Layout(fields["job"], 1, 0, fields["nodes"], fields["groups"], 1, 1, UNIT, 2)
    write_json(arena / "layout-1-0.json", to_plain(other))
    flip(0.5)(arena / "node.json")
    life = Life(arena)
    assert (life.store.state.epoch, life.store.holdings.held(), dict(life.arena.layouts)) == (0, [], {})
    assert list(arena.glob("*.safetensors")) == []
    life.die()


def test_one_smp_owns_an_arena_whatever_becomes_of_its_files(arena: Path) -> None:
    life = Life(arena)
    for name in FILES.values():
        (arena / name).unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="owns the arena"):
        Arena(arena)
    life.die()
    Life(arena).die()


def test_what_cannot_be_removed_is_named(arena: Path) -> None:
    class Refusing(System):
        def rmtree(self, path: Any, *options: Any, **more: Any) -> None:
            raise PermissionError(1, "Operation not permitted", str(path))

    instead(make_full_directory)(arena / "board")
    with pytest.raises(ConfigError, match="board"):
        Arena(arena, files=Refusing())


def test_directories_with_names_that_are_not_ours_are_left_alone(arena: Path) -> None:
    (arena / "notes").mkdir()
    (arena / "notes" / "file").write_text("kept")
    Life(arena).die()
    assert (arena / "notes" / "file").read_text() == "kept"


def test_a_unit_that_is_not_what_its_writer_digested_is_damaged(shm: Path) -> None:
    life = Life(shm / "base" / JOB)
    life.store.join(1)
    life.store.configure(LAYOUT)
    taken = digest_units(memoryview(content_of(SNAPSHOTS[0])), UNIT)
    with pytest.raises(ProtocolError, match=f"{len(taken) - 1} digests"):
        life.seal(SNAPSHOTS[0], digests=taken[1:])
    life.seal(SNAPSHOTS[0], digests=(*taken[:-1], taken[-1] ^ 1))
    assert life.store.holdings.damaged_units(ShardKey(SNAPSHOTS[0], "dp0")) == [len(taken) - 1]
    life.die()


def test_a_posted_outcome_with_a_flipped_bit_is_none(arena: Path) -> None:
    life = Life(arena)
    board = life.store.outcomes.board
    for outcome in (1, 2):
        board._words[1] = 9 * 4 + outcome
        board._words[1] ^= outcome
        assert board.posted(9) is None
    life.die()


@pytest.mark.parametrize(("kind", "name"), [(Path, "write_bytes"), (System, "posix_fallocate")])
def test_an_epoch_whose_files_could_not_be_written_is_entered_at_the_next_attempt(
    shm: Path, monkeypatch: pytest.MonkeyPatch, kind: type, name: str
) -> None:
    life = Life(shm / "base" / JOB)
    store = life.store
    store.join(1)
    before = store.outcomes.board

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr(kind, name, full)
        with pytest.raises(ArenaTooSmall):
            store.join(2)
    assert before.epoch == 1, "its trainers were told nothing"
    store.join(2)
    assert (store.state.epoch, store.outcomes.board.epoch, before.epoch) == (2, 2, 2)
    life.die()
    after = Life(life.arena.path)
    assert after.store.state.epoch == 2
    after.die()


def test_the_scrub_ends_at_the_unit_at_which_its_smp_ends(
    arena: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []
    reached = threading.Event()

    class Slow(Pacer):
        def wait_s(self, count: int, now: float) -> float:
            asked.append(count)
            reached.set()
            return DEADLINE_S

    monkeypatch.setattr(scrubbing, "PASS_EVERY_S", 0.0)
    life = Life(arena)
    scrubber = scrubbing.Scrubber(life.store, Slow(1.0), "normal")
    [thread] = [each for each in threading.enumerate() if each.name == "scrub"]
    assert reached.wait(DEADLINE_S)
    scrubber.close()
    thread.join(DEADLINE_S)
    assert not thread.is_alive() and len(asked) == 1 and len(life.store.holdings.held()) == 3
    assert all(record.levelno < logging.WARNING for record in caplog.records)
    life.die()
