"""The share of wall time lost to snapshots and failures, to first order, with several levels.

A *level* is a kind of snapshot that serves one class of failures: sealed (processes), protected (memory lost),
persisted (beyond parity). It serves all classes below it, too. Level i is taken every P_i steps, each P_i a
multiple of the one before, **counted by step numbers**: if each recovery reset the count, the rare levels would starve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ENCODE_EVERY = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
"""Candidates for n where one of n snapshots is encoded. Between these, waste hardly changes."""


@dataclass(frozen=True, slots=True)
class Level:
    """One kind of snapshot, and the failures that need it.

    Attributes:
        cost_s: training time that one snapshot takes by stopping or slowing the loop, without the levels below.
        latency_s: from the boundary until it counts; costs no training time, but ages what a failure falls back to.
        restart_s: from a failure of this class to the next step.
        rate: failures of this class per second, in the whole job.
    """

    name: str
    cost_s: float
    latency_s: float
    restart_s: float
    rate: float


def overhead(levels: Sequence[Level], periods_s: Sequence[float]) -> float:
    """Visible cost of all snapshots per second of useful work: ``sum c / T``, as a run without failures shows it."""
    return sum(level.cost_s / period for level, period in zip(levels, periods_s, strict=True))


def lost(levels: Sequence[Level], periods_s: Sequence[float]) -> tuple[float, ...]:
    """For each class, the share of time lost to its failures: ``rate (T/2 + latency + R)``."""
    return tuple(
        level.rate * (period / 2.0 + level.latency_s + level.restart_s)
        for level, period in zip(levels, periods_s, strict=True)
    )


def first_order(levels: Sequence[Level], periods_s: Sequence[float]) -> float:
    """Wasted share of wall time, ``sum c/T + sum rate (T/2 + l + R)``: on average a failure strikes half a period after
    the last snapshot, which counts only after its latency. Values above 1 have no meaning."""
    return overhead(levels, periods_s) + sum(lost(levels, periods_s))
