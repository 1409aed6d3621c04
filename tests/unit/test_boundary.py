"""Where one step ends and the next begins, however the training loop is written."""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.jit._recursive
from torch.amp.grad_scaler import GradScaler

from holdfast import InMemorySnapshot
from holdfast.snapshot.step.boundary import Boundary
from holdfast.snapshot.step.hooks import ForwardHooks

STEP = ["before", "after"]


class Recorder:
    """Records the events that it is told of, and the sum of the weights at each."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.sums: list[float] = []
        self.weights: list[torch.Tensor] = []
        self.forwards: list[int] = []
        self.backwards: list[int] = []
        self.evaluations = 0

    def before_step(self) -> None:
        self._note("before")

    def after_step(self) -> None:
        self._note("after")

    def on_forward(self, number: int, given: Any) -> None:
        self.forwards.append(number)
        self._note("forward")

    def on_evaluation(self) -> None:
        self.evaluations += 1

    def on_backward(self, number: int) -> None:
        self.backwards.append(number)

    def _note(self, event: str) -> None:
        self.events.append(event)
        self.sums.append(sum(float(weight.detach().sum()) for weight in self.weights))

    def take(self) -> list[str]:
        """The events since the last call."""
        taken, self.events, self.sums = self.events, [], []
        return taken

    def graded(self) -> set[int]:
        """The forwards whose gradients were computed since the last call."""
        taken, self.backwards = set(self.backwards), []
        return taken


class Own(torch.optim.Optimizer):
    """A user's own optimizer."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ZeroDivisionError
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter -= parameter.grad
        return "stepped"


class Loop:
    """Models with one optimizer each, and their boundary."""

    def __init__(
        self,
        make: Callable[[Any], Any] = torch.optim.Adam,
        *,
        models: int = 1,
        scaler: GradScaler | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.models = [torch.nn.Linear(3, 2) for _ in range(models)]
        self.optims = [make(model.parameters()) for model in self.models]
        self.listener = Recorder()
        self.listener.weights = [parameter for model in self.models for parameter in model.parameters()]
        self.boundary = Boundary(self.optims, self.models, self.listener, [scaler] if scaler else [])

    def backward(self, which: int = 0, by: float = 1.0) -> None:
        (self.models[which](torch.ones(4, 3)).sum() * by).backward()

    def take(self) -> list[str]:
        return self.listener.take()


@pytest.fixture
def scaler() -> GradScaler:
    return GradScaler("cpu", init_scale=4.0)


def test_a_step_is_told_of_before_and_after_it_changes_the_weights() -> None:
    loop = Loop()
    for _ in range(3):
        loop.backward()
        began = loop.listener.sums[-1]
        loop.optims[0].step()
        (_, before, after) = loop.listener.sums
        assert (before == began) and (after != before)
        assert loop.take() == ["forward", *STEP]


def test_gradients_of_two_backwards_make_one_step() -> None:
    loop = Loop()
    for _ in range(2):
        loop.backward()
        loop.backward()
        loop.optims[0].step()
        assert loop.take() == ["forward", "forward", *STEP]


def test_a_model_that_is_part_of_another_tells_of_no_forward_of_its_own() -> None:
    inner = torch.nn.Linear(2, 2)
    model = torch.nn.Sequential(inner)
    listener = Recorder()
    Boundary([torch.optim.SGD(model.parameters())], [model], listener)
    model(torch.ones(1, 2))
    assert listener.take() == ["forward"]


# ------------------------------------------------------------------ what begins a step, and what is an evaluation


def boundary_of(*models: torch.nn.Module) -> Recorder:
    """The listener at the boundary of these models, with an optimizer over the first one's parameters."""
    listener = Recorder()
    Boundary([torch.optim.SGD(models[0].parameters())], models, listener)
    return listener


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode, None], ids=["no grad", "inference", "eval"])
def test_a_forward_in_eval_mode_or_without_gradients_begins_no_step(without: Callable[[], Any] | None) -> None:
    loop = Loop()
    loop.models[0].train(without is not None)
    with without() if without is not None else nullcontext():
        loop.models[0](torch.ones(1, 3)).sum()
    loop.models[0].train()
    assert loop.take() == []
    assert loop.listener.evaluations == 1
    loop.backward()
    assert loop.listener.forwards == [1]
    assert loop.listener.graded() == {1}


