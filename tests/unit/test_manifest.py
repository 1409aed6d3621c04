"""A manifest notices when the state consists of other tensors; nothing else makes it walk the state again."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from holdfast.integrations.adapters.torch_native import TorchAdapter
from holdfast.smp_daemon.shared.errors import ConfigError, StateMismatch
from holdfast.smp_daemon.shared.slotfile import Leaf
from holdfast.snapshot.state.live import Change, LiveTensor
from holdfast.snapshot.state.manifest import Manifest
from holdfast.snapshot.state.replicas import Part, Sharing
from tests.unit.test_state import Toy


def is_current(manifest: Manifest) -> bool:
    """Whether no new walk is needed, as capture asks when a step begins."""
    return not manifest.has_moved() and manifest.holds_the_same()


class Plain(torch.optim.Optimizer):
    """Keeps a tensor and plain values for each parameter; plain values come first and last."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.5})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(step=0, sum=torch.zeros_like(parameter), last=0.0)
                state["step"] += 1
                state["sum"] += parameter.grad
                state["last"] = float(parameter.grad.sum())
                parameter.data -= group["lr"] * state["sum"]


class Job:
    """A small model that has been trained for a step, and the manifest of its state."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        self.model: Any = torch.nn.Sequential(
            torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2), torch.nn.Linear(2, 2)
        )
        self.model[3].requires_grad_(False)
        self.model[3].register_buffer("cache", None)
        self.optim = make([p for p in self.model.parameters() if p.requires_grad])
        self.adapter = TorchAdapter(self.model, self.optim)
        self.train()
        self.manifest = Manifest(self.adapter)

    def train(self) -> None:
        self.optim.zero_grad()
        self.model(torch.randn(5, 4)).square().sum().backward()
        self.optim.step()

    @property
    def parameter(self) -> torch.nn.Parameter:
        parameter: torch.nn.Parameter = self.model[2].weight
        return parameter

    @property
    def last_state(self) -> dict[str, Any]:
        """The optimizer's state of the last parameter."""
        state: dict[str, Any] = self.optim.state[self.model[2].bias]
        return state


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


@pytest.fixture(params=[adam, sgd, Plain])
def job(request: pytest.FixtureRequest) -> Job:
    return Job(request.param)


@pytest.fixture
def plain() -> Job:
    return Job(Plain)


# ------------------------------------------------------------------ what is noticed


OTHER_TENSORS: dict[str, Callable[[Job], object]] = {
    "another parameter": lambda job: setattr(job.model[2], "weight", torch.nn.Parameter(job.parameter.clone())),
    "a parameter in other memory": lambda job: setattr(job.parameter, "data", job.parameter.data.clone()),
    "a frozen one in other memory": lambda job: setattr(job.model[3].bias, "data", job.model[3].bias.data.clone()),
    "another buffer": lambda job: setattr(job.model[1], "running_mean", torch.zeros(6)),
    "a buffer in other memory": lambda job: setattr(job.model[1].running_mean, "data", torch.zeros(6)),
    "one more buffer": lambda job: job.model[0].register_buffer("extra", torch.zeros(1)),
    "a buffer that was none": lambda job: setattr(job.model[3], "cache", torch.zeros(1)),
    "a buffer less": lambda job: delattr(job.model[1], "num_batches_tracked"),
    "one more parameter": lambda job: setattr(job.model[0], "scale", torch.nn.Parameter(torch.zeros(1))),
    "a parameter less": lambda job: setattr(job.model[3], "bias", None),
    "one more module": lambda job: job.model.append(torch.nn.Linear(2, 2)),
    "one more far below": lambda job: setattr(job.model[2], "below", torch.nn.Sequential(torch.nn.Linear(1, 1))),
    "another module": lambda job: job.model.__setitem__(3, torch.nn.Linear(2, 2)),
    "one more group": lambda job: job.optim.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]}),
    "another in a group": lambda job: job.optim.param_groups[0]["params"].__setitem__(
        -1, torch.nn.Parameter(torch.zeros(2))
    ),
    "others in a group": lambda job: job.optim.param_groups[0].update(params=[torch.nn.Parameter(torch.zeros(2))]),
}


@pytest.mark.parametrize("change", OTHER_TENSORS.values(), ids=OTHER_TENSORS)
def test_other_tensors_are_noticed(job: Job, change: Callable[[Job], object]) -> None:
    assert is_current(job.manifest)
    change(job)
    assert not is_current(job.manifest)
    assert is_current(Manifest(job.adapter))


