"""Questions about the source of a function: what it assigns, calls and changes, and which loops are where.

A *path* is the text of a variable, an attribute of one, or an entry under a text or an integer, as
``self.state['n']``. In a text, dots and brackets are escaped, so those of a path are where its parts begin. What only
other functions know has a path that begins with a dot: what the script calls it.
"""

from __future__ import annotations

import ast
import copy
import inspect
import linecache
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain
from pathlib import PurePath
from tokenize import TokenError
from types import CodeType
from typing import Any, Self

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module


class Line(int):
    """The number of a line, which as text also says in which file: the functions of a script are in several."""

    file: str

    def __new__(cls, number: int, file: str) -> Self:
        line = super().__new__(cls, number)
        line.file = file
        return line

    def __str__(self) -> str:
        return f"line {int(self)} of {self.file}"


MUTATES = frozenset(
    {"append", "appendleft", "extend", "extendleft", "add", "update", "setdefault", "insert", "subtract"}
    | {"send", "pop", "popleft", "popitem", "remove", "discard", "sort", "reverse", "rotate", "move_to_end"}
    | {"add_", "mul_", "sub_", "div_", "lerp_", "addcmul_"}
)
"""Methods that change a container, or a tensor by what it was."""

CHANGES_GIVEN = frozenset(
    {"shuffle", "heappush", "heappop", "heapreplace", "heappushpop", "heapify", "insort", "insort_left", "insort_right"}
)
"""Functions of libraries that change the container that they are given first."""


ASIDE = re.compile(
    "log|print|save|write|report|plot|show|eval|valid|test|sample|generat|display|record|dump|metric|check|image|visual"
)
"""A function with such a name looks at the training from the side."""


def path_of(node: ast.AST) -> str:
    """The path that an expression is, as ``self.state['n']``; else empty."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = path_of(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        inner = path_of(node.value)
        return f"{inner}[{key}]" if inner and (key := _escaped(node.slice.value)) else ""
    return ""


ESCAPES = {each: f"\\x{ord(each):02x}" for each in ".[]"}
"""How what divides a path is written within a key."""


def _escaped(key: object) -> str:
    return "".join(ESCAPES.get(each, each) for each in repr(key)) if isinstance(key, str | int) else ""


def shown(text: str) -> str:
    """A text with paths, as the script writes them."""
    for each, escape in ESCAPES.items():
        text = text.replace(escape, each)
    return text


def script_path(name: str) -> str:
    """The path, in any function, of what the script calls so."""
    return name if is_script_path(name) else f".{name}"


def is_script_path(path: str) -> bool:
    """Whether the script calls something so, and the function may have no name for it."""
    return path.startswith(".")


def script_name(path: str) -> str:
    """What the script calls it; a path of a function's own stays as it is."""
    return path.removeprefix(".")


def root_of(path: str) -> str:
    """The variable that a path begins at."""
    return re.split(r"[.\[]", path, maxsplit=1)[0]


def owners_of(path: str) -> list[str]:
    """The paths that a path goes through, from its variable inwards."""
    return [path[: each.start()] for each in re.finditer(r"[.\[]", path)]


