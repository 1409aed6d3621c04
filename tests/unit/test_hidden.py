"""State in plain attributes: found, and tracked where its class is registered."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from holdfast import ConfigError, InMemorySnapshot, StateMismatch, register
from holdfast.snapshot.copy.tensors import memory_of
from holdfast.snapshot.state import hidden
from holdfast.snapshot.state.hidden import generators, sample_of, untracked
from holdfast.snapshot.state.libraries import stands_alone
from tests.deadlines import DEADLINE_S
from tests.unit.test_beginning import warnings_of
from tests.unit.test_optimizer_kinds import Rough


class Centred(torch.nn.Module):
    """Keeps a running mean and a count in attributes where nobody looks."""

    def parameters(self) -> Any:  # type: ignore[override]
        return [self.weight]  # some modules' own take no arguments

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
def centred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden, "_registry", {})
    register(
        Centred,
        get=lambda module: module.count,
        set=lambda module, count: setattr(module, "count", count),
        tensors=lambda module: module.means,
    )


def job() -> tuple[Any, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), Centred(), Centred())
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(snap: InMemorySnapshot, model: torch.nn.Module, optim: torch.optim.Optimizer) -> None:
    torch.autograd.backward(model(torch.ones(4, 2)).sum())
    snap.drain(60)
    optim.step()
    optim.zero_grad()


def trained(snap: InMemorySnapshot, model: torch.nn.Module, optim: torch.optim.Optimizer, steps: int) -> None:
    with snap:
        for _ in range(steps):
            step(snap, model, optim)


def named(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The names in each line about attributes that steps change."""
    said = [text for text in warnings_of(caplog) if "changed by steps, and not captured" in text]
    return [text.partition(":")[0] for text in said]


def test_tensors_in_attributes_are_found_and_what_is_captured_is_not() -> None:
    model, optim = job()
    vars(optim)["momentum_of_mine"] = {"w": torch.zeros(2)}
    found = untracked([("model0", model), ("optim0", optim)], set(map(memory_of, model.parameters())))
    of_one = ["means['x']", "history[0][0]", "noise"]
    assert found == sorted([*(f"model0.{i}.{n}" for i in (1, 2) for n in of_one), "optim0.momentum_of_mine['w']"])


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
    torch.autograd.backward(model(torch.ones(4, 2)).sum())  # the state before the fourth step is snapshot 3
    assert snap.drain(60)
    snap.__exit__(RuntimeError, RuntimeError("killed"), None)

    model, optim = job()
    with InMemorySnapshot(model, optim, strict=True) as snap:
        assert snap.step == 3
        for i, (count, mean) in zip((1, 2), before, strict=True):
            assert model[i].count == count
            assert torch.equal(model[i].means["x"], mean)


def test_a_class_is_registered_once_and_rightly(centred: None) -> None:
    with pytest.raises(ConfigError, match="Centred is registered"):
        register(Centred, tensors=lambda module: module.means)
    with pytest.raises(ConfigError, match="set is missing"):
        register(torch.nn.Linear, get=lambda module: 1)


class Skipping(torch.nn.Module):
    """Skips half of what it is given, by generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mine, self.others = random.Random(3), {"numpy": np.random.RandomState(3)}
        self.seed = random.SystemRandom()  # has no state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.mine.random() < 0.5) + float(self.others["numpy"].rand())


class Noisy(torch.optim.SGD):
    """Adds noise to gradients, by generators of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.noise, self.scale = torch.Generator().manual_seed(1), np.random.default_rng(1)

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad += torch.randn(parameter.shape, generator=self.noise) * float(self.scale.random())
        return super().step(closure)


def live(snap: InMemorySnapshot, model: torch.nn.Module, optim: Any, count: int, killed: bool) -> list[torch.Tensor]:
    """Train until `count` steps are done, from where the last call was killed, and return the weights."""
    snap.__enter__()
    while snap.step < count:
        step(snap, model, optim)
    if killed:
        torch.autograd.backward(model(torch.ones(4, 2)).sum())  # begins the next step, and draws
        assert snap.drain(60)
    snap.__exit__(RuntimeError if killed else None, RuntimeError("killed") if killed else None, None)
    return [each.detach().clone() for each in model.parameters()]


