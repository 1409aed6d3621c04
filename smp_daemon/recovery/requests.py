"""Decides which unit of a shard to request from which source next. Pure: the caller provides the time, sends the
requests, and reports the results.

There are three ways to get a unit: *whole* from its holder; by *chain*, as a sum that k holders of other units of its
stripe pass on; or *summed* here from *operands*, each requested from its holder. As a rule the first possible way is
taken. A request that takes too long is a straggler and is hedged: the unit is requested from others too, the first
answer counts, and the other requests are cancelled. A straggling chain does not show which helper delays it, but
operands do, so its unit is summed. A slow source is left out where others suffice, and towards the end its units are
requested from others too.

No source is expected to reach a certain rate. A source is slow if it takes `SLOWER` times as long for a unit as the
others do, or if one of its requests straggles. If all are equally slow, none counts as slow.

At most `MAX_IN_FLIGHT` requests are open at a time, and at most `MAX_SUMS` units are being summed, whatever the length
of the shard.
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

MAX_IN_FLIGHT = 8
"""Most requests open at a time: `MAX_PUNCTUAL` in good health, which keeps all links busy, and as many for hedging."""

MAX_PUNCTUAL = 4
"""No further unit is begun while this many requests are open that do not straggle. Also the most requests for whole
units that are open at one holder."""

MAX_SUMS = 2
"""Most units summed here at a time: each takes k buffers."""

EXPLORE_S = 0.5
"""If a holder needs less than this for all remaining units, in seconds, measuring other sources is not worth while."""

EXPLORE_AFTER = 4
"""Number of answers from a holder before its speed is compared with that of other sources."""

SLOWER = 3.0
"""A source is slow from this multiple of the others' time for a unit. Anything less is noise, or a busy machine."""

SLOW_S = 0.005
"""A source that takes less than this for a unit, in seconds, is never slow."""

REMEMBERED = 8
"""Number of a source's latest times that count: it may become slow, or fast again, at any time."""

STRIKES = 2
"""Number of failures in a row after which a source is given up. After the first, a new connection is tried."""

FIRST_TIMEOUT_S = 2.0
LEAST_TIMEOUT_S = 1.0
TIMEOUT_FACTOR = 4.0
"""A request straggles after this multiple of the usual time, but not before `LEAST_TIMEOUT_S`. As long as no request
has been answered, it straggles after `FIRST_TIMEOUT_S`."""


class How(Enum):
    """Ways to get a unit."""

    WHOLE = "whole"
    CHAIN = "chain"
    OPERAND = "operand"


class AnswerUse(Enum):
    """What to do with an answer."""

    WRITE = "write"
    """The first answer for its unit: write it, then call `written`."""
    SUM = "sum"
    """The last missing operand: compute the sum into its place, then call `written` or `spoilt`."""
    KEEP = "keep"
    """An operand of a sum that still misses others."""
    DROP = "drop"
    """The unit is written already, or being written."""


@dataclass(frozen=True, slots=True)
class Ways:
    """The ways to get a unit.

    Attributes:
        holders: the SMPs that hold the unit itself.
        operands: the holders of the other units of its stripe, by number.
        needed: how many operands it takes to compute the unit.
    """

    holders: tuple[Address, ...]
    operands: Mapping[int, Address] = field(default_factory=dict)
    needed: int = 1


@dataclass(frozen=True, slots=True)
class UnitRequest:
    """A request that the caller is to send.

    Attributes:
        number: the number of the request.
        unit: index of the unit in the shard.
        operands: for a chain, its operands in the order of its helpers; for an operand, its number alone.
        through: the SMPs that the answer depends on. The request is sent to the first.
        shared: how many requests the first of them has open, including this one.
        began, due: when it was made, and when it becomes a straggler at the latest, in seconds of the caller's clock.
    """

    number: int
    unit: int
    how: How
    operands: tuple[int, ...]
    through: tuple[Address, ...]
    shared: int
    began: float
    due: float


@dataclass(slots=True)
class WantedUnit:
    """A unit that has been requested, or is the next to be.

    Attributes:
        open: unanswered requests for the unit, by number.
        failed: holders that could not give it.
        chain_failed: a chain for it failed; no other is begun.
        summed: it is computed here. `operands`: those that have come. `bad`: those that cannot be got.
        spoilt: its sum did not match its digest.
        claimed: an answer or a sum is being written.
    """

    index: int
    ways: Ways
    open: dict[int, UnitRequest] = field(default_factory=dict)
    failed: set[Address] = field(default_factory=set)
    chain_failed: bool = False
    summed: bool = False
    spoilt: bool = False
    claimed: bool = False
    operands: set[int] = field(default_factory=set)
    bad: set[int] = field(default_factory=set)


