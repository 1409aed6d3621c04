"""State in plain attributes of modules and optimizers.

Generators there are captured, and classes that are registered are tracked. Anything else is listed, so that the user
can say what of it matters, and warned of where it changes from step to step.
"""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.snapshot.copy.tensors import local
from holdfast.snapshot.state import own_generators
from holdfast.snapshot.state.inputs import SAMPLED, is_dense, thinned
from holdfast.snapshot.state.optimizers import OWN, WITH_TABLES, find, nested
from holdfast.snapshot.state.own_generators import GENERATORS
from holdfast.snapshot.state.tracked import Tracked, make

KNOWN = frozenset(vars(torch.nn.Module())) | OWN
"""Attributes that every module or optimizer has: what is captured as such, and hooks."""

FIRST_LOOKS = 4
"""`ChangingAttributes` looks at this many boundaries in a row before it looks less often."""

MOST = 1000
"""The most attributes that are compared at one look, since reading each may wait for a GPU."""


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


def untracked(roots: Iterable[tuple[str, Any]], captured: Iterable[Any]) -> list[str]:
    """Names of tensors, arrays and generators in attributes that are not captured: neither these tensors and
    generators, nor views of the tensors."""
    held = {_memory(each) for each in captured}
    found = []
    for name, owner in owners(roots):
        for attribute, value in getattr(owner, "__dict__", {}).items():
            if attribute not in KNOWN:
                inside = find(
                    f"{name}.{attribute}", value, lambda each: _is_tensor_or_array(each) or _is_generator(each)
                )
                found += [place for place, each in inside if _memory(each) not in held]
    return found


def generators(roots: Iterable[tuple[str, Any]], named: Iterable[Any]) -> dict[str, Any]:
    """The random generators in attributes of named modules, their submodules, and optimizers, by name.

    Args:
        named: what the user has named, such as the getters of `track`. Generators that these refer to are left out, and
            all generators of modules and optimizers that a function among them refers to.
    """
    named = list(named)
    taken = {id(each) for each in (random._inst, np.random.mtrand._rand, torch.default_generator)}
    taken.update(id(each) for root in named for each in own_generators.find(root).values())
    return {
        place: each
        for name, _, value in _attributes(roots, named)
        for place, each in find(name, value, _is_generator)
        if id(each) not in taken
    }


class ChangingAttributes:
    """Finds attributes that change from step to step and are not captured: numbers, tensors and arrays.

    Attributes of torch's own classes and of modules with a ``get_extra_state`` are left out; so are tensors that
    require gradients, which every step computes anew, and all attributes beyond the first `MOST`. Of tensors and
    arrays, a sample is compared. Used by the training thread.

    Args:
        roots, named: as for `generators`.
        captured: the tensors that are captured, whose views are left out, and the optimizers whose numbers are.
        patience: an attribute is reported once it has differed at this many looks in a row from the look before.
    """

    def __init__(
        self, roots: Iterable[tuple[str, Any]], named: Iterable[Any], captured: Iterable[Any], patience: int
    ) -> None:
        self._roots = list(roots)
        self._named = list(named)
        self._captured = {_memory(each) for each in captured}
        self._patience = patience
        self._boundaries = 0
        self._before: dict[str, bytes] = {}
        self._in_a_row: dict[str, int] = {}

    def look(self) -> list[str]:
        """Called at every boundary. Returns the names of attributes to report.

        It looks at `FIRST_LOOKS` boundaries, and from then on at doubling distances, since it walks all modules.
        """
        self._boundaries += 1
        if self._boundaries > FIRST_LOOKS and self._boundaries & (self._boundaries - 1):
            return []
        now = dict(islice(self._samples(), MOST))
        changed = [place for place, part in now.items() if self._before.get(place, part) != part]
        self._before = now
        self._in_a_row = {place: self._in_a_row.get(place, 0) + 1 for place in changed}
        return [place for place, count in self._in_a_row.items() if count >= self._patience]

    def _samples(self) -> Iterator[tuple[str, bytes]]:
        for name, owner, value in _attributes(self._roots, self._named):
            if type(owner).__module__.startswith(WITH_TABLES) or _has_extra_state(owner):
                continue
            for place, each in find(name, value, _is_tensor_or_array):
                if _memory(each) not in self._captured and (part := _sample(each)) is not None:
                    yield place, part
            if isinstance(value, bool | int | float | np.generic) and id(owner) not in self._captured:
                yield name, repr(value).encode()


def _attributes(roots: Iterable[tuple[str, Any]], named: Iterable[Any]) -> Iterator[tuple[str, Any, Any]]:
    """The attributes of modules and optimizers that may be state: their paths, owners and values. Owners of registered
    classes are left out, and those that a function in `named` refers to."""
    functions = [each for each in named if isinstance(each, types.FunctionType)]
    referred = [part for each in functions for part in own_generators.referred(each)]
    inner = owners(part for part in referred if isinstance(part[1], torch.nn.Module | torch.optim.Optimizer))
    seen = {id(owner) for _, owner in inner}
    for name, owner in owners(roots):
        if id(owner) not in seen and _registry.keys().isdisjoint(type(owner).__mro__):
            for attribute, value in getattr(owner, "__dict__", {}).items():
                if attribute not in KNOWN:
                    yield f"{name}.{attribute}", owner, value


def _is_tensor_or_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)


def _is_generator(value: Any) -> bool:
    return isinstance(value, GENERATORS) and not isinstance(value, random.SystemRandom)


def _has_extra_state(owner: Any) -> bool:
    return getattr(type(owner), "get_extra_state", None) not in (None, torch.nn.Module.get_extra_state)


def _sample(value: torch.Tensor | np.ndarray[Any, Any]) -> bytes | None:
    """Bytes that differ if the value does, most probably; None if it is computed anew in each step, or is no data."""
    if isinstance(value, np.ndarray):
        return None if value.dtype.hasobject else value.reshape(-1)[:: 1 + value.size // SAMPLED].tobytes()
    part = local(value).detach()
    if value.requires_grad or not is_dense(part):
        return None
    return thinned(part).cpu().view(torch.uint8).numpy().tobytes()


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
        with suppress(RuntimeError):  # some subclasses only refer to other tensors
            return local(value).untyped_storage().data_ptr()
    return id(value)
