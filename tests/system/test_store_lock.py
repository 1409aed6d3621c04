"""Nothing that waits for others, or that grows with bytes, runs under the store's lock: trainers wait for that lock in
every step.

Real SMPs go through a whole small job, with everything on that works on bytes. They write down what they call while
they hold the lock (`tests.traced_smp`), and that is compared with what is allowed. No slot counts as small enough for
anything to be done at once.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from holdfast.cli.main import main
from holdfast.smp_daemon.ops.status import take_statuses
from holdfast.smp_daemon.shared.errors import HoldfastError
from holdfast.smp_daemon.shared.layout import Node, Shard
from holdfast.smp_daemon.shared.limits import AT_ONCE_BYTES
from holdfast.smp_daemon.shared.spawn import smp_options
from holdfast.smp_daemon.shared.system import System
from holdfast.smp_daemon.storage.arena import Arena
from holdfast.smp_daemon.storage.store import Store
from holdfast.snapshot.resume.arrange import Protection, arrange
from tests.deadlines import DEADLINE_S
from tests.smp_kit import JOB, Ground, Run, SmpProcess, Trainer, flip_a_byte, playground, shard_file
from tests.traced_smp import TRACE, TracedCondition, condition_for

pytestmark = pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="what the standard library calls depends on its version: one is looked at"
)

ROOT = Path(__file__).parents[2]

SMALL_FILES = {
    "storage.job_state.JobState._note",
    "storage.arena.ArenaDirectory.lacks",
    "storage.arena.ArenaDirectory.write_again",
    "storage.job_state.read_node_file",
    "storage.arena.LayoutFiles.add",
    "storage.arena.LayoutFiles.adopt",
    "storage.arena.Arena._adopt_file",
    "storage.pool.SlotPool.commit",
    "shared.board.Board.__init__",
    "shared.board.Board.succeeded",
}
"""What reads or writes one JSON record or the board. The record of a slot of 80 GB has 20,000 digests: 0.5 MB. It is
encoded before the lock is taken."""

SETTINGS = {"storage.pool.gives_huge_pages", "storage.pool.room", "shared.budget.Budget.check_limit"}
"""What reads a line that the kernel makes up."""

NAMES = {
    *("storage.arena.Arena.adopt", "storage.arena.Arena.clear", "storage.arena.Arena.destroy"),
    *("storage.arena.Arena.empty", "storage.arena.Arena.release", "storage.arena.put_away"),
    "storage.pool.Deleted.takes",
    *("storage.pool.SlotPool.discard", "storage.pool.SlotPool.plan", "storage.pool.SlotPool.made"),
    *("storage.pool.SlotPool.remove", "storage.pool.SlotPool._forget", "storage.reserver.Reserver.make"),
    *("storage.pool.SlotPool._empty", "storage.pool.SlotPool._inode", "storage.pool.SlotPool.place"),
    *("storage.arena.LayoutFiles.drop_older", "shared.budget.Budget._trim", "ops.status.take_status"),
    "storage.reserver.Reserver.make.<locals>.given_up",
}
"""What looks at names, or changes them, and frees no memory: large files have been renamed by then (`Deleted`), and
those that are being made are still open."""

OWNERS = {
    "shared.owners._renamed",
    *(f"shared.owners.Owners.{name}" for name in ("clear", "create", "found", "has", "renew")),
}
"""What looks at empty files that say who owns slots, or renames one: a shard has at most 16 slots."""

MAPPINGS = {"storage.pool._map", "storage.pool.SlotMemory.__init__", "shared.board.Board.__init__"}
"""What opens and maps a file, and touches no page."""

ALLOWED: dict[str, set[str]] = {
    "file": SMALL_FILES | SETTINGS,
    "posix.open": SMALL_FILES | MAPPINGS | OWNERS,
    "posix.read": SMALL_FILES,
    "posix.close": SMALL_FILES | MAPPINGS | OWNERS,
    "posix.ftruncate": MAPPINGS,
    "posix.posix_fallocate": {"shared.board.Board.__init__"},  # one page
    "mmap.mmap.madvise": MAPPINGS,
    "posix.stat": SMALL_FILES | NAMES | OWNERS,
    "posix.replace": SMALL_FILES | NAMES | OWNERS,
    "posix.unlink": SMALL_FILES | NAMES | OWNERS,
    "posix.scandir": SMALL_FILES | NAMES | OWNERS,
    "posix.ScandirIterator.__exit__": SMALL_FILES | NAMES | OWNERS,
    "posix.utime": OWNERS,
    "posix.statvfs": SETTINGS,
    "posix.sysconf": SETTINGS,
    "posix.truncate": {"shared.budget.Budget._trim"},  # by the slice that a slot takes
    "shutil.rmtree": {"storage.arena.Arena.destroy"},  # an empty directory; the job is over
    "posix.lstat": {"storage.arena.Arena.destroy"},
    "xxhash._xxhash.xxh3_128_hexdigest": SMALL_FILES
    - {"storage.pool.SlotPool.commit", "storage.arena.ArenaDirectory.write_again"},  # encoded by then
    "xxhash._xxhash.xxh3_64_hexdigest": {"shared.layout.Layout._tags.<locals>.<genexpr>"},  # once for each layout
    "xxhash._xxhash.xxh3_64_intdigest": {"storage.holdings.Holdings.repair"},  # one unit
    "numpy.frombuffer": {
        "shared.board.Board.__init__",
        "storage.holdings.Holdings.repair",  # copies one unit
        "shared.budget.wipe",  # one part of `WIPE_BYTES`
    },
    "numpy.ndarray.argmax": {"shared.board.Board.__init__"},
    "numpy.ndarray.tolist": {"shared.board.Board.posted"},
    "ec.backends.choose_codec": {"storage.receiving.Receiving._begin"},  # of a cache
    "starts a thread": {"storage.reserver.Reserver.go_on"},
    "waits for a lock": {
        # See the order of locks at `Store.changed`: nobody holds these for longer than it takes to change a field.
        *("recovery.recoveries.Recoveries.protected", "storage.reserver.Reserver.go_on"),
        *("storage.holdings.Holdings._adopt_slot", "shared.layout._read", *SMALL_FILES),  # caches of `shared.plain`
        *("persist.persister.Persister._await_order", "persist.persister.Persister._done"),
        "storage.receiving.Receiving._stop",
        *("storage.holdings.Holdings._note_damage", "storage.holdings.Holdings.repair"),
    },
}
"""What may be called with the lock held, and by which functions. Before you add to it, say in docs/size.md why the
call is short however much a node holds, or do it without the lock."""

TAKERS = {
    *(
        "storage.store.Store.seal",
        "storage.store.Store.join",
        "storage.store.Store.retire",
    ),
    *("storage.receiving.Receiving.make", "storage.holdings.Holdings.repair", "storage.pool.Deleted.free"),
    *(
        "storage.receiving.Receiving.shard",
        "storage.reserver.Reserver._wipes",
        "storage.reserver.Reserver.make",
    ),
    *("shared.budget.Budget.reserve_next", "coding.moving.Monitor._regroup", "ops.status.take_status"),
    *("persist.persister.Persister._await_order", "storage.job_state.JobState.keep_layout"),
}
"""Functions that take the lock and must have been reached, or the job was too small."""


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which SMPs of this test write down what they call."""
    monkeypatch.setenv(TRACE, str(tmp_path / "trace"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    settings = {"ZERO": "1", "MEMORY": "64MiB", "PERSIST": str(tmp_path / "place"), "SCRUB": "1GB/s"}
    for name, text in (settings | {"REGROUP_AFTER": "1s"}).items():
        monkeypatch.setenv(f"HOLDFAST_{name}", text)
    command = [sys.executable, "-P", "-m", "tests.traced_smp"]
    monkeypatch.setattr("tests.smp_kit.smp_command", lambda *who: [*command, *smp_options(*who)])
    return tmp_path / "trace"


def trainers_on(smps: list[SmpProcess], elements: int) -> Run:
    return Run([Trainer(smp, f"dp{rank}", elements) for rank, smp in enumerate(smps)], protect="3+1")


def whole_job(ground: Ground) -> None:
    smps, run = ground.job([[30_000]] * 4, protect="3+1")
    for step in (1, 2, 3):
        run.protect(step)
    # A trainer goes while it writes, and an SMP dies.
    run["dp1"].write(run.snapshot(4), run.kept, run.protected)
    run["dp1"].client.close()
    smps[0].rules = [("regroup.done", None)]
    smps[0].restart()
    # A node loses its memory, and what it receives is overtaken by another start.
    smps[3].lose()
    smps[3].rules = [("receive.taken", None)]
    smps[3].launch().wait_ready()
    again = trainers_on(smps, 30_000)
    again.join(2)
    plan = again.plan()
    overtaken = ground.meanwhile(again["dp3"].recover, plan)
    held = ground.points.wait_any("node3", "receive.taken")
    starting = [smp.client() for smp in smps]
    for client in starting:
        client.join(3)
        client.close()
    held.go()
    assert isinstance(overtaken.exception(DEADLINE_S), HoldfastError)
    for trainer in again:
        trainer.client.close()
    smps[3].lose()
    smps[3].rules = ()
    smps[3].launch().wait_ready()
    again = trainers_on(smps, 30_000)
    again.join(4)
    plan = again.plan()
    for trainer in again:
        trainer.recover(plan)
    again.start(4)
    again.protect(5)
    assert len(take_statuses(JOB, [smp.control for smp in smps])) == 4
    # The state changes its size, so all slots are made anew. Then a unit is damaged.
    for trainer in (*run, *again):
        trainer.client.close()
    other = trainers_on(smps, 20_000).start(5)
    other.protect(6)
    other.protect(7)
    flip_a_byte(shard_file(smps[0], other.snapshot(7), "dp0"))
    other["dp0"].recover(other.plan())
    for trainer in other:
        trainer.client.close()
    # Nodes go, one of them in good order. The rest protect themselves anew.
    smps[2].lose()
    ground.points.wait_any("node0", "regroup.done").go()
    let_go = ground.meanwhile(lambda: ground.points.wait_any("node0", "regroup.done").go())
    assert main(["drain", "--arena", str(ground.base), "node1"]) == 0
    let_go.result(DEADLINE_S)
    client = smps[0].client()
    epoch = client.inventory().epoch + 1
    client.join(epoch)
    client.finish(epoch)
    smps[0].wait_end()
    assert not smps[0].arena.exists()


def calls_in(trace: Path) -> dict[str, set[str]]:
    """The functions that made each call."""
    calls: dict[str, set[str]] = {}
    for line in trace.read_text().splitlines():
        call, caller = line.split("\t")
        calls.setdefault(call, set()).add(caller)
    return calls


def test_nothing_new_is_called_with_the_stores_lock_held(trace: Path) -> None:
    with playground(own_python=True) as ground:
        whole_job(ground)
    calls = calls_in(trace)
    takers = calls.pop("lock")
    assert takers >= TAKERS, f"the job does not reach {sorted(TAKERS - takers)}"
    new = {call: sorted(callers - ALLOWED.get(call, set())) for call, callers in calls.items()}
    assert not {call: callers for call, callers in new.items() if callers}, "see ALLOWED"


def test_what_is_done_at_once_with_few_bytes_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many bytes, each of these would be a fault."""

    def none(*arguments: object) -> None:
        pass

    class Traced(System):
        Condition = condition_for(lambda call, caller: noted.setdefault(call, set()).add(caller))

    noted: dict[str, set[str]] = {}
    arena = Arena(tmp_path / "a", memory=AT_ONCE_BYTES)
    store = Store(arena, JOB, "n0", on_sealed=none, on_parity=none, on_protected=none, on_epoch=none, network=Traced())
    store.join(1)
    store.configure(arrange(JOB, 1, [Node("n0", "127.0.0.1", 1, 2, (Shard("dp0", 4096),))], Protection(0, 0), 2))
    assert noted["posix.posix_fallocate"] == {
        "shared.board.Board.__init__",
        "shared.budget.Budget.reserve_part",
        "storage.pool.SlotMemory.reserve",
    }
    assert "storage.pool.SlotMemory._touch" in noted["shared.populate.populate"]
    (layout,) = arena.path.glob("layout-*.json")
    layout.unlink()
    noted.clear()
    store.write_lost()
    assert layout.exists() and "xxhash._xxhash.xxh3_128_hexdigest" not in noted, "it is encoded without the lock"
    store.reserver.close()


def test_a_call_is_noted_while_the_lock_is_held_and_only_then(tmp_path: Path) -> None:
    noted: list[str] = []
    lock = TracedCondition(threading.RLock(), lambda call, caller: noted.append(call))

    def seen() -> set[str]:
        """What was noted of these; the garbage collector may have called more."""
        found = {*noted} & {"file", "posix.unlink", "posix.stat", "posix.utime", "time.sleep", "_socket.socketpair"}
        found |= {each for each in noted if " " in each}
        noted.clear()
        return found

    with lock:
        (tmp_path / "file").write_bytes(b"x")
        (tmp_path / "file").unlink()
        time.sleep(0)
        socket.socketpair()[0].close()
    assert seen() == {"file", "posix.unlink", "time.sleep", "_socket.socketpair"}
    with lock, lock:
        lock.wait(0.001)
        lock.notify_all()
    tmp_path.stat()
    assert seen() == set()
    with lock:
        lock.wait(0.001)
        tmp_path.stat()
        other = threading.Thread(target=tmp_path.touch)
        other.start()
        other.join(DEADLINE_S)
    assert seen() == {"posix.stat", "starts a thread", "waits for a lock"}
