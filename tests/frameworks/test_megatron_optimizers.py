"""State that megatron-core's optimizers keep outside of torch's optimizer state. The classes are megatron-core's own;
Transformer Engine and the GPU are replaced by stand-ins."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

from holdfast.chaos.megatron_cpu import _EagerStream
from holdfast.integrations.adapters.megatron_optimizers import (
    FusedAdamState,
    HybridState,
    check_quantized_anew,
    check_quantizes,
    check_weights,
    is_quantized,
    keeps_scales,
    stepped,
)
from holdfast.smp_daemon.shared.errors import ConfigError, StateMismatch
from holdfast.snapshot.copy.tensors import leaf_of
from holdfast.snapshot.state.adapter import SCALING, Adapter, put_back_scaling, scaling
from holdfast.snapshot.state.optimizers import OptimizerState
from tests.proof.standins import fused_adam, offload, quantized

SIZES = (6, 4, 5)


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(size, generator=generator).bfloat16()) for size in SIZES]


def names(of: list[torch.nn.Parameter]) -> dict[torch.Tensor, str]:
    return {parameter: f"p{i}" for i, parameter in enumerate(of)}


def train(optimizer: Any, of: list[torch.nn.Parameter], steps: range) -> None:
    """Take steps whose gradients are a function of the step's number."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in of:
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad, parameter.decoupled_grad = gradient.bfloat16(), gradient  # type: ignore[attr-defined]
        optimizer.step()


def bytes_of(of: list[torch.nn.Parameter]) -> list[list[int]]:
    return [parameter.detach().view(torch.int16).tolist() for parameter in of]


def move(state: OptimizerState, main: dict[str, torch.Tensor], into: OptimizerState) -> None:
    """Move state as a snapshot does: fill everything that `state` names into another job's `into`."""
    held = {each.name: each.tensor.clone() for each in state.tensors()}
    listed = state.look()
    plain, fixed = listed.late(), listed.fixed
    main = {name: each.clone() for name, each in main.items()}
    into.check(plain, fixed)
    into.materialise({name: leaf_of(name, each) for name, each in held.items()})
    live = {each.name: each.tensor for each in into.tensors()}
    assert live.keys() == held.keys()
    for name, each in held.items():
        live[name].copy_(each)
    for name, parameter in into.parameters():
        with torch.no_grad():
            stepped(into.optimizer, parameter).copy_(main[name])
    into.load(plain, fixed)


def mains(state: OptimizerState) -> dict[str, torch.Tensor]:
    return {name: stepped(state.optimizer, parameter).detach() for name, parameter in state.parameters()}


# ---------------------------------------------------------------------- CPU offload


