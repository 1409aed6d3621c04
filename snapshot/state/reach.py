"""Everything that a training loop can reach, by name, to see what a resume did not restore.

The walk covers the local variables of the functions on the stack and everything they refer to: modules, optimizers,
containers, and attributes of objects, tensors or not. It never uses an object's ``repr``, which may hold an address.
"""

from __future__ import annotations

import hashlib
import random
import sys
import sysconfig
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from types import FrameType
from typing import Any

import numpy as np
import torch

from holdfast.snapshot.copy.tensors import local
from holdfast.snapshot.state.packages import package_of

MOST = 200_000
"""Maximum number of values that are recorded."""

SHORT = 60
"""Plain values of up to this many characters are shown as they are, longer ones as a digest."""

COMPUTED_WITH = (torch.Tensor, np.ndarray, torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
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
        return held and not f"{module}.".startswith(INSIDE) and _is_installed(package)


@cache
def _is_installed(package: str) -> bool:
    """Whether a package is installed or part of Python, as opposed to the user's own code."""
    if package in sys.stdlib_module_names:
        return True
    place = getattr(sys.modules.get(package), "__file__", None) or ""
    return any(place.startswith(sysconfig.get_path(name)) for name in ("purelib", "platlib"))


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
        seen: dict[int, Any] = {}
        todo = [(path, value, False)]
        while todo and len(self.found) < MOST:
            path, value, held = todo.pop()
            text = self._text(value)
            if text is not None:
                if not held or isinstance(value, COMPUTED_WITH):
                    self.found.setdefault(path, text)
            elif id(value) not in seen:
                seen[id(value)] = value
                held = self._theirs.are_values_of(value, held)
                todo += [(f"{path}{name}", part, held) for name, part in _parts(value)]

    def _text(self, value: Any) -> str | None:
        if not isinstance(value, torch.Tensor):
            return plain(value)
        if id(value) not in self._texts:
            self._texts[id(value)] = value, plain(value) or ""
        return self._texts[id(value)][1]


def plain(value: Any) -> str | None:
    """A text that identifies a value, or None if its parts must be looked at one by one."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_meta:
            return f"{value.layout} {tuple(value.shape)}"
        part = local(value)
        octets = part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return f"{part.dtype}{tuple(part.shape)} {_digest(octets.tobytes())}"
    if isinstance(value, np.ndarray) and value.dtype != object:
        return f"{value.dtype}{value.shape} {_digest(value.tobytes())}"
    if isinstance(value, torch.Generator):
        return f"torch.Generator {_digest(value.get_state().numpy().tobytes())}"
    if isinstance(value, np.random.Generator):
        return f"numpy.random.Generator {_digest(repr(value.bit_generator.state).encode())}"
    if isinstance(value, np.random.RandomState):
        state = value.get_state(legacy=False)
        held = [state["state"]["key"].tobytes(), state["state"]["pos"], state["has_gauss"], state["gauss"]]
        return f"numpy.random.RandomState {_digest(repr(held).encode())}"
    if isinstance(value, random.Random):
        return f"random.Random {_digest(repr(value.getstate()).encode())}"
    if isinstance(value, int) and value.bit_length() > SHORT:
        return hex(value) if value.bit_length() <= 4 * SHORT else _digest(hex(value).encode())  # decimal is slow
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic | torch.dtype):
        text = repr(value)
        return text if len(text) <= SHORT else _digest(text.encode())
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a value, each with the suffix that names it, such as ``.x`` or ``[0]``."""
    if isinstance(value, Mapping):
        for place, (key, part) in enumerate(value.items()):
            named = isinstance(key, str | int | bool | float | tuple)
            yield f"[{key!r}]" if named else f"[{place}]", part
    elif isinstance(value, list | tuple):
        yield from ((f"[{place}]", part) for place, part in enumerate(value))
    elif isinstance(value, set | frozenset):
        yield from ((f"{{{text}}}", text) for text in sorted(filter(None, map(plain, value))))
    elif type(value).__name__.endswith("iterator") and type(value).__module__ == "builtins":
        yield ".position", repr(value.__reduce__()[2:])
    elif _is_looked_into(value):
        yield from ((f".{name}", part) for name, part in vars(value).items() if not name.startswith("__"))


def _is_looked_into(value: Any) -> bool:
    if isinstance(value, type) or not hasattr(value, "__dict__") or (callable(value) and not hasattr(value, "forward")):
        return False
    module = type(value).__module__
    package = package_of(module)
    if package in OURS:
        return f"{module}.".startswith(INSIDE)
    return package not in sys.stdlib_module_names and package not in {"numpy", "holdfast", "grpc"}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
