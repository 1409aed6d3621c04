"""What a script carries from turn to turn in its variables, and feeds its steps with: found in its source.

A counter, a temperature, a hidden state or a best loss is an ordinary variable. A restart begins it anew, and nothing
in the state tells. But the source does: the variable is assigned within the loop, and the value that an earlier turn
left there reaches a model, an optimizer, a backward, or a decision about one of these. What is only logged does not.

`Flow` follows values through one function, by the structure of its source: a value is known by the names of the
variables that an earlier turn left it in. It follows no value into another function, and takes a loop to run at least
once. So it may miss something, and names what it finds in a warning only.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch

from holdfast.snapshot.copy.tensors import memory_of
from holdfast.snapshot.state.adapter import Adapter
from holdfast.snapshot.state.walk import is_users_own, package_of
from holdfast.snapshot.step.variables import is_users_frame

Origins = frozenset[str]
NONE: Origins = frozenset()

KNOWN_TO_US: Origins = frozenset({"<holdfast>"})
"""Origin of a value that the hook gave, such as ``snap.step``: a restart finds it again."""

NUMBER = "<number of a batch>"
"""Origin of what the built-in ``enumerate`` counts."""

LOOKS_AT = 2
"""The step in which `CarriedVariables` looks."""

MISSING = object()
"""What `Flow`'s ``value_of`` returns for a name that has no value now."""

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
        updated: modules that a turn updates, and that are not captured, with the line.
        counts: lines of loops over numbers that begin anew.
        numbered: whether the number of a batch, as counted by ``enumerate``, reaches a step.
        passes: whether a loop begins at the pass that the hook tells, as ``range(snap.epoch, n)`` does.
        repeats: lines of loops over several trainings, each of which enters the hook without a name of its own.
        skips: whether the function passes over turns by what the hook tells, and so brings everything to its place.
    """

    carried: dict[str, int] = field(default_factory=dict)
    updated: dict[str, int] = field(default_factory=dict)
    counts: set[int] = field(default_factory=set)
    numbered: bool = False
    passes: bool = False
    repeats: set[int] = field(default_factory=set)
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
        for each in parts:
            path = ""
            if each in bound:
                continue
            if isinstance(each, ast.Name | ast.Attribute | ast.Subscript) and isinstance(each.ctx, ast.Store):
                path = _innermost_path(each)
            elif isinstance(each, ast.Call):
                path = path_of(changed) if (changed := _changed_by(each)) is not None else ""
            if path:
                found.setdefault(path, getattr(each, "lineno", 0))
    return found


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
        value_of: the value of a path as the function runs, or `MISSING`.
        is_ours: whether a value belongs to the hook.
        is_kept: whether a value, or the path that leads to it, is captured, or is no state.
        is_foreign: whether a value is a module that is not captured.
        written_by: the paths that a call of a path assigns, with lines.
        gives: whether what the function yields or returns is a batch.
    """

    def __init__(
        self,
        function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Module,
        turns: list[ast.For | ast.While],
        reads: bool,
        value_of: Callable[[str], Any],
        is_ours: Callable[[Any], bool],
        is_kept: Callable[[str, Any], bool],
        is_foreign: Callable[[Any], bool],
        written_by: Callable[[str], dict[str, int]] = lambda path: {},
        gives: bool = False,
    ) -> None:
        self.found = Carries()
        self._value_of = value_of
        self._is_ours = is_ours
        self._is_kept = is_kept
        self._is_foreign = is_foreign
        self._turns = turns
        self._reads = reads
        self._written_by = written_by
        self._gives = gives
        self._lines = self._assigned_in(turns or [function])
        self._candidates: dict[ast.AST, list[str]] = {}  # by loop, what an earlier turn of it leaves
        self._state: dict[str, Origins] = {}
        self._loops: list[ast.AST] = []
        self._decided: Origins = NONE  # what decides whether this statement runs
        if not turns:
            outside = _outlives(function)
            self._carry(path for path in self._lines if outside(path))
        self._block(function.body)

    def _assigned_in(self, nodes: Iterable[ast.AST]) -> dict[str, int]:
        """As `assigned_in`, with what the functions assign that are called there."""
        nodes = list(nodes)
        found = assigned_in(nodes)
        for path in called_in(nodes):
            found = self._written_by(path) | found
        return found

    def _carry(self, paths: Iterable[str]) -> None:
        for path in paths:
            if not self._is_kept(path, self._value_of(path)):
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
            if self._trains(changed) or (changed is MISSING and path.endswith("['lr']")):
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
                if self._is_ours(value):
                    found |= KNOWN_TO_US
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
        paths = [*code.co_freevars, *code.co_names, *(f"{owner}.{name}" for name in code.co_names if owner)]
        return frozenset().union(*(self._state.get(each, NONE) for each in paths))

    def _call(self, node: ast.Call) -> None:
        name = _name_of(node)
        given = [*node.args, *(each.value for each in node.keywords)]
        if (changed := _changed_by(node)) is not None and (path := path_of(changed)):
            put = frozenset().union(*map(self._origins, given))
            self._state[path] = self._state.get(path, NONE) | self._decided | put
        called = self._value_of(path_of(node.func))
        receiver = node.func.value if isinstance(node.func, ast.Attribute) else None
        owner = MISSING if receiver is None else self._value_of(path_of(receiver))
        trains = self._trains(called) or self._trains(owner)
        if name in UPDATES and self._is_in_turn and receiver is not None and self._is_foreign(owner):
            self.found.updated.setdefault(path_of(receiver), node.lineno)
        if ASIDE.search(name.lower()):
            return
        of_user = isinstance(called, FunctionType | MethodType) and is_users_own(called) and not self._is_ours(owner)
        takes = of_user and any(self._trains(self._value_of(path_of(each))) for each in given)
        if name in TRAINS_BY or trains or takes:
            self._reaches(frozenset().union(*map(self._origins, given)))
        if name == "backward" and receiver is not None:
            self._reaches(self._origins(receiver))
        acts = name in ACTS and (trains or owner is MISSING or isinstance(owner, torch.Tensor))
        if acts or takes or (name in IN_PLACE and isinstance(owner, torch.Tensor)):
            self._reaches(self._decided)

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


