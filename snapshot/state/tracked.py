"""State outside of models and optimizers: how users declare it, and how it is read and restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.slotfile import Leaf
from holdfast.snapshot.copy.tensors import block_of, empty_like_leaf, local
from holdfast.snapshot.state.live import Change, Container, LiveTensor, refill
from holdfast.snapshot.state.optimizers import check_names
from holdfast.snapshot.state.values import SMALL, packed, unpacked

CHANGES = {"any": Change.ANY, "after step": Change.STEP, "step": Change.STEP, "never": Change.STEP}
WHEN = ("forward", "step")
PREFIX = "tracked."
"""Of the leaves of all tracked tensors."""


@dataclass(frozen=True, slots=True)
class Tracked:
    """One tracked piece of a job's state.

    Attributes:
        get, set: return its plain values, and load them; tensors among the values are copied at every boundary.
        tensors: a module, or a dict of tensors by name, captured and restored in place.
        change: when `tensors` may change.
        late: call `get` when the next step begins; otherwise together with the random generators, see `Adapter.early`.
    """

    name: str
    get: Callable[[], Any] | None
    set: Callable[[Any], Any] | None
    tensors: torch.nn.Module | dict[str, torch.Tensor] | None
    change: Change
    late: bool

    def live(self) -> Iterator[LiveTensor]:
        """The current `tensors`. Raises `ConfigError` if one of them is not a tensor."""
        for key, tensor in self._found():
            if not isinstance(tensor, torch.Tensor):
                kind = type(tensor).__qualname__
                raise ConfigError(f"tracked {self.name!r}: {key!r} is a {kind}, no tensor: give it to get and set")
            yield LiveTensor(f"{PREFIX}{self.name}.{key}", local(tensor), self.change, block=block_of(tensor))

    def watched(self) -> Iterator[Container]:
        """The containers that hold `tensors`."""
        if isinstance(self.tensors, torch.nn.Module):
            yield from containers(self.tensors)
        elif self.tensors is not None:
            yield self.tensors

    def materialise(self, leaves: Mapping[str, Leaf], device: torch.device, undo: ExitStack) -> None:
        """Create the tensors of `leaves` that the dict does not hold yet because the job only makes them later."""
        if not isinstance(self.tensors, dict):
            return
        undo.callback(refill, self.tensors, dict(self.tensors))
        prefix = f"{PREFIX}{self.name}."
        for leaf in leaves.values():
            if leaf.name.startswith(prefix):
                self.tensors.setdefault(leaf.name.removeprefix(prefix), empty_like_leaf(leaf, device))

    def _found(self) -> Iterator[tuple[str, Any]]:
        if isinstance(self.tensors, torch.nn.Module):
            yield from self.tensors.named_parameters()
            yield from self.tensors.named_buffers()
        elif self.tensors is not None:
            yield from self.tensors.items()


def make(
    name: str,
    get: Callable[[], Any] | None,
    set: Callable[[Any], Any] | None,
    tensors: torch.nn.Module | dict[str, torch.Tensor] | None,
    changes: str,
    when: str,
) -> Tracked:
    """A `Tracked` from a user's arguments. Raises `ConfigError` if they do not fit."""
    if not name or "." in name:
        raise ConfigError(f"track({name!r}): a name is not empty and has no dot")
    if (get is None) is not (set is None):
        raise ConfigError(f"track({name!r}): get and set belong together; {'set' if set is None else 'get'} is missing")
    if get is None and tensors is None:
        raise ConfigError(f"track({name!r}): give get and set, or tensors")
    if not isinstance(tensors, torch.nn.Module | dict | None):
        raise ConfigError(f"track({name!r}): tensors is a {type(tensors).__qualname__}: give a module, or a dict")
    if changes not in CHANGES:
        raise ConfigError(f"track({name!r}): changes={changes!r}: choose one of {', '.join(map(repr, CHANGES))}")
    if when not in WHEN:
        raise ConfigError(f"track({name!r}): when={when!r}: choose 'forward' or 'step'")
    return Tracked(name, get, set, tensors, CHANGES[changes], when == "forward")


SMALL_BYTES = 4096
"""Tensors on the host of up to this size among plain values are part of the record, whose room doubles when it is full.
As leaves of the slot, those of a list that grows in every step would each time need a new layout."""


def values(tracked: Mapping[str, Tracked], *, late: bool) -> dict[str, Any]:
    """The plain values of the pieces with this `late`, by name."""
    return {
        name: packed(part.get(), SMALL_BYTES)
        for name, part in tracked.items()
        if part.get is not None and part.late is late
    }


def check(tracked: Mapping[str, Tracked], held: Mapping[str, Any]) -> None:
    """Raises `StateMismatch` unless the snapshot and the job have plain values of the same pieces."""
    check_names("tracked", held, (name for name, part in tracked.items() if part.get is not None))


def load(tracked: Mapping[str, Tracked], held: Mapping[str, Any]) -> None:
    """Hand every piece its plain values."""
    for name, value in held.items():
        put = tracked[name].set
        if put is not None:
            put(unpacked(value, mark=SMALL))


def containers(module: torch.nn.Module) -> Iterator[Container]:
    """The dicts that hold a module's parameters, buffers and submodules. Those of a compiled module are no dicts, and
    hold the same for ever."""
    for each in module.modules():
        yield from (held for held in (each._parameters, each._buffers, each._modules) if isinstance(held, dict))
