"""Survivors keep their processes: a script that changed by one line, under torchrun, whose trainers are killed."""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from holdfast import InMemorySnapshot
from holdfast.integrations.inprocess import _News, _uses_nccl, abandon_process_groups, forget
from holdfast.integrations.survivors.attempts import JobAttempt, to_line
from holdfast.scratch import Scratch
from holdfast.smp_daemon.shared.paths import ARENA_ENV, read_owner
from holdfast.smp_daemon.shared.processes import await_end
from tests.smp_kit import kill_smps

SCRIPT = Path(__file__).parents[1] / "survivors.py"
WORLD = 3
DEADLINE_S = 300.0
STEPS = 10

Event = dict[str, Any]
Kill = tuple[int, int, str, int]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}", "--max-restarts=9")


class Survival:
    """One run of `tests/survivors.py`, under a launcher if `launch` has one."""

    def __init__(
        self, base: Path, *kills: Kill, launch: tuple[str, ...] = (), told: Mapping[str, str] | None = None
    ) -> None:
        self.base = base
        self.world = WORLD if launch or told else 1
        quiet = {"HOLDFAST_JOB": "survivors", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, *launch, str(SCRIPT), str(base), json.dumps(kills)],
            env={**os.environ, **quiet, **(told or {})},
            stdout=subprocess.PIPE,
            stderr=(base / "log").open("ab"),
            text=True,
        )

    def line(self) -> str:
        """The next line of standard output."""
        assert self.process.stdout is not None
        timer = threading.Timer(DEADLINE_S, self.process.kill)
        timer.start()
        try:
            return self.process.stdout.readline()
        finally:
            timer.cancel()

    def end(self) -> int:
        """Wait for the end; returns the exit code."""
        return self.process.wait(DEADLINE_S)

    @property
    def log(self) -> str:
        return (self.base / "log").read_text()

    @property
    def events(self) -> list[list[Event]]:
        """What each rank has said."""
        files = [self.base / f"{rank}.json" for rank in range(self.world)]
        return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


@pytest.fixture
def base() -> Iterator[Path]:
    """A folder on tmpfs for one run; whatever the run has left is killed."""
    with Scratch("test") as scratch:
        yield scratch.path
        for process in psutil.process_iter():
            try:
                if str(scratch.path) in process.cmdline():
                    process.kill()
            except psutil.NoSuchProcess:
                continue
        kill_smps(scratch.path)


def pids(events: list[Event]) -> list[int]:
    """The processes of one rank, in order."""
    return list(dict.fromkeys(event["pid"] for event in events))


def check(run: Survival) -> None:
    """Compare all ranks with what the first process of each saw undisturbed."""
    assert run.end() == 0, run.log[-8000:]
    for found in run.events:
        [expected] = [event for event in found if event["kind"] == "undisturbed"]
        losses = {event["step"]: event["loss"] for event in found if event["kind"] == "step"}
        assert [losses[step] for step in range(STEPS)] == expected["losses"]
        assert [found[-1][key] for key in ("state", "random")] == [expected[key] for key in ("state", "random")]
        epochs = [event["epoch"] for event in found if event["kind"] == "entered"]
        assert epochs == sorted(set(epochs)), "each entering is an epoch of its own"


def check_processes(run: Survival, kills: list[Kill]) -> None:
    """Whoever was not killed kept its process, and whoever was has one more."""
    victims = [rank for _, rank, *_ in kills]
    assert [len(pids(events)) for events in run.events] == [1 + victims.count(rank) for rank in range(WORLD)]


@pytest.mark.cluster
@pytest.mark.slow  # four processes that import torch
@pytest.mark.proves("survivors")
def test_survivors_keep_their_processes_and_go_on_bit_for_bit(base: Path) -> None:
    kills: list[Kill] = [(0, 1, "middle", 4)]
    run = Survival(base, *kills, launch=TORCHRUN)
    check(run)
    check_processes(run, kills)
    entered = [event for event in run.events[0] if event["kind"] == "entered"]
    assert [event["attempt"] for event in entered] == [0, 1]
    assert entered[1]["step"] in (3, 4) and entered[1]["how"] == "held"


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize(
    "kills",
    [
        [(0, 0, "top", 3)],
        [(0, 0, "middle", 5), (0, 2, "middle", 5)],
        [(0, 1, "middle", 2), (1, 1, "middle", 4), (2, 0, "stepped", 6)],
    ],
    ids=["rank 0", "two at once", "one after the other"],
)
@pytest.mark.proves("survivors")
def test_whoever_dies_and_whenever(base: Path, kills: list[Kill]) -> None:
    run = Survival(base, *kills, launch=TORCHRUN)
    check(run)
    check_processes(run, kills)


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("seed", [970_200, 970_201])
def test_kills_that_are_drawn(base: Path, seed: int) -> None:
    """Replacements die, too, before they have joined and after; survivors that wait for them may be replaced then."""
    print(f"seed {seed}")
    draw = random.Random(seed)
    kills: list[Kill] = [(0, draw.randrange(WORLD), draw.choice(["top", "middle", "stepped"]), draw.randrange(1, 9))]
    for attempt in range(1, 4):
        point = draw.choice(["entered", "joined", "top"])
        kills.append((attempt, draw.randrange(WORLD), point, 9 if point == "top" else 0))
    print(kills)
    check(Survival(base, *kills, launch=TORCHRUN))


