"""Reading the fields of a message. What is missing, of another kind or out of range raises `ProtocolError`."""

from __future__ import annotations

from holdfast.smp_daemon.shared.errors import ProtocolError
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.limits import MAX_COUNT, is_identifier
from holdfast.smp_daemon.shared.transport import Message

MAX_KNOWN = 4096


def number(message: Message, key: str, most: int = (1 << 64) - 1) -> int:
    """A whole number from 0 to `most`."""
    value = message.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise ProtocolError(f"{key!r} must be a number between 0 and {most}, not {str(value)[:80]}")
    return value


def seconds(message: Message, key: str) -> float:
    """A time of at most an hour."""
    value = message.get(key)
    if not isinstance(value, int | float) or not 0 <= value <= 3600:
        raise ProtocolError(f"{key!r} must be between 0 and 3600 s, not {value!r}")
    return float(value)


def text(message: Message, key: str) -> str:
    """A text; empty ones too."""
    value = message.get(key)
    if not isinstance(value, str):
        raise ProtocolError(f"{key!r} must be a text, not {value!r}")
    return value


def identifier(message: Message, key: str) -> str:
    """What may name a job, a node, a shard or a group."""
    value = text(message, key)
    if not is_identifier(value):
        raise ProtocolError(f"{key!r} must be a name of 1-64 characters, not {value[:80]!r}")
    return value


def snapshot_id(message: Message, key: str) -> SnapshotId:
    """``[epoch, step]``."""
    value = message.get(key)
    if not isinstance(value, list) or len(value) != 2:
        raise ProtocolError(f"{key!r} must be [epoch, step], not {value!r}")
    return SnapshotId(*(number({key: n}, key, MAX_COUNT) for n in value))


def address(value: object) -> tuple[str, int]:
    """``[host, port]``."""
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[0], str) or not isinstance(value[1], int):
        raise ProtocolError(f"a message says at which address somebody is, not {str(value)[:80]}")
    return value[0], value[1]


def digests(message: Message, key: str) -> frozenset[str]:
    """Digests of layouts, as texts; none if nothing is said."""
    value = message.get(key, [])
    if not isinstance(value, list) or len(value) > MAX_KNOWN or not all(isinstance(each, str) for each in value):
        raise ProtocolError(f"{key!r} must be a list of at most {MAX_KNOWN} digests")
    return frozenset(value)
