"""Notes which functions of the user's own run from one step to the next, whoever calls them: hooks, callbacks that are
found by name, the backward of a `torch.autograd.Function`."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler

from holdfast.smp_daemon.shared.logs import get_log
from holdfast.snapshot.script.variables import is_users_frame, objects_in_variables
from holdfast.snapshot.state.walk import is_captured_as_such, package_of

MOST_LOOKS = 8
"""A function is looked at this many times, for the objects whose method it is: some run very often."""

MOST_EVENTS = 5_000_000
"""So many calls and returns are heard of, which takes a second or two: a compiler that is at work between two steps, or
an evaluation, is slowed down no longer."""

OF_THE_LOOP = "holdfast.snapshot.loop"
"""What is called in this module is no part of the user's step. At a job's first steps it calls more functions than
these do: to plan for a thousand parameters takes a million events."""

LAMBDA = "<lambda>"
"""The name of the code of each function without a name."""

log = get_log(__name__)


@dataclass(frozen=True, slots=True)
class Call:
    """A function that ran.

    Attributes:
        code: of the function. caller: of the user's function that called it, maybe through others. variables: those of
            its module. known: its own that are sure to be there for long. given: its arguments that variables led to as
            `Calls` began; None: gone.
        itself: what it calls the object whose method it is; empty if it is none. owner: that object; None: it is gone.
        gives: whether what it returns goes into a step: torch takes it, or it is a model's.
    """

    code: CodeType
    caller: CodeType
    variables: dict[str, Any]
    known: dict[str, Any]
    given: Mapping[str, Callable[[], Any]]
    itself: str
    owner: Callable[[], Any]
    gives: bool

    def values(self) -> dict[str, Any]:
        """What is known and given, of what is still there."""
        given = {name: value for name, each in self.given.items() if (value := each()) is not None}
        return {**self.known, **given}


class Calls:
    """Notes them in this thread, until `stop`. While a profiler is at work there, it notes nothing. Nothing that would
    otherwise be freed is kept alive."""

    def __init__(self) -> None:
        self._looks: Counter[CodeType] = Counter()
        self._found: dict[tuple[CodeType, int, CodeType], Call] = {}
        self._is_over = False
        self._aside: FrameType | None = None  # the outermost function of the loop's that is running
        self._left = MOST_EVENTS
        if sys.getprofile() is None:
            there = [each for each in objects_in_variables() if type(each).__weakrefoffset__]
            self._there = {id(each): weakref.ref(each) for each in there}  # what later turns make is not among them
            sys.setprofile(self._note)

    def stop(self) -> list[Call]:
        """Returns what was noted. Another thread than that which began ends it when it calls something."""
        self._is_over = True
        if not self._left:
            log.info("a step calls too many functions to follow them all: what some of them keep may not be named")
        return list(self._found.values())

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if self._is_over or not self._left:
            sys.setprofile(None)
            return
        if self._aside is not None:
            if frame is self._aside and event == "return":
                self._aside = None
            return
        self._left -= 1
        if event == "call" and frame.f_globals.get("__name__") == OF_THE_LOOP:
            self._aside = frame
        elif event == "return" and self._looks[frame.f_code] < MOST_LOOKS:
            self._looks[frame.f_code] += 1
            try:
                self._look(frame)
            except Exception:  # it would end the function that is looked at
                log.exception("which functions run in a step could not be followed")
                self._is_over = True

    def _look(self, frame: FrameType) -> None:
        code = frame.f_code
        is_part = code.co_name.startswith("<") and code.co_name != LAMBDA
        if is_part or not is_users_frame(frame) or _is_read_by_us(frame):
            self._looks[code] = MOST_LOOKS
            return
        local = frame.f_locals
        first = code.co_varnames[0] if code.co_argcount else ""
        itself = first if first in ("self", "cls") else ""
        owner = local.get(itself)
        if isinstance(owner, DataLoader | Dataset | Sampler):
            return  # their attributes belong to the place in the data
        kept = {name: each for name, each in local.items() if name in code.co_freevars or is_captured_as_such(each)}
        outer = frame.f_back or frame
        gives = package_of(outer.f_globals.get("__name__", "")) == "torch" or is_captured_as_such(owner)
        caller = next(filter(is_users_frame, _callers(frame)), outer)
        found = {name: self._there.get(id(local.get(name))) for name in code.co_varnames[: code.co_argcount]}
        given = {name: there for name, there in found.items() if there and there() is local[name]}
        called = Call(code, caller.f_code, frame.f_globals, kept, given, itself, _reference(owner), gives)
        self._found[code, id(owner), caller.f_code] = called


def _callers(frame: FrameType) -> Iterator[FrameType]:
    while (outer := frame.f_back) is not None:
        yield (frame := outer)


def _is_read_by_us(frame: FrameType) -> bool:
    """Whether holdfast calls a function, as it reads data, with no other function of the user in between."""
    for each in _callers(frame):
        if is_users_frame(each):
            return False
        if package_of(each.f_globals.get("__name__", "")) == "holdfast.snapshot":
            return True
    return False


def _reference(owner: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(owner)
    except TypeError:  # it has slots only, or there is none
        return lambda: owner
