"""The flow of values through the source of a function: which variables take what an earlier turn left to a step.

`Flow` follows values by the structure of the source: a value is known by the names of the variables that an earlier
turn left it in. It follows no value into another function, and takes a loop to run at least once. So it may miss
something. Pure: what a variable holds as the function runs is asked of the caller.
"""

from __future__ import annotations

import ast
import dis
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

from holdfast.snapshot.state.walk import is_users_own, package_of

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module

Origins = frozenset[str]
NONE: Origins = frozenset()

KNOWN_TO_US: Origins = frozenset({"<holdfast>"})
"""Origin of a value that the hook gave, such as ``snap.step``: a restart finds it again."""

NUMBER = "<number of a batch>"
"""Origin of what the built-in ``enumerate`` counts."""

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
        iterators: as `carried`, iterators that steps read on from. `Flow` has them in `carried`; who knows the values
            sorts them out.
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
        function: Function,
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
        self._shared = _globals_of(function)
        if not turns:
            outside = outlives(function)
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