class Counted(torch.optim.SGD):
    """Counts the steps of each parameter, as many optimizers of libraries do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            held = self.state[parameter]
            held["steps"] = held.get("steps", 0) + 1
        return super().step(closure)


class Around(torch.optim.Optimizer):
    """Wraps another one, and has a name of its own for what that keeps, as Lookahead does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.of_inner = inner, inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step()


def test_what_a_captured_optimizer_keeps_has_no_other_name(arena: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(2, 3)
    optim = Around(Counted(model.parameters()))
    trained(InMemorySnapshot(model, optim), model, optim, 9)
    assert not named(caplog)


class Averaged(torch.nn.Module):
    """Holds the model, as averages of its weights do, and counts."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.updates = model, 0


def draw(count: int, killed: bool, track: bool = False, averaged: bool = False) -> list[torch.Tensor]:
    """`live` for a job whose module and optimizer draw."""
    skipping = Skipping()
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), skipping)
    optim = Noisy(model.parameters())
    snap = InMemorySnapshot(model, optim, extra={"averaged": Averaged(model)} if averaged else None, strict=True)
    if track:
        snap.track("mine", get=skipping.mine.getstate, set=lambda state: skipping.mine.setstate(state))
    return live(snap, model, optim, count, killed)


@pytest.mark.parametrize("given", [{}, {"track": True}, {"averaged": True}])
def test_generators_of_modules_and_optimizers_come_back(arena: Path, given: dict[str, bool]) -> None:
    torch.manual_seed(0)
    whole = draw(6, killed=False, **given)
    torch.manual_seed(0)
    draw(3, killed=True, **given)
    torch.manual_seed(99)
    again = draw(6, killed=False, **given)
    assert all(map(torch.equal, again, whole))


def test_a_generator_that_is_gone_is_refused_by_name(arena: Path) -> None:
    draw(3, killed=True)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Identity())
    with pytest.raises(StateMismatch, match=r"generator model0\.1\.mine"):
        InMemorySnapshot(model, Noisy(model.parameters())).__enter__()


@pytest.mark.parametrize("drawn", [False, True])
def test_a_generator_that_is_drawn_from_before_the_first_step_is_refused_by_name(arena: Path, drawn: bool) -> None:
    draw(3, killed=True)
    skipping = Skipping()
    vars(skipping)["added"] = random.Random(5)  # not in the snapshot, so there is nothing to compare it with
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), skipping)
    optim = Noisy(model.parameters())
    with InMemorySnapshot(model, optim, strict=True) as snap:
        if not drawn:
            step(snap, model, optim)
            return
        skipping.mine.random()
        with pytest.raises(StateMismatch, match=r"model0\.1\.mine: no longer"):
            step(snap, model, optim)


def test_a_generator_that_is_captured_is_not_listed(arena: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), Skipping())
    assert InMemorySnapshot(model, Noisy(model.parameters())).untracked == []


class Recurrent(torch.nn.Module):
    """Reads in each step what the one before has left in attributes; others only say what a step has done."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.hidden = torch.zeros(2)
        self.means, self.calls = {"x": np.zeros(2)}, 0
        self.table, self.width = torch.arange(3), 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x + self.hidden)
        self.hidden = y.detach().mean(0)
        self.means["x"] += 1
        self.calls += 1
        self.penalty = y.square().mean()  # requires gradients
        self.slowly = torch.tensor(self.calls // 2)
        return y


class Configured(torch.nn.Module):
    """A layer with numbers in attributes, the last of which the last layer changes."""

    def __init__(self, changes: float = 0.0) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.width, self.heads, self.scale, self.changes, self.rate = 2, 1, 0.5, changes, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rate += self.changes
        out: torch.Tensor = self.inner(x)
        return out


class Merging(torch.optim.SGD):
    """Merges weights into a slow copy every third step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.copies = [each.detach().clone() for each in self.param_groups[0]["params"]]
        self.same = [each.detach() for each in self.param_groups[0]["params"]]
        self.calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        if self.calls % 3 == 0:
            for copy, parameter in zip(self.copies, self.param_groups[0]["params"], strict=True):
                copy += parameter.detach()
        return super().step(closure)


def test_attributes_that_change_are_named_once(arena: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Recurrent()
    optim = Merging(model.parameters())
    trained(InMemorySnapshot(model, optim), model, optim, 9)
    assert named(caplog) == [
        "optim.copies[0]; optim.copies[1]",
        "model0.calls; model0.hidden; model0.means['x']",
    ]


def test_an_attribute_among_thousands_is_named(arena: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Sequential(*[Configured() for _ in range(300)], Configured(changes=0.1))
    optim = torch.optim.SGD(model.parameters(), 0.1)
    trained(InMemorySnapshot(model, optim), model, optim, 6)
    assert named(caplog) == ["model0.300.rate"]


def test_attributes_that_are_tracked_are_not_named(arena: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Recurrent()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    snap = InMemorySnapshot(model, optim)
    snap.track("kept", get=lambda: (model.hidden, model.means, model.calls), set=lambda values: None)
    trained(snap, model, optim, 9)
    assert not any("not captured" in text for text in warnings_of(caplog))


def test_what_a_container_holds_that_is_tracked_is_not_named(arena: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Recurrent()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    snap = InMemorySnapshot(model, optim)
    means = model.means  # steps put a new tensor there
    snap.track("means", get=lambda: dict(means), set=means.update)
    trained(snap, model, optim, 9)
    assert named(caplog) == ["model0.calls; model0.hidden"]


def test_attributes_that_no_state_dict_of_an_extra_has_are_named(arena: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those of the model, too, which it holds."""
    model = Recurrent()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    averaged = Averaged(model)
    with InMemorySnapshot(model, optim, extra={"averaged": averaged}) as snap:
        for _ in range(9):
            step(snap, model, optim)
            averaged.updates += 1
    assert named(caplog) == ["extra.averaged.updates; model0.calls; model0.hidden; model0.means['x']"]


class Counter:
    """An environment that a model was made for, and that the script steps."""

    turns = 0


class Playing(torch.nn.Linear):
    """Holds environments."""

    def __init__(self, *environments: Counter) -> None:
        super().__init__(2, 2)
        self.counter, self.other = environments


def test_an_object_that_is_tracked_is_not_named_where_a_model_holds_it(
    arena: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counters = [Counter(), Counter()]
    model = Playing(*counters)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    snap = InMemorySnapshot(model, optim)
    known = counters[0]
    snap.track("counter", get=lambda: dict(vars(known)), set=lambda held: vars(known).update(held))
    with snap:
        for _ in range(9):
            step(snap, model, optim)
            for each in counters:
                each.turns += 1
    assert "model0.other.turns" in caplog.text and "model0.counter" not in caplog.text


def test_a_module_that_each_step_makes_anew_is_not_named(arena: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optim = job()
    kept = torch.nn.Linear(2, 3)
    with InMemorySnapshot(model, optim) as snap:
        for number in range(4):
            fast = torch.nn.Linear(2, 3)
            for each in (kept, fast):
                torch.nn.init.constant_(each.weight, number)
            step(snap, model, optim)
    (said,) = [text for text in warnings_of(caplog) if "changed by steps, and not captured" in text and "kept" in text]
    assert "fast" not in said


class Called:
    """A layer that is called, and is no module, as those that are written from scratch."""

    def __init__(self) -> None:
        self.mean = torch.zeros(3)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - x.mean(0)


def test_what_an_object_keeps_that_is_called_is_named(arena: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, layers = torch.nn.Linear(2, 3), [Called()]
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    with InMemorySnapshot(model, optim) as snap:
        for _ in range(4):
            out = model(torch.ones(4, 2))
            for layer in layers:
                out = layer(out)
            torch.autograd.backward(out.sum())
            snap.drain(60)
            optim.step()
            optim.zero_grad()
    assert any("layer" in each for each in named(caplog))


@pytest.mark.parametrize(
    ("holds", "alone"),
    [
        (torch.zeros(2), True),
        ([torch.zeros(2)], True),
        ([torch.nn.Parameter(torch.zeros(2))], False),
        ([{"params": [torch.nn.Parameter(torch.zeros(2))]}], False),
        ([torch.nn.Linear(2, 2)], False),
    ],
)
def test_an_object_with_parameters_is_not_to_be_pickled(holds: Any, alone: bool) -> None:
    part = Part()
    vars(part)["holds"] = holds
    assert stands_alone(part) is alone


class Part:
    def __init__(self) -> None:
        self.turn = 0


class Keeping(torch.nn.Linear):
    """Keeps a count, a mean and a generator."""

    def __init__(self) -> None:
        super().__init__(2, 3)
        self.count, self.mean, self.part = 0, torch.zeros(2), Part()
        self.noise = torch.Generator().manual_seed(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.part.turn += 1
        self.mean = self.mean + x.detach().mean(0) + torch.randn(2, generator=self.noise)
        return super().forward(x)


@pytest.mark.parametrize(
    ("get", "left"),
    [
        (lambda model: lambda: model.count, ["model0.mean", "model0.part.turn"]),
        (lambda model: lambda: (model.count, model.part.turn), ["model0.mean"]),
        (lambda model: lambda: vars(model), []),
    ],
    ids=["one", "two", "all"],
)
def test_to_name_an_attribute_names_nothing_else_of_its_object(
    get: Callable[[Keeping], Callable[[], Any]], left: list[str], arena: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Keeping()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    snap = InMemorySnapshot(model, optim)
    read = get(model)
    assert [*generators([("model0", model)], [read])] == (["model0.noise"] if left else [])
    snap.track("some", get=lambda: read() and 0, set=lambda held: None)
    with snap:
        for _ in snap.steps(9):
            step(snap, model, optim)
    assert [name for text in named(caplog) for name in text.split("; ")] == left


class OfALibrary:
    """A running mean."""

    __module__ = "pytest.means"

    def __init__(self) -> None:
        self.mean = np.zeros(3)
        self.count = 0


class Normalising(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 3)
        self.mean, self.still = OfALibrary(), OfALibrary()


def test_what_an_object_of_a_library_holds_for_a_module_is_named(arena: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Normalising()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    with InMemorySnapshot(model, optim) as snap:
        for number in range(9):
            step(snap, model, optim)
            model.mean.mean = np.full(3, number)
            model.mean.count += 1
    assert named(caplog) == ["model0.mean.count; model0.mean.mean"]


def test_the_rate_of_a_layer_is_named_where_steps_change_it(arena: Path, caplog: pytest.LogCaptureFixture) -> None:
    dropout = torch.nn.Dropout(0.5)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), dropout, torch.nn.Dropout(0.5))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    with InMemorySnapshot(model, optim) as snap:
        for _ in range(9):
            step(snap, model, optim)
            vars(dropout).update(p=0.9 * dropout.p)  # in the script's own words it is named by its source
    assert named(caplog) == ["model0.1.p"]


class Normed(torch.nn.Module):
    """Begins with what its first batch is, as ActNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.nn.Parameter(torch.zeros(3))
        self.begun = self.logged = False

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if not self.begun:
            self.shift.data.copy_(-value.mean(0))
            self.begun = True
        return value + self.shift


@pytest.mark.parametrize("is_tracked", [False, True])
def test_a_switch_that_the_first_step_turns_is_named(
    arena: Path, caplog: pytest.LogCaptureFixture, is_tracked: bool
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), Normed())
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    snap = InMemorySnapshot(model, optim)
    if is_tracked:
        layer = model[1]
        snap.track("begun", get=lambda: layer.begun, set=lambda value: setattr(layer, "begun", value))
    trained(snap, model, optim, 3)
    assert named(caplog) == ([] if is_tracked else ["model0.1.begun"])


class Rounded:
    """The state of a hook that communicates gradients: what rounding has lost."""

    def __init__(self) -> None:
        self.count = 0
        self.lost: dict[int, torch.Tensor] = {}


def round_gradients(state, bucket):  # type: ignore[no-untyped-def]  # DDP wants other annotations than mypy knows
    state.count += 1
    whole = bucket.buffer() / 3 + state.lost.get(bucket.index(), 0)
    rounded = whole.bfloat16().float()
    state.lost[bucket.index()] = whole - rounded
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(rounded)
    return done


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=DEADLINE_S))
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("arena", "alone")
@pytest.mark.parametrize(
    ("make", "hook", "names"),
    [
        (Rounded, round_gradients, ["count", "lost[0]"]),
        (partial(powerSGD_hook.PowerSGDState, None), powerSGD_hook.powerSGD_hook, ["iter"]),
    ],
    ids=["the user's", "torch's"],
)
def test_the_state_of_a_hook_for_gradients_is_named(
    make: Any, hook: Any, names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    model = DistributedDataParallel(torch.nn.Linear(2, 3))
    model.register_comm_hook(make(), hook)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    trained(InMemorySnapshot(model, optim), model, optim, 5)
    assert named(caplog) == ["; ".join(f"model0._comm_hooks[0][1].{name}" for name in names)]


@pytest.mark.usefixtures("arena", "alone")
def test_what_averages_replicas_is_named_with_its_line(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(2, 3)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = PeriodicModelAverager(period=2, warmup_steps=100)
    with InMemorySnapshot(model, optim) as snap:
        for _ in range(5):
            step(snap, model, optim)
            averager.average_parameters(model.parameters())
    (said,) = [text for text in warnings_of(caplog) if "in variables of the script" in text]
    assert said.startswith("averager.step:") and 'setattr(averager, "step", value)' in said


class Noise:
    """A helper of the user's, with state of its own."""

    def __init__(self, seed: int) -> None:
        self.source = random.Random(seed)
        self.last = deque([torch.zeros(2)])
        self.parts = {torch.ones(1)}


shared_source = random.Random(7)


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * shared_source.random()


class Helped(torch.nn.Module):
    """Draws from a helper's generator, from one of its class, and from a global one of its program."""

    ours = random.Random(5)

    def __init__(self) -> None:
        super().__init__()
        self.noise = Noise(3)
        self.scale = scaled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(x) * (self.noise.source.random() + self.ours.random())


def test_generators_of_helpers_classes_and_functions_come_back(arena: Path) -> None:
    def life(count: int, killed: bool) -> list[torch.Tensor]:
        shared_source.seed(7)
        Helped.ours.seed(5)
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), Helped())
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        return live(InMemorySnapshot(model, optim), model, optim, count, killed)

    torch.manual_seed(0)
    whole = life(6, killed=False)
    torch.manual_seed(0)
    life(3, killed=True)
    assert all(map(torch.equal, life(6, killed=False), whole))


def noise_of(seed: int) -> Any:
    """A hook with a generator that nothing else refers to."""
    source = random.Random(seed)
    return lambda *given: source.random()


def test_generators_of_hooks_are_found_under_the_same_names_inside_the_block(arena: Path) -> None:
    model = torch.nn.Linear(2, 3)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)

    def found() -> dict[str, Any]:
        return {name: id(each) for name, each in generators([("model0", model), ("optim", optim)], []).items()}

    model.__dict__["own_hooks"] = [print]  # not torch's, whatever its name
    with InMemorySnapshot(model, optim):  # its own hooks are first
        model.register_forward_hook(noise_of(1))
        next(model.parameters()).register_hook(noise_of(2))  # type: ignore[no-untyped-call]
        optim.register_step_pre_hook(noise_of(3))
        within = found()
    assert within == found() and len(within) == 3


def test_tensors_of_helpers_and_sets_of_them_are_found() -> None:
    roots = [("model0", torch.nn.Sequential(Helped()))]
    names = untracked(roots, set(map(memory_of, generators(roots, []).values())))
    assert names == ["model0.0.noise.last[0]", "model0.0.noise.parts"]


def test_a_tensor_that_refuses_to_be_looked_at_is_not_looked_at() -> None:
    rough: Any = Rough(torch.zeros(3, dtype=torch.int8), torch.ones(()), "signed")
    assert sample_of(rough) is None
    assert sample_of(torch.nn.Parameter(torch.ones(3))) is not None
