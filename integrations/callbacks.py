"""State that a trainer's callbacks, and subclasses of it, keep to themselves: averages and plain values are captured,
other changes named.

Trainers ask nobody for it. TRL's trainers, for example, train for several steps on what they generated before; and a
callback may count steps, and steer by that. An averaged model is in an attribute of its callback, and gets into the
trainer's checkpoints, if at all, by means of its own.
"""

from __future__ import annotations

import dis
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from holdfast.hook import InMemorySnapshot
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.logs import get_log, some
from holdfast.snapshot.copy.tensors import is_dense, local, memory_of
from holdfast.snapshot.state.digests import elements_of
from holdfast.snapshot.state.hidden import SAMPLED, Changing
from holdfast.snapshot.state.values import packed, unpacked
from holdfast.snapshot.state.walk import is_users_own, tensors_in, walk

log = get_log(__name__)


class CallbackState:
    """Tracks modules and dicts of tensors in attributes of callbacks, unless they are captured anyway, and numbers,
    texts, tensors and containers of these in callbacks of the user's own that say nothing of their state. Finds other
    tensors that callbacks change, and warns once.

    Make it before the snapshot is entered.

    Args:
        base: the framework's class of callbacks.
        state_of: returns the part of a callback's state that is captured anyway.
    """

    def __init__(
        self,
        snap: InMemorySnapshot,
        callbacks: Iterable[Any],
        base: type,
        state_of: Callable[[Any], Any] = lambda callback: None,
    ) -> None:
        self._snap = weakref.ref(snap)
        self._named, self._state_of = _named(callbacks), state_of
        self._own: dict[str, SubclassState] = {}
        self._changing = Changing(self._samples, patience=1)
        self._told = False
        held = _memory_of(snap)
        for name, callback in self._named.items():
            asked, parts = held | self._asked(callback), list(_kept(callback))
            if is_users_own(callback) and not state_of(callback):
                own = self._own[name] = SubclassState(callback, base, but={attribute for attribute, _, _ in parts})
                snap.track(f"{name}/attributes", get=own.get_whole, set=own.put)
            for _, place, kept in parts:
                tensors = kept.values() if isinstance(kept, dict) else (tensor for _, tensor in _tensors_of(kept))
                memory = {memory_of(tensor) for tensor in tensors}
                if memory and not memory & asked:
                    held |= memory
                    snap.track(f"{name}{place}", tensors=kept, changes="after step")

    def look(self) -> None:
        """A step begins. See `Changing.look`."""
        if not self._told and (changed := sorted(self._changing.look())):
            self._told = True
            log.warning(
                "%s: changed by callbacks while they train, but held by no snapshot: after a restart they are what "
                "the callbacks create anew. If that matters, pass them to `track`, or let the callback hold them "
                "before training begins, as a module or a dict of tensors",
                some(changed, between=", "),
            )

    def _samples(self) -> Iterator[tuple[str, bytes]]:
        snap = self._snap()
        if snap is None:
            return
        held = _memory_of(snap)
        for name, callback in self._named.items():
            asked = held | self._asked(callback)
            captured = self._own[name].names() if name in self._own else ()
            for place in vars(callback).keys() - captured:
                for each, tensor in _inside(f"{name}.{place}", vars(callback)[place]):
                    if memory_of(tensor) not in asked and is_dense(local(tensor)):
                        yield each, elements_of(tensor, SAMPLED)

    def _asked(self, callback: Any) -> set[int]:
        return {memory_of(tensor) for _, tensor in _inside("", self._state_of(callback))}


def _named(callbacks: Iterable[Any]) -> dict[str, Any]:
    """The callbacks by class name, numbered where a class has several."""
    named: dict[str, Any] = {}
    for callback in callbacks:
        kind = type(callback).__qualname__.replace(".", "-")
        name, number = kind, 1
        while name in named:
            number += 1
            name = f"{kind}-{number}"
        named[name] = callback
    return named


def _kept(callback: Any) -> Iterator[tuple[str, str, torch.nn.Module | dict[str, torch.Tensor]]]:
    """What can be tracked as a whole, with its attribute and path: the callback, or modules and dicts of tensors."""
    if isinstance(callback, torch.nn.Module):
        yield "", "", callback
    for attribute, value in vars(callback).items():
        for place, part in enumerate(value) if isinstance(value, list | tuple) else [("", value)]:
            if isinstance(part, torch.nn.Module) or (
                isinstance(part, dict)
                and part
                and all(isinstance(key, str) and isinstance(tensor, torch.Tensor) for key, tensor in part.items())
            ):
                yield attribute, f"/{attribute}/{place}".removesuffix("/"), part


def _tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _inside(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for path, part, _ in walk([(name, value)], is_users_own):
        if isinstance(part, torch.Tensor):
            yield path, part
        elif isinstance(part, torch.nn.Module):
            yield from ((f"{path}.{inner}", tensor) for inner, tensor in _tensors_of(part))


def _memory_of(snap: InMemorySnapshot) -> set[int]:
    return {memory_of(item.tensor) for item in snap._adapter.tensors()}


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
        elif type(part) is np.ndarray and part.dtype.kind in "biufc" and part.nbytes <= LARGEST:
            found.append((type(part), part.tobytes()))
            size += part.nbytes
        elif type(part) in _LISTS and len(part) < MOST:
            found.append((type(part), len(part)))
            todo += part
        elif type(part) in _MAPPINGS and len(part) < MOST and all(type(key) in _PLAIN for key in part):
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
