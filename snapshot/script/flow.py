"""Follows what an earlier turn left in variables to where a step depends on it, by the structure of the source.

`Flow` takes a loop to run at least once.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FunctionType, MappingProxyType, MethodType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from holdfast.snapshot.script.anew import counted_anew, goes_over_numbers
from holdfast.snapshot.script.origins import KNOWN_TO_US, NONE, PASS, PLACE, Origins, Returned, Trace
from holdfast.snapshot.script.running import (
    MISSING,
    Helper,
    Named,
    RunningValues,
    assigned_by,
    read_by,
    read_in,
    renamed,
)
from holdfast.snapshot.script.syntax import (
    ASIDE,
    Function,
    as_run,
    calls_in,
    changed_by,
    ends_in_error,
    innermost_path,
    name_of_call,
    outlives,
    parts_of,
    path_of,
    root_of,
    taken_at,
    taken_in,
)
from holdfast.snapshot.script.trained import Trained, adds_parameters, seeds, trains
from holdfast.snapshot.state.walk import is_ours, is_users_own

NUMBER = "<number of a batch>"
"""Origin of what the built-in ``enumerate`` counts."""

ACTS = frozenset({"step", "backward", "load_state_dict", "add_param_group", "requires_grad_"})
"""Methods with which a script trains. Which of them are called, may depend on a value, too."""

UPDATES = frozenset({"update", "update_parameters", "load_state_dict"})
"""Methods that change a module."""

TRAINS_BY = frozenset(
    {"backward", "grad", "clip_grad_norm_", "clip_grad_value_", "manual_seed", "manual_seed_all", "seed"}
)
"""Functions whose arguments decide what a step does."""


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
        attributes: names of carried attributes of modules, with the ids of these.
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
    attributes: set[tuple[int, str]] = field(default_factory=set)
    counts: set[int] = field(default_factory=set)
    again: set[int] = field(default_factory=set)
    numbered: bool = False
    passes: bool = False
    skips: bool = False
    is_called: bool = False

    def rename(self, called: Callable[[str], str]) -> None:
        """Call everything by another name; what has none, as its name is empty, is left out."""
        for paths in (self.carried, self.objects, self.environments, self.iterators, self.updated):
            named = renamed(paths, called)
            paths.clear()
            paths.update(named)
        self.mixed = {called(path) for path in self.mixed} - {""}

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
        self.called: set[str] = set()  # the paths of calls that no option leaves out
        self.passed_on: dict[str, int] = {}  # of what its own turns carry, what its result depends on, with lines
        self._function = function
        self._given = {*given}
        self._returned = returned
        self._value_of = values.of
        self._named = named
        self._turns = turns
        self._top = top
        self._helpers = helpers
        self._gives = gives
        self._within: dict[tuple[str, bool], Flow] = {}  # see `_inside`
        lines = dict.fromkeys(given, 0) | assigned_by(turns or [function], helpers, values.of)
        self._trace = Trace(function, values, named, lines, self._returned_by, self._given_by)
        self._trained = Trained(values)
        self._candidates: dict[ast.AST, list[str]] = {}  # by loop, what an earlier turn of it leaves
        self._loops: list[ast.AST] = []
        self._is_over = False  # the loop that the steps are in
        self._counting: set[ast.AST] = set()  # turns that the script counts, and not the hook
        self._decided: Origins = NONE  # what decides whether this statement runs
        self._told: dict[str, Origins] = {}  # by object, what decides whether it is told something
        self._taken = taken_in(parts_of(function))
        outside = (lambda path: False) if turns else outlives(function)
        for _ in range(1 if turns else 2):  # what a call leaves reaches the next one
            self._trace.keep(outside)
            self._trace.carry([*filter(outside, self._trace.lines), *self._given])
            self._block(function.body)
            self._is_over = False
            self._reaches(frozenset(filter(self._trace.feeds, self._trace.now)))

    # ------------------------------------------------------------------ statements

    def _block(self, body: Iterable[ast.stmt]) -> None:
        decided = self._decided
        for statement in body:
            if isinstance(statement, ast.If) and (settled := self._trace.option(statement.test)) is not None:
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
                if isinstance(node.target, ast.Subscript | ast.Attribute) and self._trained.has(node.target.value):
                    self._note_again(node.lineno)
                self._assign(node.target, self._expression(node.value) | self._trace.of(node.target))
            case ast.For() | ast.AsyncFor() | ast.While():
                self._loop(node)
            case ast.With() | ast.AsyncWith():
                with self._trained.block():
                    for item in node.items:
                        self._trained.enter(item.context_expr)
                        entered = self._returned.get((self._function, "__enter__"), {})
                        origins = self._expression(item.context_expr) | self._trace.know(entered)
                        if item.optional_vars is not None:
                            self._assign(item.optional_vars, origins)
                    self._block(node.body)
            case ast.Try():
                self._block(node.body)
                self._either([*([handler.body for handler in node.handlers]), []])
                self._block([*node.orelse, *node.finalbody])
            case ast.Match():
                self._either([case.body for case in node.cases], self._expression(node.subject))
            case ast.Break() | ast.Continue():
                self._jump(isinstance(node, ast.Continue))
            case _:
                found = [self._expression(each) for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]
                if isinstance(node, ast.Return) and self._turns:
                    self.passed_on |= self._trace.lines_of(self._decided.union(*found))
                    if self._loops:
                        self._reaches(self._decided)
                elif isinstance(node, ast.Return) and self._gives and found:
                    self._reaches(self._decided.union(*found))

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While) -> None:
        is_turn = node in self._turns
        if is_turn and node not in self._candidates:
            known = {path for path, origins in self._trace.now.items() if origins & KNOWN_TO_US}
            assigned = assigned_by([as_run(node, self._trace.option)], self._helpers, self._value_of)
            self._candidates[node] = [path for path in assigned if path not in known]
        self._loops.append(node)
        for _ in range(2):  # what a turn leaves reaches the next one
            if is_turn:
                self._trace.carry(self._candidates[node])
            if isinstance(node, ast.While):
                self._counting |= {node} & {*self._turns}
                tested = self._expression(node.test)
                if is_turn:
                    self._reaches(tested)
            else:
                self._each_of(node, is_turn)
            self._block(node.body)
        self._loops.pop()
        self._is_over |= node in self._turns[:1]
        self._block(node.orelse)

    def _each_of(self, node: ast.For | ast.AsyncFor, is_turn: bool) -> None:
        origins = self._expression(node.iter)
        if seeds(self._value_of(path_of(node.iter))):
            self._reaches(self._decided)
        if is_turn and not origins & KNOWN_TO_US:
            self._counting.add(node)
        if node in self._counting and goes_over_numbers(node.iter, self._value_of):
            self.found.counts.add(node.lineno)
        if is_turn and origins & PLACE and "steps" in map(name_of_call, calls_in([node.iter])):
            self.found.counts.clear()  # of the loops around it: the hook goes on counting, and they come to its place
        self.found.passes |= is_turn and bool(origins & PASS)
        self._trained.loop(node.target, node.iter)
        self._assign(node.target, origins)
        if is_turn and node.lineno == self._top:
            for part, path in counted_anew(node.target, node.iter, self._value_of, self._expression):
                self._assign(part, self._trace.know({path: node.lineno}) if path else frozenset({NUMBER}))

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

    def _either(self, bodies: Iterable[list[ast.stmt]], tested: Origins = NONE) -> None:
        """One of these blocks runs, as what was `tested` decides."""
        decided = self._decided
        self._decided |= tested
        self._trace.either((partial(self._block, body), not ends_in_error(body)) for body in bodies)
        self._decided = decided

    def _note_again(self, line: int) -> None:
        """What is trained is changed here by what it was. At the top of a pass, note it: a restart that goes on in the
        middle of that pass does it again."""
        if line < self._top and any(each in self._turns for each in self._loops):
            self.found.again.add(line)

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
            self._trace.forget_parts(path)
        elif isinstance(target, ast.Attribute | ast.Subscript):
            self._reaches(self._trained.set_from(target, origins))
            if not path:
                origins |= self._expression(target.slice) if isinstance(target, ast.Subscript) else NONE
                path = innermost_path(target)
                origins |= self._trace.at(path)
        if path:
            self._trace.set(path, origins)

    @property
    def _is_in_turn(self) -> bool:
        return not self._turns or any(each in self._turns for each in self._loops)

    # ------------------------------------------------------------------ expressions

    def _expression(self, node: ast.expr) -> Origins:
        """Where its value comes from. Looks at the calls in it."""
        for each in ast.walk(node):
            if isinstance(each, ast.Call):
                self._call(each)
            elif isinstance(each, ast.NamedExpr):
                self._assign(each.target, self._trace.of(each.value))
            elif isinstance(each, ast.Yield | ast.YieldFrom) and each.value is not None and self._gives:
                self._reaches(self._trace.of(each.value) | self._decided)
        return self._trace.of(node)

    def _given_by(self, path: str, function: Any) -> Origins:
        """What the result of a function depends on, beside its arguments. Of one that cannot be followed: whatever it
        reads."""
        helper = self._helpers.get(path)
        if helper is None:
            return self._trace.read_through(read_by(path, function, self._trace.shared))
        inside = self._inside(path, helper, gives=True)
        used = inside.used() - {*helper.arguments}
        own = {each: line for each, line in inside.found.carried.items() if each not in inside._given}
        named = partial(helper.called_in_script, module=self._value_of("__name__"))
        outside = [self._trace.at(helper.called_outside(each)) for each in used]
        return self._trace.know(renamed(own, named)).union(*outside)

    def _returned_by(self, call: ast.Call | ast.Attribute) -> Mapping[str, int]:
        """What the result of a call, or a property, depends on, by what has run; if its function is followed here, what
        that keeps in its arguments."""
        if isinstance(call, ast.Attribute):
            return self._returned.get((self._function, call.attr), {})
        called = path_of(call.func)
        if (helper := self._helpers.get(called)) is not None:
            kept = renamed(self._inside(called, helper, gives=True).found.carried, partial(helper.in_given, call))
            return {**kept, **helper.passes_on}
        return self._returned.get((self._function, name_of_call(call)), {})

    def kept(self) -> dict[str, int]:
        """What the function updates from what it was, and so keeps for others, too; with lines."""
        return {path: line for path, line in self._trace.lines.items() if line and path in self._trace.at(path)}

    def is_read_in(self, code: CodeType) -> None:
        """A function that torch calls for a step reads what this one leaves."""
        self._reaches(self._trace.read_through(read_in(code, self._trace.shared)))

    def _call(self, node: ast.Call) -> None:
        name = name_of_call(node)
        given = [*node.args, *(each.value for each in node.keywords)]
        if (changed := changed_by(node)) is not None and (path := path_of(changed)):
            self._trace.add(path, self._decided | self._trace.of_all(given))
        function = path_of(node.func)
        self.called.add(function)
        called = self._value_of(function)
        receiver = node.func.value if isinstance(node.func, ast.Attribute) else None
        owner = MISSING if receiver is None else self._value_of(path_of(receiver))
        does_train = self._trained.by_call(function, owner)
        adds = function in self._helpers and any(map(adds_parameters, ast.walk(self._helpers[function].function)))
        moves_on = name == "step" and isinstance(owner, LRScheduler)
        if adds or moves_on or (adds_parameters(node) and does_train):
            self._note_again(node.lineno)
        if receiver is not None and self._is_in_turn:
            root = root_of(innermost_path(receiver))
            path = path_of(receiver) if name in UPDATES else taken_at(self._taken, root, node.lineno)
            if (name in UPDATES or name.endswith("_")) and self._named.is_foreign(self._value_of(path)):
                self.found.updated.setdefault(path, node.lineno)
        if receiver is not None and isinstance(owner, torch.nn.Module) and name in ("eval", "train"):
            self._trained.switch(path_of(receiver), name)
        if self._decided and (path := path_of(receiver or node)) and not ASIDE.search(name.lower()):
            self._told[path] = self._told.get(path, NONE) | self._decided
        if self._decided and self._trained.leaves_traces(node, self._helpers.get(function)):
            self._reaches(self._decided)
        if ASIDE.search(name.lower()):
            return
        of_user = isinstance(called, FunctionType | MethodType) and is_users_own(called) and not is_ours(owner)
        takes = of_user and any(trains(self._value_of(path_of(each))) for each in given)
        if (helper := self._helpers.get(function)) is not None:
            by_name = helper.given_in(node)
            if self._is_in_turn:
                self._note_updated(helper, by_name, node.lineno)
            inside = self._inside(function, helper)
            for path in inside.used():
                if path in by_name:
                    self._reaches(self._trace.of(by_name[path]))
                elif path not in helper.arguments:
                    self._reaches(self._trace.at(helper.called_outside(path)))
            for path in self._trace.now.keys() & map(helper.called_outside, inside.renewed() - {*helper.arguments}):
                self._trace.set(path, self._decided)
        is_gradient = isinstance(receiver, ast.Attribute) and receiver.attr == "grad"
        in_place = name.endswith("_")
        sets_part = in_place and (is_gradient or self._trained.has_part(receiver))
        if name in TRAINS_BY or does_train or takes or sets_part:
            self._reaches(self._trace.of_all(given))
        acts = name in ACTS and (does_train or owner is MISSING or isinstance(owner, torch.Tensor))
        follows = name == "backward" and helper is None
        if receiver is not None and (acts or follows) and (chosen := self._trace.of(receiver) - KNOWN_TO_US):
            which = {path_of(receiver)} & self._trace.lines.keys() if trains(owner) else ()  # one of several
            self._reaches(chosen.union(which))
        if acts or takes or sets_part or (in_place and isinstance(owner, torch.Tensor)):
            self._reaches(self._decided)

    def _note_updated(self, helper: Helper, given: Mapping[str, ast.expr], line: int) -> None:
        """Note which of the modules that are given to a helper it updates, as what fills a target network does."""
        values = {name: self._value_of(path_of(each)) for name, each in given.items()}
        if any(map(self._named.is_foreign, values.values())):
            found = Flow(helper.function, helper.values.given(values), self._named, helper.calls).found
            for path in given.keys() & found.updated.keys():
                self.found.updated.setdefault(path_of(given[path]), line)

    def _inside(self, called: str, helper: Helper, gives: bool = False) -> Flow:
        """Follows its arguments, and the paths that are assigned here, through a helper, by its own paths; with `gives`
        also to what it returns."""
        if (called, gives) not in self._within:
            inside = (helper.called_inside(path, self._trace.shared) for path in self._trace.lines)
            given = sorted({*helper.arguments, *inside} - {""})
            known, calls, returned = helper.values, helper.calls, self._returned
            flow = Flow(helper.function, known, self._named, calls, gives=gives, given=given, returned=returned)
            self._within[called, gives] = flow
        return self._within[called, gives]

    def used(self) -> set[str]:
        """The given paths that reach a step."""
        return self._given & self.found.carried.keys()

    def renewed(self) -> set[str]:
        """The given paths that each call sets anew, whatever they were, as what resets an environment does."""
        ends = {each for each in parts_of(self._function) if isinstance(each, ast.Return | ast.Yield | ast.YieldFrom)}
        if ends - {*self._function.body[-1:]}:
            return set()  # a call may end before it comes to them, or be only the first part of the function
        return {path for path in self._given if path in self._trace.now and not self._trace.now[path]}

    def _reaches(self, origins: Origins) -> None:
        """A value reaches a step. What follows the last one does not matter to any."""
        if self._is_over:
            return
        for each in origins - KNOWN_TO_US:
            if each == NUMBER:
                self.found.numbered = True
            else:
                self.found.carried.setdefault(each, self._trace.lines.get(each, 0))
