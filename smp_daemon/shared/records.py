"""Small JSON files with digests: commit records beside the slots, and whatever else an arena has to remember.

A record is written last, atomically, and a slot without one does not count. A file that does not match its digest is
never believed in part: a flipped bit in a number would leave it valid JSON.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import xxhash

from holdfast.smp_daemon.shared.errors import ArenaTooSmall, ProtocolError
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.identity import UNNAMED
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.limits import MAX_RECORD_BYTES
from holdfast.smp_daemon.shared.plain import Count, Unsigned, decode_digested, encode_digested
from holdfast.smp_daemon.shared.system import MACHINE, Files, opened

PART = ".part"
"""Suffix of the name of a file that is still being written."""

UnitBytes = Annotated[int, msgspec.Meta(ge=1)]


def digest(data: memoryview) -> int:
    """xxh3-64 of `data`."""
    return xxhash.xxh3_64_intdigest(data)


class Unit(NamedTuple):
    """A unit of a slot, and the digest that it was sealed with."""

    view: memoryview
    digest: int

    def matches(self) -> bool:
        """Whether it still has its digest. Reads the unit with the GIL released."""
        return digest(self.view) == self.digest


def digest_units(data: memoryview, unit_bytes: int) -> tuple[int, ...]:
    """Digest of each unit of a slot file; the last unit may be short."""
    return tuple(digest(data[i : i + unit_bytes]) for i in range(0, data.nbytes, unit_bytes))


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """The commit record of a sealed shard. `run`: id of the run that it belongs to."""

    snapshot: SnapshotId
    coord: str
    bytes: Count
    unit_bytes: UnitBytes
    digests: tuple[Unsigned, ...]
    kind: Literal["shard"] = "shard"
    run: str = UNNAMED.id

    def unit(self, index: int) -> tuple[int, int]:
        """Offset and length of a unit in the slot."""
        offset = index * self.unit_bytes
        return offset, min(self.unit_bytes, self.bytes - offset)


@dataclass(frozen=True, slots=True)
class ParityRecord:
    """The commit record of a parity slot.

    Attributes:
        run: id of the run that the snapshot belongs to.
        group: the tag of the group, see `Layout.tag`.
        lengths: lengths of this position's parity units, in stripe order. Each equals the longest data unit of its
            stripe.
        digests: digests of the same parity units.
        sources: for each parity unit, ``{position: digest}`` of the data units accumulated into it. A lost node's
            bytes are checked against these digests once they are rebuilt.
    """

    snapshot: SnapshotId
    group: str
    position: Count
    unit_bytes: UnitBytes
    lengths: tuple[Count, ...]
    digests: tuple[Unsigned, ...]
    sources: tuple[dict[int, Unsigned], ...]
    kind: Literal["parity"] = "parity"
    run: str = UNNAMED.id

    def __post_init__(self) -> None:
        if not len(self.lengths) == len(self.digests) == len(self.sources):
            raise ProtocolError("lengths, digests and sources of a parity are not of the same units")
        if any(length > self.unit_bytes for length in self.lengths):
            raise ProtocolError("a unit of a parity is longer than a unit")

    def unit(self, index: int) -> tuple[int, int]:
        """Offset and length of a unit in the slot."""
        return index * self.unit_bytes, self.lengths[index]


def record_name(slot_file: str) -> str:
    """The name of the file with the commit record of the slot in `slot_file`."""
    return f"{slot_file}.json"


def write_json(path: Path, data: Any) -> None:
    """Encode `data` and `write` it. Raises as `write`."""
    write(path, encode_digested(data))


def write(path: Path, content: bytes, step: int = -1) -> None:
    """Replace `path` atomically: a reader sees either the whole old file or the whole new one. `step`: that of the
    snapshot whose commit record it is.

    Raises:
        ArenaTooSmall: `path` cannot be written: the file system is full, or a limit of this process is reached.
    """
    part = path.with_name(path.name + PART)
    _failpoint(path, content, "before", step)
    try:
        part.write_bytes(content)
        _failpoint(path, content, "part", step)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise not_written(path, error) from error
    _failpoint(path, content, "done", step)


def not_written(path: Path, error: OSError) -> ArenaTooSmall:
    """What to raise if a file of an arena cannot be written: the file system is full, or a limit of this process is
    reached."""
    fix = ": `ulimit -f unlimited` allows it" if error.errno == errno.EFBIG else ""
    return ArenaTooSmall(f"{path} cannot be written: {error}{fix}")


def kind_of(name: str) -> str:
    """The kind of an arena's JSON file of that name: shard, parity, node, layout or smp."""
    if name.endswith(".safetensors.json"):
        return "shard"
    return "parity" if name.endswith(".parity.json") else name.partition(".")[0].partition("-")[0]


def read_json(path: Path, files: Files = MACHINE) -> Any | None:
    """The JSON in `path`, or None if there is no such file.

    Raises:
        ProtocolError: the file is damaged: too large, a link, not a regular file, unreadable, or not what was written.
    """
    try:
        with opened(path, os.O_RDONLY | os.O_NONBLOCK, files) as fd:
            status = files.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_RECORD_BYTES:
                raise ProtocolError(f"{path} is not a regular file, or is larger than {MAX_RECORD_BYTES} bytes")
            content = files.read(fd, status.st_size)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ProtocolError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return decode_digested(content)
    except ProtocolError as error:
        raise ProtocolError(f"{path} is damaged: {error}") from error


def _failpoint(path: Path, content: bytes, when: str, step: int) -> None:
    failpoint(f"record.{kind_of(path.name)}.{when}", step)
