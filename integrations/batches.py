"""Batches that do not depend on how many ranks there are: the same samples in the same order, cut for whoever is there.

::

    batches = GlobalBatches(samples=len(dataset), batch=512, seed=1)      # in `extra` of InMemorySnapshot
    for numbers, weight in portion(next(batches), ranks, rank, largest=8):
        loss = model(dataset[numbers]).mean() * weight
        loss.backward()                                                   # DDP and FSDP average over the ranks
    optim.step()
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from holdfast.smp_daemon.shared.errors import ConfigError


class GlobalBatches:
    """Numbers of samples, shuffled anew each time all were seen, without end; a batch may reach into the next round.

    Its state is where it is, the same on every rank whatever their number. Not thread-safe.

    Args:
        samples: how many there are.
        batch: samples of one step of the whole job.
        seed: of the order; the same on every rank.

    Raises:
        ConfigError: there is nothing to give.
    """

    def __init__(self, samples: int, batch: int, seed: int = 0) -> None:
        if samples < 1 or batch < 1:
            raise ConfigError(f"{samples} samples in batches of {batch}: both are at least 1")
        self._samples = samples
        self._batch = batch
        self._seed = seed
        self._position = 0
        self._round = -1
        self._order: list[int] = []

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        numbers = [self._number(self._position + i) for i in range(self._batch)]
        self._position += self._batch
        return numbers

    def state_dict(self) -> dict[str, Any]:
        """How many samples were given out."""
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._position = int(state["position"])

    def _number(self, position: int) -> int:
        turn, place = divmod(position, self._samples)
        if turn != self._round:
            self._round = turn
            self._order = np.random.default_rng([self._seed, turn]).permutation(self._samples).tolist()
        return self._order[place]


def portion(batch: Sequence[int], ranks: int, rank: int, largest: int | None = None) -> list[tuple[list[int], float]]:
    """What one data-parallel rank does of a batch: micro-batches, and what the mean loss of each is multiplied with.

    The gradients, averaged over ranks as DDP and FSDP do it and summed over micro-batches, are then those of the mean
    loss over the whole batch. Every rank has the same number of micro-batches, as FSDP needs it; their lengths differ
    by at most one.

    Args:
        largest: most samples of a micro-batch; None: there is one.

    Raises:
        ConfigError: there is no such rank, or too few samples for every micro-batch to have one.
    """
    if not 0 <= rank < ranks or (largest is not None and largest < 1):
        raise ConfigError(
            f"rank {rank} of {ranks}, in micro-batches of {largest}: ranks count from 0, and a micro-batch has 1 "
            "sample or more"
        )
    most = -(-len(batch) // ranks)
    count = 1 if largest is None else -(-most // largest)
    if len(batch) < ranks * count:
        raise ConfigError(f"{len(batch)} samples are too few for {ranks} ranks with {count} micro-batches each")
    first, last = rank * len(batch) // ranks, (rank + 1) * len(batch) // ranks
    cuts = [first + i * (last - first) // count for i in range(count + 1)]
    return [(list(batch[a:b]), (b - a) * ranks / len(batch)) for a, b in pairwise(cuts)]
