"""State in plain attributes of modules and optimizers.

Generators there are captured, and classes that are registered are tracked. Anything else is listed, so that the user
can say what of it matters, and warned of where it changes from step to step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.snapshot.copy.tensors import is_dense, local, memory_of
from holdfast.snapshot.state import rng
from holdfast.snapshot.state.digests import elements_of
from holdfast.snapshot.state.libraries import kept_by_library
from holdfast.snapshot.state.named import NamedState, state_named_by
from holdfast.snapshot.state.optimizers import OWN, WITH_TABLES, is_captured_number, nested
from holdfast.snapshot.state.tracked import Tracked, make
from holdfast.snapshot.state.values import Keeping, keep
from holdfast.snapshot.state.walk import (
    is_captured_as_such,
    is_code,
    is_generator,
    is_installed,
    is_users_own,
    of_class,
    package_of,
    trains_beside_optimizers,
    walk,
)

KNOWN = frozenset(vars(torch.nn.Module())) | OWN
"""Attributes that every module or optimizer has: what is captured as such, and hooks."""

OF_COMM_HOOKS = ("._comm_hooks", "._comm_hook_state")
"""Where torch's data-parallel modules keep the states of hooks that were registered to communicate gradients."""

FIRST_LOOKS = 4
"""`Changing` looks at this many boundaries in a row before it looks less often."""

SAMPLED = 64
"""About how many elements of a tensor are compared."""

MOST_OPENED = 1_000_000
"""Maximum number of containers and objects in attributes that are looked into."""

MOST_READ = 1000
"""The most tensors that are compared at one look, since reading each may wait for a GPU."""


_registry: dict[type, Callable[[str, Any], Tracked]] = {}
"""By class, what makes a `Tracked` of a name and an instance."""


def register(
    kind: type,
    *,
    get: Callable[[Any], Any] | None = None,
    set: Callable[[Any, Any], Any] | None = None,
    tensors: Callable[[Any], dict[str, torch.Tensor]] | None = None,
    changes: str = "any",
    when: str = "forward",
    kept: bool = True,
) -> None:
    """Declare, once for all jobs, what state the objects of a class keep.

    Every module in a model, and every optimizer, of that class or a subclass is then tracked automatically. Meant for
    libraries, so that their users need not track anything. Of any other class, it says how its objects are kept where
    they are found: in an optimizer's state, or among the values of `SnapshotHook.track`. Without it an object is kept
    by its attributes, if these are plain values.

    Args:
        get, set: ``get(instance)`` returns plain values, and ``set(instance, values)`` loads them. An object in an
            optimizer's state is made anew first, without a call of its constructor.
        tensors: ``tensors(instance)`` returns a dict of tensors that lives as long as the instance. For modules and
            optimizers only.
        changes, when: as for `SnapshotHook.track`.
        kept: False: objects of this class need not be kept; an optimizer makes them anew when they are not there.

    Raises:
        ConfigError: the arguments do not fit, or the class is registered already.
    """
    if kind in _registry:
        raise ConfigError(f"{kind.__qualname__} is registered already")
    if not (issubclass(kind, torch.nn.Module | torch.optim.Optimizer) or hasattr(kind, "zero_grad")):
        if tensors is not None or (get is None) is not (set is None) or (get is None) is kept:
            raise ConfigError(f"register({kind.__qualname__}): give get and set, or kept=False")
        keep(kind, Keeping(get, set))
        return

    def of(name: str, owner: Any) -> Tracked:
        pull, push = (None if each is None else partial(each, owner) for each in (get, set))
        return make(name, pull, push, None if tensors is None else tensors(owner), changes, when)

    make("check", get, set, None if tensors is None else {}, changes, when)  # type: ignore[arg-type]
    _registry[kind] = of


def registered(roots: Iterable[tuple[str, Any]]) -> Iterator[Tracked]:
    """What to track of named modules, their submodules, and optimizers whose class is registered."""
    for name, owner in owners(roots):
        if tracks := next((_registry[kind] for kind in type(owner).__mro__ if kind in _registry), None):
            yield tracks(name.replace(".", "/"), owner)


def untracked(roots: Iterable[tuple[str, Any]], captured: Collection[int]) -> list[str]:
    """Names, sorted, of tensors, arrays and generators in attributes, and of sets of such objects, which have no order
    and so no names. `captured`: `memory_of` those that are captured, which are left out, as are views of them."""
    attributes = (each for name, owner in owners(roots) for each in _attributes(name, owner))
    found = walk(attributes, is_users_own, most=MOST_OPENED)
    return sorted({path for path, value, _ in found if _keeps_state(value) and memory_of(value) not in captured})


