"""What work on bytes and the start of processes cost on nodes of real size. Pure.

A node of eight GPUs holds 76 to 640 GB. Here its slots have some kilobytes, and a simulated byte stands for `scale`
real ones: whoever works on bytes waits as long as a real machine would work on the bytes that they stand for.

A *unit* of a real slot has 4 MiB, one of a simulated slot stands for a series of those. Deadlines, though, are about
single units. So a request for a unit, and its answer, take as long as one real unit takes; the rest of the series is
charged to the thread that works through the units, between two of its requests.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from holdfast.ec.stripes import DEFAULT_UNIT_BYTES

GB = 10**9

RATES = {"copy": 6.9, "digest": 7.9, "populate": 0.5, "map": 0.9, "wipe": 10.0, "network": 1.4}
"""What the development machine does, in GB a second, as docs/size.md says. Each seed has others."""

FASTER = 10.0
"""The rates of a seed are drawn between a tenth of these, and ten times as much."""

START_S = 0.5
"""How long an SMP takes to import its modules and to begin, on an idle machine; drawn like the rates."""

CORES = 4
"""Processes of one node that start at the same time are slowed down if they are more than this."""

SLICES = 16
"""How many slices of a slot are reserved one after another. Between two of them others may give the slot up."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Rates in real bytes a second, and times in seconds.

    Attributes:
        scale: real bytes for each simulated byte.
        network: of a network card, each way, shared by all that goes through it at the time.
        start_s: see `START_S`.
    """

    scale: int
    copy: float
    digest: float
    populate: float
    map: float
    wipe: float
    network: float
    start_s: float

    def whole_s(self, what: str, count: int) -> float:
        """How long work on `count` simulated bytes takes. `what`: the name of a rate."""
        rate: float = getattr(self, what)
        return count * self.scale / rate

    def first_s(self, what: str, count: int) -> float:
        """How long work on the first real unit of `count` simulated bytes takes."""
        rate: float = getattr(self, what)
        return min(count * self.scale, DEFAULT_UNIT_BYTES) / rate

    def rest_s(self, what: str, count: int) -> float:
        """How long work on all others takes."""
        return self.whole_s(what, count) - self.first_s(what, count)

    def starting_s(self, starting: int) -> float:
        """How long a process takes to begin while so many of its node do, itself among them."""
        return self.start_s * max(1.0, starting / CORES)


def draw_costs(pick: random.Random, scale: int) -> Costs:
    """Costs of a machine that is up to ten times as fast, or as slow, as the development machine, in each respect."""

    def factor() -> float:
        return math.pow(FASTER, pick.uniform(-1.0, 1.0))

    rates = {name: rate * GB * factor() for name, rate in RATES.items()}
    return Costs(scale, **rates, start_s=START_S * factor())
