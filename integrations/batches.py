"""Batches that do not depend on the number of ranks: the same samples in the same order, divided among the ranks.

::

    batches = GlobalBatches(samples=len(dataset), batch=512, seed=1)      # goes into `extra` of InMemorySnapshot
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
    """Endless batches of sample numbers, reshuffled in each round over all samples; a batch may span two rounds.

    Its state is its position, which is the same on every rank and for any number of ranks. Not thread-safe.

    Args:
        samples: number of samples.
        batch: number of samples in one step of the whole job.
        seed: seed of the order; the same on every rank.

    Raises:
        ConfigError: `samples` or `batch` is less than 1.
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
        """The number of samples returned so far."""
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position."""
        self._position = int(state["position"])

    def _number(self, position: int) -> int:
        turn, place = divmod(position, self._samples)
        if turn != self._round:
            self._round = turn
            self._order = np.random.default_rng([self._seed, turn]).permutation(self._samples).tolist()
        return self._order[place]


def portion(batch: Sequence[int], ranks: int, rank: int, largest: int | None = None) -> list[tuple[list[int], float]]:
    """One data-parallel rank's part of a batch: its micro-batches, and the weight of each one's mean loss.

    The gradients, averaged over ranks as DDP and FSDP do and summed over micro-batches, are then those of the mean loss
    over the whole batch. Every rank has the same number of micro-batches, as FSDP requires; their lengths differ by at
    most one.

    Args:
        largest: most samples in a micro-batch; None: the rank has one micro-batch.

    Raises:
        ConfigError: there is no such rank, `largest` is less than 1, or a micro-batch would be empty.
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
