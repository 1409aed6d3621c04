"""Optimizers that step a job's parameters but were not given are noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from holdfast import ConfigError, InMemorySnapshot
from holdfast.snapshot.state.optimizers import unwrapped
from holdfast.snapshot.state.steppers import Steppers
from tests.unit.test_optimizers import Ahead, Container, Sharpness, net, train


@contextmanager
def watching(model: nn.Module, *given: torch.optim.Optimizer) -> Iterator[Steppers]:
    steppers = Steppers(given, unwrapped(*given), model.parameters())
    try:
        yield steppers
    finally:
        steppers.remove()


def is_accepted(steppers: Steppers) -> bool:
    try:
        steppers.check()
    except ConfigError:
        return False
    return True


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def grads(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def test_an_optimizer_that_was_not_given_is_named() -> None:
    model = net()
    given, other = sgd(model[0]), torch.optim.Adam(model[1].parameters())  # type: ignore[index]
    with watching(model, given) as steppers:
        given.step()
        steppers.check()
        other.step()
        steppers.check()
        with pytest.raises(ConfigError, match=r"adam\.Adam steps 2 parameters.*Give it, too"):
            steppers.check()  # it is still there


def test_one_that_each_turn_makes_anew_leaves_nothing_to_the_next() -> None:
    """As Reptile's inner one."""
    model = net()
    with watching(model) as steppers:
        for _ in range(4):
            inner = sgd(model, momentum=0.9)
            inner.schedule = torch.optim.lr_scheduler.ExponentialLR(inner, 0.9)  # type: ignore[attr-defined]
            for _ in range(3):
                grads(model)
                inner.step()
            steppers.check()
        inner.step()
        with pytest.raises(ConfigError, match="SGD steps 4 parameters"):
            steppers.check()


def test_one_that_steps_views_of_the_parameters_is_named() -> None:
    """As optimizers do that keep all parameters in one flat tensor."""
    model = net()
    flat = torch.zeros(16, requires_grad=True)
    model[0].weight.data = flat.data.view(4, 4)  # type: ignore[index]
    with watching(model, sgd(model)) as steppers:
        other = torch.optim.SGD([flat], lr=0.1)
        other.step()
        steppers.check()
        other.step()
        with pytest.raises(ConfigError, match=r"SGD steps 1 parameters"):
            steppers.check()


def test_another_models_optimizer_is_nobodys_business_until_it_gets_a_parameter_of_this_one() -> None:
    model, another = net(), net()
    other = sgd(another)
    with watching(model, sgd(model)) as steppers:
        for _ in range(3):
            other.step()
            steppers.check()
        other.add_param_group({"params": [model[0].weight]})  # type: ignore[index]
        other.step()
        with pytest.raises(ConfigError, match="SGD steps 1 parameters"):
            steppers.check()


def test_a_wrapper_of_what_is_given_may_step_while_it_keeps_nothing_of_its_own() -> None:
    model = net()
    container = Container(model[0].parameters(), model[1].parameters())  # type: ignore[index]
    with watching(model, *container.optimizers) as steppers:
        for _ in range(3):
            container.step()
            steppers.check()
        container.state[model[0].weight]["average"] = torch.zeros(4, 4)  # type: ignore[index]
        container.step()
        steppers.check()
        container.step()
        with pytest.raises(ConfigError, match=r"Container steps 4 parameters"):
            steppers.check()


