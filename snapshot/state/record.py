"""A rank's state in a slot: where each tensor goes, the record of plain values, and whether a slot fits a job."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from holdfast.smp_daemon.shared.belief import Claim, believe_slot
from holdfast.smp_daemon.shared.errors import ConfigError, ProtocolError, StateMismatch
from holdfast.smp_daemon.shared.identity import UNNAMED
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.logs import some
from holdfast.smp_daemon.shared.slotfile import PAGE_BYTES, RECORD, Leaf, SlotFormat, plan_slot
from holdfast.snapshot.copy.engines import SlotTensor
from holdfast.snapshot.copy.errors import within_memory
from holdfast.snapshot.copy.tensors import empty_restrided, leaf_of, read_leaf
from holdfast.snapshot.copy.witness import WatchedPieces
from holdfast.snapshot.state.completeness import check_complete
from holdfast.snapshot.state.live import Change, LiveTensor, Tree
from holdfast.snapshot.state.manifest import FIXED, Manifest
from holdfast.snapshot.state.replicas import is_part_of, shared_leaves_of
from holdfast.snapshot.state.values import decode, encode

EARLY = "early"
LATE = "late"
NOTES = "notes"
INPUTS = "inputs"
LOOP = "loop"
BEGAN = "began"
RECORD_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Values:
    """Plain values, encoded, and copies of the tensors among them."""

    encoded: Any
    tensors: dict[str, torch.Tensor]

    @property
    def leaves(self) -> list[Leaf]:
        """How the tensors are stored."""
        return [leaf_of(name, tensor) for name, tensor in self.tensors.items()]

    def __or__(self, more: Values) -> Values:
        return Values(self.encoded | more.encoded, self.tensors | more.tensors)


def capture_tree(tree: Tree, path: str) -> Values:
    """The current plain values of `tree`, under `path`: `EARLY`, of what reading data for the next step changes, and
    the position of the loop; or `LATE`, of what code between two steps changes, and what the step began with, see
    `snapshot.step.capture.read_state`. Tensors are copied. Raises `GivenUp` if there is no memory."""
    tensors: dict[str, torch.Tensor] = {}
    encoded = encode(tree, path, tensors)
    if not tensors:
        return Values(encoded, tensors)
    with within_memory("values that change between two steps"):
        return Values(encoded, {name: tensor.detach().clone() for name, tensor in tensors.items()})


@dataclass(frozen=True, slots=True)
class Placed:
    """The state of one manifest in one slot format.

    Attributes:
        moving, moving_bytes: the tensors that are copied while the step runs, and their length in bytes.
        subjects: `moving`, for witnesses.
        at_once: the tensors that are copied when the step begins, before anything else happens.
        shared: the leaves that replicas share, whole. They have no place of their own in this rank's slot.
    """

    form: SlotFormat
    manifest: Manifest
    moving: tuple[SlotTensor, ...]
    moving_bytes: int
    subjects: WatchedPieces
    at_once: tuple[SlotTensor, ...]
    shared: tuple[SlotTensor, ...]


def place(manifest: Manifest, form: SlotFormat, restless: Collection[str] = ()) -> Placed:
    """Where the tensors of `manifest` lie in a slot of format `form`, which must have the same leaves.

    Args:
        restless: names of tensors that were seen to change while a step ran, whatever their `Change` says.
    """
    by_class: dict[bool, list[tuple[str, torch.Tensor]]] = {False: [], True: []}
    for item in manifest.items:
        by_class[item.change is Change.ANY or item.name in restless].append((item.name, item.tensor))
    moving = place_tensors(form, by_class[False])
    length = sum(piece.bytes for piece in moving)
    shared = tuple(SlotTensor(item.tensor.detach(), 0, item.tensor.nbytes, item.name) for item in manifest.shared)
    subjects = WatchedPieces(moving, [tensor for _, tensor in by_class[False]])
    return Placed(form, manifest, moving, length, subjects, place_tensors(form, by_class[True]), shared)


def place_tensors(form: SlotFormat, tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[SlotTensor, ...]:
    """Where named tensors lie in a slot. A piece keeps its memory alive even if the tensor gets other memory."""
    return tuple(
        SlotTensor(tensor.detach(), form.offsets[name][0], form.offsets[name][1].bytes, name)
        for name, tensor in tensors
    )


def encode_record(
    snapshot: SnapshotId,
    coord: str,
    early: Values,
    late: Values,
    fixed: str,
    notes: dict[str, Any] | None = None,
    inputs: str | None = None,
) -> bytes:
    """The record leaf's JSON, not yet padded. `fixed` is JSON already. `notes` and `inputs`, the digest of the first
    forward's inputs, are not part of the state and may be None."""
    record = {
        "epoch": snapshot.epoch,
        "step": snapshot.step,
        "coord": coord,
        EARLY: early.encoded,
        LATE: late.encoded,
        INPUTS: inputs,
    }
    if notes is not None:
        record[NOTES] = notes
    return f'{json.dumps(record, separators=(",", ":"))[:-1]},"{FIXED}":{fixed}}}'.encode()


