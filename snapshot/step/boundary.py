"""Finds where a step ends and the next one begins, by hooks on optimizers, modules and gradient scalers."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, Protocol

import torch
from torch.amp.grad_scaler import GradScaler

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.logs import Episodes, get_log
from holdfast.snapshot.state.optimizers import has_step_hooks
from holdfast.snapshot.state.walk import tensors_in
from holdfast.snapshot.step.graphs import Graphs, capturing

BEGIN = "call `snap.begin()` at the top of the loop, or use `snap.steps(n)` or `snap.data(loader)`"
"""Advice for a loop whose steps cannot be recognised."""

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

    def on_backward(self, number: int) -> None:
        """Gradients of that forward are computed, so it was no evaluation; 0: of a forward that was not reported."""
        ...


class Boundary:
    """Hooks on optimizers, modules and gradient scalers; `remove` takes them off again.

    With several optimizers, the state may change before the step of each, and the last one's step ends the training
    step. If the loop itself says where its steps begin (`declared`), the listener hears of each optimizer.
    Events during the capture of a CUDA graph are reported at each replay, see `snapshot.step.graphs`.
    A `GradScaler` that finds an overflow skips the step; the boundary is then where the step would have been. A scaler
    that was not given is warned about when it first steps an optimizer.

    Attributes:
        declared: whether the loop says where its steps begin, so that the order of optimizers does not matter.
    """

    def __init__(
        self,
        optimizers: Sequence[Any],
        modules: Sequence[torch.nn.Module],
        listener: Listener,
        scalers: Iterable[GradScaler] = (),
    ) -> None:
        self.declared = False
        self._undo: list[Callable[[], None]] = []
        self._listener = listener
        self._last = optimizers[-1]
        self._ended = True
        self._ended_once = False
        self._stepped: list[Any] = []
        self._others = [optimizer for optimizer in optimizers if optimizer is not self._last]
        self._depth: Counter[int] = Counter()
        self._graphs = Graphs()
        self._undo.append(self._graphs.remove)
        self._forwards = 0
        self._running: list[int] = []
        self._scalers = list(scalers)
        self._episodes = Episodes(log)
        # torch.compile must call these, not trace into them: they talk to other threads and processes.
        before, after, backward = map(torch.compiler.disable, (self._before, self._after, self._backward))
        for module in _running(modules):
            entering = module.register_forward_pre_hook(
                lambda m, *given: self._forward(m, given), prepend=True, with_kwargs=True
            )
            self._undo.append(entering.remove)
            self._undo.append(
                module.register_forward_hook(lambda _m, _i, out: self._forwarded(out), always_call=True).remove
            )
        for parameter in _first_trained(modules):
            self._undo.append(parameter.register_hook(lambda _: backward(0)).remove)  # type: ignore[no-untyped-call]
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

    def _forward(self, module: torch.nn.Module, given: Any) -> None:
        if torch.compiler.is_compiling():
            return  # anything more would break the compiled graph
        trains = module.training and torch.is_grad_enabled()
        self._running.append(self._forwards + 1 if trains else 0)  # first: `_forwarded` is called even if this raises
        if trains:
            self._graphs.say(lambda: self._runs_forward(given))

    def _runs_forward(self, given: Any) -> None:
        self._forwards += 1
        self._listener.on_forward(self._forwards, given)

    def _forwarded(self, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        number = self._running.pop()
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: self._backward(number))  # type: ignore[no-untyped-call]

    def _backward(self, number: int) -> None:
        captured = capturing()  # at a replay, gradients are of the forward replayed last
        self._graphs.say(lambda: self._listener.on_backward(self._forwards if captured and number else number))

    def _before(self, optimizer: Any) -> None:
        """Of nested steps, as with ``super().step()``, only the outermost counts."""
        if self._depth[id(optimizer)] and not _is_within_its_step(optimizer):
            self._depth[id(optimizer)] = 0  # the previous step raised
        self._depth[id(optimizer)] += 1
        if self._depth[id(optimizer)] == 1:
            self._graphs.say(lambda: self._steps(optimizer))

    def _steps(self, optimizer: Any) -> None:
        self._check_order(optimizer)
        if not self._ended_once:
            self._check_scaler(optimizer)
        self._ended = False
        self._listener.before_step()

    def _after(self, optimizer: Any) -> None:
        self._depth[id(optimizer)] = max(0, self._depth[id(optimizer)] - 1)
        if not self._depth[id(optimizer)]:
            self._graphs.say(lambda: self._has_stepped(optimizer), after=True)

    def _has_stepped(self, optimizer: Any) -> None:
        self._graphs.heard()
        if optimizer is self._last:
            self._ended = self._ended_once = True
        if self.declared or optimizer is self._last:
            self._listener.after_step()

    def _check_order(self, optimizer: Any) -> None:
        """Raise `ConfigError` if an optimizer steps for the first time after the last one has: then that one does not
        end the step."""
        if self.declared or optimizer is self._last or optimizer in self._stepped:
            return
        if self._ended_once:
            number = self._others.index(optimizer) + 1
            raise ConfigError(
                f"optimizer {number} of {len(self._others) + 1}, a {type(optimizer).__qualname__}, steps after the "
                f"last one that `optim` lists, with which a step is taken to end: list them in the order of their "
                f"steps; or {BEGIN}"
            )
        self._stepped.append(optimizer)

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

        return _replace_step(optimizer, stepping)

    def _wrap_scaler(self, scaler: GradScaler) -> Callable[[], None]:
        step = scaler.step

        def stepping(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if optimizer is self._last or any(optimizer is other for other in self._others):
                self._check_order(optimizer)  # also for a step that the scaler skips
            self._ended = False
            result = step(optimizer, *args, **kwargs)
            if optimizer is self._last and not self._ended:
                self._before(optimizer)
                self._after(optimizer)
            return result

        return _replace_step(scaler, stepping)


def _running(modules: Sequence[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    """The modules that are called: a module that only holds others, such as a `ModuleDict`, is replaced by those."""
    for module in modules:
        if type(module).forward is torch.nn.Module.forward and "forward" not in vars(module):
            yield from _running(list(module.children()))
        else:
            yield module


def _first_trained(modules: Sequence[torch.nn.Module]) -> Iterator[torch.nn.Parameter]:
    """A parameter of each module that gets gradients: it tells of a backward whose forward was not seen."""
    for module in modules:
        yield from [parameter for parameter in module.parameters() if parameter.requires_grad][:1]


def _is_within_its_step(optimizer: Any) -> bool:
    """Whether torch's wrapper of ``optimizer.step`` is on the stack twice, counting the call that has just begun."""
    count = 0
    for frame in _stack():
        if frame.f_code.co_name == "wrapper" and frame.f_globals.get("__name__") == "torch.optim.optimizer":
            count += frame.f_locals.get("self") is optimizer
    return count > 1


def _scaler_on_stack() -> GradScaler | None:
    """The scaler whose ``step`` is on the stack, if one is."""
    return next((frame.f_locals["self"] for frame in _stack() if frame.f_code is GradScaler.step.__code__), None)


def _stack() -> Iterator[FrameType]:
    """The frames of this thread, from the caller's outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _replace_step(owner: Any, stepping: Callable[..., Any]) -> Callable[[], None]:
    """Replace the method on this one object; returns a function that undoes it."""
    earlier = vars(owner).get("step")
    owner.step = stepping

    def undo() -> None:
        if earlier is None:
            del owner.step
        else:
            owner.step = earlier

    return undo
