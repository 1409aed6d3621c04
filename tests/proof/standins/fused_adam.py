"""A stand-in for Transformer Engine's FusedAdam with the same state: narrow moments with scales, and main parameters,
or only those of their bits that the weights lack."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch

VERSION = "2.9.0"
LARGEST = {torch.float16: torch.finfo(torch.float16).max / 2.0}
MASTER = "master_param"


class FusedAdam(torch.optim.Optimizer):
    """AdamW, computed in float32.

    A float16 moment or main parameter is stored divided by a scale, which is in ``_scales`` and not in ``state``. The
    step count is an option of the group. With ``store_param_remainders``, only the 16 bits by which a main parameter
    differs from its bfloat16 weight are stored.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        if capturable or not adam_w_mode:
            raise NotImplementedError("this stand-in has only AdamW, and not capturable")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.master_weights = master_weights
        self.name_to_dtype_map = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            MASTER: master_weight_dtype,
        }
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weights and master_weight_dtype == torch.float32
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        """Set the moments to zero, and the main parameter to the weight."""
        for name in ("exp_avg", "exp_avg_sq", *([MASTER] if self.master_weights else [])):
            remainder = name == MASTER and store_param_remainders
            dtype = torch.int16 if remainder else self.name_to_dtype_map[name]
            self.state[param][name] = torch.zeros_like(param, dtype=dtype)
            if self.name_to_dtype_map[name] != torch.float32:
                self._scales.setdefault(param, {})[name] = torch.ones(1)
        if self.master_weights and not store_param_remainders:
            self._put(param, MASTER, param.detach().float())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step. `closure` is ignored."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                self._step(param, group)

    def _step(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        remainders = self.store_param_remainders and param.dtype == torch.bfloat16
        if not self.state[param]:
            self.initialize_state(param, remainders)
        gradient = getattr(param, "decoupled_grad", None) if self.use_decoupled_grad else param.grad
        if gradient is None:
            return
        gradient, (first, second) = gradient.float(), group["betas"]
        average, square = self._get(param, "exp_avg"), self._get(param, "exp_avg_sq")
        average.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        main = self._main(param, remainders)
        main.mul_(1 - group["lr"] * group["weight_decay"])
        rate = group["lr"] / (1 - first ** group["step"])
        main.addcdiv_(average, (square / (1 - second ** group["step"])).sqrt_().add_(group["eps"]), value=-rate)
        self._put(param, "exp_avg", average)
        self._put(param, "exp_avg_sq", square)
        if remainders:
            bits = main.view(torch.int32)
            upper = (bits + 0x8000) >> 16
            self.state[param][MASTER].copy_((bits - (upper << 16)).to(torch.int16))
            param.copy_(upper.to(torch.int16).view(torch.bfloat16))
            return
        if self.master_weights:
            self._put(param, MASTER, main)
        param.copy_(main)

    def _main(self, param: torch.Tensor, remainders: bool) -> torch.Tensor:
        if remainders:
            upper = param.detach().view(torch.int16).to(torch.int32) << 16
            bits: torch.Tensor = upper + self.state[param][MASTER]
            return bits.view(torch.float32)
        return self._get(param, MASTER) if self.master_weights else param.detach().float()

    def _get(self, param: torch.Tensor, name: str) -> torch.Tensor:
        held: torch.Tensor = self.state[param][name]
        if held.dtype == torch.float16:
            return held.float().mul_(self._scales[param][name])
        return held.float()

    def _put(self, param: torch.Tensor, name: str, value: torch.Tensor) -> None:
        held: torch.Tensor = self.state[param][name]
        if held.dtype == torch.float16:
            scale = self._scales[param][name]
            scale.copy_(value.abs().max() / LARGEST[torch.float16])
            value = value * torch.where(scale > 0, scale.reciprocal(), 0.0)
        held.copy_(value)


def install() -> None:
    """Replace Transformer Engine where megatron-core chooses its Adam. For the whole process."""
    from megatron.core import optimizer, utils
    from megatron.core.optimizer import distrib_optimizer

    names = ["transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers"]
    package, pytorch, optimizers = (sys.modules.setdefault(name, ModuleType(name)) for name in names)
    vars(package).update(__version__=VERSION, pytorch=pytorch)
    vars(pytorch).update(optimizers=optimizers)
    vars(optimizers).update(FusedAdam=FusedAdam)
    utils._te_version = None  # discards the version that was looked up before, when the package was missing
    optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
