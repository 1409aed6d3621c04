"""Which trainers are alive, late, hung or dead: judged by pure functions, and by a real SMP whose trainers hang and
die.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import timeit
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from holdfast.cli.main import main
from holdfast.smp_daemon.ops.overview import look
from holdfast.smp_daemon.shared.board import HEARTBEAT_ROWS, Board, TrainerPhase
from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.deadlines import Deadlines, parse_deadlines
from holdfast.smp_daemon.shared.errors import ConfigError, ProtocolError
from holdfast.smp_daemon.shared.plain import from_plain, to_plain
from holdfast.smp_daemon.watchdog.liveness import Health, WatchedTrainer, judge, judge_lease
from holdfast.smp_daemon.watchdog.watchdog import Watchdog, run_on_hang
from tests.deadlines import DEADLINE_S, await_that
from tests.scripts import started
from tests.smp_kit import JOB, Ground, ManualClock, SmpProcess, read_line

LIMITS = Deadlines(start=900, restore=600, step=60, copy=120, factor=10)


@pytest.mark.parametrize(
    ("doing", "quiet_s", "more", "step_s", "health", "phase"),
    [
        (TrainerPhase.STEP, 30.0, {}, None, Health.ALIVE, "step"),
        (TrainerPhase.STEP, 30.1, {}, None, Health.LATE, "step"),
        (TrainerPhase.STEP, 60.0, {}, None, Health.LATE, "step"),
        (TrainerPhase.STEP, 60.1, {}, None, Health.HUNG, "step"),
        (TrainerPhase.STEP, 60.1, {}, 5.0, Health.HUNG, "step"),
        (TrainerPhase.STEP, 60.1, {}, 20.0, Health.ALIVE, "step"),
        (TrainerPhase.STEP, 200.1, {}, 20.0, Health.HUNG, "step"),
        (TrainerPhase.START, 450.0, {}, 0.1, Health.ALIVE, "start"),
        (TrainerPhase.START, 901.0, {}, None, Health.HUNG, "start"),
        (TrainerPhase.RESTORE, 601.0, {}, None, Health.HUNG, "restore"),
        (TrainerPhase.STEP, 1.0, {"copying_s": 60.0}, None, Health.ALIVE, "step"),
        (TrainerPhase.STEP, 1.0, {"copying_s": 61.0}, None, Health.LATE, "copy"),
        (TrainerPhase.STEP, 1.0, {"copying_s": 121.0}, None, Health.HUNG, "copy"),
        (TrainerPhase.STEP, 1.0, {"copying_s": 121.0, "copy_bytes": 10**9}, None, Health.LATE, "copy"),
        (TrainerPhase.STEP, 1.0, {"copying_s": 800.0, "copy_bytes": 80 * 10**9}, None, Health.LATE, "copy"),
        (TrainerPhase.STEP, 1.0, {"copying_s": 921.0, "copy_bytes": 80 * 10**9}, None, Health.HUNG, "copy"),
        (TrainerPhase.STEP, 61.0, {"copying_s": 121.0}, None, Health.HUNG, "step"),
        (TrainerPhase.STEP, 1.0, {"ended": True}, None, Health.DEAD, "step"),
        (TrainerPhase.GONE, 1e6, {}, 0.1, Health.ALIVE, "gone"),
    ],
)
def test_a_trainer_is_judged_by_the_deadline_of_its_phase(
    doing: TrainerPhase, quiet_s: float, more: dict[str, Any], step_s: float | None, health: Health, phase: str
) -> None:
    verdict = judge(doing, quiet_s, LIMITS, step_s, **more)
    assert (verdict.health, verdict.phase) == (health, phase)


def test_without_a_deadline_it_never_hangs() -> None:
    for phase in (TrainerPhase.START, TrainerPhase.RESTORE, TrainerPhase.STEP):
        assert judge(phase, 1e9, Deadlines(0, 0, 0, 0), 1.0, copying_s=1e9).health is Health.ALIVE


def test_deadlines_are_read() -> None:
    assert parse_deadlines("") == Deadlines()
    assert parse_deadlines("step=5s, factor=3,copy=0") == Deadlines(step=5, factor=3, copy=0)
    assert parse_deadlines("step=5s,start=7s").shortest == 5
    assert Deadlines(0, 0, 0, 0).shortest == 0
    with pytest.raises(ConfigError, match="'walk=3s': use NAME=TIME"):
        parse_deadlines("walk=3s")
    with pytest.raises(ConfigError, match="step is given twice"):
        parse_deadlines("step=5min,copy=0,step=6min")
    for bad in ("step", "step=-1s", "step=x", "step=nan", "factor=x", "factor=nan", "factor=2s"):
        with pytest.raises(ConfigError, match=r"(step|factor): '.*' is no"):
            parse_deadlines(bad)


def test_a_peer_is_judged_by_its_lease() -> None:
    ages = [(0.0, Health.ALIVE), (15.0, Health.ALIVE), (16.0, Health.LATE), (30.0, Health.LATE), (31.0, Health.DEAD)]
    assert [judge_lease(age, 30.0) for age, _ in ages] == [health for _, health in ages]
    assert judge_lease(1e9, 0.0) is Health.ALIVE


def test_what_is_no_trainer_is_refused() -> None:
    trainer = WatchedTrainer("dp0", 1, 2, Health.HUNG, "step", 3.0, 4.0)
    assert from_plain(WatchedTrainer, to_plain(trainer)) == trainer
    assert re.search(r"dp0 \(pid 1\) .*hung .*after 2: .*3\.0 s \(4 ", str(trainer))
    for bad in ({}, {**to_plain(trainer), "health": "fine"}):
        with pytest.raises(ProtocolError, match="not WatchedTrainer"):
            from_plain(WatchedTrainer, bad)


def test_a_beat_is_seen_through_another_mapping_and_is_its_row_alone(tmp_path: Path) -> None:
    smp, trainer = Board(tmp_path / "board", create=True), Board(tmp_path / "board")
    trainer.heartbeat(5, TrainerPhase.STEP, 17)
    trainer.copying(5, 16)
    first = smp.heartbeats(5)
    assert (smp.phase(5), first[1:]) == (TrainerPhase.STEP, (17, 17))
    trainer.heartbeat(5, TrainerPhase.STEP, 17)
    assert smp.heartbeats(5)[0] != first[0]
    trainer.copying(5, None)
    assert smp.heartbeats(5)[2] == 0
    assert [smp.heartbeats(row) for row in range(HEARTBEAT_ROWS) if row != 5] == [(0, 0, 0)] * (HEARTBEAT_ROWS - 1)


def test_a_beat_costs_a_loop_nothing(tmp_path: Path) -> None:
    Board(tmp_path / "board", create=True)
    board = Board(tmp_path / "board")
    beats = timeit.Timer(lambda: board.heartbeat(3, TrainerPhase.STEP, 7), timer=time.thread_time)
    assert min(beats.repeat(number=1000, repeat=5)) / 1000 < 20e-6  # it takes half a microsecond


# ---------------------------------------------------------------------- the end of a process


@pytest.fixture
def attendance(tmp_path: Path) -> Iterator[Watchdog]:
    board = Board(tmp_path / "board", create=True)
    attendance = Watchdog(lambda: board, LIMITS, None)
    attendance.start()
    yield attendance
    attendance.close()


def test_the_end_of_a_process_is_learned_at_once(
    tmp_path: Path, other: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From an event: the watchdog looks by itself only once an hour here."""
    monkeypatch.setattr("holdfast.smp_daemon.watchdog.watchdog.MOST_INTERVAL_S", 3600.0)
    board, ended = Board(tmp_path / "board", create=True), threading.Event()
    attendance = Watchdog(lambda: board, Deadlines(0, 0, 0, 0), None)
    attendance.start()
    assert attendance.attend(other.pid, "dp0") is not None
    attendance.connected(other.pid, ended.set)
    other.kill()
    assert ended.wait(DEADLINE_S)
    assert [trainer.health for trainer in attendance.trainers()] == [Health.DEAD]
    attendance.close()


