"""ACP-SGD (arXiv 2306.08881): each step sends one of two low-rank factors of the gradient, P or Q in turn, and adds the
compression error to the next gradient.

Why it is hard to protect: P, Q, the turn and the residual are attributes that no ``state_dict`` contains. Backward
hooks change them. The residual is as large as the gradient and differs between data-parallel ranks.
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

RANK = 3


class Compressor:
    """Compresses and reduces gradients of matrices. `reduce` runs in backward hooks, `finish` before `optim.step()`."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self.send_p = True
        self.tensors: dict[str, torch.Tensor] = {}
        self._parameters = parameters
        self._sent: list[tuple[str, Any]] = []
        for name, weight in parameters.items():
            rows, columns = weight.shape
            self.tensors |= {f"{name}/p": torch.randn(rows, RANK), f"{name}/q": torch.randn(columns, RANK)}
            self.tensors[f"{name}/residual"] = torch.zeros(rows, columns)
            parameter: Any = weight
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.reduce(name))

    def reduce(self, name: str) -> None:
        """Compress one gradient, keep the error as the residual, and start the all-reduce of the factor."""
        p, q, residual = (self.tensors[f"{name}/{part}"] for part in ("p", "q", "residual"))
        gradient = self._parameters[name].grad
        assert gradient is not None
        wanted = gradient + residual
        sent, basis = (p, q) if self.send_p else (q, p)
        basis.copy_(torch.linalg.qr(basis)[0])
        sent.copy_((wanted if self.send_p else wanted.T) @ basis)
        residual.copy_(wanted - p @ q.T)
        self._sent.append((name, dist.all_reduce(sent, async_op=True)))

    def finish(self) -> None:
        """Wait for all reductions, and replace each gradient by the decompressed mean."""
        for name, work in self._sent:
            work.wait()
            p, q = self.tensors[f"{name}/p"], self.tensors[f"{name}/q"]
            (p if self.send_p else q).div_(dist.get_world_size())
            self._parameters[name].grad = p @ q.T
        self._sent.clear()
        self.send_p = not self.send_p


class AcpSgd:
    """`chaos.drill.Job`: data-parallel training with compressed gradients.

    Args:
        without: the state to leave untracked, for an audit to find: ``p``, ``q``, ``residual`` or ``turn``.
    """

    def __init__(self, seed: int, without: str = "") -> None:
        seed_everything(seed)
        self.model = nn.Sequential(nn.Linear(WIDTH, 40, bias=False), nn.Tanh(), nn.Linear(40, WIDTH, bias=False))
        self.optim = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)
        self.compressor = Compressor(dict(self.model.named_parameters()))
        self._without = without
        seed_everything(seed + dist.get_rank())

    def protect(self, **options: Any) -> InMemorySnapshot:
        snap = InMemorySnapshot(self.model, self.optim, **options)
        tensors = {k: v for k, v in self.compressor.tensors.items() if not k.endswith(f"/{self._without}")}
        if self._without == "turn":
            snap.track("acp", tensors=tensors)
        else:
            snap.track("acp", self._turn, self._set_turn, tensors=tensors)
        return snap

    def _turn(self) -> bool:
        return self.compressor.send_p

    def _set_turn(self, send_p: bool) -> None:
        self.compressor.send_p = send_p

    def step(self, step: int, middle: Callable[[], None]) -> float:
        inputs = torch.randn(BATCH, WIDTH)
        loss = nn.functional.mse_loss(self.model(inputs), inputs.roll(1, dims=1))
        torch.autograd.backward(loss)
        middle()
        self.compressor.finish()
        self.optim.step()
        self.optim.zero_grad()
        return loss.item()

    def state(self) -> drill.State:
        yield from drill.modules(self.model)
        yield from drill.optimizer(self.optim)
        yield from self.compressor.tensors.items()
        yield "turn", self.compressor.send_p
        yield from drill.generators()


if __name__ == "__main__":
    alone.main(AcpSgd)
