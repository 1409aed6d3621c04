"""One SMP's part of the persist tier, with real arenas and real files: what is written, held, given up and counted."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.smp_daemon.ops.overview import look as overview_of
from holdfast.smp_daemon.persist import persister, place
from holdfast.smp_daemon.persist.manifest import PersistManifest, folder, shard_name
from holdfast.smp_daemon.persist.persister import publish, tidy, write_node
from holdfast.smp_daemon.persist.place import Directory, PersistPlace, open_place
from holdfast.smp_daemon.persist.reading import StoredShards, find, look
from holdfast.smp_daemon.service import Smp
from holdfast.smp_daemon.shared.board import Board
from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.errors import ConfigError, DamagedSnapshot, PlaceError
from holdfast.smp_daemon.shared.identity import UNNAMED
from holdfast.smp_daemon.shared.inventory import Persisted, PersistedRun
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.sources import Sources
from holdfast.snapshot.collective.agreement import Agreement
from holdfast.snapshot.resume import entering
from tests.deadlines import DEADLINE_S, await_that
from tests.smp_kit import (
    IN_THREADS,
    JOB,
    PROTECTED,
    Ground,
    Run,
    SmpProcess,
    Trainer,
    Watched,
    flip_a_byte,
    playground,
    run_on,
)

EVERY = "100ms"


@pytest.fixture
def ground(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ground]:
    with playground() as ground:
        (ground.base / "place").mkdir()
        monkeypatch.setenv("HOLDFAST_PERSIST", str(ground.base / "place"))
        monkeypatch.setenv("HOLDFAST_PERSIST_EVERY", EVERY)
        yield ground


def place_of(ground: Ground) -> Directory:
    return Directory(ground.base / "place")


def persist(run: Run, snapshot: SnapshotId) -> None:
    """Have every node persist a snapshot, as trainers do once they have agreed on it."""
    clients = [trainer.client for trainer in run]
    await_that(lambda: all(client.counters() and client.persist_due for client in clients))
    for client in clients:
        assert client.persist(snapshot)


def await_persisted(client: SmpClient, count: int) -> None:
    await_that(lambda: client.counters()["snapshots_persisted"] >= count)


def stored_bytes(ground: Ground, whole: PersistManifest, trainer: Trainer) -> bytes:
    """A trainer's shard, as it is read from storage."""
    out = memoryview(bytearray(trainer.form.total_bytes))
    with StoredShards(place_of(ground), whole.snapshot, whole.layout) as stored:
        stored.fill(trainer.coord, out)
    return bytes(out)


def test_what_is_persisted_is_what_was_sealed_on_every_node(ground: Ground) -> None:
    smps, run = ground.job([[5000, 40], [900], [3000]])
    snapshot = run.protect(7)
    persist(run, snapshot)
    await_persisted(run["dp0"].client, 1)
    (found,) = find(place_of(ground), JOB, UNNAMED.id)
    assert found.snapshot == snapshot
    assert found.manifest is not None
    for trainer in run:
        assert stored_bytes(ground, found.manifest, trainer) == trainer.image(snapshot)
        at = tuple(node.control for node in run.layout.nodes)
        held = PersistedRun(UNNAMED, frozenset({snapshot}), at=at)
        assert trainer.client.persisted() == Persisted(str(ground.base / "place"), 1, (held,))
        assert trainer.client.persisted_layout(UNNAMED.id, snapshot) == run.layout
    tiers = overview_of(JOB, smps[0].control).tiers
    assert len(tiers) == 1
    assert tiers[0].startswith(f"step 7 is persisted at {ground.base / 'place'}")


