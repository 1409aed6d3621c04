"""What a script carries from turn to turn in its variables, and feeds its steps with: found in its source.

A counter, a temperature, a hidden state or a best loss is an ordinary variable. A restart begins it anew, and nothing
in the state tells. But the source does: the variable is assigned within the loop, and the value that an earlier turn
left there reaches a model, an optimizer, a backward, or a decision about one of these. What is only logged does not.

`snapshot.script.flow` follows values, `snapshot.script.running` knows what the names of running functions stand for,
and `snapshot.script.syntax` reads the source. They may miss something, so variables are named in a warning only. A new
job is refused where a step depends on a number that certainly begins anew; see
`snapshot.first_turns.FirstTurns.check_script`.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any

import torch

from holdfast.smp_daemon.shared.logs import get_log
from holdfast.snapshot.script.anew import begins_elsewhere, hands_on
from holdfast.snapshot.script.calls import LAMBDA, Call, Calls
from holdfast.snapshot.script.flow import Carries, Flow
from holdfast.snapshot.script.origins import Returned
from holdfast.snapshot.script.running import (
    MISSING,
    PLAIN,
    UNNAMED,
    Helper,
    Named,
    RunningValues,
    called_of_each,
    enters,
    helper_called,
    helper_of,
    reads_on,
    renamed,
)
from holdfast.snapshot.script.syntax import (
    Function,
    called_in,
    function_of,
    is_script_path,
    loops_at,
    outlives,
    owners_of,
    parts_of,
    path_of,
    root_of,
    script_name,
    script_path,
    shown,
    sources_in,
    stepped_in,
)
from holdfast.snapshot.script.variables import (
    frames_called_by_a_library,
    line_for_attribute,
    line_for_object,
    name_of,
    users_frames,
)
from holdfast.snapshot.state.adapter import entered
from holdfast.snapshot.state.libraries import is_environment, stands_alone

SEVERAL = 4
"""Of how many attributes that are carried their object is named instead, if it stands alone."""

LOOKS_ON = re.compile(r"(?:^|[._])(?:eval|valid|test|show|render|record)")
"""What has such a name does not act in an environment to train."""

log = get_log(__name__)


class CarriedVariables:
    """What the functions that are running carry. Looks once, as the first optimizer is about to step in the second
    turn of this process: then their variables have values. Used by the training thread."""

    def __init__(self) -> None:
        self._calls: Calls | None = None
        self._suspended: list[FrameType] = []  # generators that the first step ran in; the second may run in them, too
        self._at: dict[FrameType, int] = {}  # where functions were as the second step began

    def step_begins(self) -> None:
        """A step begins, maybe once more: each batch begins one, and some turns read several."""
        if self._calls is not None and not self._at:
            self._at = {frame: frame.f_lineno for frame in (*self._suspended, *users_frames())}
            self._suspended = []

    def look(self) -> Carries | None:
        """An optimizer is about to step; in some turns several do. Returns what was found; None: this is not the time
        yet."""
        if self._calls is None:
            self._suspended = [each for each in users_frames() if each.f_code.co_flags & inspect.CO_GENERATOR]
            self._calls = Calls()
        if not self._at:
            return None
        try:
            return Following(self._at, self.stop()).all()
        except Exception:  # a script that it does not understand is no reason to end a training
            log.exception("what the script carries from turn to turn could not be followed, and is not told")
            return Carries()

    def stop(self) -> list[Call]:
        """Returns which functions have run since the first look."""
        return [] if self._calls is None else self._calls.stop()


def _place_of(values: RunningValues, path: str) -> tuple[object, str] | None:
    """Tells apart what paths stand for; None: it is not known."""
    owners = owners_of(path)
    if not owners:
        return values.of("__name__"), path  # of the module
    owner = values.of(owners[-1])
    return None if owner is MISSING else (id(owner), path[len(owners[-1]) :])


@dataclass(frozen=True, eq=False, slots=True)
class RunningFunction:
    """A function of the user that is running.

    Attributes:
        frame: where it runs; tells one call of it from another.
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

    @property
    def reads(self) -> bool:
        """Whether the innermost of its loops goes through the batches."""
        innermost = self.turns[-1] if self.turns else None
        return isinstance(innermost, ast.For) and (self.begun or 0) <= (innermost.iter.end_lineno or 0)

    def called(self, path: str) -> str:
        """What the script calls a path of the function, where it enters the hook. The object of a method has another
        name there."""
        is_own = self.within is None and root_of(path) == "self" != path
        return _name_of(self.values.of("self")) + path[len("self") :] if is_own else path


