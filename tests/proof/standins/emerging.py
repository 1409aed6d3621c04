"""The parts of emerging_optimizers 0.1, a package that is on no index, that megatron-core 0.16 uses: momentum that a
Newton-Schulz iteration makes orthogonal, also across tensor-parallel ranks."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

COEFFICIENTS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def install() -> None:
    """Replace the package unless it is installed. Call before the first import of megatron-core's muon."""
    if "emerging_optimizers" in sys.modules or importlib.util.find_spec("emerging_optimizers"):
        return
    package, optimizers = ModuleType("emerging_optimizers"), ModuleType("emerging_optimizers.orthogonalized_optimizers")
    utils = ModuleType("emerging_optimizers.orthogonalized_optimizers.muon_utils")
    vars(optimizers).update(OrthogonalizedOptimizer=OrthogonalizedOptimizer, get_muon_scale_factor=scale_factor)
    vars(utils).update(newton_schulz_tp=newton_schulz_tp)
    for module in (package, optimizers, utils):
        sys.modules[module.__name__] = module


class OrthogonalizedOptimizer(torch.optim.Optimizer):
    """Keeps one momentum buffer for each parameter."""

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum_beta: float,
        weight_decay: float,
        *,
        use_nesterov: bool,
        weight_decay_method: str,
        fp32_matmul_prec: str,
        scaled_orthogonalize_fn: Callable[..., torch.Tensor],
    ) -> None:
        self.use_nesterov = use_nesterov
        self.weight_decay_method = weight_decay_method
        self.fp32_matmul_prec = fp32_matmul_prec
        super().__init__(params, {"lr": lr, "momentum_beta": momentum_beta, "weight_decay": weight_decay})
        self.scaled_orthogonalize_fn = scaled_orthogonalize_fn

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step. `closure` is ignored."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient, state = parameter.grad, self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(gradient)
                if self.weight_decay_method == "decoupled":
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                else:
                    gradient.add_(parameter, alpha=group["weight_decay"])
                momentum, beta = state["momentum_buffer"], group["momentum_beta"]
                momentum.lerp_(gradient, 1 - beta)
                update = gradient.lerp(momentum, beta) if self.use_nesterov else momentum
                parameter.add_(self.orthogonalize(parameter, update), alpha=-group["lr"])

    def orthogonalize(self, p: torch.Tensor, grad: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Overridden by megatron-core's class."""
        raise NotImplementedError


def scale_factor(size_out: int, size_in: int, mode: str = "spectral") -> float:
    """The factor by which an update of this size is multiplied."""
    factors: dict[str, float] = {
        "shape_scaling": max(1, size_out / size_in) ** 0.5,
        "spectral": max(size_out, size_in) ** 0.5,
        "unit_rms_norm": (size_out / size_in) ** 0.5,
    }
    return factors[mode]


def newton_schulz_tp(
    x: torch.Tensor,
    steps: int,
    coefficient_type: str,
    tp_group: Any,
    partition_dim: int | None = None,
    mode: str = "duplicated",
) -> torch.Tensor:
    """Orthogonalise a matrix that is divided over ranks: each rank computes all of it and returns its part."""
    if coefficient_type != "quintic" or mode != "duplicated":
        raise NotImplementedError(
            f"this stand-in has quintic coefficients in mode duplicated, not {coefficient_type} in mode {mode}"
        )
    if partition_dim is None:
        return _newton_schulz(x, steps)
    shards = [torch.empty_like(x) for _ in range(tp_group.size())]
    dist.all_gather(shards, x.contiguous(), tp_group)
    whole = _newton_schulz(torch.cat(shards, dim=partition_dim), steps)
    part: torch.Tensor = whole.chunk(tp_group.size(), dim=partition_dim)[tp_group.rank()]
    return part


def _newton_schulz(x: torch.Tensor, steps: int) -> torch.Tensor:
    tall = x.size(-2) > x.size(-1)
    unit = x / x.norm().clamp_min(1e-7)
    now: torch.Tensor = unit.mT if tall else unit
    for step in range(steps):
        a, b, c = COEFFICIENTS[step % len(COEFFICIENTS)]
        square = now @ now.mT
        now = torch.addmm(now, torch.addmm(square, square, square, alpha=c, beta=b), now, beta=a)
    return now.mT if tall else now
