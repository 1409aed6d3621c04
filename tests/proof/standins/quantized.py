"""8-bit weights like Transformer Engine's: tensors that store bytes and scales, and act as 16-bit tensors in all
computations. megatron-core's own buffers, optimizer and gathering run on them unchanged.

Recipes: ``delayed``: the scale comes from the largest values of past steps, which the layers keep as their extra state;
``tensorwise``: from the largest value of the whole tensor, over all ranks; ``mxfp8``: a scale for every 32 values.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

LARGEST = 448.0
"""The largest value of the 8-bit type with 4 bits of exponent, E4M3."""

BLOCK = 32
HISTORY = 4
"""Number of steps whose largest values are kept."""

Tensors = Sequence[torch.Tensor]


class QuantizedTensor(torch.Tensor):
    """Bytes, and the factors that they are multiplied by.

    Attributes:
        _data: the bytes.
        _scale_inv: one factor, or one for each block.
        _quantizer: computes both.
    """

    _data: torch.Tensor
    _scale_inv: torch.Tensor
    _quantizer: Any

    @staticmethod
    def __new__(
        cls, shape: Any, dtype: torch.dtype, data: torch.Tensor, scale_inv: torch.Tensor, quantizer: Any
    ) -> QuantizedTensor:
        made: QuantizedTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=data.device)
        made._data, made._scale_inv, made._quantizer = data, scale_inv, quantizer
        return made

    def dequantize(self) -> torch.Tensor:
        """The 16-bit tensor that it represents."""
        numbers = self._data.view(torch.float8_e4m3fn).float().view(self._scale_inv.numel(), -1)
        return (numbers * self._scale_inv.view(-1, 1)).view(self.shape).to(self.dtype)

    def _alias(self) -> QuantizedTensor:
        return type(self)(self.shape, self.dtype, self._data, self._scale_inv, self._quantizer)

    data = property(_alias)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]._alias()
        if func is torch.ops.aten.copy_.default and isinstance(args[0], QuantizedTensor):
            args[0]._quantizer.quantize(_plain(args[1]), args[0])
            return args[0]
        return func(*tree_map(_plain, args), **tree_map(_plain, kwargs or {}))


class Float8Tensor(QuantizedTensor):
    """A tensor with one scale."""


class MXFP8Tensor(QuantizedTensor):
    """A tensor with one scale, a power of two, for each block."""


class DelayedQuantizer:
    """Quantizes with the scale of a `Scaling`, and notes the largest value there."""

    def __init__(self, scaling: Scaling) -> None:
        self.scale = scaling.scale
        self.amax = scaling.amax_history[0]

    def quantize(self, source: torch.Tensor, into: QuantizedTensor) -> None:
        """Quantize a whole tensor."""
        self.amax.copy_(source.abs().max())
        self.prepare(into)
        self.put(source, into, 0)

    def prepare(self, into: QuantizedTensor) -> None:
        """Set the tensor's factor, once all ranks know the largest value. Each of them then puts its part."""
        into._scale_inv.copy_(self.scale.reciprocal())

    def put(self, source: torch.Tensor, into: QuantizedTensor, start: int) -> None:
        """Quantize a part of the tensor, which begins at element `start`."""
        into._data.view(-1)[start : start + source.numel()] = _bytes(source, self.scale)


class CurrentQuantizer(DelayedQuantizer):
    """Quantizes with a scale computed from the tensor itself."""

    def __init__(self) -> None:
        super().__init__(Scaling())

    def prepare(self, into: QuantizedTensor) -> None:
        """Set the scale and the tensor's factor, once all ranks know the largest value."""
        self.scale.copy_(LARGEST / self.amax)
        super().prepare(into)


class BlockQuantizer:
    """Quantizes whole tensors with a scale for each block."""

    def quantize(self, source: torch.Tensor, into: QuantizedTensor) -> None:
        """Quantize a whole tensor."""
        blocks = source.float().view(-1, BLOCK)
        exponents = torch.frexp(blocks.abs().amax(1) / LARGEST).exponent
        scales = torch.ldexp(torch.ones(exponents.shape), exponents)
        into._data.view(-1, BLOCK).copy_(_bytes(blocks, scales.reciprocal().view(-1, 1)).view(-1, BLOCK))
        into._scale_inv.copy_(scales)


class Scaling:
    """A layer's scale for its weight, and the largest values of the last steps, the newest first."""

    def __init__(self) -> None:
        self.scale = torch.ones(1)
        self.amax_history = torch.zeros(HISTORY, 1)

    def roll(self) -> None:
        """Compute the scale for the next quantization; called after each forward of training."""
        largest = self.amax_history.amax(0)
        self.scale.copy_(torch.where(largest > 0, LARGEST / largest, self.scale))
        self.amax_history.copy_(self.amax_history.roll(1, 0))
        self.amax_history[0].zero_()


