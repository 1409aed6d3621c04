"""How fast sources answer, and which of them is slow beside the others. Pure: the caller brings the clock.

No rate is expected of anybody. A source is slow if it takes `SLOWER` times as long for a unit as the others do, or if
it lets an answer become late. Where all are equally slow, none is.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from holdfast.smp_daemon.shared.limits import CALL_DEADLINE_S
from holdfast.smp_daemon.shared.sources import Address

SLOWER = 3.0
"""So many times the others' time for a unit is slow: less is noise, or a busy machine."""

SLOW_S = 0.005
"""A unit in less is never slow."""

REMEMBERED = 8
"""Times of a source that count: it may become slow, or fast again, in the middle."""

STRIKES = 2
"""A connection that breaks is made once more; whoever breaks so many in a row is gone."""

FIRST_PATIENCE_S = 2.0
LEAST_PATIENCE_S = 1.0
PATIENCE = 4.0
"""An answer is late after so many times the usual time, and not before `LEAST_PATIENCE_S`."""


@dataclass(slots=True)
class Source:
    """One SMP that is asked.

    Attributes:
        times: seconds for a unit, the newest last.
        open: asks that it has not answered yet.
        late: it has let an answer become late, and answered none in time since.
        strikes: failures since its last answer.
    """

    times: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    open: int = 0
    late: bool = False
    strikes: int = 0

    @property
    def gone(self) -> bool:
        """Whether it is not asked any more."""
        return self.strikes >= STRIKES

    @property
    def usual_s(self) -> float:
        """The median of its times; 0 if there is none."""
        return statistics.median(self.times) if self.times else 0.0


class Speeds:
    """All sources of one load. Not thread-safe."""

    def __init__(self) -> None:
        self._sources: dict[Address, Source] = {}

    def __getitem__(self, address: Address) -> Source:
        return self._sources.setdefault(address, Source())

    def is_slow(self, address: Address) -> bool:
        """Whether `address` is late, or has taken much longer than the others, more than once."""
        source = self[address]
        if source.late:
            return True
        others = sorted(s.usual_s for a, s in self._sources.items() if a != address and s.times and not s.late)
        if len(source.times) < 2 or not others:
            return False
        return source.usual_s > max(SLOW_S, SLOWER * others[(len(others) - 1) // 2])

    def slow(self, addresses: Collection[Address]) -> set[Address]:
        """Those of `addresses` that are slow."""
        return {address for address in addresses if self.is_slow(address)}


class Patience:
    """After how long an answer of one kind is late: a multiple of what is usual, and more after each that was."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=2 * REMEMBERED)
        self._patience_s = FIRST_PATIENCE_S

    @property
    def seconds(self) -> float:
        """For an ask that begins now."""
        return self._patience_s

    def answered(self, seconds: float) -> None:
        """An answer took so long."""
        self._times.append(seconds)
        usual = statistics.median(self._times)
        self._patience_s = min(CALL_DEADLINE_S, max(LEAST_PATIENCE_S, PATIENCE * usual))

    def late(self) -> None:
        """An answer is late: perhaps all are slow."""
        self._patience_s = min(CALL_DEADLINE_S, 2 * self._patience_s)
