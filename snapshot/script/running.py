"""What the paths of running functions stand for, found without running any code of theirs: values, functions that are
called, and what is captured.
"""

from __future__ import annotations

import ast
import asyncio
import dis
import inspect
import multiprocessing.queues
import queue
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain
from types import CellType, CodeType, FunctionType, GeneratorType, MethodType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from holdfast.snapshot.copy.tensors import memory_of
from holdfast.snapshot.script.calls import LAMBDA, Call
from holdfast.snapshot.script.iterators import watched
from holdfast.snapshot.script.syntax import (
    Function,
    assigned_in,
    called_in,
    calls_in,
    function_of,
    given_to,
    goes_on,
    is_script_path,
    outlives,
    owners_of,
    parts_of,
    path_of,
    root_of,
    script_path,
)
from holdfast.snapshot.script.variables import is_users_frame
from holdfast.snapshot.state.adapter import Adapter
from holdfast.snapshot.state.hidden import keeps_uncaptured
from holdfast.snapshot.state.libraries import is_environment
from holdfast.snapshot.state.named import state_named_by
from holdfast.snapshot.state.walk import (
    is_installed,
    is_ours,
    is_plain,
    is_users_own,
    package_of,
    walk,
)

DEEPEST = 2
"""How many calls a helper is followed into."""

PLAIN = (type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set, deque)
"""Types of values that may be state. Those of other objects are looked at where they change."""

FIXED = (type(None), bool, int, float, complex, str, bytes)
"""Types of values that nothing changes: what looks so gives a variable another value."""

GRADIENT_PATHS = (".grad", ".main_grad")
"""How paths of gradients end, also of those that are added up beside torch's own."""

FED = (
    queue.Queue,
    queue.SimpleQueue,
    asyncio.Queue,
    multiprocessing.queues.Queue,
    multiprocessing.queues.SimpleQueue,
    Future,
)
"""Types of what other threads, tasks and processes leave something in for a step."""

UNNAMED = "<object>"
"""The path of an object for which there is no name yet."""

MISSING = object()
"""What `RunningValues.of` returns for a name that has no value now."""