def quantize_weights(model: torch.nn.Module, recipe: str) -> None:
    """Give the linear layers of the transformer 8-bit weights, as `fp8_model_init` does."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    _install()
    for name, module in model.named_modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear) and "decoder" in name:
            _quantize(module, recipe)


def _quantize(module: Any, recipe: str) -> None:
    weight = module.weight
    scaling = Scaling()
    quantizer: Any = {"delayed": lambda: DelayedQuantizer(scaling), "tensorwise": CurrentQuantizer}.get(
        recipe, BlockQuantizer
    )()
    kind = MXFP8Tensor if recipe == "mxfp8" else Float8Tensor
    scales = torch.ones(weight.numel() // BLOCK if recipe == "mxfp8" else 1)
    made = kind(weight.shape, weight.dtype, torch.zeros(weight.shape, dtype=torch.uint8), scales, quantizer)
    exact = weight.detach().clone()
    if recipe == "delayed":
        scaling.amax_history[0] = exact.abs().max()
        scaling.scale.copy_(LARGEST / scaling.amax_history[0])
    quantizer.quantize(exact, made)
    parameter = torch.nn.Parameter(made)
    vars(parameter).update({k: v for k, v in vars(weight).items() if k not in vars(parameter)})
    parameter.get_high_precision_init_val = lambda: exact  # type: ignore[attr-defined]
    parameter.clear_high_precision_init_val = lambda: None  # type: ignore[attr-defined]
    module.weight = parameter
    if recipe == "delayed":
        module.fp8_meta = {"scaling_fwd": scaling}
        module.__class__ = type(f"Delayed{type(module).__name__}", (_Delayed, type(module)), {})


class _Delayed:
    """Mix-in for layers with a `Scaling`. Their extra state is a tensor of bytes that changes with every step."""

    fp8_meta: dict[str, Scaling]
    training: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = super().forward(*args, **kwargs)  # type: ignore[misc]
        if self.training and torch.is_grad_enabled():
            self.fp8_meta["scaling_fwd"].roll()
        return result

    def get_extra_state(self) -> torch.Tensor:
        held = vars(self.fp8_meta["scaling_fwd"])
        text = json.dumps({name: numbers.tolist() for name, numbers in held.items()})
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        if state is None or not state.numel():
            return
        for name, numbers in json.loads(state.numpy().tobytes()).items():
            getattr(self.fp8_meta["scaling_fwd"], name).copy_(torch.tensor(numbers))


def _quantize_shards(
    weights: Sequence[Any], mains: Sequence[torch.Tensor | None], starts: Sequence[int], group: Any, sharded: Any = None
) -> None:
    """Quantize the part of each weight whose main parameter is on this rank."""
    if not weights:
        return
    parts = [None if main is None else main.to(weight.dtype) for weight, main in zip(weights, mains, strict=True)]
    for weight, part in zip(weights, parts, strict=True):
        weight._quantizer.amax.copy_(torch.zeros(1) if part is None else part.abs().max())
    _reduce([weight._quantizer.amax for weight in weights], group)
    for weight, part, start in zip(weights, parts, starts, strict=True):
        weight._quantizer.prepare(weight)
        if part is not None:
            weight._quantizer.put(part, weight, start)


def _reduce(numbers: Tensors, group: Any) -> None:
    if numbers:
        largest = torch.cat(list(numbers))
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        for number, found in zip(numbers, largest, strict=True):
            number.copy_(found)


def _move(weight: QuantizedTensor, memory: torch.Tensor) -> None:
    memory.copy_(weight._data)
    weight._data = memory


def _plain(value: Any) -> Any:
    return value.dequantize() if isinstance(value, QuantizedTensor) else value


def _bytes(source: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    numbers = (source.float() * scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return numbers.view(torch.uint8).reshape(-1)


def _install() -> None:
    """Make megatron-core take these tensors for Transformer Engine's. For the whole process."""
    from megatron.core import fp8_utils

    vars(fp8_utils).update(
        HAVE_TE_FP8_TENSOR_CLASS=True,
        FP8_TENSOR_CLASS=QuantizedTensor,
        HAVE_TE_MXFP8TENSOR=True,
        MXFP8Tensor=MXFP8Tensor,
        _quantize_param_shard_impl=_quantize_shards,
        _modify_underlying_storage_impl=_move,
        dequantize_fp8_tensor=_plain,
    )
