"""Values as JSON can carry them, and back. What each must be, the types of its class say: nothing is converted, and
what is missing, of another type or out of range is refused. Fields that have defaults may be left out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, TypeVar

import msgspec
import zstandard

from holdfast.smp_daemon.shared.errors import ProtocolError
from holdfast.smp_daemon.shared.limits import (
    IDENTIFIER,
    MAX_COUNT,
    MAX_MESSAGE_BYTES,
    MAX_PORT,
    MAX_UNPACKED_BYTES,
    PACKED_FROM_BYTES,
)

T = TypeVar("T")

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
"""Of epochs, steps, bytes, and of what is counted."""

Unsigned = Annotated[int, msgspec.Meta(ge=0)]
"""Such as a digest. JSON readers take no more than 64 bits."""

Port = Annotated[int, msgspec.Meta(ge=0, le=MAX_PORT)]
Address = tuple[str, Port]
Identifier = Annotated[str, msgspec.Meta(pattern=f"^{IDENTIFIER}\\Z")]
"""See `limits.is_identifier`."""


_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_first_use = threading.Lock()


def _decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """The one decoder of a type.

    msgspec reads what a class says of its fields when it first decodes one, keeps that with the class, and lets other
    threads see it half done: two that do so at once end the process (msgspec 0.22). So one thread at a time does it,
    for the classes of its fields too, and nothing else here hands a type to msgspec.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        with _first_use:
            decoder = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    return decoder


def to_plain(value: object) -> Any:
    """Dicts, lists, texts and numbers, from which `from_plain` makes an equal value."""
    return msgspec.to_builtins(value)


def from_plain(kind: type[T], data: object, name: str = "") -> T:
    """A value of that type. Raises `ProtocolError` if `data` is none: it says that this is not ``name``, and why."""
    return _read(_decoder(kind), data, name or kind.__name__)


def reader(kind: Any, name: str) -> Callable[[object], Any]:
    """`from_plain`, for a union of which much is read: to look one up takes longer than to read a message."""
    return partial(_read, _decoder(kind), name=name)


def _read(decoder: msgspec.json.Decoder[T], data: object, name: str) -> T:
    """By way of JSON: `msgspec.convert` looks at all classes of a union anew each time, which takes far longer."""
    try:
        return decoder.decode(encode_json(data))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"not {name}: {error}") from error


def encode_json(value: object) -> bytes:
    """`to_plain`, as JSON."""
    return msgspec.json.encode(value)


def decode_json(kind: type[T], text: bytes | bytearray | str, name: str) -> T:
    """What `encode_json` was given; else as `from_plain`."""
    try:
        return _decoder(kind).decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise ProtocolError(f"not {name}: {error}") from error


def pack(value: object) -> bytes:
    """`encode_json`, for a message: compressed if it is long. Layouts become 18 times shorter.

    Raises:
        ProtocolError: it is longer than a message may be.
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
    """What `pack` was given; else as `from_plain`. Takes no more memory than `MAX_UNPACKED_BYTES`."""
    if data[:4] != zstandard.FRAME_HEADER:
        return decode_json(kind, data, name)
    try:
        length = zstandard.frame_content_size(data)
        if not 0 <= length <= MAX_UNPACKED_BYTES:
            raise ProtocolError(f"not {name}: {length} bytes, compressed; the limit is {MAX_UNPACKED_BYTES}")
        return decode_json(kind, zstandard.ZstdDecompressor().decompress(data), name)
    except zstandard.ZstdError as error:
        raise ProtocolError(f"not {name}: {error}") from error
