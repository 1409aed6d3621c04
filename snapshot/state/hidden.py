"""State in plain attributes of modules and optimizers: listed, so that the user can say what of it matters, and tracked
where the class is registered."""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.snapshot.copy.tensors import local
from holdfast.snapshot.state import own_generators, streams
from holdfast.snapshot.state.optimizers import OWN, find, nested
from holdfast.snapshot.state.own_generators import GENERATORS
from holdfast.snapshot.state.tracked import Tracked, make

KNOWN = frozenset({"_parameters", "_buffers", "_modules"}) | OWN
"""Attributes of modules and optimizers that are captured as such."""

KEPT = (torch.Tensor, np.ndarray, *GENERATORS)


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


class ModuleGenerators:
    """Random generators in attributes of modules, which are not captured. Used by the training thread.

    Args:
        modules: by name; their submodules are searched, too.
        named: what the user has named, such as the getters of `track`. Generators that these refer to are left out, and
            all generators of modules that a function among them refers to.
    """

    def __init__(self, modules: Iterable[tuple[str, torch.nn.Module]], named: Iterable[Any]) -> None:
        captured = {id(random._inst), id(np.random.mtrand._rand), id(torch.default_generator)}
        roots = list(named)
        captured.update(id(each) for root in roots for each in own_generators.find(root).values())
        functions = [root for root in roots if isinstance(root, types.FunctionType)]
        referred = [part for each in functions for part in own_generators.referred(each)]
        seen = {id(owner) for _, owner in owners(part for part in referred if isinstance(part[1], torch.nn.Module))}
        self._known: dict[str, tuple[Any, str]] = {}
        for name, owner in owners(modules):
            if id(owner) in seen or not _registry.keys().isdisjoint(type(owner).__mro__):
                continue
            for attribute, value in vars(owner).items():
                if attribute not in KNOWN:
                    for place, each in find(f"{name}.{attribute}", value, lambda part: isinstance(part, GENERATORS)):
                        if id(each) not in captured:
                            self._known[place] = each, _digest(each)

    def drawn(self) -> list[str]:
        """The names of those that were drawn from since this was made. Each is returned once."""
        found = [place for place, (each, before) in self._known.items() if _digest(each) != before]
        for place in found:
            del self._known[place]
        return found


def _digest(generator: Any) -> str:
    return streams.digest(own_generators.capture({"": generator}))


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