def test_more_trainers_than_rows_are_not_watched(attendance: Watchdog) -> None:
    rows = [attendance.attend(os.getpid(), f"dp{i}") for i in range(HEARTBEAT_ROWS + 1)]
    assert rows == [*range(HEARTBEAT_ROWS), None]


def test_the_dead_of_an_earlier_start_are_not_missed_if_other_ranks_come_in_their_place(attendance: Watchdog) -> None:
    """As when ranks are renumbered over the nodes: the node would name trainers as dead that train elsewhere."""
    for start in range(1, HEARTBEAT_ROWS + 2):
        with subprocess.Popen(["sleep", "60"]) as process:
            assert attendance.attend(process.pid, f"dp{start}") is not None
            attendance.joined(process.pid, f"dp{start}", start)
            assert [(each.coord, each.health) for each in attendance.trainers()] == [(f"dp{start}", Health.ALIVE)]
            process.kill()
        await_that(lambda: attendance.trainers()[0].health is Health.DEAD)


def test_who_came_before_it_watched_is_watched(tmp_path: Path, other: subprocess.Popen[bytes]) -> None:
    """An SMP serves before it watches, and trainers come back to a new one at once."""
    board = Board(tmp_path / "board", create=True)
    attendance = Watchdog(lambda: board, LIMITS, None)
    attendance.attend(other.pid, "dp3")
    attendance.joined(other.pid, "dp3", 1)
    attendance.start()
    assert attendance.await_room(1, SHORT_S) is not None, "another run of the job is at work"
    other.kill()
    await_that(lambda: attendance.trainers()[0].health is Health.DEAD)
    attendance.close()


