"""What the hook needs to know of a framework. One implementation per framework, in `integrations`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch

from holdfast.smp_daemon.slotfile import Leaf

if TYPE_CHECKING:
    from holdfast.snapshot.steppers import Steppers
    from holdfast.snapshot.tracked import Tracked

Tree = dict[str, Any]
"""Nested dicts, lists and tuples of plain values and small tensors; see `snapshot.values`."""


@runtime_checkable
class Stateful(Protocol):
    """Anything with torch's ``state_dict`` / ``load_state_dict``."""

    def state_dict(self) -> Tree:
        """Its state."""
        ...

    def load_state_dict(self, state_dict: Tree) -> Any:
        """Take the state over."""
        ...


class Block(NamedTuple):
    """Which part of a whole tensor a rank holds.

    Attributes:
        whole: the shape of the whole.
        start: where in it, dimension by dimension, the rank's part begins; empty if it is no block at all.
    """

    whole: tuple[int, ...]
    start: tuple[int, ...]


class Change(Enum):
    """When a tensor of the state may change, and so how it is copied."""

    STEP = "between steps only: copied while forward and backward run, and checked"
    ANY = "at any time, as buffers do: copied at once when the step begins"


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A tensor of the job that is captured and restored in place.

    Attributes:
        replicated: the data-parallel replicas are said to hold the same bits; they compare digests before they
            believe it.
        block: which part of a tensor it is that is divided among ranks; None: it is whole.
    """

    name: str
    tensor: torch.Tensor
    change: Change
    replicated: bool = False
    block: Block | None = None


@dataclass(frozen=True, slots=True)
class Updated:
    """A parameter that an optimizer updates, of which it keeps state in leaves that are called ``<stem>.<entry>``.

    Attributes:
        shape: of this rank's part; `block`: which part that is.
    """

    shape: tuple[int, ...]
    block: Block | None


Container = dict[Any, Any] | list[Any]
"""Holds tensors of the state. If what it holds becomes another object, the state must be walked anew."""


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