def test_a_wrapper_with_another_optimizer_beside_the_given_is_named() -> None:
    model = net()
    container = Container(model[0].parameters(), model[1].parameters())  # type: ignore[index]
    with watching(model, container.optimizers[0]) as steppers:
        container.step()
        steppers.check()
        container.step()
        with pytest.raises(ConfigError, match=r"Container steps 4 parameters"):
            steppers.check()


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda model: Container(model.parameters()), id="those inside it are found"),
        pytest.param(lambda model: Ahead(sgd(model)), id="torch calls no hooks for its step"),
    ],
)
def test_a_wrapper_that_is_given_may_step(wrap: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    model = net()
    wrapper = wrap(model)
    with watching(model, wrapper) as steppers:
        for _ in range(3):
            wrapper.step()
        assert is_accepted(steppers)


def test_a_wrapper_that_never_steps_is_refused_where_it_can_be_heard() -> None:
    """Like SAM, two of whose steps have other names, and which then steps its base optimizer."""
    model = net()
    sam = Sharpness(model.parameters())
    with watching(model, sam):
        grads(model)
        sam.base.step()
        with pytest.raises(ConfigError, match=r"Sharpness\.base steps, but"):
            sam.base.step()
    with watching(model, sam):
        sam.step()
        for _ in range(3):
            sam.base.step()


def test_after_the_end_nothing_is_left_behind() -> None:
    before = len(torch_optimizer._global_optimizer_pre_hooks), len(torch_optimizer._global_optimizer_post_hooks)
    model = net()
    with watching(model, sgd(model)) as steppers:
        assert len(torch_optimizer._global_optimizer_post_hooks) == before[1] + 1
    torch.optim.Adam(model.parameters()).step()
    steppers.check()
    steppers.remove()
    assert before == (
        len(torch_optimizer._global_optimizer_pre_hooks),
        len(torch_optimizer._global_optimizer_post_hooks),
    )


def test_a_job_is_told_at_its_first_steps(arena: Path) -> None:
    model = net()
    given, other = sgd(model[0]), torch.optim.Adam(model[1].parameters())  # type: ignore[index]

    class Both:
        def step(self) -> None:
            other.step()
            given.step()

        def zero_grad(self) -> None:
            model.zero_grad()

    with (
        pytest.raises(ConfigError, match=r"adam\.Adam steps 2 parameters"),
        InMemorySnapshot(model, given) as snap,
    ):
        train(snap, model, Both(), 3)
    assert not torch_optimizer._global_optimizer_post_hooks


class Outer:
    """Every second step an outer optimizer moves an anchor, and the model begins there again."""

    def __init__(self, model: nn.Module) -> None:
        self.steps = 0
        self.anchor = [each.detach().clone() for each in model.parameters()]
        self.optim = torch.optim.SGD(self.anchor, lr=0.7, momentum=0.9)
        self.model = model

    def step(self) -> None:
        self.steps += 1
        if self.steps % 2:
            return
        for held, inner in zip(self.anchor, self.model.parameters(), strict=True):
            held.grad = held - inner.detach()
        self.optim.step()
        with torch.no_grad():
            for held, inner in zip(self.anchor, self.model.parameters(), strict=True):
                inner.copy_(held)


def tried(model: nn.Module) -> None:
    """An optimizer that is made for each turn."""
    trial = [each.detach().clone() for each in model.parameters()]
    for each in trial:
        each.grad = torch.ones_like(each)
    torch.optim.SGD(trial, lr=0.1).step()


@pytest.mark.usefixtures("arena")
@pytest.mark.parametrize("given", [False, True])
def test_an_outer_optimizer_is_named_once_unless_it_is_given(given: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    optim, outer = sgd(model), Outer(model)
    snap = InMemorySnapshot(model, [optim, outer.optim] if given else optim)
    if given:
        snap.track("steps", get=lambda: outer.steps, set=lambda value: setattr(outer, "steps", value))
    with snap:
        for _ in snap.steps(8):
            tried(model)
            optim.zero_grad()
            model(torch.randn(2, 4)).sum().backward()
            optim.step()
            outer.step()
    said = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert [each for each in said if "not of this job's model (4)" in each][1:] == []
    assert any("not of this job's model (4)" in each for each in said) is not given
    assert any(each.startswith("outer.steps (line") for each in said) is not given


@pytest.mark.usefixtures("arena")
def test_what_another_hook_was_given_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    models = net(), net()
    optims = [sgd(each) for each in models]
    with InMemorySnapshot(models[0], optims[0]) as snap, InMemorySnapshot(models[1], optims[1], job="another") as other:
        for _ in range(4):
            snap.begin()
            other.begin()
            for model, optim in zip(models, optims, strict=True):
                optim.zero_grad()
                model(torch.randn(2, 4)).sum().backward()
                optim.step()
    assert not any("tensors that are not of this job" in each.getMessage() for each in caplog.records)
