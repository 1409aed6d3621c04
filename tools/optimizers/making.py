"""How each optimizer is made, and how a step is taken with it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from holdfast.snapshot.state.optimizers import nested
from tools.real import torchvision_on_cpu

LIBRARIES = (
    "torch.optim",
    "pytorch_optimizer",
    "timm.optim",
    "torchao.optim",
    "bitsandbytes.optim",
    "muon",
    "schedulefree",
    "galore_torch",
    "lion_pytorch",
    "prodigyopt",
    "dadaptation",
    "came_pytorch",
    "adam_mini",
)

BASES = frozenset({"BaseOptimizer", "Optimizer", "OptimizerStateOffloadMixin"})
"""Classes that others inherit from, which update nothing themselves."""

SMALL = {
    "update_proj_gap": 3,
    "precondition_frequency": 2,
    "preconditioning_compute_steps": 2,
    "start_preconditioning_step": 2,
    "update_period": 2,
    "hessian_power_update": 2,
    "num_iterations": 40,
    "num_data": 80,
    "warmup_steps": 3,
    "total_steps": 40,
    "max_lr": 0.05,
    "rho": None,
    "max_size_triangular": 32,
}
"""Arguments that make an optimizer do within ten steps all that it does in a long job."""

MATRICES = frozenset({"AdaLOMO", "AdEMAMix32bit", "DeMo", "PagedAdEMAMix32bit"})
"""Classes that fail with a convolution."""

DISTRIBUTED = frozenset({"DeMo", "DistributedMuon"})
"""Classes that ask for a process group."""

WEIGHTS = frozenset({"Muon", "SingleDeviceMuon", "SpectralSphere"})
"""Classes that take only matrices."""

OF_LOW_RANK = {"rank": 4, "update_proj_gap": 3, "scale": 0.25, "proj_type": "std", "projection_type": "std"}
"""Options of the group whose gradients GaLore projects."""

Step = Callable[[], torch.Tensor]
"""Take one step; returns the loss. `before` is called between backward and the step, or before a closure is given."""


def classes(library: str) -> dict[str, type]:
    """The optimizer classes of a library by name. Raises ImportError or what else its import raises."""
    if library.startswith("timm"):
        torchvision_on_cpu.declare()
    module = importlib.import_module(library)
    found = {name: kind for name, kind in vars(module).items() if inspect.isclass(kind) and name not in BASES}
    return {
        name: kind
        for name, kind in sorted(found.items())
        if not name.startswith("_")
        and not inspect.isabstract(kind)
        and (issubclass(kind, torch.optim.Optimizer) or (hasattr(kind, "step") and hasattr(kind, "zero_grad")))
    }


class Net(nn.Module):
    """Matrices, one large enough for states in 8 bits, a convolution, a norm and dropout."""

    def __init__(self, sparse: bool = False, convolution: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16, sparse=sparse)
        self.conv = nn.Conv1d(16, 16, 3, padding=1) if convolution else nn.Identity()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 128))
        self.head = nn.Linear(128, 50)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        inside = self.conv(self.words(words).transpose(1, 2)).transpose(1, 2)
        out: torch.Tensor = self.head(self.layers(inside))
        return out


def draw() -> tuple[torch.Tensor, torch.Tensor]:
    """A batch."""
    words = torch.randint(0, 50, (8, 6))
    return words, words.roll(1, 1)


def arguments_of(kind: type) -> dict[str, inspect.Parameter]:
    """The arguments of a class's constructor by name, without ``self``."""
    return dict(list(inspect.signature(kind.__init__).parameters.items())[1:])  # type: ignore[misc]


def make(kind: type, model: nn.Module) -> Any:
    """An optimizer of this class for a model, as its documentation makes one."""
    known = arguments_of(kind)
    first = next(iter(known))
    options: dict[str, Any] = {key: value for key, value in SMALL.items() if key in known and value is not None}
    if kind.__name__.startswith(("LARS", "SGD")) and kind.__module__.startswith("bitsandbytes"):
        options["momentum"] = 0.9  # it refuses to be without
    if kind.__name__ == "BSAM":
        options["foreach"] = False  # its other way fails
    if "lr" in known and not isinstance(known["lr"].default, float | int):
        options["lr"] = 1e-3
    given: Any = list(model.parameters())
    if first == "named_parameters":
        given = model.named_parameters()
        options |= {"dim": 64, "n_heads": 4} if "n_heads" in known else {}
    elif first == "model":
        given = model
        if "params" in known:
            options["params"] = list(model.parameters())
    elif first in ("optimizer", "base", "base_optimizer"):
        base_of = torch.optim.SGD if kind.__module__.startswith("schedulefree") else torch.optim.AdamW
        given = base_of(model.parameters(), lr=1e-3)  # torch's others take its entries in their state for their own
    elif is_galore(kind):
        given = groups(kind, model)
        if "relative_step" in known:
            options |= {"scale_parameter": False, "relative_step": False}
    elif kind.__name__ in WEIGHTS or first == "param_groups" or "use_muon" in (kind.__doc__ or ""):
        given = groups(kind, model)
    if "base_optimizer" in known and first != "base_optimizer":
        base: Any = torch.optim.SGD
        if known["base_optimizer"].annotation is torch.optim.Optimizer:
            base = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        options["base_optimizer"] = base
        options |= {"lr": 1e-2, "momentum": 0.9} if base is torch.optim.SGD else {}
        if kind.__name__ == "GSAM":
            schedule = importlib.import_module("pytorch_optimizer").ProportionScheduler
            cosine = torch.optim.lr_scheduler.CosineAnnealingLR(base, T_max=40)
            options |= {"model": model, "rho_scheduler": schedule(cosine, max_lr=1e-2)}
    if "optimizer_class" in known:
        options["optimizer_class"] = torch.optim.AdamW
    return kind(given, **options)


