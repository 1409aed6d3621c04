"""Functions and methods of frameworks that are replaced while a snapshot is entered. For the training thread."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Call = Callable[..., Any]
_REPLACED = "_holdfast_replaced"


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
        original = getattr(original, _REPLACED, original)  # a run that this process has given up has left its own
        call, is_own = make(original), name in vars(owner)

        @functools.wraps(original)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

        setattr(stand_in, _REPLACED, original)
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
