"""Eva (arXiv 2308.02123): second-order updates from two running vectors per layer, one of its inputs and one of the
gradients of its outputs.

Why it is hard to protect: the vectors are keyed by module object, outside any ``state_dict``. Forward hooks change one
and backward hooks the other, with all-reduces that are still in flight when the hook returns.
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

DAMPING, DECAY = 0.03, 0.95


class Eva:
    """Preconditions the gradients of linear layers. The vectors are averaged over all ranks."""

    def __init__(self, model: nn.Module) -> None:
        self.steps = 0
        self.inputs: dict[nn.Linear, torch.Tensor] = {}
        self.outputs: dict[nn.Linear, torch.Tensor] = {}
        self.names = {module: name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        self._under_way: list[tuple[torch.Tensor, torch.Tensor, Any]] = []
        for layer in self.names:
            self.inputs[layer] = torch.zeros(layer.in_features)
            self.outputs[layer] = torch.zeros(layer.out_features)
            layer.register_forward_pre_hook(self._saw_inputs)
            layer.register_full_backward_hook(self._saw_gradients)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All vectors, named after their layers."""
        found = {f"{name}/inputs": self.inputs[layer] for layer, name in self.names.items()}
        return found | {f"{name}/outputs": self.outputs[layer] for layer, name in self.names.items()}

    def _saw_inputs(self, layer: Any, inputs: Any) -> None:
        self._take(self.inputs[layer], inputs[0])

    def _saw_gradients(self, layer: Any, _: Any, gradients: Any) -> None:
        self._take(self.outputs[layer], gradients[0] * BATCH)

    def _take(self, running: torch.Tensor, batch: torch.Tensor) -> None:
        mean = batch.detach().mean(0)
        self._under_way.append((running, mean, dist.all_reduce(mean, async_op=True)))

    def precondition(self) -> None:
        """Average the gradients, apply (DAMPING·I + (g gᵀ) ⊗ (a aᵀ))⁻¹ by the Sherman-Morrison formula, and clip them.

        Call it before the optimizer's step.
        """
        for running, mean, work in self._under_way:
            work.wait()
            running.lerp_(mean / dist.get_world_size(), 1 - DECAY)
        self._under_way.clear()
        self.steps += 1
        correction = 1 - DECAY**self.steps
        for layer in self.names:
            a, g = self.inputs[layer] / correction, self.outputs[layer] / correction
            gradient = layer.weight.grad
            assert gradient is not None
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
            share = (g @ gradient @ a) / (DAMPING + g.dot(g) * a.dot(a))
            gradient.sub_(share * torch.outer(g, a)).div_(DAMPING)
            gradient.mul_(min(1.0, 1.0 / float(gradient.norm())))


class EvaJob:
    """`chaos.drill.Job`: an autoencoder under Eva.

    Args:
        without: the state to leave untracked, for an audit to find: ``vectors`` or ``steps``.
    """

    def __init__(self, seed: int, without: str = "") -> None:
        seed_everything(seed)
        self.model = nn.Sequential(nn.Linear(WIDTH, 40, bias=False), nn.Tanh(), nn.Linear(40, WIDTH, bias=False))
        self.optim = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.eva = Eva(self.model)
        self._without = without
        seed_everything(seed + dist.get_rank())

    def protect(self, **options: Any) -> InMemorySnapshot:
        snap = InMemorySnapshot(self.model, self.optim, **options)
        if self._without != "vectors":
            snap.track("eva", tensors=self.eva.tensors())
        if self._without != "steps":
            snap.track("steps", lambda: self.eva.steps, lambda steps: setattr(self.eva, "steps", steps))
        return snap

    def step(self, step: int, middle: Callable[[], None]) -> float:
        inputs = torch.randn(BATCH, WIDTH)
        loss = nn.functional.mse_loss(self.model(inputs), inputs.roll(1, dims=1))
        torch.autograd.backward(loss)
        middle()
        self.eva.precondition()
        self.optim.step()
        self.optim.zero_grad()
        return loss.item()

    def state(self) -> drill.State:
        yield from drill.modules(self.model)
        yield from drill.optimizer(self.optim)
        yield from self.eva.tensors().items()
        yield "steps", self.eva.steps
        yield from drill.generators()


if __name__ == "__main__":
    alone.main(EvaJob)