class RunningValues:
    """The values of a running function's variables, by their `names`, found without running any code of theirs."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = names
        self._known: dict[str, Any] = {}

    def of(self, path: str) -> Any:
        """The value of a path, or `MISSING`."""
        if path not in self._known:
            is_own = path and not is_script_path(path)
            self._known[path] = self._at(ast.parse(path, mode="eval").body) if is_own else MISSING
        return self._known[path]

    def _at(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return self._names.get(node.id, MISSING)
        if isinstance(node, ast.Attribute):
            return _attribute(self._at(node.value), node.attr)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            return _entry(self._at(node.value), node.slice.value)
        return MISSING

    def given(self, values: Mapping[str, Any]) -> RunningValues:
        """The same, with these values of names."""
        return RunningValues({**self._names, **values})

    def with_closures_of(self, helpers: Iterable[Helper]) -> RunningValues:
        """The same, with the variables around the functions that are called, as far as these names are free."""
        around = {
            name: value for each in helpers for name in each.free if (value := each.values.of(name)) is not MISSING
        }
        return RunningValues({**around, **self._names})

    def whole(self, path: str) -> str:
        """The path of the tensor or array that an entry is a part of; of anything else, its own path."""
        owner = path.rpartition("[")[0]
        return owner if path.endswith("]") and isinstance(self.of(owner), torch.Tensor | np.ndarray) else path


def _attribute(owner: Any, name: str) -> Any:
    held = getattr(owner, "__dict__", {}) if not isinstance(owner, type) else {}
    if name in held:
        return held[name]
    if isinstance(owner, torch.nn.Module):
        for table in (owner._modules, owner._parameters, owner._buffers):
            if name in table:
                return table[name]
    found = inspect.getattr_static(type(owner), name, MISSING)
    found = found.fget if isinstance(found, property) else found
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
        self._memory = {held for each in adapters for held in each.memory()}
        self._state = state_named_by(root for each in adapters for root in (*each.named(), *each.schedules))
        given = [("", each) for each in self._state.objects]
        held = walk(given, lambda value: False)  # an object may refer to what it does not save
        # Kept alive, as what is found may exist only now, and its id would be given to another object.
        self._kept = [value for _, value, _ in held if not is_plain(value)]  # a small number is everybody's
        self._objects = set(map(id, self._kept))

    def is_foreign(self, value: Any) -> bool:
        """Whether a value is a module that nothing captures."""
        if not isinstance(value, torch.nn.Module) or id(value) in self._objects:
            return False
        tensors = [*torch.nn.Module.parameters(value), *torch.nn.Module.buffers(value)]
        return bool(tensors) and self._memory.isdisjoint(map(memory_of, tensors))

    def has(self, values: RunningValues, path: str) -> bool:
        path = values.whole(path)
        value = values.of(path)
        owners = [values.of(owner) for owner in owners_of(path)]
        if root_of(path) in self._state.variables or id(value) in self._objects:
            return True
        if owners and self._state.has(owners[-1], path):
            return True
        if path.endswith(GRADIENT_PATHS):
            return True  # steps zero them, or are told so
        if not self._objects.isdisjoint(map(id, owners)):
            return True
        if any(isinstance(each, torch.nn.Module | torch.optim.Optimizer) for each in owners):
            # What their methods change there is looked at as it changes.
            return not keeps_uncaptured(owners[-1], path.rpartition(".")[2], value)
        if isinstance(value, int | float) and any(isinstance(each, DataLoader | Dataset | Sampler) for each in owners):
            return True  # a part of the place in the data
        parts = _parts_of(value)
        if parts and all(isinstance(each, torch.Tensor) for each in parts):
            return self._memory.issuperset(map(memory_of, parts))
        if reads_on(value) or is_environment(value):
            return False
        if parts and all(isinstance(each, GeneratorType) for each in parts):
            return True  # those that know their place have been told of
        return value is not MISSING and not isinstance(value, (*PLAIN, np.generic, np.ndarray))


def reads_on(value: Any) -> bool:
    """Whether a value is an iterator that knows its place, or a container of such."""
    is_held = isinstance(value, dict | list | tuple)
    return any(
        _knows_its_place(each) or (is_held and isinstance(each, _BaseDataLoaderIter)) for each in _parts_of(value)
    )


def _parts_of(value: Any) -> Sequence[Any]:
    """What a container holds, or the value itself."""
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list | tuple) else [value]


def _knows_its_place(value: Any) -> bool:
    """Whether a value is one of Python's own iterators, a loader's that nobody watches, a generator of the user's that
    loops over something, counts, goes on from what it left in a variable, or reads on in such a value itself, or what
    others fill ahead. A generator that only draws from torch finds its place again."""
    if isinstance(value, GeneratorType):
        frame = value.gi_frame
        if frame is None or not is_users_frame(frame):
            return False
        function = function_of(value.gi_code, frame.f_globals)
        parts = [] if function is None else list(parts_of(function))
        loops = any(isinstance(each, ast.For | ast.AugAssign) for each in parts)
        loops |= any(isinstance(each, ast.While) and goes_on(each) for each in parts)
        held = list(frame.f_locals.values())  # generators hold one another, but not in a circle
        return loops or frame.f_code.co_name == "<genexpr>" or any(map(_knows_its_place, held))
    if isinstance(value, _BaseDataLoaderIter):
        return value not in watched  # the others are told of as they are read
    python = isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools")
    return python or isinstance(value, FED)


def may_change(value: Any) -> bool:
    """Whether a value may be changed in place, as by ``value *= 2`` or a method. An unknown one may."""
    return not (type(value) in FIXED or isinstance(value, np.generic))


@dataclass(frozen=True, slots=True)
class Helper:
    """A function of the user that a turn calls.

    Attributes:
        function: its source. values: those that it knows.
        owner: the path of the object whose method it is; empty if it is none, or the caller has no name for it.
        itself: what the method calls that object; empty if it is none.
        free: its variables that are those of functions around it.
        calls: the helpers that it calls itself, by its own paths.
        passes_on: if it is running, what its result depends on, of what its turns carry: paths of the script, with
            lines.
    """

    function: ast.FunctionDef | ast.AsyncFunctionDef
    values: RunningValues
    owner: str
    itself: str
    free: Collection[str]
    calls: Mapping[str, Helper]
    passes_on: Mapping[str, int] = field(default_factory=dict)

    @property
    def arguments(self) -> list[str]:
        """The names of its arguments, as a call of it gives them."""
        given = self.function.args
        names = [each.arg for each in (*given.posonlyargs, *given.args)]
        return [*names[bool(self.itself) :], *(each.arg for each in given.kwonlyargs)]

    def given_in(self, call: ast.Call) -> dict[str, ast.expr]:
        """What a call gives to its arguments, by their names."""
        given = dict(zip(self.arguments, call.args, strict=False))
        return given | {each.arg: each.value for each in call.keywords if each.arg}

    def writes(self, value_of: Callable[[str], Any], call: ast.Call | None = None) -> dict[str, int]:
        """What it assigns that outlives the call, by the paths of the caller, with lines.

        Args:
            value_of: what these paths stand for.
            call: without one, what it assigns in its arguments is left out.
        """

        def value_inside(path: str) -> Any:
            return value_of(self.called_by(call, path))

        is_kept = outlives(self.function, in_arguments=True)
        found = assigned_by([self.function], self.calls, value_inside)
        return renamed({path: line for path, line in found.items() if is_kept(path)}, partial(self.called_by, call))

    def reads(self, wanted: Callable[[Any], bool]) -> bool:
        """Whether it, or a helper of it, reads such a value."""
        paths = {path for each in parts_of(self.function) if (path := path_of(each))}
        return any(wanted(self.values.of(path)) for path in paths) or any(
            each.reads(wanted) for each in self.calls.values()
        )

    def functions(self) -> Iterator[Function]:
        """Itself, and those that it calls."""
        yield self.function
        for helper in self.calls.values():
            yield from helper.functions()

    def called_outside(self, path: str) -> str:
        """What the caller calls a path of the function; empty if it has no name for that object."""
        if not self.itself or root_of(path) != self.itself:
            return path
        return self.owner and self.owner + path[len(self.itself) :]

    def in_given(self, call: ast.Call, path: str) -> str:
        """The caller's path of a part of what a call gives to an argument; empty for other paths of the function."""
        return self.called_by(call, path) if root_of(path) in {*self.arguments} - {path} else ""

    def called_by(self, call: ast.Call | None, path: str) -> str:
        """As `called_outside`, and of an argument, or a part of it, the path of what this call gives to it."""
        root = root_of(path)
        if root not in self.arguments:
            return self.called_outside(path)
        if call is None:
            return ""
        if (given := self.given_in(call).get(root)) is None:
            return self._default_of(root, path_of(call.func))
        outer = path_of(given)
        return outer and outer + path[len(root) :]

    def _default_of(self, argument: str, called: str) -> str:
        """The path of what an argument is if a call of that path does not give it: all defaults are one attribute."""
        given = self.function.args
        of_keywords = {each.arg for each, value in zip(given.kwonlyargs, given.kw_defaults, strict=True) if value}
        positional = [each.arg for each in (*given.posonlyargs, *given.args)]
        is_default = argument in positional[len(positional) - len(given.defaults) :]
        if not called or not (is_default or argument in of_keywords):
            return ""
        function = f"{called}.__func__" if self.itself else called
        return f"{function}.{'__defaults__' if is_default else '__kwdefaults__'}"

    def called_in_script(self, path: str, module: Any) -> str:
        """The script's path for what the function keeps in a global variable, maybe of another module than its
        caller's; empty for what it keeps elsewhere."""
        if is_script_path(path):
            return path
        if root_of(path) in {*self.free, *self.arguments, self.itself}:
            return ""
        own = str(self.values.of("__name__"))
        return script_path(path if own == module else f"{own.rpartition('.')[2]}.{path}")

    def called_inside(self, path: str, shared: Collection[str]) -> str:
        """What the function calls a path of the caller; empty if it does not know that. `shared`: variables that mean
        the same to both."""
        if self.owner and f"{path}.".startswith(f"{self.owner}."):
            return self.itself + path[len(self.owner) :]
        return path if root_of(path) in {*self.free, *shared} and outlives(self.function)(path) else ""


