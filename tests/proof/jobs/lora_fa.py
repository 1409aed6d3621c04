"""LoRA-FA (arXiv 2308.03303): each adapter is B·A, and only B is trained; A and the base weights never change.

Why it is hard to protect: most of the state is frozen, so it is copied once and then watched for changes. And the
optimizer stores its moments under string keys, as PEFT's does; ``load_state_dict`` would leave those moments on the
device that they were saved from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from holdfast import InMemorySnapshot
from holdfast.chaos import drill
from tests.proof.jobs import alone
from tests.proof.jobs.plain import BATCH, WIDTH, seed_everything

RANK, SCALE = 4, 2.0


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank correction B·A, of which only B is trained."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(RANK, inputs) / inputs**0.5, requires_grad=False)
        self.lora_B = nn.Parameter(torch.zeros(outputs, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = nn.functional.dropout(x, 0.1, self.training) @ self.lora_A.T
        result: torch.Tensor = self.base(x) + SCALE * low @ self.lora_B.T
        return result


class LoraFaAdam(torch.optim.Optimizer):
    """Adam on B's gradient times (A·Aᵀ)⁻¹: B·A then follows the full weight's gradient as closely as A allows."""

    def __init__(self, layers: dict[str, Adapted], lr: float) -> None:
        super().__init__([layer.lora_B for layer in layers.values()], {"lr": lr, "betas": (0.9, 0.99), "eps": 1e-8})
        self._layers = layers

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        for name, layer in self._layers.items():
            a, b = layer.lora_A, layer.lora_B
            assert b.grad is not None
            projected = torch.linalg.solve(SCALE**2 * a @ a.T + 1e-6 * torch.eye(RANK), b.grad.T).T
            state = self.state[f"{name}.lora"]  # type: ignore[index]
            if not state:
                state |= {"step": 0, "exp_avg_B": torch.zeros_like(b), "exp_avg_sq_B": torch.zeros_like(b)}
            state["step"] += 1
            first, second = group["betas"]
            state["exp_avg_B"].lerp_(projected, 1 - first)
            state["exp_avg_sq_B"].mul_(second).addcmul_(projected, projected, value=1 - second)
            size = group["lr"] * (1 - second ** state["step"]) ** 0.5 / (1 - first ** state["step"])
            b.addcdiv_(state["exp_avg_B"], state["exp_avg_sq_B"].sqrt().add_(group["eps"]), value=-size)


class LoraFa:
    """`chaos.drill.Job`: two adapted layers on random targets."""

    def __init__(self, seed: int) -> None:
        seed_everything(seed + dist.get_rank())
        self.model = nn.Sequential(Adapted(WIDTH, 64), nn.GELU(), Adapted(64, WIDTH))
        layers = {str(i): layer for i, layer in enumerate(self.model) if isinstance(layer, Adapted)}
        self.optim = LoraFaAdam(layers, lr=1e-2)

    def protect(self, **options: Any) -> InMemorySnapshot:
        return InMemorySnapshot(self.model, self.optim, **options)

    def step(self, step: int, middle: Callable[[], None]) -> float:
        inputs = torch.randn(BATCH, WIDTH)
        loss = nn.functional.mse_loss(self.model(inputs), inputs.roll(1, dims=1))
        torch.autograd.backward(loss)
        middle()
        self.optim.step()
        self.optim.zero_grad()
        return loss.item()

    def state(self) -> drill.State:
        yield from drill.modules(self.model)
        for name, state in self.optim.state.items():
            yield from ((f"optim.{name}.{key}", value) for key, value in state.items())
        yield from drill.generators()


if __name__ == "__main__":
    alone.main(LoraFa)
