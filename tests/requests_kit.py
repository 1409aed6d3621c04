"""A simulated environment for `recovery.requests`: sources that serve sequentially, with simulated time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from holdfast.smp_daemon.recovery.requests import MAX_IN_FLIGHT, AnswerUse, How, RequestScheduler, UnitRequest, Ways
from holdfast.smp_daemon.shared.limits import CALL_DEADLINE_S
from holdfast.smp_daemon.shared.sources import Address


def at(number: int) -> Address:
    """The address of source `number`."""
    return "host", number


@dataclass
class Served:
    """One source.

    Attributes:
        seconds: time to serve a unit.
        stalls: (from, until): the time in which it serves nothing.
        dies: the time from which connections to it break.
        bad: units, or (unit, operand), that it refuses as damaged.
        changes: (from, seconds): the time from which a unit takes another number of seconds.
        free_at: when it has served all earlier requests.
    """

    seconds: float = 0.01
    stalls: tuple[float, float] = (0.0, 0.0)
    dies: float = float("inf")
    bad: frozenset[object] = frozenset()
    changes: tuple[float, float] = (float("inf"), 0.01)
    free_at: float = 0.0

    def serve(self, now: float) -> float:
        """The time at which a unit requested at `now` has been served."""
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
    """The result of a load: seconds, units in the order in which they were written, requests by way and by source."""

    seconds: float = 0.0
    written: list[int] = field(default_factory=list)
    requests: dict[How, int] = field(default_factory=lambda: dict.fromkeys(How, 0))
    requested: dict[Address, int] = field(default_factory=dict)
    cancelled: int = 0
    hopeless: int | None = None
    hedged: int = 0


def play(
    scheduler: RequestScheduler,
    sources: dict[Address, Served],
    *,
    spoil: Iterable[int] = (),
    look: Callable[[RequestScheduler], None] = lambda scheduler: None,
) -> Played:
    """Simulate a load until it is over.

    Args:
        spoil: units whose first sum does not match its digest.
        look: called after each step.

    Raises:
        AssertionError: the scheduler exceeded a limit, stalled although units are missing, or wrote a unit twice.
    """
    now, done, numbers = 0.0, Played(), itertools.count()
    events: list[tuple[float, int, _Hop]] = []
    live: dict[int, UnitRequest] = {}
    spoilt = set(spoil)
    while not scheduler.over:
        while (request := scheduler.next(now)) is not None:
            live[request.number] = request
            done.requests[request.how] += 1
            done.requested[request.through[0]] = done.requested.get(request.through[0], 0) + 1
            heapq.heappush(events, (now, next(numbers), _Hop(request, now, len(request.through))))
            assert len(live) <= MAX_IN_FLIGHT
            assert scheduler.has_more(now) == scheduler.has_more(now)
        for number in scheduler.cancelled():
            if number in live:
                done.cancelled += 1
                scheduler.failed(live.pop(number), now, broke=True)
        look(scheduler)
        if scheduler.over:
            break
        while events and events[0][2].request.number not in live:
            heapq.heappop(events)
        wait = scheduler.wait_s(now)
        assert events or wait is not None, "it waits for nothing, and is not over"
        if not events or (wait is not None and now + wait < events[0][0]):
            now += wait or 0.0
            continue
        now, _, hop = heapq.heappop(events)
        if (later := hop.take(now, sources)) is not None:
            heapq.heappush(events, (later, next(numbers), hop))
        else:
            del live[hop.request.number]
            _tell(scheduler, hop, now, done, spoilt)
    done.seconds, done.hopeless, done.hedged = now, scheduler.hopeless, scheduler.hedged
    return done


@dataclass
class _Hop:
    """A request in flight. In a chain, the last helper serves first.

    Attributes:
        left: number of helpers that have not served yet.
        result: the failure; empty if there is none.
        ends: times at which helpers had served, starting with the last of the chain.
    """

    request: UnitRequest
    began: float
    left: int
    result: str = ""
    ends: list[float] = field(default_factory=list)

    def take(self, now: float, sources: dict[Address, Served]) -> float | None:
        """Do one step at `now`; return when the next is due, or None if the request is over."""
        if self.result or not self.left:
            return None
        self.left -= 1
        source = sources[self.request.through[self.left]]
        thing = (
            self.request.unit
            if self.request.how is How.WHOLE
            else (self.request.unit, self.request.operands[self.left])
        )
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
        """How long the first helper waited for the second, the second for the third, and so on."""
        return tuple(end - self.began for end in reversed(self.ends[:-1]))


def _tell(scheduler: RequestScheduler, hop: _Hop, now: float, done: Played, spoilt: set[int]) -> None:
    request = hop.request
    if hop.result:
        scheduler.failed(request, now, broke=hop.result == "broke", silent=hop.result == "silent")
        return
    verdict = scheduler.answered(request, now, hop.waits)
    if verdict is AnswerUse.SUM and request.unit in spoilt:
        spoilt.discard(request.unit)
        scheduler.spoilt(request.unit)
    elif verdict in (AnswerUse.WRITE, AnswerUse.SUM):
        assert request.unit not in done.written, "a unit is written once"
        done.written.append(request.unit)
        scheduler.written(request.unit)


def ways(data: int, parity: int, *, held: bool = False, holder: int = 99) -> Callable[[int], Ways]:
    """Ways to get units of one of k + m nodes. The others are sources 0, 1, ...; if `held`, `holder` has the unit."""
    operands = {number: at(number) for number in range(data + parity - 1)}
    return lambda index: Ways((at(holder),) if held else (), operands, data)
