"""Conversion of values to and from JSON. The types of a class decide which data it accepts: nothing is converted, and a
field that is missing, of another type or out of range is refused. Fields with defaults may be left out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, TypeVar

import msgspec
import xxhash
import zstandard

from holdfast.smp_daemon.shared.errors import ProtocolError
from holdfast.smp_daemon.shared.limits import (
    IDENTIFIER,
    MAX_COUNT,
    MAX_MESSAGE_BYTES,
    MAX_PORT,
    MAX_TEXT,
    MAX_UNPACKED_BYTES,
    PACKED_FROM_BYTES,
)

T = TypeVar("T")

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
"""An epoch, a step, a number of bytes, or another count."""

Unsigned = Annotated[int, msgspec.Meta(ge=0)]
"""An unsigned number such as a digest. JSON readers take no more than 64 bits."""

Port = Annotated[int, msgspec.Meta(ge=0, le=MAX_PORT)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
"""A host, or the label of a domain."""
Address = tuple[Text, Port]
Identifier = Annotated[str, msgspec.Meta(pattern=f"^{IDENTIFIER}\\Z")]
"""See `limits.is_identifier`."""

DIGEST = b"xxh3_128"
"""Name of the member of a file's JSON object that is the digest of the others."""

_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_first_use = threading.Lock()  # held while a decoder is made, by any thread; innermost. `_decoders` is read without it


def _decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """The one decoder of a type.

    msgspec collects the fields of a class when a decoder first needs them, stores them with the class, and lets other
    threads see them unfinished: two threads that do this at once crash the process (msgspec 0.22). So decoders, which
    cover the classes of all fields too, are made under a lock, and nothing else here passes a type to msgspec.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        with _first_use:
            decoder = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    return decoder


def to_plain(value: object) -> Any:
    """`value` as dicts, lists, strings and numbers, from which `from_plain` makes an equal value."""
    return msgspec.to_builtins(value)


def from_plain(kind: type[T], data: object, name: str = "") -> T:
    """A value of type `kind`. Raises `ProtocolError` if `data` does not fit; the message says "not `name`" and why."""
    return _read(_decoder(kind), data, name or kind.__name__)


def reader(kind: Any, name: str) -> Callable[[object], Any]:
    """`from_plain` for a union that is read often: looking up its decoder takes longer than reading a message."""
    return partial(_read, _decoder(kind), name=name)


def _read(decoder: msgspec.json.Decoder[T], data: object, name: str) -> T:
    """Goes through JSON: `msgspec.convert` examines all classes of a union on each call, which takes far longer."""
    try:
        return decoder.decode(encode_json(data))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"not {name}: {error}") from error


def encode_json(value: object) -> bytes:
    """The result of `to_plain` as JSON."""
    return msgspec.json.encode(value)


def encode_digested(value: dict[str, Any]) -> bytes:
    """`value` as a JSON object whose last member is the xxh3-128 of the rest: for files, whose bits may flip."""
    return _with_digest(encode_json(value))


def _with_digest(text: bytes) -> bytes:
    separator = b"," if len(text) > 2 else b""
    return text[:-1] + separator + b'"' + DIGEST + b'":"' + xxhash.xxh3_128_hexdigest(text).encode() + b'"}\n'


def decode_digested(content: bytes) -> Any:
    """The inverse of `encode_digested`. Raises `ProtocolError`, which says "it ..."."""
    rest, _, _ = content.rpartition(b'"' + DIGEST + b'":"')
    text = rest.removesuffix(b",") + b"}"
    if _with_digest(text) != content:
        raise ProtocolError("it does not match its digest")
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise ProtocolError(f"it is not JSON: {error}") from error


def decode_json(kind: type[T], text: bytes | bytearray | str, name: str) -> T:
    """The inverse of `encode_json`; raises as `from_plain`."""
    try:
        return _decoder(kind).decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise ProtocolError(f"not {name}: {error}") from error


def pack(value: object) -> bytes:
    """`encode_json` for a message, compressed if it is long. Layouts become 18 times shorter.

    Raises:
        ProtocolError: the message is too long.
    """
    text = packed = encode_json(value)
    if len(text) >= PACKED_FROM_BYTES:
        packed = zstandard.ZstdCompressor(level=1).compress(text)
    if len(packed) > MAX_MESSAGE_BYTES or len(text) > MAX_UNPACKED_BYTES:
        raise ProtocolError(
            f"a message of {len(text)} bytes, compressed {len(packed)}; the limits are {MAX_UNPACKED_BYTES} and "
            f"{MAX_MESSAGE_BYTES}"
        )
    return packed


def unpack(kind: type[T], data: bytes | bytearray, name: str) -> T:
    """The inverse of `pack`; raises as `from_plain`. Decompresses to at most `MAX_UNPACKED_BYTES`."""
    if data[:4] != zstandard.FRAME_HEADER:
        return decode_json(kind, data, name)
    try:
        length = zstandard.frame_content_size(data)
        if not 0 <= length <= MAX_UNPACKED_BYTES:
            raise ProtocolError(f"not {name}: {length} bytes, compressed; the limit is {MAX_UNPACKED_BYTES}")
        return decode_json(kind, zstandard.ZstdDecompressor().decompress(data), name)
    except zstandard.ZstdError as error:
        raise ProtocolError(f"not {name}: {error}") from error
