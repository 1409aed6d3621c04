"""The options of the persist tier, and how they are parsed from text."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.quantities import parse_rate, parse_time

LEAST_EVERY_S = 0.1
"""Shortest interval that may be set, in seconds."""


@dataclass(frozen=True, slots=True)
class PersistOptions:
    """The options of the persist tier. Raises `ConfigError` if one is out of range.

    Attributes:
        url: a directory that all nodes share, or a URL that fsspec knows.
        every_s: shortest time between two persisted snapshots, in seconds.
        keep: how many whole snapshots stay.
        bandwidth: most bytes per second that each node reads from memory to persist them; 0: no limit.
    """

    url: str
    every_s: float = 1800.0
    keep: int = 2
    bandwidth: float = 0.0

    def __post_init__(self) -> None:
        if not self.every_s >= LEAST_EVERY_S:
            raise ConfigError(
                f"--persist-every (HOLDFAST_PERSIST_EVERY) is {self.every_s} s: use {LEAST_EVERY_S} or more"
            )
        if self.keep < 1:
            raise ConfigError(f"--persist-keep (HOLDFAST_PERSIST_KEEP) is {self.keep}: use 1 or more")


def parse_options(url: str, every: str, keep: str, bandwidth: str) -> PersistOptions | None:
    """The options of the tier from the texts of the command line or the environment; None if `url` is empty. Raises
    `ConfigError`."""
    if not keep.strip().isdigit():
        raise ConfigError(f"--persist-keep (HOLDFAST_PERSIST_KEEP) is {keep!r}, not a whole number: use 1 or more")
    every_s = parse_time(every, "--persist-every (HOLDFAST_PERSIST_EVERY)")
    rate = parse_rate(bandwidth, "--persist-bandwidth (HOLDFAST_PERSIST_BANDWIDTH)")
    return PersistOptions(url, every_s, int(keep), rate) if url else None
