"""State in plain attributes: found, and tracked where its class is registered."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast import ConfigError, InMemorySnapshot, register
from holdfast.snapshot.state.hidden import unregister, untracked


class Centred(torch.nn.Module):
    """Keeps a running mean and a count in attributes where nobody looks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.alias = self.weight.detach()[1:]
        self.means = {"x": torch.zeros(3)}
        self.history: list[Any] = [[np.zeros(2)], 5]
        self.noise = torch.Generator().manual_seed(1)
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.means["x"] += x.detach().mean(0)
        return (x - self.means["x"]) * self.weight


@pytest.fixture
def centred() -> Iterator[None]:
    register(
        Centred,
        get=lambda module: module.count,
        set=lambda module, count: setattr(module, "count", count),
        tensors=lambda module: module.means,
    )
    yield
    unregister(Centred)


def job() -> tuple[Any, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), Centred(), Centred())
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(snap: InMemorySnapshot, model: torch.nn.Module, optim: torch.optim.Optimizer) -> None:
    torch.autograd.backward(model(torch.ones(4, 2)).sum())
    snap.drain(60)
    optim.step()
    optim.zero_grad()


def test_tensors_in_attributes_are_found_and_what_is_captured_is_not() -> None:
    model, optim = job()
    vars(optim)["momentum_of_mine"] = {"w": torch.zeros(2)}
    found = untracked([("model0", model), ("optim0", optim)], model.parameters())
    of_one = ["means['x']", "history[0][0]", "noise"]
    assert found == [*(f"model0.{i}.{name}" for i in (1, 2) for name in of_one), "optim0.momentum_of_mine['w']"]


def test_the_hook_reports_what_it_does_not_capture(arena: Path) -> None:
    model, optim = job()
    snap = InMemorySnapshot(model, optim)
    snap.track("means", tensors=model[1].means)
    with snap:
        assert "model0.1.means['x']" not in snap.untracked
        assert "model0.2.means['x']" in snap.untracked


def test_what_a_registered_class_keeps_comes_back(arena: Path, centred: None) -> None:
    model, optim = job()
    snap = InMemorySnapshot(model, optim, strict=True).__enter__()
    for _ in range(3):
        step(snap, model, optim)
    before = [(model[i].count, model[i].means["x"].clone()) for i in (1, 2)]
    model(torch.ones(4, 2))  # begins the fourth step: the state before it is snapshot 3
    assert snap.drain(60)
    snap.__exit__(RuntimeError, RuntimeError("killed"), None)

    model, optim = job()
    with InMemorySnapshot(model, optim, strict=True) as snap:
        assert snap.step == 3
        for i, (count, mean) in zip((1, 2), before, strict=True):
            assert model[i].count == count
            assert torch.equal(model[i].means["x"], mean)


def test_a_class_is_registered_once_and_rightly(centred: None) -> None:
    with pytest.raises(ConfigError, match="Centred is registered already"):
        register(Centred, tensors=lambda module: module.means)
    with pytest.raises(ConfigError, match="set is missing"):
        register(torch.nn.Linear, get=lambda module: 1)


class Skipping(torch.nn.Module):
    """Skips half of what it is given, by generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mine, self.numpys, self.unused = random.Random(3), np.random.RandomState(3), random.Random(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.mine.random() < 0.5) + float(self.numpys.rand())


def skip(snap: InMemorySnapshot, model: torch.nn.Module, optim: torch.optim.Optimizer) -> None:
    with snap:
        for _ in snap.steps(4):
            model(torch.ones(4, 2)).sum().backward()
            optim.step()
            optim.zero_grad()


def test_a_generator_of_a_module_that_is_drawn_from_is_named(arena: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), Skipping())
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    skip(InMemorySnapshot(model, optim), model, optim)
    assert [text for text in warnings_of(caplog) if "drawn from, but not captured" in text] == [
        "model0.1.mine; model0.1.numpys: drawn from, but not captured, so a restart draws other numbers: name it by "
        "snap.track"
    ]


def test_a_generator_of_a_module_that_is_tracked_is_not_named(arena: Path, caplog: pytest.LogCaptureFixture) -> None:
    skipping = Skipping()
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), skipping)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    snap = InMemorySnapshot(model, optim)
    snap.track("mine", get=skipping.mine.getstate, set=lambda state: skipping.mine.setstate(state))
    snap.track("numpys", get=lambda: skipping.numpys.get_state(legacy=False), set=skipping.numpys.set_state)
    skip(snap, model, optim)
    assert not any("drawn from" in text for text in warnings_of(caplog))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
