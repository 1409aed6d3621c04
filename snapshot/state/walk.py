"""The one way through objects: everything that a value holds, each with the path to it.

============================  ==================================  =======================================
Kind                          What is followed                    Path
============================  ==================================  =======================================
mapping                       its values                          ``['key']``, or ``[3]`` for its place
list, tuple, deque            its items                           ``[3]``
set                           its items, if they sort             ``{'item'}``
iterator of a container       its position                        ``.position``
any other object              attributes, also those in slots     ``.name``
function, method, partial     what it refers to                   ``.name``
class                         attributes, methods included        ``.name``
tensor, array, number, text,  nothing
generator, module
============================  ==================================  =======================================

Containers are always opened, other objects if the caller says so. Everything nearer comes first, so that the limits cut
off what is far, and a path is the shortest one. No property, no ``__getattr__`` and no ``repr`` of an object is called:
these may change what they are asked about, or hold an address.
"""

from __future__ import annotations

import functools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

DEEPEST = 10
"""How many levels are opened."""

MOST = 10_000
"""Maximum number of containers and objects that are opened."""

LONGEST = 256
"""Containers with more entries that a script or a data source keeps are taken for data."""

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)

PARTS = frozenset({"snapshot", "smp_daemon", "ec", "integrations", "chaos"})
"""Parts of holdfast that count as packages of their own."""

CLOSED = frozenset({"numpy", "holdfast", *(f"holdfast.{part}" for part in PARTS - {"chaos"})})
"""Packages whose objects lead nowhere, or everywhere, as a hook does."""

LIBRARIES = CLOSED | sys.stdlib_module_names | {"torch"}
"""Packages whose functions and classes do not refer to generators of the user."""

BESIDE_OPTIMIZERS = "torch.distributed.algorithms."
"""Where torch has what trains beside optimizers: averages between replicas, errors of compressed gradients. It keeps
state as classes of the user do, and no ``state_dict`` has it."""

INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders of what is installed, in this environment or in one that it is built on."""

_PLAIN = (str, bytes, bool, int, float, complex, type(None), np.generic)
_LEAVES = (*_PLAIN, *GENERATORS, bytearray, memoryview, types.ModuleType, torch.Tensor, np.ndarray, torch.dtype)
_BOUND = (types.MethodType, types.BuiltinMethodType, functools.partial)
_CODE = (types.FunctionType, *_BOUND)

Parts = Iterable[tuple[str, Any]]


def walk(
    roots: Parts,
    into: Callable[[Any], bool],
    *,
    once: bool = True,
    code: bool = False,
    skipped: Collection[str] = (),
    longest: int | None = None,
    objects: int = 0,
    thinned: int | None = None,
    deepest: int = DEEPEST,
    most: int = MOST,
) -> Iterator[tuple[str, Any, Any]]:
    """The named `roots` and everything in them: the path, the value, and what holds it; None holds the roots.

    Args:
        into: whether to open an object that is no container. Each caller has its own reason to stop somewhere.
        once: open an object at the first place where it is found only. Without it, values that are equal give the same
            whichever of their parts are shared, as a digest needs; `deepest` ends what refers to itself.
        code: follow functions and classes, those of objects included, too. Numbers there are no state, but generators
            are.
        skipped: names of attributes that are not followed.
        longest: containers with more entries are not opened: they are data.
        objects: how many entries are followed of those that hold generators, or objects to open, as a list of
            environments does. They come when nothing else is left.
        thinned: of longer lists and tuples only about as many entries are followed, spread evenly: a sample will do.
    """
    seen: dict[int, Any] = {}  # keeps the objects alive, so that no id is reused
    todo = deque((path, value, None, 0) for path, value in roots)
    last = deque[tuple[str, Any, Any, int]]()
    while todo or last:
        path, value, holder, depth = (todo or last).popleft()
        yield path, value, holder
        opened = _of(type(value)).opened
        if opened is None or not most or depth == deepest or id(value) in seen:
            continue
        is_long = False
        if opened is _attributes:
            if not into(value):
                continue
            parts = _attributes(value, skipped, code)
        elif opened in (parts_of_code, _class_attributes):
            if not (code and into(value)):
                continue
            parts = opened(value)
        else:
            is_long = longest is not None and opened is not _position and len(value) > longest
            if is_long and not (objects and _holds_objects(value, into)):
                continue
            parts = islice(opened(value), objects) if is_long else opened(value)
            if thinned is not None and opened is _items and len(value) > thinned:
                parts = islice(parts, 0, None, len(value) // thinned)
        most -= 1
        if once:
            seen[id(value)] = value
        (last if is_long else todo).extend([(path + name, part, value, depth + 1) for name, part in parts])


def _holds_objects(container: Collection[Any], into: Callable[[Any], bool]) -> bool:
    """Whether the first entry is a random generator, or an object to open."""
    if isinstance(container, Mapping) and not isinstance(container, dict):
        return False  # it may make, or read, what it is asked for
    first = next(iter(container.values() if isinstance(container, dict) else container), None)
    return is_generator(first) or (_of(type(first)).opened is _attributes and into(first))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in containers and in attributes of objects. Callables, such as modules, are no data."""
    found = walk([("", value)], lambda each: not callable(each))
    return (part for _, part, _ in found if isinstance(part, torch.Tensor))