def test_gradients_that_are_computed_in_eval_mode_are_of_no_step() -> None:
    loop = Loop()
    loop.models[0].eval()
    loop.backward()
    assert loop.take() == []
    assert loop.listener.graded() == set()


def test_a_forward_in_training_mode_of_which_no_gradients_are_computed_has_a_number_of_its_own() -> None:
    loop = Loop()
    loop.models[0](torch.ones(1, 3))
    loop.backward()
    assert loop.listener.forwards == [1, 2]
    assert loop.listener.graded() == {2}


def test_one_backward_of_two_forwards_tells_of_both() -> None:
    """As in a siamese network."""
    loop = Loop()
    model = loop.models[0]
    left, right = model(torch.ones(1, 3)), model(torch.zeros(1, 3))
    (left - right).square().sum().backward()
    assert loop.take() == ["forward", "forward"]
    assert loop.listener.graded() == {1, 2}


@dataclass
class Output:
    """An output object like those that models of libraries return."""

    loss: torch.Tensor
    cached: Any = None


class Returning(torch.nn.Module):
    """Returns its result wrapped in something else."""

    def __init__(self, wrap: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self._wrap = wrap

    def forward(self) -> Any:
        return self._wrap(self.weight * 2)


@pytest.mark.parametrize(
    ("wrap", "loss"),
    [
        (lambda y: y, lambda out: out),
        (lambda y: (None, y), lambda out: out[1]),
        (lambda y: {"logits": [y]}, lambda out: out["logits"][0]),
        (lambda y: Output(y), lambda out: out.loss),
    ],
    ids=["tensor", "tuple", "dict", "dataclass"],
)
def test_gradients_are_noticed_whatever_a_model_returns(wrap: Any, loss: Any) -> None:
    model = Returning(wrap)
    listener = boundary_of(model)
    loss(model()).sum().backward()
    assert listener.graded() == {1}


def test_the_parts_of_a_dict_of_modules_tell_of_their_forwards() -> None:
    """The dict itself is never called, like Megatron's lists of model chunks."""
    models = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 2), "b": torch.nn.ModuleList([torch.nn.Linear(2, 1)])})
    listener = boundary_of(models)
    parts: Any = models
    parts["b"][0](parts["a"](torch.ones(1, 3))).sum().backward()
    assert listener.take() == ["forward", "forward"]
    assert listener.graded() == {1, 2}


def test_a_forward_that_fails_leaves_the_next_one_its_own_number() -> None:
    model = torch.nn.Linear(3, 2)
    listener = boundary_of(model)
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 4))
    model(torch.ones(1, 3)).sum().backward()
    assert listener.forwards == [1, 2]
    assert listener.graded() == {2}


def test_forwards_within_a_forward_have_numbers_of_their_own() -> None:
    """As when both a network and its backbone are listed."""
    inner = torch.nn.Linear(3, 2)
    outer = torch.nn.Sequential(inner, torch.nn.Linear(2, 1))
    listener = boundary_of(outer, inner)
    outer(torch.ones(1, 3)).sum().backward()
    assert listener.forwards == [1, 2]
    assert listener.graded() == {1, 2}


# ------------------------------------------------------------------ gradient scalers


def step_scaled(loop: Loop, scaler: GradScaler, losses: list[float]) -> list[str]:
    """Step every optimizer with the gradients of its loss; return the events that were recorded."""
    for which, loss in enumerate(losses):
        loop.optims[which].zero_grad()
        scaler.scale(loop.models[which](torch.ones(4, 3)).sum() * loss).backward()
    loop.take()
    for optim in loop.optims:
        scaler.step(optim)
    told = loop.take()
    scaler.update()
    assert loop.take() == []
    return told


fused = partial(torch.optim.Adam, fused=True)
"""An optimizer that handles the scaler's findings itself; the scaler calls its ``step`` in either case."""

INF = float("inf")