def renamed(paths: Mapping[str, int], called: Callable[[str], str]) -> dict[str, int]:
    """The same under other names; those without any, which are empty, are left out."""
    return {name: line for path, line in paths.items() if (name := called(path))}


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was assigned yet
        return MISSING


def _seen_in(code: CodeType, around: Mapping[str, Any]) -> dict[str, Any]:
    """What a function sees of the variables around it: its own hide those of the same names."""
    return {name: value for name, value in around.items() if name not in (*code.co_varnames, *code.co_cellvars)}


def helper_of(path: str, values: RunningValues, deepest: int = DEEPEST) -> Helper | None:
    """The function of the user's own that is called by a path, unless it is a model's, with those that it calls, down
    to `deepest` levels."""
    called, owner = _unwrapped(values.of(path)), path.rpartition(".")[0]
    if not isinstance(called, FunctionType | MethodType | type) and callable(called):
        method = inspect.getattr_static(type(called), "__call__")
        called, owner = (MethodType(method, called) if isinstance(method, FunctionType) else MISSING), path
    return _helper(called, owner, deepest)


def called_of_each(nodes: Iterable[ast.AST], value_of: Callable[[str], Any]) -> Iterator[str]:
    """The paths that loops which have not run yet call of each member of a list, as of callbacks after a pass."""
    for each in chain.from_iterable(map(ast.walk, nodes)):
        if isinstance(each, ast.For) and isinstance(each.target, ast.Name) and value_of(each.target.id) is MISSING:
            members = value_of(over := path_of(each.iter))
            called = [path for path in called_in(each.body) if root_of(path) == each.target.id]
            for number in range(len(members)) if isinstance(members, list | tuple) else ():
                yield from (f"{over}[{number}]{path[len(each.target.id) :]}" for path in called)


