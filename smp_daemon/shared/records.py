"""Small JSON records beside the slots: written last, in one step, and the only thing that makes a slot count."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import xxhash

from holdfast.smp_daemon.shared.errors import ArenaTooSmall, ProtocolError
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.limits import MAX_COUNT, MAX_RECORD_BYTES
from holdfast.smp_daemon.shared.points import is_armed, reach

PART = ".part"
"""At the end of the name of what is being written."""

_encode = json.JSONEncoder(separators=(",", ":")).encode


def digest(data: memoryview) -> int:
    """xxh3-64 of `data`."""
    return xxhash.xxh3_64_intdigest(data)


def digest_units(data: memoryview, unit_bytes: int) -> tuple[int, ...]:
    """Digest of each unit of a slot file; the last unit may be short."""
    return tuple(digest(data[i : i + unit_bytes]) for i in range(0, data.nbytes, unit_bytes))


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """The commit record of a sealed shard."""

    snapshot: SnapshotId
    coord: str
    bytes: int
    unit_bytes: int
    digests: tuple[int, ...]

    def unit(self, index: int) -> tuple[int, int]:
        """Offset and length of a unit in the slot."""
        offset = index * self.unit_bytes
        return offset, min(self.unit_bytes, self.bytes - offset)


@dataclass(frozen=True, slots=True)
class ParityRecord:
    """The commit record of a parity slot.

    Attributes:
        group: the tag of the group, see `Layout.tag`.
        lengths: of this position's parity units, in stripe order: each as long as the longest data unit of its stripe.
        digests: of the same.
        sources: for each of them, ``{position: digest}`` of the data units accumulated into it. This is how a lost
            node's bytes are checked once they are rebuilt.
    """

    snapshot: SnapshotId
    group: str
    position: int
    unit_bytes: int
    lengths: tuple[int, ...]
    digests: tuple[int, ...]
    sources: tuple[dict[int, int], ...]

    def unit(self, index: int) -> tuple[int, int]:
        """Offset and length of a unit in the slot."""
        return index * self.unit_bytes, self.lengths[index]


def shard_to_json(record: ShardRecord) -> dict[str, Any]:
    """A JSON object that `shard_from_json` reads back."""
    return {
        "kind": "shard",
        "snapshot": list(record.snapshot),
        "coord": record.coord,
        "bytes": record.bytes,
        "unit_bytes": record.unit_bytes,
        "digests": record.digests,
    }


def shard_from_json(data: Any) -> ShardRecord:
    """Raises `ProtocolError` if `data` is not a shard's commit record."""
    try:
        if data["kind"] != "shard":
            raise ProtocolError(f"a commit record of kind {data['kind']!r}")
        return ShardRecord(
            _snapshot(data["snapshot"]),
            str(data["coord"]),
            int(data["bytes"]),
            _unit_bytes(data["unit_bytes"]),
            _digests(data["digests"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"not a shard's commit record: {error!r}") from error


def parity_to_json(record: ParityRecord) -> dict[str, Any]:
    """A JSON object that `parity_from_json` reads back."""
    return {
        "kind": "parity",
        "snapshot": list(record.snapshot),
        "group": record.group,
        "position": record.position,
        "unit_bytes": record.unit_bytes,
        "lengths": record.lengths,
        "digests": record.digests,
        "sources": [{str(p): d for p, d in unit.items()} for unit in record.sources],
    }


def parity_from_json(data: Any) -> ParityRecord:
    """Raises `ProtocolError` if `data` is not a parity slot's commit record."""
    try:
        if data["kind"] != "parity":
            raise ProtocolError(f"a commit record of kind {data['kind']!r}")
        record = ParityRecord(
            _snapshot(data["snapshot"]),
            str(data["group"]),
            int(data["position"]),
            _unit_bytes(data["unit_bytes"]),
            tuple(int(length) for length in data["lengths"]),
            _digests(data["digests"]),
            tuple({int(p): int(d) for p, d in unit.items()} for unit in data["sources"]),
        )
        if not len(record.lengths) == len(record.digests) == len(record.sources):
            raise ValueError("lengths, digests and sources are not of the same units")
        if any(not 0 <= length <= record.unit_bytes for length in record.lengths):
            raise ValueError("a unit is longer than a unit")
        return record
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ProtocolError(f"not a parity slot's commit record: {error!r}") from error


def write_json(path: Path, data: Any) -> None:
    """Replace `path` by `data` in one step: a reader sees the old file or the new one, whole.

    Raises:
        ArenaTooSmall: it cannot be written: the file system is full, or a limit of this process is reached.
    """
    part = path.with_name(path.name + PART)
    _reach(path, data, "before")
    try:
        part.write_text(_encode(data))
        _reach(path, data, "part")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ArenaTooSmall(f"{path} cannot be written: {error}") from error
    _reach(path, data, "done")


def kind_of(name: str) -> str:
    """What a JSON file of an arena with that name says; one of `points.RECORDS`."""
    if name.endswith(".safetensors.json"):
        return "shard"
    return "parity" if name.endswith(".parity.json") else name.partition(".")[0].partition("-")[0]


def read_json(path: Path) -> Any | None:
    """The JSON in `path`, or None if there is no such file.

    Raises:
        ProtocolError: too large, a link, not a file, or not JSON.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ProtocolError(f"{path} cannot be read: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_RECORD_BYTES:
            raise ProtocolError(f"{path} is no file, or larger than {MAX_RECORD_BYTES} bytes")
        return json.loads(os.read(fd, status.st_size))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{path} is not JSON: {error}") from error
    finally:
        os.close(fd)


def _reach(path: Path, data: Any, when: str) -> None:
    if is_armed():
        reach(f"record.{kind_of(path.name)}.{when}", data["snapshot"][1] if "snapshot" in data else -1)


def _snapshot(pair: Sequence[Any]) -> SnapshotId:
    epoch, step = pair
    if not 0 <= int(epoch) <= MAX_COUNT or not 0 <= int(step) <= MAX_COUNT:
        raise ValueError("an epoch or a step is out of range")
    return SnapshotId(int(epoch), int(step))


def _unit_bytes(value: Any) -> int:
    if int(value) < 1:
        raise ValueError(f"a unit of {value} bytes")
    return int(value)


def _digests(values: Any) -> tuple[int, ...]:
    digests = tuple(int(v) for v in cast("list[Any]", values))
    if any(not 0 <= each < 1 << 64 for each in digests):
        raise ValueError("a digest has 64 bits")
    return digests
