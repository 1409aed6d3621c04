"""An optimizer's state goes back to the parameter that it belongs to; optimizers within optimizers are found."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from holdfast import ConfigError, InMemorySnapshot, StateMismatch
from holdfast.snapshot.state.optimizers import OptimizerState, nested, unwrapped
from tests.deadlines import DEADLINE_S

Make = Callable[[nn.Module], Any]


def net() -> nn.Module:
    """Two layers of the same shape: one's state fits the other."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def adam(*groups: Any, cls: type[torch.optim.Optimizer] = torch.optim.Adam) -> torch.optim.Optimizer:
    return cls([group if isinstance(group, dict) else {"params": list(group)} for group in groups], lr=0.1)  # type: ignore[call-arg]


def train(snap: InMemorySnapshot, model: nn.Module, optim: Any, until: int) -> None:
    for step in range(snap.step, until):
        snap.begin()
        snap.drain(60)
        optim.zero_grad()
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        torch.autograd.backward(model(inputs).square().mean())
        optim.step()


def moments(model: nn.Module, optim: torch.optim.Optimizer, entry: str = "exp_avg") -> dict[str, list[Any]]:
    return {n: optim.state[p][entry].tolist() for n, p in model.named_parameters() if entry in optim.state.get(p, {})}


def weights(model: nn.Module) -> list[Any]:
    return [parameter.tolist() for parameter in model.parameters()]


def start_anew(before: Make, after: Make, make: Callable[[], Any] = net) -> tuple[Any, Any, Any, Any]:
    """Train a job for three steps, and restore it into one that is made with `after`."""
    model = make()
    optim = before(model)
    with InMemorySnapshot(model, optim, keep=True, strict=True) as snap:
        train(snap, model, optim, 3)
    again = make()
    other = after(again)
    with InMemorySnapshot(again, other, keep=True) as snap:
        assert snap.step == 3
    return model, optim, again, other


def refusal(before: Make, after: Make) -> str:
    with pytest.raises(StateMismatch) as caught:
        start_anew(before, after)
    return str(caught.value)


# ------------------------------------------------------------------ by owner


def in_order(model: nn.Module) -> Any:
    return adam(model.parameters())


def reversed_order(model: nn.Module) -> Any:
    return adam(reversed(list(model.parameters())))


def test_the_same_parameters_in_another_order_keep_their_own_state(arena: Path) -> None:
    model, optim, again, other = start_anew(in_order, reversed_order)
    assert moments(again, other) == moments(model, optim)
    assert weights(again) == weights(model)


def decayed_first(model: nn.Module) -> Any:
    first, second = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() == 1]
    return adam({"params": first, "lr": 0.5}, {"params": second, "lr": 0.25, "mine": [1]})


def decayed_last(model: nn.Module) -> Any:
    second, first = decayed_first(model).param_groups
    return adam({"params": first["params"], "lr": 7.0}, {"params": second["params"][::-1], "lr": 8.0})


def test_groups_in_another_order_keep_their_own_options(arena: Path) -> None:
    model, optim, again, other = start_anew(decayed_first, decayed_last)
    assert moments(again, other) == moments(model, optim)
    assert [(group["lr"], group.get("mine")) for group in other.param_groups] == [(0.25, [1]), (0.5, None)]


def test_names_that_a_group_gives_its_parameters_stay_with_them(arena: Path) -> None:
    """torch keeps the names in the group, beside the parameters, in the same order."""

    def named(model: nn.Module) -> Any:
        return torch.optim.Adam(list(model.named_parameters()), lr=0.1)

    def reversed_names(model: nn.Module) -> Any:
        return torch.optim.Adam(list(model.named_parameters())[::-1], lr=0.1)

    model, optim, again, other = start_anew(named, reversed_names)
    assert moments(again, other) == moments(model, optim)
    assert other.param_groups[0]["param_names"] == ["1.bias", "1.weight", "0.bias", "0.weight"]


def test_what_has_become_another_group_is_refused_by_name(arena: Path) -> None:
    def moved(model: nn.Module) -> Any:
        first, second = decayed_first(model).param_groups
        return adam(first["params"] + second["params"][:1], second["params"][1:])

    assert "model0.0.weight is in another" in refusal(decayed_first, moved)


def without_the_last(model: nn.Module) -> Any:
    return adam(list(model.parameters())[:-1], cls=torch.optim.SGD)


