"""Starting SMPs that outlive their starter, and removing what dead jobs left behind."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast import leftovers
from holdfast.cli.main import main
from holdfast.cli.output import FAILED, NOT_FOUND
from holdfast.leftovers import find_leftovers, remove
from holdfast.smp_daemon.shared import client as client_module
from holdfast.smp_daemon.shared import spawn
from holdfast.smp_daemon.shared.board import Board
from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.errors import (
    ArenaTooSmall,
    ConfigError,
    DeadlineExceeded,
    HoldfastError,
    SmpUnavailable,
)
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.messages import Hello
from holdfast.smp_daemon.shared.paths import ARENA_ENV, GONE, Owner, socket_path
from holdfast.smp_daemon.shared.plain import decode_digested, to_plain
from holdfast.smp_daemon.shared.priority import let_waker_go_on
from holdfast.smp_daemon.shared.processes import await_end
from holdfast.smp_daemon.shared.records import write_json
from holdfast.smp_daemon.shared.spawn import launch, parse_report, smp_options, start_smp
from holdfast.smp_daemon.shared.system import MACHINE
from holdfast.smp_daemon.shared.transport import call, connect
from holdfast.smp_daemon.shared.versions import spoken
from holdfast.snapshot import connect as connecting
from holdfast.snapshot.connect import connect as connect_to_smp
from holdfast.snapshot.connect import start_here
from tests.deadlines import DEADLINE_S
from tests.scripts import completed, python, started
from tests.smp_kit import (
    JOB,
    DetachedSmp,
    Ground,
    Trainer,
    Watched,
    end,
    just_before,
    limited,
    memory_of,
    open_files,
    processes_left,
    read_line,
    run_on,
    suspend,
)

pytestmark = pytest.mark.smps(own_python=True)

STARTER = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from holdfast.smp_daemon.shared.spawn import start_smp
arena, host = sys.argv[1:]
print(json.dumps(asdict(start_smp("testrun", "node0", Path(arena), host=host))), flush=True)
sys.stdin.read()
"""

RANKS = """
import json, os, sys, time
from pathlib import Path
from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.spawn import start_smp
arena, host, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
ready, go = os.pipe()
for _ in range(count):
    if not os.fork():
        os.close(go)
        os.read(ready, 1)  # until the last one is there
        began_s = time.process_time()
        start_smp("testrun", "node0", arena, host=host)
        client = SmpClient(arena, "testrun")
        children = os.times()
        children_s = children.children_user + children.children_system
        said = {"smp": client.pid, "own_s": time.process_time() - began_s, "children_s": children_s}
        os.write(1, json.dumps(said).encode() + b"\\n")
        os._exit(0)
os.close(go)
while count:
    count -= os.waitstatus_to_exitcode(os.wait()[1]) == 0
"""
"""Forks ranks that start an SMP at once, and prints the processor time of each."""

BAD_INIT = "import ctypes\nassert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # adopts orphans, and reaps none\n"


