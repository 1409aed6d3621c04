"""The exceptions of holdfast: one base class, and the cases that a user can act on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar


class HoldfastError(Exception):
    """Base class of every error that holdfast raises on purpose."""


E = TypeVar("E", bound=HoldfastError)


class ConfigError(HoldfastError):
    """An argument, an environment variable or the machine's set-up is wrong; the message says how to fix it."""


class NotFound(HoldfastError):
    """No such job, node or arena exists here; the message names those that do."""


class SmpUnavailable(HoldfastError):
    """No SMP answers on this node, or it went away."""


class VersionMismatch(ConfigError):
    """Two versions of holdfast cannot talk to each other, or read each other's files; nothing was changed."""


class ArenaInUse(ConfigError):
    """Another SMP owns the arena: it serves, is about to, or is about to end."""


class ArenaTooSmall(ConfigError):
    """The shared memory cannot hold what the job needs."""


class StaleEpoch(HoldfastError):
    """A process of an older epoch tried to act; a newer start of the job has taken over."""


class NoFreeSlot(HoldfastError):
    """Every slot holds a snapshot that must be kept."""


class ProtocolError(HoldfastError):
    """A message or a file does not follow the format; none of it was used."""


class NotHeld(ProtocolError):
    """A node is asked for bytes that it does not hold, or no longer."""


class NotOurs(ProtocolError):
    """Bytes are not those that were asked for: of another run, snapshot or shard, or of another layout."""


class DamagedSnapshot(HoldfastError):
    """Bytes of a snapshot do not match their digests."""


class IncompleteSnapshot(DamagedSnapshot):
    """A snapshot lacks state that its record lists, or its record cannot be understood; so do all copies of it."""


class Unrecoverable(HoldfastError):
    """More of a protected snapshot is lost than its parity can restore."""


class StateMismatch(HoldfastError):
    """The snapshot does not fit the model, the optimizer or the world; nothing was written."""


class Repeated(HoldfastError):
    """The job was started again and again, and ended at the same step in the same way each time."""


class PlaceError(HoldfastError):
    """The storage of persisted snapshots failed, or cannot be reached."""


class NodeLeaves(HoldfastError):
    """A node of the job is to be taken away. Its last snapshot is protected: the next start goes on from it."""


class DeadlineExceeded(HoldfastError):
    """An operation did not complete in time."""


BY_NAME: dict[str, type[HoldfastError]] = {
    name: kind for name, kind in globals().items() if isinstance(kind, type) and issubclass(kind, HoldfastError)
}
"""Exception classes by name, to turn an error reply back into an exception."""


def failure_of(work: Callable[[], object], kind: type[E]) -> E | None:
    """The error of type `kind` that `work` raised, or None. Other errors propagate."""
    try:
        work()
    except kind as error:
        return error
    return None
