"""Finding the boundary between steps: just before and just after ``optim.step()``, and the next forward."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, Protocol

import torch
from torch.amp.grad_scaler import GradScaler


class Listener(Protocol):
    """Told about the boundary, in the training thread."""

    def before_step(self) -> None:
        """``optim.step()`` is about to change the state."""
        ...

    def after_step(self) -> None:
        """``optim.step()`` has returned, or was skipped."""
        ...

    def on_forward(self) -> None:
        """A module is about to run forward."""
        ...


class Boundary:
    """Hooks on optimizers, modules and gradient scalers; `remove` takes them off again.

    With several optimizers, the state may change before the step of each, and a step ends with that of the last.
    A `GradScaler` that finds an overflow skips the step; the boundary is then where the step would have been.
    """

    def __init__(
        self,
        optimizers: Sequence[Any],
        modules: Sequence[torch.nn.Module],
        listener: Listener,
        scalers: Iterable[GradScaler] = (),
    ) -> None:
        self._undo: list[Callable[[], None]] = []
        self._listener = listener
        self._last = optimizers[-1]
        self._ended = True
        self._depth: Counter[int] = Counter()
        for module in modules:
            handle = module.register_forward_pre_hook(lambda module, inputs: self._forward())
            self._undo.append(handle.remove)
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.Optimizer):
                before = optimizer.register_step_pre_hook(lambda stepped, *_: self._before(stepped))
                after = optimizer.register_step_post_hook(lambda stepped, *_: self._after(stepped))
                self._undo += [before.remove, after.remove]
            else:
                self._undo.append(self._wrap_optimizer(optimizer))
        for scaler in scalers:
            self._undo.append(self._wrap_scaler(scaler))

    def remove(self) -> None:
        """Leave everything as it was."""
        while self._undo:
            self._undo.pop()()

    def _forward(self) -> None:
        if torch.compiler.is_compiling():
            return  # it would break the graph; before the next step there is another chance
        self._listener.on_forward()

    def _before(self, optimizer: Any) -> None:
        """Of steps within steps, as with ``super().step()``, only the outermost counts."""
        if self._depth[id(optimizer)] and not _is_within_its_step(optimizer):
            self._depth[id(optimizer)] = 0  # the one before raised
        self._depth[id(optimizer)] += 1
        if self._depth[id(optimizer)] == 1:
            self._ended = False
            self._listener.before_step()

    def _after(self, optimizer: Any) -> None:
        self._depth[id(optimizer)] = max(0, self._depth[id(optimizer)] - 1)
        if optimizer is self._last and not self._depth[id(optimizer)]:
            self._ended = True
            self._listener.after_step()

    def _wrap_optimizer(self, optimizer: Any) -> Callable[[], None]:
        """For those without step hooks, such as Megatron's."""
        step = optimizer.step

        def stepping(*args: Any, **kwargs: Any) -> Any:
            self._before(optimizer)
            result = step(*args, **kwargs)
            self._after(optimizer)
            return result

        return _replace_step(optimizer, stepping)

    def _wrap_scaler(self, scaler: GradScaler) -> Callable[[], None]:
        step = scaler.step

        def stepping(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._ended = False
            result = step(optimizer, *args, **kwargs)
            if optimizer is self._last and not self._ended:
                self._before(optimizer)
                self._after(optimizer)
            return result

        return _replace_step(scaler, stepping)


def _is_within_its_step(optimizer: Any) -> bool:
    """Whether torch's wrapper of ``optimizer.step`` is on the stack twice, the one that has just begun included."""
    count = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "wrapper" and frame.f_globals.get("__name__") == "torch.optim.optimizer":
            count += frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return count > 1


def _replace_step(owner: Any, stepping: Callable[..., Any]) -> Callable[[], None]:
    """Stand in for the method on this one object; returns how to undo it."""
    earlier = vars(owner).get("step")
    owner.step = stepping

    def undo() -> None:
        if earlier is None:
            del owner.step
        else:
            owner.step = earlier

    return undo
