"""Values as JSON can carry them, and back. What each must be, the types of its class say: nothing is converted, and
what is missing, of another type or out of range is refused. Fields that have defaults may be left out.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from holdfast.smp_daemon.shared.errors import ProtocolError
from holdfast.smp_daemon.shared.limits import IDENTIFIER, MAX_COUNT, MAX_PORT

T = TypeVar("T")

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
"""Of epochs, steps, bytes, and of what is counted."""

Unsigned = Annotated[int, msgspec.Meta(ge=0)]
"""Such as a digest. JSON readers take no more than 64 bits."""

Port = Annotated[int, msgspec.Meta(ge=0, le=MAX_PORT)]
Identifier = Annotated[str, msgspec.Meta(pattern=f"^{IDENTIFIER}\\Z")]
"""See `limits.is_identifier`."""


def to_plain(value: object) -> Any:
    """Dicts, lists, texts and numbers, from which `from_plain` makes an equal value."""
    return msgspec.to_builtins(value)


def from_plain(kind: type[T], data: object, name: str = "") -> T:
    """A value of that type. Raises `ProtocolError` if `data` is none: it says that this is not ``name``, and why."""
    try:
        return msgspec.convert(data, kind, str_keys=True)
    except (msgspec.ValidationError, RecursionError, UnicodeError) as error:
        raise ProtocolError(f"not {name or kind.__name__}: {error}") from error


def encode_json(value: object) -> bytes:
    """`to_plain`, as JSON."""
    return msgspec.json.encode(value)


def decode_json(kind: type[T], text: bytes | bytearray | str, name: str) -> T:
    """What `encode_json` was given; else as `from_plain`."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise ProtocolError(f"not {name}: {error}") from error
