"""What the adapters of all frameworks have in common; see `snapshot.adapter.Adapter` for what the methods mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from smp_daemon.errors import ConfigError, StateMismatch
from smp_daemon.slotfile import Leaf
from snapshot import rng, tracked
from snapshot.adapter import Change, Container, LiveTensor, Stateful, Tree, Updated
from snapshot.optimizers import OptimizerState, check_names
from snapshot.tensors import block_of, local
from snapshot.tracked import Tracked, containers


class BaseAdapter:
    """Modules, the states of their optimizers, a schedule, extras, and what the user tracks."""

    def __init__(
        self,
        model: Any,
        states: Sequence[OptimizerState],
        scheduler: Stateful | None,
        extra: Mapping[str, Stateful] | None,
    ) -> None:
        self._modules = check_modules(model)
        self._states = states
        self._scheduler = _check_stateful("scheduler", scheduler)
        self._extra = {name: _check_stateful(f"extra[{name!r}]", part) for name, part in (extra or {}).items()}
        self._tracked: dict[str, Tracked] = {}
        self.carried: dict[str, Tree] = {}
        self._before: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []

    def track(self, piece: Tracked) -> None:
        if piece.name in self._tracked:
            raise ConfigError(f"track({piece.name!r}): there is one of that name already")
        self._tracked[piece.name] = piece

    def modules(self) -> Sequence[torch.nn.Module]:
        return self._modules

    def scalers(self) -> Sequence[GradScaler]:
        return [part for part in self._extra.values() if isinstance(part, GradScaler)]

    def updated(self) -> dict[str, Updated]:
        return {stem: parameter for state in self._states for stem, parameter in state.updated().items()}

    def watched(self) -> Iterator[Container]:
        for module in self._modules:
            yield from containers(module)
        for state in self._states:
            yield from state.watched()
        for piece in self._tracked.values():
            yield from piece.watched()

    def fixed(self) -> Tree:
        return {"optim": [state.fixed() for state in self._states]}

    def early(self) -> Tree:
        return {
            "rng": rng.capture(),
            "extra": self._extras(late=False),
            "tracked": tracked.values(self._tracked, late=False),
            **({"streams": self.carried} if self.carried else {}),
        }

    def late(self) -> Tree:
        return {
            "optim": [state.plain() for state in self._states],
            "scheduler": self._scheduler.state_dict() if self._scheduler else None,
            "extra": self._extras(late=True),
            "tracked": tracked.values(self._tracked, late=True),
        }

    def verify(self) -> None:
        """Nothing to check: all of the state is captured."""

    def materialise(self, leaves: Mapping[str, Leaf]) -> None:
        for state in self._states:
            state.materialise(leaves)
        device = next((p.device for module in self._modules for p in module.parameters()), torch.device("cpu"))
        self._before = [(p.tensors, dict(p.tensors)) for p in self._tracked.values() if isinstance(p.tensors, dict)]
        for piece in self._tracked.values():
            piece.materialise(leaves, device)

    def withdraw(self) -> None:
        for state in self._states:
            state.withdraw()
        for tensors, before in self._before:
            tensors.clear()
            tensors.update(before)

    def check(self, early: Tree, late: Tree, fixed: Tree) -> None:
        extras = {**early["extra"], **late["extra"]}
        check_names("extra", extras, [name for name, part in self._extra.items() if part])
        have, held = self._scheduler is not None, late["scheduler"] is not None
        check_names("scheduler", ["one"] if held else [], ["one"] if have else [])
        tracked.check(self._tracked, {**early["tracked"], **late["tracked"]})
        if len(late["optim"]) != len(self._states):
            raise StateMismatch(f"{len(late['optim'])} optimizers in the snapshot, {len(self._states)} in this job")
        for state, plain, kept in zip(self._states, late["optim"], fixed["optim"], strict=True):
            state.check(plain, kept)

    def load(self, early: Tree, late: Tree, fixed: Tree) -> None:
        self._before = []
        if self._scheduler:
            self._scheduler.load_state_dict(late["scheduler"])
        for state, plain, kept in zip(self._states, late["optim"], fixed["optim"], strict=True):
            state.load(plain, kept)
        held = {**early["extra"], **late["extra"]}
        for name, part in self._extra.items():
            if part:
                part.load_state_dict(held[name])
        tracked.load(self._tracked, {**early["tracked"], **late["tracked"]})
        self.carried = early.get("streams", {})
        rng.restore(early["rng"])

    def rewinding(self, early: Tree) -> Callable[[], None]:
        return partial(rng.restore, early["rng"])

    def _extras(self, *, late: bool) -> Tree:
        """States of those extras that settle late, or of the others. A gradient scaler is updated as schedules are."""
        return {
            n: part.state_dict() for n, part in self._extra.items() if part and isinstance(part, GradScaler) is late
        }

    def _tracked_tensors(self) -> Iterator[LiveTensor]:
        for piece in self._tracked.values():
            yield from piece.live()


def buffers(module: torch.nn.Module, prefix: str) -> Iterator[LiveTensor]:
    """A module's buffers, persistent or not. Forward may change them."""
    for name, buffer in module.named_buffers():
        yield LiveTensor(f"{prefix}.{name}", local(buffer), Change.ANY, block=block_of(buffer))


def check_modules(model: Any) -> list[torch.nn.Module]:
    """`model` as a list of modules. Raises `ConfigError` if it is anything else."""
    modules = list(model) if isinstance(model, list | tuple) else [model]
    for module in modules:
        if not isinstance(module, torch.nn.Module):
            raise ConfigError(f"model is a {type(module).__qualname__}: give a torch.nn.Module or a list of them")
    return modules


def _check_stateful(what: str, part: Any) -> Stateful | None:
    """`part`, if it has a state. Raises `ConfigError` if it is neither None nor `Stateful`."""
    if part is not None and not isinstance(part, Stateful):
        raise ConfigError(f"{what} is a {type(part).__qualname__} without state_dict and load_state_dict")
    return part
