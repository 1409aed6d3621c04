"""Leaving the block before the loop's end keeps the snapshots, and the next start goes on there, bit for bit."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import InMemorySnapshot
from holdfast.smp_daemon.shared.client import SmpClient
from tests.scripts import completed

Loop = Callable[[InMemorySnapshot], Iterator[torch.Tensor]]

BATCHES = [torch.full((2, 4), float(number)) for number in range(4)]


class Trained:
    """A small job, whose loop is left by ``break`` when it has seen so many batches.

    Attributes:
        seen: sums of the batches that it was trained on.
    """

    def __init__(self, loop: Loop, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
        self.optim = torch.optim.Adam(self.net.parameters(), lr=0.1)
        self.seen: list[float] = []
        self._loop = loop
        self._options = {"strict": True, "block": 1, **options}  # as if in a process of its own

    def run(self, leave_after: int = -1, *, stepped: bool = True, finish: bool = False) -> list[float]:
        with InMemorySnapshot(self.net, self.optim, **self._options) as snap:
            for batch in self._loop(snap):
                self.optim.zero_grad()
                self.net(batch).square().mean().backward()
                leaves = len(self.seen) == leave_after
                if leaves and not stepped:
                    break
                self.optim.step()
                self.seen.append(float(batch.sum()))
                if leaves:
                    break
            if finish:
                snap.finish()
        return self.seen

    def state(self) -> list[torch.Tensor]:
        return [*self.net.parameters(), *(value for each in self.optim.state.values() for value in each.values())]


def steps(snap: InMemorySnapshot) -> Iterator[torch.Tensor]:
    for _ in snap.steps(8):
        yield torch.randn(2, 4)


def passes(snap: InMemorySnapshot) -> Iterator[torch.Tensor]:
    for _ in range(snap.epoch, 2):
        for batch in snap.data(BATCHES):
            yield batch * torch.rand(1)


def zipped(snap: InMemorySnapshot) -> Iterator[torch.Tensor]:
    for batch, _ in zip(snap.data(BATCHES), snap.data([*BATCHES, *BATCHES], name="longer"), strict=False):
        yield batch


def steps_with_data(snap: InMemorySnapshot) -> Iterator[torch.Tensor]:
    batches = iter(snap.data([*BATCHES, *BATCHES]))
    for _ in snap.steps(3):
        yield next(batches)


def plain(snap: InMemorySnapshot) -> Iterator[torch.Tensor]:
    for _ in range(snap.step, 4):
        yield torch.randn(2, 4)


@pytest.mark.parametrize("stepped", [True, False], ids=["after the step", "in the step"])
@pytest.mark.parametrize("loop", [steps, passes])
def test_a_loop_that_is_left_early_goes_on_where_it_was(arena: Path, loop: Loop, stepped: bool) -> None:
    whole = Trained(loop, job="whole")
    whole.run()
    first, second = Trained(loop), Trained(loop)
    first.run(leave_after=2, stepped=stepped)
    second.run()
    assert first.seen + second.seen == whole.seen
    assert all(map(torch.equal, second.state(), whole.state()))
    assert not (arena / "test").exists(), "the second reached its end"


@pytest.mark.parametrize("loop", [steps, passes])
def test_the_last_step_is_kept_whatever_the_interval(arena: Path, loop: Loop) -> None:
    first, second = Trained(loop, every=5), Trained(loop, every=5)
    first.run(leave_after=2)
    second.run()
    assert len(first.seen + second.seen) == 8


@pytest.mark.parametrize(
    ("loop", "leave_after", "finish"),
    [(steps, 2, True), (passes, 2, True), (zipped, -1, False), (steps_with_data, -1, False), (plain, 1, False)],
)
def test_a_job_that_is_over_leaves_nothing(arena: Path, loop: Loop, leave_after: int, finish: bool) -> None:
    assert Trained(loop).run(leave_after, finish=finish)
    assert not (arena / "test").exists()


def test_a_loop_that_is_left_before_its_first_snapshot_leaves_nothing(arena: Path) -> None:
    assert Trained(steps).run(leave_after=0, stepped=False) == []
    assert not (arena / "test").exists()


def test_one_line_says_what_is_kept(arena: Path, caplog: pytest.LogCaptureFixture) -> None:
    Trained(steps).run(leave_after=2)
    [line] = [record.getMessage() for record in caplog.records if "finish()" in record.getMessage()]
    assert "step 3" in line


def test_a_loop_that_is_left_early_is_no_crash(arena: Path) -> None:
    for _ in range(3):
        Trained(steps, max_repeats=1).run(leave_after=0, stepped=False)
    Trained(steps, max_repeats=1).run(leave_after=1)
    for _ in range(3):
        Trained(steps, max_repeats=1).run(leave_after=0, stepped=False)


@pytest.mark.parametrize("where", ["hook.Session._agree", "step.capture.Capture.begin"])
def test_a_block_whose_end_fails_has_not_ended_well_and_leaves_no_threads(
    arena: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    again, before = Trained(steps), set(threading.enumerate())
    with pytest.raises(ZeroDivisionError), InMemorySnapshot(again.net, again.optim, block=1) as snap:
        for batch in steps(snap):
            again.optim.zero_grad()
            again.net(batch).square().mean().backward()
            again.optim.step()
            if snap.step == 2:
                monkeypatch.setattr(f"holdfast.snapshot.{where}", fail)
                break
    client = SmpClient(arena / "test", "test")
    [end] = client.inventory().record.ends.values()
    client.close()
    assert end.failure == "ZeroDivisionError:"
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert left.isdisjoint({"holdfast-copy", "holdfast-seal"})


def test_a_loop_that_is_left_early_makes_snapshots_no_denser(arena: Path) -> None:
    Trained(steps).run(leave_after=2)
    again = Trained(steps)
    with InMemorySnapshot(again.net, again.optim, block=1) as snap:
        assert snap.step == 3 and snap.statistics.rule is not None
        assert snap.statistics.rule.failure_rate == snap.statistics.rule.assumed


SCRIPT = """
import os, signal, sys
import torch, torch.distributed as dist
from holdfast import InMemorySnapshot

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, leaves = dist.get_rank(), int(sys.argv[1])
torch.manual_seed(rank)
model = torch.nn.Linear(8, 8)
optim = torch.optim.AdamW(model.parameters(), lr=0.01)
with InMemorySnapshot(model, optim) as snap:
    os.write(1, f"start {snap.step}\\n".encode())  # whole, although two ranks write
    for step in snap.steps(5):
        optim.zero_grad(); model(torch.randn(4, 8)).square().mean().backward(); optim.step()
        if step == 4 and rank == leaves:
            break
dist.destroy_process_group()
"""


@pytest.mark.cluster
def test_a_rank_that_leaves_early_keeps_the_snapshots_of_all(
    arena: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 breaks out of the last turn, and rank 0 reaches the end."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]

    def run(leaves: int) -> list[str]:
        done = completed([*launch, str(leaves)], timeout=180)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout.splitlines()

    assert run(1) == ["start 0"] * 2
    assert (arena / "test").exists()
    assert run(-1) == ["start 5"] * 2
    assert not (arena / "test").exists()


PREEMPTED = """
import os, signal
import torch
from holdfast import InMemorySnapshot

stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
model = torch.nn.Linear(4, 3)
optim = torch.optim.Adam(model.parameters())
with InMemorySnapshot(model, optim) as snap:
    print(snap.step)
    for step in snap.steps(6):
        optim.zero_grad(); model(torch.ones(2, 4)).sum().backward(); optim.step()
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        if stop:
            break
"""


def test_a_job_that_is_asked_to_stop_and_breaks_goes_on_when_it_is_queued_again(arena: Path) -> None:
    def start() -> str:
        return completed([sys.executable, "-c", PREEMPTED], check=True).stdout.strip()

    assert [start(), start()] == ["0", "4"]
    assert not (arena / "test").exists()
