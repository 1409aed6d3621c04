"""The slot file: a valid safetensors file whose header is padded so that the data starts on a page boundary. One
exception: the dtype ``C128`` is our own, as safetensors has no complex128.

::

    8 bytes   length of the header, little endian
    header    JSON {"__metadata__": {...}, name: {"dtype", "shape", "data_offsets"}, ...}, padded with spaces
    data      leaves one after another without a gap, wide dtypes first, so that each is aligned to its own size

The metadata comes first, and its epoch and step have a fixed width, so stamping a new snapshot into a slot
rewrites `STAMP_BYTES` and moves nothing. The last leaf, `RECORD`, is JSON padded with spaces. It holds everything that
is not a tensor.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.smp_daemon.shared.errors import ProtocolError
from holdfast.smp_daemon.shared.identity import UNNAMED
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.limits import MAX_COUNT, MAX_DIMENSIONS, MAX_HEADER_BYTES, MAX_LEAVES, MAX_NAME_BYTES

RECORD = "holdfast.record"
PAGE_BYTES = 4096
DTYPE_BYTES: Mapping[str, int] = {
    "C128": 16,
    "C64": 8,
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "BF16": 2,
    "F16": 2,
    "I16": 2,
    "U16": 2,
    "C32": 4,
    "F8_E4M3": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2": 1,
    "F8_E5M2FNUZ": 1,
    "F8_E8M0": 1,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}

_STAMP = '{{"__metadata__":{{"epoch":"{epoch:>20}","step":"{step:>20}",'
_STAMP_PATTERN = re.compile(rb'\{"__metadata__":\{"epoch":"( *\d+)","step":"( *\d+)",')
STAMP_BYTES = len(_STAMP.format(epoch=0, step=0))


@dataclass(frozen=True, slots=True)
class Leaf:
    """A named tensor: safetensors dtype name and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Length of its data in bytes."""
        return DTYPE_BYTES[self.dtype] * self.elements


@dataclass(frozen=True, slots=True)
class SlotFormat:
    """Positions of everything in a slot file of one shard.

    Attributes:
        header: the bytes before the data. `plan_slot` leaves its stamp at epoch 0, step 0.
        offsets: by name, the offset of each leaf in the file, and the leaf.
    """

    header: bytes
    offsets: Mapping[str, tuple[int, Leaf]]
    total_bytes: int

    @property
    def record(self) -> tuple[int, int]:
        """Offset and capacity of the record, in bytes."""
        offset, leaf = self.offsets[RECORD]
        return offset, leaf.bytes


def plan_slot(job: str, coord: str, leaves: Iterable[Leaf], record_capacity: int, run: str = UNNAMED.id) -> SlotFormat:
    """The format of a slot for `leaves` and a record of at most `record_capacity` bytes. `run`: id of the run.

    Raises:
        ProtocolError: a name is empty, too long or used twice; a dtype is unknown; a shape or the header is beyond its
            limit; or there are too many leaves.
    """
    ordered = sorted(leaves, key=lambda leaf: (-DTYPE_BYTES.get(leaf.dtype, 0), leaf.dtype, leaf.name))
    ordered.append(Leaf(RECORD, "U8", (record_capacity,)))
    if len(ordered) > MAX_LEAVES:
        raise ProtocolError(f"{len(ordered)} leaves in a shard; the limit is {MAX_LEAVES}")
    entries: dict[str, Any] = {}
    starts: dict[str, tuple[int, Leaf]] = {}
    end = 0
    for leaf in ordered:
        _check_leaf(leaf)
        if leaf.name in starts:
            raise ProtocolError(f"two leaves are called {leaf.name!r}")
        starts[leaf.name] = (end, leaf)
        entries[leaf.name] = {
            "dtype": leaf.dtype,
            "shape": list(leaf.shape),
            "data_offsets": [end, end + leaf.bytes],
        }
        end += leaf.bytes
    fixed = json.dumps({"job": job, "run": run, "coord": coord, "format": "holdfast-1"}, separators=(",", ":"))
    rest = json.dumps(entries, separators=(",", ":"))
    text = (_STAMP.format(epoch=0, step=0) + fixed[1:] + "," + rest[1:]).encode()
    length = -(-(8 + len(text)) // PAGE_BYTES) * PAGE_BYTES
    if length - 8 > MAX_HEADER_BYTES:
        raise ProtocolError(f"the header needs {length - 8} bytes; the limit is {MAX_HEADER_BYTES}")
    header = (length - 8).to_bytes(8, "little") + text.ljust(length - 8)
    return SlotFormat(header, {n: (length + start, leaf) for n, (start, leaf) in starts.items()}, length + end)


def write_stamp(slot: memoryview, snapshot: SnapshotId) -> None:
    """Write into a slot's header, in place, which snapshot it holds."""
    slot[8 : 8 + STAMP_BYTES] = _STAMP.format(epoch=snapshot.epoch, step=snapshot.step).encode()