def parse_record(text: bytes, snapshot: SnapshotId) -> dict[str, Any]:
    """Parse a record. Raises `ProtocolError` if it is not JSON or belongs to another snapshot."""
    try:
        record: dict[str, Any] = json.loads(text)
        held = SnapshotId(record["epoch"], record["step"])
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise ProtocolError(f"the record of {snapshot} is no JSON that gives its epoch and step: {error!r}") from error
    if held != snapshot:
        raise ProtocolError(f"the record is of {held}, the slot of {snapshot}")
    return record


def decode_values(record: dict[str, Any], tensor: Callable[[str], torch.Tensor]) -> tuple[Tree, Tree, Tree]:
    """The early, late and fixed values of a record. Raises `ProtocolError` if one is missing."""
    if missing := {EARLY, LATE, FIXED} - record.keys():
        raise ProtocolError(f"the record holds {sorted(record)}, and not {sorted(missing)}")
    fixed = record[FIXED]
    if not isinstance(fixed, dict) or fixed.keys() != {"state", "shared", "strides", "blocks"}:
        raise ProtocolError("the record does not say what is fixed, shared, strided and divided")
    return decode(record[EARLY], tensor), decode(record[LATE], tensor), decode(fixed["state"], tensor)


def restore_strides(record: dict[str, Any], live: Iterable[LiveTensor]) -> None:
    """Give live tensors the strides they had in the snapshot. A tensor whose strides differ gets new memory, which the
    caller must fill."""
    for item in live:
        empty = empty_restrided(item.tensor, record[FIXED]["strides"].get(item.name))
        if empty is not None:
            item.tensor.data = empty


def plan_format(job: str, coord: str, leaves: Iterable[Leaf], record_bytes: int, run: str = UNNAMED.id) -> SlotFormat:
    """The slot format for `leaves`, with room for the record to double in size. `run`: id of the run.

    Raises:
        ConfigError: a name, a shape, or the number of tensors is beyond a limit of slot files; the message names it.
    """
    pages = -(-2 * record_bytes // RECORD_PAGE_BYTES) + 1
    try:
        return plan_slot(job, coord, leaves, pages * RECORD_PAGE_BYTES, run)
    except ProtocolError as error:
        raise ConfigError(
            f"the state of {coord} does not fit a slot: {error}. Keep many small tensors as parts of few large ones, "
            "or track them as one value"
        ) from error


HeldLeaf = tuple[str, str, tuple[int, ...], int]
"""Name, dtype, shape and offset of a tensor in a slot."""


def leaves_in(form: SlotFormat) -> list[HeldLeaf]:
    """The tensors in a slot, without the record and those among its plain values."""
    of_record = (f"{EARLY}.", f"{LATE}.")
    leaves = [(name, leaf.dtype, leaf.shape, at) for name, (at, leaf) in form.offsets.items() if name != RECORD]
    return [leaf for leaf in leaves if not leaf[0].startswith(of_record)]


def whole_leaves(held: Iterable[HeldLeaf], shared: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """The leaves of the tensors in a slot by name, with those that replicas `shared` whole."""
    own = {name: Leaf(name, dtype, tuple(shape)) for name, dtype, shape, _ in held if not is_part_of(name, shared)}
    return own | dict(shared)


def check_leaves(form: SlotFormat, have: Mapping[str, Leaf], shared: Mapping[str, Leaf]) -> None:
    """Check that a slot, with the leaves that replicas `shared`, holds the leaves that the job has.

    Raises:
        StateMismatch: lists the tensors that are missing, extra, or of another shape or dtype.
    """
    held = whole_leaves(leaves_in(form), shared)
    differing = sorted(name for name in have.keys() | held.keys() if have.get(name) != held.get(name))
    if problems := [f"{name} is {held.get(name)} in the snapshot, {have.get(name)} in this job" for name in differing]:
        raise StateMismatch(f"the snapshot does not fit this job: {some(problems)}")


class SavedShard:
    """What one shard says: its format, and its record."""

    def __init__(self, read: Callable[[int, int], memoryview], claim: Claim) -> None:
        """Read and check the header.

        Args:
            read: the bytes from an offset on, checked; may block.
            claim: what the shard should be.

        Raises:
            ProtocolError: it is not that.
            HoldfastError: as `read`.
        """
        total = claim.bytes or 0
        first = read(0, min(PAGE_BYTES, total))
        header = read(0, min(8 + int.from_bytes(first[:8], "little"), total))
        self.form = believe_slot(header, claim)
        self.coord = claim.part
        self.read = read
        self._snapshot = claim.snapshot

    @cached_property
    def record(self) -> dict[str, Any]:
        """Its record. Raises `ProtocolError` if it is none of that snapshot."""
        return parse_record(bytes(self.read(*self.form.record)), self._snapshot)

    @cached_property
    def shared(self) -> dict[str, Leaf]:
        """The leaves that it shares with its replicas, whole, by name."""
        return shared_leaves_of(self.record[FIXED]["shared"])

    def values(self) -> tuple[Tree, Tree, Tree]:
        """Its early, late and fixed values, with new tensors in them.

        Raises:
            ProtocolError: the record cannot be understood.
            IncompleteSnapshot: it lists something that the shard does not hold.
        """
        values = decode_values(self.record, self._tensor)
        check_complete(values[2], values[1], whole_leaves(leaves_in(self.form), self.shared).keys())
        return values

    def _tensor(self, name: str) -> torch.Tensor:
        offset, leaf = self.form.offsets[name]
        return read_leaf(self.read(offset, leaf.bytes), 0, leaf)