def is_galore(kind: type) -> bool:
    """Whether a class projects the gradients of groups that say so."""
    return kind.__module__.startswith("galore_torch") or kind.__name__ == "GaLore"


def groups(kind: type, model: nn.Module) -> list[Any]:
    """Parameters as GaLore's and Muon's variants take them."""
    matrices = [
        p for name, p in model.named_parameters() if p.dim() == 2 and "head" not in name and "words" not in name
    ]
    if kind.__name__ in WEIGHTS and (kind.__name__ != "Muon" or not kind.__module__.startswith("pytorch_optimizer")):
        return matrices
    others = [p for p in model.parameters() if not any(p is each for each in matrices)]
    if is_galore(kind):
        return [{"params": matrices} | OF_LOW_RANK, {"params": others}]
    return [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]


def stepper(optimizer: Any, model: nn.Module, before: Callable[[torch.Tensor], None]) -> Callable[[], None]:
    """What takes one step as the class's documentation does.

    Args:
        before: called with the loss once in each step, in the middle of it.
    """
    kind = type(optimizer).__name__
    loss_of = nn.functional.cross_entropy
    for each in (optimizer, *(inner for _, inner in nested("optim", optimizer) if inner is not optimizer)):
        if callable(getattr(each, "train", None)):
            each.train()

    def loss(words: torch.Tensor, targets: torch.Tensor) -> Any:
        return loss_of(model(words).flatten(0, 1), targets.flatten())

    def plain() -> None:
        value = loss(*draw())
        value.backward(create_graph=kind in ("AdaHessian", "Adahessian", "SophiaH"))
        before(value)
        optimizer.step()
        optimizer.zero_grad()

    def with_closure() -> None:
        batch = draw()
        told = False

        def closure() -> Any:
            nonlocal told
            optimizer.zero_grad()
            value = loss(*batch)
            value.backward()
            if not told:
                told = True
                before(value)
            return value

        optimizer.step(torch.enable_grad()(closure))

    def after_backward() -> None:  # SAM's two halves take the gradients of a first backward
        batch = draw()
        value = loss(*batch)
        value.backward()
        before(value)

        def closure() -> Any:
            again = loss(*batch)
            again.backward()
            return again

        optimizer.step(torch.enable_grad()(closure))
        optimizer.zero_grad()

    def fused() -> None:
        value = loss(*draw())
        before(value)
        optimizer.fused_backward(value, 1e-3)
        optimizer.zero_grad()

    def several() -> None:
        values = [loss(*draw()), loss(*draw())]
        before(values[0])
        optimizer.pc_backward(values)
        optimizer.step()
        optimizer.zero_grad()

    def both() -> None:
        batch = draw()
        optimizer.set_closure(lambda out, y: loss_of(out.flatten(0, 1), y.flatten()), *batch)
        value = loss(*batch)
        before(value)
        optimizer.step()

    def scaled() -> None:
        value = loss(*draw())
        optimizer.backward(value)
        before(value)
        optimizer.step()
        optimizer.zero_grad()

    if hasattr(optimizer, "fused_backward"):
        return fused
    if hasattr(optimizer, "pc_backward"):
        return several
    if hasattr(optimizer, "set_closure"):
        return both
    if kind == "SafeFP16Optimizer":
        return scaled
    if "SAM" in kind:
        return after_backward
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    needed = closure is not None and closure.default is inspect.Parameter.empty
    return with_closure if needed or kind.endswith("Closure") or kind in ("LBFGS", "AliG") else plain


def every(libraries: tuple[str, ...]) -> Iterator[tuple[str, str, type]]:
    """Library, name and class of every optimizer."""
    for library in libraries:
        for name, kind in classes(library).items():
            yield library, name, kind
