"""The state of a `torch.optim.Optimizer`, in place. Megatron's optimizers wrap one, so both adapters use this.

A parameter is named by its group and its place in it, ``<group>.<index>``; state that an optimizer keeps under a text
of its own choice, as that of LoRA-FA does, by ``named.<text>``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from smp_daemon.errors import ConfigError, StateMismatch
from smp_daemon.slotfile import Leaf
from snapshot.adapter import Block, Change, Container, LiveTensor, Tree, Updated
from snapshot.tensors import block_of, empty_like_leaf, local

SHAREABLE = ("torch.optim.",)
"""Where optimizers come from that keep nothing but functions of the reduced gradients, alike on all replicas. Others
may keep what is a rank's own, such as a compressor's error feedback, which may be zero for the first thousand steps."""


NAMED = "named."


class OptimizerState:
    """One optimizer as the adapters see it. Not thread-safe.

    Args:
        replicated: whether data-parallel replicas update the same parameters with the same gradients.
        names: those of parameters in the model. Replicas may give their optimizers different ones, as
            `ZeroRedundancyOptimizer` does; what these keep is then not alike, even where it is all zero for now.
        blocks: which part of the whole a parameter is, and state of its shape with it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        prefix: str,
        *,
        replicated: bool,
        names: Mapping[torch.Tensor, str] | None = None,
        blocks: Callable[[torch.Tensor], Block | None] = block_of,
    ) -> None:
        self.optimizer = optimizer
        self._names = names or {}
        self._blocks = blocks
        self._prefix = prefix
        self._replicated = replicated and type(optimizer).__module__.startswith(SHAREABLE)
        self._plain: list[tuple[str, dict[str, Any], list[str]]] = []
        self._before: dict[Any, dict[str, Any]] = {}

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter that the optimizer updates."""
        for g, group in enumerate(self.optimizer.param_groups):
            for i, parameter in enumerate(group["params"]):
                yield f"{g}.{i}", parameter

    def _entries(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The state of every parameter, and what else there is. Raises `ConfigError` for what cannot be named."""
        for name, parameter in self.parameters():
            yield name, self.optimizer.state.get(parameter, {})
        for key, state in self.optimizer.state.items():
            if isinstance(key, str):
                yield f"{NAMED}{key}", state
            elif not isinstance(key, torch.Tensor):
                raise ConfigError(
                    f"{self._prefix} keeps state under a {type(key).__qualname__}, which has no name that would be the "
                    "same in every run: keep it elsewhere, and track it"
                )

    def tensors(self) -> Iterator[LiveTensor]:
        """Adam's moments and the like, as they are now: many appear only with the first step."""
        self._plain = []
        updated = self.updated()
        for name, state in self._entries():
            of = updated.get(f"{self._prefix}.{name}", Updated("", (), None))
            plain = [key for key, value in state.items() if not isinstance(value, torch.Tensor)]
            if plain:
                self._plain.append((name, state, plain))
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    place = f"{self._prefix}.{name}.{key}"
                    part = local(value)
                    block = of.block if tuple(part.shape) == of.shape else None
                    yield LiveTensor(place, part, Change.STEP, self._replicated, of.owner, block)

    def watched(self) -> Iterator[Container]:
        """Groups, and the state of each parameter; and what holds these, as ``load_state_dict`` replaces them."""
        yield vars(self.optimizer)
        yield self.optimizer.param_groups
        yield self.optimizer.state
        for group in self.optimizer.param_groups:
            yield group
            yield group["params"]
        yield from self.optimizer.state.values()

    def updated(self) -> dict[str, Updated]:
        """See `snapshot.adapter.Adapter.updated`."""
        return {
            f"{self._prefix}.{name}": Updated(
                self._names.get(parameter, ""), tuple(local(parameter).shape), self._blocks(parameter)
            )
            for name, parameter in self.parameters()
        }

    def fixed(self) -> Tree:
        """The optimizer's class, the order of the keys of each parameter's state, and what parameters are called."""
        kind = type(self.optimizer)
        order = {name: list(state) for name, state in self._entries()}
        owners = {name: self._names[parameter] for name, parameter in self.parameters() if parameter in self._names}
        name = f"{kind.__module__}.{kind.__qualname__}"
        return {"class": name, "prefix": self._prefix, "order": order, "owners": owners}

    def names(self) -> list[list[str]]:
        """What the parameters of each group are called in the model; empty texts where that is not known."""
        groups = self.optimizer.param_groups
        return [[self._names.get(parameter, "") for parameter in group["params"]] for group in groups]

    def plain(self) -> Tree:
        """Group options such as lr, and what of the per-parameter state `tensors` found to be no tensor."""
        return {
            "groups": [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups],
            "state": {name: {key: state[key] for key in keys if key in state} for name, state, keys in self._plain},
        }

    def check(self, plain: Tree, fixed: Tree) -> None:
        """Raises `StateMismatch` unless the optimizer has the class and the groups that these were taken from."""
        kind = self.fixed()["class"]
        if kind != fixed["class"]:
            raise StateMismatch(f"{self._prefix} is a {fixed['class']} in the snapshot, a {kind} in this job")
        have, held = len(self.optimizer.param_groups), len(plain["groups"])
        if have != held:
            raise StateMismatch(f"{self._prefix} has {held} parameter groups in the snapshot, {have} in this job")

    def load(self, plain: Tree, fixed: Tree) -> None:
        """Take over what `plain` and `fixed` gave. Options that are tensors are filled in place."""
        self._before = {}  # else it would keep tensors alive that are replaced
        order = fixed["order"]
        for group, saved in zip(self.optimizer.param_groups, plain["groups"], strict=True):
            for key, value in saved.items():
                if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value
        keys: dict[str, Any] = dict(self.parameters())
        keys |= {name: name.removeprefix(NAMED) for name in order if name.startswith(NAMED)}
        for name, key in keys.items():
            state = {**self.optimizer.state.get(key, {}), **plain["state"].get(name, {})}
            if state:
                self.optimizer.state[key] = {entry: state[entry] for entry in order[name]}

    def materialise(self, leaves: Mapping[str, Leaf]) -> None:
        """Create the state tensors of `leaves` that are not there yet, uninitialised."""
        self._before = {key: dict(state) for key, state in self.optimizer.state.items()}
        parameters = dict(self.parameters())
        first = next(iter(parameters.values()), torch.empty(0))
        for leaf in leaves.values():
            if not leaf.name.startswith(f"{self._prefix}."):
                continue
            place = leaf.name.removeprefix(f"{self._prefix}.")
            if place.startswith(NAMED):
                name, _, entry = place.removeprefix(NAMED).rpartition(".")
                states: dict[Any, Any] = self.optimizer.state  # torch says that keys are tensors
                states.setdefault(name, {}).setdefault(entry, _empty_for(first, leaf))
                continue
            group, index, entry = place.split(".", 2)
            parameter = parameters.get(f"{group}.{index}")
            if parameter is not None and entry not in self.optimizer.state[parameter]:
                self.optimizer.state[parameter][entry] = _empty_for(parameter, leaf)

    def withdraw(self) -> None:
        """Take away again what `materialise` created."""
        self.optimizer.state.clear()
        self.optimizer.state.update(self._before)


def _empty_for(parameter: torch.Tensor, leaf: Leaf) -> torch.Tensor:
    """What an optimizer would make for `parameter`, distributed as that is, of which this rank's part is `leaf`."""
    empty = empty_like_leaf(leaf, parameter.device)
    part = local(parameter)
    if part is parameter or part.shape != empty.shape:
        return empty
    return torch.empty_like(parameter, dtype=empty.dtype, requires_grad=False)


def check_names(what: str, held: Iterable[str], have: Iterable[str]) -> None:
    """Raises `StateMismatch` unless the snapshot and the job name the same parts."""
    if set(held) != set(have):
        raise StateMismatch(f"{what} is {sorted(held) or 'none'} in the snapshot, {sorted(have) or 'none'} in this job")
