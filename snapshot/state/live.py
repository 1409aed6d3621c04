"""The parts of a job's state: its live tensors, and the types in which adapters describe them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from holdfast.snapshot.copy.tensors import Block

Tree = dict[str, Any]
"""Nested dicts, lists and tuples of plain values and small tensors; see `snapshot.state.values`."""

Container = dict[Any, Any] | list[Any]
"""Holds tensors of the state. If an entry becomes another object, the state must be walked anew."""


@runtime_checkable
class Stateful(Protocol):
    """Anything with torch's ``state_dict`` / ``load_state_dict``."""

    def state_dict(self) -> Tree:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: Tree) -> Any:
        """Load the state."""
        ...


def refill(held: dict[Any, Any], before: Mapping[Any, Any]) -> None:
    """Give a dict that others may refer to the items of `before`, and no others."""
    held.clear()
    held.update(before)


class At(NamedTuple):
    """Where a job goes on after a restart.

    Attributes:
        step: as `SnapshotHook.step`.
        epoch: as `SnapshotHook.epoch`.
    """

    step: int
    epoch: int


class Change(Enum):
    """When a tensor of the state may change, which decides how it is copied."""

    STEP = "between steps only: copied while forward and backward run, and checked"
    ANY = "at any time, as buffers do: copied at once when the step begins"


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A tensor of the job that is captured and restored in place.

    Attributes:
        replicated: the adapter says that the data-parallel replicas hold the same bits. They compare digests before
            they rely on it.
        block: this rank's part of a tensor that is divided among ranks; None: the tensor is whole.
    """

    name: str
    tensor: torch.Tensor
    change: Change
    replicated: bool = False
    block: Block | None = None


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at the state found beside its tensors. Another look may find other entries, so values are read
    only through the look that listed them.

    Attributes:
        fixed: state that changes only when `Adapter.watched` does, such as the order of keys.
        late: returns the current values of exactly what `fixed` lists: state that code between two steps changes, such
            as schedules and group options. Raises `LayoutChanged` if something is not there any more.
    """

    fixed: Tree
    late: Callable[[], Tree]


@dataclass(frozen=True, slots=True)
class Updated:
    """A parameter that an optimizer updates. Its optimizer state is in leaves called ``<stem>.<entry>``.

    Attributes:
        shape: the shape of this rank's part.
        block: which part of the whole that is; None: the parameter is whole.
    """

    shape: tuple[int, ...]
    block: Block | None
