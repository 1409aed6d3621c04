"""The places that workers of torchdata's loader report, as they were when a batch was read.

A worker sends the state of its data with a batch, and reads on while a thread of its queue still pickles that. What a
data set changes in place, such as a buffer of tokens, is then sent as it is later, and a restart reads other batches.
torchtitan's text data has such a buffer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TORCHDATAS = "torchdata.stateful_dataloader.stateful_dataloader"
"""Where the loader's class is."""


def stateful_loaders(owner: Any) -> list[Any]:
    """Torchdata's loaders, which report their places: `owner` itself, and those in its attributes."""
    found = (owner, *getattr(owner, "__dict__", {}).values())
    return [each for each in found if any(kind.__module__ == TORCHDATAS for kind in type(each).__mro__)]


def copy_worker_states(owner: Any) -> None:
    """Have the workers of `stateful_loaders` send copies of their states. Call this before an iterator is made; another
    call changes nothing."""
    for each in stateful_loaders(owner):
        if each.num_workers and not isinstance(each.worker_init_fn, _Copying):
            each.worker_init_fn = _Copying(each.worker_init_fn)


@dataclass(frozen=True, slots=True)
class _Copying:
    """Called in each worker before it reads; after `then`, which the loader had before."""

    then: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        if self.then is not None:
            self.then(worker)
        from torchdata.stateful_dataloader import worker as running  # is loaded: this process is one of its workers

        make = running._make_state_dict
        running._make_state_dict = lambda *parts: copy.deepcopy(make(*parts))
