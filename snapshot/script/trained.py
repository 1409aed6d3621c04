"""What of a function's variables is trained: models, optimizers, what data is read through, and parts of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from holdfast.snapshot.script.origins import NONE, Origins
from holdfast.snapshot.script.running import MISSING, Helper, RunningValues
from holdfast.snapshot.script.syntax import innermost_path, name_of_call, path_of, root_of
from holdfast.snapshot.state.walk import package_of

PARTS = frozenset({"param_groups", "params", "parameters", "named_parameters", "modules", "named_modules"})
"""Names of what a loop over parts of a model, or of an optimizer, goes through."""

GRADELESS = frozenset({"no_grad", "inference_mode"})
"""A module that is called in such a block trains nothing by itself."""

DRAWS = re.compile("rand|normal(_|$)|uniform|bernoulli|multinomial|shuffle|choice|permut|sample|generat")
"""A function with such a name draws random numbers. If it is called at other times, later steps draw others."""


class Trained:
    """What is trained, as of the statement that has been reached.

    Args:
        values: the values of the function's variables as it runs.
    """

    def __init__(self, values: RunningValues) -> None:
        self._value_of = values.of
        self._is_graded = True  # whether gradients are computed there
        self._parts: set[str] = set()  # variables of loops over what is trained
        self._evaluated: set[str] = set()  # modules that are in eval mode there

    def has(self, node: ast.expr) -> bool:
        """Whether it is a model, an optimizer or a part of one."""
        return trains(self._value_of(path_of(node))) or self.has_part(node)

    def has_part(self, node: ast.AST | None) -> bool:
        """Whether it is a variable of a loop over what is trained, or is read from one."""
        return isinstance(node, ast.expr) and root_of(innermost_path(node)) in self._parts

    def set_from(self, target: ast.Attribute | ast.Subscript, origins: Origins) -> Origins:
        """Which of these origins of a value that is assigned to it reach what is trained by that. What a method of a
        module leaves there for itself does if the module returns what depends on it, which is followed."""
        if self.has_part(target.value):
            return origins  # whatever another variable of that name is now
        changed, itself = self._value_of(path_of(target.value)), self._value_of("self")
        if changed is MISSING:
            return origins if path_of(target).endswith(("['lr']", ".grad")) else NONE
        own = frozenset(each for each in origins if changed is itself and root_of(each) == "self")
        return origins - own if trains(changed) else NONE

    def loop(self, target: ast.expr, over: ast.expr) -> None:
        """A loop begins, which may be one over parts of what is trained."""
        if any(_last_name(each) in PARTS or self.has_part(each) for each in ast.walk(over)):
            self._parts |= {each.id for each in ast.walk(target) if isinstance(each, ast.Name)}

    @contextmanager
    def block(self) -> Iterator[None]:
        """For a block of the function: after it, gradients are computed as before it."""
        is_graded = self._is_graded
        yield
        self._is_graded = is_graded

    def enter(self, context: ast.expr) -> None:
        """The block enters this, in which there may be no gradients."""
        self._is_graded &= _last_name(getattr(context, "func", context)) not in GRADELESS

    def switch(self, module: str, mode: str) -> None:
        """``train()`` or ``eval()`` of a module is called."""
        change = self._evaluated.add if mode == "eval" else self._evaluated.discard
        change(module)

    def is_training(self, module: str) -> bool:
        """Whether a module is in training mode."""
        return self._value_of(module).training and module not in self._evaluated

    def by_call(self, function: str, owner: Any) -> bool:
        """Whether what is called there is trained, or trains, or is a method of such an `owner`."""
        called = self._value_of(function)
        if not self._is_graded and isinstance(called, torch.nn.Module):
            return self.is_training(function) and any(each._buffers for each in called.modules())
        return trains(called) or trains(owner)

    def leaves_traces(self, call: ast.Call, helper: Helper | None) -> bool:
        """Whether a call, however little it has to do with the training, changes what later steps compute if it comes
        at another time: it draws random numbers, as every new iterator of a loader does, or runs a module in training
        mode that draws or changes buffers. `helper`: the function, if it can be followed."""
        function = path_of(call.func)
        called = self._value_of(function)
        if isinstance(called, torch.nn.Module):
            return self.is_training(function) and any(_rate_of(each) or each._buffers for each in called.modules())
        if function == "len":
            return False  # of a loader, as logs say how many batches there are
        given = [*call.args, *(each.value for each in call.keywords)]
        if DRAWS.search(name_of_call(call).lower()) or any(seeds(self._value_of(path_of(each))) for each in given):
            return True
        return helper is not None and helper.reads(seeds)


def trains(value: Any) -> bool:
    """Whether an object is a model, an optimizer, a part of one, a schedule, or what data is read through, or a method
    of such."""
    owner = getattr(value, "__self__", value) if isinstance(value, MethodType) else value
    if isinstance(owner, torch.nn.Module | torch.optim.Optimizer | torch.nn.Parameter | DataLoader | Dataset | Sampler):
        return True
    if isinstance(owner, dict):
        return "params" in owner and "lr" in owner
    return package_of(type(owner).__module__) == "torch" and hasattr(owner, "optimizer")


def seeds(value: Any) -> bool:
    """Whether a value is a loader whose iterators draw their seeds from torch's global generator, or, as Fabric's is,
    an object around one."""
    inner = getattr(value, "__dict__", {}).values() if hasattr(type(value), "__iter__") else ()
    return any(isinstance(each, DataLoader) and each.generator is None for each in (value, *inner))


def adds_parameters(node: ast.AST) -> bool:
    """Whether it gives an optimizer another group of parameters."""
    return isinstance(node, ast.Call) and name_of_call(node) == "add_param_group"


def _rate_of(module: torch.nn.Module) -> float:
    return module.p if isinstance(module, torch.nn.modules.dropout._DropoutNd) else 0.0


def _last_name(node: ast.AST) -> str:
    """``c`` for ``a.b.c`` and for ``a["c"]``."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Subscript(slice=ast.Constant(value=str() as name)):
            return name
    return ""
