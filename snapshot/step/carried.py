"""What a script carries from turn to turn in its variables, and feeds its steps with: found in its source.

A counter, a temperature, a hidden state or a best loss is an ordinary variable. A restart begins it anew, and nothing
in the state tells. But the source does: the variable is assigned within the loop, and the value that an earlier turn
left there reaches a model, an optimizer, a backward, or a decision about one of these. What is only logged does not.

`snapshot.step.flow` follows values, `snapshot.step.script` knows what the names of running functions stand for, and
`snapshot.step.syntax` reads the source. They may miss something, so variables are named in a warning only. A new job is
refused where a step depends on a number that certainly begins anew; see
`snapshot.first_turns.FirstTurns.check_script`.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import chain
from types import FrameType

from holdfast.smp_daemon.shared.logs import get_log
from holdfast.snapshot.state.adapter import entered
from holdfast.snapshot.step.flow import Carries, Flow
from holdfast.snapshot.step.script import PLAIN, Helper, Named, RunningValues, enters, helper_of, hooks_of, reads_on
from holdfast.snapshot.step.syntax import Function, called_in, function_of, loops_at, root_of, sources_in
from holdfast.snapshot.step.variables import frames_called_by_a_library, line_for_attribute, users_frames

log = get_log(__name__)


class CarriedVariables:
    """What the functions that are running carry. Looks once, as the second step of this process is about to end: then
    their variables have values. Used by the training thread."""

    def __init__(self) -> None:
        self._steps = 0
        self._suspended: list[FrameType] = []  # generators that the first step ran in; the second may run in them, too
        self._at: dict[FrameType, int] = {}  # where functions were as the second step began

    def step_begins(self) -> None:
        """A step begins, maybe once more: each batch begins one, and some turns read several."""
        if self._steps == 1 and not self._at:
            self._at = {frame: frame.f_lineno for frame in (*self._suspended, *users_frames())}
            self._suspended = []

    def stepped(self) -> None:
        """An optimizer has stepped."""
        self._steps += 1
        if self._steps == 1:
            self._suspended = [each for each in users_frames() if each.f_code.co_flags & inspect.CO_GENERATOR]

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

    def _look(self, at: Mapping[FrameType, int]) -> Carries:
        named = Named([*entered])
        running = [each for frame in users_frames() if (each := _running(frame, at.get(frame))) is not None]
        by_library = set(frames_called_by_a_library())
        innermost = [each for each in running if each.frame in by_library]
        if any(each.turns for each in innermost):
            innermost = []
        found = Carries()
        for each in running:
            if each.turns or each.begun is None or (each in innermost and each.within is None):
                one = _carried_in(each, named, [other.function for other in running])
                for path in [path for path in one.carried if reads_on(each.values.of(path))]:
                    several = isinstance(each.values.of(path), PLAIN)
                    found.iterators[f"{path}[i]" if several else path] = one.carried.pop(path)
                found.carried = one.carried | found.carried
                found.updated = one.updated | found.updated
                found.counts |= one.counts
                found.numbered |= one.numbered
                found.skips |= one.skips
                found.passes |= one.passes
            if each.within is not None:
                break  # what is further out trains more than once
        return found


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


def _carried_in(each: RunningFunction, named: Named, functions: Collection[Function]) -> Carries:
    """What a function carries. `functions`: all that are running, each of which is looked into."""
    values, turns = each.values, each.turns
    innermost = turns[-1] if turns else None
    reads = isinstance(innermost, ast.For) and (each.begun or 0) <= (innermost.iter.end_lineno or 0)
    sources = sources_in(turns)
    paths = [*called_in(turns), *sources]
    helpers = {path: helper for path in paths if (helper := helper_of(path, values)) is not None}
    found = Flow(each.function, turns, reads, values, named, helpers).found
    hooks = chain.from_iterable(hooks_of(path, values) for path in paths)
    helpers |= {f"<hook {i}>": hook for i, hook in enumerate(hooks)}
    for called, helper in helpers.items():
        for path, line in _carried_by(helper, named, gives=called in sources).items():
            if not named.has(values, path, values.of(path)):
                found.carried.setdefault(path, line)
    for helper in helpers.values():  # one of its attributes alone would be no state that fits the others
        is_state = helper.owner and helper.function not in functions
        if is_state and any(path.startswith(f"{helper.owner}.") for path in found.carried):
            written = helper.writes.items()
            found.carried |= {path: at for path, at in written if not named.has(values, path, values.of(path))}
    return found


def _carried_by(helper: Helper, named: Named, *, gives: bool = False) -> dict[str, int]:
    """What a helper, and those that it calls, carry from call to call, by the paths of the caller, with lines."""
    known = RunningValues(helper.names)
    found = Flow(helper.function, [], False, known, named, helper.calls, gives).found.carried
    for inner in helper.calls.values():
        found |= _carried_by(inner, named)
    called = {path: helper.called_outside(path) for path in found if not named.has(known, path, known.of(path))}
    return {outside: found[path] for path, outside in called.items() if outside}


def lines_for(found: Carries) -> list[str]:
    """The lines that name what is carried."""
    lines = dict.fromkeys(f'snap.track("{path.rpartition(".")[2]}", tensors={path})' for path in found.updated)
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
            else:
                line = f"get=lambda: dict({owner}), set={owner}.update"
            lines[f'snap.track("{name}", {line})'] = None
    return sorted(lines)


def lines_for_iterators(found: Carries) -> list[str]:
    """The lines that make what is read on from go on after a restart."""
    names = [(path, path.rpartition(".")[2]) for path in found.iterators]
    texts = [(path, f'f"{name[:-3]}{{i}}"' if name.endswith("[i]") else f'"{name}"') for path, name in names]
    return [f"{path} = iter(snap.data(lambda: ..., name={text}))" for path, text in texts]
