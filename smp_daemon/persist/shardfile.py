"""The file format of one persisted shard: encodes the units of a slot, and decodes them again. Pure.

::

    magic          8 bytes, ``HFPSHRD1``
    length         4 bytes: of the header
    header         JSON: job, run, epoch, step, coord, bytes, unit_bytes
    digest         8 bytes: xxh3-64 of the header
    unit 0 ...     each 20 bytes, `_UNIT`, and then its content
    end            8 bytes, ``HFPSHRDE``, and 8 bytes: xxh3-64 of the digests of all units

All numbers are little endian. A unit is compressed with zstandard, in byte planes (`smp_daemon.persist.planes`) if the
caller gives a width, or stored plain if compression does not make it shorter. Its digest is the one of the uncompressed
bytes, made when the unit was sealed. So decoded bytes are compared with what was in memory, whatever happened between.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np
import xxhash
import zstandard

from holdfast.smp_daemon.persist import planes
from holdfast.smp_daemon.shared.belief import Claim, believe_unit
from holdfast.smp_daemon.shared.errors import DamagedSnapshot
from holdfast.smp_daemon.shared.identity import is_run_id
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.limits import MAX_COUNT, MAX_UNIT_BYTES, is_identifier
from holdfast.smp_daemon.shared.records import digest

MAGIC, END = b"HFPSHRD1", b"HFPSHRDE"
MAX_HEADER_BYTES = 4096
MAX_SHARD_BYTES = 1 << 46
LEVEL = 1
"""Compression level of zstandard. Level 3 takes twice as long for fp32 and bf16 state, and makes it no shorter."""

PLAIN, ZSTD = 0, 1
_LENGTH = struct.Struct("<I")
_DIGEST = struct.Struct("<Q")
_UNIT = struct.Struct("<IIBBHQ")
"""Number, stored length, method, number of planes (1: not split), zero, digest of the unit."""

Read = Callable[[int], bytes]
"""Returns that many bytes; fewer, or none, at the end of the file."""


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file: what it claims to hold."""

    job: str
    run: str
    epoch: int
    step: int
    coord: str
    bytes: int
    unit_bytes: int

    @property
    def snapshot(self) -> SnapshotId:
        """The snapshot that the shard belongs to."""
        return SnapshotId(self.epoch, self.step)

    @property
    def claim(self) -> Claim:
        """What the shard says it is."""
        return Claim(self.run, self.snapshot, self.coord, self.bytes, self.unit_bytes)

    @property
    def units(self) -> int:
        """Number of units that follow the header."""
        return -(-self.bytes // self.unit_bytes)

    def length(self, unit: int) -> int:
        """Length of a unit in bytes; the last may be shorter."""
        return min(self.unit_bytes, self.bytes - unit * self.unit_bytes)


class Encoder:
    """Encodes the file piece by piece, in order. Not thread-safe; holds about three units in memory."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self._compressor = zstandard.ZstdCompressor(level=LEVEL)
        self._digests = xxhash.xxh3_64()
        self._next = 0

    def begin(self) -> bytes:
        """The bytes before the units."""
        text = json.dumps(asdict(self._header), separators=(",", ":")).encode()
        return MAGIC + _LENGTH.pack(len(text)) + text + _DIGEST.pack(digest(memoryview(text)))

    def unit(self, content: memoryview, sealed: int, width: int) -> bytes:
        """The bytes of the next unit.

        Args:
            sealed: the unit's digest; the caller has checked it.
            width: bytes per number, to split the unit into planes; 1: do not split.
        """
        stored, method = self._compressor.compress(planes.split(content, width) if width > 1 else content), ZSTD
        if len(stored) >= content.nbytes:
            stored, method, width = bytes(content), PLAIN, 1
        self._digests.update(_DIGEST.pack(sealed))
        self._next += 1
        return _UNIT.pack(self._next - 1, len(stored), method, width, 0, sealed) + stored

    def end(self) -> bytes:
        """The bytes after the last unit. Raises `ValueError` if units are missing."""
        if self._next != self._header.units:
            raise ValueError(f"{self._next} units of {self._header.units} were written")
        return END + _DIGEST.pack(self._digests.intdigest())


@dataclass(frozen=True, slots=True)
class StoredUnit:
    """A unit as stored in a file: its number, its decoded length, how it is encoded, and the stored bytes."""

    number: int
    length: int
    method: int
    width: int
    digest: int
    content: bytes


def read_header(read: Read) -> Header:
    """Read and check the header of a file. Raises `DamagedSnapshot` if it is damaged, or exceeds a limit."""
    start = _exactly(read, len(MAGIC) + _LENGTH.size)
    if start[: len(MAGIC)] != MAGIC:
        raise DamagedSnapshot("it is not a persisted shard: its first bytes are wrong")
    (length,) = _LENGTH.unpack(start[len(MAGIC) :])
    if length > MAX_HEADER_BYTES:
        raise DamagedSnapshot(f"its header claims {length} bytes; the limit is {MAX_HEADER_BYTES}")
    text = _exactly(read, length)
    if _DIGEST.unpack(_exactly(read, _DIGEST.size))[0] != digest(memoryview(text)):
        raise DamagedSnapshot("its header does not match its digest")
    try:
        data = json.loads(text)
        numbers = {name: int(data[name]) for name in ("epoch", "step", "bytes", "unit_bytes")}
        header = Header(job=str(data["job"]), run=str(data["run"]), coord=str(data["coord"]), **numbers)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedSnapshot(f"its header is damaged: {error!r}") from error
    if not (is_identifier(header.job) and is_run_id(header.run) and is_identifier(header.coord)):
        raise DamagedSnapshot("its header names no job, run and coordinate")
    if not 0 < header.unit_bytes <= MAX_UNIT_BYTES or not 0 < header.bytes <= MAX_SHARD_BYTES:
        raise DamagedSnapshot(f"its header claims {header.bytes} bytes in units of {header.unit_bytes}")
    if not (0 <= header.epoch <= MAX_COUNT and 0 <= header.step <= MAX_COUNT):
        raise DamagedSnapshot("its header names no snapshot")
    return header


def read_units(read: Read, header: Header) -> Iterator[StoredUnit]:
    """Yield the units of a file in order, not decoded yet. Holds no more than one in memory.

    Raises:
        DamagedSnapshot: units are missing, out of order or wrongly described, or the end of the file is wrong.
    """
    digests = xxhash.xxh3_64()
    for number in range(header.units):
        found, stored, method, width, zero, sealed = _UNIT.unpack(_exactly(read, _UNIT.size))
        length = header.length(number)
        plain = method == PLAIN and width == 1 and stored == length
        packed = method == ZSTD and 1 <= width <= planes.MAX_WIDTH and stored < length
        if found != number or zero or not (plain or packed):
            raise DamagedSnapshot(f"unit {number} is damaged: its description is invalid")
        digests.update(_DIGEST.pack(sealed))
        yield StoredUnit(number, length, method, width, sealed, _exactly(read, stored))
    if _exactly(read, len(END)) != END or _DIGEST.unpack(_exactly(read, _DIGEST.size))[0] != digests.intdigest():
        raise DamagedSnapshot("it does not end as a persisted shard does")
    if read(1):
        raise DamagedSnapshot("something follows its end")


def decode_unit(unit: StoredUnit, out: memoryview) -> None:
    """Decode a unit into `out`, which is as long as the unit. May run in any thread. Raises `DamagedSnapshot`."""
    if unit.method == PLAIN:
        np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(unit.content, np.uint8))
    else:
        _decompress(unit, out)
    believe_unit(out, unit.digest, f"unit {unit.number}")


def _decompress(unit: StoredUnit, out: memoryview) -> None:
    try:
        # `decompress` allocates the length that the frame claims, so check that first.
        if zstandard.frame_content_size(unit.content) != unit.length:
            raise DamagedSnapshot(f"unit {unit.number} is damaged: it claims another length")
        content = zstandard.ZstdDecompressor().decompress(unit.content)
    except zstandard.ZstdError as error:
        raise DamagedSnapshot(f"unit {unit.number} is damaged: {error}") from error
    if len(content) != unit.length:
        raise DamagedSnapshot(f"unit {unit.number} is damaged: {len(content)} bytes, not {unit.length}")
    planes.join(memoryview(content), unit.width, out)


def _exactly(read: Read, count: int) -> bytes:
    parts = []
    missing = count
    while missing:
        part = read(missing)
        if not part:
            raise DamagedSnapshot(f"it ends {missing} bytes too early")
        parts.append(part)
        missing -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