def is_generator(value: Any) -> bool:
    """Whether it is a random generator that has a state."""
    return _of(type(value)).is_generator


def is_captured_as_such(value: Any) -> bool:
    """Whether an object is a model or an optimizer."""
    return isinstance(value, torch.nn.Module | torch.optim.Optimizer)


def package_of(module: object) -> str:
    """``torch`` for ``torch.nn.init``, ``holdfast.ec`` for ``holdfast.ec.codec``, ``holdfast`` for ``holdfast.cli``."""
    first, _, rest = str(module).partition(".")
    part = rest.partition(".")[0]
    return f"{first}.{part}" if first == "holdfast" and part in PARTS else first


def home_of(value: Any) -> str:
    """The package that a function, a class, or the class of any other object comes from."""
    return package_of(value.__module__ if isinstance(value, types.FunctionType | type) else type(value).__module__)


@functools.cache
def is_installed(package: str) -> bool:
    """Whether a package is installed or part of Python, as opposed to the user's own code."""
    if package in sys.stdlib_module_names:
        return True
    module = sys.modules.get(package)
    places = [getattr(module, "__file__", None) or "", *getattr(module, "__path__", ())]
    return any(not INSTALLED.isdisjoint(Path(place).parts) for place in places)


def is_users_own(value: Any) -> bool:
    """Whether an object, that is neither a model nor an optimizer, or a function comes from the user's own code, or
    trains `beside optimizers <BESIDE_OPTIMIZERS>`."""
    if isinstance(value, _BOUND) or trains_beside_optimizers(value):
        return True  # what a bound method is made of is looked at one by one
    package = home_of(value)
    return not (package in LIBRARIES or is_installed(package) or is_captured_as_such(value))


def trains_beside_optimizers(value: Any) -> bool:
    """Whether an object is one of torch's that keep state, and are neither models nor optimizers."""
    return type(value).__module__.startswith(BESIDE_OPTIMIZERS)


def is_ours(value: Any) -> bool:
    """Whether its class is the hook's or an integration's, or a subclass of one of these."""
    ours = ("holdfast", "holdfast.snapshot", "holdfast.integrations")
    return any(package_of(kind.__module__) in ours for kind in type(value).__mro__)


def is_code(value: Any) -> bool:
    """Whether it is a function, a method, or a partial of these."""
    return isinstance(value, _CODE)


