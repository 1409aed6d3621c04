"""megatron-core's optimizers: which are captured, what part of them is state, and what is derived from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from holdfast.integrations.adapters.fused_adam import FusedAdamState, keeps_scales
from holdfast.integrations.adapters.megatron_offload import HybridState, is_hybrid
from holdfast.integrations.adapters.transformer_engine import is_quantized
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.snapshot.copy.tensors import Block
from holdfast.snapshot.state.optimizers import OptimizerState

CHAINS = ("ChainedOptimizer", "LayerWiseDistributedOptimizer")
"""Classes that chain several optimizers."""

CAPTURED = ("DistributedOptimizer", "Float16OptimizerWithFloat16Params", "FP32Optimizer")
"""Optimizer classes that are captured, alone or in a chain, whatever torch optimizer they wrap."""


def parts(optim: Any) -> list[Any]:
    """The optimizers in a chain, also in nested chains, without those that step nothing."""
    if not hasattr(optim, "chained_optimizers"):
        return [] if getattr(optim, "is_stub_optimizer", False) else [optim]
    return [part for each in optim.chained_optimizers for part in parts(each)]


def chains(optim: Any) -> Iterator[Any]:
    """`optim`, if it is a chain, and all chains in it."""
    if hasattr(optim, "chained_optimizers"):
        yield optim
        for each in optim.chained_optimizers:
            yield from chains(each)


def layer_wise(optim: Any) -> list[Any]:
    """The chains in which each rank steps whole layers and sends them to the others."""
    return [each for each in chains(optim) if type(each).__name__ == "LayerWiseDistributedOptimizer"]


def check_captured(optim: Any, chunks: Sequence[Any]) -> None:
    """Raises `ConfigError` if there is a kind of state that would not be restored, or was never tried."""
    for chain in chains(optim):
        if type(chain).__name__ not in CHAINS:
            known = ", ".join(CHAINS)
            raise ConfigError(f"{type(chain).__name__} is not a supported chain of optimizers: use {known}")
    for part in parts(optim):
        if not _names(part) & set(CAPTURED):
            known = ", ".join(CAPTURED)
            raise ConfigError(f"{type(part).__name__} is not a supported optimizer of megatron-core: use {known}")
        if getattr(getattr(part, "config", None), "offload_optimizer_states", False):
            raise ConfigError(
                "--offload-optimizer-states releases the memory of optimizer state while it is copied from the device: "
                "train without it; --optimizer-cpu-offload is captured"
            )
    if any(getattr(getattr(chunk, "ddp_config", None), "use_megatron_fsdp", False) for chunk in chunks):
        raise ConfigError(
            "Megatron-FSDP is not captured: it keeps weights, gradients and main parameters in buffers of its own; "
            "train without --use-megatron-fsdp, or with FSDP2"
        )


def check_quantizes(optim: Any) -> None:
    """Raises `ConfigError` unless weights in 8 or 4 bits are made from known main parameters."""
    if layer_wise(optim):
        raise ConfigError(
            "weights in 8 or 4 bits that are stepped layer by layer are not captured, as that was never tested: train "
            "without --fp8-param-gather, or without a layer-wise optimizer"
        )
    if any(getattr(part.config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False) for part in parts(optim)):
        raise ConfigError(
            "weights in 8 bits that FusedAdam steps itself are not captured: there are no main parameters to quantize "
            "them from; train without --use-precision-aware-optimizer, or without --fp8-param-gather"
        )


def state_of(part: Any, prefix: str, *, replicated: bool, weights: Mapping[torch.Tensor, str]) -> OptimizerState:
    """The state of the torch optimizer that `part` wraps. `weights`: the names of the model's parameters."""
    shards = {main: block for _, main, block in _shards(part)}
    named = {main: weights[weight] for weight, main in mains(part) if weight in weights}
    kind: type[OptimizerState] = OptimizerState
    if is_hybrid(part.optimizer):
        kind = HybridState
    elif keeps_scales(part.optimizer):
        kind = FusedAdamState
    return kind(part.optimizer, prefix, replicated=replicated, names={**weights, **named}, blocks=shards.get)


def is_divided(part: Any) -> bool:
    """Whether the parameters are divided among the data-parallel ranks, cut at any element."""
    return hasattr(part, "shard_fp32_from_float16_groups")


def mains(part: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(weight, main parameter) for each weight that has a separate main parameter."""
    yield from ((weight, main) for weight, main, _ in _shards(part))
    if hasattr(part, "fp32_from_float16_groups"):
        for weights, of_group in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            yield from zip(weights, of_group, strict=True)


def casts(part: Any) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, 16-bit weight, main parameter), flat and of equal length, for each weight that is not captured."""
    if is_divided(part):
        for g, group in enumerate(part.model_float16_groups):
            for i, weight in enumerate(group):
                if is_quantized(weight):
                    continue
                piece = part._get_model_param_range_map(weight)["param"]
                main = part.shard_fp32_from_float16_groups[g][i]
                if main is not None:
                    yield f"group {g} parameter {i}", weight.detach().view(-1)[piece.start : piece.end], main.view(-1)
    elif hasattr(part, "fp32_from_float16_groups"):
        for g, group in enumerate(part.float16_groups):
            for i, weight in enumerate(group):
                main = part.fp32_from_float16_groups[g][i]
                yield f"group {g} parameter {i}", weight.detach().reshape(-1), main.detach().reshape(-1)


def _shards(part: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, Block]]:
    """(weight, main parameter, its block of the flattened weight) for a distributed optimizer, whose ranks cut weights
    at any element and renumber the pieces. Nothing for other optimizers, which are alike on all ranks."""
    if not is_divided(part):
        return
    # A precision-aware optimizer has no main parameters: it steps the shards of the 16-bit weights.
    of_weights = [
        [shard if main is None else main for main, shard in zip(*groups, strict=True)]
        for groups in zip(part.shard_fp32_from_float16_groups, part.shard_float16_groups, strict=True)
    ]
    for weights, shards in ((part.model_float16_groups, of_weights), (part.model_fp32_groups, part.shard_fp32_groups)):
        for group, of_group in zip(weights, shards, strict=True):
            for weight, shard in zip(group, of_group, strict=True):
                if shard is not None:
                    piece = part._get_model_param_range_map(weight)["param"]
                    yield weight, shard, Block((weight.numel(),), (piece.start,))


def gathers_before_casting(part: Any) -> bool:
    """Whether main parameters are gathered, in 16 bits, before weights are quantized from them."""
    return bool(getattr(getattr(part, "config", None), "reuse_grad_buf_for_mxfp8_param_ag", False))


def holds_gradients(chunk: Any) -> bool:
    """Whether the buffers of a chunk hold gradients that are not zero."""
    return any(bool(each.grad_data.any()) for each in [*chunk.buffers, *chunk.expert_parallel_buffers])


def copy_to_weights(part: Any) -> None:
    """Make the weights from the main parameters as a step does, but do not gather them."""
    if gathers_before_casting(part):
        part._copy_main_params_to_param_buffer()
    elif hasattr(part, "_copy_main_params_to_model_params"):
        part._copy_main_params_to_model_params()


def _names(of: object) -> set[str]:
    """The names of an object's class and base classes."""
    return {each.__name__ for each in type(of).__mro__}
