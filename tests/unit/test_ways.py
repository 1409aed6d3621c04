"""Which sources are asked for what, when some are slow, stalled, dead or damaged: on a clock that costs no time."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from holdfast.smp_daemon.recovery.ways import FIRST_PATIENCE_S, Speeds, WayKind, Ways
from holdfast.smp_daemon.shared.sources import Address
from tests.ways_kit import Played, Served, at, play, ways

UNITS = 200


NONE: Mapping[int, Served] = {}


def lost(data: int, parity: int, changed: Mapping[int, Served] = NONE, *, by_chain: bool = True) -> Played:
    """Fetch a lost node's shard; `changed` are the sources that are not healthy and fast."""
    sources = {at(n): changed.get(n, Served()) for n in range(data + parity - 1)}
    return play(UNITS, ways(data, parity, by_chain=by_chain), sources)


def held(data: int, parity: int, holder: Served | None = None, *, count: int = UNITS) -> Played:
    """Fetch a shard that source 99, `holder`, holds."""
    sources = {at(n): Served() for n in range(data + parity - 1)} | {at(99): holder or Served()}
    return play(count, ways(data, parity, held=True), sources)


class TestInGoodHealth:
    def test_a_held_unit_is_asked_of_its_holder_alone(self) -> None:
        played = held(3, 2, count=20)
        assert played.ways == {WayKind.WHOLE: 20}
        assert sorted(played.written) == list(range(20))
        assert not played.late

    def test_a_lost_unit_comes_by_chain_and_once(self) -> None:
        played = lost(3, 2)
        assert played.ways == {WayKind.CHAIN: UNITS}
        assert sorted(played.written) == list(range(UNITS))

    def test_or_from_as_many_terms_as_it_takes(self) -> None:
        played = lost(3, 2, by_chain=False)
        assert played.ways == {WayKind.SUM: 3 * UNITS}

    def test_all_helpers_are_asked_first_equally_often(self) -> None:
        played = lost(3, 2)
        assert max(played.requested.values()) < 1.6 * min(played.requested.values())

    def test_a_copy_comes_from_whoever_has_one(self) -> None:
        played = lost(1, 2)
        assert len(played.requested) == 2
        assert min(played.requested.values()) > UNITS // 4

    def test_a_long_load_finds_out_now_and_then_whether_others_are_faster(self) -> None:
        played = held(3, 2, count=1000)
        assert 0 < played.ways[WayKind.CHAIN] <= 2
        assert not played.ways[WayKind.SUM]


class TestASlowSource:
    def test_of_a_chain_is_left_out(self) -> None:
        well, slow = lost(3, 2), lost(3, 2, {1: Served(seconds=0.2)})
        assert slow.seconds < 2.5 * well.seconds

    def test_that_holds_the_shard_is_helped(self) -> None:
        well, slow = held(3, 2), held(3, 2, Served(seconds=0.3))
        assert slow.ways[WayKind.CHAIN] > slow.ways[WayKind.WHOLE] > 0
        assert slow.seconds < 0.25 * 0.3 * UNITS
        assert slow.seconds < 8 * well.seconds

    def test_becomes_slow_in_the_middle(self) -> None:
        assert held(3, 2, Served(changes=(0.5, 0.4))).seconds < 10
        assert lost(3, 2, {2: Served(changes=(0.5, 0.4))}).seconds < 10

    def test_is_no_worse_than_all_slow(self) -> None:
        every = {n: Served(seconds=0.5) for n in range(4)}
        played = lost(3, 2, every)
        assert sorted(played.written) == list(range(UNITS))
        assert played.seconds < 0.5 * UNITS * 3


class TestASourceThatStops:
    @pytest.mark.parametrize("by_chain", [True, False])
    def test_in_the_middle_costs_no_more_than_a_few_patiences(self, by_chain: bool) -> None:
        for stopped in range(4):
            well = lost(3, 2, by_chain=by_chain)
            played = lost(3, 2, {stopped: Served(stalls=(0.3, 500.0))}, by_chain=by_chain)
            assert played.seconds < 1.7 * well.seconds + 3 * FIRST_PATIENCE_S, stopped

    def test_while_it_holds_the_shard_is_done_without(self) -> None:
        played = held(3, 2, Served(stalls=(0.3, 500.0)))
        assert played.seconds < 12
        assert played.late > 0

    def test_where_no_other_is_left_is_waited_for(self) -> None:
        played = lost(3, 1, {0: Served(stalls=(0.3, 8.0))})
        assert sorted(played.written) == list(range(UNITS))
        assert 8.0 < played.seconds < 40.0

    def test_for_good_where_no_other_is_left_ends_it(self) -> None:
        assert lost(3, 1, {0: Served(stalls=(0.3, 5000.0))}).hopeless is not None


