"""What is in the variables of the script: of the functions that call the loop's, and of their modules.

What noise is drawn from is often a variable of the function that trains. Random generators that are there when the
first step begins, and are nobody else's, are captured, like those that modules keep. What else steps change there, such
as an average of the weights, is named, so that the user can say that it is state.
"""

from __future__ import annotations

import re
import sys
import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain, count, dropwhile, takewhile
from queue import Queue
from traceback import walk_stack
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

from holdfast.snapshot.copy.tensors import memory_of
from holdfast.snapshot.state import rng
from holdfast.snapshot.state.adapter import entered
from holdfast.snapshot.state.audit import OURS
from holdfast.snapshot.state.hidden import FIRST_LOOKS, Changing, is_tensor_or_array, rates_of_layer, sample_of
from holdfast.snapshot.state.libraries import READ_THROUGH, has_state, kept_by_library, stands_alone
from holdfast.snapshot.state.live import Tree
from holdfast.snapshot.state.named import NamedState, state_named_by
from holdfast.snapshot.state.optimizers import is_optimizer, nested
from holdfast.snapshot.state.walk import (
    LIBRARIES,
    LONGEST,
    is_code,
    is_installed,
    is_ours,
    is_plain,
    is_users_own,
    package_of,
    trains_beside_optimizers,
    walk,
)

MOST = 5000
"""Maximum number of objects that are looked into."""


def is_users_frame(frame: FrameType) -> bool:
    """Whether a function that is running belongs to the user's own code."""
    package = package_of(frame.f_globals.get("__name__", ""))
    return package not in OURS and package != "holdfast" and not is_installed(package)


def users_frames() -> Iterator[FrameType]:
    """The user's functions that are running, from the innermost outwards."""
    return (frame for frame, _ in walk_stack(sys._getframe(1)) if is_users_frame(frame))


def frames_called_by_a_library() -> Iterator[FrameType]:
    """The innermost of them, out to the one that code which is not the user's calls."""
    frames = (frame for frame, _ in walk_stack(sys._getframe(1)))
    return takewhile(is_users_frame, dropwhile(lambda each: not is_users_frame(each), frames))


def feeding() -> list[str]:
    """The names of other threads that put something into a queue: of the user's own code, or waiting for room in one.
    Neither torch's own, which belong to a loader, nor ours."""
    frames = sys._current_frames()
    threads = [each for each in threading.enumerate() if each is not threading.current_thread()]
    return [each.name for each in threads if each.ident in frames and _puts(frames[each.ident])]


def _puts(inner: FrameType) -> bool:
    frames = [frame for frame, _ in walk_stack(inner)]
    if any(each.f_globals.get("__name__", "").partition(".")[0] in ("holdfast", "torch") for each in frames):
        return False
    waits = any(each.f_code is Queue.put.__code__ for each in frames)
    return waits or any(is_users_frame(each) and "put" in each.f_code.co_names for each in frames)


def generators_in_variables(but: Collection[int]) -> dict[str, Any]:
    """The random generators in variables of the functions that are running, from the caller outwards, and of their
    modules, by name; and those that functions in these variables refer to, in closures and in their own modules.

    Args:
        but: ids of generators that are somebody else's.
    """
    return rng.owned(chain.from_iterable(_variables()), _may_draw, but, longest=LONGEST, objects=MOST, most=MOST)


def objects_in_variables() -> Iterator[Any]:
    """What the script's variables lead to, of its own classes."""
    found = walk(chain.from_iterable(_variables()), is_users_own, longest=LONGEST, objects=LONGEST, most=MOST)
    return (value for _, value, _ in found if is_users_own(value) and not is_code(value))


def name_of(value: Any, *, for_all: bool = False) -> str:
    """What the script calls an object, the same in every run: its longest path from a variable of the outermost
    function, or module, that leads to it. ``loaders[1]`` tells more than the variable of a loop. May be empty.

    Args:
        for_all: name an object in a list whose objects are all of one class, such as the phases of a schedule, for all
            of them, as ``phases[i]``: what is done to one of them now is done to another one later. And as the function
            that has the hook would, if that has a name for it: there it can be tracked.
    """
    frames = list(users_frames())
    having = [number for number, each in enumerate(frames, 1) if any(map(is_ours, list(each.f_locals.values())))]
    near = frames[: max(having)] if for_all and having else []
    for roots in chain(reversed(list(_variables(near))), reversed(list(_variables(frames)))):
        found = list(walk(roots, is_users_own, longest=LONGEST, objects=LONGEST, most=MOST))
        if paths := [path for path, each, _ in found if each is value]:
            path = max(paths, key=lambda path: (len(path), path))
            entry = re.match(r"(.*)\[\d+\]", path) if for_all else None
            listed = next((each for name, each, _ in found if entry and name == entry[1]), ())
            is_alike = isinstance(listed, list | tuple) and len(listed) > 1 and len(set(map(type, listed))) == 1
            return f"{entry[1]}[i]{path[entry.end() :]}" if entry and is_alike else path
    return ""