def _running(frame: FrameType, begun: int | None) -> RunningFunction | None:
    function = function_of(frame.f_code, frame.f_globals)
    if function is None:
        return None
    line, values = frame.f_lineno, RunningValues({**frame.f_globals, **frame.f_locals})
    within = enters(function, values, line if begun is None else begun)
    turns: list[ast.For | ast.While] = []
    if begun is not None:
        stepped = loops_at(function, line)
        turns = [each for each in loops_at(function, begun) if each in stepped]
        turns = [each for each in turns if within is None or each.lineno >= within.lineno]
    return RunningFunction(frame, function, values, begun, within, turns)


def _name_of(owner: Any) -> str:
    """What the script calls the object whose method a function is, or the class."""
    kind = owner if isinstance(owner, type) else type(owner)
    return name_of(owner, for_all=True).partition(".")[2] or kind.__name__


class Following:
    """Follows what is carried at one moment.

    Args:
        at: where functions were as the step began.
        calls: the functions that have run since the step before.
    """

    def __init__(self, at: Mapping[FrameType, int], calls: Collection[Call]) -> None:
        self._named = Named([*entered])
        self._calls = calls
        # Ids of the objects that were made since the step before; only ids of living objects are compared with them.
        self._made = {id(call.owner()) for call in calls if call.code.co_name == "__init__"}
        self._running = [each for frame in users_frames() if (each := _running(frame, at.get(frame))) is not None]
        self._functions = [each.function for each in self._running]  # each of them is looked into
        self._hands_on = any(hands_on(each.function, each.values.of) for each in self._running)
        self._called: list[Function] = []  # by these, and looked into on the way
        self._returned: dict[tuple[Function, str], dict[str, int]] = {}  # what calls of functions by name give back
        self._passed_on: dict[Function, dict[str, int]] = {}  # see `Helper.passes_on`
        # What functions update from what it was, by who holds it, as others may read it: what gives its name, and the
        # line.
        self._kept: dict[tuple[object, str], tuple[Callable[[], str], int]] = {}

    def all(self) -> Carries:
        """What all functions carry."""
        ran = [(call, helper) for call in self._calls if (helper := helper_called(call)) is not None]
        self._follow_results(ran)
        by_library = set(frames_called_by_a_library())
        innermost = [each for each in self._running if each.frame in by_library]
        if any(each.turns for each in innermost):
            innermost = []
        found = Carries(is_called=bool(innermost))
        has_pass = False
        for each in self._running:
            if each.turns or each.begun is None or (each in innermost and each.within is None):
                found.add(self._in_running(each, has_pass))
            has_pass |= each.reads
            if each.within is not None:
                break  # what is further out trains more than once
        for call, helper in ran:
            one = self._in_helper(helper, call.gives, partial(self._name_in_script, call))
            if helper.function not in (*self._functions, *self._called):
                found.add(one)
        for call, helper in ran:
            found.add(Carries(self._read_in(helper, call.gives)))
        for named in (found.carried, found.environments):
            named.pop("", None)  # what the caller has no name for
        found.carried = renamed(found.carried, script_name)
        found.rename(partial(_as_self, self._name_of_entering()))
        whole = found.carried.keys() | found.objects.keys()
        found.carried = {path: line for path, line in found.carried.items() if whole.isdisjoint(owners_of(path))}
        return found

    def _name_in_script(self, call: Call, path: str) -> str:
        """What the script calls a path of the object of a call, or of what is given to it; empty if the object was made
        since the step before, and has no name: each turn makes its own, and carries nothing in it."""
        root, code, held = root_of(path), call.code, call.values()
        if root == UNNAMED:
            owner = call.owner()
            is_new = id(owner) in self._made and not name_of(owner)
            return "" if is_new else _name_of(owner) + path[len(root) :]
        if root in held and root in code.co_varnames[: code.co_argcount]:
            return (name_of(held[root], for_all=True).partition(".")[2] or root) + path[len(root) :]
        return path

    def _name_of_entering(self) -> str:
        """What others call the object whose method enters the hook; empty if that is no method."""
        itself = next((each.values.of("self") for each in self._running if each.within is not None), MISSING)
        return _name_of(itself) if itself is not MISSING else ""

    def _follow_results(self, ran: Collection[tuple[Call, Helper]]) -> None:
        """Note what the results of the functions that ran depend on, of what these, and those that they call, keep from
        call to call, for themselves or for others. Calls are noted as they end: inner ones come first."""
        for call, helper in ran:
            self._note_result(call, self._in_helper(helper, True, partial(self._name_in_script, call)).carried)
        for call, helper in ran:
            self._note_result(call, self._read_in(helper, True))

    def _note_result(self, call: Call, carried: Mapping[str, int]) -> None:
        caller = function_of(call.caller, call.variables) if carried else None
        if caller is not None:
            found = {script_path(path): line for path, line in carried.items() if path}
            self._returned.setdefault((caller, call.code.co_name), {}).update(found)

    def _returned_to(self, running: Function | None = None) -> Returned:
        """What was returned to this function, and to those that do not run now: of the others that do, variables tell
        more than names."""
        wanted = [key for key in self._returned if key[0] is running or key[0] not in self._functions]
        return {key: self._returned[key] for key in wanted}

    def _in_running(self, each: RunningFunction, has_pass: bool) -> Carries:
        """What a function that is running carries, by the names of the script. `has_pass`: whether a function that it
        calls goes through the batches."""
        values, turns = each.values, each.turns
        top = turns[-1].lineno if each.reads else (each.begun or 0) * has_pass
        sources = sources_in(turns)
        paths = [*called_in(turns), *sources]
        helpers = {path: helper for path in paths if (helper := helper_of(path, values)) is not None}
        helpers = {path: replace(one, passes_on=self._passed_on.get(one.function, {})) for path, one in helpers.items()}
        values, returned = values.with_closures_of(helpers.values()), self._returned_to(each.function)
        flow = Flow(each.function, values, self._named, helpers, turns=turns, top=top, returned=returned)
        self._note_kept(flow, values, each.called)
        for call in self._calls:
            if call.code.co_name == LAMBDA and call.gives and call.variables is each.frame.f_globals:
                flow.is_read_in(call.code)
        self._called += (part for helper in helpers.values() for part in helper.functions())
        found = flow.found
        if self._hands_on:
            found.counts -= {turn.lineno for turn in turns if begins_elsewhere(turn, each.function)}
        helpers = {path: helper for path, helper in helpers.items() if path in flow.called | sources}
        for called, helper in helpers.items():
            inner = self._in_helper(helper, called in sources)
            inner.carried = self._uncaptured(values, inner.carried)
            found.add(inner)
        passed_on = flow.passed_on
        for helper in helpers.values():  # one of its attributes alone would be no state that fits the others
            is_state = helper.owner and helper.function not in self._functions
            for carried in (found.carried, passed_on):
                if is_state and any(path.startswith(f"{helper.owner}.") for path in carried):
                    carried |= self._uncaptured(values, helper.writes(values.of))
        passed_on = renamed(passed_on, each.called)
        self._passed_on[each.function] = {script_path(path): line for path, line in passed_on.items()}
        for owner in {path.rpartition(".")[0] for path in found.carried} - {""}:
            within = [path for path in found.carried if path.startswith(f"{owner}.")]
            if len(within) >= SEVERAL and (held := values.of(owner)) is not MISSING and stands_alone(held):
                found.objects[owner] = min(found.carried.pop(path) for path in within)
        dicts = {path.rpartition("[")[0] for path in found.carried} - {""}
        found.mixed |= {path for path in dicts if _is_mixed(values.of(path))}
        found.carried, iterators = _by_kind(values, found.carried)
        found.attributes |= _of_modules(values, found.carried)
        found.iterators |= iterators
        found.environments |= self._acted_in(turns or [each.function], values)
        found.rename(each.called)
        for helper in (helper_of(path, values) for path in called_of_each(turns, values.of)):
            if helper is not None:
                owner = helper.itself and _name_of(helper.values.of(helper.itself))
                found.add(self._in_helper(replace(helper, owner=owner)))
        return found

    def _in_helper(self, helper: Helper, gives: bool = False, called: Callable[[str], str] = str) -> Carries:
        """What a helper, and those that it calls, carry from call to call, and update. `called`: what the script calls
        a path of the caller."""

        def outside(path: str) -> str:
            outer = helper.called_outside(path)
            return outer and called(outer)

        values, returned = helper.values, self._returned_to()
        flow = Flow(helper.function, values, self._named, helper.calls, gives=gives, returned=returned)
        self._note_kept(flow, values, outside)
        carried, iterators = _by_kind(values, self._uncaptured(values, flow.found.carried))
        updated = renamed(flow.found.updated, outside)
        found = Carries(renamed(carried, outside), renamed(iterators, outside), updated)
        found.attributes = _of_modules(values, carried)
        if not LOOKS_ON.search(helper.function.name):
            found.environments |= renamed(self._acted_in([helper.function], values), outside)
        for inner in (each for path, each in helper.calls.items() if path in flow.called):
            found.add(self._in_helper(inner, called=outside))
        return found

    def _acted_in(self, nodes: Collection[ast.AST], values: RunningValues) -> dict[str, int]:
        """The environments of libraries that the nodes act in, with lines."""
        found = {path: line for path, line in stepped_in(nodes).items() if not LOOKS_ON.search(path)}
        return self._uncaptured(values, {path: line for path, line in found.items() if is_environment(values.of(path))})

    def _note_kept(self, flow: Flow, values: RunningValues, called: Callable[[str], str]) -> None:
        """`called`: what the script calls a path of the function."""
        for path, line in flow.kept().items():
            if (place := _place_of(values, path)) is not None:
                self._kept.setdefault(place, (partial(called, path), line))

    def _read_in(self, helper: Helper, gives: bool) -> dict[str, int]:
        """What a function reads that others keep, and its steps depend on."""
        values, returned, is_outside = helper.values, self._returned_to(), outlives(helper.function)
        paths = {path_of(each) for each in parts_of(helper.function)} - {""}
        known = [path for path in paths if is_outside(path)]
        read = {path: self._kept[place] for path in known if (place := _place_of(values, path)) in self._kept}
        flow = Flow(helper.function, values, self._named, {}, gives=gives, given=sorted(read), returned=returned)
        carried, _ = _by_kind(values, {path: read[path][1] for path in flow.found.carried.keys() & read.keys()})
        passed_on = {path: line for path, line in flow.found.carried.items() if is_script_path(path)}
        return {read[path][0](): line for path, line in carried.items()} | passed_on

    def _uncaptured(self, values: RunningValues, paths: Mapping[str, int]) -> dict[str, int]:
        """Those of the paths that stand for nothing that is captured."""
        return {path: line for path, line in paths.items() if not self._named.has(values, path)}


