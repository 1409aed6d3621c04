"""What the hook needs to know of a framework. One implementation per framework, in `integrations`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from holdfast.smp_daemon.shared.slotfile import Leaf
from holdfast.snapshot.state.live import Container, LiveTensor, Tree, Updated
from holdfast.snapshot.state.steppers import Steppers
from holdfast.snapshot.state.tracked import Tracked


class Adapter(Protocol):
    """A job's state on this rank. Called from the training thread only."""

    def coordinate(self) -> str:
        """The rank's logical place, the same after ranks were renumbered."""
        ...

    def replica_set(self) -> str:
        """Names the set of ranks that hold what is marked as `replicated` alike: the same on each of them."""
        ...

    def track(self, piece: Tracked) -> None:
        """Take more state into account. Raises `ConfigError` if there is one of that name."""
        ...

    def modules(self) -> Sequence[torch.nn.Module]:
        """The modules whose forward, in training and with gradients, begins a step."""
        ...

    def optimizers(self) -> Sequence[Any]:
        """The objects whose ``step()`` changes the state; the last one's ends a step."""
        ...

    def steppers(self) -> Steppers:
        """Who watches, from now on, for other optimizers that step this job's parameters."""
        ...

    def extras(self) -> Collection[str]:
        """Names of the objects with a ``state_dict`` that this rank gives beside modules, optimizers and schedules."""
        ...

    def scalers(self) -> Sequence[Any]:
        """Gradient scalers whose ``step(optimizer)`` may skip the optimizer's."""
        ...

    def tensors(self) -> Iterator[LiveTensor]:
        """Every tensor of the state, under a name that is the same in every run of the job. Walks all of it."""
        ...

    def updated(self) -> dict[str, Updated]:
        """The parameters of all optimizers, by the stem of their state's names."""
        ...

    def watched(self) -> Iterator[Container]:
        """What `tensors` found them in."""
        ...

    def fixed(self) -> Tree:
        """State that only changes when `watched` does, such as the order of keys."""
        ...

    def early(self) -> Tree:
        """State that reading data for the next step changes: random generators, data iterators."""
        ...

    def late(self) -> Tree:
        """State that code between two steps changes: schedules, group options."""
        ...

    def verify(self) -> None:
        """Check that what is not captured can be derived bit for bit. Raises `StateMismatch` if it cannot."""
        ...

    def materialise(self, leaves: Mapping[str, Leaf]) -> None:
        """Create the tensors of `leaves` that a fresh job makes later, such as Adam's moments."""
        ...

    def withdraw(self) -> None:
        """Take away what the last `materialise` created: the snapshot does not fit after all."""
        ...

    def check(self, early: Tree, late: Tree, fixed: Tree) -> None:
        """Raises `StateMismatch` unless `load` will find all it needs. Called before anything is written."""
        ...

    def load(self, early: Tree, late: Tree, fixed: Tree) -> None:
        """Take over what `early`, `late` and `fixed` gave, after the tensors are back; random generators last."""
        ...

    def rewinding(self, early: Tree) -> Callable[[], None]:
        """What puts the random generators back as they are in `early`, and nothing else, whenever it is called."""
        ...