@dataclass(slots=True)
class SourceSpeed:
    """The speed and the failures of one SMP that units are requested from.

    Attributes:
        times: its latest times for a unit, in seconds, the newest last.
        open: number of requests that it has not answered yet.
        straggles: one of its requests became a straggler, and it has answered none in time since.
        strikes: number of failures since its last answer.
    """

    times: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    open: int = 0
    straggles: bool = False
    strikes: int = 0

    @property
    def gone(self) -> bool:
        """Whether it has failed too often to be used again."""
        return self.strikes >= STRIKES

    @property
    def usual_s(self) -> float:
        """The median of its times in seconds; 0 if there are none."""
        return statistics.median(self.times) if self.times else 0.0


class Speeds:
    """The speeds of all sources of one load. Not thread-safe."""

    def __init__(self) -> None:
        self._sources: dict[Address, SourceSpeed] = {}

    def __getitem__(self, address: Address) -> SourceSpeed:
        return self._sources.setdefault(address, SourceSpeed())

    def is_slow(self, address: Address) -> bool:
        """Whether `address` straggles, or takes much longer than the others; one answer is not enough to tell."""
        source = self[address]
        if source.straggles:
            return True
        others = sorted(s.usual_s for a, s in self._sources.items() if a != address and s.times and not s.straggles)
        if len(source.times) < 2 or not others:
            return False
        return source.usual_s > max(SLOW_S, SLOWER * others[(len(others) - 1) // 2])

    def slow(self, addresses: Collection[Address]) -> set[Address]:
        """The slow ones among `addresses`."""
        return {address for address in addresses if self.is_slow(address)}


class StragglerTimeout:
    """How long a request of one kind may take before it straggles: a multiple of the usual time, doubled by each
    straggler."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=2 * REMEMBERED)
        self._timeout_s = FIRST_TIMEOUT_S

    @property
    def seconds(self) -> float:
        """The timeout of a request that begins now."""
        return self._timeout_s

    def answered(self, seconds: float) -> None:
        """Note an answer that took `seconds`."""
        self._times.append(seconds)
        usual = statistics.median(self._times)
        self._timeout_s = min(CALL_DEADLINE_S, max(LEAST_TIMEOUT_S, TIMEOUT_FACTOR * usual))

    def straggled(self) -> None:
        """Note a straggler and double the timeout: perhaps all sources are slow."""
        self._timeout_s = min(CALL_DEADLINE_S, 2 * self._timeout_s)


@dataclass(frozen=True, slots=True)
class _Proposal:
    """A request without its number and times.

    Attributes:
        explored_s: the holders' time for a unit, if the request measures other sources instead; see `_explores`.
    """

    unit: WantedUnit
    how: How
    operands: tuple[int, ...]
    through: tuple[Address, ...]
    explored_s: float | None = None


class RequestScheduler:
    """Decides the requests for the units 0..count-1 of one shard. Not thread-safe.

    Attributes:
        hopeless: a unit that cannot be got, after which nothing more is requested; None: no such unit is known.
        hedged: number of requests for units that had been requested from another source before.
    """

    def __init__(self, count: int, ways: Callable[[int], Ways], *, by_chain: bool) -> None:
        """
        Args:
            ways: returns the ways to get a unit; called once for each.
            by_chain: whether chains may be requested.
        """
        self.hopeless: int | None = None
        self.hedged = 0
        self._ways = ways
        self._by_chain = by_chain
        self._fresh = iter(range(count))
        self._left = count
        self._ahead: WantedUnit | None = None
        self._units: dict[int, WantedUnit] = {}
        self._requests: dict[int, UnitRequest] = {}
        self._cancelled: list[int] = []
        self._revoked: set[int] = set()
        self._counted = 0
        self._stragglers: set[int] = set()
        self._timeouts = {how: StragglerTimeout() for how in How}
        self._explored_s = 0.0
        self.speeds = Speeds()

    @property
    def over(self) -> bool:
        """Whether every unit is written, or one cannot be got."""
        return not self._left or self.hopeless is not None

    # ------------------------------------------------------------------ what to request

    def next(self, now: float) -> UnitRequest | None:
        """The request to send at `now`; None: nothing to send until an answer comes or `wait_s` has passed."""
        self._note_stragglers(now)
        found = self._choose()
        if found is None:
            return None
        unit, first = found.unit, self.speeds[found.through[0]]
        if unit.index not in self._units:
            self._units[unit.index], self._ahead = unit, None
        elif found.how is not How.OPERAND or not unit.summed or self._stragglers.intersection(unit.open):
            self.hedged += 1
        unit.summed = unit.summed or found.how is How.OPERAND
        if found.explored_s is not None:
            self._explored_s = found.explored_s
        first.open += 1
        due = now + self._timeouts[found.how].seconds
        request = UnitRequest(self._counted, unit.index, found.how, found.operands, found.through, first.open, now, due)
        self._counted += 1
        self._requests[request.number] = unit.open[request.number] = request
        return request

    def has_more(self, now: float) -> bool:
        """Whether `next` has another request."""
        self._note_stragglers(now)
        return self._choose() is not None

    def wait_s(self, now: float) -> float | None:
        """Seconds from `now` until a request becomes a straggler; None: none will."""
        dues = [self._due(request) for request in self._requests.values() if request.number not in self._stragglers]
        return max(0.0, min(dues) - now) if dues else None

    def cancelled(self) -> list[int]:
        """Numbers of requests to cancel, each returned once. The caller still calls `failed` or `answered` for them."""
        numbers, self._cancelled = self._cancelled, []
        return numbers

    # ------------------------------------------------------------------ results

    def answered(self, request: UnitRequest, now: float, waits: tuple[float, ...] = ()) -> AnswerUse:
        """Note a complete answer that matched its digest, and return what to do with it.

        Args:
            waits: how long each helper of a chain, except the last, waited for the next one, in seconds.
        """
        unit = self._close(request)
        self._revoked.discard(request.number)
        self._note_times(request, now, waits)
        if unit is None or unit.claimed:
            return AnswerUse.DROP
        if request.how is How.OPERAND:
            unit.operands.update(request.operands)
            if len(unit.operands) < unit.ways.needed or unit.spoilt:
                return AnswerUse.KEEP
            unit.claimed = True
            return AnswerUse.SUM
        unit.claimed = True
        return AnswerUse.WRITE

    def written(self, index: int) -> None:
        """Note that a unit is in its place. All other requests for it are cancelled."""
        self._cancel(self._units.pop(index).open)
        self._left -= 1

    def spoilt(self, index: int) -> bool:
        """Note a sum that did not match its digest. Returns whether there is another way left to get the unit."""
        unit = self._units[index]
        unit.claimed, unit.spoilt = False, True
        if not any(request.how is not How.OPERAND for request in unit.open.values()) and not self._has_ways(unit):
            self.hopeless = index
        return self.hopeless is None

    def failed(self, request: UnitRequest, now: float, *, broke: bool, silent: bool = False) -> None:
        """Note a request that failed.

        Args:
            broke: the connection broke, or could not be made.
            silent: the source did not answer in time. If neither is set, it refused, or sent a wrong unit.
        """
        unit = self._close(request)
        source = self.speeds[request.through[0]]
        if request.number in self._revoked:
            self._revoked.remove(request.number)
            if request.how is not How.CHAIN and now >= request.due:
                source.times.append((now - request.began) / request.shared)
            return
        if unit is None:
            return
        if request.how is How.CHAIN:
            unit.chain_failed = True
            return
        if broke or silent:
            source.strikes += 2 if silent else 1
        elif request.how is How.WHOLE:
            unit.failed.add(request.through[0])
        else:
            unit.bad.update(request.operands)

    # ------------------------------------------------------------------ inside: choosing

    def _choose(self) -> _Proposal | None:
        if self.over:
            return None
        wanting = [unit for unit in self._units.values() if not unit.claimed and self._wants(unit)]
        if len(self._requests) >= MAX_IN_FLIGHT:
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
        if len(self._requests) - len(self._stragglers) >= MAX_PUNCTUAL:
            return None
        ahead, found = self._peek(), self._begin()
        if ahead is not None and found is None and not self._has_ways(ahead):
            self.hopeless = ahead.index
        return found

    def _wants(self, unit: WantedUnit) -> bool:
        """Whether a unit should be requested from another source too."""
        ending = self._ahead is None and self._peek() is None
        trusted = [request for request in unit.open.values() if self._is_trusted(request, unit, ending)]
        if not unit.summed:
            return not trusted
        if any(request.how is not How.OPERAND for request in trusted):
            return False
        return unit.spoilt or unit.ways.needed > len(unit.operands) + len(trusted)

    def _is_trusted(self, request: UnitRequest, unit: WantedUnit, ending: bool) -> bool:
        """Whether a request needs no hedge: it does not straggle and, towards the end, does not depend on a slow source
        that can be spared."""
        if request.number in self._stragglers:
            return False
        return not ending or not self.speeds.slow(request.through) or not self._spares_slow(unit)

    def _another(self, unit: WantedUnit) -> _Proposal | None:
        """Another way to get a unit that has been requested."""
        if unit.summed:
            return self._choose_operand(unit) or (None if unit.open else self._choose_whole(unit, slow_too=True))
        return (
            self._choose_whole(unit, slow_too=False)
            or self._choose_chain(unit, slow_too=False)
            or self._choose_sum(unit)
            or (None if unit.open else self._choose_whole(unit, slow_too=True))
        )

    def _begin(self) -> _Proposal | None:
        """A way to get the next unit that was not requested yet."""
        unit = self._peek()
        if unit is None:
            return None
        holders = [a for a in unit.ways.holders if not self.speeds[a].gone]
        explored_s = None
        if holders and all(self.speeds.is_slow(a) for a in holders):
            idle = [a for a in holders if not self.speeds[a].open]
            if idle:
                return _Proposal(unit, How.WHOLE, (), (idle[0],))  # a slow holder still gets one request at a time
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

    def _choose_whole(self, unit: WantedUnit, *, slow_too: bool) -> _Proposal | None:
        requested = {request.through[0] for request in unit.open.values() if request.how is How.WHOLE}
        able = [
            address
            for address in unit.ways.holders
            if not self.speeds[address].gone
            and address not in unit.failed | requested
            and self.speeds[address].open < MAX_PUNCTUAL
            and (slow_too or not self.speeds.is_slow(address))
        ]
        if not able:
            return None
        return _Proposal(unit, How.WHOLE, (), (min(able, key=lambda address: self.speeds[address].open),))

    def _choose_chain(self, unit: WantedUnit, *, slow_too: bool) -> _Proposal | None:
        """`slow_too`: use slow sources if there are not enough others."""
        if not self._by_chain or unit.chain_failed or self._is_in_doubt() or self._passed_on(unit):
            return None
        able = {number: address for number, address in unit.ways.operands.items() if not self.speeds[address].gone}
        slow = self.speeds.slow(set(able.values()))
        fast = [number for number in able if able[number] not in slow]
        rest = [number for number in able if able[number] in slow]
        if len(fast) < unit.ways.needed and not (slow_too and len(able) >= unit.ways.needed):
            return None
        busy = Counter(address for request in self._requests.values() for address in request.through)
        shuffle = random.Random(unit.index)  # varies evenly which sources are first, adjacent, and left out
        fast, rest = shuffle.sample(fast, len(fast)), shuffle.sample(rest, len(rest))
        chosen = (sorted(fast, key=lambda number: busy[able[number]]) + rest)[: unit.ways.needed]
        order = tuple(shuffle.sample(chosen, len(chosen)))
        return _Proposal(unit, How.CHAIN, order, tuple(able[number] for number in order))

    def _choose_sum(self, unit: WantedUnit) -> _Proposal | None:
        if sum(other.summed and not other.claimed for other in self._units.values()) >= MAX_SUMS:
            return None
        return self._choose_operand(unit)

    def _choose_operand(self, unit: WantedUnit) -> _Proposal | None:
        requested = {request.operands[0] for request in unit.open.values() if request.how is How.OPERAND}
        able = [n for n in unit.ways.operands if n not in unit.operands | unit.bad | requested]
        able = [n for n in able if not self.speeds[unit.ways.operands[n]].gone]
        if len(able) + len(requested) + len(unit.operands) < unit.ways.needed or unit.spoilt:
            return None
        doubted = {address for request in unit.open.values() if request.how is How.CHAIN for address in request.through}

        def merit(number: int) -> tuple[bool, bool, int, int]:
            address = unit.ways.operands[number]
            return self.speeds.is_slow(address), address in doubted, self.speeds[address].open, number

        best = min(able, key=merit, default=None)
        return None if best is None else _Proposal(unit, How.OPERAND, (best,), (unit.ways.operands[best],))

    def _has_ways(self, unit: WantedUnit) -> bool:
        """Whether there is a way left to get a unit, now or once other requests are done."""
        if any(a not in unit.failed and not self.speeds[a].gone for a in unit.ways.holders):
            return True
        able = [n for n, a in unit.ways.operands.items() if n in unit.operands or not self.speeds[a].gone]
        return not unit.spoilt and len(set(able) - unit.bad) >= unit.ways.needed

    def _spares_slow(self, unit: WantedUnit) -> bool:
        """Whether a unit can be got without any slow source."""
        fast = [a for a in unit.ways.holders if a not in unit.failed and self._is_fast(a)]
        return bool(fast) or sum(map(self._is_fast, unit.ways.operands.values())) >= unit.ways.needed

    def _is_fast(self, address: Address) -> bool:
        return not self.speeds[address].gone and not self.speeds.is_slow(address)

    def _explores(self, unit: WantedUnit, holders: list[Address]) -> float | None:
        """The holders' time for a unit, if this unit should measure the other sources instead; else None. Measuring is
        worth while if the holders alone would take long, and have become twice as slow since the last measurement."""
        usual = min(self.speeds[a].usual_s for a in holders)
        enough = all(len(self.speeds[a].times) >= EXPLORE_AFTER for a in holders)
        if not enough or usual * self._left < EXPLORE_S or usual < 2 * self._explored_s:
            return None
        return usual if len(unit.ways.operands) >= unit.ways.needed else None

    def _is_in_doubt(self) -> bool:
        """Whether a chain straggles and no slow source explains it. Then no chain is begun, because sums show which
        source is slow."""
        return any(
            request.how is How.CHAIN and number in self._stragglers and not self.speeds.slow(request.through)
            for number, request in self._requests.items()
        )

    def _passed_on(self, unit: WantedUnit) -> bool:
        """Whether two chains are open for the unit, which is enough."""
        return sum(request.how is How.CHAIN for request in unit.open.values()) >= 2

    def _peek(self) -> WantedUnit | None:
        """The next unit that was not requested yet; None if there is none."""
        if self._ahead is None:
            index = next(self._fresh, None)
            self._ahead = None if index is None else WantedUnit(index, self._ways(index))
        return self._ahead

    # ------------------------------------------------------------------ inside: bookkeeping

    def _make_room(self) -> None:
        """Cancel the oldest straggler that is not an operand: operands are needed for their sum whenever they come."""
        stragglers = [a for n, a in self._requests.items() if n in self._stragglers and a.how is not How.OPERAND]
        if stragglers:
            self._cancel([min(stragglers, key=lambda request: request.due).number])

    def _note_stragglers(self, now: float) -> None:
        for number, request in self._requests.items():
            if number not in self._stragglers and now >= self._due(request):
                self._stragglers.add(number)
                self._timeouts[request.how].straggled()
                if len(set(request.through)) == 1:
                    self.speeds[request.through[0]].straggles = True

    def _due(self, request: UnitRequest) -> float:
        """When a request becomes a straggler: before its `due` if others were answered faster since it began."""
        return min(request.due, request.began + self._timeouts[request.how].seconds)

    def _note_times(self, request: UnitRequest, now: float, waits: tuple[float, ...]) -> None:
        seconds = max(0.0, now - request.began)
        self._timeouts[request.how].answered(seconds)
        source = self.speeds[request.through[0]]
        source.strikes = 0
        if request.how is not How.CHAIN:
            source.times.append(seconds / request.shared)
            source.straggles = now >= request.due and source.straggles
        elif len(waits) == len(request.through) - 1:
            spans = (seconds, *waits, 0.0)
            for place, address in enumerate(request.through):
                self.speeds[address].times.append(max(0.0, spans[place] - spans[place + 1]))

    def _cancel(self, numbers: Iterable[int]) -> None:
        new = [number for number in numbers if number not in self._revoked]
        self._cancelled += new
        self._revoked.update(new)

    def _close(self, request: UnitRequest) -> WantedUnit | None:
        """Forget a request and return the unit that it was for; None if that is in its place already."""
        del self._requests[request.number]
        self._stragglers.discard(request.number)
        self.speeds[request.through[0]].open -= 1
        unit = self._units.get(request.unit)
        if unit is not None:
            unit.open.pop(request.number, None)
        return unit