def all_of_them(model: nn.Module) -> Any:
    return adam(model.parameters(), cls=torch.optim.SGD)


def test_parameters_that_are_missing_or_new_are_refused_even_without_state(arena: Path) -> None:
    assert "model0.1.bias only in this job" in refusal(without_the_last, all_of_them)


def test_a_parameter_that_is_no_longer_updated_is_refused(arena: Path) -> None:
    assert "model0.1.bias only in the snapshot" in refusal(all_of_them, without_the_last)


def test_another_number_of_empty_groups_is_refused(arena: Path) -> None:
    text = refusal(lambda model: adam([], model.parameters()), lambda model: adam([], model.parameters(), []))
    assert "2 parameter groups in the snapshot, 3" in text


def test_state_that_may_hang_on_the_order_is_refused_in_another(arena: Path) -> None:
    class Own(torch.optim.Adam):
        pass

    text = refusal(lambda m: Own(m.parameters(), lr=0.1), lambda m: Own(reversed(list(m.parameters())), lr=0.1))
    assert "another order than in the snapshot, from model0.1.bias" in text


def test_what_has_no_state_may_be_in_any_order(arena: Path) -> None:
    class Own(torch.optim.SGD):
        pass

    model, _, again, _ = start_anew(
        lambda m: Own(m.parameters(), lr=0.1), lambda m: Own(reversed(list(m.parameters())), lr=0.1)
    )
    assert weights(again) == weights(model)


def test_several_optimizers_in_another_order_are_refused(arena: Path) -> None:
    def both(model: nn.Module) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(layer.parameters()) for layer in model.children()]

    model = net()
    optims = both(model)
    with InMemorySnapshot(model, optims, keep=True) as snap:
        for _ in snap.steps(2):
            torch.autograd.backward(model(torch.ones(1, 4)).sum())
            for optim in optims:
                optim.step()
                optim.zero_grad()
    again = net()
    with pytest.raises(StateMismatch, match=r"other parameters.*model0\.0\.weight only"):
        InMemorySnapshot(again, both(again)[::-1]).__enter__()


def test_a_parameter_with_two_names_has_one_state(arena: Path) -> None:
    def tied() -> nn.Module:
        model = net()
        model[1].weight = model[0].weight  # type: ignore[index]
        return model

    model, optim, again, other = start_anew(in_order, reversed_order, tied)
    assert moments(again, other) == moments(model, optim)


def test_a_parameter_that_is_made_after_the_hook_has_its_name(arena: Path) -> None:
    model = net()
    optim = in_order(model)
    snap = InMemorySnapshot(model, optim)
    model[0].weight = nn.Parameter(torch.ones(4, 4))  # type: ignore[index]
    optim.param_groups[0]["params"][0] = model[0].weight  # type: ignore[index]
    with snap:
        train(snap, model, optim, 1)
        names = [item.name for item in snap._adapter.tensors()]
    assert "optim.model0.0.weight.exp_avg" in names
    assert not [name for name in names if name.startswith("loose")]


# ------------------------------------------------------------------ in no module


