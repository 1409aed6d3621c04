"""Which ranks keep the others waiting, and by what that is told."""

from __future__ import annotations

import multiprocessing
import os
import re
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel

from holdfast.smp_daemon.shared.stragglers import UNKNOWN, Own, stragglers
from holdfast.snapshot.step.own_time import STEPS_KEPT, OwnTime
from tests.deadlines import DEADLINE_S

FAST = Own(step_s=1.0, data_s=0.02, work_s=0.4)


@pytest.mark.parametrize(
    ("slow", "named"),
    [
        (Own(1.0, 0.02, 0.65), "650 ms on its own work"),
        (Own(1.0, 0.5, 0.88), "500 ms reading data"),
        (Own(1.0, 0.5, 0.0), "500 ms reading data"),
        (Own(1.0, 0.02, 0.59), ""),
        (Own(10.0, 0.02, 1.3), ""),
        (UNKNOWN, ""),
    ],
    ids=["work", "data", "data on a GPU", "too little more than others", "too little of a step", "unknown"],
)
@pytest.mark.parametrize("others", [1, 2, 63])
def test_a_rank_is_named_that_is_slower_than_most_by_much_of_a_step(slow: Own, named: str, others: int) -> None:
    found = stragglers({"slow": slow} | {f"rank {i}": FAST for i in range(others)})
    assert len(found) == bool(named)
    assert all(re.match(f"slow is {named} .* 1 s; .*", text) for text in found)


def test_the_slowest_comes_first_and_half_the_ranks_may_be_slow() -> None:
    owns = {"a": FAST, "b": Own(1.0, 0.0, 0.8), "c": FAST, "d": Own(1.0, 0.0, 0.9)}
    assert [text[0] for text in stragglers(owns)] == ["d", "b"]
    assert stragglers({}) == stragglers({"a": UNKNOWN}) == stragglers({"a": FAST, "b": FAST}) == []


class Rank:
    """A rank whose clock is set by hand."""

    def __init__(self, device: str = "cpu") -> None:
        self.now = self.read_s = 0.0
        self.model = torch.nn.Linear(2, 1, device=device)
        self.own = OwnTime([self.model], lambda: self.now, lambda: self.read_s)

    def step(self, data_s: float, work_s: float, others_s: float) -> Own:
        self.now += data_s
        self.read_s += data_s
        for _ in range(2):  # micro-batches
            loss = self.model(torch.ones(1, 2, device=self.model.weight.device)).sum()
            self.now += work_s / 2
            loss.backward()
        self.now += others_s
        self.own.step_ended()
        return self.own.own()


def test_waiting_for_others_is_no_work_of_its_own() -> None:
    rank = Rank()
    assert rank.step(9.0, 9.0, 9.0) == UNKNOWN, "the first step is like no other"
    assert rank.step(0.25, 0.5, 1.0) == Own(step_s=1.75, data_s=0.25, work_s=0.75)


def test_what_happens_now_and_then_makes_nobody_slow() -> None:
    rank = Rank()
    for number in range(STEPS_KEPT):
        own = rank.step(0.25, 30.0 if number % 5 == 4 else 0.5, 1.0)
    assert own == Own(1.75, 0.25, 0.75)
    for _ in range(STEPS_KEPT):
        own = rank.step(0.25, 2.0, 0.0)
    assert own.work_s == 2.25, "what is slow now is told soon"


def test_when_a_device_has_computed_is_not_known() -> None:
    rank = Rank("meta")
    rank.step(0.25, 0.5, 1.0)
    assert rank.step(0.25, 0.5, 1.0) == Own(1.75, 0.25, 0.0)


def test_in_ddp_no_rank_has_waited_for_others_by_then(tmp_path: Path) -> None:
    """The other rank computes no gradient before this one's work is over."""
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_train, args=(str(tmp_path / "store"), each)) for each in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(DEADLINE_S)
    assert [each.exitcode for each in ranks] == [0, 0]


def _train(path: str, rank: int) -> None:
    store = FileStore(path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=DEADLINE_S))
    model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8))), bucket_cap_mb=0)

    def now() -> float:
        if rank == 1:
            store.set("computed", "")
        return 0.0

    own = OwnTime([model], now, lambda: 0.0)
    loss = model(torch.ones(1, 64)).sum()
    if rank == 0:
        store.wait(["computed"], timedelta(seconds=DEADLINE_S / 2))
    loss.backward()
    own.step_ended()
    os._exit(0)  # freeing the group may wait for gloo's threads


def test_nothing_stays_on_the_parameters() -> None:
    rank = Rank()
    rank.own.remove()
    assert not rank.model.weight._backward_hooks