# ---------------------------------------------------------------------- a second run of the same job


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


SHORT_S = 0.3
"""How long to wait for something that should not happen."""


def test_a_process_that_is_at_work_leaves_no_room(attendance: Watchdog, other: subprocess.Popen[bytes]) -> None:
    attendance.attend(other.pid, "dp3")
    assert attendance.await_room(1, DEADLINE_S) is None, "it has joined no epoch, and may be of the same start"
    attendance.joined(other.pid, "dp3", 1)
    found = attendance.await_room(1, SHORT_S)
    assert found is not None and (found.pid, found.coord) == (other.pid, "dp3")
    assert attendance.await_room(other.pid, DEADLINE_S) is None, "a process may begin again"


@pytest.mark.parametrize("how", ["SIGSTOP", "SIGKILL", "renumbered"])
def test_who_is_stopped_or_killed_or_begins_again_makes_room(
    attendance: Watchdog, other: subprocess.Popen[bytes], how: str
) -> None:
    """The old coordinate of one that survives may become unused if ranks are renumbered."""
    attendance.attend(other.pid, "dp3")
    attendance.joined(other.pid, "dp3", 1)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(attendance.await_room, 1, DEADLINE_S)
        if how == "renumbered":
            attendance.attend(other.pid, "dp2")
        else:
            other.send_signal(signal.Signals[how])
        assert waiting.result(DEADLINE_S) is None


def test_how_far_it_came_is_noted_before_the_next_one_comes(
    attendance: Watchdog, other: subprocess.Popen[bytes]
) -> None:
    def hang_up() -> None:
        pass

    noted: list[int] = []
    row = attendance.attend(other.pid, "dp3", hang_up)
    attendance.joined(other.pid, "dp3", 1)
    assert row is not None
    attendance._board().heartbeat(row, TrainerPhase.STEP, 7)
    other.kill()
    other.wait(DEADLINE_S)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(attendance.await_room, 1, DEADLINE_S)
        with pytest.raises(TimeoutError):
            waiting.result(SHORT_S)
        attendance.left(other.pid, hang_up, "dp3", noted.append)
        assert waiting.result(DEADLINE_S) is None
    assert noted == [7]


def test_who_has_said_goodbye_makes_room(attendance: Watchdog, other: subprocess.Popen[bytes]) -> None:
    row = attendance.attend(other.pid, "dp3")
    attendance.joined(other.pid, "dp3", 1)
    assert row is not None
    attendance._board().heartbeat(row, TrainerPhase.GONE, 0)
    assert attendance.await_room(1, DEADLINE_S) is None


def test_who_hangs_makes_room(tmp_path: Path, other: subprocess.Popen[bytes]) -> None:
    board = Board(tmp_path / "board", create=True)
    attendance = Watchdog(lambda: board, Deadlines(start=0.1), None)
    attendance.start()
    attendance.attend(other.pid, "dp3")
    attendance.joined(other.pid, "dp3", 1)
    assert attendance.await_room(1, DEADLINE_S) is None
    attendance.close()