def _name_of(call: ast.Call) -> str:
    return path_of(call.func).rpartition(".")[2] or (call.func.attr if isinstance(call.func, ast.Attribute) else "")


def _changed_by(call: ast.Call) -> ast.expr | None:
    """What a call changes: the container whose method it calls, or what it shuffles."""
    name = _name_of(call)
    if name == "shuffle" and call.args:
        return call.args[0]
    return call.func.value if isinstance(call.func, ast.Attribute) and name in MUTATES else None


def _innermost_path(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript) and not path_of(node):
        node = node.value
    return path_of(node)


def _outlives(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Module) -> Callable[[str], bool]:
    """Whether what is assigned to a path is there when the function is called again."""
    if isinstance(function, ast.Module):
        return lambda path: True
    declared = {
        name for each in parts_of(function) if isinstance(each, ast.Nonlocal | ast.Global) for name in each.names
    }
    arguments = {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}
    names = [each for each in parts_of(function) if isinstance(each, ast.Name)]
    own = {each.id for each in names if isinstance(each.ctx, ast.Store)} - declared

    def outlives(path: str) -> bool:
        root = root_of(path)
        return root not in own and (root != path or root not in arguments)

    return outlives


# ---------------------------------------------------------------------- of the functions that are running

PLAIN = (type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set, deque)
"""Types of values that may be state. Those of other objects are looked at where they change."""


