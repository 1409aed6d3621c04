"""Functions and methods of frameworks that are replaced while a snapshot is entered. For the training thread."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Call = Callable[..., Any]


class Replacements:
    """What one integration has replaced, until `undo`."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Call], Call]) -> bool:
        """Replace a function of a module, or a method of this one object, by what `make` makes of it. Returns whether
        there is one."""
        original = getattr(owner, name, None)
        if original is None:
            return False
        while isinstance(original, _StandIn):  # left by a run that this process has given up
            original = original.original
        stand_in, is_own = _StandIn(original, make(original)), name in vars(owner)
        setattr(owner, name, stand_in)

        def undo() -> None:
            if vars(owner).get(name) is stand_in:
                setattr(owner, name, original) if is_own else delattr(owner, name)

        self._undo.append(undo)
        return True

    def undo(self) -> None:
        """Put everything back, unless somebody else has replaced it since. Idempotent."""
        while self._undo:
            self._undo.pop()()


class _StandIn:
    """Called in place of `original`."""

    def __init__(self, original: Call, call: Call) -> None:
        functools.update_wrapper(self, original)
        self.original = original
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


def before(do: Callable[[], object]) -> Callable[[Call], Call]:
    """For `Replacements.replace`: what calls `do`, and then the original."""

    def make(original: Call) -> Call:
        def first(*args: Any, **kwargs: Any) -> Any:
            do()
            return original(*args, **kwargs)

        return first

    return make


def guarded(leave: Callable[[BaseException | None], None]) -> Callable[[Call], Call]:
    """For `Replacements.replace`: what calls the original, and then `leave` with its error; None: it has ended well."""

    def make(original: Call) -> Call:
        @functools.wraps(original)
        def guarding(*args: Any, **kwargs: Any) -> Any:
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                leave(error)
                raise
            leave(None)
            return result

        return guarding

    return make
