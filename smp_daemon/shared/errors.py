"""The exceptions of holdfast: one root, and the cases a user can act on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar


class HoldfastError(Exception):
    """Root of every error that holdfast raises on purpose."""


E = TypeVar("E", bound=HoldfastError)


class ConfigError(HoldfastError):
    """An argument, an environment variable or the machine's set-up is wrong; the message says how to fix it."""


class NotFound(HoldfastError):
    """There is no such job, node or arena here; the message names those that there are."""


class SmpUnavailable(HoldfastError):
    """No SMP answers on this node, or it went away."""


class VersionMismatch(ConfigError):
    """Two versions of holdfast met that cannot talk to each other, or read what the other wrote; nothing was done."""


class ArenaTooSmall(ConfigError):
    """The shared memory cannot hold what the job needs."""


class StaleEpoch(HoldfastError):
    """A process of an older epoch tried to act; a newer start of the job has taken over."""


class NoFreeSlot(HoldfastError):
    """Every slot holds a snapshot that must be kept."""


class ProtocolError(HoldfastError):
    """A message or a file does not follow the format; nothing of it was used."""


class DamagedSnapshot(HoldfastError):
    """Bytes of a snapshot do not match their digests."""


class Unrecoverable(HoldfastError):
    """A protected snapshot exists, and more of it is lost than its parity covers."""


class StateMismatch(HoldfastError):
    """The snapshot does not fit the model, the optimizer or the world; nothing was written."""


class Repeated(HoldfastError):
    """The job was started again and again, and always ended at the same step in the same way."""


class PlaceError(HoldfastError):
    """The storage of persisted snapshots failed, or cannot be reached."""


class DeadlineExceeded(HoldfastError):
    """Something that had to happen did not happen in time."""


BY_NAME: dict[str, type[HoldfastError]] = {
    cls.__name__: cls
    for cls in (
        HoldfastError,
        ConfigError,
        NotFound,
        SmpUnavailable,
        VersionMismatch,
        ArenaTooSmall,
        StaleEpoch,
        NoFreeSlot,
        ProtocolError,
        DamagedSnapshot,
        Unrecoverable,
        StateMismatch,
        Repeated,
        PlaceError,
        DeadlineExceeded,
    )
}
"""How an error's name in a message becomes an exception again on the other side."""


def failure_of(work: Callable[[], object], kind: type[E]) -> E | None:
    """Why `work` failed, or None; errors of other kinds are raised."""
    try:
        work()
    except kind as error:
        return error
    return None
