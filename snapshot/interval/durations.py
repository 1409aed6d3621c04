"""Time spans as people write and read them."""

from __future__ import annotations

import re

from holdfast.smp_daemon.shared.errors import ConfigError

_UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration(seconds: float) -> str:
    """A time span, to three digits."""
    for unit, scale in (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e3:.3g} ms"


def parse_duration(text: str) -> float:
    """Seconds, from ``"90s"``, ``"800ms"``, ``"36h"`` or ``"1000d"``.

    Raises:
        ConfigError: it has no unit, or is no number.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*(ms|s|min|m|h|d)\s*", text)
    if match is None:
        raise ConfigError(f"{text!r} is no time span: say a number and a unit, such as 800ms, 90s, 5min, 36h or 1000d")
    return float(match[1]) * _UNITS[match[2]]