def generators(roots: Iterable[tuple[str, Any]], named: Collection[Any]) -> dict[str, Any]:
    """The random generators that named modules, their submodules, and optimizers keep, by name: in their attributes,
    in the user's own objects there, and in what the user's own functions and classes refer to.

    Args:
        named: what the user has named, such as the getters of `track`. Generators that these read are left out, and all
            generators of modules and optimizers that a function among them takes as a whole.
    """
    state = state_named_by(named)
    but = {id(each) for root in state.objects for each in rng.find(root).values()}
    return rng.owned(_with_classes(_unnamed(roots, state)), is_users_own, but, most=MOST_OPENED)


P = TypeVar("P", bound=Hashable)


@dataclass(eq=False)
class Changing(Generic[P]):
    """Finds values that change from step to step. Used by the training thread.

    Args:
        samples: gives the values that are compared, at every look: their places, and tensors, of which all beyond the
            first `MOST_READ` are left out, or bytes that most probably differ if the value does.
        patience: a place is reported once it has differed at this many looks in a row from the look before.
    """

    samples: Callable[[], Iterator[tuple[P, bytes | torch.Tensor]]]
    patience: int
    _boundaries: int = 0
    _before: dict[P, bytes] = field(default_factory=dict)
    _in_a_row: dict[P, int] = field(default_factory=dict)

    def look(self) -> list[P]:
        """Called at every boundary. Returns the places to report.

        It looks at `FIRST_LOOKS` boundaries, and from then on at doubling distances, since a look is not cheap.
        """
        self._boundaries += 1
        if self._boundaries > FIRST_LOOKS and self._boundaries & (self._boundaries - 1):
            return []
        now, read = dict[P, bytes](), 0
        for place, value in self.samples():
            if isinstance(value, bytes):
                now[place] = value
            elif read < MOST_READ and (part := sample_of(value)):
                now[place] = part
                read += 1
        changed = [place for place, part in now.items() if self._before.get(place, part) != part]
        self._before = now
        self._in_a_row = {place: self._in_a_row.get(place, 0) + 1 for place in changed}
        return [place for place, count in self._in_a_row.items() if count >= self.patience]


def samples_of_attributes(
    roots: Collection[tuple[str, Any]], named: Collection[Any], captured: Collection[int], told: set[tuple[int, str]]
) -> Iterator[tuple[str, bytes | torch.Tensor]]:
    """Numbers, tensors and arrays in attributes, for `Changing`.

    Attributes of modules with a ``get_extra_state`` are left out, and those of torch's own classes except
    `rates_of_layer`, `OF_COMM_HOOKS` and what trains beside optimizers; so are tensors that autograd has computed, as
    every step computes them anew.

    Args:
        roots, named: as for `generators`. What `named` read is left out.
        captured: `memory_of` the tensors that are captured, whose views are left out, and of the optimizers and what
            they hold for each parameter, whose numbers are.
        told: names of attributes that were told of, with the ids of who holds them. These are left out, too.
    """
    state = state_named_by(named)
    state.attributes.update(told)
    known = {id(value): value for _, value, _ in walk((("", each) for each in state.objects), is_code, code=True)}

    def is_unknown(value: Any) -> bool:
        return is_users_own(value) and id(value) not in known

    found = walk(_compared(roots, state, captured), is_unknown, most=MOST_OPENED)  # not all of it, if there is much
    for path, value, holder in _with_kept_by_libraries(found, known):
        if state.has(holder, path) or id(holder) in known or id(holder) in captured:
            continue
        if isinstance(value, bool | int | float | np.generic):
            yield path, repr(value).encode()
        elif isinstance(value, torch.Tensor) and memory_of(value) not in captured:
            yield path, value
        elif isinstance(value, np.ndarray) and memory_of(value) not in captured and (part := sample_of(value)):
            yield path, part


def _with_kept_by_libraries(
    found: Iterable[tuple[str, Any, Any]], known: Collection[int]
) -> Iterator[tuple[str, Any, Any]]:
    for path, value, holder in found:
        yield path, value, holder
        if id(value) not in known:
            yield from kept_by_library(path, value)


def switches(roots: Iterable[tuple[str, Any]], named: Iterable[Any]) -> dict[str, bool]:
    """What is True or False in attributes of modules of the user's own classes, by path: a step may turn it once, as a
    layer does that begins with what the first batch is. `roots`, `named`: as for `generators`."""
    state = state_named_by(named)
    own = (each for each in _unnamed(roots, state) if not is_installed(package_of(type(each[1]).__module__)))
    found = ((owner, each) for name, owner in own if not _has_extra_state(owner) for each in _attributes(name, owner))
    return {path: value for owner, (path, value) in found if isinstance(value, bool) and not state.has(owner, path)}


