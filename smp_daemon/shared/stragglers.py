"""Which ranks keep the others waiting, told by what each of them does by itself in a step. Pure.

Steps of one job all take as long as each other: in collectives the fast ranks wait for the slow one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median_low

from holdfast.smp_daemon.shared.quantities import duration

FACTOR = 1.5
"""A straggler takes this many times as long as the median of all ranks."""

SHARE = 0.1
"""And it keeps them waiting for this share of a step."""

PARTS = {"data_s": "reading data", "work_s": "on its own work"}
"""What a rank does by itself, by the names of attributes of `Own`."""


@dataclass(frozen=True, slots=True)
class Own:
    """What of a step one rank does by itself, in seconds; medians over its last steps. 0: it is not known.

    Attributes:
        step_s: the whole step. data_s: reading its sources of data. work_s: all of it, until its last gradients were
            computed: reading data, code between steps, forward and backward.
    """

    step_s: float = 0.0
    data_s: float = 0.0
    work_s: float = 0.0


UNKNOWN = Own()


def stragglers(owns: Mapping[str, Own]) -> list[str]:
    """The ranks that keep the others waiting, in words, the slowest first: each for the first of `PARTS` by which it
    does. `owns`: of all ranks, by their names."""
    found: dict[str, tuple[float, str]] = {}
    for part, doing in PARTS.items():
        known = {name: seconds for name, own in owns.items() if (seconds := getattr(own, part))}
        usual_s = median_low(known.values()) if known else 0.0
        for name, seconds in known.items():
            step_s = owns[name].step_s
            if seconds > FACTOR * usual_s and seconds - usual_s > SHARE * step_s:
                text = f"{name} is {duration(seconds)} {doing} in each step of {duration(step_s)}"
                found.setdefault(name, (seconds - usual_s, f"{text}; the median of all ranks is {duration(usual_s)}"))
    return [text for _, text in sorted(found.values(), reverse=True)]