def test_a_restore_is_slow_and_not_stuck_while_the_smp_moves_bytes(
    tmp_path: Path, other: subprocess.Popen[bytes]
) -> None:
    clock, board = ManualClock(), Board(tmp_path / "board", create=True)
    attendance = Watchdog(lambda: board, LIMITS, None, threads=clock)
    row = attendance.attend(other.pid, "dp3")
    assert row is not None

    def health_after(seconds: float) -> Health:
        clock.now_s += seconds
        return attendance.trainers()[0].health

    board.heartbeat(row, TrainerPhase.RESTORE, 0)
    assert health_after(0) is Health.ALIVE
    for _ in range(3):
        board.note_move()
        assert health_after(400) is not Health.HUNG
    assert health_after(601) is Health.HUNG
    board.heartbeat(row, TrainerPhase.STEP, 0)
    assert health_after(0) is Health.ALIVE
    board.note_move()
    assert health_after(61) is Health.HUNG  # a step moves nothing by way of the SMP


def test_nothing_waits_for_the_command_for_a_hang(tmp_path: Path, other: subprocess.Popen[bytes]) -> None:
    board, may_end, ran = Board(tmp_path / "board", create=True), threading.Event(), []

    def command(trainer: WatchedTrainer) -> None:
        ran.append(trainer.coord)
        may_end.wait(DEADLINE_S)

    watchdog = Watchdog(lambda: board, Deadlines(start=0.1), command)
    watchdog.start()
    watchdog.attend(other.pid, "dp3")
    await_that(lambda: ran == ["dp3"])
    watchdog.attend(other.pid, "dp4")
    await_that(lambda: ran == ["dp3", "dp4"])
    may_end.set()
    watchdog.close()


# ---------------------------------------------------------------------- real SMPs, and trainers that hang


TRAINER = """
import sys, threading, time
from pathlib import Path
from holdfast.smp_daemon.shared.board import TrainerPhase
from holdfast.smp_daemon.shared.client import SmpClient
client = SmpClient(Path(sys.argv[1]), sys.argv[2], "dp7")
phase, how = TrainerPhase[sys.argv[3]], sys.argv[4]
client.heartbeat(phase, 3)
print("here", flush=True)
if how == "copy":
    client.copying(3)
if how == "gil":
    sys.stdin.readline()
    sum(range(10**12))
if how == "blocked":
    sys.stdin.readline()
    threading.Lock().acquire() and threading.Event().wait()
for line in sys.stdin:
    client.heartbeat(phase, 3)
client.close()
"""


