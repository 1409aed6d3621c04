"""Everything that a training loop can reach, by name, to see what a resume did not restore.

The walk covers the local variables of the functions on the stack and everything they refer to: modules, optimizers,
containers, and attributes of objects, tensors or not. It never uses an object's ``repr``, which may hold an address.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from types import FrameType
from typing import Any

import numpy as np
import torch

from holdfast.snapshot.state.digests import digest_of, form_of
from holdfast.snapshot.state.walk import GENERATORS, LIBRARIES, home_of, is_generator, is_installed, package_of, walk

MOST = 200_000
"""Maximum number of values that are recorded."""

SHORT = 60
"""Plain values of up to this many characters are shown as they are, longer ones as a digest."""

DEEPEST = 1000
"""How many levels are opened."""

GENERATOR = "generator"
"""What the text of a random generator begins with."""

COMPUTED_WITH = (torch.Tensor, np.ndarray, *GENERATORS)
"""Types of values that the loop computes with; all other leaves are plain values."""

OURS = frozenset(
    {
        *("holdfast.snapshot", "holdfast.integrations", "holdfast.smp_daemon", "holdfast.ec"),
        *("torch", "importlib", "runpy", "threading"),
    }
)
"""Packages whose functions and objects are not searched for values of the user."""

INSIDE = (
    "torch.nn.",
    "torch.optim.",
    "torch.distributed.optim.",
    "torch.distributed.algorithms.",
    "torch.utils.data.",
    "torch.amp.",
)
"""Modules whose objects are searched all the same."""


class Theirs:
    """Tells which values a framework restores itself; these are not looked at.

    A framework whose integration is in use, such as a `Trainer`, resumes from its own counters. So the walk skips the
    variables of its functions and the plain values in its objects, and in other installed packages' objects that these
    hold: positions in loops, progress bars. It keeps everything that is computed with: tensors, arrays and generators
    anywhere, modules and optimizers, and all objects of the user's own classes.
    """

    def __init__(self, packages: Collection[str] = ()) -> None:
        self.packages = frozenset(packages)

    def are_values_of(self, value: Any, held: bool) -> bool:
        """Whether a framework restores the plain values in `value`. `held`: whether the object that holds `value` is
        such an object itself."""
        if isinstance(value, Mapping | list | tuple | set | frozenset):
            return held
        module = type(value).__module__
        package = package_of(module)
        if package in self.packages:
            return True
        return held and not f"{module}.".startswith(INSIDE) and is_installed(package)


def reachable(frame: FrameType | None = None, theirs: Theirs | None = None) -> dict[str, str]:
    """Everything that the functions on the stack can reach, from `frame` (default: the caller) outwards.

    Gives a text for each value by its name; texts are equal only if the values are. Blocks for about one read of all
    tensors.
    """
    theirs = theirs or Theirs()
    looking = _Looking(theirs)
    frame = frame or sys._getframe(1)
    while frame is not None:
        package = package_of(str(frame.f_globals.get("__name__", "")))
        if package not in OURS and package not in theirs.packages:
            where = frame.f_code.co_name.strip("<>")
            for name, value in list(frame.f_locals.items()):
                if not name.startswith("__"):
                    looking.into(f"{where}.{name}", value)
        frame = frame.f_back
    return looking.found


class _Looking:
    """One walk. It visits an object once per variable that leads to it: a variable that only one of two runs has must
    not change the names of anything else."""

    def __init__(self, theirs: Theirs) -> None:
        self.found: dict[str, str] = {}
        self._theirs = theirs
        self._texts: dict[int, tuple[torch.Tensor, str]] = {}  # keeps tensors alive, so that no id is reused

    def into(self, path: str, value: Any) -> None:
        theirs: dict[int, bool] = {}  # whether a framework restores the plain values in what was opened
        for place, part, holder in walk([(path, value)], _is_opened, deepest=DEEPEST, most=MOST):
            if len(self.found) >= MOST:
                return
            held = theirs.get(id(holder), False)
            text = self._text(part)
            if text is None:
                theirs.setdefault(id(part), self._theirs.are_values_of(part, held))
            elif not held or isinstance(part, COMPUTED_WITH):
                self.found.setdefault(place, text)

    def _text(self, value: Any) -> str | None:
        if not isinstance(value, torch.Tensor):
            return plain(value)
        if id(value) not in self._texts:
            self._texts[id(value)] = value, plain(value) or ""
        return self._texts[id(value)][1]


def plain(value: Any) -> str | None:
    """A text that identifies a value, or None if its parts must be looked at one by one."""
    if isinstance(value, torch.Tensor) or (isinstance(value, np.ndarray) and not value.dtype.hasobject):
        return f"{form_of(value)} {_digest(value)}"
    if is_generator(value):
        return f"{GENERATOR} {_digest(value)}"
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic | torch.dtype):
        is_long = isinstance(value, int) and value.bit_length() > SHORT  # decimal is slow
        text = _digest(value) if is_long else repr(value)
        return text if len(text) <= SHORT else _digest(value)
    return None


def _is_opened(value: Any) -> bool:
    if callable(value) and not hasattr(value, "forward"):
        return False
    package = home_of(value)
    if package in OURS:
        return f"{type(value).__module__}.".startswith(INSIDE)
    return package not in LIBRARIES - {"torch"} and package != "grpc"


def _digest(value: Any) -> str:
    return digest_of(value)[:16]