class CarriedVariables:
    """What the functions that are running carry. Looks once, as the second step of this process is about to end: then
    their variables have values. Used by the training thread.

    Args:
        adapter: what is captured.
    """

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._begun = 0
        self._at: dict[CodeType, int] = {}  # where functions were as the second step began

    def step_begins(self) -> None:
        """A step begins."""
        self._begun += 1
        if self._begun == LOOKS_AT:
            self._at = {frame.f_code: frame.f_lineno for frame in _frames()}

    def look(self) -> Carries | None:
        """A step is about to end. Returns what was found, once; None: this is not the time."""
        at, self._at = self._at, {}
        if not at:
            return None
        found, frames = Carries(), {frame.f_code: frame for frame in _frames()}
        for code, frame in frames.items():
            if (function := function_of(code, frame)) is not None:
                line = at.get(code)
                one = self._look_into(function, frame, line)
                within = _enters(function, frame, frame.f_lineno if line is None else line)
                found.carried = one.carried | found.carried
                found.updated = one.updated | found.updated
                found.counts |= one.counts
                found.numbered |= one.numbered
                found.skips |= one.skips
                found.passes |= one.passes
                if within is not None:
                    if not _is_named(function, within):
                        found.repeats = _repeats(function, within.lineno) or self._called_in_loop(frame)
                    break  # what is further out trains more than once
        return found

    @staticmethod
    def _called_in_loop(frame: FrameType) -> set[int]:
        caller = frame.f_back
        if caller is None or not is_users_frame(caller):
            return set()
        function = function_of(caller.f_code, caller)
        return set() if function is None else _repeats(function, caller.f_lineno)

    def _look_into(self, function: Function, frame: FrameType, begun: int | None) -> Carries:
        turns: list[ast.For | ast.While] = []
        reads = False
        if begun is not None:
            within = _enters(function, frame, begun)
            stepped = loops_at(function, frame.f_lineno)
            turns = [each for each in loops_at(function, begun) if each in stepped]
            turns = [each for each in turns if within is None or each.lineno >= within.lineno]
            reads = bool(turns) and isinstance(turns[-1], ast.For) and begun <= (turns[-1].iter.end_lineno or 0)
            if not turns:
                return Carries()
        named, values = _Named(self._adapter), RunningValues({**frame.f_globals, **frame.f_locals})
        is_kept = partial(named.has, values)
        sources = sources_in(turns)
        paths = [*called_in(turns), *sources]
        helpers = {path: each for path in paths if (each := helper_of(path, values)) is not None}

        def written_by(path: str) -> dict[str, int]:
            return helpers[path].writes if path in helpers else {}

        found = Flow(function, turns, reads, values.of, _is_ours, is_kept, named.is_foreign, written_by).found
        for called, helper in helpers.items():
            known = RunningValues(helper.names)
            kept = partial(named.has, known)
            gives = called in sources
            inner = Flow(helper.function, [], False, known.of, _is_ours, kept, named.is_foreign, gives=gives).found
            for path, line in inner.carried.items():
                outer = helper.called_outside(path)
                if not is_kept(outer, known.of(path)):
                    found.carried.setdefault(outer, line)
        for helper in helpers.values():  # one of its attributes alone would be no state that fits the others
            if helper.owner and any(path.startswith(f"{helper.owner}.") for path in found.carried):
                found.carried |= {path: at for path, at in helper.writes.items() if not is_kept(path, values.of(path))}
        return found


def lines_for(found: Carries) -> list[str]:
    """The lines that name what is carried."""
    lines = dict.fromkeys(f'snap.track("{path.rpartition(".")[2]}", tensors={path})' for path in found.updated)
    loose = [path for path in found.carried if root_of(path) == path]
    if loose:
        kept = ", ".join(f'"{path}": {path}' for path in loose)
        lines[f'kept = {{{kept}}}; snap.track("kept", get=lambda: dict(kept), set=kept.update)'] = None
    for path in found.carried.keys() - set(loose):
        owner, _, name = path.rpartition(".")
        if owner and "[" not in name:
            put = f'lambda value: setattr({owner}, "{name}", value)'
            lines[f'snap.track("{name}", get=lambda: {path}, set={put})'] = None
        else:
            owner = path.rpartition("[")[0]
            name = owner.rpartition(".")[2]
            lines[f'snap.track("{name}", get=lambda: dict({owner}), set={owner}.update)'] = None
    return sorted(lines)


Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module


class RunningValues:
    """The values of a running function's variables, by their `names`, found without running any code of theirs."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = names
        self._known: dict[str, Any] = {}

    def of(self, path: str) -> Any:
        """See `Flow`."""
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


class _Named:
    """What is captured, or is no state."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        named = adapter.named()
        self._objects = {id(each) for root in named for each in (root, getattr(root, "__self__", root))}
        self._names: set[str] = set()
        for each in named:
            code = getattr(each, "__code__", None)
            if code is not None:
                self._names.update(code.co_freevars, code.co_names)

    @cached_property
    def _memory(self) -> set[int]:
        return {memory_of(item.tensor) for item in self._adapter.tensors()}

    def is_foreign(self, value: Any) -> bool:
        """Whether a value is a module that nothing captures."""
        if not isinstance(value, torch.nn.Module) or id(value) in self._objects:
            return False
        tensors = [*torch.nn.Module.parameters(value), *torch.nn.Module.buffers(value)]
        return bool(tensors) and self._memory.isdisjoint(map(memory_of, tensors))

    def has(self, values: RunningValues, path: str, value: Any) -> bool:
        root = root_of(path)
        if {root, path.rpartition(".")[2]} & self._names or id(values.of(root)) in self._objects:
            return True
        owner = values.of(root)
        if path != root and isinstance(owner, torch.nn.Module | torch.optim.Optimizer):
            return True  # attributes there are looked at as they change
        if isinstance(value, torch.Tensor):
            return memory_of(value) in self._memory
        return value is not MISSING and not isinstance(value, (*PLAIN, np.generic, np.ndarray))


