"""What a script carries from turn to turn in its variables, and feeds its steps with: found in its source.

A counter, a temperature, a hidden state or a best loss is an ordinary variable. A restart begins it anew, and nothing
in the state tells. But the source does: the variable is assigned within the loop, and the value that an earlier turn
left there reaches a model, an optimizer, a backward, or a decision about one of these. What is only logged does not.

`Flow` follows values by the structure of the source: a value is known by the names of the variables that an earlier
turn left it in. It follows no value into another function, and takes a loop to run at least once. So it may miss
something, and variables are named in a warning only. A new job is refused where a step depends on a number that
certainly begins anew; see `snapshot.first_turns.FirstTurns.check_script`.
"""

from __future__ import annotations

import ast
import asyncio
import dis
import inspect
import linecache
import multiprocessing.queues
import queue
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from tokenize import TokenError
from types import CellType, CodeType, FrameType, FunctionType, GeneratorType, MethodType
from typing import Any

import numpy as np
import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from holdfast.smp_daemon.shared.logs import get_log
from holdfast.snapshot.copy.tensors import memory_of
from holdfast.snapshot.state.adapter import Adapter
from holdfast.snapshot.state.walk import is_code, is_plain, is_users_own, package_of, walk
from holdfast.snapshot.step.variables import frames_called_by_a_library, is_users_frame, users_frames

log = get_log(__name__)

DEEPEST = 2
"""How many calls a helper is followed into."""

PLAIN = (type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set, deque)
"""Types of values that may be state. Those of other objects are looked at where they change."""

FED = (
    queue.Queue,
    queue.SimpleQueue,
    asyncio.Queue,
    multiprocessing.queues.Queue,
    multiprocessing.queues.SimpleQueue,
    Future,
)
"""Types of what other threads, tasks and processes leave something in for a step."""

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module

Origins = frozenset[str]
NONE: Origins = frozenset()

KNOWN_TO_US: Origins = frozenset({"<holdfast>"})
"""Origin of a value that the hook gave, such as ``snap.step``: a restart finds it again."""

NUMBER = "<number of a batch>"
"""Origin of what the built-in ``enumerate`` counts."""

MISSING = object()
"""What `RunningValues.of` returns for a name that has no value now."""

ASIDE = re.compile(
    "log|print|save|write|report|plot|show|eval|valid|test|sample|generat|display|record|dump|metric|check|image|visual"
)
"""A function with such a name looks at the training from the side."""

ACTS = frozenset({"step", "backward", "load_state_dict", "add_param_group", "requires_grad_"})
"""Methods with which a script trains. Which of them are called, may depend on a value, too."""

IN_PLACE = frozenset({"copy_", "add_", "mul_", "sub_", "lerp_", "fill_", "zero_", "clamp_"})
"""Methods that change a tensor."""

MUTATES = frozenset({"append", "appendleft", "extend", "add", "update", "insert", "pop", "popleft", "remove"})
"""Methods that change a container."""

UPDATES = frozenset({"update", "update_parameters", "load_state_dict"})
"""Methods that change a module."""

TRAINS_BY = frozenset({"backward", "grad", "clip_grad_norm_", "clip_grad_value_"})
"""Functions whose arguments decide what a step does."""


@dataclass(slots=True)
class Carries:
    """What a function carries.

    Attributes:
        carried: the variables from which an earlier turn's value reaches a step, with the first line that assigns each.
        iterators: as `carried`, iterators that steps read on from, as ``name[i]`` those in containers; `Flow` has them
            in `carried`.
        updated: modules that a turn updates, and that are not captured, with the line.
        counts: lines of loops over numbers that begin anew.
        numbered: whether the number of a batch, as counted by ``enumerate``, reaches a step.
        passes: whether a loop begins at the pass that the hook tells, as ``range(snap.epoch, n)`` does.
        skips: whether the function passes over turns by what the hook tells, and so brings everything to its place.
    """

    carried: dict[str, int] = field(default_factory=dict)
    iterators: dict[str, int] = field(default_factory=dict)
    updated: dict[str, int] = field(default_factory=dict)
    counts: set[int] = field(default_factory=set)
    numbered: bool = False
    passes: bool = False
    skips: bool = False


def path_of(node: ast.AST) -> str:
    """``self.state['n']``: the text of a variable, an attribute of one, or an entry under a constant; else empty."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = path_of(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        inner = path_of(node.value)
        return f"{inner}[{node.slice.value!r}]" if inner else ""
    return ""


def root_of(path: str) -> str:
    """The variable that a path begins at."""
    return re.split(r"[.\[]", path, maxsplit=1)[0]


def owners_of(path: str) -> list[str]:
    """The paths that a path goes through, from its variable inwards."""
    return [path[: each.start()] for each in re.finditer(r"[.\[]", path)]


def loops_at(function: ast.AST, line: int) -> list[ast.For | ast.While]:
    """The loops of a function that `line` is in, from the outermost inwards."""
    found = [each for each in parts_of(function) if isinstance(each, ast.For | ast.While)]
    return [each for each in found if each.lineno <= line <= (each.end_lineno or 0)]


def parts_of(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function but not of functions within it."""
    for each in ast.iter_child_nodes(function):
        if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield each
            yield from parts_of(each)