def _variables(frames: Iterable[FrameType] | None = None) -> Iterator[list[tuple[str, Any]]]:
    """The variables of these of the user's functions, or of all that are running, from here outwards, and of their
    modules."""
    modules: dict[int, Any] = {}
    for frame in users_frames() if frames is None else frames:
        if frame.f_locals is not frame.f_globals:
            where = frame.f_code.co_name.strip("<>")
            yield [(f"{where}.{name}", value) for name, value in list(frame.f_locals.items())]
        modules.setdefault(id(frame.f_globals), frame.f_globals)
    for known in modules.values():
        where = known.get("__name__", "").rpartition(".")[2].strip("_")
        yield [(f"{where}.{name}", value) for name, value in list(known.items()) if not name.startswith("__")]


class ChangingVariables:
    """Finds modules, tensors and arrays in variables that steps change in place, and lists of such that grow, if nobody
    captures them: averages of weights, queues, experience. What is assigned anew in each step, as a batch is, does not
    count, nor do numbers, except the rates of torch's layers and losses, and those of what trains beside optimizers, or
    has a ``load_state_dict`` of a library.
    Used by the training thread.
    """

    def __init__(self) -> None:
        self._changing = Changing(self._samples, patience=2)
        self._looks = 0
        self._numbers = WeakIdKeyDictionary()  # of modules, tensors and arrays
        self._next = count()
        self._kept: list[Any] = []  # what holds others that were looked at last, so that its ids are not reused
        self._told: set[str] = set()
        self._whole: dict[str, str] = {}  # the lines of objects that are given as a whole

    def leave_out(self, names: Iterable[str]) -> None:
        """These were reported."""
        self._told.update(names)

    def look(self) -> list[tuple[str, str]]:
        """Called in every step. Returns what to report: how the script calls it, and the line that it needs."""
        found = {
            name: which for name, which in self._changing.look() if self._told.isdisjoint(_reported_as(name, which))
        }
        self._told |= found.keys()
        return [(name, self._whole.get(name) or _line(name, which)) for name, which in found.items()]

    def _samples(self) -> Iterator[tuple[tuple[str, Any], bytes | torch.Tensor]]:
        """Places are names in the script, with what tells an object from another one that is called so later."""
        self._looks += 1
        if not all(each.captured for each in [*entered]):
            return  # a first step has not ended: there is no layout yet
        named = state_named_by(root for each in [*entered] for root in each.named())
        known, kept = self._known(named), self._kept
        self._kept = []

        def is_opened(value: Any) -> bool:
            return id(value) not in known and _may_change(value)

        found = list(walk(chain.from_iterable(_variables()), is_opened, longest=LONGEST, objects=LONGEST, most=MOST))
        owned = ((id(value), kept_by_library(path, value)) for path, value, _ in found if id(value) not in known)
        kept_by = {owner: inner for owner, inner in owned if inner}
        found += chain.from_iterable(kept_by.values())
        at = {path: value for path, value, _ in found}
        within_modules = set(map(memory_of, chain.from_iterable(_tensors_of(value) for _, value, _ in found)))
        seen = known | within_modules  # tensors of a module are not told of beside it
        items = {id(value) for _, value, holder in found if holder is not None and is_tensor_or_array(value)}
        for path, value, holder in found:
            # A tensor of a container is not told of by the variable of a loop over that.
            is_elsewhere = id(value) in items if holder is None else id(holder) in known
            if id(value) in known or is_elsewhere or named.has(holder, path):
                continue
            name = path.partition(".")[2]
            if line := _line_for_whole(name, value):
                self._whole[name] = line
            if isinstance(value, torch.nn.Module):
                parts = [sample_of(each.detach()) for each in _tensors_of(value) if memory_of(each) not in known]
                number = self._number_of(value)
                yield (name, number), b"".join(filter(None, parts))
                for inner, layer in value.named_modules():
                    rates = rates_of_layer(f"{name}.{inner}".rstrip("."), layer) if id(layer) not in known else ()
                    yield from (((rate, (rate, number)), repr(now).encode()) for rate, now in rates)
                continue
            is_beside = trains_beside_optimizers(holder)
            part = _sample(value, seen, has_numbers=is_beside or id(holder) in kept_by or _counts(holder))
            if part is not None and (which := self._which(value, holder)) is not None:
                is_alone = type(value) in (int, float) and is_beside
                told = path if is_alone else _owner_of(path, at)
                yield (told.partition(".")[2], (path, which)), part
        del kept

    def _which(self, value: Any, holder: Any) -> int | None:
        """Tells a value that changes from a new one in the same place: by what holds it, so that one that is assigned
        anew counts, too. To keep that for many steps would take memory, for it may be a batch. So at later looks only
        tensors and arrays count that change in place; None: it is no such."""
        if self._looks <= FIRST_LOOKS:
            self._kept.append(value if holder is None else holder)
            return id(self._kept[-1])
        return self._number_of(value) if is_tensor_or_array(value) else None

    def _number_of(self, value: Any) -> int:
        number: int = self._numbers.setdefault(value, next(self._next))  # type: ignore[no-untyped-call]
        return number

    def _known(self, named: NamedState) -> set[int]:
        """What is captured: `memory_of` tensors, and of what leads to them. A small number is everybody's."""
        adapters = [*entered]
        schedules = (schedule for each in adapters for schedule in each.schedules)
        roots = [("", each) for each in chain(named.objects, schedules)]
        found = walk(roots, lambda value: True, code=True, most=MOST)
        reached = [value for _, value, _ in found if not is_plain(value)]
        modules = [part for each in adapters for module in each.modules() for part in module.modules()]
        captured = (held for each in adapters for held in each.captured)
        return {*captured, *map(memory_of, chain(modules, reached, *map(_tensors_of, reached)))}


