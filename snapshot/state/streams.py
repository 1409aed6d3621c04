"""Random streams of ranks that join or leave. A stream is one generator of one rank, captured by `snapshot.state.rng`.

A rank that stays keeps its streams. A new rank gets each generator from the first of these rules that applies:

* if all old ranks of its data-parallel group hold the generator alike, it belongs to the job and continues;
* if a stream of that rank is still known, it continues where it stopped;
* otherwise `derive` makes a new stream from the seed of the group's first rank, the new rank's coordinate and the step.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from holdfast.snapshot.state.digests import digest_of
from holdfast.snapshot.state.live import Tree
from holdfast.snapshot.state.replicas import same_on_all
from holdfast.snapshot.state.rng import put, state_of, states


def digests(streams: Mapping[str, Any]) -> dict[str, str]:
    """A digest of every generator's state, to compare generators across ranks."""
    return {name: digest_of(state) for name, state in streams.items()}


def alike(ranks: Sequence[Mapping[str, str]]) -> frozenset[str] | None:
    """The generators that all ranks hold alike, judging by their `digests`; None for a single rank."""
    return None if len(ranks) < 2 else same_on_all(ranks)


def for_new_rank(
    first: Tree, common: Collection[str] | None, known: Mapping[str, Any], coord: str, step: int
) -> dict[str, Any]:
    """The streams of a rank that did not exist in the old world.

    Args:
        first: the streams of the first rank of its data-parallel group.
        common: generators that the whole group holds alike, see `alike`. With None, all generators count as common
            except those in `known`.
        known: the streams of `coord` that are still known; may be empty.
    """
    if common is None:
        return {**first, **{name: state for name, state in known.items() if name in first}}
    if set(first) <= set(common):
        return dict(first)
    derived = derive(seed_of(first), coord, step, first)
    return {
        name: state if name in common else known[name] if name in known else derived[name]
        for name, state in first.items()
    }


def seed_of(streams: Mapping[str, Any]) -> int:
    """The seed of torch's generator."""
    generator = torch.Generator()
    put(generator, streams["torch"])
    return generator.initial_seed()


def derive(seed: int, coord: str, step: int, like: Mapping[str, Any]) -> dict[str, Any]:
    """New streams, seeded with the first 64 bits of the SHA-256 of ``holdfast <seed> <coord> <step>``.

    Includes one CUDA stream for each that `like` has.
    """
    number = int.from_bytes(hashlib.sha256(f"holdfast {seed} {coord} {step}".encode()).digest()[:8], "big")
    made: dict[str, Any] = {
        "python": random.Random(number),
        "numpy": np.random.RandomState(number % (1 << 32)),
        "torch": torch.Generator().manual_seed(number),
    }
    found = states(made)
    if "cuda" in like:
        found["cuda"] = [state_of(torch.Generator("cuda").manual_seed(number))] * len(like["cuda"])
    return found
