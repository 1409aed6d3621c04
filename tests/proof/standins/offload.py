"""Lets host memory stand in for parameters on a GPU, next to their copies on the CPU.

megatron-core's ``HybridDeviceOptimizer`` copies parameters from the GPU to the CPU. Without a GPU it would copy nothing
and step the parameters themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def install() -> None:
    """Make every `HybridDeviceOptimizer` of the process take its parameters for GPU memory. Idempotent.

    Does nothing on a machine with a GPU.
    """
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    if not torch.cuda.is_available():
        split = HybridDeviceOptimizer._get_sub_optimizer_param_groups
        HybridDeviceOptimizer._get_sub_optimizer_param_groups = _on_gpu(getattr(split, "__wrapped__", split))


def _on_gpu(split: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(split)
    def divided(*args: Any) -> Any:
        with _GpuSeeming():
            return split(*args)

    return divided


class _GpuSeeming(TorchFunctionMode):
    """Makes all tensors report that they are on a GPU, except those moved to the CPU and tensors made from them."""

    def __init__(self) -> None:
        super().__init__()
        self._host: dict[int, torch.Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return id(args[0]) not in self._host
        pins = func is torch.Tensor.pin_memory  # needs a device, so it is skipped
        made = args[0] if pins else func(*args, **(kwargs or {}))
        moved = func is torch.Tensor.cpu or (args and id(args[0]) in self._host)
        if moved and isinstance(made, torch.Tensor):
            self._host[id(made)] = made
        return made
