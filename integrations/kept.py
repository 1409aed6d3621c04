"""State that subclasses of a trainer, and callbacks, keep in attributes from one step to the next.

Trainers ask nobody for it. TRL's trainers, for example, train for several steps on what they generated before; and a
callback may count steps, and steer by that.
"""

from __future__ import annotations

import dis
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.snapshot.state.values import packed, unpacked
from holdfast.snapshot.state.walk import tensors_in

MOST = 10_000
"""Attributes with more items than that, in all their containers, are not captured."""

LARGEST = 64 << 20
"""Most bytes of the tensors in one attribute that is captured."""

_PLAIN = (type(None), bool, int, float, str, bytes)
_LISTS = (list, tuple, set, deque)
_MAPPINGS = (dict, defaultdict, OrderedDict)


class SubclassState:
    """The attributes of one object that its subclass keeps, as far as their values are plain: numbers, texts, tensors,
    and containers of these.

    Args:
        owner: before training begins.
        base: the framework's own class. The attributes that classes of its package assign to are left to them.
        device: where tensors go that were not on the host.
        but: names of further attributes that are left alone.
    """

    def __init__(self, owner: Any, base: type, device: torch.device | None = None, but: Collection[str] = ()) -> None:
        self._owner = owner
        self._device = device
        package = base.__module__.partition(".")[0]
        self._theirs = {
            name
            for kind in type(owner).__mro__
            if kind.__module__.partition(".")[0] == package
            for name in _assigned(kind)
        } | set(but)
        self._turn = 0
        self._before = {name: vars(owner)[name] for name in self._names()}
        self._at_first = {name: _items(value) for name, value in self._before.items()}

    def get(self) -> dict[str, Any]:
        """Plain values, without tensors, for those that have changed since this was made."""
        found = {}
        for name in self._names():
            value = vars(self._owner)[name]
            items = _items(value)
            if items is not None and not _same(items, self._at_first.get(name)):
                found[name] = packed(value)
        return found

    def get_whole(self) -> dict[str, Any]:
        """As `get`, but nothing once a value that is not plain was set, such as a file: the others may tell of it."""
        return self.get() if self._is_whole() else {}

    def names(self) -> set[str]:
        """Of the attributes that `get_whole` captures once they change."""
        return {name for name in self._names() if _items(vars(self._owner)[name])} if self._is_whole() else set()

    def put(self, held: dict[str, Any]) -> None:
        """Put the values back, into the containers that are there."""
        for name, value in held.items():
            setattr(self._owner, name, unpacked(value, self._device, getattr(self._owner, name, None)))

    def check(self, tracked: set[str]) -> None:
        """A step begins. Looks only at calls 1, 2, 4, 8 and so on.

        Args:
            tracked: names that the user tracks.

        Raises:
            ConfigError: an attribute was set since training began to something that holds batches and is not captured.
        """
        self._turn += 1
        if self._turn & (self._turn - 1):
            return
        for name in self._names_of_others():
            value = vars(self._owner)[name]
            if name in tracked:
                continue
            if isinstance(value, Iterator) or next(tensors_in(value), None) is not None:
                raise ConfigError(
                    f"{type(self._owner).__qualname__} keeps a {type(value).__qualname__} in its attribute {name!r} "
                    "from step to step, which would be lost in a restart. Keep lists or dicts of tensors there, of at "
                    f"most {LARGEST >> 20} MiB; or track it under that name: protect(trainer, track=lambda snap, "
                    f"trainer: snap.track({name!r}, get=..., set=...))"
                )

    def _names(self) -> list[str]:
        return [name for name in vars(self._owner) if name not in self._theirs]

    def _is_whole(self) -> bool:
        return next(self._names_of_others(), None) is None

    def _names_of_others(self) -> Iterator[str]:
        """Of attributes that were set since, to something that is not plain."""
        held = vars(self._owner)
        return (n for n in self._names() if held[n] is not self._before.get(n) and _items(held[n]) is None)


def _assigned(kind: type) -> Iterator[str]:
    """Names of attributes that methods of a class assign to."""
    todo: list[Any] = [part for part in vars(kind).values() if isinstance(part, types.FunctionType)]
    codes = [part.__code__ for part in todo]
    while codes:
        code = codes.pop()
        codes += [part for part in code.co_consts if isinstance(part, types.CodeType)]
        yield from (each.argval for each in dis.get_instructions(code) if each.opname == "STORE_ATTR")


def _items(value: Any) -> list[tuple[Any, Any]] | None:
    """All that `value` consists of, each with something that differs once it has changed; None if it is not plain."""
    found: list[tuple[Any, Any]] = []
    todo, size = [value], 0
    while todo and len(found) < MOST and size <= LARGEST:
        part = todo.pop()
        if type(part) in _PLAIN:
            found.append((type(part), part))
        elif type(part) is torch.Tensor and part.layout is torch.strided:
            found.append((part, part._version))
            size += part.nbytes
        elif type(part) is np.ndarray and part.dtype.kind in "biufc":
            found.append((type(part), part.tobytes()))
            size += part.nbytes
        elif type(part) in _LISTS:
            found.append((type(part), len(part)))
            todo += part
        elif type(part) in _MAPPINGS and all(type(key) in _PLAIN for key in part):
            found.append((type(part), tuple(part)))
            todo += part.values()
        else:
            return None
    return found if not todo and size <= LARGEST else None


def _same(items: list[tuple[Any, Any]], others: list[tuple[Any, Any]] | None) -> bool:
    return (
        others is not None
        and len(items) == len(others)
        and all(one[0] is other[0] and one[1] == other[1] for one, other in zip(items, others, strict=True))
    )
