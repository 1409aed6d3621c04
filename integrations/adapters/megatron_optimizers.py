"""megatron-core's optimizers: which are captured, what part of them is state, and what is derived from it.

Transformer Engine's weights in 8 or 4 bits are not captured: megatron-core's own functions quantize them anew from the
main parameters. A check runs these functions once and compares all bytes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from holdfast.smp_daemon.shared.errors import ConfigError, StateMismatch
from holdfast.smp_daemon.shared.logs import some
from holdfast.smp_daemon.shared.slotfile import Leaf
from holdfast.snapshot.copy.tensors import Block, local
from holdfast.snapshot.state.live import Change, Container, LiveTensor, Look, Tree, refill
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
    return {each.__name__ for each in type(of).__mro__}


SCALE = ".scale"


def keeps_scales(optimizer: object) -> bool:
    """Whether this is the FusedAdam of a precision-aware Transformer Engine, 2.0 or newer."""
    return all(hasattr(optimizer, name) for name in ("_scales", "initialize_state", "name_to_dtype_map"))


class FusedAdamState(OptimizerState):
    """The state of Transformer Engine's FusedAdam, which makes an optimizer precision-aware: it may keep moments in 16
    bits, main parameters of its own, and the scales of both beside its state.

    Raises:
        ConfigError: moments are kept in 8 bits.
    """

    optimizer: Any

    def __init__(self, optimizer: Any, prefix: str, **options: Any) -> None:
        super().__init__(optimizer, prefix, **options)
        narrow = [name for name, dtype in optimizer.name_to_dtype_map.items() if dtype == torch.uint8]
        if narrow:
            raise ConfigError(
                f"{prefix}: FusedAdam keeps {narrow[0]} in 8 bits, in a tensor class of Transformer Engine that was "
                f"never tested: train with --{narrow[0].replace('_', '-')}-dtype bf16"
            )

    def tensors(self) -> Iterator[LiveTensor]:
        """Moments, main parameters, and the scales of both."""
        yield from super().tensors()
        for name, parameter in self.parameters():
            for entry, scale in self.optimizer._scales.get(parameter, {}).items():
                yield LiveTensor(f"{self._prefix}.{name}.{entry}{SCALE}", scale, Change.STEP)

    def watched(self) -> Iterator[Container]:
        """The base's containers, and those of the scales."""
        yield from super().watched()
        yield self.optimizer._scales
        yield from self.optimizer._scales.values()

    def materialise(self, leaves: Mapping[str, Leaf]) -> None:
        """Let the optimizer create its own state."""
        held = self.optimizer
        self.undo.callback(refill, held._scales, dict(held._scales))
        self.undo.callback(refill, held.state, {key: dict(state) for key, state in held.state.items()})
        for name, parameter in self.parameters():
            if not self.optimizer.state.get(parameter) and f"{self._prefix}.{name}.exp_avg" in leaves:
                self._initialise(parameter)
        super().materialise({name: leaf for name, leaf in leaves.items() if not name.endswith(SCALE)})

    def _initialise(self, parameter: torch.Tensor) -> None:
        make = self.optimizer.initialize_state
        remainders = getattr(self.optimizer, "store_param_remainders", False) and parameter.dtype == torch.bfloat16
        several = len(inspect.signature(make).parameters) > 1  # since Transformer Engine 2.1
        make(parameter, remainders) if several else make(parameter)


COPY = "master_param"
"""The entry of a parameter's state under which the optimizer also lists the copy."""


def is_hybrid(optimizer: object) -> bool:
    """Whether this is a HybridDeviceOptimizer."""
    return any(kind.__name__ == "HybridDeviceOptimizer" for kind in type(optimizer).__mro__)


def stepped(optimizer: Any, parameter: torch.Tensor) -> torch.Tensor:
    """The tensor that is stepped for a parameter: the parameter itself or, in a hybrid optimizer, its copy if any."""
    found: torch.Tensor = (
        optimizer.param_to_inner_param.get(parameter, parameter) if is_hybrid(optimizer) else parameter
    )
    return found


