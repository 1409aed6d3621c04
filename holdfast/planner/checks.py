"""Range checks with errors that give a number's name, its value and what is accepted."""

from __future__ import annotations

import math

from holdfast.smp_daemon.shared.errors import ConfigError


def positive(name: str, value: float, unit: str = "") -> float:
    """`value` if it is finite and more than 0. Raises `ConfigError` if not."""
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} is {value:g}{unit}: give more than 0{unit}")
    return value


def not_negative(name: str, value: float, unit: str = "") -> float:
    """`value` if it is finite and at least 0. Raises `ConfigError` if not."""
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{name} is {value:g}{unit}: give 0{unit} or more")
    return value


def within(name: str, value: float, low: float, high: float) -> float:
    """`value` if it lies between `low` and `high`, both included. Raises `ConfigError` if not."""
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value:g}: give {low:g} to {high:g}")
    return value
