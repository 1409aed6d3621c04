"""Finding the boundary between steps: just before and just after ``optim.step()``, and the next forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class Listener(Protocol):
    """Told about the boundary, in the training thread."""

    def before_step(self) -> None:
        """``optim.step()`` is about to change the state."""
        ...

    def after_step(self) -> None:
        """``optim.step()`` has returned."""
        ...

    def on_forward(self) -> None:
        """A module is about to run forward."""
        ...


class Boundary:
    """Hooks on an optimizer and on modules; `remove` takes them off again."""

    def __init__(self, optimizer: Any, modules: Sequence[torch.nn.Module], listener: Listener) -> None:
        self._undo: list[Callable[[], None]] = []
        for module in modules:
            handle = module.register_forward_pre_hook(lambda module, inputs: listener.on_forward())
            self._undo.append(handle.remove)
        if isinstance(optimizer, torch.optim.Optimizer):
            before = optimizer.register_step_pre_hook(lambda *_: listener.before_step())
            after = optimizer.register_step_post_hook(lambda *_: listener.after_step())
            self._undo += [before.remove, after.remove]
        else:
            self._undo.append(_wrap_step(optimizer, listener))

    def remove(self) -> None:
        """Leave everything as it was."""
        while self._undo:
            self._undo.pop()()


def _wrap_step(optimizer: Any, listener: Listener) -> Callable[[], None]:
    """For optimizers without step hooks, such as Megatron's: stand in for the method on this one object."""
    step = optimizer.step

    def stepping(*args: Any, **kwargs: Any) -> Any:
        listener.before_step()
        result = step(*args, **kwargs)
        listener.after_step()
        return result

    optimizer.step = stepping

    def undo() -> None:
        del optimizer.step

    return undo