@pytest.fixture
def hybrid(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes megatron-core's own optimizer: ``hybrid(parameters, fraction, overlap)``."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    split = HybridDeviceOptimizer._get_sub_optimizer_param_groups
    monkeypatch.setattr(HybridDeviceOptimizer, "_get_sub_optimizer_param_groups", split)  # undoes `install`
    monkeypatch.setattr(torch.cuda, "Stream", _EagerStream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", _EagerStream)
    offload.install()

    def make(of: list[torch.nn.Parameter], fraction: float, overlap: bool = False) -> Any:
        return HybridDeviceOptimizer(
            [{"params": of[:2]}, {"params": of[2:], "lr": 0.02}],
            offload_fraction=fraction,
            cpu_optimizer_cls=torch.optim.AdamW,
            gpu_optimizer_cls=fused_adam.FusedAdam,
            param_update_in_fp32=True,
            pin_cpu_grads=False,
            overlap_cpu_optimizer_d2h_h2d=overlap,
            lr=0.01,
        )

    return make


def hybrid_state(optimizer: Any, of: list[torch.nn.Parameter]) -> HybridState:
    return HybridState(optimizer, "optim0", names=names(of), replicated=True, blocks=lambda _: None)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("fraction", "offloaded"), [(0.0, 0), (0.3, 1), (0.5, 2), (1.0, 3)])
def test_an_offloaded_optimizer_goes_on_bit_for_bit(
    hybrid: Any, fraction: float, offloaded: int, overlap: bool
) -> None:
    whole, first, second = parameters(), parameters(), parameters()
    train(hybrid(whole, fraction, overlap), whole, range(7))
    before = hybrid(first, fraction, overlap)
    train(before, first, range(4))
    state = hybrid_state(before, first)
    kinds = [kind.rpartition(".")[2] for kind in state.look().fixed["inside"].values()]
    assert kinds == ["AdamW"] * offloaded + ["FusedAdam"] * (3 - offloaded)
    after = hybrid(second, fraction, overlap)
    restored = hybrid_state(after, second)
    move(state, mains(state), restored)
    assert bytes_of(second) == bytes_of(first)
    train(after, second, range(4, 7))
    assert bytes_of(second) == bytes_of(whole)


def test_copies_are_state_once(hybrid: Any) -> None:
    of = parameters()
    optimizer = hybrid(of, 0.5)
    state = hybrid_state(optimizer, of)
    train(optimizer, of, range(2))
    found = {each.name for each in state.tensors()}
    assert "optim0.p0.exp_avg" in found
    assert not any(name.endswith("master_param") for name in found)
    assert {id(copy) for _, copy in state.copies()} == {id(each) for each in optimizer.param_to_fp32_param.values()}


def test_another_fraction_than_the_snapshots_is_refused(hybrid: Any) -> None:
    first, second = parameters(), parameters()
    before = hybrid(first, 1.0)
    train(before, first, range(2))
    state, other = hybrid_state(before, first), hybrid_state(hybrid(second, 0.5), second)
    listed = state.look()
    plain = listed.late()
    with pytest.raises(StateMismatch, match=r"p2 by .*AdamW, now .*FusedAdam.*fraction"):
        other.check(plain, listed.fixed)


def test_a_state_that_is_loaded_while_it_trains_is_noticed(hybrid: Any) -> None:
    of = parameters()
    optimizer = hybrid(of, 1.0, overlap=True)
    state = hybrid_state(optimizer, of)
    train(optimizer, of, range(2))
    listed = state.look()
    listed.late()
    optimizer._init_sub_optimizers()  # as its `load_state_dict` does
    with pytest.raises(StateMismatch, match=r"inner optimizers .*replaced"):
        listed.late()
    with pytest.raises(StateMismatch, match=r"inner optimizers .*replaced"):
        state.look()


def test_scales_inside_an_offloaded_optimizer_are_refused(hybrid: Any) -> None:
    of = parameters()
    optimizer = hybrid(of, 0.0)
    state = hybrid_state(optimizer, of)
    optimizer.gpu_optimizer._scales[of[0]] = {"exp_avg": torch.ones(1)}
    with pytest.raises(ConfigError, match=r"FusedAdam .*moments in 16"):
        list(state.tensors())


# ---------------------------------------------------------------------- precision


def aware(
    of: list[torch.nn.Parameter], moments: torch.dtype, *, master_weights: bool = True, **options: Any
) -> fused_adam.FusedAdam:
    return fused_adam.FusedAdam(
        of,
        lr=0.01,
        exp_avg_dtype=moments,
        exp_avg_sq_dtype=moments,
        use_decoupled_grad=True,
        master_weights=master_weights,
        **options,
    )


@pytest.mark.parametrize(
    ("make", "scales"),
    [
        (partial(aware, moments=torch.float32), 0),
        (partial(aware, moments=torch.bfloat16, store_param_remainders=True), 6),
        (partial(aware, moments=torch.float16, master_weight_dtype=torch.float16), 9),
        (partial(aware, moments=torch.bfloat16, master_weights=False), 6),
    ],
)
def test_narrow_moments_come_back_with_their_scales(make: Any, scales: int) -> None:
    whole, first, second = parameters(), parameters(), parameters()
    train(make(whole), whole, range(7))
    before, after = make(first), make(second)
    assert keeps_scales(before)
    train(before, first, range(4))
    state = FusedAdamState(before, "optim0", names=names(first), replicated=False)
    assert sum(each.name.endswith(".scale") for each in state.tensors()) == scales
    restored = FusedAdamState(after, "optim0", names=names(second), replicated=False)
    move(state, mains(state), restored)
    train(after, second, range(4, 7))
    assert bytes_of(second) == bytes_of(whole)


def test_what_was_made_for_a_snapshot_that_does_not_fit_is_taken_away() -> None:
    first, second = parameters(), parameters()
    before, after = aware(first, torch.float16), aware(second, torch.float16)
    train(before, first, range(2))
    state = FusedAdamState(before, "optim0", names=names(first), replicated=False)
    restored = FusedAdamState(after, "optim0", names=names(second), replicated=False)
    restored.materialise({each.name: leaf_of(each.name, each.tensor) for each in state.tensors()})
    assert after.state and after._scales
    restored.undo.close()
    assert not after.state and not after._scales


def test_moments_in_eight_bits_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"exp_avg in 8 bits.*--exp-avg-dtype bf16"):
        FusedAdamState(aware(parameters(), torch.uint8), "optim0", names={}, replicated=False)


