"""Loads a slot that has not been checked yet: digests and copies in one pass over memory, on several threads.

One thread digests a unit and copies it, to live tensors or to a buffer for a device. Both release the GIL. Nothing of a
damaged unit gets to a live tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import numpy as np

from holdfast.smp_daemon.shared.client import RecoveredShard
from holdfast.smp_daemon.shared.errors import DamagedSnapshot, ProtocolError
from holdfast.smp_daemon.shared.system import MACHINE, System
from holdfast.snapshot.copy import runs
from holdfast.snapshot.copy.engines import GROUP_BYTES, CopyEngine, Filling, SlotTensor, Take, load_threads

Repair = Callable[[list[int]], object]
"""Repairs the units with these indices, which ascend, in place; blocks. See `SmpClient.recover`."""


def load_checked(
    engine: CopyEngine,
    pieces: Sequence[SlotTensor],
    shard: RecoveredShard,
    repair: Repair,
    *,
    midway: Callable[[], None] = lambda: None,
    system: System = MACHINE,
) -> None:
    """Fill live tensors from a shard, in place, and check every unit of it, including units that hold no piece. Blocks.

    Plain pieces are filled unit by unit, each right after its digest. A piece that is not plain cannot be cut at units:
    ``engine.load`` fills it once every unit is whole.

    Args:
        repair: called once, after all other units are done, if some units do not match.
        midway: called once, when the first half of the units is done.

    Raises:
        DamagedSnapshot: a unit still does not match after `repair`. The tensors are filled in part.
        ProtocolError: a piece does not lie within the shard; nothing was written.
    """
    for piece in pieces:
        if not 0 <= piece.offset <= shard.view.nbytes - piece.bytes:
            raise ProtocolError(
                f"a tensor of {piece.bytes} bytes at {piece.offset} is not within the {shard.view.nbytes} of its slot"
            )
    filled = [(each.fill(), [piece for piece in some if piece.is_plain]) for each, some in engine.parts(pieces)]
    loading = _Loading(shard, filled, system)
    units = range(len(shard.digests))
    half = -(-len(units) // 2)
    try:
        bad = loading.take(units[:half])
        midway()
        bad += loading.take(units[half:])
        _make_whole(loading, bad, repair)
    finally:
        for fill, _ in filled:
            fill.finish()
    if others := [piece for piece in pieces if not piece.is_plain]:
        engine.load(others, shard.view)


def check_range(
    shard: RecoveredShard, offset: int, length: int, taken: set[int], repair: Repair, system: System = MACHINE
) -> None:
    """Check the units that contain bytes of a shard, such as a header that is read first. Blocks.

    Args:
        taken: units that were checked before; these are added.
        repair: as for `load_checked`.

    Raises:
        DamagedSnapshot: a unit still does not match after `repair`.
        ProtocolError: the bytes do not lie within the shard.
    """
    if not 0 <= offset <= offset + length <= shard.view.nbytes:
        raise ProtocolError(f"{length} bytes at {offset} are not within the {shard.view.nbytes} of the slot")
    units = range(offset // shard.unit_bytes, -(-(offset + length) // shard.unit_bytes))
    if new := [unit for unit in units if unit not in taken]:
        checking = _Loading(shard, (), system)
        _make_whole(checking, checking.take(new), repair)
        taken.update(new)


class _Loading:
    """One shard, and the pieces to fill from each of its units."""

    def __init__(
        self, shard: RecoveredShard, filled: Sequence[tuple[Filling, Sequence[SlotTensor]]], system: System
    ) -> None:
        """`filled`: plain pieces, and the `Filling` for them."""
        self._shard = shard
        self._system = system
        base = np.array([np.frombuffer(shard.view, np.uint8).ctypes.data, 0, 0], dtype=np.uint64)
        borders = np.arange(len(shard.digests) + 1, dtype=np.uint64) * np.uint64(shard.unit_bytes)
        self._filled: list[tuple[Filling, runs.Runs, list[int]]] = []
        for fill, pieces in filled:
            table = runs.make_runs([(piece.offset, piece.tensor.data_ptr(), piece.bytes) for piece in pieces])
            parts = runs.cut(table, 0, shard.unit_bytes)
            parts = parts[np.argsort(parts[:, 0], kind="stable")]
            self._filled.append((fill, parts + base, np.searchsorted(parts[:, 0], borders).tolist()))

    def take(self, units: Sequence[int]) -> list[int]:
        """Check units, which ascend, and copy those that match. Returns the others."""
        threads = load_threads()
        size = max(1, min(GROUP_BYTES // self._shard.unit_bytes, -(-len(units) // threads)))
        groups = iter(
            [units[first : first + size] for first in range(0, len(units), size)]
        )  # each thread takes the next
        with self._system.Pool(threads, "load") as pool:
            return sorted(bad for some in pool.map(self._work, [groups] * threads) for bad in some)

    def _work(self, groups: Iterator[Sequence[int]]) -> list[int]:
        with ExitStack() as stack:
            takers = [(stack.enter_context(fill.taking()), parts, rows) for fill, parts, rows in self._filled]
            return [bad for units in groups for bad in self._take(units, takers)]

    def _take(self, units: Sequence[int], takers: Sequence[tuple[Take, runs.Runs, list[int]]]) -> set[int]:
        """The units of a group that do not match. Those that hold pieces of several engines are checked by each."""
        bad: set[int] = set()
        rest = set(units)
        for take, parts, rows in takers:
            if held := [unit for unit in units if rows[unit] < rows[unit + 1]]:
                whole = take([(self._shard.unit(unit), parts[rows[unit] : rows[unit + 1]]) for unit in held])
                bad.update(unit for unit, is_whole in zip(held, whole, strict=True) if not is_whole)
                rest.difference_update(held)
        return bad | {unit for unit in rest if not self._shard.unit(unit).matches()}


def _make_whole(loading: _Loading, bad: list[int], repair: Repair) -> None:
    """Repair units that did not match, and take them again. Raises `DamagedSnapshot` if some still do not match."""
    if not bad:
        return
    repair(list(bad))
    if still := loading.take(bad):
        raise DamagedSnapshot(
            f"{len(still)} unit{'s' * (len(still) != 1)} of the slot, the first of them unit {still[0]}, cannot be "
            "repaired: start again to restore another copy or an earlier snapshot"
        )
