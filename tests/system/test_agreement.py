"""Ranks wait for each other, however long one of them works."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from holdfast.leftovers import find_leftovers
from holdfast.snapshot.collective import agreement
from holdfast.snapshot.collective.agreement import Agreement, Result, Values, work_in_rounds
from holdfast.snapshot.collective.mesh import AgreementLost
from tests.deadlines import DEADLINE_S
from tests.unit.test_replicas import Rank, together

ROUNDS = 5


class Counting(Agreement):
    """A rank that counts its agreements with the others; `enough` is set after `ROUNDS`."""

    def __init__(self, member: Rank) -> None:
        self.rank = member.rank
        self.met = 0
        self.enough = threading.Event()
        self._member = member

    def minimum(self, values: Values, among: Sequence[int] | None = None) -> Result:
        self.met += 1
        if self.met == ROUNDS:
            self.enough.set()
        return self._member.minimum(values)


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "PATIENCE_S", 0.01)


def test_who_is_done_meets_the_others_until_the_last_one_is_done() -> None:
    def rank(member: Rank) -> tuple[bool, bool]:
        counting = Counting(member)
        done = work_in_rounds(counting, lambda: member.rank != 1 or counting.enough.wait(DEADLINE_S))
        return done, counting.met >= ROUNDS

    assert together(rank, 3) == [(True, True)] * 3


def test_who_fails_raises_once_all_are_done_and_nobody_else_does() -> None:
    over = threading.Event()

    def fail() -> str:
        raise ValueError("of one rank")

    def succeed() -> str:
        over.set()
        return "well"

    def rank(member: Rank) -> str:
        try:
            return work_in_rounds(member, fail if member.rank == 0 else succeed)
        except ValueError as error:
            assert over.is_set()
            return str(error)

    assert together(rank, 2) == ["of one rank", "well"]


def test_a_rank_that_is_gone_is_noticed_while_others_work() -> None:
    never = threading.Event()

    class Lonely(Agreement):
        def minimum(self, values: Values, among: Sequence[int] | None = None) -> Result:
            raise AgreementLost("another rank is gone")

    with pytest.raises(AgreementLost):
        work_in_rounds(Lonely(), lambda: never.wait(DEADLINE_S))
    never.set()


def test_alone_nobody_is_waited_for() -> None:
    assert Agreement().patiently(lambda: 7) == 7


# ---------------------------------------------------------------------- real ranks that lose each other

PARTING = """
import os, signal, sys, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from holdfast import InMemorySnapshot

how, folder, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = torch.nn.Linear(8, 8)
optim = torch.optim.Adam(model.parameters())

def notice(*arguments):
    raise InterruptedError("told to stop")

signal.signal(signal.SIGUSR1, notice)
with InMemorySnapshot(model, optim) as snap:
    def step():
        optim.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        dist.barrier()
        snap.drain(60)
        if snap.step == 4 and how == "late":
            snap._session.rank.agreement._mesh.deadline = timedelta(seconds=1)
            if rank == 0:  # until the other one has given up waiting
                limit = time.monotonic() + 60
                while not (folder / "gone on").exists():
                    assert time.monotonic() < limit
                    time.sleep(0.01)
        if snap.step == 4 and how == "signal" and rank == 0:
            snap._session.rank.agreement.minimum = lambda *values: lambda: os.kill(os.getpid(), signal.SIGUSR1)
        try:
            optim.step()
        except InterruptedError:
            print("interrupted", flush=True)
            del snap._session.rank.agreement.minimum
        if snap.step == 5 and rank == 1:
            (folder / "gone on").touch()
    while snap.step < steps:
        step()
    statistics = snap.statistics
    epochs = snap._session.progress.epoch - snap.restored.epoch + 1
    print(snap.step, snap.protected_step, epochs, statistics.taken, flush=True)
"""


def of_two_ranks() -> dict[str, str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}


def run(arena: Path, folder: Path, how: str, steps: int) -> list[list[str]]:
    """Run two ranks on one node; return the lines that each prints."""
    more = of_two_ranks() | {"HOLDFAST_ARENA": str(arena), "HOLDFAST_JOB": "parting", "HOLDFAST_EVERY": "1"}
    command = [sys.executable, "-c", PARTING, how, str(folder), str(steps)]
    pipe = subprocess.PIPE
    ranks = [
        subprocess.Popen(command, env={**os.environ, **more, "RANK": str(rank)}, stdout=pipe, stderr=pipe, text=True)
        for rank in range(2)
    ]
    said = []
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=120)
            assert rank.returncode == 0, err
            said.append(out.splitlines())
    finally:
        for rank in ranks:
            rank.kill()
    return said


def is_empty(arena: Path) -> bool:
    return not list(arena.rglob("*.safetensors")) and not list(find_leftovers(arena))


def test_after_one_rank_came_too_late_all_meet_again_and_are_protected(arena: Path, tmp_path: Path) -> None:
    for rank in run(arena, tmp_path, "late", 16):
        step, protected, epoch, taken = rank[-1].split()
        assert (step, protected, epoch) == ("16", "15", "2") and 11 <= int(taken) <= 13
    assert is_empty(arena)


def test_after_a_signal_has_raised_while_ranks_agreed_all_meet_again(arena: Path, tmp_path: Path) -> None:
    first, second = run(arena, tmp_path, "signal", 16)
    assert first[0] == "interrupted"
    assert first[1].split()[:3] == second[0].split()[:3] == ["16", "15", "2"]
    assert is_empty(arena)


def test_ranks_that_have_lost_each_other_clean_up_together_at_the_end(arena: Path, tmp_path: Path) -> None:
    for rank in run(arena, tmp_path, "late", 6):
        assert rank[-1].split()[::2] == ["6", "1"], "they have not met again"
    assert is_empty(arena)


ENTERING = """
import sys, torch.distributed as dist
from holdfast.snapshot.collective import agreement
agreement.SLOW_S = 0.1
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    sys.stdin.readline()
agreement.Group().close()
"""


LEAVING = """
import sys, torch, torch.distributed as dist
from holdfast import InMemorySnapshot
from holdfast.snapshot.collective import agreement
agreement.SLOW_S = 0.1
dist.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
optim = torch.optim.SGD(model.parameters(), 0.1)
with InMemorySnapshot(model, optim) as snap:
    for step in snap.steps(3):
        model(torch.ones(1, 2)).sum().backward()
        optim.step()
        if (dist.get_rank(), step) == (1, 2):
            sys.stdin.readline()
"""


@pytest.mark.parametrize(
    ("script", "what"),
    [(ENTERING, ["to enter the hook", "1800 s"]), (LEAVING, ["left its loop after step 3"])],
    ids=["enter", "leave"],
)
def test_a_rank_that_waits_for_others_says_so(arena: Path, script: str, what: list[str]) -> None:
    command, more, pipe = [sys.executable, "-c", script], os.environ | of_two_ranks(), subprocess.PIPE
    ranks = [
        subprocess.Popen(command, env=more | {"RANK": rank}, stdin=pipe, stderr=pipe, text=True) for rank in ("0", "1")
    ]
    try:
        assert ranks[0].stderr is not None
        assert any(all(words in line for words in what) for line in ranks[0].stderr)
        for rank in reversed(ranks):
            rank.communicate("go on\n", timeout=DEADLINE_S)
            assert rank.returncode == 0
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
