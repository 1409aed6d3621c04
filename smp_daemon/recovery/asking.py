"""Who is asked for which unit of a shard next. Pure: the caller brings the clock, asks, and says what came of it.

A unit is had *whole* from whoever holds it; or by *chain*, the sum that k others of its stripe pass on; or *summed*
here from *terms*, each asked of its holder by itself. As a rule it is the first of these that there is. What is late is
not waited for: the unit is asked of others, the first answer counts, and the rest is called off. A chain that is late
does not say who holds it up; terms do, so its unit is summed. A slow source is left out where others suffice, and
whatever it has been asked for is taken from it in the end.

No rate is expected of anybody. A source is slow if it takes `SLOWER` times as long for a unit as the others do, or if
it lets an answer become late. Where all are equally slow, none is.

At most `LANES` asks are open at a time, and `SUMS` units are summed, whatever the length of the shard.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from holdfast.smp_daemon.shared.limits import CALL_DEADLINE_S
from holdfast.smp_daemon.shared.sources import Address

LANES = 8
"""Asks open at a time: `ON_TIME` of them in good health, so that all links are busy, and as many more when some are
late."""

ON_TIME = 4
SUMS = 2
"""Units summed here at a time: each takes k buffers."""

EXPLORE_S = 0.5
"""What one holder would take no longer than this for is not worth finding out whether the others are faster."""

EXPLORE_AFTER = 4
"""Answers of a holder, before it is found out."""

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


class How(Enum):
    """Ways to have a unit."""

    WHOLE = "whole"
    CHAIN = "chain"
    TERM = "term"


class AnswerUse(Enum):
    """What to do with an answer."""

    WRITE = "write"
    """It is the first: write it, then say `written`."""
    SUM = "sum"
    """It was the last term that was missing: sum, write, then say `written`."""
    KEEP = "keep"
    """A term; others are still to come."""
    DROP = "drop"
    """The unit is here already, or will be."""


@dataclass(frozen=True, slots=True)
class Ways:
    """How a unit may be had.

    Attributes:
        holders: who hold it as it is.
        terms: who holds which other unit of its stripe, by number.
        needed: how many of these make it up.
    """

    holders: tuple[Address, ...]
    terms: Mapping[int, Address] = field(default_factory=dict)
    needed: int = 1


@dataclass(frozen=True, slots=True)
class Ask:
    """To carry out.

    Attributes:
        number: of the ask.
        terms: of a chain, in the order in which it goes; of a term, its number.
        through: whom the answer depends on; the first is asked.
        shared: how many asks the first has, this one included.
        began, due: seconds by the caller's clock. After `due`, at the latest, it is late.
    """

    number: int
    unit: int
    how: How
    terms: tuple[int, ...]
    through: tuple[Address, ...]
    shared: int
    began: float
    due: float


@dataclass(slots=True)
class Wanted:
    """A unit that is being had.

    Attributes:
        open: asks for it that are not answered, by number.
        failed: holders that could not give it.
        chain_failed: a chain for it has; no other is begun.
        summed: it is had from terms; those that came, and those that cannot be had, are `terms` and `bad`.
        spoilt: its sum did not match its digest.
        claimed: an answer, or a sum, is being written.
    """

    index: int
    ways: Ways
    open: dict[int, Ask] = field(default_factory=dict)
    failed: set[Address] = field(default_factory=set)
    chain_failed: bool = False
    summed: bool = False
    spoilt: bool = False
    claimed: bool = False
    terms: set[int] = field(default_factory=set)
    bad: set[int] = field(default_factory=set)


@dataclass(slots=True)
class SourceSpeed:
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
        self._sources: dict[Address, SourceSpeed] = {}

    def __getitem__(self, address: Address) -> SourceSpeed:
        return self._sources.setdefault(address, SourceSpeed())

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


class StragglerTimeout:
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


@dataclass(frozen=True, slots=True)
class _Next:
    """An ask, but for number and time."""

    unit: Wanted
    how: How
    terms: tuple[int, ...]
    through: tuple[Address, ...]
    explored_s: float | None = None


class Asking:
    """The asks for the units 0..count-1 of one shard. Not thread-safe.

    Attributes:
        hopeless: a unit that cannot be had; then there is nothing more to ask for.
        again: how many asks were made for units that had been asked of somebody before.
    """

    def __init__(self, count: int, ways: Callable[[int], Ways], *, by_chain: bool) -> None:
        """
        Args:
            ways: how a unit may be had; called once for each.
            by_chain: whether sums may come by chain.
        """
        self.hopeless: int | None = None
        self.again = 0
        self._ways = ways
        self._by_chain = by_chain
        self._fresh = iter(range(count))
        self._left = count
        self._ahead: Wanted | None = None
        self._units: dict[int, Wanted] = {}
        self._asks: dict[int, Ask] = {}
        self._called_off: list[int] = []
        self._revoked: set[int] = set()
        self._counted = 0
        self._late: set[int] = set()
        self._patience = {how: StragglerTimeout() for how in How}
        self._explored_s = 0.0
        self.speeds = Speeds()

    @property
    def over(self) -> bool:
        """Whether every unit is written, or one cannot be had."""
        return not self._left or self.hopeless is not None

    # ------------------------------------------------------------------ asking

    def next(self, now: float) -> Ask | None:
        """What to ask for at `now`; None: nothing, before something is answered or `wait_s` has passed."""
        self._note_late(now)
        found = self._choose()
        if found is None:
            return None
        unit, first = found.unit, self.speeds[found.through[0]]
        if unit.index not in self._units:
            self._units[unit.index], self._ahead = unit, None
        elif found.how is not How.TERM or not unit.summed or self._late.intersection(unit.open):
            self.again += 1
        unit.summed = unit.summed or found.how is How.TERM
        if found.explored_s is not None:
            self._explored_s = found.explored_s
        first.open += 1
        due = now + self._patience[found.how].seconds
        ask = Ask(self._counted, unit.index, found.how, found.terms, found.through, first.open, now, due)
        self._counted += 1
        self._asks[ask.number] = unit.open[ask.number] = ask
        return ask

    def has_more(self, now: float) -> bool:
        """Whether `next` has another ask."""
        self._note_late(now)
        return self._choose() is not None

    def wait_s(self, now: float) -> float | None:
        """How long it takes from `now` until an ask becomes late; None: none will."""
        dues = [self._due(ask) for ask in self._asks.values() if ask.number not in self._late]
        return max(0.0, min(dues) - now) if dues else None

    def called_off(self) -> list[int]:
        """Numbers of asks whose answers are not wanted any more, each given once. They still `failed` or `answered`."""
        numbers, self._called_off = self._called_off, []
        return numbers

    # ------------------------------------------------------------------ what comes of it

    def answered(self, ask: Ask, now: float, waits: tuple[float, ...] = ()) -> AnswerUse:
        """An answer came, whole, and it matched its digest.

        Args:
            waits: how long each helper of a chain, but the last, waited for the one after it, in seconds.
        """
        unit = self._close(ask)
        self._revoked.discard(ask.number)
        self._note_times(ask, now, waits)
        if unit is None or unit.claimed:
            return AnswerUse.DROP
        if ask.how is How.TERM:
            unit.terms.update(ask.terms)
            if len(unit.terms) < unit.ways.needed or unit.spoilt:
                return AnswerUse.KEEP
            unit.claimed = True
            return AnswerUse.SUM
        unit.claimed = True
        return AnswerUse.WRITE

    def written(self, index: int) -> None:
        """A unit that was to be written is in its place; what else was asked for it is called off."""
        self._call_off(self._units.pop(index).open)
        self._left -= 1

    def spoilt(self, index: int) -> bool:
        """A sum did not match its digest. Whether there is another way left to have the unit."""
        unit = self._units[index]
        unit.claimed, unit.spoilt = False, True
        if not any(ask.how is not How.TERM for ask in unit.open.values()) and not self._has_ways(unit):
            self.hopeless = index
        return self.hopeless is None

    def failed(self, ask: Ask, now: float, *, broke: bool, silent: bool = False) -> None:
        """An ask has failed.

        Args:
            broke: the connection broke, or could not be made; else the one who was asked refused, or gave a wrong unit.
            silent: it did not answer in time.
        """
        unit = self._close(ask)
        source = self.speeds[ask.through[0]]
        if ask.number in self._revoked:
            self._revoked.remove(ask.number)
            if ask.how is not How.CHAIN and now >= ask.due:
                source.times.append((now - ask.began) / ask.shared)
            return
        if unit is None:
            return
        if ask.how is How.CHAIN:
            unit.chain_failed = True
            return
        if broke or silent:
            source.strikes += 2 if silent else 1
        elif ask.how is How.WHOLE:
            unit.failed.add(ask.through[0])
        else:
            unit.bad.update(ask.terms)

    # ------------------------------------------------------------------ inside: choosing

    def _choose(self) -> _Next | None:
        if self.over:
            return None
        wanting = [unit for unit in self._units.values() if not unit.claimed and self._wants(unit)]
        if len(self._asks) >= LANES:
            if wanting:
                self._make_room()
            return None
        for unit in wanting:
            found = self._another(unit)
            if found is not None:
                return found
            if not unit.open and not self._has_ways(unit):
                self.hopeless = unit.index
                return None
        if len(self._asks) - len(self._late) >= ON_TIME:
            return None
        ahead, found = self._peek(), self._begin()
        if ahead is not None and found is None and not self._has_ways(ahead):
            self.hopeless = ahead.index
        return found

    def _wants(self, unit: Wanted) -> bool:
        """Whether somebody else should be asked for a unit that is being had."""
        ending = self._ahead is None and self._peek() is None
        trusted = [ask for ask in unit.open.values() if self._is_trusted(ask, unit, ending)]
        if not unit.summed:
            return not trusted
        if any(ask.how is not How.TERM for ask in trusted):
            return False
        return unit.spoilt or unit.ways.needed > len(unit.terms) + len(trusted)

    def _is_trusted(self, ask: Ask, unit: Wanted, ending: bool) -> bool:
        """Whether an answer is waited for, and nobody else asked: not if it is late, or, in the end, of a slow source
        that can be done without."""
        if ask.number in self._late:
            return False
        return not ending or not self.speeds.slow(ask.through) or not self._spares_slow(unit)

    def _another(self, unit: Wanted) -> _Next | None:
        """Another way to have a unit that is being had."""
        if unit.summed:
            return self._choose_term(unit) or (None if unit.open else self._choose_whole(unit, slow_too=True))
        return (
            self._choose_whole(unit, slow_too=False)
            or self._choose_chain(unit, slow_too=False)
            or self._choose_sum(unit)
            or (None if unit.open else self._choose_whole(unit, slow_too=True))
        )

    def _begin(self) -> _Next | None:
        """A way to have a unit that nobody was asked for yet."""
        unit = self._peek()
        if unit is None:
            return None
        holders = [a for a in unit.ways.holders if not self.speeds[a].gone]
        explored_s = None
        if holders and all(self.speeds.is_slow(a) for a in holders):
            idle = [a for a in holders if not self.speeds[a].open]
            if idle:
                return _Next(unit, How.WHOLE, (), (idle[0],))  # it does what it can
        elif holders:
            explored_s = self._explores(unit, holders)
            if explored_s is None:
                return self._choose_whole(unit, slow_too=False)
        found = self._choose_chain(unit, slow_too=not holders)
        if found is None and (not holders or self._spares_slow(unit)):
            found = self._choose_sum(unit)
        if found is None:
            return self._choose_whole(unit, slow_too=True)
        return replace(found, explored_s=explored_s)

    def _choose_whole(self, unit: Wanted, *, slow_too: bool) -> _Next | None:
        asked = {ask.through[0] for ask in unit.open.values() if ask.how is How.WHOLE}
        able = [
            address
            for address in unit.ways.holders
            if not self.speeds[address].gone
            and address not in unit.failed | asked
            and self.speeds[address].open < ON_TIME
            and (slow_too or not self.speeds.is_slow(address))
        ]
        if not able:
            return None
        return _Next(unit, How.WHOLE, (), (min(able, key=lambda address: self.speeds[address].open),))

    def _choose_chain(self, unit: Wanted, *, slow_too: bool) -> _Next | None:
        """`slow_too`: through slow sources if there are not enough others, and nobody else is asked."""
        if not self._by_chain or unit.chain_failed or self._is_in_doubt() or self._passed_on(unit):
            return None
        able = {number: address for number, address in unit.ways.terms.items() if not self.speeds[address].gone}
        slow = self.speeds.slow(set(able.values()))
        fast = [number for number in able if able[number] not in slow]
        rest = [number for number in able if able[number] in slow]
        if len(fast) < unit.ways.needed and not (slow_too and len(able) >= unit.ways.needed):
            return None
        busy = Counter(address for ask in self._asks.values() for address in ask.through)
        shuffle = random.Random(unit.index)  # so that all are equally often next to each other, first, and left out
        fast, rest = shuffle.sample(fast, len(fast)), shuffle.sample(rest, len(rest))
        chosen = (sorted(fast, key=lambda number: busy[able[number]]) + rest)[: unit.ways.needed]
        order = tuple(shuffle.sample(chosen, len(chosen)))
        return _Next(unit, How.CHAIN, order, tuple(able[number] for number in order))

    def _choose_sum(self, unit: Wanted) -> _Next | None:
        if sum(other.summed and not other.claimed for other in self._units.values()) >= SUMS:
            return None
        return self._choose_term(unit)

    def _choose_term(self, unit: Wanted) -> _Next | None:
        asked = {ask.terms[0] for ask in unit.open.values() if ask.how is How.TERM}
        able = [n for n in unit.ways.terms if n not in unit.terms | unit.bad | asked]
        able = [n for n in able if not self.speeds[unit.ways.terms[n]].gone]
        if len(able) + len(asked) + len(unit.terms) < unit.ways.needed or unit.spoilt:
            return None
        doubted = {address for ask in unit.open.values() if ask.how is How.CHAIN for address in ask.through}

        def merit(number: int) -> tuple[bool, bool, int, int]:
            address = unit.ways.terms[number]
            return self.speeds.is_slow(address), address in doubted, self.speeds[address].open, number

        best = min(able, key=merit, default=None)
        return None if best is None else _Next(unit, How.TERM, (best,), (unit.ways.terms[best],))

    def _has_ways(self, unit: Wanted) -> bool:
        """Whether somebody may be asked for a unit, now or once others are done."""
        if any(a not in unit.failed and not self.speeds[a].gone for a in unit.ways.holders):
            return True
        able = [n for n, a in unit.ways.terms.items() if n in unit.terms or not self.speeds[a].gone]
        return not unit.spoilt and len(set(able) - unit.bad) >= unit.ways.needed

    def _spares_slow(self, unit: Wanted) -> bool:
        """Whether a unit can be had without any slow source."""
        fast = [a for a in unit.ways.holders if a not in unit.failed and self._is_fast(a)]
        return bool(fast) or sum(map(self._is_fast, unit.ways.terms.values())) >= unit.ways.needed

    def _is_fast(self, address: Address) -> bool:
        return not self.speeds[address].gone and not self.speeds.is_slow(address)

    def _explores(self, unit: Wanted, holders: list[Address]) -> float | None:
        """The holders' time for a unit if it is to be found out how fast the others are: the holders alone would take a
        while, and twice as long as when it was last found out."""
        usual = min(self.speeds[a].usual_s for a in holders)
        enough = all(len(self.speeds[a].times) >= EXPLORE_AFTER for a in holders)
        if not enough or usual * self._left < EXPLORE_S or usual < 2 * self._explored_s:
            return None
        return usual if len(unit.ways.terms) >= unit.ways.needed else None

    def _is_in_doubt(self) -> bool:
        """Whether a chain is late and no slow source explains it: until that is known, sums say more than chains."""
        return any(
            ask.how is How.CHAIN and number in self._late and not self.speeds.slow(ask.through)
            for number, ask in self._asks.items()
        )

    def _passed_on(self, unit: Wanted) -> bool:
        """Whether two chains were asked for it already: enough."""
        return sum(ask.how is How.CHAIN for ask in unit.open.values()) >= 2

    def _peek(self) -> Wanted | None:
        """The next unit that nobody was asked for."""
        if self._ahead is None:
            index = next(self._fresh, None)
            self._ahead = None if index is None else Wanted(index, self._ways(index))
        return self._ahead

    # ------------------------------------------------------------------ inside: keeping the books

    def _make_room(self) -> None:
        """Call off what has been late for longest, other than terms: these count for the sum whenever they come."""
        late = [a for n, a in self._asks.items() if n in self._late and a.how is not How.TERM]
        if late:
            self._call_off([min(late, key=lambda ask: ask.due).number])

    def _note_late(self, now: float) -> None:
        for number, ask in self._asks.items():
            if number not in self._late and now >= self._due(ask):
                self._late.add(number)
                self._patience[ask.how].late()
                if len(set(ask.through)) == 1:
                    self.speeds[ask.through[0]].late = True

    def _due(self, ask: Ask) -> float:
        """When an ask is late: sooner than was thought when it began, if others turned out to be faster."""
        return min(ask.due, ask.began + self._patience[ask.how].seconds)

    def _note_times(self, ask: Ask, now: float, waits: tuple[float, ...]) -> None:
        seconds = max(0.0, now - ask.began)
        self._patience[ask.how].answered(seconds)
        source = self.speeds[ask.through[0]]
        source.strikes = 0
        if ask.how is not How.CHAIN:
            source.times.append(seconds / ask.shared)
            source.late = now >= ask.due and source.late
        elif len(waits) == len(ask.through) - 1:
            spans = (seconds, *waits, 0.0)
            for place, address in enumerate(ask.through):
                self.speeds[address].times.append(max(0.0, spans[place] - spans[place + 1]))

    def _call_off(self, numbers: Iterable[int]) -> None:
        new = [number for number in numbers if number not in self._revoked]
        self._called_off += new
        self._revoked.update(new)

    def _close(self, ask: Ask) -> Wanted | None:
        """The unit that an ask was for; None if it is in its place already."""
        del self._asks[ask.number]
        self._late.discard(ask.number)
        self.speeds[ask.through[0]].open -= 1
        unit = self._units.get(ask.unit)
        if unit is not None:
            unit.open.pop(ask.number, None)
        return unit