# ---------------------------------------------------------------------- weights in 8 bits


def weight(recipe: str) -> Any:
    layer = torch.nn.Linear(32, 4, bias=False, dtype=torch.bfloat16)
    quantized._quantize(layer, recipe)
    return layer.weight


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "mxfp8"])
def test_weights_that_are_quantized_anew_are_the_same_or_refused(recipe: str) -> None:
    of = weight(recipe)
    assert is_quantized(of)
    check_weights({of: "model0.w"})
    main, held = of.get_high_precision_init_val(), of._data.clone()
    check_quantized_anew({of: "model0.w"}, lambda: of._quantizer.quantize(main, of))
    with pytest.raises(StateMismatch, match=r"model0\.w .*quantizing .*anew"):
        check_quantized_anew({of: "model0.w"}, lambda: of._quantizer.quantize(-main, of))
    assert torch.equal(of._data, held)

    def quantize_half() -> None:
        of._quantizer.quantize(-main, of)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        check_quantized_anew({of: "model0.w"}, quantize_half)
    assert torch.equal(of._data, held)


def test_weights_of_an_unknown_class_are_refused_by_name() -> None:
    class GroupedTensor(quantized.QuantizedTensor):
        """A class of a later release."""

    of: Any = torch.nn.Parameter(
        GroupedTensor((2, 2), torch.bfloat16, torch.zeros(2, 2, dtype=torch.uint8), torch.ones(1), None)
    )
    with pytest.raises(ConfigError, match=r"model0\.w .*GroupedTensor.*--fp8-param"):
        check_weights({of: "model0.w"})


def test_weights_in_eight_bits_without_main_parameters_are_refused() -> None:
    aware = SimpleNamespace(config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=True))
    with pytest.raises(ConfigError, match=r"FusedAdam steps itself .*--use-precision-aware-optimizer"):
        check_quantizes(aware)
    layers = object.__new__(LayerWiseDistributedOptimizer)
    layers.chained_optimizers = []
    with pytest.raises(ConfigError, match=r"layer-wise optimizer"):
        check_quantizes(layers)
    check_quantizes(SimpleNamespace(config=SimpleNamespace()))


# ---------------------------------------------------------------------- extra state


def of_transformer_engine(method: Any) -> Any:
    method.__module__ = "transformer_engine.pytorch.module.base"
    return method


