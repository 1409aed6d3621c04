"""Follows what an earlier turn left in variables to where a step depends on it, by the structure of the source.

A value is known by the names of the variables that an earlier turn left it in. `Flow` takes a loop to run at least
once.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MappingProxyType, MethodType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from holdfast.snapshot.state.walk import is_users_own, package_of
from holdfast.snapshot.step.script import FED, MISSING, Helper, Named, RunningValues, is_ours, read_by, read_in
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
    owners_of,
    parts_of,
    path_of,
    root_of,
    taken_at,
    taken_in,
)

Origins = frozenset[str]

NONE: Origins = frozenset()

Returned = Mapping[tuple[Function, str], Mapping[str, int]]
"""By function, and the name that it calls another by: what the other's result depends on, of what that carries from
call to call, by the names of the script, with lines."""

PASS: Origins = frozenset({"<pass>"})
"""Origin of ``snap.epoch``, which tells the pass, and not the place in it."""

PLACE: Origins = frozenset({"<holdfast>"})
"""Origin of what else the hook gave, such as ``snap.step``."""

KNOWN_TO_US = PASS | PLACE
"""Origins of what a restart finds again."""

NUMBER = "<number of a batch>"
"""Origin of what the built-in ``enumerate`` counts."""

ASIDE = re.compile(
    "log|print|save|write|report|plot|show|eval|valid|test|sample|generat|display|record|dump|metric|check|image|visual"
)
"""A function with such a name looks at the training from the side."""

ACTS = frozenset({"step", "backward", "load_state_dict", "add_param_group", "requires_grad_"})
"""Methods with which a script trains. Which of them are called, may depend on a value, too."""

TRAINED = frozenset({"param_groups", "params", "parameters", "named_parameters", "modules", "named_modules"})
"""Names of what a loop over parts of a model, or of an optimizer, goes through."""

GRADELESS = frozenset({"no_grad", "inference_mode"})
"""A module that is called in such a block trains nothing by itself."""

UPDATES = frozenset({"update", "update_parameters", "load_state_dict"})
"""Methods that change a module."""

TRAINS_BY = frozenset({"backward", "grad", "clip_grad_norm_", "clip_grad_value_"})
"""Functions whose arguments decide what a step does."""

DRAWS = re.compile("rand|normal(_|$)|uniform|bernoulli|multinomial|shuffle|choice|permut|sample|generat")
"""A function with such a name draws random numbers. If it is called at other times, later steps draw others."""


@dataclass(slots=True)
class Carries:
    """What a function carries.

    Attributes:
        carried: the variables from which an earlier turn's value reaches a step, with the first line that assigns each.
        iterators: as `carried`, iterators that steps read on from, as ``name[i]`` those in containers; `Flow` has them
            in `carried`.
        updated: modules that a turn updates, and that are not captured, with the line.
        objects: as `carried`, objects of which several attributes are carried; `Flow` has those in `carried`.
        environments: as `objects`, environments of libraries that a turn acts in; a `Flow` leaves them out.
        mixed: dicts that hold some of it, and also such things as a model.
        counts: lines of loops over numbers that begin anew.
        numbered: whether the number of a batch, as counted by ``enumerate``, reaches a step.
        passes: whether a loop begins at the pass that the hook tells, as ``range(snap.epoch, n)`` does.
        skips: whether the function passes over turns by what the hook tells, and so brings everything to its place.
        again: lines at the top of a pass that change what is trained by what it was.
        is_called: whether the loop is a library's, which calls the user's functions.
    """

    carried: dict[str, int] = field(default_factory=dict)
    iterators: dict[str, int] = field(default_factory=dict)
    updated: dict[str, int] = field(default_factory=dict)
    objects: dict[str, int] = field(default_factory=dict)
    environments: dict[str, int] = field(default_factory=dict)
    mixed: set[str] = field(default_factory=set)
    counts: set[int] = field(default_factory=set)
    again: set[int] = field(default_factory=set)
    numbered: bool = False
    passes: bool = False
    skips: bool = False
    is_called: bool = False

    def add(self, other: Carries) -> None:
        """Add what another function carries. The line that is known already stays."""
        for name in self.__slots__:
            setattr(self, name, getattr(other, name) | getattr(self, name))


class Flow:
    """Follows the values of one function.

    Args:
        function: its source.
        values: the values of its variables as it runs.
        named: what is captured, or is no state.
        helpers: the functions that it calls, by the paths that it calls them by.
        turns: its loops that a turn of the training is in, from the outermost inwards. Without any, the function is
            called in each turn, and only what outlives the call is carried.
        top: the line above which they are at the top of a pass over batches, if they or what they call make one.
        gives: whether what the function yields or returns is a batch, or goes into a step otherwise.
        given: arguments, and other paths, to which its caller has given values; they count as carried.
        returned: what has run, for calls whose function has no path here, as ``phases[i].step()``.
    """

    def __init__(
        self,
        function: Function,
        values: RunningValues,
        named: Named,
        helpers: Mapping[str, Helper],
        *,
        turns: Sequence[ast.For | ast.While] = (),
        top: int = 0,
        gives: bool = False,
        given: Collection[str] = (),
        returned: Returned = MappingProxyType({}),
    ) -> None:
        self.found = Carries()
        self._function = function
        self._given = {*given}
        self._returned = returned
        self._values = values
        self._value_of = values.of
        self._named = named
        self._turns = turns
        self._top = top
        self._helpers = helpers
        self._gives = gives
        self._within: dict[str, Flow] = {}  # see `_inside`
        self._lines = dict.fromkeys(given, 0) | self._assigned_in(turns or [function])
        self._candidates: dict[ast.AST, list[str]] = {}  # by loop, what an earlier turn of it leaves
        self._state: dict[str, Origins] = {}
        self._loops: list[ast.AST] = []
        self._counting: set[ast.AST] = set()  # turns that the script counts, and not the hook
        self._decided: Origins = NONE  # what decides whether this statement runs
        self._told: dict[str, Origins] = {}  # by object, what decides whether it is told something
        self._evaluated: set[str] = set()  # modules that are in eval mode here
        self._is_graded = True
        self._parts: set[str] = set()  # variables of loops over what is trained
        self._shared = globals_of(function)
        self._taken = taken_in(parts_of(function))
        outside = (lambda path: False) if turns else outlives(function)
        for _ in range(1 if turns else 2):  # what a call leaves reaches the next one
            self._state = {path: origins for path, origins in self._state.items() if outside(path)}
            self._carry([*filter(outside, self._lines), *self._given])
            self._block(function.body)
            self._reaches(frozenset(filter(self._feeds, self._state)))

    def _assigned_in(self, nodes: Iterable[ast.AST]) -> dict[str, int]:
        """As `assigned_in`, with what the functions assign that are called there."""
        nodes = list(nodes)
        found = assigned_in(nodes, lambda path: self._value_of(path) is not None)
        for path in called_in(nodes):
            found = (self._helpers[path].writes if path in self._helpers else {}) | found
        return found

    def _carry(self, paths: Iterable[str]) -> None:
        for path in paths:
            if root_of(path) != path and self._value_of(root_of(path)) is MISSING:
                continue  # no turn has come there
            if not self._named.has(self._values, path):
                self._state[path] = self._state.get(path, NONE) | {path}

    # ------------------------------------------------------------------ statements

    def _block(self, body: Iterable[ast.stmt]) -> None:
        decided = self._decided
        for statement in body:
            if isinstance(statement, ast.If) and (settled := self._settled(statement.test)) is not None:
                self._block(statement.body if settled else statement.orelse)
            elif isinstance(statement, ast.If):
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
                if isinstance(node.target, ast.Subscript | ast.Attribute) and self._is_trained(node.target.value):
                    self._note_again(node.lineno)
                self._assign(node.target, self._expression(node.value) | self._origins(node.target))
            case ast.For() | ast.AsyncFor() | ast.While():
                self._loop(node)
            case ast.With() | ast.AsyncWith():
                is_graded = self._is_graded
                for item in node.items:
                    self._is_graded &= _last_name(getattr(item.context_expr, "func", node)) not in GRADELESS
                    origins = self._expression(item.context_expr)
                    if item.optional_vars is not None:
                        self._assign(item.optional_vars, origins)
                self._block(node.body)
                self._is_graded = is_graded
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
                found = [self._expression(each) for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]
                if isinstance(node, ast.Return) and self._turns and self._loops:
                    self._reaches(self._decided)
                elif isinstance(node, ast.Return) and self._gives and found:
                    self._reaches(self._decided.union(*found))

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
                self._counting |= {node} & {*self._turns}
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
        if _seeds(self._value_of(path_of(node.iter))):
            self._reaches(self._decided)
        calls = [each for each in ast.walk(node.iter) if isinstance(each, ast.Call)]
        if is_turn and not origins & KNOWN_TO_US:
            self._counting.add(node)
        is_range = _is_range(self._value_of(path_of(node.iter))) or {"range", "trange"} & set(map(name_of_call, calls))
        if node in self._counting and is_range:
            self.found.counts.add(node.lineno)
        self.found.passes |= is_turn and bool(origins & PASS)
        if not TRAINED.isdisjoint(map(_last_name, ast.walk(node.iter))) or any(map(self._is_part, ast.walk(node.iter))):
            self._parts |= {each.id for each in ast.walk(node.target) if isinstance(each, ast.Name)}
        self._assign(node.target, origins)
        counted = next(filter(self._is_enumerate, calls), None)
        is_target = counted is not None and is_turn and node.lineno == self._top
        if counted is not None and is_target and isinstance(node.target, ast.Tuple):
            begins = [*counted.args[1:], *(each.value for each in counted.keywords)]
            goes_on = any(name_of_call(each) == "enumerate" and isinstance(each.func, ast.Attribute) for each in calls)
            if not goes_on and not any(self._expression(each) & PLACE for each in begins):
                self._assign(node.target.elts[0], frozenset({NUMBER}))

    def _is_part(self, node: ast.AST | None) -> bool:
        """Whether it is a variable of a loop over what is trained, or is read from one."""
        return isinstance(node, ast.expr) and root_of(innermost_path(node)) in self._parts

    def _is_enumerate(self, call: ast.Call) -> bool:
        """Whether it calls the built-in function, by whatever name."""
        path = path_of(call.func)
        called = self._value_of(path)
        return called is enumerate or (called is MISSING and path == "enumerate")

    def _choose(self, node: ast.If) -> Origins:
        """Returns where what is tested comes from."""
        tested = self._expression(node.test)
        if tested & KNOWN_TO_US and any(isinstance(each, ast.Continue) for each in node.body):
            self.found.skips |= bool(self._loops) and self._loops[-1] in self._counting
        if any(isinstance(each, ast.Break | ast.Return) for each in node.body):
            asked = [each.func for each in ast.walk(node.test) if isinstance(each, ast.Call)]
            tested = tested.union(*(self._told.get(path_of(each).rpartition(".")[0], NONE) for each in asked))
        self._either([node.body, node.orelse], tested)
        return tested

    def _settled(self, test: ast.expr) -> bool | None:
        """What an option says that no turn changes, such as ``args.dry_run``; None: it is no option."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self._settled(test.operand)
            return None if inner is None else not inner
        path = path_of(test)
        value = self._value_of(path)
        changes = any(each in self._lines or self._state.get(each) for each in (path, *owners_of(path)))
        return bool(value) if isinstance(value, bool | None) and not changes else None

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

    def _feeds(self, path: str) -> bool:
        """Whether it belongs to what data is read through, and is no part of the place there."""
        owners = [self._value_of(each) for each in owners_of(path)]
        is_of_data = any(isinstance(each, DataLoader | Dataset | Sampler) for each in owners)
        return is_of_data and not self._named.has(self._values, path)

    def _note_again(self, line: int) -> None:
        """What is trained is changed here by what it was. At the top of a pass, note it: a restart that goes on in the
        middle of that pass does it again."""
        if line < self._top and any(each in self._turns for each in self._loops):
            self.found.again.add(line)

    def _is_trained(self, node: ast.expr) -> bool:
        """Whether it is a model, an optimizer or a part of one."""
        return _trains(self._value_of(path_of(node))) or self._is_part(node)

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
            is_part = changed is MISSING and (path.endswith(("['lr']", ".grad")) or self._is_part(target.value))
            if _trains(changed) or is_part:
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
        nodes = list(ast.walk(node))
        bound = {path_of(each) for each in bound_in(nodes)}
        entered = {each.value for each in nodes if isinstance(each, ast.Attribute | ast.Subscript)}
        of_pass = {each.value for each in nodes if isinstance(each, ast.Attribute) and each.attr == "epoch"}
        for each in nodes:
            path = path_of(each)
            if path and root_of(path) not in bound:
                found |= self._state.get(path, NONE)
                if each not in entered:  # a container is used whole, or an object of the script
                    parts = (f"{path}[", f"{path}.") if path != "self" else (f"{path}[",)
                    found = found.union(*(self._state[inner] for inner in self._state if inner.startswith(parts)))
                value = self._value_of(path)
                if is_ours(value):
                    found |= PASS if each in of_pass else PLACE
                elif isinstance(value, FED):
                    self._lines.setdefault(path, getattr(each, "lineno", 0))
                    found.add(path)
                elif callable(value) and not isinstance(value, type | torch.nn.Module):
                    found |= self._read_through(*read_by(path, value, self._shared))
            if isinstance(each, ast.Call) and self._value_of(path_of(each.func)) is MISSING:
                others = self._returned.get((self._function, name_of_call(each)), {})
                self._lines = {**others, **self._lines}
                found |= others.keys()
        return frozenset(found)

    def _read_through(self, roots: Collection[str], attributes: Collection[str]) -> Origins:
        """What is read by whoever knows these paths, and reads only these attributes."""

        def is_read(path: str) -> bool:
            inner = [path[len(root) :] for root in roots if path == root or path.startswith((f"{root}.", f"{root}["))]
            return any(set(re.findall(r"\.(\w+)", each)).issubset(attributes) for each in inner)

        return NONE.union(*(origins for path, origins in self._state.items() if is_read(path)))

    def kept(self) -> dict[str, int]:
        """What the function updates from what it was, and so keeps for others, too; with lines."""
        return {path: line for path, line in self._lines.items() if line and path in self._state.get(path, NONE)}

    def is_read_in(self, code: CodeType) -> None:
        """A function that torch calls for a step reads what this one leaves."""
        self._reaches(self._read_through(*read_in(code, self._shared)))

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
        trains = _trains(called) or _trains(owner)
        if not self._is_graded and isinstance(called, torch.nn.Module):
            trains = self._is_training(function) and any(each._buffers for each in called.modules())
        adds = function in self._helpers and any(map(_adds_parameters, ast.walk(self._helpers[function].function)))
        moves_on = name == "step" and isinstance(owner, LRScheduler)
        if adds or moves_on or (_adds_parameters(node) and trains):
            self._note_again(node.lineno)
        if receiver is not None and self._is_in_turn:
            root = root_of(innermost_path(receiver))
            path = path_of(receiver) if name in UPDATES else taken_at(self._taken, root, node.lineno)
            if (name in UPDATES or name.endswith("_")) and self._named.is_foreign(self._value_of(path)):
                self.found.updated.setdefault(path, node.lineno)
        if receiver is not None and isinstance(owner, torch.nn.Module) and name in ("eval", "train"):
            change = self._evaluated.add if name == "eval" else self._evaluated.discard
            change(path_of(receiver))
        if self._decided and (path := path_of(receiver or node)) and not ASIDE.search(name.lower()):
            self._told[path] = self._told.get(path, NONE) | self._decided
        if self._decided and self._leaves_traces(node, function, given):
            self._reaches(self._decided)
        if ASIDE.search(name.lower()):
            return
        of_user = isinstance(called, FunctionType | MethodType) and is_users_own(called) and not is_ours(owner)
        takes = of_user and any(_trains(self._value_of(path_of(each))) for each in given)
        if (helper := self._helpers.get(function)) is not None:
            by_name = dict(zip(helper.arguments, node.args, strict=False))
            by_name |= {each.arg: each.value for each in node.keywords if each.arg}
            if self._is_in_turn:
                self._note_updated(helper, by_name, node.lineno)
            inside = self._inside(function, helper)
            for path in inside.used():
                if path in by_name:
                    self._reaches(self._origins(by_name[path]))
                elif path not in helper.arguments:
                    self._reaches(self._state.get(helper.called_outside(path), NONE))
            for path in self._state.keys() & map(helper.called_outside, inside.renewed() - {*helper.arguments}):
                self._state[path] = self._decided
        is_gradient = isinstance(receiver, ast.Attribute) and receiver.attr == "grad"
        in_place = name.endswith("_")
        sets_part = in_place and (is_gradient or self._is_part(receiver))
        if name in TRAINS_BY or trains or takes or sets_part:
            self._reaches(frozenset().union(*map(self._origins, given)))
        acts = name in ACTS and (trains or owner is MISSING or isinstance(owner, torch.Tensor))
        if receiver is not None and (acts or name == "backward") and (chosen := self._origins(receiver) - KNOWN_TO_US):
            which = {path_of(receiver)} & self._lines.keys() if _trains(owner) else ()  # one of several
            self._reaches(chosen.union(which))
        if acts or takes or sets_part or (in_place and isinstance(owner, torch.Tensor)):
            self._reaches(self._decided)

    def _leaves_traces(self, node: ast.Call, function: str, given: Iterable[ast.expr]) -> bool:
        """Whether a call, however little it has to do with the training, changes what later steps compute if it comes
        at another time: it draws random numbers, as every new iterator of a loader does, or runs a module in training
        mode that draws or changes buffers."""
        called = self._value_of(function)
        if isinstance(called, torch.nn.Module):
            return self._is_training(function) and any(_rate_of(each) or each._buffers for each in called.modules())
        if DRAWS.search(name_of_call(node).lower()) or any(_seeds(self._value_of(path_of(each))) for each in given):
            return True
        helper = self._helpers.get(function)
        return helper is not None and helper.reads(_seeds)

    def _is_training(self, module: str) -> bool:
        return self._value_of(module).training and module not in self._evaluated

    def _note_updated(self, helper: Helper, given: Mapping[str, ast.expr], line: int) -> None:
        """Note which of the modules that are given to a helper it updates, as what fills a target network does."""
        values = {name: self._value_of(path_of(each)) for name, each in given.items()}
        if any(map(self._named.is_foreign, values.values())):
            found = Flow(helper.function, helper.values.given(values), self._named, helper.calls).found
            for path in given.keys() & found.updated.keys():
                self.found.updated.setdefault(path_of(given[path]), line)

    def _inside(self, called: str, helper: Helper) -> Flow:
        """Follows its arguments, and the paths that are assigned here, through a helper, by its own paths."""
        if called not in self._within:
            inside = (helper.called_inside(path, self._shared) for path in self._lines)
            given = {*helper.arguments, *inside} - {""}
            known, returned = helper.values, self._returned
            flow = Flow(helper.function, known, self._named, helper.calls, given=sorted(given), returned=returned)
            self._within[called] = flow
        return self._within[called]

    def used(self) -> set[str]:
        """The given paths that reach a step."""
        return self._given & self.found.carried.keys()

    def renewed(self) -> set[str]:
        """The given paths that each call sets anew, whatever they were, as what resets an environment does."""
        ends = {each for each in parts_of(self._function) if isinstance(each, ast.Return | ast.Yield | ast.YieldFrom)}
        if ends - {*self._function.body[-1:]}:
            return set()  # a call may end before it comes to them, or be only the first part of the function
        return {path for path in self._given if path in self._state and not self._state[path]}

    def _reaches(self, origins: Origins) -> None:
        """A value reaches a step."""
        for each in origins - KNOWN_TO_US:
            if each == NUMBER:
                self.found.numbered = True
            else:
                self.found.carried.setdefault(each, self._lines.get(each, 0))


