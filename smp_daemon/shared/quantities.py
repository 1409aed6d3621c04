"""Sizes, times and rates as people write and read them: a number and its unit.

Every option, variable and text with one of these is parsed here. A number without a unit is refused, as nobody can tell
whether 64 means bytes or gigabytes. Only 0 needs no unit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.smp_daemon.shared.errors import ConfigError

_NUMBER_AND_UNIT = re.compile(r"\s*((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]*)\s*")


@dataclass(frozen=True, slots=True)
class _Quantity:
    """One kind of quantity: its name, examples for error messages, the factor of each unit, the most in its largest
    unit and the least apart from 0, which nobody has: what is computed with it stays within what numbers hold."""

    name: str
    examples: str
    units: Mapping[str, float]
    most: int
    least: float

    def read(self, text: str, what: str) -> float:
        begin = f"{what}: {text!r}" if what else repr(text)
        match = _NUMBER_AND_UNIT.fullmatch(text)
        if match is not None:
            number, unit = float(match[1]), match[2]
            if number == 0 and unit in ("", *self.units):
                return 0.0
            if not unit:
                raise ConfigError(f"{begin} has no unit: give a {self.name} such as {self.examples}")
            if unit in self.units and math.isfinite(value := number * self.units[unit]):
                largest = max(self.units, key=lambda each: self.units[each])
                if value > self.most * self.units[largest]:
                    raise ConfigError(f"{begin} is more than {self.most}{largest}: give less")
                if value < self.least:
                    raise ConfigError(f"{begin} is next to nothing: give more, or 0")
                return value
        raise ConfigError(f"{begin} is not a {self.name}: give one such as {self.examples}")


_POWERS = {letter: power for power, letter in enumerate("KMGTP", 1)}
_BYTES: dict[str, float] = {
    "B": 1,
    **{f"{letter}{end}": 1000.0**power for letter, power in _POWERS.items() for end in ("", "B")},
    **{f"{letter}{end}": 1024.0**power for letter, power in _POWERS.items() for end in ("i", "iB")},
    "kB": 1000.0,
}
_SIZE = _Quantity("size", "64GB or 60GiB", _BYTES, 1000, 1.0)
_RATE = _Quantity("rate", "2GB/s or 500MB/s", {f"{unit}/s": count for unit, count in _BYTES.items()}, 1000, 1.0)
_TIME = _Quantity(
    "time",
    "800ms, 90s, 5min, 36h or 1000d",
    {"ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0},
    10_000_000,
    1e-6,
)


def parse_size(text: str, what: str = "") -> int:
    """Parse a size such as ``"64GB"``, ``"60GiB"`` or ``"0"``. Returns bytes.

    Args:
        what: names the option or variable in the error.

    Raises:
        ConfigError: the text is not a number, has no unit or the wrong one, or is more than 1000Pi.
    """
    return int(_SIZE.read(text, what))


def parse_rate(text: str, what: str = "") -> float:
    """Parse a rate such as ``"2GB/s"``, ``"500MiB/s"`` or ``"0"``, like `parse_size`. Returns bytes per second."""
    return _RATE.read(text, what)


def parse_time(text: str, what: str = "") -> float:
    """Parse a time such as ``"90s"``, ``"800ms"``, ``"36h"`` or ``"0"``, like `parse_size`. Returns seconds."""
    return _TIME.read(text, what)


def duration(seconds: float) -> str:
    """Format a time, to three digits."""
    for unit, scale in (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if float(number := f"{seconds / scale:.3g}") >= 1:  # once rounded: 0.9996 s is 1 s, and not 1e+03 ms
            return f"{float(number):g} {unit}"  # and 1000 d, not 1e+03 d
    return f"{seconds * 1e3:.3g} ms"


def amount(count: float) -> str:
    """Format a number of bytes, to three digits."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}" if count < 999 * scale else f"{count / scale:.0f} {unit}"
    return f"{count:.0f} B"