def test_parameters_of_no_module_come_back_by_their_place(arena: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Such as a learned temperature."""

    def job() -> tuple[nn.Module, nn.Parameter, torch.optim.Optimizer]:
        model, alpha = net(), nn.Parameter(torch.zeros(()))
        return model, alpha, adam(model.parameters(), [alpha])

    model, alpha, optim = job()
    with InMemorySnapshot(model, optim, keep=True) as snap:
        for _ in snap.steps(3):
            torch.autograd.backward(model(torch.ones(1, 4)).sum() * alpha.exp())
            optim.step()
            optim.zero_grad()
    again, its_alpha, other = job()
    with InMemorySnapshot(again, other) as snap:
        assert snap.step == 3
        assert its_alpha.item() == alpha.item() != 0
        assert other.state[its_alpha]["exp_avg"].item() == optim.state[alpha]["exp_avg"].item()
    assert "in none of the modules" not in caplog.text


def test_those_that_only_their_place_tells_apart_are_warned_of(arena: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, others = net(), net()
    with caplog.at_level(logging.WARNING):
        InMemorySnapshot(model, adam(model.parameters(), others.parameters()))
    assert "4 parameters that Adam updates are in none" in caplog.text


# ------------------------------------------------------------------ forms of state


class Remembering(torch.optim.SGD):
    """Clips by the norms it has seen, scales by a number of NumPy's, and goes through phases."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        super().__init__(params, lr=0.1)
        self.norms: list[float] = []
        self.seen = self.norms
        self.scale: Any = 1.0
        self.phase, self.device = "warm", "cpu"

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.norms.append(float(sum(p.grad.square().sum() for g in self.param_groups for p in g["params"])))
        self.scale = np.float64(self.scale) * np.exp(-0.1)
        self.phase = "main" if len(self.norms) > 1 else self.phase
        super().step(closure)


def test_what_an_optimizer_remembers_in_attributes_comes_back(arena: Path) -> None:
    def elsewhere(model: nn.Module) -> Remembering:
        optim = Remembering(model.parameters())
        optim.device = "meta"  # it never changed in the run, so it is the job's own
        return optim

    _, optim, _, other = start_anew(lambda m: Remembering(m.parameters()), elsewhere)
    assert other.norms == optim.norms and len(other.norms) == 3
    assert other.seen is other.norms
    assert other.scale == optim.scale and type(other.scale) is np.float64
    assert (other.phase, other.device) == ("main", "meta")


class Odd(torch.optim.Optimizer):
    """Keeps entries whose keys are numbers or contain dots."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state[0] = state.get(0, 0) + parameter.grad
                state["a.b"] = state.get("a.b", 0) + parameter.grad
                state["count"] = state.get("count", 0) + 1
                parameter -= group["lr"] * (state[0] + state["a.b"])


def test_entries_may_have_any_key(arena: Path) -> None:
    model, optim, again, other = start_anew(lambda m: Odd(m.parameters()), lambda m: Odd(m.parameters()))
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert list(other.state[two]) == list(optim.state[one]) == [0, "a.b", "count"]
        assert torch.equal(other.state[two][0], optim.state[one][0])
        assert torch.equal(other.state[two]["a.b"], optim.state[one]["a.b"])
        assert other.state[two]["count"] == 3


class Global(torch.optim.Optimizer):
    """Keeps values under texts, as SPAM does, and the last gradients in a queue, as AdaShift does."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.values = cast("dict[Any, Any]", self.state)
        self.values["steps"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.values["steps"] += 1
        self.values["mean"] = torch.full((2,), float(self.values["steps"]))
        for parameter in self.param_groups[0]["params"]:
            queue = self.values[parameter].setdefault("queue", deque(maxlen=2))
            queue.append(parameter.grad.clone())
            parameter -= 0.1 * self.values["steps"] * queue[0]


@pytest.mark.parametrize("key", ["tensor", "object"])
def test_state_under_what_has_no_name_is_left_out_and_named(key: str, caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    optim: Any = torch.optim.SGD(model.parameters())
    if key == "tensor":
        optim.state["named"] = {next(model.parameters()): torch.zeros(4, 4)}
    else:
        optim.state[object()] = {"x": torch.zeros(2)}
    state = OptimizerState(optim, "optim", replicated=False)
    assert list(state.tensors()) == list(state.tensors()) == []
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"under a {'Tensor' if key == 'tensor' else 'object'}, which" in said


def test_values_under_texts_and_queues_come_back(arena: Path) -> None:
    model, optim, again, other = start_anew(lambda m: Global(m.parameters()), lambda m: Global(m.parameters()))
    assert other.values["steps"] == optim.values["steps"] == 3
    assert torch.equal(other.values["mean"], optim.values["mean"])
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        queue = other.state[two]["queue"]
        assert queue.maxlen == len(queue) == 2
        assert all(map(torch.equal, queue, optim.state[one]["queue"]))


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_that_is_given_twice_has_one_state() -> None:
    weight = nn.Parameter(torch.ones(2))
    optim = torch.optim.SGD([weight, weight], lr=0.1, momentum=0.9)
    state = OptimizerState(optim, "optim", replicated=False, names={weight: "model0.weight"})
    weight.grad = torch.ones(2)
    optim.step()
    assert [name for name, _ in state.parameters()] == ["model0.weight"]
    assert [item.name for item in state.tensors()] == ["optim.model0.weight.momentum_buffer"]


# ------------------------------------------------------------------ state that comes and goes


class Late(torch.optim.Optimizer):
    """Gives each parameter a number and a tensor with its first gradient, and changes its state in a later step."""

    def __init__(
        self, parameters: Iterable[torch.Tensor], when: int, change: Callable[[dict[str, Any]], object]
    ) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self._when, self._change = when, change

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            state["n"] = state.get("n", 0) + 1
            state["m"] = state.get("m", 0.5) * parameter.grad
            if state["n"] == self._when:
                self._change(state)
            parameter -= 0.1 * state.get("m", 0.5) * state.get("scale", 1)


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a number comes": lambda state: state.update(scale=0.5),
    "a number is renamed": lambda state: state.update(scale=state.pop("n")),
    "a tensor comes": lambda state: state.update(scale=torch.tensor(0.5)),
    "several come": lambda state: state.update(scale=2, rows=[1, torch.ones(3)]),
    "a tensor goes": lambda state: state.pop("m"),
}
PLAIN = [(change, when) for change in list(CHANGES)[:2] for when in (1, 2, 3)]
NEW_LAYOUT = [(change, when) for change in list(CHANGES)[2:] for when in (1, 2)]  # takes the place of a snapshot


@pytest.mark.parametrize(("change", "when"), PLAIN + NEW_LAYOUT)
def test_state_that_changes_its_form_is_in_the_snapshot_after_that_step(arena: Path, change: str, when: int) -> None:
    """The snapshot that is restored is the one after step 3."""

    def make(model: nn.Module) -> Late:
        return Late(model.parameters(), when, CHANGES[change])

    model, optim, again, other = start_anew(make, make)
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert list(other.state[two]) == list(optim.state[one])
        assert repr(other.state[two]) == repr(optim.state[one])


@pytest.mark.parametrize("step", [0, 1])
def test_a_parameter_that_gets_its_first_gradient_late_has_its_state(arena: Path, step: int) -> None:
    def make(model: nn.Module) -> Late:
        return Late(model.parameters(), 9, CHANGES["a number comes"])

    class Bypassed(nn.Module):
        """Its second layer takes part from some step on."""

        def __init__(self) -> None:
            super().__init__()
            self.layers, self.calls = net(), 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            first: torch.Tensor = self.layers[0](inputs)  # type: ignore[index]
            return self.layers[1](first) if self.calls > step else first  # type: ignore[index]

    model, optim, again, other = start_anew(make, make, Bypassed)
    counts = [[of.state[p].get("n") for p in job.parameters()] for job, of in ((model, optim), (again, other))]
    assert counts[0] == counts[1] == [3, 3, 3 - step, 3 - step]


class Warming(torch.optim.SGD):
    """Counts down to its last warm step, and then forgets the count and a factor."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, lr=0.1)
        cast(Any, self.state)["warm"] = 2
        self.factor: float | None = 0.5

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        values = cast(Any, self.state)
        if "warm" in values:
            values["warm"] -= 1
            if not values["warm"]:
                del values["warm"]
                self.factor = None


def test_values_that_are_gone_do_not_come_back(arena: Path) -> None:
    _, optim, _, other = start_anew(lambda m: Warming(m.parameters()), lambda m: Warming(m.parameters()))
    assert not optim.state and not other.state
    assert optim.factor is other.factor is None


# ------------------------------------------------------------------ optimizers within optimizers


class Container(torch.optim.Optimizer):
    """Several optimizers behind one, as in torchtitan: it has groups, but no state."""

    def __init__(self, *parts: Iterable[torch.Tensor]) -> None:
        self.optimizers = [torch.optim.AdamW(part, lr=0.1) for part in parts]
        super().__init__([p for part in self.optimizers for g in part.param_groups for p in g["params"]], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optim in self.optimizers:
            optim.step()


class Sharpness(torch.optim.Optimizer):
    """Has a base optimizer, shares its groups, and keeps state of its own, like SAM."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        super().__init__(params, {"rho": 0.05})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["old"] = parameter.clone()
        self.base.step()


class Ahead(torch.optim.Optimizer):
    """Wraps another optimizer without calling its own base class, as timm's Lookahead does."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self._base_optimizer = base
        self.param_groups = base.param_groups
        self.defaults = base.defaults
        self.state = defaultdict(dict)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._base_optimizer.step()
        for group in self.param_groups:
            group["ahead"] = group.get("ahead", 0) + 1
            for parameter in group["params"]:
                slow = self.state[parameter].setdefault("slow", parameter.clone())
                parameter.copy_(slow.lerp_(parameter, 0.5))

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._base_optimizer.zero_grad(set_to_none)


class Passing(torch.optim.Optimizer):
    """A wrapper in type only, like Accelerate's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


WRAPPERS: dict[str, Make] = {
    "container": lambda model: Container(*(layer.parameters() for layer in model.children())),
    "sharpness": lambda model: Sharpness(model.parameters()),
    "ahead": lambda model: Ahead(torch.optim.Adam(model.parameters(), lr=0.1)),
    "passing": lambda model: Passing(torch.optim.Adam(model.parameters(), lr=0.1)),
    "in one another": lambda model: Passing(Ahead(torch.optim.Adam(model.parameters(), lr=0.1))),
}


@pytest.mark.parametrize("make", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_a_job_whose_optimizer_wraps_others_goes_on_bit_for_bit(arena: Path, make: Make) -> None:
    def run(job: str, until: int, **options: Any) -> tuple[int, list[Any]]:
        model = net()
        optim = make(model)
        with InMemorySnapshot(model, optim, job=job, strict=True, **options) as snap:
            start = snap.step
            train(snap, model, optim, until)
        return start, weights(model)

    assert run("two", 4, keep=True)[0] == 0
    assert run("two", 8) == (4, run("one", 8)[1])


def test_inner_optimizers_come_first_and_each_once() -> None:
    model = net()
    inner = torch.optim.Adam(model.parameters())
    ahead = Ahead(inner)
    passing = Passing(ahead)
    assert unwrapped(passing) == unwrapped(inner, passing) == unwrapped(ahead, inner) == [inner, ahead]
    assert [path for path, _ in nested("optim0", passing)] == [
        "optim0.optimizer._base_optimizer",
        "optim0.optimizer",
        "optim0",
    ]
    vars(ahead)["more"] = {"a": [inner, passing], 1: (ahead,)}
    assert unwrapped(passing) == [inner, ahead]


def test_what_a_wrapper_without_base_class_has_in_it_is_found_even_behind_what_only_looks_like_one() -> None:
    class Looks:
        """Has the methods of an optimizer, like Apex's wrapper."""

        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.hidden = [optimizer]

        def step(self) -> None: ...

        def zero_grad(self) -> None: ...

    inner = torch.optim.SGD(net().parameters(), lr=0.1)
    outer = Passing(inner)
    vars(outer)["optimizer"] = Looks(inner)
    assert [each for _, each in nested("optim", outer)] == [inner, vars(outer)["optimizer"], outer]


def test_an_optimizer_without_groups_and_without_others_is_refused() -> None:
    class Empty(torch.optim.Optimizer):
        def __init__(self) -> None:
            pass

    with pytest.raises(ConfigError, match=r"Empty without state and param_groups"):
        unwrapped(Empty())


class Looked(str):
    """A name that counts how often one is looked up."""

    looks = 0

    def __hash__(self) -> int:
        Looked.looks += 1
        return super().__hash__()


def test_a_large_group_is_compared_in_one_go() -> None:
    """Experts' scales are tens of thousands of parameters: minutes if each one had its group compared."""
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2000)]
    optim = torch.optim.SGD([{"params": parameters[:10]}, {"params": parameters[10:]}], lr=0.1)
    state = OptimizerState(optim, "optim", replicated=False)
    look = state.look()
    held = look.fixed["groups"] = [[Looked(name) for name in group] for group in look.fixed["groups"]]
    Looked.looks = 0
    state.check(look.late(), look.fixed)
    assert 2000 <= Looked.looks <= 20 * 2000
    held[0][0], held[1][0] = held[1][0], held[0][0]
    with pytest.raises(StateMismatch, match=r"is in another parameter group"):
        state.check(look.late(), look.fixed)


@pytest.mark.usefixtures("arena")
def test_parameters_without_a_module_are_captured() -> None:
    def life(weight: Any, stop: int = -1) -> list[float]:
        optim = torch.optim.Adam([weight], lr=0.1)
        with InMemorySnapshot([], optim) as snap:
            for step in snap.steps(4):
                weight.square().sum().backward()
                if step == stop:
                    snap.drain(DEADLINE_S)
                    raise KeyboardInterrupt
                optim.step()
                optim.zero_grad()
        return [snap.statistics.taken, *weight.tolist()]

    whole = life(torch.ones(3, requires_grad=True))
    with pytest.raises(KeyboardInterrupt):
        life(torch.ones(3, requires_grad=True), stop=2)
    assert life(torch.zeros(3, requires_grad=True))[1:] == whole[1:]
