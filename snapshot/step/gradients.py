"""What gradients tell about a loop: whether they are kept from one step to the next, whether steps are skipped, and
whether a turn trains before its step begins.

One parameter of each module is watched, just before a gradient is added to the one that it has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from holdfast.snapshot.copy.tensors import local
from holdfast.snapshot.step.graphs import capturing
from holdfast.snapshot.step.hooks import on_added_gradient, on_gradient

STEPS_ON_DEVICES = 8
"""On a GPU gradients are looked at only in this many steps: reading a value there waits for the device."""

STEPS_NOTED = 8
"""Snapshots of so many first steps note, on CPUs, which gradients there were: later on the process has seen whether it
keeps any."""

MOST_ZEROED = 16
"""How often gradients may be computed and zeroed again before the first optimizer steps: warming up does so."""

MOST_WITHOUT_A_STEP = 100
"""How often gradients may be computed before the first optimizer steps, without a warning."""

KEPT = (
    "the gradients of %s are not zeroed between two steps; they are not captured, so a restored job goes on without "
    "them, and with other results: zero them in every step"
)
NO_STEP = (
    "gradients were computed %d times, and no optimizer that the hook was given has stepped: no snapshot is taken. "
    "Give it the optimizer whose step() the loop calls"
)

MOST_TURNS = 8
"""After so many turns without a step, in all of which gradients were zeroed, a loop has another optimizer."""

ANOTHER_OPTIMIZER = (
    "gradients were computed and zeroed in %d turns in a row, and no optimizer that the hook was given has stepped: no "
    "snapshot is taken any more. If the loop has made another optimizer, make it before the block, and give the hook a "
    "list of both; or end the block before it is made, and enter another one with it"
)


class Gradients:
    """Watches one rank's gradients. Used by the training thread; autograd may run the hooks in a thread of its own
    while the training thread waits for it.

    Args:
        say: logs a warning.
        zeroed: called as gradients are computed once more in a step, and were zeroed meanwhile.
    """

    def __init__(
        self, modules: Sequence[torch.nn.Module], say: Callable[..., object], zeroed: Callable[[], None]
    ) -> None:
        self._say = say
        self._zeroed = zeroed
        self._times_zeroed = 0
        self._was_zeroed = False  # in this turn
        self._turns = 0  # since the last step, if gradients were zeroed in each
        self._said: set[str] = set()
        self._steps = 0
        self._seen: dict[str, bool | None] = {}  # in this step, and whether any that was not zero was added
        self._added: set[str] = set()  # those of them that were not only computed, as by `torch.autograd.grad`
        self._kept: dict[str, int] = {}  # those of them whose gradients were added to an earlier step's, and when
        self._count = 0
        self._watched = dict(first_trained(modules))
        self._undo = [on_gradient(parameter, self._watch(name, parameter)) for name, parameter in self._watched.items()]
        self._undo += [on_added_gradient(parameter, self._noting(name)) for name, parameter in self._watched.items()]

    def stepped(self) -> None:
        """A step has ended."""
        self._steps += 1
        self._turns, self._was_zeroed = 0, False
        for name, version in self._kept.items():
            parameter = self._watched[name]
            # Where nothing has changed the parameter, and its gradient is zero now, they were zeroed unused.
            if parameter._version != version or self._holds(parameter.grad) is not False:
                self._once(KEPT, name)
        self._kept.clear()
        self._seen.clear()

    def come_round(self) -> None:
        """A loop that says where its steps begin has come round, and no optimizer has stepped."""
        self._turns, self._was_zeroed = self._turns + 1 if self._was_zeroed else 0, False
        if self._turns == MOST_TURNS and self._steps:
            self._once(ANOTHER_OPTIMIZER, self._turns)

    def unused(self) -> bool:
        """Whether gradients were computed since the last step, and not zeroed. On a GPU this waits for the device."""
        found = (self._watched[name].grad for name in self._seen)
        return any(gradient is not None and _is_nonzero(gradient) for gradient in found)

    def check(self) -> None:
        """The loop has ended: warn if gradients were computed and no step has followed."""
        if self._steps == 0 and self._count:
            self._once(NO_STEP, self._count)

    def remove(self) -> None:
        """Stop watching."""
        self._watched.clear()
        self._kept.clear()
        while self._undo:
            self._undo.pop()()

    def _noting(self, name: str) -> Callable[[torch.Tensor], None]:
        return lambda parameter: self._added.add(name)

    def _watch(self, name: str, parameter: torch.Tensor) -> Callable[[torch.Tensor], None]:
        at_first = parameter._version

        def before_it_is_added(gradient: torch.Tensor) -> None:
            if capturing():
                return  # nothing is computed, and to read a value would ruin the capture
            self._count += 1
            is_unchanged = parameter._version == at_first  # else an optimizer steps many times in the first turn
            if self._steps == 0 and self._count == MOST_WITHOUT_A_STEP and is_unchanged:
                self._once(NO_STEP, self._count)
            if hasattr(parameter, "main_grad"):
                return  # Megatron adds them up in `main_grad`, and takes `grad` away here
            if name not in self._added:
                self._seen.pop(name, None)
                self._kept.pop(name, None)
            first, added = name not in self._seen, self._seen.get(name)
            if first:
                self._added.discard(name)
            self._seen[name] = added or self._holds(gradient)
            if first and not self._steps:
                return
            held = self._holds(parameter.grad)
            if first and held:
                self._kept[name] = parameter._version
            elif not first and held is False and (added or parameter.grad is None):  # else it was zero before, too
                if self._kept.get(name) == parameter._version:  # else a step has used them
                    del self._kept[name]  # as what a generator leaves in a discriminator is, before that trains
                self._times_zeroed += 1
                self._was_zeroed = True
                if self._steps or self._times_zeroed >= MOST_ZEROED:
                    self._zeroed()

        return before_it_is_added

    def _holds(self, gradient: torch.Tensor | None) -> bool | None:
        """Whether there is a gradient that is not zero; None: it is not looked at."""
        if gradient is None:
            return False
        if gradient.device.type != "cpu" and self._steps > STEPS_ON_DEVICES:
            return None
        return _is_nonzero(gradient)

    def _once(self, text: str, *values: object) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text, *values)


class Forgotten:
    """Notices, in the first turn after a restart, that it adds to gradients that the snapshot did not hold. `Gradients`
    finds the same in a process that has made two steps. Used by the training thread, as that.

    Args:
        held: the parameters that had a gradient as the snapshot was taken; see `holding`. A restore gives them zeros.
        say: logs a warning.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], held: Collection[str], say: Callable[..., object]) -> None:
        self._say = say
        self._unseen = {name: p for name, p in first_trained(modules) if name in held and p.grad is not None}
        self._as_restored: set[str] = set()  # those whose gradient nobody had touched before the newest was computed
        self._undo = [on_gradient(parameter, self._watch(name, parameter)) for name, parameter in self._unseen.items()]
        self._undo += [on_added_gradient(parameter, self._telling(name)) for name, parameter in self._unseen.items()]

    def remove(self) -> None:
        """Stop watching."""
        self._unseen.clear()
        while self._undo:
            self._undo.pop()()

    def _watch(self, name: str, parameter: torch.Tensor) -> Callable[[torch.Tensor], None]:
        restored = _state_of(parameter.grad)

        def before_it_is_added(gradient: torch.Tensor) -> None:
            is_as_restored = _state_of(parameter.grad) == restored
            (self._as_restored.add if is_as_restored else self._as_restored.discard)(name)

        return before_it_is_added

    def _telling(self, name: str) -> Callable[[torch.Tensor], None]:
        def as_it_was_added(parameter: torch.Tensor) -> None:
            if self._unseen.pop(name, None) is not None and name in self._as_restored:
                self._say(KEPT, name)  # nobody has zeroed it

        return as_it_was_added


