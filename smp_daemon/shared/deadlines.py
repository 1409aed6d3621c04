"""How long a trainer may be quiet before it counts as hung, and work on bytes before it counts as stuck. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.limits import slowest_s
from holdfast.smp_daemon.shared.quantities import parse_time

STUCK_S = 60.0
"""How long work on bytes may move nothing, in seconds, before whoever waits for it gives up."""


class Progress:
    """Tells work that is slow from work that is stuck: it may take as long as it needs, as long as something moves.

    How long moving a node's bytes takes differs by a factor of a hundred between machines, so no deadline computed from
    their number is both safe on the slowest and useful on the fastest. Each step of the work calls `moved`; whoever
    waits for the work waits `left_s`, looks again, and gives up once it `is_stuck`. Thread-safe: the one field that
    changes is a single reference.
    """

    def __init__(self, monotonic: Callable[[], float], patience_s: float = STUCK_S) -> None:
        """`monotonic`: the clock, in seconds. `patience_s`: how long nothing may move; it begins to run now."""
        self._monotonic = monotonic
        self._patience_s = patience_s
        self._moved_s = monotonic()

    def moved(self) -> None:
        """Something has moved."""
        self._moved_s = self._monotonic()

    @property
    def left_s(self) -> float:
        """How long until the work counts as stuck if nothing moves, in seconds; 0: it is stuck."""
        return max(0.0, self._moved_s + self._patience_s - self._monotonic())

    @property
    def is_stuck(self) -> bool:
        """Whether nothing has moved for too long."""
        return not self.left_s


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long a trainer may be quiet in each phase, in seconds; 0: for ever.

    Attributes:
        start: from connecting to the end of the first step, which includes building and compiling the model.
        restore: how long nothing moves while the state is fetched and loaded: neither the trainer nor its SMP.
        step: between two forwards or optimizer steps.
        copy: from the start of a snapshot's copy until the snapshot is sealed, and as long as its bytes may take.
        factor: a step may also take `factor` times the median step, if that is longer than `step`.
    """

    start: float = 900.0
    restore: float = 900.0
    step: float = 60.0
    copy: float = 120.0
    factor: float = 10.0

    def of(self, phase: str, step_s: float | None, copy_bytes: int = 0) -> float:
        """The deadline of a phase, in seconds. A trainer that has said goodbye has none.

        Args:
            step_s: duration of the median step, if known.
            copy_bytes: the bytes of a snapshot of this trainer.
        """
        if phase == "gone":
            return 0.0
        if phase == "copy" and self.copy:
            return self.copy + slowest_s(copy_bytes)
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
        if name in found:
            raise ConfigError(f"{part!r}: {name} is given twice")
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