def test_a_snapshot_is_held_while_it_is_written_and_no_slot_is_missing(ground: Ground) -> None:
    [smp], run = ground.job([[3000]], rules={0: [("persist.middle", 1)]})
    first = run.protect(1)
    persist(run, first)
    held = ground.points.wait(smp.name, "persist.middle", 1)
    for step in range(2, 8):
        run.protect(step)  # each takes a slot, keeps one, and frees the one before
        assert first in {snapshot for snapshot, _ in run["dp0"].client.inventory().shards}
    held.go()
    await_persisted(run["dp0"].client, 1)
    run.protect(8)
    assert first not in {snapshot for snapshot, _ in run["dp0"].client.inventory().shards}
    (found,) = find(place_of(ground), JOB, UNNAMED.id)
    assert found.manifest is not None
    assert stored_bytes(ground, found.manifest, run["dp0"]) == run["dp0"].image(first)


def test_an_order_that_does_not_fit_is_refused(ground: Ground) -> None:
    run = run_on([ground.smp()], [[300]])
    client = run["dp0"].client
    snapshot = run.protect(1)
    await_that(lambda: client.persist_due)
    assert not client.persist(SnapshotId(1, 99))  # nobody has it
    assert not client.persist(SnapshotId(7, 1))
    assert client.persist_due
    assert client.persist(snapshot)
    assert client.persist(snapshot)  # the same order, from another rank of this node
    await_persisted(client, 1)


def test_half_of_a_snapshot_is_none_and_is_swept_up_when_a_newer_one_is_whole(ground: Ground) -> None:
    smps, run = ground.job([[3000], [3000]], rules={1: [("persist.middle", 1)]})
    first = run.protect(1)
    persist(run, first)
    ground.points.wait("node1", "persist.middle", 1)
    smps[1].rules = ()
    smps[1].restart()  # the snapshot that it was writing is never finished
    client = run["dp0"].client
    (found,) = find(place_of(ground), JOB, UNNAMED.id)
    assert found.manifest is None
    (held,) = client.persisted().runs
    assert not held.snapshots and not held.others and len(held.unfinished) == 1
    assert not held.has_state
    smps[0].restart()  # otherwise it would wait for node1 for a minute
    for trainer in run:
        trainer.client.reconnect()
    second = run.protect(2)
    persist(run, second)
    await_persisted(client, 1)
    await_that(lambda: [found.snapshot for found in find(place_of(ground), JOB, UNNAMED.id)] == [second])


def test_memory_is_bounded_however_large_the_shard_is(ground: Ground) -> None:
    [smp], run = ground.job([[24_000_000]], rules={0: [("persist.middle", 1), ("persist.done", 1)]})
    assert run["dp0"].form.total_bytes > 100e6
    snapshot = run.protect(1)
    before = anonymous(smp)
    persist(run, snapshot)
    held = ground.points.wait(smp.name, "persist.middle", 1)
    middle = anonymous(smp)
    held.go()
    ground.points.wait(smp.name, "persist.done", 1).go()
    assert max(middle, anonymous(smp)) - before < 48 << 20


