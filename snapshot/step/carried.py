"""What a script carries from turn to turn in its variables, and feeds its steps with: found in its source.

A counter, a temperature, a hidden state or a best loss is an ordinary variable. A restart begins it anew, and nothing
in the state tells. But the source does: the variable is assigned within the loop, and the value that an earlier turn
left there reaches a model, an optimizer, a backward, or a decision about one of these. What is only logged does not.

Values are followed by `snapshot.step.flow`, which may miss something, so variables are named in a warning only. A new
job is refused where a step depends on a number that certainly begins anew; see `snapshot.step.script.Script.check`.
"""

from __future__ import annotations

import ast
import inspect
import linecache
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from tokenize import TokenError
from types import CellType, CodeType, FunctionType, GeneratorType, MethodType
from typing import Any

import numpy as np
import torch

from holdfast.smp_daemon.shared.logs import get_log
from holdfast.snapshot.copy.tensors import memory_of
from holdfast.snapshot.state.adapter import Adapter
from holdfast.snapshot.state.walk import is_users_own, package_of
from holdfast.snapshot.step.flow import (
    MISSING,
    Carries,
    Flow,
    Function,
    assigned_in,
    called_in,
    loops_at,
    outlives,
    owners_of,
    parts_of,
    path_of,
    root_of,
    sources_in,
)
from holdfast.snapshot.step.variables import is_users_frame, users_frames

log = get_log(__name__)

LOOKS_AT = 2
"""The step in which `CarriedVariables` looks."""

DEEPEST = 2
"""How many calls a helper is followed into."""

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
            self._at = {frame.f_code: frame.f_lineno for frame in users_frames()}

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

    def _look(self, at: Mapping[CodeType, int]) -> Carries:
        found, frames = Carries(), {frame.f_code: frame for frame in users_frames()}
        named = _Named(self._adapter)
        for code, frame in frames.items():
            if (function := function_of(code, frame.f_globals)) is not None:
                line, values = at.get(code), RunningValues({**frame.f_globals, **frame.f_locals})
                within = _enters(function, values, frame.f_lineno if line is None else line)
                one = _look_into(function, frame.f_lineno, line, within, named, values)
                read_on = [path for path in one.carried if _reads_on(values.of(path))]
                found.iterators |= {path: one.carried.pop(path) for path in read_on}
                found.carried = one.carried | found.carried
                found.updated = one.updated | found.updated
                found.counts |= one.counts
                found.numbered |= one.numbered
                found.skips |= one.skips
                found.passes |= one.passes
                if within is not None:
                    break  # what is further out trains more than once
        return found


def _look_into(
    function: Function,
    line: int,
    begun: int | None,
    within: ast.With | ast.AsyncWith | None,
    named: _Named,
    values: RunningValues,
) -> Carries:
    """What a running function carries.

    Args:
        line: where it is. begun: where it was as the step began; None: it was not running.
        within: the block around that line that enters the hook.
        values: its variables.
    """
    turns: list[ast.For | ast.While] = []
    reads = False
    if begun is not None:
        stepped = loops_at(function, line)
        turns = [each for each in loops_at(function, begun) if each in stepped]
        turns = [each for each in turns if within is None or each.lineno >= within.lineno]
        reads = bool(turns) and isinstance(turns[-1], ast.For) and begun <= (turns[-1].iter.end_lineno or 0)
        if not turns:
            return Carries()
    is_kept = partial(named.has, values)
    sources = sources_in(turns)
    paths = [*called_in(turns), *sources]
    helpers = {path: each for path in paths if (each := helper_of(path, values)) is not None}

    written_by = partial(_written_by, helpers)
    found = Flow(function, turns, reads, values.of, _is_ours, is_kept, named.is_foreign, written_by).found
    for called, helper in helpers.items():
        for path, line in _carried_by(helper, named, gives=called in sources).items():
            if not is_kept(path, values.of(path)):
                found.carried.setdefault(path, line)
    for helper in helpers.values():  # one of its attributes alone would be no state that fits the others
        if helper.owner and any(path.startswith(f"{helper.owner}.") for path in found.carried):
            found.carried |= {path: at for path, at in helper.writes.items() if not is_kept(path, values.of(path))}
    return found


def _written_by(helpers: Mapping[str, Helper], path: str) -> dict[str, int]:
    return helpers[path].writes if path in helpers else {}


def _carried_by(helper: Helper, named: _Named, *, gives: bool = False) -> dict[str, int]:
    """What a helper, and those that it calls, carry from call to call, by the paths of the caller, with lines."""
    known = RunningValues(helper.names)
    kept = partial(named.has, known)
    written_by = partial(_written_by, helper.calls)
    flow = Flow(helper.function, [], False, known.of, _is_ours, kept, named.is_foreign, written_by, gives)
    found = dict(flow.found.carried)
    for inner in helper.calls.values():
        found |= _carried_by(inner, named)
    called = {path: helper.called_outside(path) for path in found if not kept(path, known.of(path))}
    return {outside: found[path] for path, outside in called.items() if outside}


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
        self._memory = adapter.captured
        named = adapter.named()
        held = [*adapter.schedules, *(each for root in named for each in (root, getattr(root, "__self__", root)))]
        self._objects = set(map(id, held))
        self._names: set[str] = set()
        for each in named:
            code = getattr(each, "__code__", None)
            if code is not None:
                self._names.update(code.co_freevars, code.co_names)

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
    """Whether a value is an iterator that knows its place: one of Python's own, or a generator of the user's that loops
    over something or counts. One that only draws from torch finds its place again."""
    if isinstance(value, GeneratorType):
        frame = value.gi_frame
        if frame is None or not is_users_frame(frame):
            return False
        function = function_of(value.gi_code, frame.f_globals)
        return function is not None and any(isinstance(each, ast.For | ast.AugAssign) for each in parts_of(function))
    return isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools")


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
        calls: the helpers that it calls itself, by its own paths.
    """

    function: ast.FunctionDef | ast.AsyncFunctionDef
    names: Mapping[str, Any]
    owner: str
    itself: str
    calls: Mapping[str, Helper]

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
    inner = RunningValues(names)
    within = called_in(function.body) if deepest else []
    calls = {path: each for path in within if (each := helper_of(path, inner, deepest - 1)) is not None}
    return Helper(function, names, owner if itself else "", itself, calls)


def _enters(function: Function, values: RunningValues, line: int) -> ast.With | ast.AsyncWith | None:
    """The block around `line` that enters the hook."""
    for each in parts_of(function):
        if isinstance(each, ast.With | ast.AsyncWith) and each.lineno <= line <= (each.end_lineno or 0):
            for item in each.items:
                names = [path_of(item.context_expr), *([path_of(item.optional_vars)] if item.optional_vars else [])]
                if any(_is_ours(values.of(name)) for name in names):
                    return each
    return None