def _is_ours(value: Any) -> bool:
    ours = ("holdfast", "holdfast.snapshot", "holdfast.integrations")
    return any(package_of(kind.__module__) in ours for kind in type(value).__mro__)


def _frames() -> Iterator[FrameType]:
    """The user's functions that are running, from the innermost outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users_frame(frame):
            yield frame
        frame = frame.f_back


def function_of(code: CodeType, frame: FrameType) -> Function | None:
    """The source of a function, if there is any."""
    linecache.getlines(code.co_filename, frame.f_globals)
    return _parsed(code)


@lru_cache(maxsize=64)
def _parsed(code: CodeType) -> Function | None:
    lines = linecache.getlines(code.co_filename)
    is_whole = code.co_name == "<module>"
    first = 1 if is_whole else code.co_firstlineno
    if first > len(lines):
        return None
    body = lines if is_whole else inspect.getblock(lines[first - 1 :])
    is_within = body[0][:1].isspace()
    try:
        module = ast.parse("".join(["if True:\n"] * is_within + body))
    except (SyntaxError, ValueError):  # no Python, such as a notebook's own commands
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
        owner: the path of the object whose method it is, and what it calls that object; both empty if it is none.
    """

    function: ast.FunctionDef | ast.AsyncFunctionDef
    names: Mapping[str, Any]
    owner: str
    itself: str

    @property
    def writes(self) -> dict[str, int]:
        """What it assigns that outlives the call, by the paths of the caller, with lines."""
        outlives = _outlives(self.function)
        found = assigned_in(self.function.body)
        return {self.called_outside(path): line for path, line in found.items() if outlives(path)}

    def called_outside(self, path: str) -> str:
        """What the caller calls a path of the function."""
        return self.owner + path[len(self.itself) :] if self.itself and root_of(path) == self.itself else path


def helper_of(path: str, values: RunningValues) -> Helper | None:
    """The function of the user's own that is called by a path, unless it is a model's."""
    called, owner = values.of(path), path.rpartition(".")[0]
    if not isinstance(called, FunctionType | MethodType | type) and callable(called):
        method = inspect.getattr_static(type(called), "__call__")
        called, owner = (MethodType(method, called) if isinstance(method, FunctionType) else MISSING), path
    held = called.__self__ if isinstance(called, MethodType) else None
    inner = called.__func__ if isinstance(called, MethodType) else called
    trains = isinstance(held, torch.nn.Module | torch.optim.Optimizer) or _is_ours(held)
    if trains or not isinstance(inner, FunctionType) or not is_users_own(inner):
        return None
    linecache.getlines(inner.__code__.co_filename, inner.__globals__)
    function = _parsed(inner.__code__)
    if function is None or isinstance(function, ast.Module):
        return None
    names = {**inner.__globals__, **inspect.getclosurevars(inner).nonlocals}
    arguments = function.args.posonlyargs + function.args.args
    itself = arguments[0].arg if held is not None and arguments else ""
    return Helper(function, names | ({itself: held} if itself else {}), owner if itself else "", itself)


def _is_named(function: Function, block: ast.With | ast.AsyncWith) -> bool:
    """Whether the hook that a block enters is given a job or a number."""
    entered = [item.context_expr for item in block.items]
    variables = {path_of(each) for each in entered} - {""}
    assigned = [each for each in parts_of(function) if isinstance(each, ast.Assign)]
    made = [each.value for each in assigned if variables & {path_of(target) for target in each.targets}]
    words = [each.arg for call in (*entered, *made) if isinstance(call, ast.Call) for each in call.keywords]
    return any(word in (None, "job", "block") for word in words)


def _repeats(function: Function, line: int) -> set[int]:
    """The lines of the loops around `line` that do not try the same again."""
    tried = [each for each in parts_of(function) if isinstance(each, ast.Try)]
    loops = [each for each in loops_at(function, line) if isinstance(each, ast.For) and each.lineno < line]
    again = [each for each in tried if each.lineno <= line <= (each.end_lineno or 0)]
    return {loop.lineno for loop in loops if not any(loop.lineno <= each.lineno for each in again)}


def _enters(function: Function, frame: FrameType, line: int) -> ast.With | ast.AsyncWith | None:
    """The block around `line` that enters the hook."""
    values = RunningValues({**frame.f_globals, **frame.f_locals})
    for each in parts_of(function):
        if isinstance(each, ast.With | ast.AsyncWith) and each.lineno <= line <= (each.end_lineno or 0):
            for item in each.items:
                names = [path_of(item.context_expr), *([path_of(item.optional_vars)] if item.optional_vars else [])]
                if any(_is_ours(values.of(name)) for name in names):
                    return each
    return None
