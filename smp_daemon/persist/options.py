"""How the persist tier is set up, as people write it."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.quantities import parse_rate, parse_time

LEAST_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class PersistOptions:
    """The tier.

    Attributes:
        url: a directory that all nodes share, or a URL that fsspec knows.
        every_s: how often a snapshot is persisted, at most.
        keep: how many whole snapshots stay.
        bandwidth: most bytes per second that are read from memory for it, on each node; 0: no limit.
    """

    url: str
    every_s: float = 1800.0
    keep: int = 2
    bandwidth: float = 0.0

    def __post_init__(self) -> None:
        if not self.every_s >= LEAST_EVERY_S:
            raise ConfigError(f"a snapshot persisted every {self.every_s} s: use {LEAST_EVERY_S} s or more")
        if self.keep < 1:
            raise ConfigError(f"{self.keep} persisted snapshots kept: keep 1 at least")


def parse_options(url: str, every: str, keep: str, bandwidth: str) -> PersistOptions | None:
    """The tier as options or the environment name it; None if `url` is empty. Raises `ConfigError`."""
    if not keep.strip().isdigit():
        raise ConfigError(f"{keep!r} is no number of persisted snapshots to keep: use 1 or more")
    every_s = parse_time(every, "--persist-every (HOLDFAST_PERSIST_EVERY)")
    rate = parse_rate(bandwidth, "--persist-bandwidth (HOLDFAST_PERSIST_BANDWIDTH)")
    return PersistOptions(url, every_s, int(keep), rate) if url else None
