"""Range checks with errors that give a number's name, its value and what is accepted."""

from __future__ import annotations

import math

from holdfast.smp_daemon.shared.errors import ConfigError


def positive(name: str, value: float, unit: str = "") -> None:
    """Raises `ConfigError` unless `value` is finite and more than 0."""
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} is {value:g}{unit}: give more than 0{unit}")


def not_negative(name: str, value: float, unit: str = "") -> None:
    """Raises `ConfigError` unless `value` is finite and at least 0."""
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{name} is {value:g}{unit}: give 0{unit} or more")


def within(name: str, value: float, low: float, high: float) -> None:
    """Raises `ConfigError` unless `value` lies between `low` and `high`, both included."""
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value:g}: give {low:g} to {high:g}")
