"""Reads a sealed slot as a restart would, to know that a restart could."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.smp_daemon.shared.belief import Claim, believe_slot
from holdfast.smp_daemon.shared.client import RecoveredShard
from holdfast.smp_daemon.shared.errors import DamagedSnapshot, HoldfastError, ProtocolError, StaleEpoch
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.logs import some
from holdfast.smp_daemon.shared.slotfile import Leaf, SlotFormat, read_stamp
from holdfast.snapshot.copy.tensors import read_leaf
from holdfast.snapshot.state.completeness import check_complete
from holdfast.snapshot.state.record import check_leaves, decode_record, decode_values, shared_leaves, whole_leaves


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
        form = believe_slot(shard.view, expected)
        if bad := [unit for unit in range(len(shard.digests)) if not shard.matches(unit)]:
            raise DamagedSnapshot(f"{some(_leaves_in(form, shard, bad[0]))}: the bytes are not those that were sealed")
        record = decode_record(shard.view, form, snapshot)
        _, late, fixed = decode_values(record, lambda name: read_leaf(shard.view, *form.offsets[name]))
        shared = shared_leaves(record)
        check_complete(fixed, late, whole_leaves(form, shared).keys())
        check_leaves(form, leaves, shared)
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
