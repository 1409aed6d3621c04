"""Optimizers keep state of any kind: restored to the last bit, or named, and never the end of a job."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from enum import Enum
from typing import Any

import pytest
import torch

import holdfast
from holdfast import ConfigError, InMemorySnapshot, StateMismatch
from holdfast.snapshot.state import values
from tests.unit.test_beginning import STEPS, Job, counted, life, looping, trial, warnings_of

pytestmark = pytest.mark.usefixtures("arena")


class Projector:
    """As GaLore's: a matrix that is renewed every few steps."""

    def __init__(self) -> None:
        self.basis: torch.Tensor | None = None
        self.calls = 0

    def project(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.calls % 3 == 0:
            self.basis = torch.linalg.qr(gradient)[0]
        self.calls += 1
        assert self.basis is not None
        return self.basis @ (self.basis.t() @ gradient)


class Rough(torch.Tensor):
    """A tensor in 8 bits, as torchao keeps moments."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls: Any, codes: torch.Tensor, scale: torch.Tensor, kind: str) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, kind: str) -> None:
        self.codes, self.scale, self.kind = codes, scale, kind

    def __tensor_flatten__(self) -> tuple[list[str], list[Any]]:
        return ["codes", "scale"], [self.kind, self.shape]

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], context: list[Any], *_: Any) -> Any:
        assert isinstance(context[1], torch.Size)
        return cls(parts["codes"], parts["scale"], context[0])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{function} of a tensor in 8 bits")


class Rule(Enum):
    PLAIN = 1
    HALVED = 2


class Options:
    def __init__(self) -> None:
        self.scale = 1.0


class Own(torch.optim.Optimizer):
    """Calls `update` for each parameter."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, {"lr": 0.05, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                self.update(group, state, parameter)

    def update(self, group: Any, state: Any, parameter: torch.Tensor) -> None:
        parameter.sub_(parameter.grad, alpha=group["lr"])  # type: ignore[arg-type]


class Projected(Own):
    def update(self, group: Any, state: Any, parameter: torch.Tensor) -> None:
        gradient: Any = parameter.grad
        if parameter.dim() == 2:
            gradient = state.setdefault("projector", Projector()).project(gradient)
        parameter.sub_(gradient, alpha=group["lr"])


class Quantized(Own):
    def update(self, group: Any, state: Any, parameter: torch.Tensor) -> None:
        gradient: Any = parameter.grad
        if "moment" not in state:
            state["moment"] = Rough(torch.zeros_like(gradient, dtype=torch.int8), torch.ones(()), "signed")
        moment = state["moment"]
        mean = (moment.codes.float() * moment.scale).lerp(gradient, 0.3)
        moment.scale.copy_(mean.abs().max() / 127 + 1e-12)
        moment.codes.copy_((mean / moment.scale).round())
        parameter.sub_(moment.codes.float() * moment.scale, alpha=group["lr"])


class Optioned(Own):
    def update(self, group: Any, state: Any, parameter: torch.Tensor) -> None:
        options = group["options"]
        options.scale *= 0.99
        group["rule"] = Rule.HALVED if options.scale < 0.7 else Rule.PLAIN
        group["apply"](parameter, parameter.grad, group["lr"] * options.scale / group["rule"].value)


class Warmup:
    """A schedule of an optimizer's own."""

    def __init__(self) -> None:
        self.turns = [0]

    def rate(self) -> float:
        self.turns.append(self.turns[-1] + 1)
        return 1 / (1 + self.turns[-1])

    def state_dict(self) -> dict[str, Any]:
        return {"turns": self.turns}

    def load_state_dict(self, held: dict[str, Any]) -> None:
        self.turns = list(held["turns"])


class Warmed(Own):
    """Keeps a schedule in an attribute and in its ``state_dict``, and begins it again now and then, as SPAM does."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.warmup = Warmup()

    def update(self, group: Any, state: Any, parameter: torch.Tensor) -> None:
        if len(self.warmup.turns) == 7:
            self.warmup = Warmup()
        parameter.sub_(parameter.grad, alpha=group["lr"] * self.warmup.rate())  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"warmup": self.warmup.state_dict()}


class Locking(Own):
    """Keeps what nobody can capture, and needs nothing of it after a restart."""

    def update(self, group: Any, state: Any, parameter: torch.Tensor) -> None:
        with state.setdefault("lock", threading.Lock()):
            parameter.sub_(parameter.grad, alpha=group["lr"])  # type: ignore[arg-type]


class KeyedByNumbers(Own):
    def update(self, group: Any, state: Any, parameter: torch.Tensor) -> None:
        count = self.state.setdefault(7, {"count": 0})  # type: ignore[call-overload]
        count["count"] += 1
        parameter.sub_(parameter.grad, alpha=group["lr"])  # type: ignore[arg-type]


def apply(parameter: torch.Tensor, gradient: torch.Tensor, rate: float) -> None:
    parameter.sub_(gradient, alpha=rate)


def job_with(kind: type[Own]) -> type[Job]:
    class Made(Job):
        def __init__(self) -> None:
            super().__init__()
            options = {"options": Options(), "rule": Rule.PLAIN, "apply": apply} if kind is Optioned else {}
            self.optim = kind(self.model.parameters(), **options)
            self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optim, 0.9)

        def digest(self) -> str:
            weights = [parameter.tolist() for parameter in self.model.parameters()]
            return repr((weights, torch.get_rng_state().sum(), self.rates()))

    return Made


@pytest.mark.parametrize("stop", [2, 4, 5])
@pytest.mark.parametrize("kind", [Projected, Quantized, Optioned, Warmed])
def test_state_of_any_kind_comes_back(kind: type[Own], stop: int, caplog: pytest.LogCaptureFixture) -> None:
    assert trial(counted, job_with(kind), stop).statistics.failed == 0
    assert not [text for text in warnings_of(caplog) if "not captured" in text]


@pytest.mark.parametrize("kind", [Locking, KeyedByNumbers])
def test_what_cannot_be_kept_is_named_once_and_ends_no_job(kind: type[Own], caplog: pytest.LogCaptureFixture) -> None:
    life(counted, job_with(kind)(), None)
    said = [text for text in warnings_of(caplog) if "not captured" in text and "optim" in text]
    assert said and len(said) == len(set(said))


def test_what_need_not_be_kept_is_made_anew(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "_ways", {})
    holdfast.register(type(threading.Lock()), kept=False)
    trial(counted, job_with(Locking))
    assert not [text for text in warnings_of(caplog) if "not captured" in text]


class Slotted:
    """An object whose state is not in its attributes."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Counting(Own):
    def update(self, group: Any, state: Any, parameter: torch.Tensor) -> None:
        counter = state.setdefault("counter", Slotted())
        counter.count += 1
        parameter.sub_(parameter.grad, alpha=group["lr"] / counter.count)  # type: ignore[arg-type]


def test_a_class_says_how_its_objects_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "_ways", {})

    def put(counter: Slotted, count: int) -> None:
        counter.count = count

    holdfast.register(Slotted, get=lambda counter: counter.count, set=put)
    assert trial(counted, job_with(Counting)).statistics.failed == 0


