"""What a loop over the batches of a pass counts, and begins anew where a restart goes on in the middle of that pass."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from holdfast.snapshot.state.walk import is_ours
from holdfast.snapshot.step.origins import PLACE, Origins
from holdfast.snapshot.step.script import MISSING, reads_on
from holdfast.snapshot.step.syntax import name_of_call, path_of

COUNTS = frozenset({"range", "count", "cycle", "accumulate"})
"""Functions whose iterators begin at the same numbers whenever they are made."""

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
            yield from [(part, ""), *[(target, "")] * (_length(each, value_of) < batches)]


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
