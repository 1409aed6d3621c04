"""The state of a `torch.optim.Optimizer`, in place. Megatron's optimizers wrap one, so both adapters use this.

A parameter is named by its group and its place in it, ``<group>.<index>``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from smp_daemon.errors import StateMismatch
from smp_daemon.slotfile import Leaf
from snapshot.adapter import LiveTensor, Tree
from snapshot.tensors import empty_like_leaf


def parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter that the optimizer updates."""
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            yield f"{g}.{i}", parameter


def state_tensors(optimizer: torch.optim.Optimizer, prefix: str) -> Iterator[LiveTensor]:
    """Adam's moments and the like, as they are now: many appear only with the first step."""
    for name, parameter in parameters(optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                yield LiveTensor(f"{prefix}.{name}.{key}", value, stable=True)


def plain_state(optimizer: torch.optim.Optimizer) -> Tree:
    """Group options such as lr, and what of the per-parameter state is no tensor."""
    return {
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "state": {
            name: plain
            for name, parameter in parameters(optimizer)
            if (plain := _without_tensors(optimizer.state.get(parameter, {})))
        },
        "order": {name: list(optimizer.state.get(parameter, {})) for name, parameter in parameters(optimizer)},
    }


def check_plain_state(optimizer: torch.optim.Optimizer, tree: Tree, name: str) -> None:
    """Raises `StateMismatch` unless the optimizer has the groups that `tree` was taken from."""
    have, held = len(optimizer.param_groups), len(tree["groups"])
    if have != held:
        raise StateMismatch(f"{name} has {held} parameter groups in the snapshot, {have} in this job")


def check_names(what: str, held: Iterable[str], have: Iterable[str]) -> None:
    """Raises `StateMismatch` unless the snapshot and the job name the same parts."""
    if set(held) != set(have):
        raise StateMismatch(f"{what} is {sorted(held) or 'none'} in the snapshot, {sorted(have) or 'none'} in this job")


def load_plain_state(optimizer: torch.optim.Optimizer, tree: Tree) -> None:
    """Take over what `plain_state` gave, down to the order of keys. Options that are tensors are filled in place."""
    for group, saved in zip(optimizer.param_groups, tree["groups"], strict=True):
        for key, value in saved.items():
            if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                group[key].copy_(value)
            else:
                group[key] = value
    for name, parameter in parameters(optimizer):
        state = {**optimizer.state.get(parameter, {}), **tree["state"].get(name, {})}
        if state:
            optimizer.state[parameter] = {key: state[key] for key in tree["order"][name]}


def materialise_state(optimizer: torch.optim.Optimizer, prefix: str, leaves: Mapping[str, Leaf]) -> None:
    """Create the state tensors of `leaves` that are not there yet, uninitialised."""
    by_parameter: dict[str, list[tuple[str, Leaf]]] = {}
    for leaf in leaves.values():
        if leaf.name.startswith(f"{prefix}."):
            group, index, key = leaf.name.removeprefix(f"{prefix}.").split(".", 2)
            by_parameter.setdefault(f"{group}.{index}", []).append((key, leaf))
    for name, parameter in parameters(optimizer):
        for key, leaf in by_parameter.get(name, []):
            if key not in optimizer.state[parameter]:
                optimizer.state[parameter][key] = empty_like_leaf(leaf, parameter.device)


def _without_tensors(state: Mapping[str, Any]) -> Tree:
    return {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