class TestASourceThatDies:
    def test_while_it_holds_the_shard_is_made_up_for(self) -> None:
        played = held(3, 2, Served(dies=0.4))
        assert sorted(played.written) == list(range(UNITS))
        assert played.ways[WayKind.CHAIN] > 0

    def test_beyond_parity_ends_it_soon(self) -> None:
        played = lost(3, 2, {0: Served(dies=0.4), 1: Served(dies=0.6)})
        assert played.hopeless is not None
        assert played.seconds < 2.0

    def test_and_no_other_holds_it(self) -> None:
        assert play(UNITS, lambda index: Ways((at(99),)), {at(99): Served(dies=0.4)}).hopeless is not None

    def test_and_nobody_ever_held_it(self) -> None:
        assert play(UNITS, lambda index: Ways(()), {}).hopeless == 0


class TestADamagedUnit:
    def test_of_its_holder_is_had_from_others(self) -> None:
        played = held(3, 2, Served(bad=frozenset({7, 8})))
        assert sorted(played.written) == list(range(UNITS))
        assert played.ways[WayKind.CHAIN] == 2

    def test_beyond_parity_ends_it(self) -> None:
        bad = {n: Served(bad=frozenset({(9, n)})) for n in (1, 2)}
        assert lost(3, 2, bad).hopeless == 9

    def test_that_was_summed_wrong_is_had_from_its_holder_or_not_at_all(self) -> None:
        sources = {at(n): Served() for n in range(4)} | {at(99): Served(bad=frozenset({3}))}
        assert play(10, ways(3, 2, held=True, by_chain=False), sources, spoil=[3]).hopeless == 3
        assert play(10, ways(3, 2, by_chain=False), sources, spoil=[3]).hopeless == 3


class TestSpeeds:
    def test_nobody_is_slow_alone(self) -> None:
        speeds = Speeds()
        speeds[at(1)].times.extend([9.0, 9.0])
        assert not speeds.is_slow(at(1))

    def test_slow_is_beside_others(self) -> None:
        speeds = Speeds()
        for n in range(3):
            speeds[at(n)].times.extend([0.1, 0.1])
        speeds[at(3)].times.append(9.0)
        assert not speeds.is_slow(at(3)), "once may be chance"
        speeds[at(3)].times.append(9.0)
        assert [n for n in range(4) if speeds.is_slow(at(n))] == [3]


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_whatever_happens_every_unit_is_written_once_or_cannot_be_had(first: int) -> None:
    for seed in range(first, first + 50):
        any_world(seed)


def any_world(seed: int) -> None:
    """Sources that are slow, stalled, dead and damaged in any mixture. The requests end, within their limits; and if no
    stripe has lost more than its parity, with every unit."""
    draw = random.Random(seed)
    data, parity = draw.choice([(1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (4, 2), (8, 3)])
    count, is_held, by_chain = draw.randint(1, 60), draw.random() < 0.5, draw.random() < 0.7
    sources: dict[Address, Served] = {}
    for address in [*(at(n) for n in range(data + parity - 1)), at(99)]:
        source = sources[address] = Served(seconds=draw.choice([0.001, 0.01, 0.01, 0.05]))
        what = draw.random()
        if what < 0.15:
            source.seconds *= draw.choice([5, 50])
        elif what < 0.3:
            source.stalls = (draw.random(), draw.choice([2.0, 10.0, 1e6]))
        elif what < 0.4:
            source.dies = draw.random()
        elif what < 0.5:
            source.bad = frozenset(
                [*draw.sample(range(count), draw.randint(0, count)), (draw.randrange(count), address[1])]
            )
    played = play(count, ways(data, parity, held=is_held, by_chain=by_chain), sources)
    assert len(set(played.written)) == len(played.written)
    unusable = {a for a, s in sources.items() if s.dies < 1e9 or s.stalls[1] > 1e5 or s.bad}
    helpers = sum(address not in unusable for address in sources if address != at(99))
    possible = helpers >= data or (is_held and at(99) not in unusable)
    if possible:
        assert sorted(played.written) == list(range(count)), seed
    else:
        assert played.hopeless is not None or sorted(played.written) == list(range(count)), seed
