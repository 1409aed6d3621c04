"""Digests of a slot's units, most of them taken while the bytes are copied, so that nobody reads the slot for them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from holdfast.smp_daemon.shared.records import digest
from holdfast.snapshot.copy import runs
from holdfast.snapshot.copy.runs import Runs


class UnitDigests:
    """The digests of one snapshot's units: those that an engine took, and later those of the other units.

    Used by one thread at a time: first by the copy thread, then by the sealing thread.

    Attributes:
        unit_bytes: length of a unit; the last may be shorter.
    """

    def __init__(self, slot_bytes: int, unit_bytes: int) -> None:
        self.unit_bytes = unit_bytes
        count = -(-slot_bytes // unit_bytes)
        self._values = np.zeros(count, np.uint64)
        self._known = np.zeros(count, bool)

    def note(self, units: NDArray[np.int64], values: NDArray[np.uint64]) -> None:
        """These units were copied whole, with these digests. Nothing may be written to them any more."""
        self._values[units] = values
        self._known[units] = True

    def complete(self, slot: memoryview) -> tuple[int, ...]:
        """Digest the units that are not known yet, now that all of the slot is written. Blocks for a read of them."""
        for unit in np.flatnonzero(~self._known).tolist():
            self._values[unit] = digest(slot[unit * self.unit_bytes : (unit + 1) * self.unit_bytes])
        self._known[:] = True
        return tuple(self._values.tolist())


class WholeUnits:
    """Of runs into a slot those that fill whole units, in the order of the slot, and the rest.

    Attributes:
        batches: runs of some whole units, 1 at each run with which a unit ends, and the numbers of the units.
        rest: the other runs.
    """

    def __init__(self, table: Runs, unit_bytes: int, batch_bytes: int | None = None) -> None:
        """`table`: runs whose targets are offsets in the slot and do not overlap."""
        ordered = runs.merged(table[np.argsort(table[:, 1], kind="stable")])
        cut = runs.cut(ordered, 1, unit_bytes)
        unit = cut[:, 1].astype(np.int64) // unit_bytes
        filled = np.bincount(unit, cut[:, 2].astype(np.float64)) if len(unit) else np.zeros(0)
        whole = filled[unit] == unit_bytes  # exact: far below 2 to the 53rd
        self.rest = runs.merged(cut[~whole])
        table, unit = cut[whole], unit[whole]
        ends = np.append(unit[1:] != unit[:-1], True)[: len(unit)]
        most = max(1, (batch_bytes or runs.PIECE_BYTES) // unit_bytes)  # units in a batch
        last = np.flatnonzero(ends)
        borders = [0, *(last[most - 1 :: most] + 1).tolist()]
        if borders[-1] != len(table):
            borders.append(len(table))
        self.batches = [
            (table[begin:end], ends[begin:end].astype(np.uint8), unit[begin:end][ends[begin:end]])
            for begin, end in pairwise(borders)
        ]
