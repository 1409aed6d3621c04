"""A world in which `recovery.asking` asks: sources that serve one after another, on a clock that costs no time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from holdfast.smp_daemon.recovery.asking import LANES, AnswerUse, Ask, Asking, How, Ways
from holdfast.smp_daemon.shared.limits import CALL_DEADLINE_S
from holdfast.smp_daemon.shared.sources import Address


def at(number: int) -> Address:
    """The address of source `number`."""
    return "host", number


@dataclass
class Served:
    """One source.

    Attributes:
        seconds: for a unit.
        stalls: (from, until): it serves nobody, and goes on afterwards.
        dies: from then on connections to it break.
        bad: units, or (unit, term), that it refuses as damaged.
    """

    seconds: float = 0.01
    stalls: tuple[float, float] = (0.0, 0.0)
    dies: float = float("inf")
    bad: frozenset[object] = frozenset()
    changes: tuple[float, float] = (float("inf"), 0.01)
    free_at: float = 0.0

    def serve(self, now: float) -> float:
        """When a unit that is asked for at `now` has been served."""
        began = max(now, self.free_at)
        if self.stalls[0] <= began < self.stalls[1]:
            began = self.stalls[1]
        end = began + (self.seconds if began < self.changes[0] else self.changes[1])
        if self.stalls[0] < end and began < self.stalls[0]:
            end += self.stalls[1] - self.stalls[0]
        self.free_at = end
        return end


@dataclass
class Played:
    """What came of a load: seconds, units in the order in which they were written, asks by way, bytes in units."""

    seconds: float = 0.0
    written: list[int] = field(default_factory=list)
    asks: dict[How, int] = field(default_factory=lambda: dict.fromkeys(How, 0))
    asked: dict[Address, int] = field(default_factory=dict)
    called_off: int = 0
    hopeless: int | None = None
    again: int = 0


def play(
    asking: Asking,
    sources: dict[Address, Served],
    *,
    spoil: Iterable[int] = (),
    look: Callable[[Asking], None] = lambda asking: None,
) -> Played:
    """Let it ask until it is over.

    Args:
        spoil: units whose sum turns out wrong.
        look: called after each step.

    Raises:
        AssertionError: it broke one of its own limits, asked for nothing while something is missing, or wrote twice.
    """
    now, done, numbers = 0.0, Played(), itertools.count()
    events: list[tuple[float, int, _Hop]] = []
    live: dict[int, Ask] = {}
    spoilt = set(spoil)
    while not asking.over:
        while (ask := asking.next(now)) is not None:
            live[ask.number] = ask
            done.asks[ask.how] += 1
            done.asked[ask.through[0]] = done.asked.get(ask.through[0], 0) + 1
            heapq.heappush(events, (now, next(numbers), _Hop(ask, now, len(ask.through))))
            assert len(live) <= LANES
            assert asking.has_more(now) == asking.has_more(now)
        for number in asking.called_off():
            if number in live:
                done.called_off += 1
                asking.failed(live.pop(number), now, broke=True)
        look(asking)
        if asking.over:
            break
        while events and events[0][2].ask.number not in live:
            heapq.heappop(events)
        wait = asking.wait_s(now)
        assert events or wait is not None, "it waits for nothing, and is not over"
        if not events or (wait is not None and now + wait < events[0][0]):
            now += wait or 0.0
            continue
        now, _, hop = heapq.heappop(events)
        if (later := hop.take(now, sources)) is not None:
            heapq.heappush(events, (later, next(numbers), hop))
        else:
            del live[hop.ask.number]
            _tell(asking, hop, now, done, spoilt)
    done.seconds, done.hopeless, done.again = now, asking.hopeless, asking.again
    return done


@dataclass
class _Hop:
    """An ask on its way: of a chain, the last helper serves first.

    Attributes:
        left: helpers that have not served yet.
        result: what went wrong.
        ends: when each served, the last of the chain first.
    """

    ask: Ask
    began: float
    left: int
    result: str = ""
    ends: list[float] = field(default_factory=list)

    def take(self, now: float, sources: dict[Address, Served]) -> float | None:
        """One step of it at `now`: when the next is due; None: it is over."""
        if self.result or not self.left:
            return None
        self.left -= 1
        source = sources[self.ask.through[self.left]]
        thing = self.ask.unit if self.ask.how is How.WHOLE else (self.ask.unit, self.ask.terms[self.left])
        if now >= source.dies or thing in source.bad:
            self.result = "broke" if now >= source.dies else "refused"
            return now + 0.001
        when = source.serve(now)
        if when > self.began + CALL_DEADLINE_S:
            self.result = "silent"
            return self.began + CALL_DEADLINE_S
        self.ends.append(when)
        return when

    @property
    def waits(self) -> tuple[float, ...]:
        """Of the first helper for the second, and so on."""
        return tuple(end - self.began for end in reversed(self.ends[:-1]))


def _tell(asking: Asking, hop: _Hop, now: float, done: Played, spoilt: set[int]) -> None:
    ask = hop.ask
    if hop.result:
        asking.failed(ask, now, broke=hop.result == "broke", silent=hop.result == "silent")
        return
    verdict = asking.answered(ask, now, hop.waits)
    if verdict is AnswerUse.SUM and ask.unit in spoilt:
        spoilt.discard(ask.unit)
        asking.spoilt(ask.unit)
    elif verdict in (AnswerUse.WRITE, AnswerUse.SUM):
        assert ask.unit not in done.written, "a unit is written once"
        done.written.append(ask.unit)
        asking.written(ask.unit)


def ways(data: int, parity: int, *, held: bool = False, holder: int = 99) -> Callable[[int], Ways]:
    """Units of a node that is one of k + m; the others are sources 0, 1, ... and `holder` may hold the unit itself."""
    terms = {number: at(number) for number in range(data + parity - 1)}
    return lambda index: Ways((at(holder),) if held else (), terms, data)
