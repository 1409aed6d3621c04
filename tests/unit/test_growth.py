"""State that grows in training: what a restart makes again by itself, what the script makes, and what is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from holdfast import ConfigError, InMemorySnapshot, StateMismatch
from holdfast.snapshot.state.live import At
from tests.unit.test_beginning import STEPS, Job, Loop, stopped, warnings_of

pytestmark = pytest.mark.usefixtures("arena")


class Growing(nn.Module):
    """A cache that grows with the longest input, as rotary embeddings have."""

    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.ones(4, 8), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if len(inputs) > len(self.cache):
            self.register_buffer("cache", torch.arange(len(inputs) * 8).view(-1, 8) / 100, persistent=False)
        return inputs * self.cache[: len(inputs)]


class Lazy(nn.Module):
    """A running scale that the first forward makes."""

    scale: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", None)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        now = inputs.detach().abs().amax(0)
        self.scale = now if self.scale is None else self.scale.lerp(now, 0.1)
        return inputs / (self.scale + 1)


class Observing(nn.Module):
    """Buffers without elements, which the first forward resizes, as torch.ao's observers."""

    least: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("least", torch.tensor([]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        now = inputs.detach().amin(0)
        if not self.least.numel():
            self.least.resize_(now.shape)
            self.least.copy_(now)
        self.least.copy_(torch.minimum(now, self.least))
        return inputs - self.least


def job_with(layer: Callable[[], nn.Module]) -> Callable[[], Job]:
    return lambda: Job(layer())


def longer(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    for step in snap.steps(STEPS):
        job.model(torch.randn(3 + step, 4)).square().sum().backward()
        yield
        job.step()


@pytest.mark.parametrize("stop", [2, 3, 5])
@pytest.mark.parametrize("layer", [Growing, Lazy, Observing])
def test_buffers_get_the_shapes_that_they_had(layer: Callable[[], nn.Module], stop: int) -> None:
    model = job_with(layer)
    start, *_ = stopped(longer, model, stop)
    assert start >= 1


class Frozen(Job):
    """The first layer is unfrozen in training, and joins the optimizer as a group."""

    def __init__(self) -> None:
        super().__init__()
        self.model[0].requires_grad_(False)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optim = torch.optim.Adam(trained, lr=0.05)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optim, 0.9)

    def unfreeze(self) -> None:
        self.model[0].requires_grad_(True)
        self.optim.add_param_group({"params": list(self.model[0].parameters()), "lr": 0.01})
        self.schedule.base_lrs.append(0.01)


def after_two_steps(change: Callable[[Any], None]) -> Loop:
    def loop(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
        for step in snap.steps(STEPS):
            if step == 2:
                change(job)
            job.backward()
            yield
            job.step()

    return loop


@pytest.mark.parametrize("stop", [2, 6])
def test_groups_that_were_added_are_made_again(stop: int, caplog: pytest.LogCaptureFixture) -> None:
    start, *_ = stopped(after_two_steps(Frozen.unfreeze), Frozen, stop)
    assert (start > 2) is (stop == 6)
    assert not [text for text in warnings_of(caplog) if "rebuild" in text]


class Grown(Job):
    """A layer is inserted in training."""

    def hook(self) -> InMemorySnapshot:
        snap = InMemorySnapshot(self.model, self.optim, scheduler=self.schedule)
        if self.tells:
            snap.rebuild(self.rebuild)
        return snap

    tells = True

    def rebuild(self, at: At) -> None:
        if at.step > 2:
            self.insert()

    def insert(self) -> None:
        layer = nn.Linear(8, 8)
        self.model.insert(1, layer)
        self.optim.add_param_group({"params": list(layer.parameters())})
        self.schedule.base_lrs.append(0.05)

    def step(self) -> None:
        self.optim.step()
        self.optim.zero_grad()
        self.schedule.step()


class Silent(Grown):
    tells = False


def test_a_script_makes_again_what_it_had_added_to_the_model() -> None:
    start, *_ = stopped(after_two_steps(Grown.insert), Grown, 6)
    assert start > 2


class Failing(Grown):
    def rebuild(self, at: At) -> None:
        dict[str, int]()["adapters"]


def test_an_error_of_the_script_is_none_of_the_snapshot() -> None:
    with pytest.raises(ConfigError, match=r"snap\.rebuild .*adapters"):
        stopped(after_two_steps(lambda job: None), Failing, 6)


def test_who_does_not_say_how_is_told_as_it_is_added(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(StateMismatch):
        stopped(after_two_steps(Grown.insert), Silent, 6)
    said = [text for text in warnings_of(caplog) if "snap.rebuild" in text]
    assert said and "model0" in said[0]


def test_it_is_said_before_the_hook_is_entered() -> None:
    job = Job()
    with job.hook() as snap, pytest.raises(ConfigError, match="before"):
        snap.rebuild(print)