class HybridState(OptimizerState):
    """CPU offload: the state of a HybridDeviceOptimizer, by its own parameters, whose inner optimizers step copies of
    them. The copies are state, and the inner optimizers hold the moments; the parameters are filled from the copies
    after each step, and likewise after a restore. `tensors` leaves out the copies: see `stepped`.

    Args: those of `OptimizerState`, but replicas never divide this state: `replicated` has no effect.
    """

    optimizer: Any

    def __init__(self, optimizer: Any, prefix: str, **options: Any) -> None:
        super().__init__(optimizer, prefix, **options | {"replicated": False})
        self.inside: list[Any] = list(optimizer.sub_optimizers)

    def tensors(self) -> Iterator[LiveTensor]:
        """Moments and the like. Raises `ConfigError` if an inner optimizer keeps scales beside its state."""
        for each in self.inside:
            if getattr(each, "_scales", None):
                raise ConfigError(
                    f"{self._prefix}: {type(each).__qualname__} inside a HybridDeviceOptimizer keeps moments in 16 or "
                    "8 bits, which was never tested: use moments in 32 bits, or no --optimizer-cpu-offload"
                )
        copies = {id(copy) for copy in self.optimizer.param_to_inner_param.values()}
        return (each for each in super().tensors() if id(each.tensor) not in copies)

    def watched(self) -> Iterator[Container]:
        """The containers that persist. In each step the optimizer makes its own ``state`` and the inner groups anew."""
        yield self.optimizer.param_groups
        for group in self.optimizer.param_groups:
            yield group
            yield group["params"]
        for each in self.inside:
            yield each.state
            yield from each.state.values()

    def look(self) -> Look:
        """The base's, and the class of the optimizer that steps each parameter; values as in `_with_options`."""
        self._check_inside()
        found = super().look()
        return Look(found.fixed | {"inside": self._kinds()}, lambda: self._with_options(found))

    def _with_options(self, found: Look) -> Tree:
        """The base's, and options that the inner optimizers have added to their groups, such as FusedAdam's
        ``step``."""
        self._check_inside()
        return found.late() | {
            "inside": {
                name: {k: group[k] for k in group.keys() - given} for name, group, given in self._groups_inside()
            }
        }

    def _check_inside(self) -> None:
        """Raises `StateMismatch` if the inner optimizers were replaced since this object was made."""
        if [*map(id, self.optimizer.sub_optimizers)] != [*map(id, self.inside)]:
            raise StateMismatch(
                f"the inner optimizers of {self._prefix} were replaced, as load_state_dict does: load its state before "
                "the hook is entered, not while it trains"
            )

    def check(self, plain: Tree, fixed: Tree) -> None:
        """Raises `StateMismatch` as the base does, and if another kind of optimizer stepped a parameter before."""
        super().check(plain, fixed)
        held, have = fixed["inside"], self._kinds()
        moved = [f"{name} by {held[name]}, now {have[name]}" for name in have if have[name] != held[name]]
        if moved or plain["inside"].keys() != {name for name, _, _ in self._groups_inside()}:
            raise StateMismatch(
                f"{self._prefix} offloads other parameters than in the snapshot: {some(moved) or 'in other groups'}. "
                "Restore with the --optimizer-offload-fraction, and the overlap, that the snapshot was taken with"
            )

    def materialise(self, leaves: Mapping[str, Leaf]) -> None:
        """As the base, but on the devices of the copies."""
        super().materialise(leaves)
        for parameter, state in self.optimizer.state.items():
            device = stepped(self.optimizer, parameter).device
            state |= {k: torch.empty_like(v, device=device) for k, v in state.items() if v.device != device}

    def load(self, plain: Tree, fixed: Tree) -> None:
        """As the base; then give the inner optimizers their state, and fill the parameters from the copies."""
        for name, parameter in self.parameters():
            if COPY in fixed["order"][name]:
                self.optimizer.state.setdefault(parameter, {})[COPY] = stepped(self.optimizer, parameter)
        super().load(plain, fixed)
        original = self.optimizer.inner_param_to_orig_param
        for name, group, _ in self._groups_inside():
            group |= plain["inside"][name]
        for each in self.inside:
            each.state.clear()
            copies = [copy for group in each.param_groups for copy in group["params"]]
            held = self.optimizer.state
            each.state.update({copy: held[original[copy]] for copy in copies if original[copy] in held})
        with torch.no_grad():
            for parameter, copy in self.copies():
                parameter.copy_(copy)

    def copies(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(parameter, copy) for each parameter that has a separate copy."""
        pairs: dict[torch.Tensor, torch.Tensor] = self.optimizer.param_to_inner_param
        return ((parameter, copy) for parameter, copy in pairs.items() if parameter is not copy)

    def _kinds(self) -> dict[str, str]:
        kinds = {
            self.optimizer.inner_param_to_orig_param[copy]: f"{type(each).__module__}.{type(each).__qualname__}"
            for each in self.inside
            for group in each.param_groups
            for copy in group["params"]
        }
        return {name: kinds[parameter] for name, parameter in self.parameters()}

    def _groups_inside(self) -> Iterator[tuple[str, dict[str, Any], set[str]]]:
        """Each inner group, by the name of its first parameter, and the names of the options that it was given."""
        given = set(self.optimizer.defaults).union(*self.optimizer.param_groups)
        names = {parameter: name for name, parameter in self.parameters()}
        for each in self.inside:
            given_inside = given | set(each.defaults)
            for group in each.param_groups:
                yield names[self.optimizer.inner_param_to_orig_param[group["params"][0]]], group, given_inside


QUANTIZED = ("Float8Tensor", "Float8BlockwiseQTensor", "MXFP8Tensor", "NVFP4Tensor")
"""Classes of quantized weights."""

PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_quantized(weight: torch.Tensor) -> bool:
    """Whether a weight is stored in 8 or 4 bits, in one of the known classes."""
    return any(kind.__name__ in QUANTIZED for kind in type(weight).__mro__)


def check_weights(weights: Mapping[torch.Tensor, str]) -> None:
    """Raises `ConfigError` if a weight's class is unknown, so that it may hold more than is captured."""
    for weight, name in weights.items():
        if type(local(weight)) not in PLAIN and not is_quantized(weight):
            known = ", ".join(QUANTIZED)
            raise ConfigError(
                f"{name} is kept as {type(weight).__name__}, which is not captured: {known} are, and plain tensors; "
                "train without --fp8-param-gather, --fp4-param-gather and --moe-single-grouped-weight"
            )


def check_quantized_anew(weights: Mapping[torch.Tensor, str], quantize: Callable[[], None]) -> None:
    """Check that `quantize` reproduces the weights. They are put back, whatever comes of it.

    Raises:
        ConfigError: a weight has no tensors that could be compared.
        StateMismatch: `quantize` made other bytes.
    """
    held = {weight: {key: part.to("cpu", copy=True) for key, part in _parts(weight).items()} for weight in weights}
    if bare := [weights[weight] for weight, parts in held.items() if not parts]:
        raise ConfigError(
            f"{bare[0]}: no tensors were found in this quantized weight, so it cannot be checked; train without "
            "--fp8-param-gather"
        )
    differ = ""
    try:
        quantize()
    finally:
        for weight, parts in held.items():
            now = _parts(weight)
            for key, part in parts.items():
                if not torch.equal(part.view(torch.uint8), now[key].cpu().view(torch.uint8)):
                    differ = differ or f"{weights[weight]} ({key})"
                now[key].copy_(part)
    if differ:
        raise StateMismatch(
            f"{differ}: quantizing the main parameter anew does not give this weight, so a restore would change it; "
            "train without --fp8-param-gather and --fp4-param-gather"
        )


def _parts(weight: Any) -> dict[str, torch.Tensor]:
    """The tensors of a quantized weight and its quantizer, without transposes and high-precision copies."""
    of_quantizer = getattr(getattr(weight, "_quantizer", None), "__dict__", {})
    found = {key: each for key, each in vars(weight).items() if key.startswith("_")}
    found |= {f"_quantizer.{key}": each for key, each in of_quantizer.items()}
    kept = (key for key in found if "transpose" not in key and "high_precision" not in key)
    return {key: found[key] for key in kept if type(found[key]) is torch.Tensor}
