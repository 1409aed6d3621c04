"""State that a trainer's callbacks keep to themselves: averages and plain values are captured, other changes named.

Trainers ask callbacks for plain values only. An averaged model is in an attribute of its callback, and gets into the
trainer's checkpoints, if at all, by means of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from holdfast.hook import InMemorySnapshot
from holdfast.integrations.kept import SubclassState
from holdfast.smp_daemon.shared.logs import get_log, some
from holdfast.snapshot.copy.tensors import is_dense, local, memory_of
from holdfast.snapshot.state.digests import elements_of
from holdfast.snapshot.state.hidden import SAMPLED, Changing
from holdfast.snapshot.state.walk import is_users_own, walk

StateOf = Callable[[Any], Any]

log = get_log(__name__)


def keep_callbacks(
    snap: InMemorySnapshot, callbacks: Iterable[Any], base: type, state_of: StateOf = lambda callback: None
) -> Overlooked:
    """Track modules and dicts of tensors in attributes of callbacks, unless they are captured anyway, and numbers,
    texts, tensors and containers of these in callbacks of the user's own that say nothing of their state.

    Call it before the snapshot is entered. What is returned finds what else they change.

    Args:
        base: the framework's class of callbacks.
        state_of: returns the part of a callback's state that is captured anyway.
    """
    held = _memory_of(snap)
    named, own = _named(callbacks), dict[str, SubclassState]()
    for name, callback in named.items():
        asked = held | {memory_of(tensor) for _, tensor in _inside("", state_of(callback))}
        if is_users_own(callback) and not state_of(callback):
            own[name] = SubclassState(callback, base, but={attribute for attribute, _, _ in _kept(callback)})
            snap.track(f"{name}/attributes", get=own[name].get_whole, set=own[name].put)
        for _, place, kept in _kept(callback):
            tensors = kept.values() if isinstance(kept, dict) else (tensor for _, tensor in _tensors_of(kept))
            memory = {memory_of(tensor) for tensor in tensors}
            if memory and not memory & asked:
                held |= memory
                snap.track(f"{name}{place}", tensors=kept, changes="after step")
    return Overlooked(snap, named, own, state_of)


class Overlooked:
    """Finds tensors of callbacks that change although no snapshot holds them, and warns once.

    Args:
        own: the attributes that are captured of the callback of that name.
        state_of: returns the part of a callback's state that is captured anyway.
    """

    def __init__(
        self, snap: InMemorySnapshot, named: dict[str, Any], own: dict[str, SubclassState], state_of: StateOf
    ) -> None:
        self._snap = weakref.ref(snap)
        self._named = named
        self._own = own
        self._state_of = state_of
        self._changing = Changing(self._samples, patience=1)
        self._told = False

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
        found = ((name, tensor) for name, tensor in self._found() if is_dense(local(tensor)))
        return ((name, elements_of(tensor, SAMPLED)) for name, tensor in found)

    def _found(self) -> Iterator[tuple[str, torch.Tensor]]:
        snap = self._snap()
        if snap is None:
            return
        held = _memory_of(snap)
        for name, callback in self._named.items():
            asked = held | {memory_of(tensor) for _, tensor in _inside("", self._state_of(callback))}
            captured = self._own[name].names() if name in self._own else ()
            for place in vars(callback).keys() - captured:
                for each, tensor in _inside(f"{name}.{place}", vars(callback)[place]):
                    if memory_of(tensor) not in asked:
                        yield each, tensor


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
