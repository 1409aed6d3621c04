"""Gathering one parity slot: data units arrive in any order from the group and are accumulated into it."""

from __future__ import annotations

import numpy as np

from holdfast.ec import Codec, Stripes
from holdfast.smp_daemon.shared.errors import DamagedSnapshot, ProtocolError, StaleEpoch
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.records import ParityRecord, digest
from holdfast.smp_daemon.shared.system import MACHINE, System


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
        system: System = MACHINE,
    ) -> None:
        self.snapshot = snapshot
        self._stripes = stripes
        self._group = group
        self.position = position
        self._codec = codec
        self._slot = slot
        # Guards the parity's bytes and what is in them, for as long as one unit is accumulated: threads of connections
        # take it by turns. `cancel` takes it with the store's lock held, so nothing under it may take the store's lock.
        self._lock = system.Lock()
        self._cancelled = False
        self._mine = stripes.parity_stripes(position)
        self._lengths = {stripe: stripes.stripe_bytes(stripe) for stripe in self._mine}
        self._digests: dict[int, dict[int, int]] = {stripe: {} for stripe in self._mine}
        self._missing = sum(len(list(stripes.contributors(stripe))) for stripe in self._mine)

    @property
    def complete(self) -> bool:
        """Whether every data unit is in it."""
        return self._missing == 0

    def accumulate(self, stripe: int, position: int, unit: memoryview, unit_digest: int) -> None:
        """Accumulate the data unit of `position`; one that was accumulated before is left out.

        Raises:
            ProtocolError: that position has no such unit, or not of that length.
            DamagedSnapshot: the unit does not match its digest.
            StaleEpoch: the snapshot was given up.
        """
        if stripe not in self._digests:
            raise ProtocolError(f"position {self.position} holds no parity of stripe {stripe}")
        index, length = self._expected(stripe, position)
        if unit.nbytes != length:
            raise ProtocolError(
                f"the unit of position {position} in stripe {stripe} has {unit.nbytes} bytes, not {length}"
            )
        if digest(unit) != unit_digest:
            raise DamagedSnapshot(f"a unit of {self.snapshot} from position {position} was damaged on its way")
        row = self._stripes.parity_positions(stripe).index(self.position)
        with self._lock:
            if self._cancelled:
                raise StaleEpoch(f"{self.snapshot} was given up")
            digests = self._digests[stripe]
            if position in digests:
                return
            parity = self._unit(stripe)
            if not digests:
                np.frombuffer(parity, dtype=np.uint8)[:] = 0
            self._codec.accumulate(index, unit, {row: parity[:length]})
            digests[position] = unit_digest
            self._missing -= 1

    def record(self) -> ParityRecord:
        """The commit record of the complete slot."""
        if not self.complete:
            raise ValueError(f"the parity of {self.snapshot} lacks {self._missing} units")
        return ParityRecord(
            self.snapshot,
            self._group,
            self.position,
            self._stripes.unit_bytes,
            tuple(self._lengths[r] for r in self._mine),
            tuple(digest(self._unit(r)) for r in self._mine),
            tuple(self._digests[r] for r in self._mine),
        )

    def cancel(self) -> None:
        """From the return of this call on, nothing is written to the slot any more."""
        with self._lock:
            self._cancelled = True

    def _unit(self, stripe: int) -> memoryview:
        start = self._stripes.parity_rank(self.position, stripe) * self._stripes.unit_bytes
        return self._slot[start : start + self._lengths[stripe]]

    def _expected(self, stripe: int, position: int) -> tuple[int, int]:
        for index, contributor, piece in self._stripes.contributors(stripe):
            if contributor == position:
                return index, piece.length
        raise ProtocolError(f"position {position} contributes nothing to stripe {stripe}")
