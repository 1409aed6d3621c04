"""What a loop counts, and begins anew after a restart.

A loop over the batches of a pass does so where a restart goes on in the middle of that pass.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from holdfast.snapshot.script.origins import PLACE, Origins
from holdfast.snapshot.script.running import MISSING, reads_on
from holdfast.snapshot.script.syntax import ASIDE, Function, calls_in, name_of_call, parts_of, path_of, root_of
from holdfast.snapshot.state.walk import is_ours

COUNTS = frozenset({"range", "count", "cycle", "accumulate"})
"""Functions whose iterators begin at the same numbers whenever they are made."""

RANGES = frozenset({"range", "trange"})
"""Functions that give the numbers of a loop, the second with a bar."""

SIZED = (list, tuple, range, np.ndarray, torch.Tensor)
"""Types of what begins at its first item whenever it is gone through."""


def counted_anew(
    target: ast.expr, over: ast.expr, value_of: Callable[[str], Any], origins_of: Callable[[ast.expr], Origins]
) -> Iterator[tuple[ast.expr, str]]:
    """Where a loop puts what begins anew, with the path of an iterator that it reads on; empty: a number, or what
    belongs to one. The batches themselves are such if a number ends their pass.

    Args:
        target, over: of the loop, ``for target in over``.
        value_of: the value of a path. origins_of: where an expression comes from.
    """
    calls = [each for each in ast.walk(over) if isinstance(each, ast.Call)]
    bounds = [bound for each in calls if name_of_call(each) == "islice" for bound in each.args[1:]]
    if bounds and not any(value_of(path_of(each)) is None or origins_of(each) & PLACE for each in bounds):
        yield target, ""
    if not isinstance(target, ast.Tuple):
        return
    for counted in [each for each in calls if _is_enumerate(each, value_of(path_of(each.func)))][:1]:
        begins = [*counted.args[1:], *(each.value for each in counted.keywords)]
        goes_on = any(name_of_call(each) == "enumerate" and isinstance(each.func, ast.Attribute) for each in calls)
        if not goes_on and not any(origins_of(each) & PLACE for each in begins):
            yield target.elts[0], ""
    zipped = over.args if isinstance(over, ast.Call) and name_of_call(over) == "zip" else []
    batches = min((_batches_in(each, value_of) for each in zipped), default=math.inf)
    for part, each in zip(target.elts, zipped, strict=False):
        value = value_of(path := path_of(each))
        counts = isinstance(each, ast.Call) and name_of_call(each) in COUNTS
        if reads_on(value):
            yield part, path
        elif (counts or isinstance(value, SIZED)) and not origins_of(each) & PLACE:
            yield part, ""
            if _length(each, value_of) < batches:
                yield target, ""


def goes_over_numbers(over: ast.expr, value_of: Callable[[str], Any]) -> bool:
    """Whether a loop over this counts: it is a range, or tqdm's bar around one. `value_of`: the value of a path."""
    value = value_of(path_of(over))
    is_range = isinstance(getattr(value, "__dict__", {}).get("iterable", value), range)
    return is_range or any(name_of_call(each) in RANGES for each in calls_in([over]))


def hands_on(function: Function, value_of: Callable[[str], Any]) -> bool:
    """Whether a function leaves the place that the hook tells in a variable, or gives it to another function, which may
    count on from there; to log it is not enough. `value_of`: the value of a path."""
    calls = [each for each in parts_of(function) if isinstance(each, ast.Call)]
    aside = {part for each in calls if ASIDE.search(path_of(each.func).lower()) for part in ast.walk(each)}
    given: list[ast.AST] = [each.value for each in parts_of(function) if isinstance(each, ast.Assign)]
    for each in calls:
        if each not in aside and name_of_call(each) not in RANGES:
            given += [*each.args, *each.keywords]
    told = [part for each in given for part in ast.walk(each) if isinstance(part, ast.Attribute)]
    return any(part.attr in ("epoch", "step") and is_ours(value_of(path_of(part.value))) for part in told)


def begins_elsewhere(loop: ast.For | ast.While, function: Function) -> bool:
    """Whether a loop over a range begins at a number that its function does not set itself."""
    over = ast.walk(loop.iter) if isinstance(loop, ast.For) else ()
    given = [each.args for each in over if isinstance(each, ast.Call) and name_of_call(each) in RANGES]
    begins = root_of(path_of(given[0][0])) if given and len(given[0]) > 1 else ""
    names = [each for each in parts_of(function) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]
    return bool(begins) and begins not in {each.id for each in names}


def _is_enumerate(call: ast.Call, called: Any) -> bool:
    """Whether the built-in function is called, by whatever name."""
    return called is enumerate or (called is MISSING and path_of(call.func) == "enumerate")


def _length(node: ast.expr, value_of: Callable[[str], Any]) -> float:
    """How many items a value has, or ``range(n)``; infinite if that is not known."""
    match node:
        case ast.Call(args=[number]) if name_of_call(node) == "range":
            value = number.value if isinstance(number, ast.Constant) else value_of(path_of(number))
            return value if type(value) is int else math.inf
    value = value_of(path_of(node))
    return len(value) if isinstance(value, SIZED) else math.inf


def _batches_in(node: ast.expr, value_of: Callable[[str], Any]) -> float:
    """How many batches a pass has in ``snap.data(loader)``, or in a variable that holds that; infinite if that is not
    known, or it is something else."""
    match node:
        case ast.Call(args=[loader, *_]) if name_of_call(node) == "data":
            value = value_of(path_of(loader))
        case _:
            value = value_of(path_of(node))
            if not is_ours(value):
                return math.inf
    try:
        return len(value)
    except TypeError:  # such as a loader over a dataset that is gone through
        return math.inf
