"""A snapshot's shards as whole, named tensors: what replicas divided is put together again. Does not need torch."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.smp_daemon.recovery.fetch import UnitSource
from holdfast.smp_daemon.shared.belief import Claim, believe_slot
from holdfast.smp_daemon.shared.errors import ProtocolError, StateMismatch
from holdfast.smp_daemon.shared.slotfile import DTYPE_BYTES, RECORD, Leaf, SlotFormat, read_record
from holdfast.snapshot.resume.regions import Held, Region, held_in, index_of, plan_reads, range_runs
from holdfast.snapshot.state.record import leaves_in
from holdfast.snapshot.state.replicas import is_part_of, shared_leaves_of


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """The slot file of one coordinate: its bytes, their format, and its record."""

    coord: str
    view: memoryview
    form: SlotFormat
    record: dict[str, Any]

    @property
    def shared(self) -> dict[str, Leaf]:
        """The leaves that the coordinate shares with its replicas, whole, by name."""
        return shared_leaves_of(self.record.get("fixed", {}).get("shared", {}))


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the export, and the ranges of slots that make it up, in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    ranges: tuple[tuple[str, int, int], ...]
    """(coordinate, offset in its slot, bytes)"""


def fetch(source: UnitSource, folder: Path) -> Iterator[SlotCopy]:
    """Copy every shard into a file in `folder`, and parse it. Blocks; takes memory for a few units."""
    for coord in source.layout.coords:
        path = folder / coord
        with path.open("w+b") as file:
            file.truncate(source.layout.shard_bytes(coord))
            mapped = mmap.mmap(file.fileno(), 0)
        source.fill(coord, memoryview(mapped))
        view = memoryview(mapped)
        yield read_slot(coord, view, believe_slot(view, Claim.of_shard(source.snapshot, coord, source.layout)))


def read_slot(coord: str, view: memoryview, form: SlotFormat) -> SlotCopy:
    """Parse the record of a slot file of that format. Raises `ProtocolError` if it is none."""
    try:
        record = json.loads(read_record(view, form))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the record of {coord} is not JSON: {error}") from error
    return SlotCopy(coord, view, form, record)


def replica_set(coord: str) -> str:
    """The part of a coordinate that its replicas have in common: all but the data-parallel place."""
    return coord.rpartition("dp")[0].rstrip("-")


def whole_tensors(slots: Sequence[SlotCopy]) -> dict[str, list[Tensor]]:
    """The tensors of each coordinate. A tensor that replicas share is whole, and listed under the first replica.

    Raises:
        StateMismatch: parts of a shared tensor are missing.
    """
    sets: dict[str, list[SlotCopy]] = {}
    for slot in slots:
        sets.setdefault(replica_set(slot.coord), []).append(slot)
    found: dict[str, list[Tensor]] = {}
    for members in sets.values():
        shared = {name: leaf for slot in members for name, leaf in slot.shared.items()}
        for slot in members:
            found[slot.coord] = list(_own(slot, shared))
        found[members[0].coord] += _together(members, shared)
    return found


def _own(slot: SlotCopy, shared: Mapping[str, Leaf]) -> Iterator[Tensor]:
    for name, (offset, leaf) in slot.form.offsets.items():
        if name != RECORD and not is_part_of(name, shared):
            yield Tensor(name, leaf.dtype, leaf.shape, ((slot.coord, offset, leaf.bytes),))


def _together(members: Sequence[SlotCopy], shared: Mapping[str, Leaf]) -> Iterator[Tensor]:
    held: list[Held] = []
    for slot in members:
        parts = [leaf for leaf in leaves_in(slot.form) if is_part_of(leaf[0], shared)]
        held += held_in(slot.coord, parts, shared, {})
    index = index_of(held, [slot.coord for slot in members])
    for name, leaf in shared.items():
        reads, problem = plan_reads(Region(name, leaf.dtype, leaf.shape, range_runs(0, leaf.elements)), index)
        if problem:
            raise StateMismatch(f"the replicas' shards do not make up the whole: {problem}")
        yield Tensor(name, leaf.dtype, leaf.shape, tuple((read.coord, read.source, read.bytes) for read in reads))


# ---------------------------------------------------------------------- plain safetensors


def write_safetensors(
    path: Path, tensors: Iterable[Tensor], slots: Mapping[str, SlotCopy], notes: dict[str, str]
) -> None:
    """Write a file that every safetensors reader can read. 128-bit complex numbers, which the format does not have,
    become pairs of 64-bit floats."""
    ordered = sorted(tensors, key=lambda tensor: (-DTYPE_BYTES[tensor.dtype], tensor.dtype, tensor.name))
    header: dict[str, Any] = {"__metadata__": notes}
    end = 0
    for tensor in ordered:
        length = sum(count for _, _, count in tensor.ranges)
        dtype, shape = (tensor.dtype, tensor.shape) if tensor.dtype != "C128" else ("F64", (*tensor.shape, 2))
        header[tensor.name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + length]}
        end += length
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in ordered:
            for coord, offset, count in tensor.ranges:
                file.write(slots[coord].view[offset : offset + count])
    part.replace(path)
