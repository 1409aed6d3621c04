"""The options of the persist tier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.smp_daemon.shared.settings import PERSIST, PERSIST_BANDWIDTH, PERSIST_EVERY, PERSIST_KEEP


@dataclass(frozen=True, slots=True)
class PersistOptions:
    """The options of the persist tier.

    Attributes:
        url: a directory that all nodes share, or a URL that fsspec knows.
        every_s: shortest time between two persisted snapshots, in seconds.
        keep: how many whole snapshots stay.
        bandwidth: most bytes per second that each node reads from memory to persist them; 0: no limit.
    """

    url: str
    every_s: float = PERSIST_EVERY.value({})
    keep: int = PERSIST_KEEP.value({})
    bandwidth: float = PERSIST_BANDWIDTH.value({})


def options_of(environment: Mapping[str, str]) -> PersistOptions | None:
    """The options in an environment; None if it names no place. Raises `ConfigError`."""
    options = PersistOptions(
        PERSIST.value(environment),
        PERSIST_EVERY.value(environment),
        PERSIST_KEEP.value(environment),
        PERSIST_BANDWIDTH.value(environment),
    )
    return options if options.url else None
