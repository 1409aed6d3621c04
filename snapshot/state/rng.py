"""Random generators: the global ones of Python, NumPy and torch, and those that a data source, a module or an optimizer
keeps to itself.

This module alone finds, reads and sets them. Generators of a data source, or of a module, are found through its
attributes and the functions there: a loader's ``generator=``, a sampler's generator, a data set's ``self.rng``.
"""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from holdfast.smp_daemon.shared.errors import StateMismatch
from holdfast.snapshot.copy.cuda_runtime import uses_cuda
from holdfast.snapshot.state.walk import CLOSED, LONGEST, MOST, home_of, is_captured_as_such, is_generator, walk

BLOCK = 624
"""A Mersenne twister makes so many numbers at a time."""

HELD = slice(24, 24 + 8 * BLOCK)
"""Where a state of torch's generator has them."""

MOST_BLOCKS = 2000
"""Between two states no more are counted."""

_WORKERS = frozenset({"_iterator"})
"""Attributes of a loader that are not searched: workers and queues."""


# ---------------------------------------------------------------------- one generator


def state_of(generator: Any) -> Any:
    """The state of any generator, as plain values.

    Python's 625 numbers are packed: one by one they would take a third of the time at a boundary.
    """
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


def put(generator: Any, state: Any) -> None:
    """Set a generator to a state from `state_of`. Raises whatever it raises if that is no state of its own."""
    match generator:
        case torch.Generator():
            generator.set_state(_tensor(state))
        case np.random.Generator():
            generator.bit_generator.state = state
        case np.random.RandomState():
            generator.set_state(state)
        case np.random.BitGenerator():
            generator.state = state
        case _:
            version, numbers, gauss = state
            generator.setstate((version, tuple(array("I", numbers)), gauss))


def alike(one: Any, other: Any) -> bool:
    """Whether two states, or two dicts or lists of states, are the same."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)


# ---------------------------------------------------------------------- the global ones


def capture() -> dict[str, Any]:
    """The state of every global generator of this process: a few kilobytes."""
    state = {name: state_of(generator) for name, generator in _on_host().items()}
    if uses_cuda():
        states = [each.numpy().tobytes() for each in torch.cuda.get_rng_state_all()]
        state["cuda"] = own_first(states, torch.cuda.current_device())
    return state


def restore(state: dict[str, Any]) -> None:
    """Set every global generator to its state from `capture`."""
    for name, generator in _on_host().items():
        put(generator, state[name])
    if "cuda" in state:
        now = torch.cuda.current_device()
        for device, each in placed(state["cuda"], now, torch.cuda.device_count()).items():
            torch.cuda.set_rng_state(_tensor(each), device)


def on_host(state: Mapping[str, Any]) -> list[Any]:
    """What `capture` gave, without the generators of devices: these may not be there yet."""
    return [state[name] for name in _on_host()]


def own_first(states: Sequence[Any], current: int) -> list[Any]:
    """The states of all devices' generators, with that of this process's device first. So the states are equal on ranks
    that have drawn the same numbers, whichever device each uses. Pure."""
    return [states[current], *states[:current], *states[current + 1 :]]


def placed(states: Sequence[Any], current: int, count: int) -> dict[int, Any]:
    """Which of `own_first`'s states goes to which of `count` devices; `current` is this process's device.

    A rank may use another device than before, and see more or fewer devices. The generator of its old device continues
    on its new one; the others follow in order, as far as there are devices. Pure.
    """
    devices = [current, *(device for device in range(count) if device != current)]
    return dict(zip(devices, states, strict=False))


def _on_host() -> dict[str, Any]:
    return {"python": random._inst, "numpy": np.random.mtrand._rand, "torch": torch.default_generator}


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def numbers_between(before: bytes, after: bytes) -> int | None:
    """How many numbers the CPU's generator of torch has drawn between two of its states, from `capture`; None:
    more than a million or so, or it was seeded in between."""
    # The place is 0 only right after seeding: the next draw makes the next block, as at the end of one.
    place, place_after = (int.from_bytes(each[16:24], sys.byteorder) or BLOCK for each in (before, after))
    generator, numbers = torch.Generator(), torch.empty(BLOCK, dtype=torch.int32, device="cpu")
    put(generator, before)
    for block in range(MOST_BLOCKS):
        if state_of(generator)[HELD] == after[HELD]:
            return block * BLOCK + place_after - place
        numbers.random_(generator=generator)
    return None


# ---------------------------------------------------------------------- those that somebody keeps


def find(root: Any) -> dict[str, Any]:
    """The generators that can be reached from a data source, by path, without the global ones."""
    found = owned([("", root)], _may_lead_to_some, skipped=_WORKERS, longest=LONGEST, objects=MOST)
    return {path.removeprefix(".") or "itself": generator for path, generator in found.items()}


def owned(
    roots: Iterable[tuple[str, Any]], into: Callable[[Any], bool], but: Collection[int] = (), **limits: Any
) -> dict[str, Any]:
    """The generators in named `roots`, each once, by path, without the global ones. Those beyond the limits of `walk`
    are not found.

    Args:
        into: which objects and functions are opened, see `walk`.
        but: ids of generators to leave out.
    """
    seen = {*map(id, _on_host().values()), *but}
    found = {}
    for path, value, _ in walk(roots, into, code=True, **limits):
        if is_generator(value) and id(value) not in seen:
            seen.add(id(value))
            found[path] = value
    return found


def states(generators: Mapping[str, Any]) -> dict[str, Any]:
    """The states of named generators."""
    return {path: state_of(generator) for path, generator in generators.items()}


def put_back(generators: Mapping[str, Any], states: Mapping[str, Any], owner: str) -> None:
    """Set named generators to `states`.

    Raises:
        StateMismatch: a generator is missing or of another kind; the message names it and `owner`.
    """
    check(generators, states, owner)
    for path, state in states.items():
        try:
            put(generators[path], state)
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise StateMismatch(
                f"{owner}: {path} is another kind of generator than in the snapshot: {error}"
            ) from error


def capture_with(own: Mapping[str, Any]) -> dict[str, Any]:
    """The states of the global generators, and of a data source's `own`."""
    return {"global": capture(), "own": states(own)}


def restore_with(own: Mapping[str, Any], state: Mapping[str, Any], owner: str) -> None:
    """Set both to what `capture_with` gave. Raises as `put_back`."""
    restore(state["global"])
    put_back(own, state["own"], owner)


@contextmanager
def undrawn(own: Mapping[str, Any] = MappingProxyType({})) -> Iterator[None]:
    """What is drawn in this block leaves the global generators, and a data source's `own`, as they were."""
    before = capture_with(own)
    try:
        yield
    finally:
        restore_with(own, before, "data")


def check(generators: Mapping[str, Any], states: Mapping[str, Any], owner: str) -> None:
    """Raises `StateMismatch` if a generator of `states` is missing; the message names it and `owner`."""
    if missing := sorted(states.keys() - generators.keys()):
        raise StateMismatch(
            f"{owner}: the snapshot has the generator {missing[0]}, which is not there now: make it before the loop"
        )


def _may_lead_to_some(value: Any) -> bool:
    """Models and optimizers are captured as such, and our own objects, such as hooks, lead everywhere. Loaders and
    samplers are torch's."""
    return not is_captured_as_such(value) and home_of(value) not in CLOSED