@pytest.mark.parametrize("make", [torch.optim.Adam, fused])
def test_a_scaled_step_is_one_boundary_whether_it_is_skipped_or_not(
    scaler: GradScaler, make: Callable[[Any], Any]
) -> None:
    loop = Loop(make, scaler=scaler)
    for loss in (1.0, INF, INF, 1.0, INF):
        weights = [parameter.detach().clone() for parameter in loop.models[0].parameters()]
        assert step_scaled(loop, scaler, [loss]) == STEP
        same = all(map(torch.equal, weights, loop.models[0].parameters()))
        assert same == (loss == INF)


@pytest.mark.parametrize("given", [True, False], ids=["given", "not given"])
@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "off"])
def test_a_scaler_that_was_not_given_is_told_of_once(
    caplog: pytest.LogCaptureFixture, given: bool, enabled: bool
) -> None:
    scaler = GradScaler("cpu", init_scale=4.0, enabled=enabled)
    loop = Loop(scaler=scaler if given else None)
    for _ in range(2):
        assert step_scaled(loop, scaler, [1.0]) == STEP
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (enabled and not given)
    assert all(re.search(r"a GradScaler steps \w+ and was not given", text) for text in said)


def test_gradients_may_be_unscaled_before_the_step(scaler: GradScaler) -> None:
    loop = Loop(scaler=scaler)
    for loss in (1.0, INF):
        scaler.scale(loop.models[0](torch.ones(4, 3)).sum() * loss).backward()
        scaler.unscale_(loop.optims[0])
        loop.take()
        scaler.step(loop.optims[0])
        assert loop.take() == STEP
        scaler.update()


@pytest.mark.parametrize("losses", [[1.0, 1.0], [INF, 1.0], [1.0, INF], [INF, INF]], ids=str)
def test_the_step_of_each_optimizer_is_told_of_whichever_is_skipped(scaler: GradScaler, losses: list[float]) -> None:
    loop = Loop(models=2, scaler=scaler)
    for _ in range(2):
        assert step_scaled(loop, scaler, losses) == 2 * STEP
        assert step_scaled(loop, scaler, [1.0, 1.0]) == 2 * STEP


def test_a_scaler_returns_what_the_optimizer_returns(scaler: GradScaler) -> None:
    loop = Loop(Own, scaler=scaler)
    scaler.scale(loop.models[0](torch.ones(4, 3)).sum()).backward()
    result: Any = scaler.step(loop.optims[0])
    assert result == "stepped"


# ------------------------------------------------------------------ several optimizers, closures, schedules


def test_an_optimizer_that_is_not_watched_is_none_of_ours() -> None:
    loop = Loop()
    other = torch.nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    torch.optim.Adam(other.parameters()).step()
    assert loop.take() == []


def test_a_closure_that_runs_the_model_many_times_is_one_step() -> None:
    loop = Loop(lambda parameters: torch.optim.LBFGS(parameters, 0.01, max_iter=4))
    target = torch.randn(4, 2)

    def closure() -> Any:
        loop.optims[0].zero_grad()
        loss: Any = (loop.models[0](torch.ones(4, 3)) - target).square().sum()
        loss.backward()
        return loss

    for _ in range(2):
        loop.optims[0].step(closure)
        told = loop.take()
        assert (told[0], told[-1]) == ("before", "after")
        assert len(told) > 3
        assert set(told[1:-1]) == {"forward"}


def test_a_schedule_may_be_made_before_or_after() -> None:
    model = torch.nn.Linear(3, 2)
    optim = torch.optim.SGD(model.parameters(), lr=1.0)
    early = torch.optim.lr_scheduler.StepLR(optim, 1)
    listener = Recorder()
    boundary = Boundary([optim], [model], listener)
    late = torch.optim.lr_scheduler.StepLR(optim, 1)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optim.step()
        early.step()
        late.step()
        assert listener.take() == ["forward", *STEP]
    boundary.remove()
    optim.step()
    assert listener.take() == []


