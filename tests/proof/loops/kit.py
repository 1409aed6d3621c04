"""Modules, optimizers and averages for the drawn programs, as libraries and tutorials write them.

Nothing here knows about holdfast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset


class Tied(nn.Module):
    """Input and output share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.outer = nn.Linear(6, 6)
        self.outer.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        """Apply both layers."""
        y: Tensor = self.outer(torch.tanh(self.inner(x)))
        return y


class Scaled(nn.Linear):
    """Keeps an average of its largest inputs, a plain number, in its extra state, as TransformerEngine does for FP8."""

    largest = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Scale the input, then apply the layer."""
        if self.training:
            self.largest = 0.9 * self.largest + 0.1 * float(x.detach().abs().max())
        return super().forward(x / self.largest)

    def get_extra_state(self) -> dict[str, float]:
        """The average, for the state_dict."""
        return {"largest": self.largest}

    def set_extra_state(self, state: dict[str, float]) -> None:
        """Restore the average from a state_dict."""
        self.largest = state["largest"]


class Bank(nn.Module):
    """A layer with a frozen memory; the program overwrites single rows of it."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(8, 6), requires_grad=False)
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to `x` plus the mean of the rows."""
        y: Tensor = self.layer(x + self.rows.mean(0))
        return y


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation in two steps. Only its base optimizer's `step` is called. It keeps nothing itself
    from turn to turn, which a hook that is given the base alone would not capture."""

    def __init__(self, params: Iterable[Tensor], base: Callable[..., torch.optim.Optimizer], **options: Any) -> None:
        super().__init__(params, {"rho": 0.05, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        """Climb along the gradient."""
        for p in self._parameters():
            if p.grad is not None:
                self.state[p]["old"] = p.detach().clone()
                p.add_(p.grad, alpha=0.05)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        """Go back, and step with the gradient that was computed at the higher point."""
        for p in self._parameters():
            if (old := self.state[p].pop("old", None)) is not None:
                p.copy_(old)
        self.base.step()

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from group["params"]


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD: trained weights lie between an average and an anchor; `eval` and `train` move them."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "train": True})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step, in training mode."""
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["z"] = p.detach().clone()
                z = state["z"]
                p.lerp_(z, 1 / group["k"])
                p.add_(p.grad, alpha=-0.1 * group["lr"])
                z.sub_(p.grad, alpha=group["lr"])

    @torch.no_grad()
    def eval(self) -> None:
        """Move the weights to the average."""
        self._move(False, 1 - 1 / 0.9)

    @torch.no_grad()
    def train(self) -> None:
        """Move the weights back to the point that is trained."""
        self._move(True, 1 - 0.9)

    def _move(self, train: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["train"] is not train:
                group["train"] = train
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight)


class Container(torch.optim.Optimizer):
    """Contains one optimizer for each part of the model, steps them all, and has no state of its own."""

    def __init__(self, parts: Iterable[nn.Module], kind: Callable[..., torch.optim.Optimizer], **options: Any) -> None:
        self.optimizers = [kind(part.parameters(), **options) for part in parts]
        super().__init__([p for each in self.optimizers for g in each.param_groups for p in g["params"]], options)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step all of them."""
        for each in self.optimizers:
            each.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients of all of them."""
        for each in self.optimizers:
            each.zero_grad(set_to_none)


class Average:
    """An exponential moving average of parameters, with a state_dict, as several libraries have it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.shadow = {name: p.detach().clone() for name, p in module.named_parameters()}
        self.updates = 0

    @torch.no_grad()
    def update(self) -> None:
        """Add the current parameters; call after each step."""
        self.updates += 1
        for name, p in self.module.named_parameters():
            self.shadow[name].lerp_(p, 0.1)

    def state_dict(self) -> dict[str, Any]:
        """The averages and the number of updates."""
        return {"shadow": {name: t.clone() for name, t in self.shadow.items()}, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.updates = state["updates"]
        for name, value in state["shadow"].items():
            self.shadow[name].copy_(value)


class Rows(Dataset[Tensor]):
    """Rows of a tensor."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class RowStream(IterableDataset[Tensor]):
    """Rows of a tensor, without a length."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.rows)


def stepping(optim: torch.optim.Optimizer) -> Callable[[Tensor], None]:
    """A hook that steps an optimizer as soon as the gradient of its only parameter is accumulated."""

    def hook(p: Tensor) -> None:
        optim.step()
        optim.zero_grad()

    return hook


def noting(optim: torch.optim.Optimizer) -> Callable[[Tensor], None]:
    """A hook that keeps statistics of gradients in the optimizer's state."""

    def hook(p: Tensor) -> None:
        if p.grad is not None:
            optim.state[p]["noise"].mul_(0.9).add_(p.grad.square())

    return hook