def test_a_setter_that_fails_is_none_of_the_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or older snapshots would be tried, and the user told to give the run up."""
    monkeypatch.setattr(values, "_ways", {})

    def put(counter: Slotted, held: dict[str, int]) -> None:
        counter.count = held["renamed"]

    holdfast.register(Slotted, get=lambda counter: {"count": counter.count}, set=put)
    held = values.encode(Slotted(), "counter", {})
    with pytest.raises(StateMismatch, match=r"set= for Slotted .*renamed"):
        values.decode_plain(held)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"get": lambda value: 1}, {"kept": False, "get": lambda value: 1, "set": setattr}, {"tensors": dict}],
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Slotted"):
        holdfast.register(Slotted, **arguments)


class InBackward(Own):
    """Updates each parameter as soon as its gradient is there, as LOMO does, and has no step to call."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, **options)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(self.at_once)

    @torch.no_grad()
    def at_once(self, parameter: torch.Tensor) -> None:
        parameter.sub_(parameter.grad, alpha=0.1)  # type: ignore[arg-type]
        parameter.grad = None


def accumulate(snap: InMemorySnapshot, job: Job) -> Iterator[None]:
    for turn in snap.steps(2 * STEPS):
        job.backward()
        yield
        if turn % 4 == 3:
            job.step()


def test_an_optimizer_that_never_steps_is_refused_in_the_first_turns_if_parameters_change() -> None:
    with pytest.raises(ConfigError, match=r"InBackward was seen.* extra="):
        life(looping(step=lambda job: None, declared=True), job_with(InBackward)(), None)
    life(accumulate, job_with(Projected)(), None)
