"""Plays fetches on a clock that costs no time: workers that try the ways which a `Chooser` chooses, from sources that
serve one request after another."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field

from holdfast.smp_daemon.recovery.fetch import WORKERS
from holdfast.smp_daemon.recovery.ways import Chooser, Way, WayKind, Ways
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
    """What came of a fetch.

    Attributes:
        written: units in the order in which they came.
        ways: how many requests were made of each kind. `requested`: of which sources.
        hopeless: a unit that could not be got.
    """

    seconds: float = 0.0
    written: list[int] = field(default_factory=list)
    ways: Counter[WayKind] = field(default_factory=Counter)
    requested: Counter[Address] = field(default_factory=Counter)
    late: int = 0
    hopeless: int | None = None


@dataclass
class World:
    """Sources, and the time."""

    sources: dict[Address, Served]
    played: Played
    chooser: Chooser = field(default_factory=Chooser)
    now: float = 0.0

    def request(self, unit: int, ways: Ways, way: Way) -> Generator[float, None, bool]:
        """Make one request; yields the times to wait for. Returns whether it is answered, and notes the outcome as
        `Fetcher` does."""
        speeds, asked = self.chooser.speeds, way.through[0]
        speeds[asked].open += 1
        shared, strikes = speeds[asked].open, speeds[asked].strikes
        began, patience = self.now, ways.patience_s(speeds)
        self.played.ways[way.kind] += 1
        self.played.requested[asked] += 1
        ends: list[float] = []
        failure = ""
        for place in reversed(range(len(way.through))):
            source, thing = self.sources[way.through[place]], (unit, way.operands[place]) if way.operands else unit
            if self.now >= source.dies or thing in source.bad:
                failure = "broke" if self.now >= source.dies else "refused"
                yield self.now + 0.001
                break
            when = source.serve(self.now)
            if when > began + patience:
                failure = "late"
                yield began + patience
                break
            yield when
            ends.append(when)
        speeds[asked].open -= 1
        if not failure:
            waits = tuple(end - began for end in reversed(ends[:-1]))
            speeds.answered(way.through, self.now - began, shared, waits)
            return True
        self.played.late += failure == "late"
        if way.kind is WayKind.CHAIN:
            ways.by_chain = False
            self.chooser.doubt |= failure == "late" and not any(map(speeds.is_slow, way.through))
        elif failure == "late" and patience < CALL_DEADLINE_S:
            ways.late.add(asked)
            speeds[asked].late = True
        elif failure in ("late", "broke"):
            speeds.failed(asked, strikes, silent=failure == "late")
        elif way.kind is WayKind.WHOLE:
            ways.failed.add(asked)
        else:
            ways.bad.update(way.operands)
        return False

    def unit(self, index: int, ways: Ways, left: int, spoil: set[int]) -> Generator[float, None, None]:
        """Get one unit, as `Fetcher.get` does."""
        draw = random.Random(index)
        while True:
            way = self.chooser.choose(ways, draw, left)
            if way is None:
                if not ways.next_round():
                    self.played.hopeless = index if self.played.hopeless is None else self.played.hopeless
                    return
                continue
            if way.kind is not WayKind.SUM:
                if (yield from self.request(index, ways, way)):
                    break
                continue
            for number, address in zip(way.operands, way.through, strict=True):
                if (yield from self.request(index, ways, Way(WayKind.SUM, (number,), (address,)))):
                    ways.came.add(number)
            self.chooser.doubt = False
            if len(ways.came) >= ways.needed:
                if index not in spoil:
                    break
                spoil.discard(index)
                ways.spoilt = True
        assert index not in self.played.written, "a unit is written once"
        self.played.written.append(index)


def play(
    count: int, ways: Callable[[int], Ways], sources: dict[Address, Served], *, spoil: Iterable[int] = ()
) -> Played:
    """Fetch `count` units. `spoil`: units whose sum does not match its digest."""
    world = World(sources, Played())
    fresh, spoilt, numbers = iter(range(count)), set(spoil), itertools.count()

    def work() -> Iterator[float]:
        for index in fresh:
            if world.played.hopeless is not None:
                return
            yield from world.unit(index, ways(index), count - index, spoilt)

    events = [(0.0, next(numbers), iter(work())) for _ in range(min(WORKERS, count))]
    while events and world.played.hopeless is None:
        world.now, _, worker = heapq.heappop(events)
        due = next(worker, None)
        if due is not None:
            heapq.heappush(events, (due, next(numbers), worker))
    world.played.seconds = world.now
    return world.played


def ways(
    data: int, parity: int, *, held: bool = False, holder: int = 99, by_chain: bool = True
) -> Callable[[int], Ways]:
    """Ways to get units of one of k + m nodes. The others are sources 0, 1, ...; if `held`, `holder` has the unit."""
    operands = {number: at(number) for number in range(data + parity - 1)}
    return lambda index: Ways((at(holder),) if held else (), operands, data, by_chain)