def anonymous(smp: SmpProcess) -> int:
    """Resident memory of the process without mapped files, in bytes."""
    lines = Path(f"/proc/{smp.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def test_a_shard_comes_back_from_the_place_and_a_damaged_one_does_not(ground: Ground) -> None:
    [smp], run = ground.job([[3000]])
    snapshot = run.protect(1)
    persist(run, snapshot)
    await_persisted(run["dp0"].client, 1)
    smp.lose().launch().wait_ready()
    client = run["dp0"].client
    client.reconnect()
    client.join(2)
    sources = Sources(snapshot, run.layout, {}, {}, persisted=True)
    shard = client.recover(sources, "dp0")
    assert (bytes(shard.view), shard.how) == (run["dp0"].image(snapshot), "persisted")
    assert client.recover(sources, "dp0").how == "held"
    smp.lose().launch().wait_ready()
    client.reconnect()
    client.join(2)
    file = ground.base / "place" / folder(JOB, UNNAMED.id, snapshot) / shard_name("dp0")
    flip_a_byte(file, at=file.stat().st_size // 2)
    with pytest.raises(DamagedSnapshot, match=r"dp0 of step 1 .*damaged: unit 0"):
        client.recover(sources, "dp0")
    assert not client.inventory().shards


def test_a_damaged_unit_that_is_held_comes_back_from_the_place(ground: Ground) -> None:
    [smp], run = ground.job([[3000]])
    snapshot = run.protect(1)
    persist(run, snapshot)
    client = run["dp0"].client
    await_persisted(client, 1)
    sources = Sources(snapshot, run.layout, {}, {}, persisted=True)
    (slot,) = (each for each in smp.arena.glob("dp0.*.json") if b'"shard"' in each.read_bytes())
    file = slot.with_suffix("")
    flip_a_byte(file, at=file.stat().st_size // 2)
    shard = client.recover(sources, "dp0")
    assert (bytes(shard.view), shard.how) == (run["dp0"].image(snapshot), "repaired")


# ---------------------------------------------------------------------- storage that fails


class Moody(Directory):
    """A directory that fails or hangs on request."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.fails = False
        self.goes_on = threading.Event()
        self.goes_on.set()

    def directories(self, path: str) -> list[str]:
        assert self.goes_on.wait(DEADLINE_S)
        return super().directories(path)

    def write(self, path: str, parts: Iterable[bytes]) -> None:
        assert self.goes_on.wait(DEADLINE_S)
        if self.fails:
            raise PlaceError(f"{path}: no space left")
        super().write(path, parts)


@pytest.fixture
def moody(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Smp, Run, Moody]]:
    """An SMP in this process, one trainer, and storage that the test controls."""
    at = Moody(ground.base / "place")
    monkeypatch.setattr(persister, "open_place", lambda url: at)
    monkeypatch.setattr(persister, "STUCK_S", 0.2)
    prepared = ground.prepare()
    own = {"HOLDFAST_SCRUB": "0", "HOLDFAST_PERSIST": "memory://moody", "HOLDFAST_PERSIST_EVERY": "100ms"}
    smp = Smp(prepared.job, prepared.name, prepared.arena, prepared.host, environment=IN_THREADS | own)
    prepared.owner = smp.owner
    run = run_on([prepared], [[3000]])
    yield smp, run, at
    at.goes_on.set()
    run["dp0"].client.close()
    smp.close()


class Dying(Directory):
    """A directory whose writer dies while it writes file number `last`."""

    def __init__(self, root: Path, last: int) -> None:
        super().__init__(root)
        self._left = last

    def write(self, path: str, parts: Iterable[bytes]) -> None:
        def until_it_dies() -> Iterator[bytes]:
            yield from parts
            self._left -= 1
            if self._left < 0:
                raise PlaceError("the writer died")

        super().write(path, until_it_dies())


def test_a_writer_that_dies_at_any_file_leaves_nothing_that_looks_whole(
    moody: tuple[Smp, Run, Moody], tmp_path: Path
) -> None:
    smp, run, _ = moody
    snapshot, layout, node = run.protect(1), run.layout, run.layout.nodes[0].name
    assert smp.store.hold(snapshot)
    for last in range(10):
        at = Dying(tmp_path, last)
        try:
            write_node(at, smp.store.holdings, layout, node, snapshot, lambda count: None)
            assert publish(at, layout, snapshot) == []
            break
        except PlaceError:
            found = look(at, JOB, UNNAMED.id, snapshot)
            assert found.manifest is None
            assert found.unfinished is (last < 3)  # the slot file, its record, and the file of the node
    assert last == 4  # and the manifest
    assert look(at, JOB, UNNAMED.id, snapshot).reason == ""
    for name in at.files(folder(JOB, UNNAMED.id, snapshot)):
        assert not name.startswith(".")


def counted(client: SmpClient, failures: int) -> bool:
    return client.counters()["persist_failures"] == failures


def test_storage_that_fails_is_counted_and_shown_and_tried_again(
    moody: tuple[Smp, Run, Moody], caplog: pytest.LogCaptureFixture
) -> None:
    smp, run, at = moody
    client = run["dp0"].client
    at.fails = True
    for step in (1, 2):
        persist(run, run.protect(step))
        await_that(partial(counted, client, step))
    assert smp.persister.state is not None
    assert "no space left" in smp.persister.state.problem
    assert len([r for r in caplog.records if r.levelname == "ERROR" and "is not persisted" in r.getMessage()]) == 1
    assert any("node0: not persisted: step 2" in line for line in overview_of(JOB, smp.owner.control).tiers)
    at.fails = False
    persist(run, run.protect(3))
    await_persisted(client, 1)
    assert smp.persister.state.problem == ""


def test_readiness_is_posted_while_no_epoch_can_replace_the_board(
    moody: tuple[Smp, Run, Moody], monkeypatch: pytest.MonkeyPatch
) -> None:
    smp, run, _ = moody
    watched = Watched(monkeypatch, Board, "post_due", smp.store.changed)
    # The node may have been posted as due for the first before `watched` was in place, never for the second.
    for step in (1, 2):
        persist(run, run.protect(step))
    await_persisted(run["dp0"].client, 2)
    assert len(watched.held) >= 3
    assert all(watched.held)


def test_storage_that_hangs_is_given_up_and_holds_up_nothing(moody: tuple[Smp, Run, Moody]) -> None:
    smp, run, at = moody
    client = run["dp0"].client
    at.goes_on.clear()
    first = run.protect(1)
    persist(run, first)
    await_that(partial(counted, client, 1))  # counted last: whoever sees the count sees the rest
    assert smp.persister.state is not None
    assert smp.persister.state.state == "stuck"
    for step in range(2, 6):
        assert run.outcomes(run.protect(step)) == {PROTECTED}
    assert first not in {snapshot for snapshot, _ in client.inventory().shards}  # the slot was freed
    assert not client.persist_due  # and no other write begins there
    at.goes_on.set()
    persist(run, run.protect(6))  # waits until one is due again
    await_persisted(client, 1)
    assert [found.snapshot.step for found in find(at, JOB, UNNAMED.id) if found.manifest is not None] == [6]


def test_a_snapshot_is_persisted_however_long_older_ones_take_to_remove(
    moody: tuple[Smp, Run, Moody], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large job has ten thousands of files in each, and file servers delete a few hundred a second."""
    smp, run, at = moody
    client, removed = run["dp0"].client, threading.Event()
    monkeypatch.setattr(at, "directories", lambda path: [] if removed.wait(DEADLINE_S) else None)
    first = run.protect(1)
    persist(run, first)
    await_that(lambda: smp.persister.state is not None and smp.persister.state.state == "stuck")
    assert smp.persister.state is not None
    assert (smp.persister.state.persisted, smp.persister.state.problem) == (first, "")
    assert counted(client, 0)
    removed.set()
    persist(run, run.protect(2))
    await_persisted(client, 2)


def test_a_start_goes_on_although_storage_does_not_say_what_it_has(
    moody: tuple[Smp, Run, Moody], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, run, at = moody
    client = run["dp0"].client
    snapshot = run.protect(1)
    monkeypatch.setattr(entering, "LOOK_DEADLINE_S", 0.2)
    at.goes_on.clear()
    told = entering.ask_persisted_runs(client, Agreement())
    assert told.problem and not told.runs
    assert (snapshot, "dp0") in client.inventory().shards, "the trainer has a connection that works"


# ---------------------------------------------------------------------- places


def cat_a_version(self: Any, path: str, version: Any = None, start: Any = None, end: Any = None) -> bytes:
    """`cat_file` with its arguments in the order of s3fs."""
    assert version is None
    with self.open(path, "rb") as file:
        content: bytes = file.read()
    return content[start:end]


@pytest.fixture(params=["directory", "memory", "versions"])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PersistPlace:
    if request.param == "directory":
        (tmp_path / "deep/er").mkdir(parents=True)
        return open_place(f"file://{tmp_path}/deep/er")
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.rm("/", recursive=True)
    if request.param == "versions":
        monkeypatch.setattr(type(memory), "cat_file", cat_a_version)
    return open_place("memory://bucket/prefix")


def test_a_place_keeps_files(anywhere: PersistPlace) -> None:
    assert anywhere.files("job/one") == {}
    assert anywhere.directories("job") == []
    for name, content in (("a", b"12345"), ("b", b"")):
        anywhere.write(f"job/one/{name}", [content])
    assert anywhere.files("job/one") == {"a": 5, "b": 0}
    assert anywhere.directories("job") == ["one"]
    assert anywhere.read("job/one/a", 5) == b"12345"
    with pytest.raises(PlaceError, match="longer than 4 bytes"):
        anywhere.read("job/one/a", 4)
    parts = [(0, 2), (2, 9), (5, 1)]
    assert [anywhere.read_part("job/one/a", *part) for part in parts] == [b"12", b"345", b""]
    with pytest.raises(PlaceError):
        anywhere.read("job/one/c", 4)
    anywhere.remove("job/one/a")
    anywhere.remove("job/one/a")
    assert anywhere.files("job/one") == {"b": 0}
    anywhere.remove("job/one")
    anywhere.remove("job/one")
    assert anywhere.directories("job") == []


def test_a_file_that_another_node_removes_meanwhile_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"123")
    list_them = os.scandir

    @contextmanager
    def scandir(path: str) -> Iterator[list[os.DirEntry[str]]]:
        with list_them(path) as entries:
            found = list(entries)
        (tmp_path / "a").unlink()
        yield found

    monkeypatch.setattr(os, "scandir", scandir)
    assert Directory(tmp_path).files("") == {"b": 3}


def test_a_file_that_is_given_up_is_not_there(tmp_path: Path) -> None:

    def dying() -> Iterator[bytes]:
        yield b"123"
        raise RuntimeError("the writer died")

    with pytest.raises(PlaceError, match=r"written: RuntimeError"):
        Directory(tmp_path).write("job/one/a", dying())
    assert list((tmp_path / "job/one").iterdir()) == []


def test_storage_that_is_not_mounted_is_not_taken_for_empty(tmp_path: Path) -> None:
    with pytest.raises(PlaceError, match="mount"):
        Directory(tmp_path / "absent").files("")
    with pytest.raises(PlaceError, match="mount"):
        Directory(tmp_path / "absent").write("a", [b"1"])
    assert Directory(tmp_path).files("job") == {} and not list(tmp_path.iterdir())


def test_what_would_be_lost_with_the_node_is_warned_of(tmp_path: Path) -> None:
    assert "root file system" in place.caution("/")
    assert "memory" in place.caution("memory://bucket")
    assert "not a directory" in place.caution("/nowhere")
    assert place.caution("/" + "x" * 300)  # no look at it is possible, as where the server of files has gone
    assert place.caution("s3://bucket/prefix") == place.caution("/dev/shm") == ""


def test_a_place_is_shown_without_its_password() -> None:
    pytest.importorskip("fsspec")
    assert PersistPlace("memory://me:secret@bucket/prefix").name == "memory://bucket/prefix"
    with pytest.raises(ConfigError, match=r"nosuch://bucket cannot"):
        open_place("nosuch://me:secret@bucket")


def test_what_is_not_whole_says_why(ground: Ground) -> None:
    run = run_on([ground.smp()], [[3000]])
    snapshot = run.protect(1)
    persist(run, snapshot)
    await_persisted(run["dp0"].client, 1)
    at, there = place_of(ground), ground.base / "place" / folder(JOB, UNNAMED.id, snapshot)
    assert look(at, JOB, UNNAMED.id, snapshot).reason == ""
    flip_a_byte(there / "snapshot.json", at=20)
    assert "snapshot.json cannot be used: it does not match" in look(at, JOB, UNNAMED.id, snapshot).reason
    assert tidy(at, JOB, UNNAMED.id, 1) == []  # the newest is always kept


def test_a_file_system_that_cannot_flush_directories_is_no_failure() -> None:
    fd = os.open("/proc", os.O_RDONLY)
    with pytest.raises(OSError, match="Invalid argument"):
        os.fsync(fd)
    os.close(fd)
    place._sync_directory(Path("/proc"))
