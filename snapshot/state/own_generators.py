"""Random generators that a data source, a module or an optimizer keeps to itself: captured and restored.

Those of a data source are found through its attributes: a loader's ``generator=``, a sampler's generator, a data set's
``self.rng``, and a generator that a function refers to. `snapshot.state.hidden` finds those of modules and optimizers.
`snapshot.state.rng` handles the global generators.
"""

from __future__ import annotations

import functools
import random
import sys
import types
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from holdfast.smp_daemon.shared.errors import StateMismatch
from holdfast.snapshot.state.packages import PARTS, package_of

DEEPEST = 10
"""How many levels of attributes are searched."""

MOST = 10_000
"""Maximum number of objects that are looked at."""

LONGEST = 256
"""Containers with more entries are taken for data and are not searched."""

_PASSIVE = (str, bytes, bytearray, int, float, complex, type, types.ModuleType, torch.Tensor, np.ndarray, np.generic)
_SKIPPED = frozenset({"_iterator"})
"""Attributes that are not searched: a loader's workers and queues."""

_FOREIGN = (
    frozenset({"torch", "numpy", "holdfast", *(f"holdfast.{part}" for part in PARTS - {"chaos"})})
    | sys.stdlib_module_names
)
"""Packages whose functions and classes do not refer to generators of the user."""

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)


def find(root: Any) -> dict[str, Any]:
    """The generators that can be reached from `root`, by attribute path, without the global ones.

    Generators beyond the limits above are not found.
    """
    found: dict[str, Any] = {}
    seen = {id(each) for each in (random._inst, np.random.mtrand._rand, torch.default_generator)}
    todo = deque([("", root, 0)])
    keep = []  # keeps the objects alive, so that no id is reused
    while todo and len(seen) < MOST:
        path, value, depth = todo.popleft()
        if value is None or isinstance(value, _PASSIVE) or id(value) in seen:
            continue
        seen.add(id(value))
        keep.append(value)
        if isinstance(value, GENERATORS):
            if not isinstance(value, random.SystemRandom):
                found[path.removeprefix(".") or "itself"] = value
        elif depth < DEEPEST:
            todo.extend((f"{path}{name}", part, depth + 1) for name, part in _parts(value))
    return found


def capture(generators: Mapping[str, Any]) -> dict[str, Any]:
    """The generators' states, as plain values."""
    return {path: _state(generator) for path, generator in generators.items()}


def restore(generators: Mapping[str, Any], states: Mapping[str, Any], owner: str) -> None:
    """Restore the generators' states.

    Raises:
        StateMismatch: a generator is missing or of another kind; the message names it and `owner`.
    """
    check(generators, states, owner)
    for path, state in states.items():
        try:
            _put(generators[path], state)
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise StateMismatch(
                f"{owner}: {path} is another kind of generator than in the snapshot: {error}"
            ) from error


def check(generators: Mapping[str, Any], states: Mapping[str, Any], owner: str) -> None:
    """Raises `StateMismatch` if one of the captured generators is missing; the message names it and `owner`."""
    if missing := sorted(states.keys() - generators.keys()):
        raise StateMismatch(
            f"{owner}: the snapshot has the generator {missing[0]}, which is not there now: make it before the loop"
        )


def _state(generator: Any) -> Any:
    match generator:
        case torch.Generator():
            return generator.get_state().numpy().tobytes()
        case np.random.Generator():
            return generator.bit_generator.state
        case np.random.RandomState():
            return generator.get_state(legacy=False)
        case np.random.BitGenerator():
            return generator.state
    version, numbers, gauss = generator.getstate()
    return version, array("I", numbers).tobytes(), gauss


def _put(generator: Any, state: Any) -> None:
    match generator:
        case torch.Generator():
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        case np.random.Generator():
            generator.bit_generator.state = state
        case np.random.RandomState():
            generator.set_state(state)
        case np.random.BitGenerator():
            generator.state = state
        case _:
            version, numbers, gauss = state
            generator.setstate((version, tuple(array("I", numbers)), gauss))


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        if len(value) <= LONGEST:
            yield from ((f"[{key!r}]", part) for key, part in value.items() if isinstance(key, str | int))
    elif isinstance(value, list | tuple):
        if len(value) <= LONGEST:
            yield from ((f"[{place}]", part) for place, part in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield from ((".__self__", value.__self__), (".__func__", value.__func__))
    elif isinstance(value, types.FunctionType):
        yield from referred(value)
    elif hasattr(value, "__dict__") and not _is_left_alone(value):
        yield from ((f".{name}", part) for name, part in vars(value).items() if name not in _SKIPPED)
        for kind in type(value).__mro__:
            if not _is_foreign(kind):
                yield from ((f".{name}", part) for name, part in vars(kind).items() if not name.startswith("__dict"))


def referred(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The objects that a function refers to besides its arguments."""
    if _is_foreign(function):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:
            continue  # the cell is still empty
    known = function.__globals__
    yield from ((f".{name}", known[name]) for name in _global_names(function.__code__) if name in known)


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):  # a nested function or comprehension
            yield from _global_names(inner)


def _is_left_alone(value: Any) -> bool:
    """Whether not to search an object: models and optimizers are captured as such, and our own objects, such as hooks,
    lead everywhere."""
    ours = isinstance(value, torch.nn.Module | torch.optim.Optimizer)
    return ours or package_of(type(value).__module__) in _FOREIGN - {"torch", *sys.stdlib_module_names}


def _is_foreign(value: Any) -> bool:
    return package_of(str(value.__module__)) in _FOREIGN
