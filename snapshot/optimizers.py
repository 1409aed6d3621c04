"""The state of a `torch.optim.Optimizer`, in place. Megatron's optimizers wrap one, so both adapters use this.

A parameter is named by its group and its place in it, ``<group>.<index>``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from smp_daemon.errors import StateMismatch
from smp_daemon.slotfile import Leaf
from snapshot.adapter import Change, Container, LiveTensor, Tree
from snapshot.tensors import empty_like_leaf

SHAREABLE = ("torch.optim.",)
"""Where optimizers come from that keep nothing but functions of the reduced gradients, alike on all replicas. Others
may keep what is a rank's own, such as a compressor's error feedback, which may be zero for the first thousand steps."""


class OptimizerState:
    """One optimizer as the adapters see it. Not thread-safe.

    Args:
        replicated: whether data-parallel replicas update the same parameters with the same gradients.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, prefix: str, *, replicated: bool) -> None:
        self.optimizer = optimizer
        self._prefix = prefix
        self._replicated = replicated and type(optimizer).__module__.startswith(SHAREABLE)
        self._plain: list[tuple[str, dict[str, Any], list[str]]] = []

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter that the optimizer updates."""
        for g, group in enumerate(self.optimizer.param_groups):
            for i, parameter in enumerate(group["params"]):
                yield f"{g}.{i}", parameter

    def tensors(self) -> Iterator[LiveTensor]:
        """Adam's moments and the like, as they are now: many appear only with the first step."""
        self._plain = []
        for name, parameter in self.parameters():
            state = self.optimizer.state.get(parameter, {})
            plain = [key for key, value in state.items() if not isinstance(value, torch.Tensor)]
            if plain:
                self._plain.append((name, state, plain))
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    yield LiveTensor(f"{self._prefix}.{name}.{key}", value, Change.STEP, self._replicated)

    def watched(self) -> Iterator[Container]:
        """Groups, and the state of each parameter; and what holds these, as ``load_state_dict`` replaces them."""
        yield vars(self.optimizer)
        yield self.optimizer.param_groups
        yield self.optimizer.state
        for group in self.optimizer.param_groups:
            yield group
            yield group["params"]
        yield from self.optimizer.state.values()

    def fixed(self) -> Tree:
        """The order of the keys of each parameter's state."""
        return {name: list(self.optimizer.state.get(parameter, {})) for name, parameter in self.parameters()}

    def plain(self) -> Tree:
        """Group options such as lr, and what of the per-parameter state `tensors` found to be no tensor."""
        return {
            "groups": [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups],
            "state": {name: {key: state[key] for key in keys if key in state} for name, state, keys in self._plain},
        }

    def check(self, plain: Tree) -> None:
        """Raises `StateMismatch` unless the optimizer has the groups that `plain` was taken from."""
        have, held = len(self.optimizer.param_groups), len(plain["groups"])
        if have != held:
            raise StateMismatch(f"{self._prefix} has {held} parameter groups in the snapshot, {have} in this job")

    def load(self, plain: Tree, order: Tree) -> None:
        """Take over what `plain` and `fixed` gave. Options that are tensors are filled in place."""
        for group, saved in zip(self.optimizer.param_groups, plain["groups"], strict=True):
            for key, value in saved.items():
                if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value
        for name, parameter in self.parameters():
            state = {**self.optimizer.state.get(parameter, {}), **plain["state"].get(name, {})}
            if state:
                self.optimizer.state[parameter] = {key: state[key] for key in order[name]}

    def materialise(self, leaves: Mapping[str, Leaf]) -> None:
        """Create the state tensors of `leaves` that are not there yet, uninitialised."""
        by_parameter: dict[str, list[tuple[str, Leaf]]] = {}
        for leaf in leaves.values():
            if leaf.name.startswith(f"{self._prefix}."):
                group, index, key = leaf.name.removeprefix(f"{self._prefix}.").split(".", 2)
                by_parameter.setdefault(f"{group}.{index}", []).append((key, leaf))
        for name, parameter in self.parameters():
            for key, leaf in by_parameter.get(name, []):
                if key not in self.optimizer.state[parameter]:
                    self.optimizer.state[parameter][key] = empty_like_leaf(leaf, parameter.device)


def check_names(what: str, held: Iterable[str], have: Iterable[str]) -> None:
    """Raises `StateMismatch` unless the snapshot and the job name the same parts."""
    if set(held) != set(have):
        raise StateMismatch(f"{what} is {sorted(held) or 'none'} in the snapshot, {sorted(have) or 'none'} in this job")
