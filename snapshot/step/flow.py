"""Follows what an earlier turn left in variables to where a step depends on it, by the structure of the source.

A value is known by the names of the variables that an earlier turn left it in. `Flow` takes a loop to run at least
once.
"""

from __future__ import annotations

import ast
import dis
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

from holdfast.snapshot.state.walk import is_users_own, package_of
from holdfast.snapshot.step.script import FED, MISSING, Helper, Named, RunningValues, is_ours
from holdfast.snapshot.step.syntax import (
    Function,
    assigned_in,
    bound_in,
    called_in,
    changed_by,
    globals_of,
    innermost_path,
    name_of_call,
    outlives,
    path_of,
    root_of,
)

Origins = frozenset[str]

NONE: Origins = frozenset()

KNOWN_TO_US: Origins = frozenset({"<holdfast>"})
"""Origin of a value that the hook gave, such as ``snap.step``: a restart finds it again."""

NUMBER = "<number of a batch>"
"""Origin of what the built-in ``enumerate`` counts."""

ASIDE = re.compile(
    "log|print|save|write|report|plot|show|eval|valid|test|sample|generat|display|record|dump|metric|check|image|visual"
)
"""A function with such a name looks at the training from the side."""

ACTS = frozenset({"step", "backward", "load_state_dict", "add_param_group", "requires_grad_"})
"""Methods with which a script trains. Which of them are called, may depend on a value, too."""

IN_PLACE = frozenset({"copy_", "add_", "mul_", "sub_", "lerp_", "fill_", "zero_", "clamp_"})
"""Methods that change a tensor."""

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
        self._shared = globals_of(function)
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
        decided = self._decided
        for statement in body:
            if isinstance(statement, ast.If):
                tested = self._choose(statement)
                if any(isinstance(each, ast.Return) for each in statement.body):  # it decides about the rest, too
                    self._decided |= tested - KNOWN_TO_US
            else:
                self._statement(statement)
        self._decided = decided

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
        if is_turn and not origins & KNOWN_TO_US and {"range", "trange"} & set(map(name_of_call, calls)):
            self.found.counts.add(node.lineno)
        if is_turn and any(isinstance(each, ast.Attribute) and each.attr == "epoch" for each in ast.walk(node.iter)):
            self.found.passes |= bool(origins & KNOWN_TO_US)
        self._assign(node.target, origins)
        counted = next(filter(self._is_enumerate, calls), None)
        is_target = counted is not None and self._reads and node is self._turns[-1]
        if counted is not None and is_target and isinstance(node.target, ast.Tuple):
            begins = [*counted.args[1:], *(each.value for each in counted.keywords)]
            goes_on = any(name_of_call(each) == "enumerate" and isinstance(each.func, ast.Attribute) for each in calls)
            if not goes_on and not any(self._expression(each) & KNOWN_TO_US for each in begins):
                self._assign(node.target.elts[0], frozenset({NUMBER}))

    def _is_enumerate(self, call: ast.Call) -> bool:
        """Whether it calls the built-in function, by whatever name."""
        path = path_of(call.func)
        called = self._value_of(path)
        return called is enumerate or (called is MISSING and path == "enumerate")

    def _choose(self, node: ast.If) -> Origins:
        """Returns where what is tested comes from."""
        tested = self._expression(node.test)
        if tested & KNOWN_TO_US and any(isinstance(each, ast.Continue) for each in node.body):
            self.found.skips = True
        self._either([node.body, node.orelse], tested)
        return tested

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
                path = innermost_path(target)
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
        bound = {path_of(each) for each in bound_in(ast.walk(node))}
        for each in ast.walk(node):
            path = path_of(each)
            if path and root_of(path) not in bound:
                found |= self._state.get(path, NONE)
                value = self._value_of(path)
                if is_ours(value):
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
        name = name_of_call(node)
        given = [*node.args, *(each.value for each in node.keywords)]
        if (changed := changed_by(node)) is not None and (path := path_of(changed)):
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
        of_user = isinstance(called, FunctionType | MethodType) and is_users_own(called) and not is_ours(owner)
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
