"""State that callbacks keep in attributes: averages are in the snapshot; any other that changes is named once."""

from __future__ import annotations

import copy
import io
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.hook import SettledSnapshot
from holdfast.integrations.callbacks import LARGEST, CallbackState, _items


class Callback:
    """Stands for the framework's class."""


Callback.__module__ = "framework.callbacks"


class Holder:
    """Is no plain value."""

    def __init__(self) -> None:
        self.it = [torch.zeros(3)]


class Average(Callback):
    """Keeps an average in one of several ways."""

    def __init__(self, model: torch.nn.Module, kind: str) -> None:
        self.model = model
        self.best_score: torch.Tensor | None = None
        self.seen: list[int] = []
        self.file: Any = None
        self.average: Any = copy.deepcopy(model)
        if kind == "dict":
            self.average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        if kind == "list":
            self.average = [self.average]
        if kind == "deeper":
            self.average = Holder()

    def tensors(self) -> list[torch.Tensor]:
        average = self.average[0] if isinstance(self.average, list) else self.average
        if isinstance(average, torch.nn.Module):
            return list(average.parameters())
        return average.it if isinstance(average, Holder) else list(average.values())

    def update(self, by: float) -> None:
        with torch.no_grad():
            for tensor in self.tensors():
                tensor.add_(by)


Entered = tuple[SettledSnapshot, torch.nn.Module, torch.optim.Optimizer, CallbackState]


def entered(kind: str, callbacks: list[Average], state_of: Callable[[Any], Any] = lambda callback: None) -> Entered:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optim = torch.optim.Adam(model.parameters())
    callbacks += [Average(model, kind), Average(model, kind)]
    snap = SettledSnapshot(model, optim)
    overlooked = CallbackState(snap, callbacks, Callback, state_of)
    snap.__enter__()
    return snap, model, optim, overlooked


def train(job: Entered) -> None:
    snap, model, optim, overlooked = job
    snap.settle()
    overlooked.look()
    model(torch.ones(1, 3)).sum().backward()
    snap.drain(60)  # without this, such short steps would be skipped while snapshots are being sealed
    optim.step()
    optim.zero_grad()


def killed(job: Entered, caplog: pytest.LogCaptureFixture) -> None:
    """End a job that has told nothing of what no snapshot holds, once all that it did is in one."""
    snap, *_ = job
    snap.settle()
    assert snap.drain(60)
    assert "by no snapshot" not in caplog.text
    snap.__exit__(RuntimeError, RuntimeError("killed"), None)


@pytest.mark.parametrize("kind", ["module", "dict", "list"])
def test_an_average_goes_with_the_snapshot_and_is_not_overlooked(
    arena: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    first: list[Average] = []
    job = entered(kind, first)
    for _ in range(4):
        train(job)
        for by, average in enumerate(first, 1):
            average.update(by)
    killed(job, caplog)
    second: list[Average] = []
    snap, *_ = entered(kind, second)
    assert snap.step == 4
    for ended, found in zip(first, second, strict=True):
        for before, after in zip(ended.tensors(), found.tensors(), strict=True):
            assert torch.equal(before, after)
    snap.close()


def test_what_a_callback_counts_goes_with_the_snapshot_unless_it_tells_of_a_file(
    arena: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first: list[Average] = []
    job = entered("module", first)
    counting, writing = first
    for step in range(4):
        train(job)
        counting.best_score = torch.tensor(float(step))
        counting.seen = [*counting.seen, step]
        writing.seen, writing.file = [step], io.StringIO()
    killed(job, caplog)
    second: list[Average] = []
    snap, *_ = entered("module", second)
    assert second[0].seen == [0, 1, 2, 3] and second[0].best_score == 3.0
    assert second[1].seen == [] and second[1].file is None
    snap.close()


@pytest.mark.parametrize("look", [2, 4, 8])
def test_what_changes_and_is_held_by_no_snapshot_is_named_once(
    arena: Path, look: int, caplog: pytest.LogCaptureFixture
) -> None:
    callbacks: list[Average] = []
    snap, _, _, overlooked = entered("deeper", callbacks)
    for turn in range(1, 40):
        if turn == look:
            assert "by no snapshot" not in caplog.text
            callbacks[1].update(1)
        if turn > look:
            callbacks[0].update(1)
        overlooked.look()
    assert caplog.text.count("by no snapshot") == 1
    assert "Average-2.average.it[0]: " in caplog.text
    snap.close()


def test_what_a_callback_says_of_itself_is_not_overlooked(arena: Path, caplog: pytest.LogCaptureFixture) -> None:
    callbacks: list[Average] = []
    snap, _, _, overlooked = entered("module", callbacks, lambda callback: {"best": callback.best_score})
    for turn in range(8):
        callbacks[0].best_score = torch.tensor(float(turn))
        overlooked.look()
    assert "by no snapshot" not in caplog.text
    snap.close()


@pytest.mark.parametrize("value", [np.zeros(LARGEST + 1, np.uint8), [0] * 1_000_000, dict.fromkeys(range(1_000_000))])
def test_what_is_too_large_to_be_captured_is_not_copied_at_each_step(value: Any) -> None:
    tracemalloc.start()
    try:
        assert _items(value) is None
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
