"""Detects optimizers whose state is not captured: those that step the job's parameters, which is an error, and those
that step other tensors from turn to turn, as an outer optimizer does, of which the user is told. One that is made for a
turn, as by Reptile, leaves nothing to the next.

torch calls its global step hooks for every optimizer of the process, so this also finds an optimizer that is hidden in
an opaque wrapper.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.snapshot.copy.tensors import memory_of
from holdfast.snapshot.state.optimizers import has_step_hooks, nested

BESIDE = (
    "an optimizer, %s, steps tensors that are not of this job's model (%d), in one step after another, and is not "
    "captured: a restart begins both anew. If training reads what it leaves there, give it, too: optim=[..., that one]"
)

NOT_GIVEN = (
    "a %s steps %d parameters of this job, but it was not given, nor found inside a given optimizer, so its state is "
    "lost. Give it, too: optim=[..., that one]. If each turn makes its own, let go of it before the next ends"
)

log = get_log(__name__)


class Steppers:
    """Watches the steps of all optimizers in this process, from construction until `remove`. A step costs about 2 us.

    Args:
        given: the optimizers whose steps are the boundaries.
        captured: the optimizers whose state is captured: the given ones and those found inside them.
        parameters: the job's parameters.
        is_captured: whether any hook that this process has entered captures an optimizer.
    """

    def __init__(
        self,
        given: Sequence[Any],
        captured: Iterable[torch.optim.Optimizer],
        parameters: Iterable[torch.Tensor],
        is_captured: Callable[[torch.optim.Optimizer], bool] = lambda optimizer: False,
    ) -> None:
        self._known = {id(each): each for each in captured} | {id(each): each for each in given}
        self._given = {id(each) for each in given}
        self._inside = {id(each): path for one in given for path, each in nested(type(one).__qualname__, one)}
        self._parameters = list(parameters)
        self._met: WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = WeakKeyDictionary()
        self._alone: dict[int, int] = {}
        self._is_captured = is_captured
        self._turns = 0
        self._first: WeakKeyDictionary[torch.optim.Optimizer, int | None] = WeakKeyDictionary()  # None: it was told
        self._kept: list[torch.optim.Optimizer] = []  # that have stepped the job's parameters in several turns
        self._has_collected = False
        self._began = not all(map(has_step_hooks, given))
        self._handles = [register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)]

    def check(self) -> None:
        """A step has ended. Raises `ConfigError` if an optimizer that is not captured has stepped the job's
        parameters, and is still there, or steps again, after the turn in which it did."""
        self._turns += 1
        if self._met and not self._has_collected and self._left_over():
            self._has_collected = True  # a schedule, too, holds its optimizer until this
            gc.collect()
            self._kept += self._left_over()
        if self._kept:
            kind = type(self._kept[-1])  # one that wraps others steps last
            shared = self._met[self._kept[-1]][1]
            raise ConfigError(NOT_GIVEN % (f"{kind.__module__}.{kind.__qualname__}", shared))

    def _left_over(self) -> list[torch.optim.Optimizer]:
        """Those of the parameters that are there, though the turn in which they first stepped is long over."""
        earlier = [each for each, first in self._first.items() if first is not None and first < self._turns - 1]
        return [each for each in earlier if self._met[each][1]]

    def remove(self) -> None:
        """Stop watching. Idempotent."""
        while self._handles:
            self._handles.pop().remove()

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._began = self._began or id(optimizer) in self._given

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Raises `ConfigError` if a given wrapper never steps while an optimizer inside it does: without the wrapper's
        step there is no boundary at which `check` could be called."""
        if id(optimizer) not in self._known:
            self._meet(optimizer)
        elif not self._began:
            self._alone[id(optimizer)] = self._alone.get(id(optimizer), 0) + 1
            if self._alone[id(optimizer)] > 1:  # a single such step may only create the state
                path = self._inside.get(id(optimizer), type(optimizer).__qualname__)
                raise ConfigError(
                    f"{path} steps, but the given optimizer that wraps it does not, so no step would ever end. "
                    f"Give {path} itself, or call step() of its wrapper. If the wrapper, too, keeps something from "
                    "turn to turn, name that, as by snap.track"
                )

    def _meet(self, optimizer: torch.optim.Optimizer) -> None:
        groups, shared = self._met.get(optimizer, (0, 0))
        if groups != len(optimizer.param_groups):
            shared = self._count_shared(optimizer)
            self._met[optimizer] = len(optimizer.param_groups), shared
        wraps = shared and self._only_wraps(optimizer) and not any(optimizer.state.values())
        if wraps or (not shared and self._is_captured(optimizer)):
            return
        first = self._first.setdefault(optimizer, self._turns)
        if shared and first != self._turns:
            self._kept.append(optimizer)
        elif first not in (None, self._turns):
            self._first[optimizer] = None
            stepped = sum(len(group["params"]) for group in optimizer.param_groups)
            log.warning(BESIDE, type(optimizer).__qualname__, stepped)

    def _count_shared(self, optimizer: torch.optim.Optimizer) -> int:
        of_job = {id(parameter) for parameter in self._parameters}
        memory = {memory_of(parameter) for parameter in self._parameters}
        updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return sum(id(parameter) in of_job or memory_of(parameter) in memory for parameter in updated)

    def _only_wraps(self, optimizer: torch.optim.Optimizer) -> bool:
        inside = [each for _, each in nested("", optimizer) if each is not optimizer]
        return bool(inside) and all(id(each) in self._known for each in inside)
