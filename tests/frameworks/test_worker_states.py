"""The places that workers of torchdata's loader report."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset, get_worker_info

from holdfast import InMemorySnapshot
from holdfast.snapshot.state.worker_states import copy_worker_states
from tests.unit.test_beginning import STEPS, Job, trial, warnings_of

torchdata = pytest.importorskip("torchdata.stateful_dataloader")


PATIENCE_S = 2.0
"""How long a state waits until its worker reads on. The last ones wait for nothing."""


class Late:
    """Is pickled only when the worker has read on."""

    def __init__(self, reads_on: threading.Event) -> None:
        self._reads_on = reads_on

    def __deepcopy__(self, _: Any) -> Late:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        self._reads_on.wait(PATIENCE_S)
        return str, ()


class Growing(IterableDataset[int]):
    """Its state has a list that it appends to."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.begun_by: int | None = None
        self.reads_on: threading.Event | None = None  # of the state that was asked for last

    def __iter__(self) -> Iterator[int]:
        while True:
            self.read.append(len(self.read))
            if self.reads_on is not None:
                self.reads_on.set()
            yield self.read[-1]

    def state_dict(self) -> dict[str, Any]:
        self.reads_on = threading.Event()
        last = self.read[-1] if self.read else None
        return {"late": Late(self.reads_on), "read": self.read, "last": last, "begun by": self.begun_by}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read = state["read"]


def begin(worker: int) -> None:
    """Called in each worker."""
    info: Any = get_worker_info()
    info.dataset.begun_by = worker


class Data:
    """A job's data, with a loader in it."""

    def __init__(self, loader: Any) -> None:
        self.train = loader

    def state_dict(self) -> dict[str, Any]:
        return {"train": self.train.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.train.load_state_dict(state["train"])


def as_extra(loader: Any, hook: Callable[..., InMemorySnapshot]) -> None:
    hook(extra={"loader": loader})


def within_an_extra(loader: Any, hook: Callable[..., InMemorySnapshot]) -> None:
    hook(extra={"data": Data(loader)})


def tracked(loader: Any, hook: Callable[..., InMemorySnapshot]) -> None:
    hook().track("loader", get=loader.state_dict, set=loader.load_state_dict)


def by_an_integration(loader: Any, hook: Callable[..., InMemorySnapshot]) -> None:
    copy_worker_states(loader)
    as_extra(loader, hook)


@pytest.mark.parametrize("given", [as_extra, within_an_extra, tracked, by_an_integration])
def test_a_worker_sends_its_state_as_it_was_with_the_batch(given: Callable[[Any, Any], None], tmp_path: Path) -> None:
    loader = torchdata.StatefulDataLoader(Growing(), batch_size=None, num_workers=1, worker_init_fn=begin)
    model = torch.nn.Linear(1, 1)
    given(loader, partial(InMemorySnapshot, model, torch.optim.SGD(model.parameters()), job="workers", arena=tmp_path))
    batches = iter(loader)
    for expected in range(4):
        assert next(batches) == expected
        (state,) = loader.state_dict()["_snapshot"]["_worker_snapshots"].values()
        assert (state["dataset_state"]["last"], state["dataset_state"]["begun by"]) == (expected, 0)
        assert state["dataset_state"]["read"] == list(range(expected + 1))


def test_other_loaders_are_left_alone() -> None:
    loader = torchdata.StatefulDataLoader(Growing(), batch_size=None)
    copy_worker_states(loader)
    copy_worker_states([1, 2])
    assert loader.worker_init_fn is None


class Reading(Job):
    """Has a loader that reports its place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)  # the loader's sampler draws as it is made
        rows = TensorDataset(torch.arange(160.0).reshape(40, 4) / 160)
        self.loader = torchdata.StatefulDataLoader(rows, 2, shuffle=True)

    def hook(self) -> InMemorySnapshot:
        return InMemorySnapshot(self.model, self.optim, scheduler=self.schedule, extra={"loader": self.loader})


def reading_on(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    batches = iter(vars(job)["loader"])
    for _ in snap.steps(STEPS):
        job.model(next(batches)[0]).square().sum().backward()
        yield
        job.optim.step()
        job.optim.zero_grad()
        job.schedule.step()


@pytest.mark.usefixtures("arena")
def test_a_loader_that_is_given_is_read_on_in_the_script_s_own_iterator(caplog: pytest.LogCaptureFixture) -> None:
    """It is not said that a restart begins that anew, as it is of another loader's."""
    trial(reading_on, Reading)
    assert not [text for text in warnings_of(caplog) if "iterator" in text or "read on" in text]
