"""Objects among plain values: how one of the user's or a library's own class is kept, and made again.

Nothing is imported and no constructor is called for what a record names: a class is found among the modules that are
loaded, an instance of it is made empty, and gets its attributes back, also those in slots, and its items if it is a
dict. A class may say otherwise, see `keep`.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from types import MemberDescriptorType
from typing import Any, NamedTuple

import torch

from holdfast.smp_daemon.shared.errors import ConfigError

_HEAP_TYPE = 1 << 9
"""Flag of classes that a class statement has made."""


_DEFAULTS = ("__new__", "__reduce_ex__", "__reduce__", "__getstate__")
"""What a class does not define if its objects are no more than their attributes."""


class Keeping(NamedTuple):
    """How instances of a class are kept: ``get(instance)`` returns plain values, ``set(instance, values)`` loads them.
    Without them nothing is kept, and the job makes such an object anew."""

    get: Callable[[Any], Any] | None
    set: Callable[[Any, Any], Any] | None


_ways: dict[type, Keeping] = {}


def keep(kind: type, way: Keeping) -> None:
    """Say how instances of a class, or of subclasses, are kept. Raises `ConfigError` if that was said already."""
    if kind in _ways:
        raise ConfigError(f"{kind.__qualname__} is registered already")
    _ways[kind] = way


def way_of(value: Any) -> Keeping | None:
    """How an object is kept; None: it is no object of a class that can be found again, or more than its attributes."""
    kind = type(value)
    for each in kind.__mro__:
        if each in _ways:
            return _ways[each]
    base = _base_of(kind)
    own = all(getattr(kind, name) is getattr(base, name) for name in _DEFAULTS)
    silent = not hasattr(kind, "__setstate__")
    if not (kind.__flags__ & _HEAP_TYPE and own and silent) or isinstance(value, torch.nn.Module | Enum):
        return None
    if class_of(name_of(kind)) is not kind or (base is object and not (hasattr(value, "__dict__") or _slots(kind))):
        return None
    return ATTRIBUTES if base is object else ITEMS


def name_of(kind: type) -> str:
    """The name under which `class_of` finds a class."""
    return f"{kind.__module__}:{kind.__qualname__}"


def class_of(name: str) -> type | None:
    """The class of that name, if its module is loaded and has it."""
    module, _, path = name.partition(":")
    held: Any = vars(sys.modules[module]) if module in sys.modules else {}
    found: Any = None
    for part in path.split("."):
        found = held.get(part)
        held = vars(found) if isinstance(found, type) else {}
    return found if isinstance(found, type) else None


def made(kind: type) -> Any:
    """An instance of a class without attributes; no code of the class runs."""
    return _base_of(kind).__new__(kind)


def take_over(live: Any, value: Any) -> bool:
    """Give an object the attributes of another one of its class, if it is kept by these. Returns whether it is."""
    if type(live) is not type(value) or way_of(value) is not ATTRIBUTES:
        return False
    _put(live, _attributes(value))
    return True


def _base_of(kind: type) -> Any:
    return next(base for base in (OrderedDict, dict, object) if issubclass(kind, base))


def _slots(kind: type) -> dict[str, MemberDescriptorType]:
    parts = [part for each in kind.__mro__ for part in vars(each).values()]
    return {part.__name__: part for part in parts if isinstance(part, MemberDescriptorType)}


def _attributes(value: Any) -> dict[str, Any]:
    found = dict(getattr(value, "__dict__", {}))
    for name, slot in _slots(type(value)).items():
        with suppress(AttributeError):  # nothing was assigned yet
            found[name] = slot.__get__(value)
    return found


def _put(value: Any, attributes: dict[str, Any]) -> None:
    slots = _slots(type(value))
    for name in slots.keys() & attributes.keys():
        slots[name].__set__(value, attributes[name])
    if rest := {name: part for name, part in attributes.items() if name not in slots}:
        vars(value).update(rest)


def _items(value: Any) -> dict[str, Any]:
    return {"items": list(dict.items(value)), "attributes": _attributes(value)}


def _put_items(value: Any, held: dict[str, Any]) -> None:
    for key, part in held["items"]:
        _base_of(type(value)).__setitem__(value, key, part)
    _put(value, held["attributes"])


ATTRIBUTES = Keeping(_attributes, _put)
ITEMS = Keeping(_items, _put_items)