def _trains(value: Any) -> bool:
    """Whether an object is a model, an optimizer, a part of one, a schedule, or what data is read through, or a method
    of such."""
    owner = getattr(value, "__self__", value) if isinstance(value, MethodType) else value
    if isinstance(owner, torch.nn.Module | torch.optim.Optimizer | torch.nn.Parameter | DataLoader | Dataset | Sampler):
        return True
    if isinstance(owner, dict):
        return "params" in owner and "lr" in owner
    return package_of(type(owner).__module__) == "torch" and hasattr(owner, "optimizer")


def _is_range(value: Any) -> bool:
    """Whether a value is a range, or tqdm's bar around one."""
    return isinstance(getattr(value, "__dict__", {}).get("iterable", value), range)


def _seeds(value: Any) -> bool:
    """Whether a value is a loader whose iterators draw their seeds from torch's global generator, or, as Fabric's is,
    an object around one."""
    inner = getattr(value, "__dict__", {}).values() if hasattr(type(value), "__iter__") else ()
    return any(isinstance(each, DataLoader) and each.generator is None for each in (value, *inner))


def _adds_parameters(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and name_of_call(node) == "add_param_group"


def _rate_of(module: torch.nn.Module) -> float:
    return module.p if isinstance(module, torch.nn.modules.dropout._DropoutNd) else 0.0


def _last_name(node: ast.AST) -> str:
    """``c`` for ``a.b.c`` and for ``a["c"]``."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Subscript(slice=ast.Constant(value=str() as name)):
            return name
    return ""
