"""Reads a sealed slot as a restart would, to know that a restart could."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.smp_daemon.shared.belief import Claim
from holdfast.smp_daemon.shared.client import RecoveredShard
from holdfast.smp_daemon.shared.errors import DamagedSnapshot, HoldfastError, ProtocolError, StaleEpoch
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.logs import some
from holdfast.smp_daemon.shared.slotfile import Leaf, SlotFormat, read_stamp
from holdfast.snapshot.state.record import SavedShard, check_leaves


def read_back(shard: RecoveredShard, expected: Claim, leaves: Mapping[str, Leaf]) -> None:
    """Check every unit of a sealed slot, one after the other, and everything that its record lists. Reads the whole
    slot, and writes nothing; for any thread.

    Args:
        expected: what the slot should say it is.
        leaves: every tensor of the job, by name; those that replicas share whole.

    Raises:
        StaleEpoch: the slot was given to another snapshot meanwhile, so that nothing is known about this one.
        DamagedSnapshot: the bytes are not those that were sealed, or lack something; names it.
        ProtocolError, StateMismatch: a restart could not load it.
    """
    snapshot = expected.snapshot
    try:
        saved = SavedShard(lambda offset, length: shard.view[offset : offset + length], expected)
        if bad := [unit for unit in range(len(shard.digests)) if not shard.unit(unit).matches()]:
            raise DamagedSnapshot(
                f"{some(_leaves_in(saved.form, shard, bad[0]))}: the bytes are not those that were sealed"
            )
        saved.values()
        check_leaves(saved.form, leaves, saved.shared)
    except HoldfastError as error:
        if not _holds(shard.view, snapshot):
            raise StaleEpoch(f"its slot was given to another snapshot: {error}") from error
        raise


def _leaves_in(form: SlotFormat, shard: RecoveredShard, unit: int) -> list[str]:
    """Names of the leaves that lie in a unit, at least in part; the header if none does."""
    begin, end = unit * shard.unit_bytes, (unit + 1) * shard.unit_bytes
    found = [name for name, (offset, leaf) in form.offsets.items() if offset < end and begin < offset + leaf.bytes]
    return found or ["the header"]


def _holds(slot: memoryview, snapshot: SnapshotId) -> bool:
    try:
        return read_stamp(slot) == snapshot
    except ProtocolError:
        return False
