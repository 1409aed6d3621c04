"""What ``load_state_dict`` of a source of batches means, found out by trying it on copies before the first step.

Nothing says whether it sets where the next iterator begins, or where every later one begins; whether it moves an
iterator that exists; or whether it brings back everything. With the wrong guess a restarted loop would read other
batches, perhaps not before its next pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils import data as torch_data

from holdfast.snapshot.state import rng
from holdfast.snapshot.state.digests import digest_of_batch
from holdfast.snapshot.state.live import Stateful, Tree

END = "end"
"""What is read after the last batch."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """How a source gets back to its place.

    Attributes:
        told: ``load_state_dict`` leads to the place, and later passes begin as they would have without it.
        anew: each pass begins at the beginning, so that the place is also found by reading the pass again.
        why: what speaks against ``load_state_dict``; empty if `told`.
    """

    told: bool
    anew: bool
    why: str = ""


AGAIN = Meaning(told=False, anew=True)
"""For a source without ``load_state_dict``."""


def examine(source: Any, heartbeat: Callable[[], None]) -> Meaning:
    """Read up to five batches of two copies of `source`, one of which is told the place of the other.

    Leaves `source` and all random generators as they are. Errors while batches are read are raised.
    """
    with rng.undrawn(rng.find(source)):  # a copy may share the data set, and with it its generators
        return _examine(source, heartbeat)


def copy_of(source: Any) -> Any:
    """A copy that can be read without moving `source`. It shares a loader's data set, unless that has a place, too.
    Whatever `source` raises when it is copied is raised."""
    shared: dict[int, Any] = {}
    if isinstance(source, torch_data.DataLoader):
        shared[id(source._iterator)] = None  # an earlier pass's; torchdata's cannot be copied
        if not isinstance(source.dataset, torch_data.IterableDataset | Stateful):
            shared[id(source.dataset)] = source.dataset
    return copy.deepcopy(source, shared)


def _examine(source: Any, heartbeat: Callable[[], None]) -> Meaning:
    try:
        plain, told = _Trial(source, heartbeat), _Trial(source, heartbeat)
    except Exception as error:  # whatever classes of the user raise
        is_loader = isinstance(source, torch_data.DataLoader)  # which makes a new iterator for each pass
        return Meaning(told=False, anew=is_loader, why=f"it cannot be copied: {error!r}")
    first = plain.begin()
    at_first = plain.generators()
    try:
        place = copy.deepcopy(plain.source.state_dict())
    except Exception as error:  # as above
        place, failed = None, f"its state_dict fails: {error!r}"
    else:
        failed = ""
    second = plain.read()
    later = plain.begin()
    after = digest_of_batch(plain.state()) if later == second else ""  # batches that are equal do not tell places apart
    anew = later == first
    if failed:
        return Meaning(told=False, anew=anew, why=failed)
    try:
        told.source.load_state_dict(copy.deepcopy(place))
        leads = told.begin(at_first) == second
        lasts = told.begin() != later or (bool(after) and digest_of_batch(told.state()) != after)
    except Exception as error:  # as above
        return Meaning(told=False, anew=anew, why=f"its load_state_dict fails: {error!r}")
    if not leads:
        return Meaning(told=False, anew=anew, why="its load_state_dict does not lead to the next batch")
    if lasts:
        return Meaning(told=False, anew=anew, why="its load_state_dict also moves the beginnings of later passes")
    return Meaning(told=True, anew=anew)


class _Trial:
    """A copy of a source, and the iterators over it; the last one is read."""

    def __init__(self, source: Any, heartbeat: Callable[[], None]) -> None:
        self.source = copy_of(source)
        self._heartbeat = heartbeat
        self._at_start = self.generators()
        self._iterators: list[Any] = []  # all of them: to end one may move the source

    def generators(self) -> Tree:
        """The states of the global generators, and of the source's own."""
        return rng.capture_with(rng.find(self.source))

    def begin(self, generators: Tree | None = None) -> str:
        """The first batch of a new iterator, which is made with the generators as they were at first. `generators`: as
        they are to be after that."""
        self._put(self._at_start)
        self._iterators.append(iter(self.source))
        if generators is not None:
            self._put(generators)
        return self.read()

    def read(self) -> str:
        """The next batch."""
        self._heartbeat()
        try:
            return digest_of_batch(next(self._iterators[-1]))
        except StopIteration:
            return END

    def state(self) -> Any:
        return self.source.state_dict()

    def _put(self, generators: Tree) -> None:
        rng.restore_with(rng.find(self.source), generators, "data")