def test_an_optimizer_that_builds_on_the_step_of_another_makes_one_step() -> None:
    """Torch wraps the ``step`` of every class that has been instantiated; here it wraps both."""

    class Clamping(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.clamp_(-0.125, 0.125)

    torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
    loop = Loop(Clamping)
    loop.backward()
    loop.optims[0].step()
    assert loop.listener.sums[-1] == sum(float(weight.detach().sum()) for weight in loop.listener.weights)
    assert loop.take() == ["forward", *STEP]


# ------------------------------------------------------------------ compiled models


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("what", ["train step", "optim.step", "model"])
def test_what_is_compiled_has_the_same_boundaries(what: str) -> None:
    loop = Loop()
    model, optim = loop.models[0], loop.optims[0]
    calls: dict[str, Callable[..., Any]] = {"model": model, "optim.step": optim.step}

    def train() -> None:
        optim.zero_grad()
        calls["model"](torch.ones(4, 3)).sum().backward()
        calls["optim.step"]()

    calls["train step"] = train
    calls[what] = torch.compile(calls[what], backend="eager")
    began = sum(float(weight.detach().sum()) for weight in loop.listener.weights)
    for _ in range(3):
        calls["train step"]()
        before, after = loop.listener.sums[-2:]
        assert began == before != after
        began = after
        assert [event for event in loop.take() if event != "forward"] == STEP


class Locking(Recorder):
    """A listener that does things no graph can contain."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def on_forward(self, number: int, given: Any) -> None:
        time.perf_counter()
        with self._lock:
            super().on_forward(number, given)

    def on_backward(self, number: int) -> None:
        time.perf_counter()
        with self._lock:
            super().on_backward(number)


@pytest.mark.usefixtures("compiling")
def test_a_model_can_be_compiled_to_one_graph() -> None:
    model = torch.nn.Linear(3, 2)
    optim = torch.optim.SGD(model.parameters(), lr=1.0)
    listener = Locking()
    Boundary([optim], [model], listener)
    torch.compile(model, backend="eager", fullgraph=True)(torch.ones(1, 3)).sum().backward()
    optim.step()
    assert [event for event in listener.take() if event != "forward"] == STEP


@pytest.mark.usefixtures("compiling", "arena")
def test_snapshots_of_a_compiled_train_step_are_whole() -> None:
    def job() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1))
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    def state(model: torch.nn.Module, optim: torch.optim.Optimizer) -> list[torch.Tensor]:
        tensors = [*model.state_dict().values(), *(v for held in optim.state.values() for v in held.values())]
        return [tensor.detach().clone() for tensor in tensors]

    model, optim = job()

    @torch.compile(backend="eager")
    def train(batch: torch.Tensor) -> None:
        optim.zero_grad()
        model(batch).square().sum().backward()
        optim.step()

    with InMemorySnapshot(model, optim, keep=True) as snap:
        for _ in snap.steps(5):
            train(torch.randn(4, 3))
            snap.drain(60)
        assert (snap.statistics.failed, snap.statistics.skipped) == (0, 0)
        kept = state(model, optim)
    again, other = job()
    with InMemorySnapshot(again, other) as snap:
        assert snap.step == 5
        assert all(map(torch.equal, state(again, other), kept))


# ------------------------------------------------------------------ optimizers without hooks


class Hookless:
    """Like Megatron's optimizers: contains a torch optimizer, and its ``step`` returns results."""

    def __init__(self, parameters: Any) -> None:
        self.optimizer = torch.optim.SGD(parameters)
        self.fails = False

    def step(self, scale: float = 1.0) -> tuple[bool, float]:
        if self.fails:
            raise ZeroDivisionError
        self.optimizer.step()
        return True, scale


def test_an_optimizer_without_hooks_has_its_boundaries_too() -> None:
    loop = Loop(Hookless)
    for _ in range(2):
        loop.backward()
        assert loop.optims[0].step(scale=3.0) == (True, 3.0)
        assert loop.optims[0].step(4.0) == (True, 4.0)
        assert loop.take() == ["forward", *STEP, *STEP]


class HookedLate(torch.optim.Optimizer):
    """Like timm's ``Lookahead``: it makes the lists of hooks itself, and ``zero_grad`` makes torch call them."""

    def __init__(self, parameters: Any) -> None:
        self.optimizer = torch.optim.SGD(parameters)
        self._optimizer_step_pre_hooks: Any = OrderedDict()
        self._optimizer_step_post_hooks: Any = OrderedDict()
        self.defaults = self.optimizer.defaults
        self.param_groups = self.optimizer.param_groups
        self.state = self.optimizer.state

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def test_steps_count_before_torch_calls_hooks_for_them_and_afterwards() -> None:
    loop = Loop(HookedLate)
    for _ in range(3):
        loop.backward()
        loop.optims[0].step()
        assert loop.take() == ["forward", *STEP]
        loop.optims[0].zero_grad()


@pytest.mark.parametrize("make", [torch.optim.Adam, Hookless])
def test_optimizers_step_in_any_order(make: Callable[[Any], Any]) -> None:
    loop = Loop(make, models=2)
    for which in (1, 0, 0, 1):
        loop.optims[which].step()
    assert loop.take() == STEP * 4


@pytest.mark.parametrize("make", [Own, Hookless])
def test_a_step_that_fails_ends_no_step_and_the_next_does(make: Callable[[Any], Any]) -> None:
    loop = Loop(make)
    loop.backward()
    loop.optims[0].fails = True
    with pytest.raises(ZeroDivisionError):
        loop.optims[0].step()
    assert loop.take() == ["forward", "before"]
    loop.optims[0].fails = False
    loop.optims[0].step()
    assert loop.take() == STEP


# ------------------------------------------------------------------ removal


@pytest.mark.parametrize("make", [torch.optim.Adam, Hookless])
def test_nothing_is_left_after_it_is_removed(scaler: GradScaler, make: Callable[[Any], Any]) -> None:
    model = torch.nn.Linear(3, 2)
    optim = make(model.parameters())
    watched: list[Any] = [model, optim, scaler]
    before = [attributes(owner) for owner in watched]
    listener = Recorder()
    boundary = Boundary([optim], [model], listener, [scaler])
    assert [attributes(owner) for owner in watched] != before
    for _ in range(2):
        boundary.remove()
        assert [attributes(owner) for owner in watched] == before
    model(torch.ones(1, 3)).sum().backward()
    optim.step()
    assert listener.take() == []


def attributes(owner: Any) -> dict[str, Any]:
    """The current attributes of an object."""
    return {name: dict(value) if isinstance(value, dict) else value for name, value in vars(owner).items()}


@pytest.mark.parametrize("what", ["optimizer", "scaler"])
def test_a_step_that_others_had_replaced_is_theirs_again(scaler: GradScaler, what: str) -> None:
    """Such as a timer: it is an attribute of the object, like our own replacement."""
    optim = Hookless(torch.nn.Linear(3, 2).parameters())
    owner: Any = optim if what == "optimizer" else scaler
    inner, calls = owner.step, []

    def timed(*args: Any, **kwargs: Any) -> Any:
        calls.append("timed")
        return inner(*args, **kwargs)

    owner.step = timed
    boundary = Boundary([optim], [], Recorder(), [scaler])
    boundary.remove()
    assert owner.step is timed


def test_two_boundaries_on_the_same_objects_come_off_in_turn(scaler: GradScaler) -> None:
    optim = Hookless(torch.nn.Linear(3, 2).parameters())
    first, second = Recorder(), Recorder()
    outer, inner = (Boundary([optim], [], each, [scaler]) for each in (first, second))
    optim.step()
    assert (first.take(), second.take()) == (STEP, STEP)
    inner.remove()
    optim.step()
    assert (first.take(), second.take()) == (STEP, [])
    outer.remove()
    optim.step()
    assert (first.take(), second.take()) == ([], [])
    assert "step" not in vars(optim) and "step" not in vars(scaler)


def test_hooks_that_do_not_come_off_in_turn_are_not_put_on_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.jit._recursive, "create_script_module", torch.jit._recursive.create_script_module)
    modules = [torch.nn.Linear(2, 2) for _ in range(2)]
    for each in [ForwardHooks([module], lambda *_: None, lambda *_: None) for module in modules]:
        each.remove()
    torch.jit.script(torch.nn.Linear(2, 2))
    assert not any(module._forward_pre_hooks for module in modules)