@pytest.fixture
def arena(ground: Ground) -> Path:
    return ground.base / "detached" / JOB


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Receives every command that starts an SMP from this process."""
    seen: list[object] = []

    original = spawn.launch

    def counted(command: Sequence[str], *how: Any) -> Owner:
        seen.append(command)
        return original(command, *how)

    monkeypatch.setattr(spawn, "launch", counted)
    return seen


@contextlib.contextmanager
def the_turn(arena: Path) -> Iterator[None]:
    """This process is about to start an SMP in `arena`."""
    with spawn._turn_to_start(arena, MACHINE) as is_my_turn:
        assert is_my_turn()
        yield


def finish(ground: Ground, arena: Path) -> None:
    """End the job as its last trainer would."""
    client = ground.keep(SmpClient(arena, JOB))
    epoch = client.inventory().epoch + 1
    client.join(epoch)
    client.finish(epoch)


@contextlib.contextmanager
def starter(arena: Path, host: str, before: str = "") -> Iterator[tuple[subprocess.Popen[str], Owner]]:
    """A process that has started an SMP in an arena, and is still running."""
    with started([sys.executable, "-c", before + STARTER, str(arena), host], start_new_session=True) as process:
        yield process, Owner(**json.loads(read_line(process.stdout)))


# ---------------------------------------------------------------------- starting


class TestADetachedSmp:
    def test_serves_in_a_session_of_its_own_with_a_foster_parent(self, ground: Ground, arena: Path) -> None:
        owner = start_smp(JOB, "node0", arena, host=ground.host())
        assert os.getsid(owner.pid) not in (os.getsid(0), owner.pid)
        assert psutil.Process(foster_parent(owner.pid)).pid in (1, *os_subreapers())
        client = ground.keep(SmpClient(arena, JOB))
        assert (client.pid, client.node) == (owner.pid, "node0")
        finish(ground, arena)
        assert not arena.exists()

    def test_holds_on_to_nothing_of_its_starter(self, ground: Ground, arena: Path) -> None:
        owner = start_smp(JOB, "node0", arena, host=ground.host())
        process = Path(f"/proc/{owner.pid}")
        links = open_files(owner.pid)
        assert [links[fd] for fd in (0, 1, 2)] == ["/dev/null"] * 3
        assert not [link for link in links.values() if link.startswith("pipe:")]
        assert (process / "cwd").readlink() == Path("/")
        finish(ground, arena)

    def test_survives_the_death_of_its_starter_and_all_of_its_group(self, ground: Ground, arena: Path) -> None:
        with starter(arena, ground.host()) as (process, owner):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(DEADLINE_S)
        client = ground.keep(SmpClient(arena, JOB))
        assert client.inventory().node == "node0"
        assert client.pid == owner.pid
        finish(ground, arena)

    def test_says_why_it_does_not_start(self, ground: Ground, arena: Path) -> None:
        with pytest.raises(ConfigError, match=r"HOLDFAST_HOST.*'node-7' .*IP address"):
            start_smp(JOB, "node0", arena, host="node-7")
        with pytest.raises(ConfigError, match="say --insecure"):
            start_smp(JOB, "node0", arena, host="0.0.0.0")
        assert processes_left(arena, DEADLINE_S) == []

    def test_off_loopback_it_starts_if_that_is_asked_for(
        self, ground: Ground, arena: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOLDFAST_INSECURE", "1")
        owner = start_smp(JOB, "node0", arena, host="0.0.0.0")
        assert owner.host == "0.0.0.0"
        finish(ground, arena)

    def test_that_serves_is_found_and_no_other_is_started(
        self, ground: Ground, arena: Path, launches: list[object]
    ) -> None:
        first = start_smp(JOB, "node0", arena, host=ground.host())
        assert start_smp(JOB, "node0", arena, host=ground.host()) == first
        assert len(launches) == 1
        finish(ground, arena)

    def test_is_started_by_one_of_fifty_processes_and_the_others_cost_little(self, ground: Ground, arena: Path) -> None:
        """As many of them as a node has GPUs take less processor time than the start: even on one core, all are
        connected within twice what one alone needs. They look again and again, so that beside other work it is more
        than on an idle machine, where it is a third."""
        done = python(RANKS, arena, ground.host(), "50")
        ranks = [json.loads(line) for line in done.stdout.splitlines()]
        assert len(ranks) == 50 and len({rank["smp"] for rank in ranks}) == 1
        [start] = [rank for rank in ranks if rank["children_s"]]
        smp = psutil.Process(start["smp"]).cpu_times()
        alone_s = start["children_s"] + smp.user + smp.system
        assert 16 * sum(rank["own_s"] for rank in ranks) / len(ranks) < alone_s
        finish(ground, arena)
        assert list(arena.parent.iterdir()) == []

    def test_waits_for_a_process_that_starts_one_here_and_for_none_that_starts_another_jobs(
        self, ground: Ground, arena: Path
    ) -> None:
        with the_turn(arena):
            starting = ground.meanwhile(start_smp, JOB, "node0", arena)
            others = start_smp("other", "node0", arena.with_name("other"))
            assert not arena.exists() and not starting.done()
        assert starting.result(DEADLINE_S).node == "node0"
        finish(ground, arena)
        end(psutil.Process(others.pid))

    def test_gives_up_in_time_while_another_process_starts_one(self, arena: Path) -> None:
        with the_turn(arena), pytest.raises(DeadlineExceeded, match="no SMP serves"):
            start_smp(JOB, "node0", arena, deadline_s=0.2)
        assert not arena.exists()

    def test_of_a_starter_that_was_killed_while_it_waited_is_found_by_the_next(
        self, ground: Ground, arena: Path
    ) -> None:
        rules = ground.points.environment("node0", [("start.bound", None)])
        with started([sys.executable, "-c", STARTER, str(arena), ground.host()], env=os.environ | rules) as process:
            held = ground.points.wait_any("node0", "start.bound")
            for front in psutil.Process(process.pid).children():
                front.kill()
            process.kill()
            process.wait(DEADLINE_S)
        again = ground.meanwhile(start_smp, JOB, "node0", arena)
        with pytest.raises(HoldfastError):
            SmpClient(arena, JOB)  # it does not serve yet
        held.go()
        owner = again.result(DEADLINE_S)
        client = ground.keep(SmpClient(arena, JOB))
        assert client.pid == owner.pid
        assert client.inventory().node == "node0", "it serves although nobody read that it does"
        assert list(arena.parent.iterdir()) == [arena]
        finish(ground, arena)

    def test_that_a_setting_keeps_from_starting_says_so_also_where_one_was_killed(
        self, ground: Ground, arena: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        end(psutil.Process(start_smp(JOB, "node0", arena).pid))
        assert socket_path(arena).exists()
        monkeypatch.setenv("HOLDFAST_SCRUB", "64")
        with pytest.raises(ConfigError, match=r"HOLDFAST_SCRUB.* has no unit"):
            start_here(arena, JOB)

    def test_that_ends_with_its_job_just_as_a_trainer_has_found_it_is_replaced(
        self, ground: Ground, arena: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ended: list[int] = []

        def start(*arguments: Any, **options: Any) -> None:
            start_here(*arguments, **options)
            if not ended:
                client = SmpClient(arena, JOB)
                ended.append(client.pid)
                client.stop(remove=True, force=True)

        monkeypatch.setattr(connecting, "start_here", start)
        client = ground.keep(connect_to_smp(arena, JOB, start=True))
        assert ended and client.pid not in ended
        finish(ground, arena)

    @pytest.mark.parametrize("point", ["finish.closing", "arena.emptied"])
    def test_that_removes_its_arena_is_waited_for_and_replaced(
        self, ground: Ground, monkeypatch: pytest.MonkeyPatch, point: str
    ) -> None:
        launch = Watched(monkeypatch, spawn, "launch")
        smp = ground.smp(rules=[(point, None)])
        client = ground.keep(SmpClient(smp.arena, smp.job))
        client.join(1)
        finished = ground.meanwhile(client.finish, 1)
        held = ground.points.wait_any("node0", point)
        next_one = ground.meanwhile(partial(connect_to_smp, start=True), smp.arena, smp.job)
        assert launch.ended.wait(DEADLINE_S)
        assert not next_one.done()
        held.go()
        finished.result(DEADLINE_S)
        client = ground.keep(next_one.result(DEADLINE_S))
        assert client.pid != smp.owner.pid
        finish(ground, smp.arena)

    def test_that_does_not_answer_is_waited_for_and_named(
        self, ground: Ground, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(connecting, "SLOW_S", 0.01)
        saying = Watched(monkeypatch, connecting, "_say_if_slow")
        smp = ground.smp()
        suspend(smp.owner.pid)
        waiting = ground.meanwhile(partial(connect_to_smp, start=True), smp.arena, smp.job)
        assert saying.ended.wait(DEADLINE_S) and not waiting.done()
        os.kill(smp.owner.pid, signal.SIGCONT)
        ground.keep(waiting.result(DEADLINE_S))
        assert f"SMP {smp.owner.pid}" in caplog.text

    def test_may_use_its_own_arena_whatever_the_umask(self, ground: Ground, arena: Path) -> None:
        arena.parent.mkdir(mode=0o700, exist_ok=True)
        before = os.umask(0o277)
        try:
            start_smp(JOB, "node0", arena, host=ground.host())
        finally:
            os.umask(before)
        modes = {path.name: path.stat().st_mode & 0o700 for path in (arena, arena / "board")}
        assert modes == {arena.name: 0o700, "board": 0o600}
        finish(ground, arena)

    def test_takes_over_what_a_killed_one_held(self, ground: Ground, arena: Path) -> None:
        first = start_smp(JOB, "node0", arena, host=ground.host())
        smp = DetachedSmp(ground, arena)
        run = run_on([smp], [[3000]])
        snapshot = run.protect(1)
        end(psutil.Process(first.pid))
        second = start_smp(JOB, "node0", arena, host=first.host)
        assert (second.control_port, second.bulk_port) == (first.control_port, first.bulk_port)
        recovered = Trainer(smp, "dp0").recover(run.plan(smp.client().inventory()))
        assert (recovered.how, bytes(recovered.view)) == ("held", run["dp0"].image(snapshot))
        finish(ground, arena)

    def test_is_ready_within_seconds(self, ground: Ground) -> None:
        """Beyond what importing its modules takes just then."""
        beyond_s = []
        for i in range(3):
            alone_s = seconds_of(lambda: imported_by("holdfast.smp_daemon.service"))
            beyond_s.append(seconds_of(ground.prepare(f"node{i}").launch().wait_ready) - alone_s)
        assert min(beyond_s) < 4, beyond_s


def needs_a_core_to_spare() -> None:
    """Skip where a process that runs only when nobody else wants a core gets none."""
    work = "import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)); sum(range(5_000_000))"
    try:
        subprocess.run([sys.executable, "-c", work], timeout=5, check=True)
    except subprocess.TimeoutExpired:
        pytest.skip("this machine has no core to spare just now")


class TestPriority:
    def test_idle_means_every_thread_of_it(self, ground: Ground) -> None:
        needs_a_core_to_spare()
        smp = ground.prepare().launch("--priority", "idle").wait_ready()
        run_on([smp], [[3000]]).protect(1)
        assert policies_of(smp.process.pid) == {os.SCHED_IDLE}

    def test_auto_means_the_threads_that_nobody_waits_for(self, ground: Ground) -> None:
        smps = [ground.prepare(f"node{i}").launch("--priority", "auto").wait_ready() for i in range(2)]
        run_on(smps, [[3000], [3000]]).protect(1)
        for smp in smps:
            assert policies_of(smp.process.pid) == {os.SCHED_OTHER, os.SCHED_IDLE}

    def test_idle_in_a_session_of_its_own_makes_that_give_way(
        self, ground: Ground, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        setting = Path("/proc/self/autogroup")
        if not setting.exists():
            pytest.skip("this kernel does not schedule sessions as groups")
        needs_a_core_to_spare()
        monkeypatch.setenv("HOLDFAST_PRIORITY", "idle")
        before = setting.read_text()
        owner = start_smp("testrun", "node0", ground.base / "own" / "testrun")
        try:
            assert Path(f"/proc/{owner.pid}/autogroup").read_text().endswith("nice 19\n")
            assert setting.read_text() == before
        finally:
            psutil.Process(owner.pid).kill()

    def test_is_not_that_of_the_thread_that_starts_it(
        self, ground: Ground, arena: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOLDFAST_PRIORITY", "normal")

        def start() -> int:
            let_waker_go_on()  # as a thread that copies, in which the SMP's end is noticed
            assert os.sched_getscheduler(0) == os.SCHED_BATCH
            return start_smp(JOB, "node0", arena).pid

        pid = ground.meanwhile(start).result(DEADLINE_S)
        assert policies_of(pid) == {os.SCHED_OTHER}
        finish(ground, arena)

    def test_normal_means_none(self, ground: Ground) -> None:
        smp = ground.smp()
        run_on([smp], [[3000]]).protect(1)
        assert policies_of(smp.process.pid) == {os.SCHED_OTHER}


def policies_of(pid: int) -> set[int]:
    """The scheduling policies of a process's threads, without threads that end meanwhile."""
    policies = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            policies.add(os.sched_getscheduler(int(task.name)))
    return policies