def _compared(
    roots: Collection[tuple[str, Any]], state: NamedState, captured: Collection[int]
) -> Iterator[tuple[str, Any]]:
    for name, owner in _unnamed(roots, state):
        found = [each for each in _attributes(name, owner) if not state.has(owner, each[0])]
        if type(owner).__module__.startswith(WITH_TABLES):
            yield from (each for each in found if each[0].endswith(OF_COMM_HOOKS) or trains_beside_optimizers(each[1]))
        elif not _has_extra_state(owner):
            has_numbers = id(owner) in captured
            yield from (each for each in found if not (has_numbers and is_captured_number(each[1])))
    for name, owner in _unnamed(roots, state):  # last, as they are many
        yield from (each for each in rates_of_layer(name, owner) if not state.has(owner, each[0]))


def rates_of_layer(name: str, owner: Any) -> list[tuple[str, Any]]:
    """The fractions in attributes of a layer or a loss of torch's, by path: a dropout's rate, a label smoothing. They
    are in no state_dict, and only a script changes them."""
    if not type(owner).__module__.startswith("torch.nn.modules."):
        return []
    return [each for each in _attributes(name, owner) if type(each[1]) is float]


def _attributes(name: str, owner: Any) -> list[tuple[str, Any]]:
    """The attributes of a module or an optimizer that may be state, by path."""
    held = getattr(owner, "__dict__", {})
    return [(f"{name}.{attribute}", value) for attribute, value in held.items() if attribute not in KNOWN]


def _unnamed(roots: Iterable[tuple[str, Any]], state: NamedState) -> Iterator[tuple[str, Any]]:
    """The `owners` whose class is not registered, and that the user has not named as a whole."""
    inner = owners(("", each) for each in state.objects if is_captured_as_such(each))
    seen = {id(owner) for _, owner in inner}
    for name, owner in owners(roots):
        if id(owner) not in seen and _registry.keys().isdisjoint(type(owner).__mro__):
            yield name, owner


def _with_classes(owned: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The attributes of owners, and those of their classes, methods included, and their hooks."""
    kinds: set[type] = set()
    for name, owner in owned:
        yield from _attributes(name, owner)
        yield from ((f"{name}.hook{place}", hook) for place, hook in enumerate(_hooks_of(owner)))
        if type(owner) not in kinds:
            kinds.add(type(owner))
            yield from ((f"{name}{part}", value) for kind in type(owner).__mro__ for part, value in of_class(kind))


def _hooks_of(owner: Any) -> Iterator[Any]:
    """What a module or an optimizer calls of the user's around what it does, and its own parameters in backward, in
    order."""
    tables = [table for name, table in getattr(owner, "__dict__", {}).items() if name.endswith("_hooks")]
    for parameter in owner._parameters.values() if isinstance(owner, torch.nn.Module) else ():
        tables += [] if parameter is None else [parameter._backward_hooks, parameter._post_accumulate_grad_hooks]
    for table in tables:
        if isinstance(table, dict):  # else it is a list of the user's own, or nothing was ever registered
            yield from filter(is_users_own, table.values())


def _keeps_state(value: Any) -> bool:
    if isinstance(value, set | frozenset):
        return any(map(_keeps_state, value))
    return is_tensor_or_array(value) or is_generator(value)


def is_tensor_or_array(value: Any) -> bool:
    """Whether a value is data of a step, or state."""
    return isinstance(value, torch.Tensor | np.ndarray)


def keeps_uncaptured(owner: Any, name: str, value: Any) -> bool:
    """Whether an attribute of a module is a plain value, which is captured only if somebody names it."""
    is_plain_value = isinstance(owner, torch.nn.Module) and isinstance(value, bool | int | float | str)
    return is_plain_value and name not in KNOWN and not _has_extra_state(owner)


def _has_extra_state(owner: Any) -> bool:
    return getattr(type(owner), "get_extra_state", None) not in (None, torch.nn.Module.get_extra_state)


def sample_of(value: torch.Tensor | np.ndarray[Any, Any]) -> bytes | None:
    """Bytes that differ if the value does, most probably; None if it is computed anew in each step, or is no data."""
    if isinstance(value, np.ndarray):
        return None if value.dtype.hasobject else value.reshape(-1)[:: 1 + value.size // SAMPLED].tobytes()
    part = local(value)
    if not value.is_leaf or type(part) not in (torch.Tensor, torch.nn.Parameter):
        return None  # others may refuse to be detached
    return elements_of(part.detach(), SAMPLED) if is_dense(part.detach()) else None


def owners(roots: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Modules with all their submodules, and optimizers with those inside them, by name."""
    modules, seen = set[torch.nn.Module](), set[int]()
    for name, root in roots:
        is_module = isinstance(root, torch.nn.Module)
        yield from root.named_modules(modules, name) if is_module else nested(name, root, seen)
