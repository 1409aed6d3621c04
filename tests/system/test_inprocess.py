"""Survivors keep their processes: only the dead rank is restarted, and all continue bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore

from holdfast import InMemorySnapshot
from holdfast.integrations.inprocess import abandon_process_groups
from holdfast.smp_daemon.shared.paths import ARENA_ENV, read_owner

WORLD = 3
DEADLINE_S = 300.0
LAST = 7

Event = dict[str, Any]


class Survival:
    """A launcher that restarts a dead rank and no other. Every rank is a node with its own SMP."""

    def __init__(self, base: Path, kills: dict[int, list[Any]]) -> None:
        self.base = base
        self._kills = kills
        self._store = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=DEADLINE_S)
        )
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        base.mkdir(mode=0o700)

    def _start(self, rank: int, turn: int) -> None:
        own = self.base / f"node{rank}"
        own.mkdir(exist_ok=True, mode=0o700)
        orders = {"port": self._store.port, "rank": rank, "world": WORLD, "turn": turn, "kills": self._kills}
        names = {ARENA_ENV: str(own), "HOLDFAST_NODE": f"node{rank}", "HOLDFAST_JOB": "survivors"}
        self._processes[rank] = subprocess.Popen(
            [sys.executable, "-m", "tests.survivors", json.dumps(orders | {"out": str(self.base / f"{rank}.json")})],
            env={**os.environ, **names, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            stderr=(self.base / f"{rank}.log").open("ab"),
        )

    def run(self) -> list[list[Event]]:
        """Run to the end; return the events of each rank."""
        for rank in range(WORLD):
            self._start(rank, 0)
        for turn, (victim, *_) in sorted(self._kills.items()):
            assert self._processes[victim].wait(DEADLINE_S) == -9
            self._start(victim, turn + 1)
        for rank, process in self._processes.items():
            assert process.wait(DEADLINE_S) == 0, (self.base / f"{rank}.log").read_text()[-3000:]
        return [
            [json.loads(line) for line in (self.base / f"{rank}.json").read_text().splitlines()]
            for rank in range(WORLD)
        ]

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait(DEADLINE_S)
        for owner in filter(None, (read_owner(self.base / f"node{rank}" / "survivors") for rank in range(WORLD))):
            if psutil.pid_exists(owner.pid):
                smp = psutil.Process(owner.pid)
                smp.kill()
                smp.wait(DEADLINE_S)
        shutil.rmtree(self.base)


def survive(name: str, kills: dict[int, list[Any]]) -> list[list[Event]]:
    run = Survival(Path(f"/dev/shm/holdfast-survive-{os.getpid()}-{name}"), kills)
    try:
        return run.run()
    finally:
        run.close()


def losses(events: list[Event]) -> dict[int, str]:
    """The loss of each step, as it was last computed."""
    return {event["step"]: event["loss"] for event in events if event["kind"] == "step"}


def check(events: list[list[Event]], kills: dict[int, list[Any]]) -> None:
    """Compare all ranks with what the first process of each saw undisturbed."""
    victims = [victim for victim, *_ in kills.values()]
    for rank, found in enumerate(events):
        [expected] = [event for event in found if event["kind"] == "undisturbed"]
        assert len({event["pid"] for event in found}) == 1 + victims.count(rank), "who survives keeps its process"
        assert [losses(found)[step] for step in range(LAST + 1)] == expected["losses"]
        assert [found[-1][key] for key in ("state", "random")] == [expected[key] for key in ("state", "random")]
        epochs = [event["epoch"] for event in found if event["kind"] == "entered"]
        assert epochs == sorted(set(epochs)), "each entering is an epoch of its own"


@pytest.mark.cluster
@pytest.mark.slow  # four processes that import torch
@pytest.mark.proves("survivors")
def test_survivors_keep_their_processes_and_go_on_bit_for_bit() -> None:
    kills = {0: [1, "middle", 4]}
    events = survive("middle", kills)
    check(events, kills)
    for rank in (0, 2):
        kinds = [event["kind"] for event in events[rank]]
        assert kinds.count("lost") == 1 and kinds.count("begun") == 1
    entered = [event for event in events[0] if event["kind"] == "entered"]
    assert [event["step"] for event in entered] == [0, 4] and entered[1]["how"] == "held"


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize(
    "kills",
    [
        {0: [0, "top", 3]},
        {0: [2, "stepped", 5]},
        {0: [1, "middle", 2], 1: [1, "middle", 4], 2: [0, "stepped", 6]},
        {0: [1, "middle", 3], 1: [2, "top", 3]},
    ],
    ids=["rank 0", "after a step", "one after the other", "again at once"],
)
@pytest.mark.proves("survivors")
def test_whoever_dies_and_whenever(kills: dict[int, list[Any]]) -> None:
    check(survive("slow", kills), kills)


def test_entering_again_and_again_in_one_process_keeps_no_slot_mapped(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ARENA_ENV, str(shm))
    monkeypatch.setenv("HOLDFAST_JOB", "test")
    model = torch.nn.Linear(8, 8)
    optim = torch.optim.Adam(model.parameters())
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
        owner = read_owner(shm / "test")
        if owner is not None:
            smp = psutil.Process(owner.pid)
            smp.kill()
            smp.wait(DEADLINE_S)


def test_process_groups_can_be_given_up_where_there_are_none() -> None:
    assert not dist.is_initialized()
    abandon_process_groups()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    dist.new_group([0])
    abandon_process_groups()
    assert not dist.is_initialized()
    abandon_process_groups()