@pytest.mark.cluster
@pytest.mark.slow
def test_a_survivor_that_hangs_is_replaced_too(base: Path) -> None:
    run = Survival(base, (0, 2, "hang", 4), launch=TORCHRUN)
    hanging = int(run.line().split()[0])
    victim = pids(run.events[1])[0]
    os.kill(victim, signal.SIGKILL)
    check(run)
    processes = [pids(events) for events in run.events]
    assert processes[2][0] == hanging
    assert [len(each) for each in processes] == [1, 2, 2]


@pytest.fixture
def port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def standby(base: Path, port: str, *kills: Kill, local: int = 0) -> Survival:
    told = {"HOLDFAST_STANDBY": f"127.0.0.1:{port}", "HOLDFAST_NODE": "node9", "LOCAL_RANK": str(local)}
    return Survival(base, *kills, told=told)


def ranks(base: Path, port: str, *kills: Kill, nodes: Sequence[int] = range(WORLD)) -> list[Survival]:
    """A process for each rank, which no launcher starts again. `nodes`: the node of each rank."""
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(len(nodes))}
    each = [job | {"RANK": str(rank), "HOLDFAST_NODE": f"node{node}"} for rank, node in enumerate(nodes)]
    return [Survival(base, *kills, told=told) for told in each]


@pytest.mark.cluster
@pytest.mark.proves("standby")
def test_a_standby_takes_the_place_of_a_lost_node_and_the_others_keep_their_processes(base: Path, port: str) -> None:
    kills = [(0, 1, "lost", 5), (1, 0, "middle", 7)]
    waiting, [first, lost, last] = standby(base, port, *kills), ranks(base, port, *kills)
    assert lost.end() == -signal.SIGKILL
    for run in (first, last, waiting):
        check(run)
    assert [len(pids(events)) for events in waiting.events] == [2, 2, 1]
    entered = [event for event in waiting.events[1] if event["kind"] == "entered"]
    assert [event["step"] for event in entered][1:] == [5, 7]


@pytest.mark.cluster
@pytest.mark.slow
def test_a_standby_takes_the_places_of_all_ranks_of_a_node(base: Path, port: str) -> None:
    """Another rank of that node still runs when it counts as lost, and ends like one whose peers are gone."""
    kills = [(0, 1, "lost", 5)]
    waiting = [standby(base, port, *kills, local=local) for local in range(2)]
    job = ranks(base, port, *kills, nodes=[0, 1, 1])
    assert job[1].end() == -signal.SIGKILL and job[2].end() == 1
    for run in (job[0], *waiting):
        check(run)
    replaced = [pids(events)[-1] for events in job[0].events[1:]]
    assert [psutil.pid_exists(pid) for pid in replaced] == [False, False] and len(set(replaced)) == 2


@pytest.mark.cluster
@pytest.mark.slow
def test_a_standby_waits_while_the_launcher_starts_the_job_again_and_ends_with_it(base: Path, port: str) -> None:
    waiting = standby(base, port)
    assert [run.end() for run in ranks(base, port, (0, 1, "exit", 5))] == [1, 7, 1]
    assert waiting.process.poll() is None
    assert not any(run.end() for run in ranks(base, port))
    assert waiting.end() == 0, waiting.log
    assert not (base / "node9").exists()


