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


def copy_worker_states(owner: Any) -> list[Any]:
    """Have the workers of torchdata's loaders, which report their places, send copies of their states: of `owner`
    itself, and in its attributes. Call this before an iterator is made; another call changes nothing.

    Returns these loaders."""
    found = [each for each in (owner, *getattr(owner, "__dict__", {}).values()) if _is_torchdatas(each)]
    for each in found:
        if each.num_workers and not isinstance(each.worker_init_fn, _Copying):
            each.worker_init_fn = _Copying(each.worker_init_fn)
    return found


def _is_torchdatas(value: Any) -> bool:
    return any(kind.__module__ == TORCHDATAS for kind in type(value).__mro__)


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
