"""Loading a slot that nobody has checked yet: digests and copies in one pass over memory, on several threads.

A unit is digested and then copied by one thread, so that the copy reads from the cache of that core. Both release the
GIL. A damaged unit is never copied.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from holdfast.smp_daemon.shared.client import RecoveredShard
from holdfast.smp_daemon.shared.errors import DamagedSnapshot, ProtocolError
from holdfast.smp_daemon.shared.system import MACHINE, System
from holdfast.snapshot.copy import runs
from holdfast.snapshot.copy.engines import LOAD_THREADS, CopyEngine, CpuEngine, SlotTensor

GROUP_BYTES = 32 << 20
"""How much of a slot, in contiguous units, a thread takes at a time: cores need not be equally fast."""

Repair = Callable[[list[int]], object]
"""Has the units with these indices, which ascend, repaired in place; blocks. See `SmpClient.recover`."""


def load_checked(
    engine: CopyEngine,
    pieces: Sequence[SlotTensor],
    shard: RecoveredShard,
    repair: Repair,
    *,
    midway: Callable[[], None] = lambda: None,
    system: System = MACHINE,
) -> None:
    """Fill live tensors from a shard, in place, and check every unit of it, those that hold no piece too. Blocks.

    What `CpuEngine` would copy as plain bytes is copied here, each unit right after its digest. All else is left to
    ``engine.load`` once every unit is whole: transfers of another engine do not pass through the cache that the digest
    filled, and a piece that is not plain cannot be cut at units.

    Args:
        repair: called once, after all other units are done, if there are units that do not match.
        midway: called once, when the first half of the units is done.

    Raises:
        DamagedSnapshot: a unit does not match, and neither does it after `repair`. The tensors are filled in part.
        ProtocolError: a piece does not lie within the shard; nothing was written.
    """
    by_unit = isinstance(engine, CpuEngine)
    plain = [piece for piece in pieces if by_unit and piece.is_plain]
    others = [piece for piece in pieces if not (by_unit and piece.is_plain)]
    for piece in pieces:
        if not 0 <= piece.offset <= shard.view.nbytes - piece.bytes:
            raise ProtocolError(
                f"a tensor of {piece.bytes} bytes at {piece.offset} is not within the {shard.view.nbytes} of its slot"
            )
    table = runs.make_runs([(piece.offset, piece.tensor.data_ptr(), piece.bytes) for piece in plain])
    loading = _Loading(shard, cut(table, shard.unit_bytes), system)
    units = range(len(shard.digests))
    half = -(-len(units) // 2)
    bad = loading.take(units[:half])
    midway()
    bad += loading.take(units[half:])
    _make_whole(loading, bad, repair)
    if others:
        engine.load(others, shard.view)


def check_ranges(
    shard: RecoveredShard, ranges: Iterable[tuple[int, int]], repair: Repair, system: System = MACHINE
) -> None:
    """Check the units that (offset, bytes) ranges of a shard lie in, as a header that is read before the rest. Blocks.

    Args:
        repair: as for `load_checked`.

    Raises:
        DamagedSnapshot: a unit does not match, and neither does it after `repair`.
        ProtocolError: a range does not lie within the shard.
    """
    checking = _Loading(shard, runs.make_runs([]), system)
    _make_whole(checking, checking.take(sorted(units_of(shard, ranges))), repair)


def units_of(shard: RecoveredShard, ranges: Iterable[tuple[int, int]]) -> set[int]:
    """The units that (offset, bytes) ranges of a shard lie in. Raises `ProtocolError` if one is not within it."""
    units: set[int] = set()
    for offset, length in ranges:
        if not 0 <= offset <= offset + length <= shard.view.nbytes:
            raise ProtocolError(f"{length} bytes at {offset} are not within the {shard.view.nbytes} of the slot")
        units.update(range(offset // shard.unit_bytes, -(-(offset + length) // shard.unit_bytes)))
    return units


def cut(table: runs.Runs, unit_bytes: int) -> runs.Runs:
    """The same bytes in the order of their sources, none of them across a border of units.

    Args:
        table: sources are offsets in a slot.
    """
    source, target, length = table.astype(np.int64).T
    first = source // unit_bytes
    count = (source + length - 1) // unit_bytes - first + 1
    row = np.repeat(np.arange(len(table)), count)
    unit = first[row] + np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    begin = np.maximum(source[row], unit * unit_bytes)
    end = np.minimum((source + length)[row], (unit + 1) * unit_bytes)
    parts = np.stack([begin, target[row] + begin - source[row], end - begin], axis=1)
    return parts[np.argsort(begin, kind="stable")].astype(np.uint64)


class _Loading:
    """One shard, and what is to be copied out of each of its units."""

    def __init__(self, shard: RecoveredShard, parts: runs.Runs, system: System) -> None:
        """`parts`: see `cut`."""
        self._shard = shard
        self._system = system
        borders = np.arange(len(shard.digests) + 1, dtype=np.uint64) * np.uint64(shard.unit_bytes)
        self._rows: list[int] = np.searchsorted(parts[:, 0], borders).tolist()
        base = np.frombuffer(shard.view, np.uint8).ctypes.data
        self._parts = parts + np.array([base, 0, 0], dtype=np.uint64)

    def take(self, units: Sequence[int]) -> list[int]:
        """Check units, which ascend, and copy out of those that match; the others."""
        threads = max(1, min(LOAD_THREADS, len(os.sched_getaffinity(0))))
        with self._system.Pool(threads, "load") as pool:
            return [bad for some in pool.map(self._work, self._groups(units, threads)) for bad in some]

    def _groups(self, units: Sequence[int], threads: int) -> Iterator[Sequence[int]]:
        size = max(1, min(GROUP_BYTES // self._shard.unit_bytes, -(-len(units) // threads)))
        return (units[first : first + size] for first in range(0, len(units), size))

    def _work(self, units: Sequence[int]) -> list[int]:
        return [unit for unit in units if not self._take(unit)]

    def _take(self, unit: int) -> bool:
        if not self._shard.matches(unit):
            return False
        begin, end = self._rows[unit : unit + 2]
        if begin < end:
            runs.copy(self._parts[begin:end])
        return True


def _make_whole(loading: _Loading, bad: list[int], repair: Repair) -> None:
    """Have units that did not match repaired, and take them again. Raises `DamagedSnapshot` if that was in vain."""
    if not bad:
        return
    repair(list(bad))
    if still := loading.take(bad):
        raise DamagedSnapshot(
            f"{len(still)} unit{'s' * (len(still) != 1)} of the slot, the first of them unit {still[0]}, cannot be "
            "repaired: start again, so that another copy or an earlier snapshot is planned for"
        )