def helper_called(call: Call) -> Helper | None:
    """The function that was called, of an object that has no name; None: it has no source, or its object is gone. What
    it calls itself is not followed: that was called, too."""
    function, owner = function_of(call.code, call.variables), call.owner()
    is_gone = bool(call.itself) and owner is None
    if call.code.co_name == LAMBDA or function is None or isinstance(function, ast.Module) or is_gone or is_ours(owner):
        return None
    held = {call.itself: owner} if call.itself else {}
    names = {**_seen_in(call.code, call.variables), **call.values(), **held}
    return Helper(function, RunningValues(names), UNNAMED if held else "", call.itself, call.code.co_freevars, {})


def _unwrapped(called: Any) -> Any:
    """The user's function within what a library's decorator has made of it, such as that of ``torch.no_grad()``."""
    while True:
        function = called.__func__ if isinstance(called, MethodType) else called
        inner = inspect.getattr_static(function, "__wrapped__", None)
        known = function.__globals__ if isinstance(function, FunctionType) else {}
        if not isinstance(inner, FunctionType) or not is_installed(package_of(known.get("__name__", "functools"))):
            return called
        called = inner


def _helper(called: Any, owner: str, deepest: int) -> Helper | None:
    held = called.__self__ if isinstance(called, MethodType) else None
    inner = called.__func__ if isinstance(called, MethodType) else called
    trains = isinstance(held, torch.nn.Module | torch.optim.Optimizer) or is_ours(held)
    if trains or not isinstance(inner, FunctionType) or not is_users_own(inner):
        return None
    function = function_of(inner.__code__, inner.__globals__)
    if function is None or isinstance(function, ast.Module):
        return None
    cells = zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True)
    around = {name: value for name, cell in cells if (value := _content(cell)) is not MISSING}
    names = _seen_in(inner.__code__, {**inner.__globals__, **around})
    arguments = function.args.posonlyargs + function.args.args
    itself = arguments[0].arg if held is not None and arguments else ""
    names |= {itself: held} if itself else {}
    known = RunningValues(names)
    within = called_in(function.body) if deepest else []
    calls = {path: each for path in within if (each := helper_of(path, known, deepest - 1)) is not None}
    known = known.with_closures_of(calls.values())
    return Helper(function, known, owner if itself else "", itself, inner.__code__.co_freevars, calls)


