"""Plain PyTorch: modules and a `torch.optim.Optimizer`, each rank holding its own state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from smp_daemon.errors import ConfigError, StateMismatch
from smp_daemon.slotfile import Leaf
from snapshot import rng
from snapshot.adapter import Change, Container, LiveTensor, Stateful, Tree
from snapshot.optimizers import OptimizerState, check_names


class TorchAdapter:
    """`snapshot.adapter.Adapter` for modules and optimizers. A rank's coordinate is its rank."""

    def __init__(
        self, model: Any, optim: Any, scheduler: Stateful | None = None, extra: Mapping[str, Stateful] | None = None
    ) -> None:
        self._modules = check_modules(model)
        self._optimizers = _check_optimizers(optim)
        prefixes = [f"optim{i or ''}" for i in range(len(self._optimizers))]
        self._replicated = all(isinstance(module, DistributedDataParallel) for module in self._modules)
        self._states = [
            OptimizerState(optimizer, prefix, replicated=self._replicated)
            for optimizer, prefix in zip(self._optimizers, prefixes, strict=True)
        ]
        self._scheduler = check_stateful("scheduler", scheduler)
        self._extra = {name: check_stateful(f"extra[{name!r}]", part) for name, part in (extra or {}).items()}

    def coordinate(self) -> str:
        return f"dp{dist.get_rank() if dist.is_available() and dist.is_initialized() else 0}"

    def replica_set(self) -> str:
        """All ranks, if DDP keeps all modules alike; else each is alone."""
        return "all" if self._replicated else self.coordinate()

    def modules(self) -> Sequence[torch.nn.Module]:
        return self._modules

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return self._optimizers

    def scalers(self) -> Sequence[GradScaler]:
        return [part for part in self._extra.values() if isinstance(part, GradScaler)]

    def tensors(self) -> Iterator[LiveTensor]:
        updated = {id(parameter) for state in self._states for _, parameter in state.parameters()}
        for i, module in enumerate(self._modules):
            for name, parameter in module.named_parameters():
                change = Change.STEP if parameter.requires_grad or id(parameter) in updated else Change.NEVER
                yield LiveTensor(f"model{i}.{name}", parameter, change, self._replicated)
            yield from buffers(module, f"model{i}")
        for state in self._states:
            yield from state.tensors()

    def watched(self) -> Iterator[Container]:
        for module in self._modules:
            yield from containers(module)
        for state in self._states:
            yield from state.watched()

    def fixed(self) -> Tree:
        return {"optim": [state.fixed() for state in self._states]}

    def early(self) -> Tree:
        return {"rng": rng.capture(), "extra": states(self._extra, late=False)}

    def late(self) -> Tree:
        return {
            "optim": [state.plain() for state in self._states],
            "scheduler": self._scheduler.state_dict() if self._scheduler else None,
            "extra": states(self._extra, late=True),
        }

    def verify(self) -> None:
        """Nothing to check: all of the state is captured."""

    def materialise(self, leaves: Mapping[str, Leaf]) -> None:
        for state in self._states:
            state.materialise(leaves)

    def check(self, early: Tree, late: Tree, fixed: Tree) -> None:
        check_parts(early, late, self._extra, self._scheduler)
        check_count(late, self._states)
        for state, plain in zip(self._states, late["optim"], strict=True):
            state.check(plain)

    def load(self, early: Tree, late: Tree, fixed: Tree) -> None:
        if self._scheduler:
            self._scheduler.load_state_dict(late["scheduler"])
        for state, plain, order in zip(self._states, late["optim"], fixed["optim"], strict=True):
            state.load(plain, order)
        load_states(self._extra, early, late)
        rng.restore(early["rng"])


def containers(module: torch.nn.Module) -> Iterator[Container]:
    """What holds a module's parameters, buffers and modules."""
    for each in module.modules():
        yield each._parameters
        yield each._buffers
        yield each._modules


def states(extra: Mapping[str, Stateful | None], *, late: bool) -> Tree:
    """The states of those extras that settle late, or of the others.

    A gradient scaler is updated after ``optim.step()``, as schedules are.
    """
    return {name: part.state_dict() for name, part in extra.items() if part and isinstance(part, GradScaler) is late}


def load_states(extra: Mapping[str, Stateful | None], early: Tree, late: Tree) -> None:
    """Take over what `states` gave."""
    held = {**early["extra"], **late["extra"]}
    for name, part in extra.items():
        if part:
            part.load_state_dict(held[name])


def check_count(late: Tree, states: Sequence[OptimizerState]) -> None:
    """Raises `StateMismatch` unless the snapshot has as many optimizers as the job."""
    if len(late["optim"]) != len(states):
        raise StateMismatch(f"{len(late['optim'])} optimizers in the snapshot, {len(states)} in this job")


def buffers(module: torch.nn.Module, prefix: str) -> Iterator[LiveTensor]:
    """A module's buffers, persistent or not. Forward may change them."""
    for name, buffer in module.named_buffers():
        yield LiveTensor(f"{prefix}.{name}", buffer, Change.FORWARD)


def check_parts(early: Tree, late: Tree, extra: Mapping[str, Any], scheduler: Stateful | None) -> None:
    """Raises `StateMismatch` unless the snapshot has the same extras, and a schedule exactly if the job has one."""
    check_names("extra", {**early["extra"], **late["extra"]}, [name for name, part in extra.items() if part])
    check_names("scheduler", ["one"] if late["scheduler"] is not None else [], ["one"] if scheduler is not None else [])


def _check_optimizers(optim: Any) -> list[torch.optim.Optimizer]:
    optimizers = list(optim) if isinstance(optim, list | tuple) else [optim]
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"optim is a {type(optimizer).__qualname__}: give a torch.optim.Optimizer, some of them, or Megatron's"
            )
    if not optimizers:
        raise ConfigError("optim is an empty list: the step of an optimizer is the boundary between snapshots")
    return optimizers


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
