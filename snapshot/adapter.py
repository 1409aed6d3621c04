"""What the hook needs to know of a framework. One implementation per framework, in `integrations`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from smp_daemon.slotfile import Leaf

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


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A tensor of the job that is captured and restored in place.

    Attributes:
        stable: only ``optim.step()`` changes it, so it may be copied while forward and backward run. Others are
            copied at the boundary, at once.
    """

    name: str
    tensor: torch.Tensor
    stable: bool


class Adapter(Protocol):
    """A job's state on this rank. Called from the training thread only."""

    def coordinate(self) -> str:
        """The rank's logical place, the same after ranks were renumbered."""
        ...

    def modules(self) -> Sequence[torch.nn.Module]:
        """The modules whose forward begins a step."""
        ...

    def optimizer(self) -> Any:
        """The object whose ``step()`` ends a step."""
        ...

    def tensors(self) -> Iterator[LiveTensor]:
        """Every tensor of the state, under a name that is the same in every run of the job."""
        ...

    def early(self) -> Tree:
        """State that the next step's data loading may change: random generators, data iterators."""
        ...

    def late(self) -> Tree:
        """State that is still changed between ``optim.step()`` and the next forward: schedules, group options."""
        ...

    def verify(self) -> None:
        """Check that what is not captured can be derived bit for bit. Raises `StateMismatch` if it cannot."""
        ...

    def materialise(self, leaves: Mapping[str, Leaf]) -> None:
        """Create the tensors of `leaves` that a fresh job makes later, such as Adam's moments."""
        ...

    def check(self, early: Tree, late: Tree) -> None:
        """Raises `StateMismatch` unless `load` will find all it needs. Called before anything is written."""
        ...

    def load(self, early: Tree, late: Tree) -> None:
        """Take over what `early` and `late` gave, after the tensors are back; random generators last."""
        ...