def _as_self(outer: str, path: str) -> str:
    """The path by the name that a method has for its own object, which others call `outer`."""
    return f"self{path[len(outer) :]}" if outer and path.startswith((f"{outer}.", f"{outer}[")) else path


def _of_modules(values: RunningValues, paths: Iterable[str]) -> set[tuple[int, str]]:
    """As `Carries.attributes`, of these paths."""
    parts = [path.rpartition(".") for path in paths]
    return {(id(held), name) for owner, _, name in parts if isinstance(held := values.of(owner), torch.nn.Module)}


def _by_kind(values: RunningValues, carried: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """What is carried, entries of tensors as the whole, and, apart from that, the iterators that are read on; see
    `Carries`."""
    carried = {values.whole(path): line for path, line in carried.items()}
    read_on = {path: values.of(path) for path in carried if reads_on(values.of(path))}
    iterators = {f"{path}[i]" if isinstance(held, PLAIN) else path: carried[path] for path, held in read_on.items()}
    return {path: line for path, line in carried.items() if path not in read_on}, iterators


def _is_mixed(value: Any) -> bool:
    held = value.values() if isinstance(value, dict) else ()
    return any(hasattr(each, "__dict__") and not isinstance(each, torch.Tensor) for each in held)


def lines_for(found: Carries) -> list[str]:
    """The lines that name what is carried."""
    lines = dict.fromkeys(f'snap.track("{path.rpartition(".")[2]}", tensors={path})' for path in found.updated)
    lines |= dict.fromkeys(map(line_for_object, found.objects))
    lines |= dict.fromkeys(line_for_object(path, "cloudpickle") for path in found.environments)
    loose = [path for path in found.carried if root_of(path) == path]
    if loose:
        kept = ", ".join(f'"{path}": {path}' for path in loose)
        used = ", ".join(f'kept["{path}"] for {path}' for path in loose)
        line = f'kept = {{{kept}}}; snap.track("kept", get=lambda: dict(kept), set=kept.update)'
        lines[f"{line}, with {used} in the loop"] = None
    for path in found.carried.keys() - set(loose):
        owner, _, name = path.rpartition(".")
        if owner and "[" not in name:
            lines[line_for_attribute(path)] = None
        else:
            owner, _, key = path.rpartition("[")
            name = owner.rpartition(".")[2]
            if key.removesuffix("]").isdecimal():
                line = f"get=lambda: list({owner}), set=lambda values: {owner}.__setitem__(slice(None), values)"
            elif owner in found.mixed:
                keys = sorted(each.rpartition("[")[2][:-1] for each in found.carried if each.startswith(f"{owner}["))
                line = f"get=lambda: {{key: {owner}[key] for key in [{', '.join(keys)}]}}, set={owner}.update"
            else:
                line = f"get=lambda: dict({owner}), set={owner}.update"
            lines[f'snap.track("{name}", {line})'] = None
    return sorted(map(shown, lines))


def lines_for_iterators(found: Carries) -> list[str]:
    """The lines that make what is read on from go on after a restart."""
    names = [(path, path.rpartition(".")[2]) for path in found.iterators]
    texts = [(path, f'f"{name[:-3]}{{i}}"' if name.endswith("[i]") else f'"{name}"') for path, name in names]
    return [shown(f"{path} = iter(snap.data(lambda: ..., name={text}))") for path, text in texts]
