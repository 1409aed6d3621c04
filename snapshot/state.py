"""A rank's state at one moment: live tensors, small copies, plain values, and the slot format that holds them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from smp_daemon.errors import ProtocolError, StateMismatch
from smp_daemon.layout import SnapshotId
from smp_daemon.slotfile import RECORD, Leaf, SlotFormat, plan_slot
from snapshot.adapter import Adapter, LiveTensor, Tree
from snapshot.tensors import leaf_of
from snapshot.values import decode, encode

EARLY = "early"
LATE = "late"
RECORD_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Capture:
    """What a snapshot consists of.

    Attributes:
        stable: tensors to be copied while the next step runs.
        early: copies of what that step may change, by leaf name.
        values: the plain part of it, encoded.
    """

    stable: tuple[LiveTensor, ...]
    early: dict[str, torch.Tensor]
    values: Any

    def leaves(self, late: dict[str, torch.Tensor]) -> list[Leaf]:
        """The leaves of the whole snapshot."""
        return [
            *(leaf_of(live.name, live.tensor) for live in self.stable),
            *(leaf_of(name, tensor) for part in (self.early, late) for name, tensor in part.items()),
        ]


def capture_early(adapter: Adapter) -> Capture:
    """Everything at the boundary: references to what is stable, copies of the rest. Blocks for the copies."""
    live = list(adapter.tensors())
    early = {item.name: item.tensor for item in live if not item.stable}
    values = encode(adapter.early(), EARLY, early)
    return Capture(
        tuple(item for item in live if item.stable),
        {name: tensor.detach().clone() for name, tensor in early.items()},
        values,
    )


def capture_late(adapter: Adapter) -> tuple[dict[str, torch.Tensor], Any]:
    """What only settles before the next forward: tensors (copied) and encoded values."""
    tensors: dict[str, torch.Tensor] = {}
    values = encode(adapter.late(), LATE, tensors)
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}, values


def encode_record(snapshot: SnapshotId, coord: str, early: Any, late: Any) -> bytes:
    """The record leaf's JSON, not yet padded."""
    record = {"epoch": snapshot.epoch, "step": snapshot.step, "coord": coord, EARLY: early, LATE: late}
    return json.dumps(record, separators=(",", ":")).encode()


def decode_record(slot: memoryview, form: SlotFormat, snapshot: SnapshotId) -> dict[str, Any]:
    """The record of a slot. Raises `ProtocolError` if it is not JSON or of another snapshot."""
    offset, capacity = form.record
    try:
        record: dict[str, Any] = json.loads(bytes(slot[offset : offset + capacity]))
        held = SnapshotId(record["epoch"], record["step"])
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the record of {snapshot} is not JSON: {error}") from error
    except (LookupError, TypeError) as error:
        raise ProtocolError(f"the record of {snapshot} does not say what it is of: {error!r}") from error
    if held != snapshot:
        raise ProtocolError(f"the record is of {held}, the slot of {snapshot}")
    return record


def decode_values(record: dict[str, Any], tensor: Callable[[str], torch.Tensor]) -> tuple[Tree, Tree]:
    """The early and the late values of a record. Raises `ProtocolError` if there are none."""
    if not {EARLY, LATE} <= record.keys():
        raise ProtocolError(f"the record holds {sorted(record)}, not both {EARLY!r} and {LATE!r}")
    return decode(record[EARLY], tensor), decode(record[LATE], tensor)


def plan_format(job: str, coord: str, leaves: list[Leaf], record_bytes: int) -> SlotFormat:
    """The slot format for `leaves`, with room for the record to grow to twice its size."""
    pages = -(-2 * record_bytes // RECORD_PAGE_BYTES) + 1
    return plan_slot(job, coord, leaves, pages * RECORD_PAGE_BYTES)


def fits(form: SlotFormat, leaves: list[Leaf], record_bytes: int) -> bool:
    """Whether a snapshot of `leaves` and a record of that length can be written in format `form`."""
    known = {leaf for name, (_, leaf) in form.offsets.items() if name != RECORD}
    return known == set(leaves) and record_bytes <= form.record[1]


def check_fit(form: SlotFormat, live: list[LiveTensor]) -> None:
    """Compare a slot with the live job, before anything is written.

    Raises:
        StateMismatch: lists what is missing, what is extra and what has another shape or dtype.
    """
    have = {item.name: leaf_of(item.name, item.tensor) for item in live}
    held = {
        name: leaf
        for name, (_, leaf) in form.offsets.items()
        if name != RECORD and not name.startswith((f"{EARLY}.", f"{LATE}."))
    }
    problems = [f"{name} is not in the snapshot" for name in sorted(have.keys() - held.keys())]
    problems += [f"{name} is not in this job" for name in sorted(held.keys() - have.keys())]
    problems += [
        f"{name} is {held[name].dtype}{list(held[name].shape)} in the snapshot, "
        f"{have[name].dtype}{list(have[name].shape)} in this job"
        for name in sorted(have.keys() & held.keys())
        if have[name] != held[name]
    ]
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise StateMismatch("the snapshot does not fit this job: " + "; ".join(problems[:8]) + more)
