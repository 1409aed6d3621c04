"""How long a trainer may be quiet before it counts as hung. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.quantities import parse_time


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long a trainer may be quiet in each phase, in seconds; 0: for ever.

    Attributes:
        start: from connecting to the end of the first step, which includes building and compiling the model.
        restore: from the call to restore until the state is loaded.
        step: between two forwards or optimizer steps.
        copy: from the start of a snapshot's copy until the snapshot is sealed.
        factor: a step may also take `factor` times the median step, if that is longer than `step`.
    """

    start: float = 900.0
    restore: float = 900.0
    step: float = 60.0
    copy: float = 120.0
    factor: float = 10.0

    def of(self, phase: str, step_s: float | None) -> float:
        """The deadline of a phase. `step_s`: duration of the median step, if known. A trainer that has said goodbye has
        no deadline."""
        if phase == "gone":
            return 0.0
        if phase == "step" and self.step and step_s is not None:
            return max(self.step, self.factor * step_s)
        return float(getattr(self, phase))

    @property
    def shortest(self) -> float:
        """The shortest deadline; 0 if there is none."""
        return min((s for s in (self.start, self.restore, self.step, self.copy) if s), default=0.0)


def parse_deadlines(text: str) -> Deadlines:
    """Parse deadlines such as ``"step=2min,copy=5min"``; the others keep their defaults. Raises `ConfigError`."""
    known = {field.name for field in fields(Deadlines)}
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.strip().partition("=")
        if name not in known:
            raise ConfigError(f"{part!r}: use NAME=TIME, where NAME is one of {', '.join(sorted(known))}")
        found[name] = _factor(value) if name == "factor" else parse_time(value, name)
    return Deadlines(**found)


def _factor(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = -1.0
    if not 0 <= factor <= 1e9:
        raise ConfigError(f"factor: {text!r} is not a factor: use a number of median steps, such as 10")
    return factor
