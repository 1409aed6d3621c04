"""The ways to get a unit, and which to try next. Pure: `smp_daemon.recovery.fetch` goes them.

A unit comes *whole* from a holder; by *chain*, as a sum that k holders of other units of its stripe pass on; or as a
*sum* made here of k units. The first of these that is possible is the best: it moves the fewest bytes to this node.

No source is expected to reach a certain rate. A source is slow if it was late last time, or takes `SLOWER` times as
long for a unit as the others do. What depends on a slow source comes after everything else. If all are equally slow,
none counts as slow.
"""

from __future__ import annotations

import random
import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from holdfast.smp_daemon.shared.limits import CALL_DEADLINE_S
from holdfast.smp_daemon.shared.sources import Address

REMEMBERED = 8
"""Number of a source's latest times that count: it may become slow, or fast again, at any time."""

SLOWER = 3.0
"""A source is slow from this multiple of the others' time for a unit. Anything less is noise, or a busy machine."""

SLOW_S = 0.005
"""A source that takes less than this for a unit, in seconds, is never slow."""

STRIKES = 2
"""Number of failures in a row after which a source is gone. After the first, a new connection is tried."""

FIRST_PATIENCE_S = 2.0
LEAST_PATIENCE_S = 1.0
PATIENCE_FACTOR = 4.0
"""A request is late after this multiple of the usual time, but not before `LEAST_PATIENCE_S`. As long as no request has
been answered, it is late after `FIRST_PATIENCE_S`."""

EXPLORE_AFTER, EXPLORE_S = 4, 0.5
"""Once a holder has given this many units, and needs at least so many seconds for the rest, one unit is got from other
sources to measure them, and another one whenever the holder has become twice as slow."""


