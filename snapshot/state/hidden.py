"""State in plain attributes of modules and optimizers: listed, so that the user can say what of it matters, and tracked
where the class is registered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.snapshot.copy.tensors import local
from holdfast.snapshot.state.optimizers import OWN, find, nested
from holdfast.snapshot.state.tracked import Tracked, make

KNOWN = frozenset({"_parameters", "_buffers", "_modules"}) | OWN
"""Attributes of modules and optimizers that are captured as such."""

KEPT = (torch.Tensor, np.ndarray, torch.Generator, np.random.Generator)


@dataclass(frozen=True, slots=True)
class _Kept:
    """The arguments of `register`."""

    get: Callable[[Any], Any] | None
    set: Callable[[Any, Any], Any] | None
    tensors: Callable[[Any], dict[str, torch.Tensor]] | None
    changes: str
    when: str


_registry: dict[type, _Kept] = {}


def register(
    kind: type,
    *,
    get: Callable[[Any], Any] | None = None,
    set: Callable[[Any, Any], Any] | None = None,
    tensors: Callable[[Any], dict[str, torch.Tensor]] | None = None,
    changes: str = "any",
    when: str = "forward",
) -> None:
    """Declare, once for all jobs, what state a class of modules or optimizers keeps in its attributes.

    Every module in a model, and every optimizer, of that class or a subclass is then tracked automatically. Meant for
    libraries, so that their users need not track anything.

    Args:
        get, set: ``get(instance)`` returns plain values, and ``set(instance, values)`` loads them.
        tensors: ``tensors(instance)`` returns a dict of tensors that lives as long as the instance.
        changes, when: as for `SnapshotHook.track`.

    Raises:
        ConfigError: the arguments do not fit, or the class is registered already.
    """
    if kind in _registry:
        raise ConfigError(f"{kind.__qualname__} is registered already")
    kept = _Kept(get, set, tensors, changes, when)
    _tracked("check", kept, None)
    _registry[kind] = kept


def unregister(kind: type) -> None:
    """Undo `register` for a class. Raises `KeyError` if it is not registered."""
    del _registry[kind]


def registered(roots: Iterable[tuple[str, Any]]) -> Iterator[Tracked]:
    """What to track of named modules, their submodules, and optimizers whose class is registered."""
    for name, owner in owners(roots):
        for kind in type(owner).__mro__:
            if kind in _registry:
                yield _tracked(name.replace(".", "/"), _registry[kind], owner)
                break


def untracked(roots: Iterable[tuple[str, Any]], captured: Iterable[torch.Tensor]) -> list[str]:
    """Names of tensors, arrays and generators in attributes that are not views of captured tensors."""
    held = {_memory(tensor) for tensor in captured}
    found = []
    for name, owner in owners(roots):
        for attribute, value in getattr(owner, "__dict__", {}).items():
            if attribute not in KNOWN:
                inside = find(f"{name}.{attribute}", value, lambda each: isinstance(each, KEPT))
                found += [place for place, each in inside if _memory(each) not in held]
    return found


def owners(roots: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Modules with all their submodules, and optimizers with those inside them, by name."""
    seen: set[int] = set()
    for name, root in roots:
        if isinstance(root, torch.nn.Module):
            yield from ((f"{name}.{inner}" if inner else name, module) for inner, module in root.named_modules())
        else:
            yield from nested(name, root, seen)


def _tracked(name: str, kept: _Kept, owner: Any) -> Tracked:
    get = None if kept.get is None else lambda: kept.get(owner)  # type: ignore[misc]
    put = None if kept.set is None else lambda values: kept.set(owner, values)  # type: ignore[misc]
    tensors = None if kept.tensors is None else kept.tensors(owner) if owner is not None else {}
    return make(name, get, put, tensors, kept.changes, kept.when)


def _memory(value: Any) -> int:
    """The address of a tensor's storage, equal for tensors that share memory; for other objects, their id."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel():
        return local(value).untyped_storage().data_ptr()
    return id(value)
