"""A cap on bytes per second. Pure: the caller brings the clock and does the waiting."""

from __future__ import annotations

import re

from smp_daemon.errors import ConfigError

BURST_S = 0.1
"""How far one may run ahead of the rate: work comes in units, and a timer is late by milliseconds."""

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class Pacer:
    """Says how long to wait so that no more than `rate` bytes a second go by; a rate of 0 means no limit."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._free_at = 0.0

    def wait_s(self, count: int, now: float) -> float:
        """Account for `count` bytes that are about to go at `now` (seconds); how long to wait before they may."""
        if not self.rate:
            return 0.0
        self._free_at = max(self._free_at, now - BURST_S)
        wait = max(0.0, self._free_at - now)
        self._free_at += count / self.rate
        return wait


def parse_rate(text: str) -> float:
    """Bytes per second from ``"2G"``, ``"500MB/s"``, ``"1.5e9"``; 0 means no limit.

    Raises:
        ConfigError: anything else.
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:[eE][+]?[0-9]+)?)\s*([KMGT]?)B?(?:/s)?\s*", text)
    try:
        if match is not None:
            return float(match[1]) * _UNITS[match[2]]
    except ValueError:
        pass
    raise ConfigError(f"{text!r} is not a rate: say bytes per second, such as 500M or 2GB/s, or 0 for no limit")
