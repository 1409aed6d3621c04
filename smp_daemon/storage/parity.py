"""Gathers one parity slot: the group's data units arrive in any order and are accumulated into the slot."""

from __future__ import annotations

from holdfast.ec import Codec, Stripes
from holdfast.ec.codec import as_array
from holdfast.smp_daemon.shared.errors import ProtocolError, StaleEpoch
from holdfast.smp_daemon.shared.identity import UNNAMED
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.records import ParityRecord, digest
from holdfast.smp_daemon.shared.system import MACHINE, Threads

LOCKS = 16
"""Number of stripes that can be accumulated at the same time."""


class ParityGathering:
    """The parity of one `position`, for one snapshot, while it grows in `slot`. Thread-safe."""

    def __init__(
        self,
        snapshot: SnapshotId,
        stripes: Stripes,
        group: str,
        position: int,
        codec: Codec,
        slot: memoryview,
        threads: Threads = MACHINE,
        run: str = UNNAMED.id,
    ) -> None:
        """`run`: id of the run that the snapshot belongs to."""
        self.snapshot = snapshot
        self._stripes = stripes
        self._group = group
        self.position = position
        self._codec = codec
        self._slot = slot
        self._run = run
        # Nothing here takes longer for more stripes: a gathering is begun with the store's lock held, and a large node
        # has 50,000 stripes.
        self._expected = stripes.parity_units(position)
        self._sources: dict[int, dict[int, int]] = {}
        self._digests: dict[int, int] = {}
        # Each lock guards the bytes, sources and digest of every sixteenth stripe. A connection thread holds one while
        # it accumulates a unit. `cancel` takes all of them, one after another, while its caller holds the store's lock,
        # so a thread that holds one must not take the store's lock. `complete` counts `_digests` without a lock: each
        # digest is added once, under its stripe's lock.
        self._locks = tuple(threads.Lock() for _ in range(max(1, min(LOCKS, self._expected))))
        self._cancelled = False

    @property
    def complete(self) -> bool:
        """Whether every data unit has been accumulated."""
        return len(self._digests) == self._expected

    def accumulate(self, stripe: int, position: int, unit: memoryview, unit_digest: int) -> None:
        """Accumulate the data unit of `position`, whose digest is `unit_digest`. Ignores a unit that was accumulated
        before.

        Raises:
            ProtocolError: the position has no unit in that stripe, or the unit has another length.
            StaleEpoch: the snapshot was given up.
        """
        if not (0 <= stripe < self._stripes.count and self._stripes.is_parity(self.position, stripe)):
            raise ProtocolError(f"position {self.position} holds no parity of stripe {stripe}")
        contributors = self._contributors(stripe)
        if position not in contributors:
            raise ProtocolError(f"position {position} contributes nothing to stripe {stripe}")
        index, length = contributors[position]
        if unit.nbytes != length:
            raise ProtocolError(
                f"the unit of position {position} in stripe {stripe} has {unit.nbytes} bytes, not {length}"
            )
        rank = self._stripes.parity_rank(self.position, stripe)
        row = self._stripes.parity_positions(stripe).index(self.position)
        with self._locks[rank % len(self._locks)]:
            if self._cancelled:
                raise StaleEpoch(f"{self.snapshot} was given up")
            sources = self._sources.setdefault(stripe, {})
            parity = self._unit(stripe, max(length for _, length in contributors.values()))
            if position in sources:
                return
            if sources:
                self._codec.accumulate(index, unit, {row: parity[:length]})
            else:
                self._codec.begin(index, unit, {row: parity[:length]})
                as_array(parity[length:])[:] = 0
            sources[position] = unit_digest
            if len(sources) == len(contributors):
                same = len(sources) == 1 and length == parity.nbytes and self._codec.factor(index, row) == 1
                self._digests[stripe] = unit_digest if same else digest(parity)  # still in the cache

    def record(self) -> ParityRecord:
        """The commit record of the complete slot. Raises `ValueError` if units are missing."""
        if not self.complete:
            missing = self._expected - len(self._digests)
            raise ValueError(f"the parity of {self.snapshot} lacks units of {missing} stripes")
        mine, nothing = self._stripes.parity_stripes(self.position), digest(memoryview(b""))
        return ParityRecord(
            self.snapshot,
            self._group,
            self.position,
            self._stripes.unit_bytes,
            tuple(self._stripes.stripe_bytes(stripe) for stripe in mine),
            tuple(self._digests.get(stripe, nothing) for stripe in mine),
            tuple(self._sources.get(stripe, {}) for stripe in mine),
            run=self._run,
        )

    def cancel(self) -> None:
        """Stop accumulating: once this returns, no thread writes to the slot any more."""
        self._cancelled = True
        for lock in self._locks:
            with lock:  # a thread that takes it after this sees `_cancelled`
                pass

    def _unit(self, stripe: int, length: int) -> memoryview:
        start = self._stripes.parity_rank(self.position, stripe) * self._stripes.unit_bytes
        return self._slot[start : start + length]

    def _contributors(self, stripe: int) -> dict[int, tuple[int, int]]:
        """The data index and the length of each position's unit in a stripe."""
        return {position: (index, piece.length) for index, position, piece in self._stripes.contributors(stripe)}
