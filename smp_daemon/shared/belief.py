"""Whether bytes may be believed: the one place that decides it, for every path that reads bytes to restore, send,
rebuild or persist them, or counts them as redundancy. Pure.

Bytes come with a *claim*: which run, snapshot and part of it they say they are, and how long they are. They are
believed if that is what was asked for, by a layout of the snapshot's epoch. Each unit is then compared with its digest.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.smp_daemon.shared.errors import DamagedSnapshot, NotOurs
from holdfast.smp_daemon.shared.identity import epoch_text
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.records import ParityRecord, ShardRecord, digest
from holdfast.smp_daemon.shared.slotfile import SlotFormat, read_format, read_stamp


@dataclass(frozen=True, slots=True)
class Claim:
    """What bytes say they are, or what they should be.

    Attributes:
        run: id of the run.
        part: a coordinate, or `parity_part`.
        bytes: length of the shard; None for parity, whose units have lengths of their own.
        unit_bytes: length of its units; None where it is not said.
        job: id of the job; None where it is not said.
    """

    run: str
    snapshot: SnapshotId
    part: str
    bytes: int | None
    unit_bytes: int | None = None
    job: str | None = None

    @classmethod
    def of_record(cls, record: ShardRecord | ParityRecord) -> Claim:
        """The claim of a commit record."""
        if isinstance(record, ShardRecord):
            return cls(record.run, record.snapshot, record.coord, record.bytes, record.unit_bytes)
        return cls(record.run, record.snapshot, parity_part(record.group, record.position), None, record.unit_bytes)

    @classmethod
    def of_shard(cls, snapshot: SnapshotId, coord: str, layout: Layout) -> Claim:
        """What a shard of `snapshot` should be, by a layout of its epoch."""
        length = layout.shard_bytes(coord)
        return cls(_run_of(snapshot, layout), snapshot, coord, length, layout.unit_bytes, layout.job)

    @classmethod
    def of_parity(cls, snapshot: SnapshotId, tag: str, position: int, layout: Layout) -> Claim:
        """What parity of `snapshot` should be, by a layout of its epoch that has that group."""
        group = layout.group_of(tag)
        if group is None or not layout.has_parity(group, position):
            raise NotOurs(f"the layout of {snapshot} has no parity {parity_part(tag, position)}")
        return cls(_run_of(snapshot, layout), snapshot, parity_part(tag, position), None, layout.unit_bytes)

    def __str__(self) -> str:
        length = "" if self.bytes is None else f", {self.bytes:,} bytes"
        units = "" if self.unit_bytes is None else f" in units of {self.unit_bytes:,}"
        job = "" if self.job is None else f" of job {self.job}"
        return f"{self.part} of {self.snapshot} of run {self.run}{job}{length}{units}"


def _run_of(snapshot: SnapshotId, layout: Layout) -> str:
    if layout.epoch != snapshot.epoch:
        raise NotOurs(f"the layout is of epoch {epoch_text(layout.epoch)}, and not of {snapshot}")
    return layout.run.id


def parity_part(tag: str, position: int) -> str:
    """The name of a position's parity, as a part of a snapshot."""
    return f"{tag}-{position}"


def believe(claim: Claim, expected: Claim) -> None:
    """Raise `NotOurs` unless bytes with that claim are those that were asked for."""
    named = (claim.run, claim.snapshot, claim.part, claim.bytes)
    if (
        named != (expected.run, expected.snapshot, expected.part, expected.bytes)
        or not _agree(claim.unit_bytes, expected.unit_bytes)
        or not _agree(claim.job, expected.job)
    ):
        raise NotOurs(f"these bytes are {claim}; what was asked for is {expected}")


def _agree(said: object, wanted: object) -> bool:
    return said is None or wanted is None or said == wanted


def believe_slot(slot: memoryview, expected: Claim) -> SlotFormat:
    """The format of a slot file, of which `slot` is all or the beginning, if it is what was asked for.

    Raises:
        NotOurs: it is of another run, snapshot or shard.
        ProtocolError: its header is damaged.
    """
    form, metadata = read_format(slot, expected.bytes)
    claim = Claim(
        metadata.get("run", ""),
        read_stamp(slot),
        metadata.get("coord", ""),
        form.total_bytes,
        None,
        metadata.get("job"),
    )
    believe(claim, expected)
    return form


def believe_unit(unit: memoryview, expected: int, name: str) -> None:
    """Raise `DamagedSnapshot` unless a unit's bytes match its digest. `name`: which unit it is, in words."""
    if digest(unit) != expected:
        raise DamagedSnapshot(f"{name} does not match its digest")
