"""Detects whether live tensors have changed since a copy of them began.

Version counters count every change that torch makes in place, but not writes through ``.data`` or from outside of
torch. To find those, a few bytes of each tensor are looked at, different ones each time: when the copy begins, when it
ends, and in the slot.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch

from holdfast.smp_daemon.shared.logs import some
from holdfast.snapshot.copy import runs
from holdfast.snapshot.copy.engines import SAMPLE_BYTES, CopyEngine, Sample, SlotTensor, Transfer
from holdfast.snapshot.copy.errors import GivenUp


class StateChanged(GivenUp):
    """The state changed while it was copied.

    Attributes:
        names: names of the changed tensors.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(f"{some(names, between=', ')} changed after the step had begun, before optim.step()")
        self.names = tuple(names)


class WatchedPieces:
    """Pieces that are watched repeatedly, with values that are computed once for them.

    Args:
        tensors: the tensors that the pieces were made of, which share version counters with them. The manifest has just
            looked at them; to look at ten thousand others as well would take three times as long.
    """

    def __init__(self, pieces: Sequence[SlotTensor], tensors: Sequence[torch.Tensor] | None = None) -> None:
        self.pieces = pieces
        self.tensors = list(tensors if tensors is not None else [piece.tensor for piece in pieces])
        self.offsets = np.array([piece.offset for piece in pieces], np.int64)

    def versions(self) -> list[int]:
        """The tensors' version counters: they count changes in place. Tensors of inference mode have none."""
        try:
            return [tensor._version for tensor in self.tensors]
        except RuntimeError:
            return [0 if tensor.is_inference() else tensor._version for tensor in self.tensors]


class Witness:
    """Notes the state of pieces when it is made, to tell later whether they have changed.

    Args:
        turn: chooses the bytes to look at; see `CopyEngine.sample`.
    """

    def __init__(self, engine: CopyEngine, subjects: WatchedPieces, turn: int) -> None:
        self._engine = engine
        self._subjects = subjects
        self._turn = turn
        self._versions = subjects.versions()
        self._before = engine.sample(subjects.pieces, turn)
        self._after: Sample | None = None
        # Guards `_end`, which both the training thread, before `optim.step()`, and the copy thread set.
        self._lock = threading.Lock()
        self._end: list[int] | None = None

    def look(self, transfer: Transfer) -> None:
        """Copy thread: `transfer` was given the pieces; when it has read them, they must still be what they were.

        On a GPU it reads them later, and takes its sample after its copies. A sample that the copy thread itself takes
        would not wait for them: the step may run on a stream that this thread does not know.
        """
        self._after = transfer.sample(self._subjects.pieces, self._turn)
        if not self._engine.queues:
            self.end()

    def end(self) -> None:
        """From now on the pieces may change. Only the first call counts."""
        with self._lock:
            if self._end is None:
                self._end = self._subjects.versions()

    def rewritten(self) -> list[str]:
        """The names of pieces that have other bytes now; being written to with the same bytes does not count.
        Blocks."""
        return self._differing(self._versions, self._engine.sample(self._subjects.pieces, self._turn))

    def written(self) -> list[str]:
        """The names of pieces that were written to in place, according to their version counters, whatever their bytes
        are."""
        return self._differing(self._subjects.versions(), self._before)

    def check(self, slot: memoryview) -> None:
        """Copy thread: compare the pieces as they were, as `look` saw them, and as they are in the slot, complete.
        Blocks for a device. Raises `StateChanged` unless all three are the same.
        """
        self.end()
        assert self._after is not None and self._end is not None
        if names := self._differing(self._end, self._after) or self._torn(slot):
            raise StateChanged(names)

    def _differing(self, versions: list[int], sample: Sample) -> list[str]:
        found = set()
        if versions != self._versions:
            found = {i for i, (now, before) in enumerate(zip(versions, self._versions, strict=True)) if now != before}
        before, now = self._before.read(), sample.read()
        if not np.array_equal(before, now):
            found.update(self._before.index[(before != now).any(axis=1)].tolist())
        return [self._subjects.pieces[i].name for i in sorted(found)]

    def _torn(self, slot: memoryview) -> list[str]:
        """Pieces whose copy differs from what they were: they changed, and changed back."""
        sample, subjects = self._before, self._subjects
        held = np.zeros((len(sample.index), SAMPLE_BYTES), np.uint8)
        table = np.empty((len(held), 3), np.uint64)
        table[:, 0] = np.frombuffer(slot, np.uint8).ctypes.data + subjects.offsets[sample.index]
        table[:, 0] += np.maximum(sample.place, 0).astype(np.uint64)
        table[:, 1] = held.ctypes.data + SAMPLE_BYTES * np.arange(len(held))
        table[:, 2] = sample.length
        runs.copy(table)
        before = sample.read()
        if np.array_equal(held, before):
            return []
        differ = (held != before).any(axis=1) & (sample.place >= 0)
        return [subjects.pieces[i].name for i in sample.index[differ].tolist()]
