"""Finding out where a step ends and the next one begins: hooks on optimizers, modules and gradient scalers."""

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
from holdfast.snapshot.state.inputs import tensors_in
from holdfast.snapshot.state.optimizers import has_step_hooks
from holdfast.snapshot.step.graphs import Graphs, capturing

BEGIN = "call `snap.begin()` at the top of the loop, or use `snap.steps(n)` or `snap.data(loader)`"
"""What repairs it where a loop cannot be followed by itself."""

log = get_log(__name__)


class Listener(Protocol):
    """Told about the boundary, in the training thread."""

    def before_step(self) -> None:
        """``optim.step()`` is about to change the state."""
        ...

    def after_step(self) -> None:
        """``optim.step()`` has returned, or was skipped."""
        ...

    def on_forward(self, number: int, given: Any) -> None:
        """A module is about to run forward on what is `given`, in training and with gradients, for the `number`-th
        time."""
        ...

    def on_backward(self, number: int) -> None:
        """Gradients of that forward are computed, so it was no evaluation; 0: of one that nobody told of."""
        ...


class Boundary:
    """Hooks on optimizers, modules and gradient scalers; `remove` takes them off again.

    With several optimizers, the state may change before the step of each, and a step ends with that of the last. If the
    loop says itself where its steps begin (`declared`), the listener hears of each optimizer.
    What is captured into a CUDA graph is told of at each replay, see `snapshot.step.graphs`.
    A `GradScaler` that finds an overflow skips the step; the boundary is then where the step would have been. One that
    was not given is told of when it first steps an optimizer.

    Attributes:
        declared: the order of optimizers does not matter.
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
        # torch.compile must call these, not look into them: they talk to other threads and processes.
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
            return  # it would break the graph
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
        captured = capturing()  # of a replay, it is that of the forward that was replayed last
        self._graphs.say(lambda: self._listener.on_backward(self._forwards if captured and number else number))

    def _before(self, optimizer: Any) -> None:
        """Of steps within steps, as with ``super().step()``, only the outermost counts."""
        if self._depth[id(optimizer)] and not _is_within_its_step(optimizer):
            self._depth[id(optimizer)] = 0  # the one before raised
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
        """Raises `ConfigError` if an optimizer first steps after the last one has: that one does not end the step."""
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
        """Say so if a scaler that is at work was not given."""
        scaler = _scaler_on_stack()
        if scaler is not None and scaler.is_enabled() and not any(scaler is given for given in self._scalers):
            self._episodes.begin(
                "scaler",
                "a %s steps %s and was not given: after a restart it begins with its first scale, unless tracked, "
                'and a step that it skips is not counted. Give it as extra={"scaler": scaler}',
                type(scaler).__qualname__,
                type(optimizer).__qualname__,
            )

    def _wrap_optimizer(self, optimizer: Any) -> Callable[[], None]:
        """For those without step hooks, such as Megatron's and Accelerate's."""
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
                self._check_order(optimizer)  # of this step, whether it is skipped or not
            self._ended = False
            result = step(optimizer, *args, **kwargs)
            if optimizer is self._last and not self._ended:
                self._before(optimizer)
                self._after(optimizer)
            return result

        return _replace_step(scaler, stepping)


def _running(modules: Sequence[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    """The modules that are called: of those that only hold others, such as a `ModuleDict`, these."""
    for module in modules:
        if type(module).forward is torch.nn.Module.forward and "forward" not in vars(module):
            yield from _running(list(module.children()))
        else:
            yield module


def _first_trained(modules: Sequence[torch.nn.Module]) -> Iterator[torch.nn.Parameter]:
    """A parameter of each module that gets gradients: they tell of a backward whose forward nobody saw."""
    for module in modules:
        yield from [parameter for parameter in module.parameters() if parameter.requires_grad][:1]


def _is_within_its_step(optimizer: Any) -> bool:
    """Whether torch's wrapper of ``optimizer.step`` is on the stack twice, the one that has just begun included."""
    count = 0
    for frame in _stack():
        if frame.f_code.co_name == "wrapper" and frame.f_globals.get("__name__") == "torch.optim.optimizer":
            count += frame.f_locals.get("self") is optimizer
    return count > 1


def _scaler_on_stack() -> GradScaler | None:
    """The scaler in whose ``step`` this is, if it is in one."""
    return next((frame.f_locals["self"] for frame in _stack() if frame.f_code is GradScaler.step.__code__), None)


def _stack() -> Iterator[FrameType]:
    """The frames of this thread, from that of the caller outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


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
