"""Plain PyTorch: modules and a `torch.optim.Optimizer`, each rank holding its own state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from smp_daemon.errors import ConfigError
from smp_daemon.slotfile import Leaf
from snapshot import optimizers, rng
from snapshot.adapter import LiveTensor, Stateful, Tree


class TorchAdapter:
    """`snapshot.adapter.Adapter` for modules and one optimizer. A rank's coordinate is its rank."""

    def __init__(
        self, model: Any, optim: Any, scheduler: Stateful | None = None, extra: Mapping[str, Stateful] | None = None
    ) -> None:
        self._modules = check_modules(model)
        if not isinstance(optim, torch.optim.Optimizer):
            raise ConfigError(f"optim is a {type(optim).__qualname__}: give a torch.optim.Optimizer or Megatron's")
        self._optimizer = optim
        self._scheduler = check_stateful("scheduler", scheduler)
        self._extra = {name: check_stateful(f"extra[{name!r}]", part) for name, part in (extra or {}).items()}

    def coordinate(self) -> str:
        return f"dp{dist.get_rank() if dist.is_available() and dist.is_initialized() else 0}"

    def modules(self) -> Sequence[torch.nn.Module]:
        return self._modules

    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    def tensors(self) -> Iterator[LiveTensor]:
        for i, module in enumerate(self._modules):
            for name, parameter in module.named_parameters():
                yield LiveTensor(f"model{i}.{name}", parameter, stable=True)
            yield from buffers(module, f"model{i}")
        yield from optimizers.state_tensors(self._optimizer, "optim")

    def early(self) -> Tree:
        return {"rng": rng.capture(), "extra": {name: part.state_dict() for name, part in self._extra.items() if part}}

    def late(self) -> Tree:
        return {
            "optim": optimizers.plain_state(self._optimizer),
            "scheduler": self._scheduler.state_dict() if self._scheduler else None,
        }

    def verify(self) -> None:
        """Nothing to check: all of the state is captured."""

    def materialise(self, leaves: Mapping[str, Leaf]) -> None:
        optimizers.materialise_state(self._optimizer, "optim", leaves)

    def check(self, early: Tree, late: Tree) -> None:
        check_parts(early, late, self._extra, self._scheduler)
        optimizers.check_plain_state(self._optimizer, late["optim"], "optim")

    def load(self, early: Tree, late: Tree) -> None:
        if self._scheduler:
            self._scheduler.load_state_dict(late["scheduler"])
        optimizers.load_plain_state(self._optimizer, late["optim"])
        for name, part in self._extra.items():
            if part:
                part.load_state_dict(early["extra"][name])
        rng.restore(early["rng"])


def buffers(module: torch.nn.Module, prefix: str) -> Iterator[LiveTensor]:
    """A module's buffers, persistent or not. Forward may change them."""
    for name, buffer in module.named_buffers():
        yield LiveTensor(f"{prefix}.{name}", buffer, stable=False)


def check_parts(early: Tree, late: Tree, extra: Mapping[str, Any], scheduler: Stateful | None) -> None:
    """Raises `StateMismatch` unless the snapshot has the same extras, and a schedule exactly if the job has one."""
    optimizers.check_names("extra", early["extra"], [name for name, part in extra.items() if part])
    optimizers.check_names(
        "scheduler", ["one"] if late["scheduler"] is not None else [], ["one"] if scheduler is not None else []
    )


def check_modules(model: Any) -> list[torch.nn.Module]:
    """`model` as a list of modules. Raises `ConfigError` if it is anything else."""
    modules = list(model) if isinstance(model, list | tuple) else [model]
    for module in modules:
        if not isinstance(module, torch.nn.Module):
            raise ConfigError(f"model is a {type(module).__qualname__}: give a torch.nn.Module or a list of them")
    return modules


def check_stateful(what: str, part: Any) -> Stateful | None:
    """`part`, if it has a state. Raises `ConfigError` if it is neither None nor `Stateful`."""
    if part is not None and not isinstance(part, Stateful):
        raise ConfigError(f"{what} is a {type(part).__qualname__} without state_dict and load_state_dict")
    return part