def referred(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The objects that a function refers to besides its arguments, and the defaults of these."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:
            continue  # the cell is still empty
    yield from ((f".{place}", part) for place, part in enumerate(function.__defaults__ or ()))
    yield from ((f".{name}", part) for name, part in (function.__kwdefaults__ or {}).items())
    known = function.__globals__
    yield from ((f".{name}", known[name]) for name in _global_names(function.__code__) if name in known)


# ---------------------------------------------------------------------- the table
#
# Other threads of the user may change what is walked, and Python raises where a dict, set or deque changes while it is
# iterated over: these are copied first, which no other thread can interrupt.


class _Learned(NamedTuple):
    """What is known of a class.

    Attributes:
        opened: gives the parts of an instance; None: it is opened by nobody.
        slots: those that class statements have made. Those of builtin classes may create what they return.
    """

    kind: type
    opened: Callable[..., Parts] | None
    is_generator: bool
    slots: list[types.MemberDescriptorType]


_known: dict[int, _Learned] = {}
"""By id, since a metaclass may compare its classes; with the class, so that no id is reused."""


def _of(kind: type) -> _Learned:
    known = _known.get(id(kind))
    if known is not None:
        return known
    if len(_known) >= MOST:
        _known.clear()  # of a process that makes classes again and again
    made = [vars(each) for each in kind.__mro__ if "__slots__" in vars(each)]
    slots = [part for each in made for part in list(each.values()) if isinstance(part, types.MemberDescriptorType)]
    generates = issubclass(kind, GENERATORS) and not issubclass(kind, random.SystemRandom)
    _known[id(kind)] = learned = _Learned(kind, _opener_of(kind), generates, slots)
    return learned


def _opener_of(kind: type) -> Callable[..., Parts] | None:
    if issubclass(kind, _LEAVES):
        return None
    if issubclass(kind, type):
        return _class_attributes
    if issubclass(kind, Mapping):
        return _values if issubclass(kind, dict) else _opener_of_mapping(kind)
    if issubclass(kind, list | tuple | deque):
        return _items
    if issubclass(kind, set | frozenset):
        return _members
    if issubclass(kind, _CODE):
        return parts_of_code
    return _position if kind.__name__.endswith("iterator") and kind.__module__ == "builtins" else _attributes


def _opener_of_mapping(kind: type) -> Callable[..., Parts] | None:
    """A file, such as numpy's, reads a value whenever it is asked for one; so may a class of the user."""
    if hasattr(kind, "close"):
        return None
    return _values if is_installed(package_of(kind.__module__)) else _attributes


def _values(value: Mapping[Any, Any]) -> Parts:
    """Nothing if a class of others lets nobody read it, as OmegaConf's do while values are missing."""
    try:
        items = list(value.items())
    except Exception:
        return
    for place, (key, part) in enumerate(items):
        yield f"[{key!r}]" if is_plain(key) else f"[{place}]", part


def _items(value: Collection[Any]) -> Parts:
    return ((f"[{place}]", part) for place, part in enumerate(value.copy() if isinstance(value, deque) else value))


def _members(value: Collection[Any]) -> Parts:
    """Nothing if they have no order that is the same in every run."""
    members = list(value)
    return sorted((f"{{{part!r}}}", part) for part in members) if all(map(is_plain, members)) else ()


def _position(value: Any) -> Parts:
    return [(".position", place) for place in value.__reduce__()[2:]]


def parts_of_code(value: Any) -> Parts:
    """What a function refers to, or a method or partial is made of."""
    if isinstance(value, functools.partial):
        return [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]
    if isinstance(value, types.MethodType):
        return [(".__self__", value.__self__), (".__func__", value.__func__)]
    if isinstance(value, types.BuiltinMethodType):
        return [(".__self__", value.__self__)]
    return referred(value) if package_of(value.__module__) not in LIBRARIES else ()


def _attributes(value: Any, skipped: Collection[str], code: bool) -> Parts:
    """An object's own attributes, those in slots included, and those of its classes if `code`."""
    try:
        found = dict(object.__getattribute__(value, "__dict__"))
    except AttributeError:
        found = {}  # it has slots only, or is of a builtin class
    for slot in _of(type(value)).slots:
        with suppress(AttributeError):  # nothing was assigned yet
            found[slot.__name__] = slot.__get__(value)
    for name, part in found.items():
        if name not in skipped and not name.startswith("__"):
            yield f".{name}", part
    if code:
        yield from _class_attributes(type(value))


def _class_attributes(kind: type) -> Parts:
    """Those of a class and of the classes that it is made of, as far as they are the user's."""
    for each in kind.__mro__:
        yield from of_class(each)


def of_class(kind: type) -> Iterator[tuple[str, Any]]:
    """The attributes of one class of the user, methods included."""
    if package_of(kind.__module__) not in LIBRARIES:
        yield from ((f".{name}", part) for name, part in list(vars(kind).items()) if not name.startswith("__dict"))


def is_plain(value: Any) -> bool:
    """Whether it is a number, a text, or a tuple of these: its ``repr`` is the same in every run."""
    return isinstance(value, _PLAIN) or (type(value) is tuple and all(map(is_plain, value)))


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):  # a nested function or comprehension
            yield from _global_names(inner)
