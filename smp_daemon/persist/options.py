"""How the persist tier is set up, as people write it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from holdfast.smp_daemon.shared.errors import ConfigError

LEAST_EVERY_S = 0.1
_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


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


def parse_options(url: str, every: str, keep: str, bandwidth: float) -> PersistOptions | None:
    """The tier as arguments or the environment name it; None if `url` is empty. Raises `ConfigError`."""
    if not url:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d|)\s*", every)
    if match is None:
        raise ConfigError(f"{every!r} is no time span: say how often to persist, such as 600, 90s, 30min or 2h")
    if not keep.strip().isdigit():
        raise ConfigError(f"{keep!r} is no number of persisted snapshots to keep: use 1 or more")
    return PersistOptions(url, float(match[1]) * _UNITS[match[2]], int(keep), bandwidth)