def assigned_in(nodes: Iterable[ast.AST]) -> dict[str, int]:
    """The paths that are assigned, or whose value is changed, with the first line of each."""
    found: dict[str, int] = {}
    for top in nodes:
        parts = [top, *parts_of(top)]
        bound = _bound_in(parts)
        held = dict(chain.from_iterable(map(_taken_by, parts)))
        for each in parts:
            if each in bound:
                continue
            if isinstance(each, ast.Name | ast.Attribute | ast.Subscript) and isinstance(each.ctx, ast.Store):
                paths = [_innermost_path(each)]
            elif isinstance(each, ast.Call) and (changed := _changed_by(each)) is not None:
                paths = [_innermost_path(changed)]
                while (holder := held.get(paths[-1], "")) not in ("", *paths):
                    paths.append(holder)
            else:
                continue
            for path in filter(None, paths):
                found.setdefault(path, getattr(each, "lineno", 0))
    return found


def _taken_by(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The variables that a statement gives a part of something, with the path of that: to change one changes it."""
    if isinstance(node, ast.For | ast.AsyncFor):
        yield from _elements(node.target, node.iter)
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _elements(target, node.value)


def _elements(target: ast.expr, whole: ast.expr) -> Iterator[tuple[str, str]]:
    match target, whole:
        case ast.Tuple(elts=parts), ast.Call(func=ast.Name(id="zip"), args=wholes):
            for part, each in zip(parts, wholes, strict=False):
                yield from _elements(part, each)
        case ast.Tuple(elts=[_, part]), ast.Call(func=ast.Name(id="enumerate"), args=[each, *_]):
            yield from _elements(part, each)
        case ast.Tuple(elts=[_, part]), ast.Call(func=ast.Attribute(value=each, attr="items")):
            yield from _elements(part, each)
        case _, ast.Call(func=ast.Attribute(value=each, attr="values")):
            yield from _elements(target, each)
        case ast.Name(), ast.Name() | ast.Attribute() | ast.Subscript():
            yield target.id, _innermost_path(whole)


def called_in(nodes: Iterable[ast.AST]) -> list[str]:
    """The paths that are called."""
    calls = [each for top in nodes for each in (top, *parts_of(top)) if isinstance(each, ast.Call)]
    return list(dict.fromkeys(path for each in calls if (path := path_of(each.func))))


def sources_in(nodes: Iterable[ast.AST]) -> set[str]:
    """The paths that are given to a call of ``data``."""
    calls = [each for top in nodes for each in (top, *parts_of(top)) if isinstance(each, ast.Call)]
    return {path for each in calls if _name_of(each) == "data" for given in each.args if (path := path_of(given))}


def _bound_in(nodes: Iterable[ast.AST]) -> set[ast.AST]:
    """The variables of comprehensions, which are nobody else's."""
    return {part for each in nodes if isinstance(each, ast.comprehension) for part in ast.walk(each.target)}


class Flow:
    """Follows the values of one function.

    Args:
        function: its source.
        turns: its loops that a turn of the training is in, from the outermost inwards. Without any, the function is
            called in each turn, and only what outlives the call is carried.
        reads: whether the innermost of them goes through the batches.
        values: the values of its variables as it runs.
        named: what is captured, or is no state.
        helpers: the functions that it calls, by the paths that it calls them by.
        gives: whether what the function yields or returns is a batch.
        given: arguments, and other paths, to which its caller has given values; they count as carried.
    """

    def __init__(
        self,
        function: Function,
        turns: list[ast.For | ast.While],
        reads: bool,
        values: RunningValues,
        named: Named,
        helpers: Mapping[str, Helper],
        gives: bool = False,
        given: Iterable[str] = (),
    ) -> None:
        self.found = Carries()
        self._values = values
        self._value_of = values.of
        self._named = named
        self._turns = turns
        self._reads = reads
        self._helpers = helpers
        self._gives = gives
        self._used: dict[str, set[str]] = {}  # see `_used_by`
        self._lines = dict.fromkeys(given, 0) | self._assigned_in(turns or [function])
        self._candidates: dict[ast.AST, list[str]] = {}  # by loop, what an earlier turn of it leaves
        self._state: dict[str, Origins] = {}
        self._loops: list[ast.AST] = []
        self._decided: Origins = NONE  # what decides whether this statement runs
        self._shared = _globals_of(function)
        outside = (lambda path: False) if turns else outlives(function)
        for _ in range(1 if turns else 2):  # what a call leaves reaches the next one
            self._state = {path: origins for path, origins in self._state.items() if outside(path)}
            self._carry([*filter(outside, self._lines), *given])
            self._block(function.body)

    def _assigned_in(self, nodes: Iterable[ast.AST]) -> dict[str, int]:
        """As `assigned_in`, with what the functions assign that are called there."""
        nodes = list(nodes)
        found = assigned_in(nodes)
        for path in called_in(nodes):
            found = (self._helpers[path].writes if path in self._helpers else {}) | found
        return found

    def _carry(self, paths: Iterable[str]) -> None:
        for path in paths:
            if not self._named.has(self._values, path, self._value_of(path)):
                self._state[path] = self._state.get(path, NONE) | {path}

    # ------------------------------------------------------------------ statements

    def _block(self, body: Iterable[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                pass
            case ast.Assign():
                origins = self._expression(node.value)
                for target in node.targets:
                    self._assign(target, origins, node.value)
            case ast.AnnAssign(value=ast.expr() as value):
                self._assign(node.target, self._expression(value), value)
            case ast.AugAssign():
                self._assign(node.target, self._expression(node.value) | self._origins(node.target))
            case ast.For() | ast.AsyncFor() | ast.While():
                self._loop(node)
            case ast.If():
                self._choose(node)
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    origins = self._expression(item.context_expr)
                    if item.optional_vars is not None:
                        self._assign(item.optional_vars, origins)
                self._block(node.body)
            case ast.Try():
                self._block(node.body)
                self._either([*([handler.body for handler in node.handlers]), []])
                self._block([*node.orelse, *node.finalbody])
            case ast.Match():
                with_subject = self._expression(node.subject)
                self._either([case.body for case in node.cases], with_subject)
            case ast.Break() | ast.Continue():
                self._jump(isinstance(node, ast.Continue))
            case _:
                for each in ast.iter_child_nodes(node):
                    if isinstance(each, ast.expr):
                        self._expression(each)
                if isinstance(node, ast.Return) and self._turns and self._loops:
                    self._reaches(self._decided)

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While) -> None:
        is_turn = node in self._turns
        if is_turn and node not in self._candidates:
            known = {path for path, origins in self._state.items() if origins & KNOWN_TO_US}
            self._candidates[node] = [path for path in self._assigned_in([node]) if path not in known]
        self._loops.append(node)
        for _ in range(2):  # what a turn leaves reaches the next one
            if is_turn:
                self._carry(self._candidates[node])
            if isinstance(node, ast.While):
                tested = self._expression(node.test)
                if is_turn:
                    self._reaches(tested)
            else:
                self._each_of(node, is_turn)
            self._block(node.body)
        self._loops.pop()
        self._block(node.orelse)

    def _each_of(self, node: ast.For | ast.AsyncFor, is_turn: bool) -> None:
        origins = self._expression(node.iter)
        calls = [each for each in ast.walk(node.iter) if isinstance(each, ast.Call)]
        if is_turn and not origins & KNOWN_TO_US and {"range", "trange"} & set(map(_name_of, calls)):
            self.found.counts.add(node.lineno)
        if is_turn and any(isinstance(each, ast.Attribute) and each.attr == "epoch" for each in ast.walk(node.iter)):
            self.found.passes |= bool(origins & KNOWN_TO_US)
        self._assign(node.target, origins)
        counted = next(filter(self._is_enumerate, calls), None)
        is_target = counted is not None and self._reads and node is self._turns[-1]
        if counted is not None and is_target and isinstance(node.target, ast.Tuple):
            begins = [*counted.args[1:], *(each.value for each in counted.keywords)]
            goes_on = any(_name_of(each) == "enumerate" and isinstance(each.func, ast.Attribute) for each in calls)
            if not goes_on and not any(self._expression(each) & KNOWN_TO_US for each in begins):
                self._assign(node.target.elts[0], frozenset({NUMBER}))

    def _is_enumerate(self, call: ast.Call) -> bool:
        """Whether it calls the built-in function, by whatever name."""
        path = path_of(call.func)
        called = self._value_of(path)
        return called is enumerate or (called is MISSING and path == "enumerate")

    def _choose(self, node: ast.If) -> None:
        tested = self._expression(node.test)
        if tested & KNOWN_TO_US and any(isinstance(each, ast.Continue) for each in node.body):
            self.found.skips = True
        self._either([node.body, node.orelse], tested)

    def _either(self, bodies: Iterable[list[ast.stmt]], tested: Origins = NONE) -> None:
        """One of these blocks runs, as what was `tested` decides."""
        before, decided = self._state, self._decided
        after: dict[str, Origins] = {}
        self._decided = decided | tested
        for body in bodies:
            self._state = dict(before)
            self._block(body)
            for path, origins in self._state.items():
                after[path] = after.get(path, NONE) | origins
        self._state, self._decided = after, decided

    def _jump(self, is_continue: bool) -> None:
        if self._loops and self._loops[-1] in self._turns and not (is_continue and self._decided & KNOWN_TO_US):
            self._reaches(self._decided)

    def _assign(self, target: ast.expr, origins: Origins, value: ast.expr | None = None) -> None:
        if isinstance(target, ast.Starred):
            target = target.value
        if isinstance(target, ast.Tuple | ast.List):
            parts: list[ast.expr | None] = [None] * len(target.elts)
            if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(parts):
                parts = list(value.elts)
            for each, part in zip(target.elts, parts, strict=True):
                self._assign(each, origins if part is None else self._expression(part), part)
            return
        origins |= self._decided
        path = path_of(target)
        if isinstance(target, ast.Name):
            for inner in [each for each in self._state if each != path and root_of(each) == path]:
                del self._state[inner]
        elif isinstance(target, ast.Attribute | ast.Subscript):
            changed = self._value_of(path_of(target.value))
            if self._trains(changed) or (changed is MISSING and path.endswith(("['lr']", ".grad"))):
                self._reaches(origins)
            if not path:
                origins |= self._expression(target.slice) if isinstance(target, ast.Subscript) else NONE
                path = _innermost_path(target)
                origins |= self._state.get(path, NONE)
        if path:
            self._state[path] = origins

    @property
    def _is_in_turn(self) -> bool:
        return not self._turns or any(each in self._turns for each in self._loops)

    # ------------------------------------------------------------------ expressions

    def _expression(self, node: ast.expr) -> Origins:
        """Where its value comes from. Looks at the calls in it."""
        origins: Origins = NONE
        for each in ast.walk(node):
            if isinstance(each, ast.Call):
                self._call(each)
            elif isinstance(each, ast.NamedExpr):
                self._assign(each.target, self._origins(each.value))
            elif isinstance(each, ast.Yield | ast.YieldFrom) and each.value is not None and self._gives:
                self._reaches(self._origins(each.value) | self._decided)
        origins |= self._origins(node)
        return origins

    def _origins(self, node: ast.AST) -> Origins:
        found: set[str] = set()
        bound = {path_of(each) for each in _bound_in(ast.walk(node))}
        for each in ast.walk(node):
            path = path_of(each)
            if path and root_of(path) not in bound:
                found |= self._state.get(path, NONE)
                value = self._value_of(path)
                if _is_ours(value):
                    found |= KNOWN_TO_US
                elif isinstance(value, FED):
                    self._lines.setdefault(path, getattr(each, "lineno", 0))
                    found.add(path)
                elif isinstance(value, FunctionType | MethodType):
                    found |= self._read_by(path, value)
        return frozenset(found)

    def _read_by(self, path: str, function: FunctionType | MethodType) -> Origins:
        """What a function of the user reads beside its arguments."""
        if not is_users_own(function):
            return NONE
        code = function.__code__ if isinstance(function, FunctionType) else getattr(function.__func__, "__code__", None)
        if code is None:
            return NONE
        owner = path.rpartition(".")[0]
        names, attributes = _read_in(code)
        known = {owner, *code.co_freevars, *names & self._shared} - {""}

        def is_read(path: str) -> bool:
            inner = [path[len(root) :] for root in known if f"{path}.".startswith(f"{root}.")]
            return any(attributes.issuperset(filter(None, each.split("."))) for each in inner)

        return frozenset().union(*(origins for path, origins in self._state.items() if is_read(path)))

    def _call(self, node: ast.Call) -> None:
        name = _name_of(node)
        given = [*node.args, *(each.value for each in node.keywords)]
        if (changed := _changed_by(node)) is not None and (path := path_of(changed)):
            put = frozenset().union(*map(self._origins, given))
            self._state[path] = self._state.get(path, NONE) | self._decided | put
        function = path_of(node.func)
        called = self._value_of(function)
        receiver = node.func.value if isinstance(node.func, ast.Attribute) else None
        owner = MISSING if receiver is None else self._value_of(path_of(receiver))
        trains = self._trains(called) or self._trains(owner)
        if name in UPDATES and self._is_in_turn and receiver is not None and self._named.is_foreign(owner):
            self.found.updated.setdefault(path_of(receiver), node.lineno)
        if ASIDE.search(name.lower()):
            return
        of_user = isinstance(called, FunctionType | MethodType) and is_users_own(called) and not _is_ours(owner)
        takes = of_user and any(self._trains(self._value_of(path_of(each))) for each in given)
        if (helper := self._helpers.get(function)) is not None:
            by_name = dict(zip(helper.arguments, node.args, strict=False))
            by_name |= {each.arg: each.value for each in node.keywords if each.arg}
            for path in self._used_by(function, helper):
                if path in by_name:
                    self._reaches(self._origins(by_name[path]))
                elif path not in helper.arguments:
                    self._reaches(self._state.get(helper.called_outside(path), NONE))
        is_gradient = isinstance(receiver, ast.Attribute) and receiver.attr == "grad"
        if name in TRAINS_BY or trains or takes or (is_gradient and name in IN_PLACE):
            self._reaches(frozenset().union(*map(self._origins, given)))
        if name == "backward" and receiver is not None:
            self._reaches(self._origins(receiver))
        acts = name in ACTS and (trains or owner is MISSING or isinstance(owner, torch.Tensor))
        if acts or takes or (name in IN_PLACE and isinstance(owner, torch.Tensor)):
            self._reaches(self._decided)

    def _used_by(self, called: str, helper: Helper) -> set[str]:
        """Which arguments of a helper, and which of the paths that are assigned here, reach a step in it, by its own
        paths."""
        if called not in self._used:
            inside = (helper.called_inside(path, self._shared) for path in self._lines)
            given = {*helper.arguments, *inside} - {""}
            known = RunningValues(helper.names)
            found = Flow(helper.function, [], False, known, self._named, helper.calls, given=sorted(given)).found
            self._used[called] = given & found.carried.keys()
        return self._used[called]

    def _reaches(self, origins: Origins) -> None:
        """A value reaches a step."""
        for each in origins - KNOWN_TO_US:
            if each == NUMBER:
                self.found.numbered = True
            else:
                self.found.carried.setdefault(each, self._lines.get(each, 0))

    @staticmethod
    def _trains(value: Any) -> bool:
        """Whether an object is a model, an optimizer, a part of one, or a schedule, or a method of such."""
        owner = getattr(value, "__self__", value) if isinstance(value, MethodType) else value
        if isinstance(owner, torch.nn.Module | torch.optim.Optimizer | torch.nn.Parameter):
            return True
        if isinstance(owner, dict):
            return "params" in owner and "lr" in owner
        return package_of(type(owner).__module__) == "torch" and hasattr(owner, "optimizer")


@lru_cache(maxsize=256)
def _read_in(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The global variables that a function reads, and the attributes, of whatever object."""
    found = [each for each in dis.get_instructions(code) if each.opname.startswith("LOAD_")]
    names = frozenset(each.argval for each in found if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return names, frozenset(each.argval for each in found if each.opname in ("LOAD_ATTR", "LOAD_METHOD"))


def _name_of(call: ast.Call) -> str:
    return path_of(call.func).rpartition(".")[2] or (call.func.attr if isinstance(call.func, ast.Attribute) else "")


def _changed_by(call: ast.Call) -> ast.expr | None:
    """What a call changes: the container whose method it calls, what it shuffles, or an iterator that it reads on."""
    name = _name_of(call)
    if (name == "shuffle" or (name == "next" and isinstance(call.func, ast.Name))) and call.args:
        return call.args[0]
    return call.func.value if isinstance(call.func, ast.Attribute) and name in MUTATES else None


def _innermost_path(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript) and not path_of(node):
        node = node.value
    return path_of(node)


def _declared_in(function: Function) -> set[str]:
    """The names that a function says are those of variables around it."""
    return {name for each in parts_of(function) if isinstance(each, ast.Nonlocal | ast.Global) for name in each.names}


def _globals_of(function: Function) -> set[str]:
    """Which names mean the same variables in a function and in others that read them as global ones."""
    if isinstance(function, ast.Module):
        return set(assigned_in(function.body))
    return _declared_in(function)


def outlives(function: Function) -> Callable[[str], bool]:
    """Whether what is assigned to a path is there when the function is called again."""
    if isinstance(function, ast.Module):
        return lambda path: True
    declared = _declared_in(function)
    arguments = {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}
    names = [each for each in parts_of(function) if isinstance(each, ast.Name)]
    own = {each.id for each in names if isinstance(each.ctx, ast.Store)} - declared

    def outlives(path: str) -> bool:
        root = root_of(path)
        return root not in own and (root != path or root not in arguments)

    return outlives


class CarriedVariables:
    """What the functions that are running carry. Looks once, as the second step of this process is about to end: then
    their variables have values. Used by the training thread.

    Args:
        adapters: returns those of the hooks that this process has entered.
    """

    def __init__(self, adapters: Callable[[], Collection[Adapter]]) -> None:
        self._adapters = adapters
        self._steps = 0
        self._suspended: list[FrameType] = []  # generators that the first step ran in; the second may run in them, too
        self._at: dict[FrameType, int] = {}  # where functions were as the second step began

    def step_begins(self) -> None:
        """A step begins, maybe once more: each batch begins one, and some turns read several."""
        if self._steps == 1 and not self._at:
            self._at = {frame: frame.f_lineno for frame in (*self._suspended, *users_frames())}
            self._suspended = []

    def stepped(self) -> None:
        """An optimizer has stepped."""
        self._steps += 1
        if self._steps == 1:
            self._suspended = [each for each in users_frames() if each.f_code.co_flags & inspect.CO_GENERATOR]

    def look(self) -> Carries | None:
        """A step is about to end. Returns what was found, once; None: this is not the time."""
        at, self._at = self._at, {}
        if not at:
            return None
        try:
            return self._look(at)
        except Exception:  # a script that it does not understand is no reason to end a training
            log.exception("what the script carries from turn to turn could not be followed, and is not told")
            return None

    def _look(self, at: Mapping[FrameType, int]) -> Carries:
        named = Named(self._adapters())
        running = [each for frame in users_frames() if (each := _running(frame, at.get(frame))) is not None]
        by_library = set(frames_called_by_a_library())
        innermost = [each for each in running if each.frame in by_library]
        if any(each.turns for each in innermost):
            innermost = []
        found = Carries()
        for each in running:
            if each.turns or each.begun is None or (each in innermost and each.within is None):
                one = _carried_in(each, named, [other.function for other in running])
                for path in [path for path in one.carried if _reads_on(each.values.of(path))]:
                    several = isinstance(each.values.of(path), PLAIN)
                    found.iterators[f"{path}[i]" if several else path] = one.carried.pop(path)
                found.carried = one.carried | found.carried
                found.updated = one.updated | found.updated
                found.counts |= one.counts
                found.numbered |= one.numbered
                found.skips |= one.skips
                found.passes |= one.passes
            if each.within is not None:
                break  # what is further out trains more than once
        return found


@dataclass(frozen=True, eq=False, slots=True)
class Running:
    """A function of the user that is running.

    Attributes:
        function: its source. values: of its variables.
        begun: where it was as the step began; None: it was not running, so it is called in each turn.
        within: the block around it that enters the hook.
        turns: its loops that the turn is in, from the outermost inwards.
    """

    frame: FrameType
    function: Function
    values: RunningValues
    begun: int | None
    within: ast.With | ast.AsyncWith | None
    turns: list[ast.For | ast.While]


def _running(frame: FrameType, begun: int | None) -> Running | None:
    function = function_of(frame.f_code, frame.f_globals)
    if function is None:
        return None
    line, values = frame.f_lineno, RunningValues({**frame.f_globals, **frame.f_locals})
    within = _enters(function, values, line if begun is None else begun)
    turns: list[ast.For | ast.While] = []
    if begun is not None:
        stepped = loops_at(function, line)
        turns = [each for each in loops_at(function, begun) if each in stepped]
        turns = [each for each in turns if within is None or each.lineno >= within.lineno]
    return Running(frame, function, values, begun, within, turns)


def _carried_in(each: Running, named: Named, functions: Collection[Function]) -> Carries:
    """What a function carries. `functions`: all that are running, each of which is looked into."""
    values, turns = each.values, each.turns
    innermost = turns[-1] if turns else None
    reads = isinstance(innermost, ast.For) and (each.begun or 0) <= (innermost.iter.end_lineno or 0)
    sources = sources_in(turns)
    paths = [*called_in(turns), *sources]
    helpers = {path: helper for path in paths if (helper := helper_of(path, values)) is not None}
    found = Flow(each.function, turns, reads, values, named, helpers).found
    hooks = chain.from_iterable(_hooks_of(path, values) for path in paths)
    helpers |= {f"<hook {i}>": hook for i, hook in enumerate(hooks)}
    for called, helper in helpers.items():
        for path, line in _carried_by(helper, named, gives=called in sources).items():
            if not named.has(values, path, values.of(path)):
                found.carried.setdefault(path, line)
    for helper in helpers.values():  # one of its attributes alone would be no state that fits the others
        is_state = helper.owner and helper.function not in functions
        if is_state and any(path.startswith(f"{helper.owner}.") for path in found.carried):
            written = helper.writes.items()
            found.carried |= {path: at for path, at in written if not named.has(values, path, values.of(path))}
    return found


def _carried_by(helper: Helper, named: Named, *, gives: bool = False) -> dict[str, int]:
    """What a helper, and those that it calls, carry from call to call, by the paths of the caller, with lines."""
    known = RunningValues(helper.names)
    found = Flow(helper.function, [], False, known, named, helper.calls, gives).found.carried
    for inner in helper.calls.values():
        found |= _carried_by(inner, named)
    called = {path: helper.called_outside(path) for path in found if not named.has(known, path, known.of(path))}
    return {outside: found[path] for path, outside in called.items() if outside}


def lines_for(found: Carries) -> list[str]:
    """The lines that name what is carried."""
    lines = dict.fromkeys(f'snap.track("{path.rpartition(".")[2]}", tensors={path})' for path in found.updated)
    loose = [path for path in found.carried if root_of(path) == path]
    if loose:
        kept = ", ".join(f'"{path}": {path}' for path in loose)
        used = ", ".join(f'kept["{path}"] for {path}' for path in loose)
        line = f'kept = {{{kept}}}; snap.track("kept", get=lambda: dict(kept), set=kept.update)'
        lines[f"{line}, with {used} in the loop"] = None
    for path in found.carried.keys() - set(loose):
        owner, _, name = path.rpartition(".")
        if owner and "[" not in name:
            put = f'lambda value: setattr({owner}, "{name}", value)'
            lines[f'snap.track("{name}", get=lambda: {path}, set={put})'] = None
        else:
            owner, _, key = path.rpartition("[")
            name = owner.rpartition(".")[2]
            if key.removesuffix("]").isdecimal():
                line = f"get=lambda: list({owner}), set=lambda values: {owner}.__setitem__(slice(None), values)"
            else:
                line = f"get=lambda: dict({owner}), set={owner}.update"
            lines[f'snap.track("{name}", {line})'] = None
    return sorted(lines)


def lines_for_iterators(found: Carries) -> list[str]:
    """The lines that make what is read on from go on after a restart."""
    names = [(path, path.rpartition(".")[2]) for path in found.iterators]
    texts = [(path, f'f"{name[:-3]}{{i}}"' if name.endswith("[i]") else f'"{name}"') for path, name in names]
    return [f"{path} = iter(snap.data(lambda: ..., name={text}))" for path, text in texts]


class RunningValues:
    """The values of a running function's variables, by their `names`, found without running any code of theirs."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = names
        self._known: dict[str, Any] = {}

    def of(self, path: str) -> Any:
        """The value of a path, or `MISSING`."""
        if path not in self._known:
            self._known[path] = self._at(ast.parse(path, mode="eval").body) if path else MISSING
        return self._known[path]

    def _at(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return self._names.get(node.id, MISSING)
        if isinstance(node, ast.Attribute):
            return _attribute(self._at(node.value), node.attr)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            return _entry(self._at(node.value), node.slice.value)
        return MISSING


def _attribute(owner: Any, name: str) -> Any:
    held = getattr(owner, "__dict__", {}) if not isinstance(owner, type) else {}
    if name in held:
        return held[name]
    if isinstance(owner, torch.nn.Module):
        for table in (owner._modules, owner._parameters, owner._buffers):
            if name in table:
                return table[name]
    found = inspect.getattr_static(type(owner), name, MISSING)
    return MethodType(found, owner) if isinstance(found, FunctionType) else MISSING


def _entry(owner: Any, key: Any) -> Any:
    if isinstance(owner, torch.nn.Sequential | torch.nn.ModuleList) and isinstance(key, int):
        owner = list(owner._modules.values())
    if type(owner) in (list, tuple) and isinstance(key, int):
        return owner[key] if -len(owner) <= key < len(owner) else MISSING
    return owner.get(key, MISSING) if type(owner) is dict else MISSING


class Named:
    """What is captured, or is no state. `adapters`: of the hooks that this process has entered."""

    def __init__(self, adapters: Collection[Adapter]) -> None:
        self._memory = {held for each in adapters for held in each.captured}
        named = [("", root) for each in adapters for root in each.named()]
        found = [value for _, value, _ in walk(named, is_code, code=True)]
        codes = [each.__code__ for each in found if isinstance(each, FunctionType) and is_users_own(each)]
        self._names = {name for code in codes for name in (*code.co_freevars, *code.co_names)}
        # Kept alive, as what is found may exist only now, and its id would be given to another object.
        self._kept = [*(schedule for each in adapters for schedule in each.schedules), *found]
        self._objects = {id(each) for each in self._kept if not is_plain(each)}  # a small number is everybody's

    def is_foreign(self, value: Any) -> bool:
        """Whether a value is a module that nothing captures."""
        if not isinstance(value, torch.nn.Module) or id(value) in self._objects:
            return False
        tensors = [*torch.nn.Module.parameters(value), *torch.nn.Module.buffers(value)]
        return bool(tensors) and self._memory.isdisjoint(map(memory_of, tensors))

    def has(self, values: RunningValues, path: str, value: Any) -> bool:
        if {root_of(path), path.rpartition(".")[2]} & self._names or id(value) in self._objects:
            return True
        owners = [values.of(owner) for owner in owners_of(path)]
        if not self._objects.isdisjoint(map(id, owners)):
            return True
        if any(isinstance(each, torch.nn.Module | torch.optim.Optimizer) for each in owners):
            return True  # attributes there are looked at as they change
        if isinstance(value, torch.Tensor):
            return memory_of(value) in self._memory
        if _reads_on(value):
            return False
        return value is not MISSING and not isinstance(value, (*PLAIN, np.generic, np.ndarray))


def _reads_on(value: Any) -> bool:
    """Whether a value is an iterator that knows its place, or a container of such."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(isinstance(each, _BaseDataLoaderIter) or _knows_its_place(each) for each in value)
    return _knows_its_place(value)  # a loader's is told by whoever watches these


def _knows_its_place(value: Any) -> bool:
    """Whether a value is one of Python's own iterators, a generator of the user's that loops over something or counts,
    or what others fill ahead. A generator that only draws from torch finds its place again."""
    if isinstance(value, GeneratorType):
        frame = value.gi_frame
        if frame is None or not is_users_frame(frame):
            return False
        function = function_of(value.gi_code, frame.f_globals)
        return function is not None and any(isinstance(each, ast.For | ast.AugAssign) for each in parts_of(function))
    python = isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools")
    return python or isinstance(value, FED)


def _is_ours(value: Any) -> bool:
    ours = ("holdfast", "holdfast.snapshot", "holdfast.integrations")
    return any(package_of(kind.__module__) in ours for kind in type(value).__mro__)


def function_of(code: CodeType, variables: dict[str, Any]) -> Function | None:
    """The source of a function, if there is any. `variables`: of its module, which may have its own loader."""
    linecache.getlines(code.co_filename, variables)
    return _parsed(code)


@lru_cache(maxsize=64)
def _parsed(code: CodeType) -> Function | None:
    lines = linecache.getlines(code.co_filename)
    is_whole = code.co_name == "<module>"
    first = 1 if is_whole else code.co_firstlineno
    if first > len(lines):
        return None
    try:
        body = lines if is_whole else inspect.getblock(lines[first - 1 :])
        is_within = body[0][:1].isspace()
        module = ast.parse("".join(["if True:\n"] * is_within + body))
    except (SyntaxError, ValueError, TokenError):  # no Python, such as a notebook's own commands, or it was edited
        return None
    if is_whole:
        return module
    ast.increment_lineno(module, first - 1 - is_within)
    outer = module.body[0]
    found = outer.body[0] if is_within and isinstance(outer, ast.If) else outer
    return found if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef) else None


@dataclass(frozen=True, slots=True)
class Helper:
    """A function of the user that a turn calls.

    Attributes:
        function: its source. names: the values that it knows.
        owner: the path of the object whose method it is; empty if it is none, or the caller has no name for it.
        itself: what the method calls that object; empty if it is none.
        free: its variables that are those of functions around it.
        calls: the helpers that it calls itself, by its own paths.
    """

    function: ast.FunctionDef | ast.AsyncFunctionDef
    names: Mapping[str, Any]
    owner: str
    itself: str
    free: Collection[str]
    calls: Mapping[str, Helper]

    @property
    def arguments(self) -> list[str]:
        """The names of its arguments, as a call of it gives them."""
        given = self.function.args
        names = [each.arg for each in (*given.posonlyargs, *given.args)]
        return [*names[bool(self.itself) :], *(each.arg for each in given.kwonlyargs)]

    @property
    def writes(self) -> dict[str, int]:
        """What it assigns that outlives the call, by the paths of the caller, with lines."""
        is_kept = outlives(self.function)
        found = assigned_in(self.function.body)
        for helper in self.calls.values():
            found = helper.writes | found
        outside = {self.called_outside(path): line for path, line in found.items() if is_kept(path)}
        outside.pop("", None)
        return outside

    def called_outside(self, path: str) -> str:
        """What the caller calls a path of the function; empty if it has no name for that object."""
        if not self.itself or root_of(path) != self.itself:
            return path
        return self.owner and self.owner + path[len(self.itself) :]

    def called_inside(self, path: str, shared: Collection[str]) -> str:
        """What the function calls a path of the caller; empty if it does not know that. `shared`: variables that mean
        the same to both."""
        if self.owner and f"{path}.".startswith(f"{self.owner}."):
            return self.itself + path[len(self.owner) :]
        return path if root_of(path) in {*self.free, *shared} and outlives(self.function)(path) else ""


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was assigned yet
        return MISSING


def helper_of(path: str, values: RunningValues, deepest: int = DEEPEST) -> Helper | None:
    """The function of the user's own that is called by a path, unless it is a model's, with those that it calls, down
    to `deepest` levels."""
    called, owner = values.of(path), path.rpartition(".")[0]
    if not isinstance(called, FunctionType | MethodType | type) and callable(called):
        method = inspect.getattr_static(type(called), "__call__")
        called, owner = (MethodType(method, called) if isinstance(method, FunctionType) else MISSING), path
    return _helper(called, owner, deepest)


def _hooks_of(path: str, values: RunningValues) -> Iterator[Helper]:
    """The functions of the user's own that an optimizer calls around its step, if a path calls that."""
    owner, _, name = path.rpartition(".")
    optimizer = values.of(owner)
    if name == "step" and isinstance(optimizer, torch.optim.Optimizer):
        for hook in (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()):
            if (helper := _helper(hook, "", DEEPEST)) is not None:
                yield helper


def _helper(called: Any, owner: str, deepest: int) -> Helper | None:
    held = called.__self__ if isinstance(called, MethodType) else None
    inner = called.__func__ if isinstance(called, MethodType) else called
    trains = isinstance(held, torch.nn.Module | torch.optim.Optimizer) or _is_ours(held)
    if trains or not isinstance(inner, FunctionType) or not is_users_own(inner):
        return None
    function = function_of(inner.__code__, inner.__globals__)
    if function is None or isinstance(function, ast.Module):
        return None
    cells = zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True)
    names = {**inner.__globals__, **{name: value for name, cell in cells if (value := _content(cell)) is not MISSING}}
    arguments = function.args.posonlyargs + function.args.args
    itself = arguments[0].arg if held is not None and arguments else ""
    names |= {itself: held} if itself else {}
    known = RunningValues(names)
    within = called_in(function.body) if deepest else []
    calls = {path: each for path in within if (each := helper_of(path, known, deepest - 1)) is not None}
    return Helper(function, names, owner if itself else "", itself, inner.__code__.co_freevars, calls)


def _enters(function: Function, values: RunningValues, line: int) -> ast.With | ast.AsyncWith | None:
    """The block around `line` that enters the hook."""
    for each in parts_of(function):
        if isinstance(each, ast.With | ast.AsyncWith) and each.lineno <= line <= (each.end_lineno or 0):
            for item in each.items:
                names = [path_of(item.context_expr), *([path_of(item.optional_vars)] if item.optional_vars else [])]
                if any(_is_ours(values.of(name)) for name in names):
                    return each
    return None