@pytest.mark.cluster
@pytest.mark.slow
def test_a_bug_is_left_to_the_launcher(base: Path) -> None:
    once = (*TORCHRUN[:-1], "--max-restarts=1")
    run = Survival(base, (0, 1, "bug", 4), (1, 1, "exit", 5), launch=once)
    assert run.end() == 1
    assert "ValueError: a bug at step 4" in run.log and "exitcode: 7" in run.log.replace(" ", "").replace(
        "exitcode:", "exitcode: "
    )
    assert "--max-restarts" in run.log  # torchrun has restarted all once, and may not do so again
    assert all(len(pids(events)) == 2 for events in run.events)


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("announced", ["term", "drain"])
def test_an_announced_loss_ends_the_attempt_on_every_rank_and_repeats_no_step(
    base: Path, announced: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun starts the job again, in new processes. Whoever is killed before that or after it is replaced alone."""
    monkeypatch.setenv("HOLDFAST_LEAVE_ON", "TERM")
    run = Survival(base, (0, 0, "middle", 2), (1, 1, announced, 4), (1, 2, "middle", 7), launch=TORCHRUN)
    if announced == "drain":
        assert run.line() == "drain\n"
        drain = (sys.executable, "-m", "holdfast", "drain", "node1", "--arena", str(base / "node1" / "survivors"))
        subprocess.run(drain, timeout=DEADLINE_S, check=True)
    check(run)
    assert run.log.count("NodeLeaves: this node") == 1 and run.log.count("NodeLeaves: another node") == 2
    assert [len(pids(events)) for events in run.events] == [3, 2, 3]
    before, after = ([e for e in run.events[1] if e["pid"] == pid] for pid in pids(run.events[1]))
    assert after[0]["step"] == 1 + max(event["step"] for event in before if event["kind"] == "step")


def test_without_a_launcher_a_killed_trainer_is_replaced_until_it_fails_in_another_way(base: Path) -> None:
    run = Survival(base, (0, 0, "middle", 3), (1, 0, "middle", 5), (2, 0, "exit", 7))
    assert run.end() == 7, run.log
    [events] = run.events
    assert len(pids(events)) == 3
    assert [event["step"] for event in events if event["kind"] == "entered"] == [0, 3, 5]


def test_the_launcher_hears_of_a_kill_once_it_has_set_a_limit(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    run = Survival(base, (0, 0, "middle", 2), (1, 0, "middle", 4))
    assert run.end() == -signal.SIGKILL
    assert len(pids(run.events[0])) == 2


def test_where_nothing_may_be_restarted_the_script_runs_as_it_was(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    run = Survival(base)
    check(run)
    assert pids(run.events[0]) == [run.process.pid]
    assert run.log.count("will not keep their processes") == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_supervisor_leaves_no_process_behind(base: Path, number: signal.Signals) -> None:
    run = Survival(base, (0, 0, "hang", 2))
    trainer = int(run.line().split()[0])
    children = [child.pid for child in psutil.Process(run.process.pid).children()]
    assert trainer in children
    ends = [os.pidfd_open(pid) for pid in children]
    try:
        run.process.send_signal(number)
        assert run.end() == -number
        assert all(await_end(end, DEADLINE_S) for end in ends)
    finally:
        for end in ends:
            os.close(end)


def test_entering_again_and_again_in_one_process_keeps_no_slot_mapped(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ARENA_ENV, str(shm))
    monkeypatch.setenv("HOLDFAST_JOB", "test")
    model = torch.nn.Linear(8, 8)
    optim = torch.optim.Adam(model.parameters())
    gc.disable()  # as many a training job does
    try:
        for life in range(4):
            with pytest.raises(RuntimeError):
                with InMemorySnapshot(model, optim, keep=True) as snap:
                    assert snap.step == 3 * life
                    for _ in range(3):
                        model(torch.ones(2, 8)).sum().backward()
                        snap.drain(60)
                        optim.step()
                    model(torch.ones(2, 8)).sum().backward()
                    snap.drain(60)
                    raise RuntimeError
            held = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(shm) in line]
            assert not [line for line in held if "board" not in line]
    finally:
        gc.enable()
        owner = read_owner(shm / "test")
        if owner is not None:
            smp = psutil.Process(owner.pid)
            smp.kill()
            smp.wait(DEADLINE_S)


@pytest.fixture
def second() -> Iterator[tuple[_News, socket.socket]]:
    """A trainer that has taken attempt 1, and the end of the channel that its supervisor has."""
    ours, theirs = socket.socketpair()
    with theirs:
        news = _News(JobAttempt(0, "", 0), theirs)
        ours.sendall(to_line({"attempt": JobAttempt(1, "", 0)}))
        assert news.take(DEADLINE_S)
        yield news, ours


def test_a_trainer_hears_the_end_of_attempts_also_if_what_it_said_was_not_read(
    second: tuple[_News, socket.socket],
) -> None:
    news, supervisor = second
    news.begin()
    supervisor.close()
    assert not news.take(5.0) and not news._is_open


def test_an_attempt_begins_although_the_end_of_attempts_came_as_the_one_before_was_left(
    second: tuple[_News, socket.socket],
) -> None:
    news, supervisor = second
    supervisor.close()
    news.begin()
    assert news.attempt.number == 1 and not news.take(5.0)


def test_process_groups_can_be_given_up_where_there_are_none() -> None:
    assert not dist.is_initialized()
    abandon_process_groups()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    dist.new_group([0])
    abandon_process_groups()
    assert not dist.is_initialized()
    abandon_process_groups()


def test_groups_may_be_made_while_a_thread_looks_what_they_use() -> None:
    looks: list[bool] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            looks.append(_uses_nccl())

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    with ThreadPoolExecutor() as pool:
        looking = pool.submit(look)
        for _ in range(100):
            dist.new_group([0])
        ended.set()
    abandon_process_groups()
    assert looking.exception() is None and looks and not any(looks)


def test_a_process_group_is_freed_after_what_uses_it() -> None:
    """The other way round, a thread of the group that waits for the GIL would wait for ever."""
    freed: list[str] = []
    importlib.import_module("torch._dynamo")  # the first DDP does, and it keeps the groups that are there then

    def fail() -> None:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        model = DistributedDataParallel(torch.nn.Linear(2, 2))
        weakref.finalize(model.reducer, freed.append, "reducer")
        weakref.finalize(model.process_group, freed.append, "group")
        raise RuntimeError

    with pytest.raises(RuntimeError) as failed:
        fail()
    abandon_process_groups()
    assert not freed
    forget(failed.value)
    assert freed == ["reducer", "group"]