def _owner_of(path: str, at: Mapping[str, Any]) -> str:
    """What to name for what has changed in a path: the outermost object around it that stands alone, or is given as a
    whole; else the attribute, or the variable. `at`: what is found where."""
    told = re.split(r"[\[{]", path, maxsplit=1)[0]
    while "." in (owner := told.rpartition(".")[0]):
        if not (_line_for_whole(owner, at.get(owner)) or stands_alone(at.get(owner))):
            break
        told = owner
    return told


def _reported_as(name: str, which: Any) -> set[str]:
    """Under which names it may have been reported. `which`: see `_line`."""
    return {name} if isinstance(which, int) else {name, which[0].partition(".")[2]}


def _line_for_whole(name: str, value: Any) -> str:
    """The line by which an optimizer around another one, or an object with a state of its own, is given; else empty."""
    if _wraps_optimizer(value):
        return f"optim={name}, in place of what is inside it"
    return f'extra={{"{name.rpartition(".")[2]}": {name}}}' if has_state(value) else ""


def _wraps_optimizer(value: Any) -> bool:
    return is_optimizer(value) and next(nested("", value))[1] is not value


def _line(name: str, which: Any) -> str:
    """`which`: the number of a module; else the path of what has changed, and more."""
    if isinstance(which, int):
        return f'snap.track("{name.rpartition(".")[2]}", tensors={name})'
    if which[0].partition(".")[2].startswith(f"{name}."):
        return line_for_object(name)
    return line_for_attribute(name) if "." in name else f'snap.track("{name}", get=lambda: {name}, set=...)'


def line_for_object(path: str, module: str = "pickle") -> str:
    """The line that names all attributes of an object as state. `module`: what pickles them."""
    how = f"get=lambda: {module}.dumps(vars({path})), set=lambda held: vars({path}).update({module}.loads(held))"
    return f'snap.track("{path.rpartition(".")[2]}", {how})'


def line_for_attribute(path: str) -> str:
    """The line that names an attribute of an object as state, or, in ``phases[i].n``, that of each object in a list."""
    owner, _, name = path.rpartition(".")
    full = path.removeprefix("self.").replace("[i]", "").replace(".", "/")  # several objects may have such an attribute
    listed, _, rest = path.partition("[i]")
    if rest:
        each = f"each{rest.rpartition('.')[0]}"
        put = f'[setattr({each}, "{name}", value) for each, value in zip({listed}, values)]'
        return f'snap.track("{full}", get=lambda: [each{rest} for each in {listed}], set=lambda values: {put})'
    return f'snap.track("{full}", get=lambda: {path}, set=lambda value: setattr({owner}, "{name}", value))'


def _sample(value: Any, known: Collection[int], has_numbers: bool) -> bytes | torch.Tensor | None:
    if has_numbers and (type(value) in (int, float) or isinstance(value, np.generic)):
        return repr(value).encode()
    if is_tensor_or_array(value) and memory_of(value) not in known:
        return value if isinstance(value, torch.Tensor) else sample_of(value) or None
    if type(value) in (list, deque) and value:  # may be experience, of which old entries do not change
        newest = value[-1] if isinstance(value[-1], tuple) else (value[-1],)
        if any(is_tensor_or_array(each) and each.ndim for each in newest):
            return str(len(value)).encode()
    return None


def _tensors_of(value: Any) -> Iterable[torch.Tensor]:
    if not isinstance(value, torch.nn.Module):
        return ()
    # Megatron's DistributedDataParallel keeps a list in `buffers`.
    return chain(torch.nn.Module.parameters(value), torch.nn.Module.buffers(value))


def _may_draw(value: Any) -> bool:
    """What data is read through has a place of its own, which the script may find by reading again."""
    return is_users_own(value) and not isinstance(value, READ_THROUGH)


def _may_change(value: Any) -> bool:
    """Steps may change the tensors of what data is read through, such as a sampler's weights, and reading does not. An
    object of a library that has a ``load_state_dict``, as an average of the weights has, says that it keeps state. An
    optimizer may wrap the one that was given, and keep more, as Lookahead does."""
    if isinstance(value, READ_THROUGH):
        return True
    if package_of(type(value).__module__) not in LIBRARIES and (has_state(value) or _wraps_optimizer(value)):
        return True
    return is_users_own(value) and not is_code(value)


def _counts(value: Any) -> bool:
    """Whether the numbers that an object holds are state, as a warm-up's are: a library says so, and its source is not
    read."""
    return has_state(value) and not (is_users_own(value) or isinstance(value, READ_THROUGH))


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