class Scaled(torch.nn.Module):
    """A layer with delayed scaling. Without `unpickles` it has no room for the scaling state, like a Transformer Engine
    that does not unpickle."""

    def __init__(self, unpickles: bool = True, length: int = 4) -> None:
        super().__init__()
        self.unpickles = unpickles
        self.fp8_meta: dict[str, Any] = {}
        if unpickles:
            self.fp8_meta = {"scaling_fwd": quantized.Scaling(), "scaling_bwd": quantized.Scaling()}
            self.fp8_meta["scaling_fwd"].amax_history = torch.zeros(length, 3)
            self.fp8_meta["recipe"] = SimpleNamespace(margin=0)
        self.asked = 0

    @of_transformer_engine
    def get_extra_state(self) -> torch.Tensor:
        """In Transformer Engine this waits for the device."""
        self.asked += 1
        return torch.full((3,), self.fp8_meta.get("recipe", SimpleNamespace(margin=0)).margin, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Does nothing, like a Transformer Engine that only warns."""


def test_delayed_scaling_comes_back_though_extra_state_is_not_unpickled() -> None:
    layer, other = Scaled(), Scaled()
    for number, each in enumerate(scaling(layer).values()):
        each.fill_(number + 1.0)
    held = {key: each.clone() for key, each in scaling(layer).items()}
    assert sorted(held) == [f"scaling_{way}.{key}" for way in ("bwd", "fwd") for key in ("amax_history", "scale")]
    put_back_scaling("model0.0", other, held)
    assert other.fp8_meta["scaling_fwd"].amax_history.tolist() == [[2.0] * 3] * 4
    assert other.fp8_meta["scaling_bwd"].scale.tolist() == [3.0]


@pytest.mark.parametrize("other", [Scaled(unpickles=False), Scaled(length=5), torch.nn.Linear(1, 1)])
def test_delayed_scaling_without_room_for_it_is_an_error(other: torch.nn.Module) -> None:
    with pytest.raises(StateMismatch, match=r"model0\.0: .*NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1"):
        put_back_scaling("model0.0", other, scaling(Scaled()))


def test_extra_state_that_waits_for_the_device_is_asked_for_when_it_may_have_changed() -> None:
    layer = Scaled()
    adapter = Adapter(torch.nn.Sequential(layer, torch.nn.Linear(2, 2)), [], None, None)
    found = [adapter.look().late()["get_extra_state"]["model0.0"] for _ in range(3)]
    layer.fp8_meta["scaling_fwd"].scale.fill_(7.0)
    adapter.look().late()
    assert layer.asked == 1
    layer.fp8_meta["recipe"].margin = 2
    changed = adapter.look().late()["get_extra_state"]["model0.0"]
    assert [each.tolist() for each in (*found, changed)] == [[0] * 3] * 3 + [[2] * 3]
    layer.fp8_meta["num_gemms"] = 1
    adapter.look().late()
    layer.fp8_meta["scaling_fwd"].amax_history = torch.zeros(9, 3)
    adapter.look().late()
    assert layer.asked == 4
    other = Scaled(unpickles=False)  # it has no scaling, so whatever it gives may change
    for _ in range(3):
        Adapter(torch.nn.Sequential(other, torch.nn.Linear(2, 2)), [], None, None).look().late()
    assert other.asked == 3


def test_the_adapters_keep_delayed_scaling_with_the_extra_state() -> None:
    model: Any = torch.nn.Sequential(Scaled(), torch.nn.Linear(2, 2))
    adapter = Adapter(model, [], None, None)
    model[0].fp8_meta["scaling_fwd"].scale.fill_(7.0)
    listed = adapter.look()
    late = listed.late()
    assert late[SCALING].keys() == {"model0.0"}
    model[0].fp8_meta["scaling_fwd"].scale.fill_(1.0)
    adapter.load(adapter.early(), late, listed.fixed)
    assert model[0].fp8_meta["scaling_fwd"].scale.tolist() == [7.0]
    assert SCALING not in Adapter(model[1], [], None, None).look().late()