@contextmanager
def trainer_process(smp: SmpProcess, phase: str = "STEP", how: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process that sends one heartbeat for each line that it receives."""
    with started([sys.executable, "-c", TRAINER, str(smp.arena), smp.job, phase, how]) as process:
        assert read_line(process.stdout) == "here\n"
        yield process


def beat(process: subprocess.Popen[str]) -> None:
    print(file=process.stdin, flush=True)


def of(smp: SmpProcess) -> list[WatchedTrainer]:
    (status,) = look(JOB, smp.control).statuses
    return list(status.trainers)


def await_health(smp: SmpProcess, health: Health) -> WatchedTrainer:
    await_that(lambda: [trainer.health for trainer in of(smp)] == [health])
    return of(smp)[0]


def watching(ground: Ground, monkeypatch: pytest.MonkeyPatch, deadlines: str, command: str = "") -> SmpProcess:
    monkeypatch.setenv("HOLDFAST_DEADLINES", deadlines)
    monkeypatch.setenv("HOLDFAST_ON_HANG", command)
    return ground.smp()


def test_a_stopped_trainer_hangs_is_told_once_and_may_go_on(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = ground.base / "told"
    names = "$HOLDFAST_JOB $HOLDFAST_NODE $HOLDFAST_COORD $HOLDFAST_PID $HOLDFAST_PHASE $HOLDFAST_STEP"
    smp = watching(ground, monkeypatch, "step=400ms", f'echo "{names}" >> {told}; echo done')
    with trainer_process(smp) as process:
        process.send_signal(signal.SIGSTOP)
        hung = await_health(smp, Health.HUNG)
        assert (hung.coord, hung.pid, hung.phase, hung.step) == ("dp7", process.pid, "step", 3)
        assert hung.quiet_s > hung.deadline_s == 0.4
        assert main(["status", "--arena", str(ground.base)]) == 0
        assert "trainer dp7" in capsys.readouterr().out
        process.send_signal(signal.SIGCONT)
        beat(process)
        await_that(lambda: of(smp)[0].health != Health.HUNG or of(smp)[0].quiet_s < 0.2)
        await_that(told.exists)
        process.kill()
        dead = await_health(smp, Health.DEAD)
        assert dead.coord == "dp7"
    log = (smp.arena / "smp.log").read_text()
    assert 1 <= told.read_text().count(f"{JOB} node0 dp7 {process.pid} step 3\n") == log.count("is hung") <= 2
    assert log.count("died in") == 1


@pytest.mark.parametrize(("how", "phase"), [("gil", "STEP"), ("blocked", "START"), ("blocked", "RESTORE")])
def test_one_that_computes_or_waits_for_ever_hangs(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, how: str, phase: str
) -> None:
    smp = watching(ground, monkeypatch, "start=300ms,restore=300ms,step=300ms,factor=1")
    with trainer_process(smp, phase, how) as process:
        beat(process)
        assert await_health(smp, Health.HUNG).phase == phase.lower()


def test_a_copy_that_does_not_end_hangs_while_the_loop_goes_on(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    smp = watching(ground, monkeypatch, "copy=300ms")
    with trainer_process(smp, how="copy"):
        assert await_health(smp, Health.HUNG).phase == "copy"


def test_one_that_goes_is_not_missed_and_one_that_dies_is_until_it_is_back(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    smp = watching(ground, monkeypatch, "")
    with trainer_process(smp) as process:
        assert [trainer.health for trainer in of(smp)] == [Health.ALIVE]
        process.communicate(timeout=DEADLINE_S)
    await_that(lambda: of(smp) == [])
    with trainer_process(smp) as process:
        process.kill()
        await_health(smp, Health.DEAD)
    with trainer_process(smp):
        assert [trainer.health for trainer in of(smp)] == [Health.ALIVE]


def test_a_child_that_keeps_the_socket_open_does_not_keep_its_parent_alive(ground: Ground) -> None:
    """As a forked worker of a data loader may do."""
    smp = ground.smp()
    pid = os.fork()
    if pid == 0:
        client = SmpClient(smp.arena, smp.job, "dp0")
        client.heartbeat(TrainerPhase.STEP, 1)
        if os.fork() == 0:
            time.sleep(30)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    await_health(smp, Health.DEAD)
    await_that(lambda: look(JOB, smp.control).statuses[0].inventory.trainers == 0)


def test_a_command_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    trainer = WatchedTrainer("dp0", 1, 2, Health.HUNG, "step", 3.0, 4.0)
    began = time.monotonic()
    run_on_hang(f"echo $$ > {tmp_path / 'pid'}; sleep 300", JOB, "node0", trainer, deadline_s=2.0)
    assert 2.0 <= time.monotonic() - began < DEADLINE_S
    pid = int((tmp_path / "pid").read_text())
    await_that(lambda: not Path(f"/proc/{pid}").exists())


def test_what_a_command_leaves_behind_may_be_another_users(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As after `sudo`: the kernel then refuses to send the group a signal."""
    killed = Mock(side_effect=PermissionError)
    monkeypatch.setattr(os, "killpg", killed)
    run_on_hang("exit 3", JOB, "node0", WatchedTrainer("dp0", 1, 2, Health.HUNG, "step", 3.0, 4.0))
    assert killed.called and "3" in caplog.text


def test_a_peer_that_is_not_heard_of_is_late_and_then_dead(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_REGROUP_AFTER", "1s")
    smps, run = ground.job([[3000]] * 3, protect="2+1")
    run.protect(1)

    def troubles() -> str:
        return " ".join(look(JOB, smps[0].control).statuses[0].troubles)

    await_that(lambda: len(look(JOB, smps[0].control).statuses[0].leases) == 2)
    assert troubles() == ""
    smps[2].lose()
    await_that(lambda: "node2 is dead" in troubles())


def test_the_hook_beats_from_its_start_to_its_end(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from holdfast import InMemorySnapshot
    from tests.system.test_hook import half_a_step, small, train

    smp = ground.prepare()
    monkeypatch.setenv("HOLDFAST_ARENA", str(smp.arena.parent))
    smp.launch().wait_ready()
    model, optim = small()
    with InMemorySnapshot(model, optim, job=JOB, keep=True) as snap:
        (begun,) = of(smp)
        assert (begun.health, begun.phase, begun.pid) == (Health.ALIVE, "start", os.getpid())
        train(snap, model, optim, 3)
        half_a_step(snap, model)
        (trained,) = of(smp)
        assert (trained.health, trained.phase, trained.step) == (Health.ALIVE, "step", 3)
        assert Board(smp.arena / "board").heartbeats(0)[2] == 0  # no copy is pending
    await_that(lambda: of(smp) == [])
