"""State that callbacks keep in attributes: averages are in the snapshot; any other that changes is named once."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.hook import SettledSnapshot
from holdfast.integrations.callbacks import Overlooked, keep_averages


class Average:
    """Keeps an average in one of several ways."""

    def __init__(self, model: torch.nn.Module, kind: str) -> None:
        self.model = model
        self.best_score: torch.Tensor | None = None
        self.average: Any = copy.deepcopy(model)
        if kind == "dict":
            self.average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        if kind == "list":
            self.average = [self.average]
        if kind == "deeper":
            self.average = {"of": {"it": [torch.zeros(3)]}}

    def tensors(self) -> list[torch.Tensor]:
        average = self.average[0] if isinstance(self.average, list) else self.average
        if isinstance(average, torch.nn.Module):
            return list(average.parameters())
        return [average["of"]["it"][0]] if "of" in average else list(average.values())

    def update(self, by: float) -> None:
        with torch.no_grad():
            for tensor in self.tensors():
                tensor.add_(by)


def entered(kind: str, callbacks: list[Average]) -> tuple[SettledSnapshot, torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optim = torch.optim.Adam(model.parameters())
    callbacks += [Average(model, kind), Average(model, kind)]
    snap = SettledSnapshot(model, optim)
    keep_averages(snap, callbacks)
    snap.__enter__()
    return snap, model, optim


@pytest.mark.parametrize("kind", ["module", "dict", "list"])
def test_an_average_goes_with_the_snapshot_and_is_not_overlooked(
    arena: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    first: list[Average] = []
    snap, model, optim = entered(kind, first)
    overlooked = Overlooked(snap, first)
    for _ in range(4):
        snap.settle()
        overlooked.look()
        model(torch.ones(1, 3)).sum().backward()
        snap.drain(60)  # without this, such short steps would be skipped while snapshots are being sealed
        optim.step()
        optim.zero_grad()
        for by, average in enumerate(first, 1):
            average.update(by)
    snap.settle()
    assert snap.drain(60)
    assert "by no snapshot" not in caplog.text
    snap.__exit__(RuntimeError, RuntimeError("killed"), None)

    second: list[Average] = []
    snap, _, _ = entered(kind, second)
    assert snap.step == 4
    for ended, found in zip(first, second, strict=True):
        for before, after in zip(ended.tensors(), found.tensors(), strict=True):
            assert torch.equal(before, after)
    snap.close()


@pytest.mark.parametrize("look", [2, 4, 8])
def test_what_changes_and_is_held_by_no_snapshot_is_named_once(
    arena: Path, look: int, caplog: pytest.LogCaptureFixture
) -> None:
    callbacks: list[Average] = []
    snap, _, _ = entered("deeper", callbacks)
    overlooked = Overlooked(snap, callbacks)
    for turn in range(1, 40):
        if turn == look:
            assert "by no snapshot" not in caplog.text
            callbacks[1].update(1)
        if turn > look:
            callbacks[0].update(1)
        overlooked.look()
    assert caplog.text.count("by no snapshot") == 1
    assert "Average-2.average['of']['it'][0]: " in caplog.text
    snap.close()


def test_what_a_callback_says_of_itself_is_not_overlooked(arena: Path, caplog: pytest.LogCaptureFixture) -> None:
    callbacks: list[Average] = []
    snap, _, _ = entered("module", callbacks)
    overlooked = Overlooked(snap, callbacks, lambda callback: {"best": callback.best_score})
    for turn in range(8):
        callbacks[0].best_score = torch.tensor(float(turn))
        overlooked.look()
    assert "by no snapshot" not in caplog.text
    snap.close()