def seconds_of(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def foster_parent(pid: int) -> int:
    """The parent of a detached process, once all processes between it and us have ended."""
    process = psutil.Process(pid)
    while process.cmdline() == (parent := process.parent() or process).cmdline():
        parent.wait(DEADLINE_S)
    return process.ppid()


def os_subreapers() -> Sequence[int]:
    """The ancestors of this process, without itself; any of them may have declared itself a subreaper."""
    return [process.pid for process in psutil.Process().parents()]


class TestTheReport:
    def test_of_an_smp_without_a_word_is_what_it_left_on_standard_error(self) -> None:
        with pytest.raises(SmpUnavailable, match="a report: boom"):
            parse_report("", "boom\n")

    def test_of_an_unknown_error_is_still_one_of_ours(self) -> None:
        with pytest.raises(HoldfastError, match="too new"):
            parse_report('{"error": "NeverHeardOf", "message": "too new for us"}')

    def test_of_a_command_that_cannot_be_run_blames_access_only_for_what_may_not_be_read(self, tmp_path: Path) -> None:
        """Other reasons, such as a limit on open files, pass without another installation."""
        (tmp_path / "python").touch(mode=0o600)
        with pytest.raises(ConfigError, match=r"may not run .*Install"):
            launch([str(tmp_path / "python")], 10.0)
        with pytest.raises(SmpUnavailable, match=r"No such file or directory$"):
            launch([str(tmp_path / "missing")], 10.0)

    @pytest.mark.parametrize("error", ["OSError(24, 'Too many open files')", "KeyError('Too many open files')"])
    def test_of_a_start_that_fails_unexpectedly_says_why(self, tmp_path: Path, error: str) -> None:
        """A detached SMP has no standard error that anybody sees."""
        script = (
            "import sys, holdfast.smp_daemon.service as service\n"
            f"def fail(*arguments): raise {error}\n"
            "service.Smp = fail; from holdfast.smp_daemon.__main__ import main; main()"
        )
        options = smp_options(JOB, "node0", tmp_path / "arena", "127.0.0.1")
        done = completed([sys.executable, "-c", script, *options, "--detach"])
        assert done.returncode == 1
        with pytest.raises(HoldfastError, match=r"cannot start.*Too many open files"):
            parse_report(done.stdout, done.stderr)

    def test_of_one_that_may_write_no_file_names_the_limit(self, ground: Ground, base: Path) -> None:
        with limited(resource.RLIMIT_FSIZE, 1024), pytest.raises(ArenaTooSmall, match="ulimit -f"):
            start_smp(JOB, "node0", base / "node0", host=ground.host())
        assert list(base.iterdir()) == []


class TestWhatIsImported:
    @pytest.mark.parametrize(
        "module",
        ["holdfast.smp_daemon.shared.client", "holdfast.smp_daemon.shared.spawn", "holdfast.smp_daemon.shared.paths"],
    )
    def test_the_trainers_side_needs_neither_grpc_nor_torch(self, module: str) -> None:
        assert imported_by(module) & {"grpc", "google.protobuf", "torch"} == set()

    def test_an_smp_needs_grpc_and_no_torch(self) -> None:
        loaded = imported_by("holdfast.smp_daemon.service")
        assert loaded & {"grpc", "torch", "holdfast.snapshot"} == {"grpc"}

    def test_help_is_said_without_torch(self) -> None:
        done = completed([sys.executable, "-X", "importtime", "-m", "smp_daemon", "--help"], check=True)
        imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
        assert "--owner-pid" in done.stdout
        assert "argparse" in imported
        assert not imported & {"torch", "grpc", "numpy"}


def imported_by(module: str) -> set[str]:
    return set(python(f"import sys, {module}; print(*sys.modules)").stdout.split())


# ---------------------------------------------------------------------- leftovers


@pytest.fixture
def base(ground: Ground) -> Path:
    """The folder of a user's arenas."""
    path = ground.base / "arenas"
    path.mkdir()
    return path


def dead_arena(ground: Ground, path: Path, job: str = JOB) -> Path:
    """An arena with a snapshot, without its SMP and trainers. A copy, since this process has mapped the original."""
    smp = ground.smp(f"dead-{path.name}", job=job)
    run_on([smp], [[3000]]).protect(1)
    smp.kill()
    shutil.copytree(smp.arena, path, ignore=shutil.ignore_patterns("smp.sock"))
    return path


def orphan(ground: Ground, path: Path, job: str = JOB) -> Owner:
    """An SMP without trainers, whose arena has a snapshot in it."""
    dead_arena(ground, path, job)
    return start_smp(job, f"dead-{path.name}", path, host=ground.host())


Gc = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def gc(capsys: pytest.CaptureFixture[str]) -> Gc:
    """What ``holdfast gc`` reports of the arenas in a folder, whatever their age."""

    def run(base: Path, *arguments: str) -> list[dict[str, Any]]:
        assert main(["gc", "--arena", str(base), "--older-than", "0", "--json", "-", *arguments]) == 0
        found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
        return found

    return run


def arenas_of(found: list[dict[str, Any]]) -> set[str]:
    return {Path(entry["arena"]).name for entry in found}


def leftovers_in(base: Path) -> set[str]:
    return {leftover.path.name for leftover in find_leftovers(base)}


def test_a_start_that_fails_tells_one_error(ground: Ground, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that none has started yet, and another while that is handled."""
    monkeypatch.setenv("HOLDFAST_SCRUB", "nonsense")
    with pytest.raises(ConfigError) as failed:
        connect_to_smp(base / "node0", JOB, start=True)
    assert failed.value.__context__ is None


class TestGc:
    def test_removes_dead_arenas_and_orphans_and_leaves_what_is_in_use(
        self, ground: Ground, base: Path, gc: Gc
    ) -> None:
        dead = dead_arena(ground, base / "dead")
        owner = orphan(ground, base / "orphan", "orphaned")
        live = start_smp(JOB, "node0", base / "live", host=ground.host())
        client = ground.keep(SmpClient(base / "live", JOB))
        expected = [
            (str(dead), JOB, memory_of(dead), []),
            (str(base / "orphan"), "orphaned", memory_of(base / "orphan"), [owner.pid]),
        ]

        found = gc(base, "--dry-run")
        assert [(e["arena"], e["job"], e["smp_pids"]) for e in found] == [(a, j, p) for a, j, _, p in expected]
        assert all(entry["bytes"] >= size > 0 for entry, (_, _, size, _) in zip(found, expected, strict=True))
        assert not any(entry["removed"] for entry in found)
        assert dead.exists() and psutil.pid_exists(owner.pid)
        orphaned = SmpClient(base / "orphan", "orphaned")
        assert orphaned.inventory().shards == {(SnapshotId(1, 1), "dp0")}
        orphaned.close()
        del orphaned

        removed = gc(base)
        assert removed == [
            {**entry, "bytes": now["bytes"], "removed": True} for entry, now in zip(found, removed, strict=True)
        ]
        assert [path.name for path in base.iterdir()] == ["live"]
        assert not is_running(owner.pid)
        assert (client.inventory().node, client.pid) == ("node0", live.pid)
        assert gc(base) == []
        finish(ground, base / "live")

    @pytest.mark.parametrize("words", ["gc", "smp stop --remove"])
    def test_an_smp_may_take_as_long_to_end_as_its_memory_does(
        self, ground: Ground, base: Path, words: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The kernel takes apart about 3 GB a second, and gives back 1."""
        owner = orphan(ground, base / "orphaned", "orphaned")
        with (base / "orphaned" / f"{GONE}1.memory").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 1 << 29)
        monkeypatch.setattr(leftovers, "await_end", lambda ended, limit_s: limit_s > 15 and await_end(ended, limit_s))
        monkeypatch.setattr(client_module, "CALL_DEADLINE_S", 0.0)
        assert main([*words.split(), "--arena", str(base), "--job", "orphaned"]) == 0
        assert not is_running(owner.pid) and not (base / "orphaned").exists()

    def test_of_one_job_leaves_the_others(self, ground: Ground, base: Path, gc: Gc) -> None:
        for job in ("joba", "jobb"):
            dead_arena(ground, base / f"node0-{job}", job)
        assert arenas_of(gc(base, "--job", "joba")) == {"node0-joba"}
        assert [path.name for path in base.iterdir()] == ["node0-jobb"]

    def test_leaves_what_was_written_to_lately(self, ground: Ground, base: Path, gc: Gc) -> None:
        dead = dead_arena(ground, base / "dead")
        for path in dead.iterdir():
            os.utime(path, (time.time() - 5000, time.time() - 5000))
        assert gc(base, "--older-than", "6000s") == []
        os.utime(dead / "smp.json", (time.time() - 100, time.time() - 100))
        assert main(["gc", "--arena", str(base)]) == 0
        assert dead.exists()
        os.utime(dead / "smp.json", (time.time() - 4000, time.time() - 4000))
        assert main(["gc", "--arena", str(base)]) == 0
        assert not dead.exists()

    def test_a_job_that_is_named_is_given_up_whatever_its_age(
        self, ground: Ground, base: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """As `Unrecoverable` advises, right after a start that failed."""
        owner = orphan(ground, base / "orphan", "orphaned")
        other = dead_arena(ground, base / "other", "other")
        assert main(["gc", "--arena", str(base), "--json", "-"]) == 0
        said = capsys.readouterr()
        assert json.loads(said.out) == []
        kept = [line for line in said.err.splitlines() if line.startswith("kept ")]
        assert [str(base / name) in line for name, line in zip(("orphan", "other"), kept, strict=True)] == [True, True]
        assert "--job orphaned" in kept[0] and "--job other" in kept[1]
        assert main(["gc", "--arena", str(base), "--job", "orphaned", "--older-than", "1h"]) == FAILED
        assert is_running(owner.pid), "an age that is given counts"
        assert main(["gc", "--arena", str(base), "--job", "orphaned"]) == 0
        assert not is_running(owner.pid)
        assert [path.name for path in base.iterdir()] == ["other"] and other.exists()

    def test_a_job_with_trainers_is_kept_and_said_to_be(
        self, ground: Ground, base: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        owner = start_smp(JOB, "node0", base / "live", host=ground.host())
        client = ground.keep(SmpClient(base / "live", JOB))
        assert main(["gc", "--arena", str(base), "--job", JOB]) == FAILED
        assert f"process {os.getpid()} " in capsys.readouterr().err
        assert (client.inventory().node, client.pid) == ("node0", owner.pid)
        finish(ground, base / "live")

    def test_an_smp_knows_of_trainers_in_other_containers(
        self, ground: Ground, base: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """What these have mapped cannot be seen from here; this one has mapped nothing."""
        owner = start_smp(JOB, "node0", base / "live", host=ground.host())
        stream = connect(socket_path(base / "live"), DEADLINE_S)
        call(stream, to_plain(Hello(job=JOB, speaks=spoken())))
        assert str(base / "live") not in Path("/proc/self/maps").read_text()
        assert main(["gc", "--arena", str(base), "--job", JOB]) == FAILED
        assert "kept" in capsys.readouterr().err and is_running(owner.pid)
        stream.close()
        finish(ground, base / "live")

    def test_a_job_that_has_no_arena_is_told_which_have(
        self, ground: Ground, base: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        dead_arena(ground, base / "dead", "there")
        assert main(["gc", "--arena", str(base), "--job", "misspelt"]) == NOT_FOUND
        said = capsys.readouterr().err
        assert "misspelt" in said and "there" in said and (base / "dead").exists()

    def test_as_a_command_looks_where_the_environment_says(self, ground: Ground, base: Path) -> None:
        dead_arena(ground, base / "dead")
        (base / "dead" / "smp.json").write_text("torn")
        done = completed(
            [sys.executable, "-m", "holdfast.cli", "gc", "--older-than", "0", "--json", "-"],
            env=os.environ | {ARENA_ENV: str(base)},
            check=True,
        )
        (found,) = json.loads(done.stdout)
        assert (found["arena"], found["job"], found["removed"]) == (str(base / "dead"), "dead", True)
        assert list(base.iterdir()) == []

    def test_removes_nothing_of_other_software(self, base: Path, gc: Gc) -> None:
        """In a home directory, for example, where an arena was looked for by mistake."""
        for folder, file in ((".oh-my-zsh", "x"), (".a-1-2", "x"), ("app", "smp.json"), ("board", "smp.sock")):
            (base / folder).mkdir(mode=0o755 if folder == ".a-1-2" else 0o700)
            (base / folder / file).write_text("{}")
            (base / folder / "data.db").write_text("precious")
        assert gc(base) == gc(base.parent) == []
        assert len(list(base.glob("*/data.db"))) == 4

    def test_leaves_arenas_of_others_to_them(
        self, ground: Ground, base: Path, gc: Gc, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dead_arena(ground, base / "dead")
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        assert gc(base) == []

    def test_does_not_search_what_lies_deeper_than_arenas(self, ground: Ground, base: Path, gc: Gc) -> None:
        (base / "home" / "project").mkdir(parents=True)
        dead_arena(ground, base / "home" / "project" / "dead")
        assert gc(base) == []
        assert arenas_of(gc(base / "home")) == {"dead"}

    def test_where_there_is_nothing_is_harmless(self, ground: Ground, gc: Gc) -> None:
        assert gc(ground.base / "nowhere") == []


class TestLeftovers:
    def test_files_of_an_arena_that_was_removed_are_not_of_the_next_one_of_that_name(
        self, ground: Ground, base: Path
    ) -> None:
        dead = dead_arena(ground, base / "dead")
        shutil.copytree(dead, ground.base / "next")
        board = Board(dead / "board")
        shutil.rmtree(dead)
        shutil.move(ground.base / "next", dead)
        assert leftovers_in(base) == {"dead"}
        del board

    def test_an_arena_is_in_use_whatever_name_it_goes_by(self, ground: Ground, base: Path) -> None:
        dead = dead_arena(ground, base / "dead")
        link = ground.base / "link"
        link.symlink_to(base)
        board = Board(link / "dead" / "board")
        assert leftovers_in(link) == leftovers_in(base / ".." / "arenas") == set()
        del board
        assert leftovers_in(link) == leftovers_in(base / ".." / "arenas") == {"dead"}
        assert dead.exists()

    def test_a_trainer_that_got_the_pid_of_the_dead_smp_is_still_a_trainer(self, ground: Ground, base: Path) -> None:
        dead = dead_arena(ground, base / "dead")
        owner = decode_digested((dead / "smp.json").read_bytes())
        write_json(dead / "smp.json", {**owner, "pid": os.getpid()})
        assert [leftover.smps for leftover in find_leftovers(base)] == [()]
        board = Board(dead / "board")
        assert leftovers_in(base) == set()
        del board

    def test_a_process_that_got_the_pid_of_the_dead_smp_is_not_killed(self, ground: Ground, base: Path) -> None:
        dead = dead_arena(ground, base / "dead")
        owner = decode_digested((dead / "smp.json").read_bytes())
        with started([sys.executable, "-c", "input()"]) as innocent:
            write_json(dead / "smp.json", {**owner, "pid": innocent.pid})
            for leftover in find_leftovers(base):
                remove(leftover)
            assert innocent.poll() is None
        assert not dead.exists()

    def test_a_job_that_finishes_meanwhile_is_no_leftover(self, ground: Ground, base: Path) -> None:
        template = dead_arena(ground, ground.base / "template")
        for name in ("first", "second", "third"):
            shutil.copytree(template, base / name)
        found = find_leftovers(base)
        assert next(found).path.name == "first"
        shutil.rmtree(base / "second")
        assert [leftover.path.name for leftover in found] == ["third"]

    def test_a_file_that_goes_meanwhile_hides_no_leftover(
        self, ground: Ground, base: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (dead_arena(ground, base / "dead") / "smp.log").touch()
        with monkeypatch.context() as patched:
            patched.setattr(Path, "lstat", just_before(Path.lstat, "smp.log", (base / "dead/smp.log").unlink))
            assert leftovers_in(base) == {"dead"}

    def test_another_one_that_removes_the_same_is_not_in_the_way(
        self, ground: Ground, base: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A second `holdfast gc`, before the first overwrites a file, and before it deletes one."""
        for name, where, step in (("wiped", Path, "lstat"), ("deleted", os, "unlink")):
            dead = dead_arena(ground, base / name)
            (leftover,) = find_leftovers(base)
            with monkeypatch.context() as patched:
                instead = just_before(getattr(where, step), "dp0.0.safetensors", partial(shutil.rmtree, dead))
                patched.setattr(where, step, instead)
                remove(leftover, zero=True)
            assert not dead.exists()

    def test_an_smp_that_ended_meanwhile_is_not_in_the_way(self, ground: Ground, base: Path) -> None:
        owner = orphan(ground, base / "orphan")
        (leftover,) = find_leftovers(base)
        assert [smp.pid for smp in leftover.smps] == [owner.pid]
        end(psutil.Process(owner.pid))
        remove(leftover)
        assert not (base / "orphan").exists()

    def test_an_smp_that_nobody_reaps_is_removed_all_the_same(self, ground: Ground, base: Path) -> None:
        """In a container whose first process is not an init, an ended orphan stays a zombie."""
        with starter(base / "orphan", ground.host(), BAD_INIT) as (bad_init, owner):
            assert psutil.Process(owner.pid).ppid() == bad_init.pid
            (leftover,) = find_leftovers(base)
            remove(leftover)
            assert psutil.Process(owner.pid).status() == psutil.STATUS_ZOMBIE
            assert not (base / "orphan").exists()

    def test_a_zombie_is_no_smp_that_runs(self, ground: Ground, base: Path) -> None:
        with starter(base / "orphan", ground.host(), BAD_INIT) as (_, owner):
            end(psutil.Process(owner.pid))
            assert [leftover.smps for leftover in find_leftovers(base)] == [()]


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_end_of_a_process_is_awaited_on_a_descriptor_above_1023() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("this process may not have so many descriptors")
    with limited(resource.RLIMIT_NOFILE, max(soft, 2048)), started(["sleep", "60"]) as process:
        low = os.pidfd_open(process.pid)
        high = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 1500)
        try:
            assert not await_end(high, 0.01)
            process.kill()
            assert await_end(high, 10)
        finally:
            os.close(low)
            os.close(high)
