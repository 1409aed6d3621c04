"""Finds where a step ends and the next one begins, by hooks on optimizers, modules and gradient scalers."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from traceback import walk_stack
from typing import Any, Protocol

import torch
from torch.amp.grad_scaler import GradScaler
from torch.utils.hooks import unserializable_hook

from holdfast.smp_daemon.shared.logs import Episodes, get_log
from holdfast.snapshot.state.optimizers import has_step_hooks
from holdfast.snapshot.state.walk import tensors_in
from holdfast.snapshot.step.graphs import Graphs, capturing
from holdfast.snapshot.step.hooks import ForwardHooks, Method, replaced

log = get_log(__name__)


class Listener(Protocol):
    """Told about the boundary, in the training thread. On a GPU autograd may call `on_backward` in a thread of its own,
    while the training thread waits for it."""

    def before_step(self) -> None:
        """``optim.step()`` is about to change the state."""
        ...

    def after_step(self) -> None:
        """``optim.step()`` has returned, or was skipped."""
        ...

    def on_forward(self, number: int, given: Any) -> None:
        """A module is about to run forward on what is `given`, in training mode and with gradients; `number` counts
        such forwards."""
        ...

    def on_evaluation(self) -> None:
        """A module has run forward in eval mode or without gradients."""
        ...

    def on_backward(self, number: int) -> None:
        """Gradients of that forward are computed."""
        ...


class Boundary:
    """Hooks on optimizers, modules and gradient scalers; `remove` takes them off again.

    The listener hears of the step of each optimizer. Events during the capture of a CUDA graph are reported at each
    replay, see `snapshot.step.graphs`. A `GradScaler` that finds an overflow skips the step; the boundary is then where
    the step would have been. A scaler that was not given is warned about when it first steps an optimizer.
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
        self._optimizers = list(optimizers)
        self._steps = 0  # how often any of them has begun to step
        self._looked_for_scalers = False
        self._depth: Counter[int] = Counter()
        self._graphs = Graphs()
        self._undo.append(self._graphs.remove)
        self._forwards = 0
        self._running: list[int] = []
        self._scalers = list(scalers)
        self._episodes = Episodes(log)
        # torch.compile must call these, not trace into them: they talk to other threads and processes.
        before, after = map(torch.compiler.disable, (self._before, self._after))
        self._undo.append(ForwardHooks(list(_running(modules)), self._forward, self._forwarded).remove)
        for optimizer in optimizers:
            if has_step_hooks(optimizer):
                first = optimizer.register_step_pre_hook(lambda stepped, *_: before(stepped))
                then = optimizer.register_step_post_hook(lambda stepped, *_: after(stepped))
                self._undo += [first.remove, then.remove]
            else:
                self._undo.append(self._wrap_optimizer(optimizer))
        for scaler in self._scalers:
            self._undo.append(self._wrap_scaler(scaler))

    def remove(self) -> None:
        """Leave everything as it was."""
        while self._undo:
            self._undo.pop()()

    def _forward(self, module: torch.nn.Module, *given: Any) -> None:
        if torch.compiler.is_compiling():
            return  # anything more would break the compiled graph
        trains = module.training and torch.is_grad_enabled()
        self._running.append(self._forwards + 1 if trains else 0)  # first: `_forwarded` is called even if this raises
        if trains:
            self._graphs.say(lambda: self._runs_forward(given))

    def _runs_forward(self, given: Any) -> None:
        self._forwards += 1
        self._listener.on_forward(self._forwards, given)

    def _forwarded(self, _module: torch.nn.Module, _given: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        number = self._running.pop()
        if not number:
            self._graphs.say(self._listener.on_evaluation)
        elif torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(unserializable_hook(lambda _: self._backward(number)))  # type: ignore[no-untyped-call]

    def _backward(self, number: int) -> None:
        captured = capturing()  # at a replay, gradients are of the forward replayed last
        self._graphs.say(lambda: self._listener.on_backward(self._forwards if captured else number))

    def _before(self, optimizer: Any) -> None:
        """Of nested steps, as with ``super().step()``, only the outermost counts."""
        if self._depth[id(optimizer)] and not _is_within_its_step(optimizer):
            self._depth[id(optimizer)] = 0  # the previous step raised
        self._depth[id(optimizer)] += 1
        if self._depth[id(optimizer)] == 1:
            self._graphs.say(lambda: self._is_stepping(optimizer))

    def _is_stepping(self, optimizer: Any) -> None:
        if not self._looked_for_scalers:
            self._check_scaler(optimizer)
        self._steps += 1
        self._listener.before_step()

    def _after(self, optimizer: Any) -> None:
        self._depth[id(optimizer)] = max(0, self._depth[id(optimizer)] - 1)
        if not self._depth[id(optimizer)]:
            self._graphs.say(self._has_stepped, after=True)

    def _has_stepped(self) -> None:
        self._graphs.heard()
        self._looked_for_scalers = True
        self._listener.after_step()

    def _check_scaler(self, optimizer: Any) -> None:
        """Warn if a scaler that is in use was not given."""
        scaler = _scaler_on_stack()
        if scaler is not None and scaler.is_enabled() and not any(scaler is given for given in self._scalers):
            self._episodes.begin(
                "scaler",
                "a %s steps %s and was not given to the hook: after a restart it begins with its initial scale, unless "
                'tracked, and steps that it skips are not counted. Give it as extra={"scaler": scaler}',
                type(scaler).__qualname__,
                type(optimizer).__qualname__,
            )

    def _wrap_optimizer(self, optimizer: Any) -> Callable[[], None]:
        """Wrap ``step`` of optimizers without step hooks, such as Megatron's and Accelerate's."""
        step = optimizer.step

        def stepping(*args: Any, **kwargs: Any) -> Any:
            self._before(optimizer)
            result = step(*args, **kwargs)
            self._after(optimizer)
            return result

        return replaced(optimizer, "step", Method(optimizer, "step", stepping))

    def _wrap_scaler(self, scaler: GradScaler) -> Callable[[], None]:
        step = scaler.step

        def stepping(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = self._steps
            result = step(optimizer, *args, **kwargs)
            if self._steps == before and any(optimizer is given for given in self._optimizers):
                self._before(optimizer)  # the scaler has skipped it
                self._after(optimizer)
            return result

        return replaced(scaler, "step", Method(scaler, "step", stepping))


def _running(modules: Sequence[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    """The modules that are called: a module that only holds others, such as a `ModuleDict`, is replaced by those."""
    for module in modules:
        # A compiled module has no attribute `forward` before it is made, so it is not asked for one.
        forward = inspect.getattr_static(type(module), "forward")
        if forward is torch.nn.Module.forward and "forward" not in vars(module):
            yield from _running(list(module.children()))
        else:
            yield module


def _is_within_its_step(optimizer: Any) -> bool:
    """Whether torch's wrapper of ``optimizer.step`` is on the stack twice, counting the call that has just begun."""
    count = 0
    for frame, _ in walk_stack(sys._getframe()):
        if frame.f_code.co_name == "wrapper" and frame.f_globals.get("__name__") == "torch.optim.optimizer":
            count += frame.f_locals.get("self") is optimizer
    return count > 1


def _scaler_on_stack() -> GradScaler | None:
    """The scaler whose ``step`` is on the stack, if one is."""
    frames = (frame for frame, _ in walk_stack(sys._getframe()))
    return next((frame.f_locals["self"] for frame in frames if frame.f_code is GradScaler.step.__code__), None)
