"""State that subclasses of a trainer keep in attributes from one step to the next: captured, or refused by name.

Trainers ask nobody for it. TRL's trainers, for example, train for several steps on what they generated before.
"""

from __future__ import annotations

import dis
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
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
    """The attributes of one trainer that its subclass keeps, as far as their values are plain: numbers, texts, tensors,
    and containers of these.

    Args:
        trainer: before it trains.
        base: the framework's own class, whose attributes its integration captures.
    """

    def __init__(self, trainer: Any, base: type) -> None:
        self._trainer = trainer
        package = base.__module__.partition(".")[0]
        self._theirs = {
            name
            for kind in type(trainer).__mro__
            if kind.__module__.partition(".")[0] == package
            for name in _assigned(kind)
        }
        self._turn = 0
        self._before = {name: vars(trainer)[name] for name in self._names()}
        self._at_first = {name: _items(value) for name, value in self._before.items()}

    def get(self) -> dict[str, Any]:
        """Plain values, without tensors, for those that have changed since this was made."""
        found = {}
        for name in self._names():
            value = vars(self._trainer)[name]
            items = _items(value)
            if items is not None and not _same(items, self._at_first.get(name)):
                found[name] = packed(value)
        return found

    def put(self, held: dict[str, Any]) -> None:
        """Put the values back, into the containers that are there."""
        for name, value in held.items():
            setattr(self._trainer, name, unpacked(value, self._trainer.args.device, getattr(self._trainer, name, None)))

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
        for name in self._names():
            value = vars(self._trainer)[name]
            if name in tracked or value is self._before.get(name) or _items(value) is not None:
                continue
            if isinstance(value, Iterator) or next(tensors_in(value), None) is not None:
                raise ConfigError(
                    f"{type(self._trainer).__qualname__} keeps a {type(value).__qualname__} in its attribute {name!r} "
                    "from step to step, which would be lost in a restart. Keep lists or dicts of tensors there, of at "
                    f"most {LARGEST >> 20} MiB; or track it under that name: protect(trainer, track=lambda snap, "
                    f"trainer: snap.track({name!r}, get=..., set=...))"
                )

    def _names(self) -> list[str]:
        return [name for name in vars(self._trainer) if name not in self._theirs]


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
