"""What a job's state is made of: its tensors while they live, and the words for what adapters say of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, runtime_checkable

import torch

from holdfast.snapshot.copy.tensors import Block

Tree = dict[str, Any]
"""Nested dicts, lists and tuples of plain values and small tensors; see `snapshot.state.values`."""

Container = dict[Any, Any] | list[Any]
"""Holds tensors of the state. If what it holds becomes another object, the state must be walked anew."""


@runtime_checkable
class Stateful(Protocol):
    """Anything with torch's ``state_dict`` / ``load_state_dict``."""

    def state_dict(self) -> Tree:
        """Its state."""
        ...

    def load_state_dict(self, state_dict: Tree) -> Any:
        """Take the state over."""
        ...


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