@pytest.mark.parametrize("make", [adam, Plain])
def test_optimizer_state_that_was_loaded_is_noticed(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    job = Job(make)
    job.optim.load_state_dict(Job(make).optim.state_dict())
    assert not is_current(job.manifest)
    assert is_current(Manifest(job.adapter))


OTHER_STATE: dict[str, Callable[[dict[str, Any]], object]] = {
    "a tensor by another name": lambda state: state.update(total=state.pop("sum")),
    "a value by another name": lambda state: state.update(other=state.pop("last")),
    "another tensor": lambda state: state.update(sum=state["sum"].clone()),
    "a tensor in other memory": lambda state: setattr(state["sum"], "data", state["sum"].data.clone()),
    "one more tensor": lambda state: state.update(more=torch.zeros(2)),
    "one more value": lambda state: state.update(more=1),
    "a tensor for the first value": lambda state: state.update(step=torch.tensor(1.0)),
    "a tensor for the last value": lambda state: state.update(last=torch.tensor(1.0)),
    "a value for a tensor": lambda state: state.update(sum=0.0),
    "nothing": dict.clear,
    "an entry less": dict.popitem,
}


@pytest.mark.parametrize("change", OTHER_STATE.values(), ids=OTHER_STATE)
@pytest.mark.parametrize("whose", ["first", "last"])
def test_other_optimizer_state_is_noticed(plain: Job, change: Callable[[dict[str, Any]], object], whose: str) -> None:
    state = plain.last_state if whose == "last" else plain.optim.state[plain.model[0].weight]
    change(state)
    assert not is_current(plain.manifest)
    assert is_current(Manifest(plain.adapter))


def test_state_that_appears_or_goes_is_noticed(job: Job) -> None:
    job.optim.state[torch.nn.Parameter(torch.zeros(1))] = {}
    assert not is_current(job.manifest)
    manifest = Manifest(job.adapter)
    job.optim.state.clear()
    assert not is_current(manifest)


def test_the_first_step_of_an_optimizer_is_noticed() -> None:
    model = torch.nn.Linear(2, 2)
    optim = torch.optim.Adam(model.parameters())
    manifest = Manifest(TorchAdapter(model, optim))
    model(torch.ones(1, 2)).sum().backward()
    assert is_current(manifest)
    optim.step()
    assert not is_current(manifest)


def test_what_was_replaced_is_noticed_though_its_memory_is_used_again(job: Job) -> None:
    for _ in range(20):
        manifest = Manifest(job.adapter)
        job.model[1].running_mean = torch.zeros(6)
        assert not is_current(manifest)


# ------------------------------------------------------------------ another form in the same memory


FORMS: dict[str, Callable[[torch.Tensor], object]] = {
    "transposed": torch.Tensor.t_,
    "transposed data": lambda tensor: setattr(tensor, "data", tensor.data.t()),
    "flat": lambda tensor: setattr(tensor, "data", tensor.data.view(-1)),
    "a row less": lambda tensor: setattr(tensor, "data", tensor.data[:-1]),
    "more, with the same strides": lambda tensor: setattr(tensor, "data", tensor.data.as_strided((3, 2), (2, 1))),
    "as many elements": lambda tensor: setattr(tensor, "data", tensor.data.as_strided((2, 2), (1, 2))),
    "as many, with the same strides": lambda tensor: setattr(tensor, "data", tensor.data.as_strided((4, 1), (2, 1))),
}


@pytest.mark.parametrize("change", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_another_form_in_the_same_memory_is_noticed_by_name(
    change: Callable[[torch.Tensor], object], which: int
) -> None:
    tensors = [torch.zeros(8)[:4].view(2, 2) for _ in range(3)]
    manifest = Manifest(Toy([LiveTensor(f"w{i}", tensor, Change.STEP) for i, tensor in enumerate(tensors)]))
    assert manifest.reshaped() == []
    change(tensors[which])
    assert not manifest.has_moved()
    assert manifest.reshaped() == [f"w{which}"]


def test_other_values_in_the_same_form_are_none(job: Job) -> None:
    for change in (Job.train, zero_grad, change_in_place):
        change(job)
        assert job.manifest.reshaped() == []


# ------------------------------------------------------------------ what is not noticed


def zero_grad(job: Job) -> None:
    job.optim.zero_grad(set_to_none=True)


def backward(job: Job) -> None:
    job.model(torch.randn(5, 4)).sum().backward()


def change_in_place(job: Job) -> None:
    with torch.no_grad():
        for tensor in [*job.model.parameters(), *job.model.buffers()]:
            tensor.copy_(torch.ones_like(tensor))
        for tensor in job.model.parameters():
            tensor.data.mul_(2)


def change_options(job: Job) -> None:
    job.optim.param_groups[0]["lr"] = 0.25


def change_mode(job: Job) -> None:
    job.model.eval()


@pytest.mark.parametrize("change", [Job.train, zero_grad, backward, change_in_place, change_options, change_mode])
def test_other_values_of_the_same_tensors_are_not_noticed(job: Job, change: Callable[[Job], None]) -> None:
    for _ in range(3):
        change(job)
        assert is_current(job.manifest)


def test_plain_values_of_an_optimizer_may_change(plain: Job) -> None:
    plain.last_state["step"] = 10**20
    plain.last_state["last"] = "text"
    assert is_current(plain.manifest)


# ------------------------------------------------------------------ what it holds


def test_every_tensor_is_held_by_what_changes_it() -> None:
    job = Job(Plain)
    buffers = ["model0.1.running_mean", "model0.1.running_var", "model0.1.num_batches_tracked"]
    assert {item.name: item.change for item in job.manifest.items} == {
        **{f"model0.{i}.{name}": Change.STEP for i in range(4) for name in ("weight", "bias")},
        **{f"optim.model0.{i}.{name}.sum": Change.STEP for i in range(3) for name in ("weight", "bias")},
        **dict.fromkeys(buffers, Change.ANY),
    }
    tensors = {item.name: item.tensor for item in job.manifest.items}
    assert tensors["model0.2.weight"] is job.parameter
    assert tensors["optim.model0.2.bias.sum"] is job.last_state["sum"]


def test_the_leaves_are_those_of_the_tensors() -> None:
    job = Job(Plain)
    leaves = {leaf.name: leaf for leaf in job.manifest.leaves}
    assert len(leaves) == len(job.manifest.leaves) == 17
    assert leaves["model0.2.weight"] == Leaf("model0.2.weight", "F32", (2, 6))
    assert leaves["model0.1.num_batches_tracked"] == Leaf("model0.1.num_batches_tracked", "I64", ())
    assert leaves["optim.model0.2.bias.sum"] == Leaf("optim.model0.2.bias.sum", "F32", (2,))


def test_what_only_changes_with_the_manifest_is_kept_as_json() -> None:
    job = Job(Plain)
    keys = ["step", "sum", "last"]
    names = [f"model0.{i}.{name}" for i in range(3) for name in ("weight", "bias")]
    assert json.loads(job.manifest.fixed) == {
        "state": {
            "optim": [
                {
                    "class": "tests.unit.test_manifest.Plain",
                    "prefix": "optim",
                    "order": dict.fromkeys(names, keys),
                    "groups": [names],
                    "began": 1,
                }
            ],
            "flags": {
                "parameters": [*names, "model0.3.weight", "model0.3.bias"],
                "modules": ["model0.", "model0.0", "model0.1", "model0.2", "model0.3"],
            },
            "schedulers": [],
            "export": {"wrapped": False},
        },
        "shared": {},
        "blocks": {},
        "strides": {},
    }


SHARED = Leaf("w", "F32", (2, 3))
SHARING = Sharing({"w": SHARED}, {"w": Part("w", 1, 5)})


def test_of_what_replicas_share_it_holds_its_part() -> None:
    whole = torch.arange(6.0).view(2, 3)
    manifest = Manifest(Toy([LiveTensor("w", whole, Change.STEP, True)]), SHARING)
    (part,) = manifest.items
    assert [item.tensor for item in manifest.shared] == [whole]
    assert manifest.leaves == (Leaf("w@1:5", "F32", (4,)),)
    assert part.tensor.tolist() == [1, 2, 3, 4]
    assert json.loads(manifest.fixed)["shared"] == {"w": ["F32", [2, 3]]}
    whole += 1
    assert part.tensor.tolist() == [2, 3, 4, 5]
    assert is_current(manifest)
    whole.data = whole.clone()
    assert not is_current(manifest)


@pytest.mark.parametrize("shape", [(3, 3), (3, 2), (5,)], ids=str)
def test_what_is_shared_and_has_become_another_leaf_is_no_longer_stored_as_that_part(shape: tuple[int, ...]) -> None:
    """Otherwise the state would seem to fit the slots, and nobody would keep what has grown."""
    adapter = Toy([LiveTensor("w", torch.zeros(2, 3), Change.STEP, True)])
    before = Manifest(adapter, SHARING)
    assert before.leaves == (Leaf("w@1:5", "F32", (4,)),)
    adapter.live[0] = LiveTensor("w", torch.zeros(shape), Change.STEP, True)
    assert not is_current(before)
    assert set(Manifest(adapter, SHARING).leaves) != set(before.leaves)


def test_a_tensor_that_cannot_be_captured_is_named() -> None:
    adapter = Toy([LiveTensor("model.weight", torch.zeros(2, device="meta"), Change.STEP)])
    with pytest.raises(ConfigError, match=r"model\.weight lives on meta"):
        Manifest(adapter)


def test_a_fixed_value_that_cannot_be_kept_is_named() -> None:
    with pytest.raises(StateMismatch, match=r"fixed\.order\.1 is a builtins\.object"):
        Manifest(Toy(fixed_tree={"order": ["a", object()]}))
