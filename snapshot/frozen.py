"""Tensors that nothing is known to change, such as frozen base weights: copied once into each slot, and watched.

Version counters tell of most changes, but not of those made through ``.data``. So every snapshot also compares one page
of each tensor, another one every time, with what stands in the slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from smp_daemon.errors import HoldfastError
from snapshot.movers import Piece
from snapshot.tensors import flat

SAMPLE_BYTES = 4096


class FrozenChanged(HoldfastError):
    """A tensor that was taken for frozen is not."""


def versions(pieces: Sequence[Piece]) -> list[int]:
    """The tensors' version counters: they count changes in place."""
    return [piece.tensor._version for piece in pieces]


def check_sample(pieces: Sequence[Piece], slot: memoryview, turn: int) -> None:
    """Compare the `turn`-th page of every tensor with the slot, beginning again after the last.

    Raises:
        FrozenChanged: one differs.
    """
    live, places = [], []
    for piece in pieces:
        if piece.bytes == 0:
            continue
        start = turn % -(-piece.bytes // SAMPLE_BYTES) * SAMPLE_BYTES
        stop = min(start + SAMPLE_BYTES, piece.bytes)
        live.append(flat(piece.tensor.detach().resolve_conj().resolve_neg().contiguous()).view(torch.uint8)[start:stop])
        places.append((piece.offset + start, piece.offset + stop))
    if not live:
        return
    sample = torch.cat(live).cpu().numpy()
    held = np.frombuffer(slot, np.uint8)
    if not np.array_equal(sample, np.concatenate([held[start:stop] for start, stop in places])):
        raise FrozenChanged("a parameter that takes no gradient has changed: from now on such are copied every time")
