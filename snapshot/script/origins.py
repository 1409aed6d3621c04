"""Where the values of a function's variables come from, as of one of its statements.

A value is known by the names of the variables that an earlier turn left it in.
"""

from __future__ import annotations

import ast
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from holdfast.snapshot.script.running import FED, MISSING, Named, Reading, RunningValues
from holdfast.snapshot.script.syntax import Function, bound_in, globals_of, owners_of, path_of, root_of
from holdfast.snapshot.state.walk import is_ours

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


class Trace:
    """The origins of the values in the variables of one function.

    Args:
        function: its source.
        values: the values of its variables as it runs.
        named: what is captured, or is no state.
        lines: the paths that are followed, with the first line that assigns each.
        returned: what the result of a call, whose function is not followed here, or of a property depends on: paths of
            the script, with lines.
        given_by: what the result of the function in a path depends on, beside its arguments.

    Attributes:
        now: by path, the origins of its value at the statement that has been reached.
        lines: as given, with those that came from other functions.
        shared: names of the function's that are those of its module.
    """

    def __init__(
        self,
        function: Function,
        values: RunningValues,
        named: Named,
        lines: Mapping[str, int],
        returned: Callable[[ast.Call | ast.Attribute], Mapping[str, int]],
        given_by: Callable[[str, Any], Origins],
    ) -> None:
        self.now: dict[str, Origins] = {}
        self.lines = {**lines}
        self.shared = globals_of(function)
        self._function = function
        self._values = values
        self._named = named
        self._returned = returned
        self._given_by = given_by

    def carry(self, paths: Iterable[str]) -> None:
        """An earlier turn, or call, left values in these paths."""
        for path in paths:
            if root_of(path) != path and self._values.of(root_of(path)) is MISSING:
                continue  # no turn has come there
            if not self._named.has(self._values, path):
                self.add(path, frozenset({path}))

    def at(self, path: str) -> Origins:
        """The origins of the value in a path."""
        return self.now.get(path, NONE)

    def add(self, path: str, origins: Origins) -> None:
        """The value in a path depends on more."""
        self.now[path] = self.at(path) | origins

    def set(self, path: str, origins: Origins) -> None:
        """Another value is in a path now."""
        self.now[path] = origins

    def lines_of(self, origins: Origins) -> dict[str, int]:
        """The paths among these origins, with lines."""
        return {path: self.lines[path] for path in origins & self.lines.keys()}

    def know(self, lines: Mapping[str, int]) -> Origins:
        """There are these paths of the script, too."""
        self.lines = {**lines, **self.lines}
        return frozenset(lines)

    def keep(self, is_kept: Callable[[str], bool]) -> None:
        """What is in other paths is gone."""
        self.now = {path: origins for path, origins in self.now.items() if is_kept(path)}

    def either(self, ways: Iterable[tuple[Callable[[], None], bool]]) -> None:
        """One of these runs: a value may come from what any of them leaves. With each, whether what follows runs, too:
        not if it ends in an error."""
        before, left = self.now, list[dict[str, Origins]]()
        for way, is_followed in ways:
            self.now = dict(before)
            way()
            if is_followed:
                left.append(self.now)
        self.now = {} if left else before
        for path, origins in (each for now in left for each in now.items()):
            self.add(path, origins)

    def forget_parts(self, path: str) -> None:
        """Another object is in a path now."""
        for inner in [each for each in self.now if each != path and root_of(each) == path]:
            del self.now[inner]

    def of(self, node: ast.AST) -> Origins:
        """Where the value of an expression comes from."""
        found: set[str] = set()
        nodes = list(ast.walk(node))
        bound = {path_of(each) for each in bound_in(nodes)}
        entered = {each.value for each in nodes if isinstance(each, ast.Attribute | ast.Subscript)}
        asked = {each.value for each in nodes if isinstance(each, ast.Attribute) and self._is_container(each.value)}
        called = {each.func for each in nodes if isinstance(each, ast.Call)}
        got = dict(filter(None, map(_got_by, nodes)))
        of_pass = {each.value for each in nodes if isinstance(each, ast.Attribute) and each.attr == "epoch"}
        for each in nodes:
            path = path_of(each)
            if path and root_of(path) not in bound:
                found |= self.at(path)
                if each in asked and each in got:
                    found |= self.at(path_of(ast.Subscript(each, got[each])))
                elif each in asked or each not in entered:  # a container is used whole, or an object of the script
                    parts = (f"{path}[", f"{path}.") if path != "self" else (f"{path}[",)
                    found = found.union(*(self.now[inner] for inner in self.now if inner.startswith(parts)))
                value = self._values.of(path)
                if is_ours(value):
                    found |= PASS if each in of_pass else PLACE
                elif isinstance(value, FED):
                    self.lines.setdefault(path, getattr(each, "lineno", 0))
                    found.add(path)
                elif callable(value) and not isinstance(value, type | torch.nn.Module):
                    found |= self._given_by(path, value)
            if isinstance(each, ast.Call) or (isinstance(each, ast.Attribute) and each not in called):
                found |= self.know(self._returned(each))
        return frozenset(found)

    def _is_container(self, node: ast.expr) -> bool:
        path = path_of(node)
        return bool(path) and isinstance(self._values.of(path), dict | list | set | deque)

    def of_all(self, nodes: Iterable[ast.AST]) -> Origins:
        """As `of`, for several expressions."""
        return NONE.union(*map(self.of, nodes))

    def read_through(self, reading: Reading) -> Origins:
        """What is read by whoever knows some paths, and reads only some attributes."""
        roots, attributes = reading

        def is_read(path: str) -> bool:
            inner = [path[len(root) :] for root in roots if path == root or path.startswith((f"{root}.", f"{root}["))]
            return any(set(re.findall(r"\.(\w+)", each)).issubset(attributes) for each in inner)

        return NONE.union(*(origins for path, origins in self.now.items() if is_read(path)))

    def option(self, test: ast.expr) -> bool | None:
        """What an option says that no turn changes, such as ``args.dry_run``; None: it is no option."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.option(test.operand)
            return None if inner is None else not inner
        path = path_of(test)
        value = self._values.of(path)
        changes = any(each in self.lines or self.at(each) for each in (path, *owners_of(path)))
        return bool(value) if isinstance(value, bool | None) and not changes else None

    def feeds(self, path: str) -> bool:
        """Whether it belongs to what data is read through, and is no part of the place there."""
        owners = [self._values.of(each) for each in owners_of(path)]
        is_of_data = any(isinstance(each, DataLoader | Dataset | Sampler) for each in owners)
        return is_of_data and not self._named.has(self._values, path)


def _got_by(node: ast.AST) -> tuple[ast.AST, ast.expr] | None:
    """What ``d.get("a")`` asks, of whatever kind, and for which key."""
    match node:
        case ast.Call(func=ast.Attribute(value=asked, attr="get"), args=[key, *_]):
            return asked, key
    return None