def _state_of(gradient: torch.Tensor | None) -> tuple[int, int] | None:
    """What changes if a gradient is replaced or written."""
    return None if gradient is None else (id(gradient), gradient._version)  # a sparse one has no address


def holding(modules: Sequence[torch.nn.Module]) -> list[str]:
    """The first parameters of modules that have a gradient which is not zero. Those on a GPU are left out: to read one
    there waits for the device, as a step begins."""
    found = ((name, parameter.grad) for name, parameter in first_trained(modules))
    on_cpu = [(name, gradient) for name, gradient in found if gradient is not None and gradient.device.type == "cpu"]
    return [name for name, gradient in on_cpu if _is_nonzero(gradient)]


def _is_nonzero(gradient: torch.Tensor) -> bool:
    """Of a sharded one, this rank's part: to look at all of it would be a collective call, and other ranks may not make
    it, such as those that read no data."""
    return bool(local(gradient).any())


class Ahead:
    """Finds turns that run forward before they read the batch that begins their step, as where a loop reads each batch
    while it trains on the one before. A restart would begin such a turn with the random numbers, and the batch, of its
    middle. Used as `Gradients`.
    """

    FOUND = re.compile("[fgb]*[fg][fgb]*m+b|[fgb]*b[fgb]*m+[gs]")
    """What has happened since an optimizer stepped: (f) a module ran forward, (g) the same while there were gradients
    that were not zero, (b) gradients were computed, (m) data was about to be read, (s) an optimizer is about to step.

    Either gradients are computed after the batch was read, without another forward; or they were computed before, and
    the next forward or step still finds them.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._events: list[str] | None = None  # None: no optimizer has stepped yet
        self._parameters = [parameter for _, parameter in first_trained(modules)]
        self._undo = [on_gradient(parameter, lambda gradient: self._note("b")) for parameter in self._parameters]

    def stepped(self) -> None:
        """An optimizer has stepped: in a turn with several, what comes next may be for another one."""
        self._events = []

    def reads(self) -> None:
        """Data is about to be read."""
        self._note("m")

    def found(self, what: str) -> bool:
        """A module is about to run forward (f), or an optimizer to step (s). On a GPU this may wait for the device."""
        events = "".join(self._events or ())
        looks = what == "f" and "m" in events and not capturing()  # to read a value would ruin the capture
        gradients = [each.grad for each in self._parameters] if looks else []
        if any(each is not None and _is_nonzero(each) for each in gradients):
            what = "g"
        self._note(what)
        return self.FOUND.match(events + what) is not None

    def remove(self) -> None:
        """Stop watching."""
        while self._undo:
            self._undo.pop()()

    def _note(self, event: str) -> None:
        if self._events is not None:
            self._events.append(event)


def first_trained(modules: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The first parameter of each module that is trained, by its name."""
    for i, module in enumerate(modules):
        named = ((f"model{i}.{name}", p) for name, p in module.named_parameters() if p.requires_grad)
        yield from [next(named)] if any(p.requires_grad for p in module.parameters()) else []
