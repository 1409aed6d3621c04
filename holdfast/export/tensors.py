"""A snapshot's shards as whole, named tensors: what replicas have divided is put together again. No torch in here."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.export.source import ShardSource
from holdfast.smp_daemon.shared.errors import ProtocolError, StateMismatch
from holdfast.smp_daemon.shared.slotfile import DTYPE_BYTES, RECORD, Leaf, SlotFormat, read_format, read_record
from holdfast.snapshot.state.replicas import is_part_of, shared_leaves_of
from holdfast.snapshot.state.shares import Part, missing, parse_part


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """One coordinate's slot file: its bytes, what is where in them, and its record."""

    coord: str
    view: memoryview
    form: SlotFormat
    record: dict[str, Any]

    @property
    def shared(self) -> dict[str, Leaf]:
        """What it shares with its replicas, whole, by name."""
        return shared_leaves_of(self.record.get("fixed", {}).get("shared", {}))


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the export, and the ranges of slots that it is made of, in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    ranges: tuple[tuple[str, int, int], ...]
    """(coordinate, offset in its slot, bytes)"""


def fetch(source: ShardSource, folder: Path) -> Iterator[SlotCopy]:
    """Bring every shard into a file of `folder`, and look into it. Blocks; memory is that of a few units."""
    for coord in source.layout.coords:
        path = folder / coord
        with path.open("w+b") as file:
            file.truncate(source.layout.shard_bytes(coord))
            mapped = mmap.mmap(file.fileno(), 0)
        source.fill(coord, memoryview(mapped))
        yield read_slot(coord, memoryview(mapped))


def read_slot(coord: str, view: memoryview) -> SlotCopy:
    """Raises `ProtocolError` if these bytes are no slot file."""
    form, _ = read_format(view)
    try:
        record = json.loads(read_record(view, form))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the record of {coord} is not JSON: {error}") from error
    return SlotCopy(coord, view, form, record)


def replica_set(coord: str) -> str:
    """What the coordinates of replicas have in common: all but their data-parallel place."""
    return coord.rpartition("dp")[0].rstrip("-")


def whole_tensors(slots: Sequence[SlotCopy]) -> dict[str, list[Tensor]]:
    """By coordinate, its tensors. What replicas share is given whole, with the first of them.

    Raises:
        StateMismatch: parts of it are not there.
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
    parts: dict[str, list[tuple[int, str, int, int]]] = {name: [] for name in shared}
    each: list[list[Part]] = []
    for slot in members:
        each.append([])
        for name, (offset, leaf) in slot.form.offsets.items():
            if name != RECORD and is_part_of(name, shared):
                part = Part(*(parse_part(name) or (name, 0, shared[name].elements)))
                each[-1].append(part)
                parts[part.name].append((part.start, slot.coord, offset, leaf.bytes))
    if problems := missing(list(shared.values()), each):
        raise StateMismatch(f"the replicas' shards do not make up the whole: {'; '.join(problems[:4])}")
    for name, leaf in shared.items():
        yield Tensor(name, leaf.dtype, leaf.shape, tuple(where for _, *where in sorted(parts[name])))  # type: ignore[misc]


# ---------------------------------------------------------------------- plain safetensors


def write_safetensors(
    path: Path, tensors: Iterable[Tensor], slots: Mapping[str, SlotCopy], notes: dict[str, str]
) -> None:
    """One file of tensors, as every safetensors reader takes it. Complex numbers of 128 bits, which the format does
    not know, become pairs of 64-bit ones."""
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
