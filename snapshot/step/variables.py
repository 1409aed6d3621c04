"""Random generators in the variables of the script: of the functions that call the loop's, and of their modules.

What noise is drawn from is often a variable of the function that trains. Those that are there when the first step
begins, and are nobody else's, are captured, like those that modules keep.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from itertools import chain
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler

from holdfast.snapshot.state import rng
from holdfast.snapshot.state.live import Tree
from holdfast.snapshot.state.reach import OURS
from holdfast.snapshot.state.walk import is_installed, is_users_own, package_of, walk

LONGEST = 256
"""Containers with more entries are taken for data and are not searched."""

MOST = 5000
"""Maximum number of objects that are looked into."""


def is_users_frame(frame: FrameType) -> bool:
    """Whether a function that is running belongs to the user's own code."""
    package = package_of(frame.f_globals.get("__name__", ""))
    return package not in OURS and package != "holdfast" and not is_installed(package)


def generators_in_variables(but: Collection[int]) -> dict[str, Any]:
    """The random generators in variables of the functions that are running, from the caller outwards, and of their
    modules, by name.

    Args:
        but: ids of generators that are somebody else's.
    """
    return rng.owned(chain.from_iterable(_variables()), _is_opened, but, longest=LONGEST, most=MOST)


def name_of(value: Any) -> str:
    """What the script calls an object, the same in every run: its longest path from a variable of the outermost
    function, or module, that leads to it. ``loaders[1]`` tells more than the variable of a loop. May be empty."""
    for roots in reversed(list(_variables())):
        found = walk(roots, lambda each: is_users_own(each) and not callable(each), longest=LONGEST, most=MOST)
        if paths := [path for path, each, _ in found if each is value]:
            return max(paths, key=lambda path: (len(path), path))
    return ""


def _variables() -> Iterator[list[tuple[str, Any]]]:
    """The variables of each of the user's functions that are running, from here outwards, and of their modules."""
    frame: FrameType | None = sys._getframe(1)
    modules: dict[int, Any] = {}
    while frame is not None:
        if is_users_frame(frame):
            if frame.f_locals is not frame.f_globals:
                where = frame.f_code.co_name.strip("<>")
                yield [(f"{where}.{name}", value) for name, value in list(frame.f_locals.items())]
            modules.setdefault(id(frame.f_globals), frame.f_globals)
        frame = frame.f_back
    for known in modules.values():
        where = known.get("__name__", "").rpartition(".")[2].strip("_")
        yield [(f"{where}.{name}", value) for name, value in list(known.items()) if not name.startswith("__")]


def _is_opened(value: Any) -> bool:
    """What data is read through has a place of its own, which the script may find by reading again."""
    return is_users_own(value) and not callable(value) and not isinstance(value, DataLoader | Dataset | Sampler)


class Variables:
    """The generators in one script's variables, of which only those count that were drawn from since the loop began: a
    script may have made others for other purposes, at every start anew.

    Args:
        held: `tree` of the earlier run; empty if there was none.
    """

    def __init__(self, held: Tree) -> None:
        self._held: Tree | None = held or None
        self._drawn = set(held)
        self._found: dict[str, Any] = {}
        self._first: Tree = {}
        self._begun: Tree | None = None  # their states as the first step of a plain loop began
        self._now: Tree = held

    def look(self, but: Collection[int]) -> None:
        """Find them: as the hook is entered, and once more as the first step begins. `but`: as for
        `generators_in_variables`."""
        self._found = generators_in_variables(but)
        self._first = self.states()
        if self._held is None:
            self.note()

    def note(self) -> None:
        """Note their states now: they belong to the boundary."""
        states = self.states()
        self._drawn |= {name for name, state in states.items() if not rng.alike(state, self._first[name])}
        self._now = {name: states[name] for name in sorted(self._drawn & states.keys())}

    def turn_begins(self) -> None:
        """A step of a plain loop begins. What was drawn from before the first step, and not in it or since, as to
        shuffle data once, does not count: the script draws from it again after a restart, and finds the same."""
        if self._begun is None:
            self._begun = self.states()
        elif self._begun:
            begun, self._begun = self._begun, {}
            for name, state in self.states().items():
                if rng.alike(state, begun[name]) and not rng.alike(state, self._first[name]):
                    del self._found[name]
                    self._drawn.discard(name)
                    self._now.pop(name, None)

    def states(self) -> Tree:
        """Their states now."""
        return rng.states(self._found)

    def put_back(self) -> list[str]:
        """Set those that the earlier run drew from to the states that it left. Returns the names of those that are
        gone."""
        if self._held is None:
            return []
        held, self._held = self._held, None
        self._drawn = held.keys() & self._found.keys()
        rng.put_back(self._found, {name: held[name] for name in self._drawn}, "the script")
        self.note()
        return sorted(held.keys() - self._found.keys())

    def tree(self) -> Tree:
        """The states of those that were drawn from, by name, when they were last noted."""
        return self._now