def read_stamp(slot: memoryview) -> SnapshotId:
    """Which snapshot the slot's header says it holds.

    Raises:
        ProtocolError: there is no stamp in its place.
    """
    match = _STAMP_PATTERN.match(bytes(slot[8 : 8 + STAMP_BYTES]))
    if match is None:
        raise ProtocolError("the slot file's header is damaged: it carries no stamp of a snapshot")
    return SnapshotId(int(match[1]), int(match[2]))


def read_format(slot: memoryview, total_bytes: int | None = None) -> tuple[SlotFormat, dict[str, str]]:
    """Parse and check a slot file's header. Returns its format and its metadata.

    Args:
        total_bytes: length of the slot file, if `slot` is only its beginning.

    Raises:
        ProtocolError: the header is damaged or exceeds a limit; the message says where.
    """
    if slot.nbytes < 8:
        raise ProtocolError(f"a slot file of {slot.nbytes} bytes has no header")
    length = int.from_bytes(slot[:8], "little")
    if length > MAX_HEADER_BYTES or 8 + length > slot.nbytes:
        raise ProtocolError(
            f"the slot file's header claims {length} bytes; the file has {slot.nbytes}, the limit is {MAX_HEADER_BYTES}"
        )
    try:
        entries = json.loads(bytes(slot[8 : 8 + length]))
        metadata = {str(k): str(v) for k, v in entries.pop("__metadata__").items()}
        leaves = [
            (tuple(entry["data_offsets"]), Leaf(name, entry["dtype"], tuple(entry["shape"])))
            for name, entry in entries.items()
        ]
        leaves.sort(key=lambda item: (item[0], item[1].name))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"the slot file's header is damaged: {error}") from error
    if len(leaves) > MAX_LEAVES:
        raise ProtocolError(f"{len(leaves)} leaves in a slot file; the limit is {MAX_LEAVES}")
    offsets: dict[str, tuple[int, Leaf]] = {}
    end = 0
    for place, leaf in leaves:
        _check_leaf(leaf)
        if place != (end, end + leaf.bytes):
            raise ProtocolError(f"leaf {leaf.name!r} is at {place}, not at {(end, end + leaf.bytes)}")
        offsets[leaf.name] = (8 + length + end, leaf)
        end += leaf.bytes
    total = slot.nbytes if total_bytes is None else total_bytes
    if 8 + length + end != total:
        raise ProtocolError(f"the slot file has {total} bytes, its header describes {8 + length + end}")
    if RECORD not in offsets:
        raise ProtocolError(f"the slot file has no leaf {RECORD!r}")
    return SlotFormat(bytes(slot[: 8 + length]), offsets, total), metadata


def read_record(slot: memoryview, form: SlotFormat) -> bytes:
    """A copy of the record of a slot of format `form`, padding included."""
    offset, capacity = form.record
    return bytes(slot[offset : offset + capacity])


def _check_leaf(leaf: Leaf) -> None:
    if not 0 < _utf8_bytes(leaf.name) <= MAX_NAME_BYTES or leaf.name == "__metadata__":
        raise ProtocolError(f"{leaf.name[:80]!r} cannot name a leaf (1-{MAX_NAME_BYTES} bytes)")
    if not isinstance(leaf.dtype, str) or leaf.dtype not in DTYPE_BYTES:
        raise ProtocolError(f"leaf {leaf.name!r} has unknown dtype {leaf.dtype!r}")
    if len(leaf.shape) > MAX_DIMENSIONS or not all(type(n) is int and 0 <= n <= MAX_COUNT for n in leaf.shape):
        raise ProtocolError(f"leaf {leaf.name!r} has shape {str(leaf.shape)[:80]}")


def _utf8_bytes(name: str) -> int:
    """Length of `name` in a header; 0 if it cannot be encoded."""
    try:
        return len(name.encode())
    except UnicodeEncodeError:
        return 0
