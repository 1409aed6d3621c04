"""The hook's interface to a framework. Each framework has one implementation, in `integrations`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from holdfast.smp_daemon.shared.slotfile import Leaf
from holdfast.snapshot.state.live import At, Container, LiveTensor, Look, Tree, Updated
from holdfast.snapshot.state.steppers import Steppers
from holdfast.snapshot.state.tracked import Tracked


class Adapter(Protocol):
    """A job's state on this rank. Called from the training thread only.

    Attributes:
        rebuilds: what the user has said for `rebuild`.
    """

    rebuilds: list[Callable[[At], object]]

    def coordinate(self) -> str:
        """The rank's logical place, which does not change when ranks are renumbered."""
        ...

    def replica_set(self) -> str:
        """Name of the set of ranks that hold `replicated` tensors alike: the same on each of them."""
        ...

    def track(self, piece: Tracked) -> None:
        """Add a piece of state. Raises `ConfigError` if its name is taken."""
        ...

    def rebuild(self, at: At) -> None:
        """A snapshot of a job that was `at` that place is about to be checked: make what it has beside what it began
        with."""
        ...

    def modules(self) -> Sequence[torch.nn.Module]:
        """The modules whose forward, in training and with gradients, begins a step."""
        ...

    def optimizers(self) -> Sequence[Any]:
        """The objects whose ``step()`` changes the state; the last one's ends a step."""
        ...

    def steppers(self) -> Steppers:
        """Start to watch for other optimizers that step this job's parameters."""
        ...

    def extras(self) -> Collection[str]:
        """Names of the objects with a ``state_dict`` that this rank has besides modules, optimizers and schedules."""
        ...

    def named(self) -> Sequence[Any]:
        """What the user has named beside modules, optimizers and schedules: what to call for their values, or the
        objects themselves."""
        ...

    def scalers(self) -> Sequence[Any]:
        """Gradient scalers whose ``step(optimizer)`` may skip the optimizer's step."""
        ...

    def tensors(self) -> Iterator[LiveTensor]:
        """Every tensor of the state, under a name that is the same in every run of the job. Walks all of it."""
        ...

    def updated(self) -> dict[str, Updated]:
        """The parameters of all optimizers, by the stem that the names of their state begin with."""
        ...

    def watched(self) -> Iterator[Container]:
        """The containers in which `tensors` found the tensors."""
        ...

    def look(self) -> Look:
        """A new look at the state beside its tensors."""
        ...

    def early(self) -> Tree:
        """State that reading data for the next step changes: random generators, data iterators."""
        ...

    def generators(self) -> Mapping[str, Any]:
        """The random generators in attributes of modules and optimizers that are captured, by name."""
        ...

    def watch(self) -> None:
        """Called as a snapshot is taken: warn of attributes that change from step to step and are not captured."""
        ...

    def verify(self) -> None:
        """Check that state that is not captured can be derived bit for bit. Raises `StateMismatch` if it cannot."""
        ...

    def materialise(self, leaves: Mapping[str, Leaf]) -> None:
        """Create the tensors of `leaves` that a new job would only make later, such as Adam's moments."""
        ...

    def withdraw(self) -> None:
        """Remove what the last `materialise` created, because the snapshot does not fit after all."""
        ...

    def check(self, early: Tree, late: Tree, fixed: Tree) -> None:
        """Raises `StateMismatch` unless `load` will find everything it needs. Called before anything is written."""
        ...

    def load(self, early: Tree, late: Tree, fixed: Tree) -> None:
        """Load what `early` and `look` returned, after the tensors are restored; random generators last."""
        ...

    def rewinding(self, early: Tree) -> Callable[[], None]:
        """A function that sets the random generators to their state in `early`, and nothing else, at every call."""
        ...