class WayKind(Enum):
    """Kinds of ways."""

    WHOLE = "whole"
    CHAIN = "chain"
    SUM = "sum"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to get a unit.

    Attributes:
        operands: numbers of the units that are summed up; for a chain in the order of its helpers.
        through: the SMPs that it depends on. A chain is requested from the first.
    """

    kind: WayKind
    operands: tuple[int, ...]
    through: tuple[Address, ...]


@dataclass(slots=True)
class Ways:
    """The ways to get one unit, and what came of those that were gone.

    Attributes:
        holders: the SMPs that hold the unit itself.
        operands: the holders of the other units of its stripe, by number.
        needed: how many operands it takes.
        by_chain: whether a chain may be asked for it.
        failed: holders that cannot give the unit. `bad`: operands that cannot be got. `spoilt`: a sum was wrong.
        late: SMPs that were late in this round of tries. `round`: how many there were before.
        came: operands that are here already.
        missed: whether an SMP was late, or failed; one that does not hold the unit any more has done neither.
    """

    holders: tuple[Address, ...]
    operands: Mapping[int, Address] = field(default_factory=dict)
    needed: int = 1
    by_chain: bool = False
    failed: set[Address] = field(default_factory=set)
    bad: set[int] = field(default_factory=set)
    spoilt: bool = False
    late: set[Address] = field(default_factory=set)
    round: int = 0
    came: set[int] = field(default_factory=set)
    missed: bool = False

    def patience_s(self, speeds: Speeds) -> float:
        """How long a request of this round may take. It doubles from round to round: perhaps all sources are slow."""
        return min(CALL_DEADLINE_S, speeds.patience_s * (1 << self.round))

    def next_round(self) -> bool:
        """Try again what was late. Returns whether there is anything to try."""
        again = bool(self.late)
        self.late.clear()
        self.round += again
        return again


@dataclass(slots=True)
class SourceSpeed:
    """What is known of one SMP that units are requested from.

    Attributes:
        times: its latest times for a unit, in seconds, the newest last.
        open: number of requests that it has not answered yet.
        late: its last request was late.
        strikes: number of failures since its last answer.
    """

    times: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    open: int = 0
    late: bool = False
    strikes: int = 0

    @property
    def usual_s(self) -> float:
        """The median of its times in seconds; 0 if there are none."""
        return statistics.median(self.times) if self.times else 0.0


class Speeds:
    """The speeds of all sources of one fetch. Not thread-safe."""

    def __init__(self) -> None:
        self._sources: dict[Address, SourceSpeed] = {}
        self._times: deque[float] = deque(maxlen=2 * REMEMBERED)

    def __getitem__(self, address: Address) -> SourceSpeed:
        return self._sources.setdefault(address, SourceSpeed())

    @property
    def patience_s(self) -> float:
        """How long a request that begins now may take before it is late, in seconds."""
        if not self._times:
            return FIRST_PATIENCE_S
        return max(LEAST_PATIENCE_S, PATIENCE_FACTOR * statistics.median(self._times))

    @property
    def misses_somebody(self) -> bool:
        """Whether an SMP is gone, so that a unit that failed now may be got later."""
        return any(map(self.is_gone, self._sources))

    def answered(self, through: Sequence[Address], seconds: float, shared: int, waits: Sequence[float] = ()) -> None:
        """Note an answer.

        Args:
            seconds: the time that it took.
            shared: how many requests the first source had open, so that the time is not counted for each of them.
            waits: how long each helper of a chain, except the last, waited for the next one, in seconds.
        """
        self._times.append(seconds)
        spans = (seconds, *waits, 0.0)
        for place, address in enumerate(through if len(waits) == len(through) - 1 else through[:1]):
            self[address].times.append(max(0.0, spans[place] - spans[place + 1]) / shared)
            self[address].late = False
        self[through[0]].strikes = 0

    def failed(self, address: Address, strikes: int, *, silent: bool) -> None:
        """Note that a connection broke or, if `silent`, that no answer came for as long as one is ever waited for.

        Args:
            strikes: how many the source had when the request was made: connections that break together count once.
        """
        self[address].strikes = max(self[address].strikes, strikes + (STRIKES if silent else 1))

    def is_gone(self, address: Address) -> bool:
        """Whether it has failed too often to be used again."""
        return self[address].strikes >= STRIKES

    def is_slow(self, address: Address) -> bool:
        """Whether it was late, or takes much longer than the others; one answer is not enough to tell."""
        source = self[address]
        if source.late:
            return True
        others = sorted(s.usual_s for a, s in self._sources.items() if a != address and s.times and not s.late)
        if len(source.times) < 2 or not others:
            return False
        return source.usual_s > max(SLOW_S, SLOWER * others[(len(others) - 1) // 2])


class Chooser:
    """Chooses ways for the units of one fetch. Not thread-safe.

    Attributes:
        doubt: a chain was late, and no slow source explains it. Then sums are made, which show the slow one.
    """

    def __init__(self) -> None:
        self.speeds = Speeds()
        self.doubt = False
        self._explored_s = 0.0

    def choose(self, ways: Ways, draw: random.Random, left: int = 0) -> Way | None:
        """The way to try next; None: there is none in this round.

        Args:
            draw: varies evenly which sources are first, adjacent, and left out.
            left: how many units are still to be fetched.
        """
        if not ways.failed and self._explores(ways, left):
            found = self._chain(ways, draw, slow_too=False)
            if found is not None:
                return found
        for slow_too in (False, True):
            for choose in (self._whole, self._chain, self._sum):
                found = choose(ways, draw, slow_too=slow_too)
                if found is not None:
                    return found
        return None

    def _able(self, ways: Ways, addresses: Collection[Address], *, slow_too: bool) -> set[Address]:
        return {
            address
            for address in addresses
            if address not in ways.late
            and not self.speeds.is_gone(address)
            and (slow_too or not self.speeds.is_slow(address))
        }

    def _whole(self, ways: Ways, draw: random.Random, *, slow_too: bool) -> Way | None:
        able = self._able(ways, ways.holders, slow_too=slow_too) - ways.failed
        if not able:
            return None
        holder = min(able, key=lambda address: (self.speeds[address].open, address))
        return Way(WayKind.WHOLE, (), (holder,))

    def _chain(self, ways: Ways, draw: random.Random, *, slow_too: bool) -> Way | None:
        if not ways.by_chain or self.doubt:
            return None
        order = self._operands(ways, draw, slow_too=slow_too, taken=())
        if len(order) < ways.needed:
            return None
        chosen = order[: ways.needed]
        shuffled = draw.sample(chosen, len(chosen))
        return Way(WayKind.CHAIN, tuple(shuffled), tuple(ways.operands[number] for number in shuffled))

    def _sum(self, ways: Ways, draw: random.Random, *, slow_too: bool) -> Way | None:
        lacking = ways.needed - len(ways.came)
        if ways.spoilt or not ways.operands:
            return None
        order = self._operands(ways, draw, slow_too=slow_too, taken=ways.came)
        if len(order) < lacking:
            return None
        chosen = tuple(order[:lacking])
        return Way(WayKind.SUM, chosen, tuple(ways.operands[number] for number in chosen))

    def _operands(self, ways: Ways, draw: random.Random, *, slow_too: bool, taken: Collection[int]) -> list[int]:
        """Those that can be asked for, the best first."""
        able = self._able(ways, ways.operands.values(), slow_too=slow_too)
        left = ways.operands.keys() - ways.bad - set(taken)
        numbers = [number for number in sorted(left) if ways.operands[number] in able]

        def merit(number: int) -> tuple[bool, int]:
            source = self.speeds[ways.operands[number]]
            return self.speeds.is_slow(ways.operands[number]), source.open

        return sorted(draw.sample(numbers, len(numbers)), key=merit)

    def _explores(self, ways: Ways, left: int) -> bool:
        """Whether this unit should measure other sources than its holders; see `EXPLORE_AFTER`."""
        holders = [self.speeds[address] for address in ways.holders]
        if not holders or any(len(source.times) < EXPLORE_AFTER for source in holders):
            return False
        usual_s = min(source.usual_s for source in holders)
        if usual_s * left < EXPLORE_S or usual_s < 2 * self._explored_s:
            return False
        self._explored_s = usual_s
        return True