def parts_of(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function but not of functions within it."""
    for each in ast.iter_child_nodes(function):
        if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield each
            yield from parts_of(each)


def as_run(node: ast.AST, option: Callable[[ast.expr], bool | None]) -> ast.AST:
    """The same without what options turn off. `option`: what an option says; None: it is no option."""

    def of_list(parts: Iterable[Any]) -> Iterator[Any]:
        for each in parts:
            settled = option(each.test) if isinstance(each, ast.If) else None
            if settled is not None:
                yield from of_list(each.body if settled else each.orelse)
            else:
                yield as_run(each, option) if isinstance(each, ast.AST) else each

    found = copy.copy(node)
    for name, value in ast.iter_fields(node):
        if isinstance(value, list):
            setattr(found, name, [*of_list(value)])
        elif isinstance(value, ast.AST):
            setattr(found, name, as_run(value, option))
    return found


def ends_in_error(body: Collection[ast.stmt]) -> bool:
    """Whether what follows these statements does not run after them."""
    return any(isinstance(each, ast.Raise) for each in body)


def loops_at(function: ast.AST, line: int) -> list[ast.For | ast.While]:
    """The loops of a function that `line` is in, from the outermost inwards."""
    found = [each for each in parts_of(function) if isinstance(each, ast.For | ast.While)]
    return [each for each in found if each.lineno <= line <= (each.end_lineno or 0)]


def called_in(nodes: Iterable[ast.AST]) -> list[str]:
    """The paths that are called, and those that are given to a call, which may call them, as a thread does."""
    return list(
        dict.fromkeys(path for each in calls_in(nodes) for path in (path_of(each.func), *given_to(each)) if path)
    )


def given_to(call: ast.Call) -> list[str]:
    """The paths that a call is given as they are."""
    given = [*call.args, *(each.value for each in call.keywords)]
    return [path for each in given if (path := path_of(each))]


def sources_in(nodes: Iterable[ast.AST]) -> set[str]:
    """The paths that are given to a call of ``data``."""
    calls = [each for each in calls_in(nodes) if name_of_call(each) == "data"]
    return {path for each in calls for given in each.args if (path := path_of(given))}


def stepped_in(nodes: Iterable[ast.AST]) -> dict[str, int]:
    """The paths of objects whose ``step`` is called, with the first line of each."""
    found: dict[str, int] = {}
    for each in calls_in(nodes):
        owner, _, name = path_of(each.func).rpartition(".")
        if owner and name == "step":
            found[owner] = min(found.get(owner, each.lineno), each.lineno)
    return found


def calls_in(nodes: Iterable[ast.AST]) -> list[ast.Call]:
    """The calls of anything."""
    return [each for top in nodes for each in (top, *parts_of(top)) if isinstance(each, ast.Call)]


def assigned_in(nodes: Iterable[ast.AST], may_change: Callable[[str], bool] = bool) -> dict[str, int]:
    """The paths that are assigned, or whose value is changed, and not put back, with the first line of each.
    `may_change`: whether what a path stands for may be changed in place, as None and numbers are not."""
    found: dict[str, int] = {}
    for top in nodes:
        lines: dict[str, list[int]] = {}
        parts = [top, *parts_of(top)]
        bound = bound_in(parts)
        held = taken_in(parts)
        for each in parts:
            if each in bound:
                continue
            if isinstance(each, ast.Name | ast.Attribute | ast.Subscript) and isinstance(each.ctx, ast.Store):
                paths = [innermost_path(each)]
            elif (changed := _changed_in(each)) is not None:
                paths = [innermost_path(changed)]
                if not may_change(paths[0]) and isinstance(each, ast.Call):
                    continue
                while (holder := taken_at(held, paths[-1], getattr(each, "lineno", 0))) not in ("", *paths):
                    if not may_change(holder):
                        break  # the variable gets a value of its own
                    paths.append(holder)
            else:
                continue
            for path in filter(None, paths):
                lines.setdefault(path, []).append(getattr(each, "lineno", 0))
        is_back = [
            path
            for path, name, put_back in _put_back_in(parts)
            if path in lines and max(lines[path]) == put_back and name in lines and max(lines[name]) < min(lines[path])
        ]
        for path in is_back:
            lines.pop(path, None)
        for path, changes in lines.items():
            found.setdefault(path, min(changes))
    return found


def _put_back_in(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str, int]]:
    """The paths that are assigned what a variable has kept of them, with that variable, and the line."""
    for body in [found for each in nodes if isinstance(found := getattr(each, "body", None), list)]:
        kept: dict[str, str] = {}
        for each in chain.from_iterable((one, *getattr(one, "finalbody", ())) for one in body):
            match each:
                case ast.Assign(targets=[target], value=ast.Name(id=name)) if name in kept:
                    if (path := path_of(target)) == kept[name]:
                        yield path, name, each.lineno
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if path := path_of(value):
                    kept[name] = path


Taken = Mapping[str, list[tuple[int, str]]]
"""By variable, the lines that give it a part of something, with the path of that: to change one changes it."""


def taken_in(nodes: Iterable[ast.AST]) -> Taken:
    """What the statements among these nodes give to variables."""
    found: dict[str, list[tuple[int, str]]] = {}
    for node in nodes:
        for name, path in _taken_by(node):
            found.setdefault(name, []).append((getattr(node, "lineno", 0), path))
    return found


def taken_at(taken: Taken, name: str, line: int) -> str:
    """What a variable is a part of at a line; empty if of nothing."""
    given = taken.get(name, [])
    paths = [path for begun, path in given if begun <= line] or [path for _, path in given]
    return paths[-1] if paths else ""


def _taken_by(node: ast.AST) -> Iterator[tuple[str, str]]:
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
        case ast.Tuple(elts=[_, part]), ast.Call(func=ast.Attribute(value=each, attr="items" | "named_parameters")):
            yield from _elements(part, each)
        case _, ast.Call(func=ast.Attribute(value=each, attr="values" | "parameters" | "buffers")):
            yield from _elements(target, each)
        case ast.Name(), ast.Name() | ast.Attribute() | ast.Subscript():
            yield target.id, innermost_path(whole)


def changed_by(call: ast.Call) -> ast.expr | None:
    """What a call changes: what it calls a method of, what it shuffles or sorts into, or an iterator that it reads
    on."""
    name = name_of_call(call)
    if (name in CHANGES_GIVEN or (name == "next" and isinstance(call.func, ast.Name))) and call.args:
        return call.args[0]
    return call.func.value if isinstance(call.func, ast.Attribute) and name in MUTATES else None


def _changed_in(node: ast.AST) -> ast.expr | None:
    if isinstance(node, ast.AugAssign):
        return node.target
    return changed_by(node) if isinstance(node, ast.Call) else None


def name_of_call(call: ast.Call) -> str:
    return path_of(call.func).rpartition(".")[2] or (call.func.attr if isinstance(call.func, ast.Attribute) else "")


def innermost_path(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript) and not path_of(node):
        node = node.value
    return path_of(node)


def bound_in(nodes: Iterable[ast.AST]) -> set[ast.AST]:
    """The variables of comprehensions, which are nobody else's."""
    return {part for each in nodes if isinstance(each, ast.comprehension) for part in ast.walk(each.target)}


def outlives(function: Function, *, in_arguments: bool = False) -> Callable[[str], bool]:
    """Whether what is assigned to a path is there when the function is called again. `in_arguments`: whether what was
    given counts, if it is changed in place: the caller may give it again."""
    if isinstance(function, ast.Module):
        return lambda path: True
    declared = _declared_in(function)
    arguments = {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}
    names = [each for each in parts_of(function) if isinstance(each, ast.Name)]
    own = {each.id for each in names if isinstance(each.ctx, ast.Store)} - declared

    def outlives(path: str) -> bool:
        root = root_of(path)
        return root not in own and (root != path or root not in arguments or in_arguments)

    return outlives


def goes_on(loop: ast.While) -> bool:
    """Whether a turn of a loop reads a variable before it sets that, and so goes on from the turn before."""
    set_at: dict[str, tuple[int | None, int | None]] = {}
    for each in (part for part in parts_of(loop) if isinstance(part, ast.Assign)):
        for name in (target.id for target in each.targets if isinstance(target, ast.Name)):
            set_at.setdefault(name, (each.end_lineno, each.end_col_offset))
    names = [part for part in parts_of(loop) if isinstance(part, ast.Name) and part.id in set_at]
    return any(isinstance(each.ctx, ast.Load) and (each.lineno, each.col_offset) < set_at[each.id] for each in names)


def globals_of(function: Function) -> set[str]:
    """Which names mean the same variables in a function and in others that read them as global ones."""
    if isinstance(function, ast.Module):
        return set(assigned_in(function.body))
    return _declared_in(function)


def _declared_in(function: Function) -> set[str]:
    """The names that a function says are those of variables around it."""
    return {name for each in parts_of(function) if isinstance(each, ast.Nonlocal | ast.Global) for name in each.names}


def function_of(code: CodeType, variables: dict[str, Any]) -> Function | None:
    """The source of a function, if there is any. `variables`: of its module, which may have its own loader."""
    linecache.getlines(code.co_filename, variables)
    return _parsed(code)


@lru_cache(maxsize=1024)
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
    ast.increment_lineno(module, first - 1 - is_within)
    file = PurePath(code.co_filename).name
    for node in ast.walk(module):
        if isinstance(node, ast.stmt | ast.expr):
            node.lineno = Line(node.lineno, file)
    if is_whole:
        return module
    outer = module.body[0]
    found = outer.body[0] if is_within and isinstance(outer, ast.If) else outer
    return found if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef) else None