def enters(function: Function, values: RunningValues, line: int) -> ast.With | ast.AsyncWith | None:
    """The block around `line` that enters the hook."""
    for each in parts_of(function):
        if isinstance(each, ast.With | ast.AsyncWith) and each.lineno <= line <= (each.end_lineno or 0):
            for item in each.items:
                names = [path_of(item.context_expr), *([path_of(item.optional_vars)] if item.optional_vars else [])]
                if any(is_ours(values.of(name)) for name in names):
                    return each
    return None


def assigned_by(
    nodes: Iterable[ast.AST], helpers: Mapping[str, Helper], value_of: Callable[[str], Any]
) -> dict[str, int]:
    """As `assigned_in`, with what the functions assign that are called there. `value_of`: what a path stands for."""
    nodes = list(nodes)
    found = assigned_in(nodes, lambda path: may_change(value_of(path)))
    for call in calls_in(nodes):
        helper = helpers.get(path_of(call.func))
        found = (helper.writes(value_of, call) if helper is not None else {}) | found
        for given in (helpers[path] for path in given_to(call) if path in helpers):
            found = given.writes(value_of) | found
    return found


Reading = tuple[Collection[str], Collection[str]]
"""Paths that a function knows, and the attributes that it reads, of whatever object."""


def read_by(path: str, value: Any, shared: Collection[str]) -> Reading:
    """What a function of the user, or an object that can be called, reads beside its arguments. `shared`: as for
    `Helper.called_inside`."""
    owner, kind = path.rpartition(".")[0], type(None)
    if isinstance(value, MethodType):
        value, kind = value.__func__, type(value.__self__)
    elif not isinstance(value, FunctionType):
        owner, kind, value = path, type(value), inspect.getattr_static(type(value), "__call__", None)
    if not isinstance(value, FunctionType) or not is_users_own(value):
        return (), ()
    roots, attributes = read_in(value.__code__, shared)
    within = [inspect.getattr_static(kind, name, None) for name in attributes]
    for each in [each.fget if isinstance(each, property) else each for each in within]:
        if isinstance(each, FunctionType) and is_users_own(each):
            attributes = {*attributes, *_loaded_by(each.__code__)[1]}  # of a method that it calls
    return {owner, *roots} - {""}, attributes


def read_in(code: CodeType, shared: Collection[str]) -> Reading:
    """What the code of a function reads beside its arguments; see `read_by`."""
    names, attributes = _loaded_by(code)
    return {*code.co_freevars, *names.intersection(shared)}, attributes


@lru_cache(maxsize=256)
def _loaded_by(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The global variables that a function reads, and the attributes, of whatever object."""
    found = [each for each in dis.get_instructions(code) if each.opname.startswith("LOAD_")]
    names = frozenset(each.argval for each in found if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return names, frozenset(each.argval for each in found if each.opname in ("LOAD_ATTR", "LOAD_METHOD"))
