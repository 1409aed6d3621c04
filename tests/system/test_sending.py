"""Units that travel side by side: several connections to a peer, several addresses of a node, and what breaks them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from holdfast.smp_daemon.coding import sending
from holdfast.smp_daemon.net import links
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.limits import MAX_LINKS
from holdfast.smp_daemon.shared.logs import Episodes
from holdfast.smp_daemon.shared.settings import LINKS
from holdfast.smp_daemon.shared.sources import Address
from holdfast.smp_daemon.shared.transport import SocketStream, connect
from tests.relay import Relay, relaying
from tests.smp_kit import PROTECTED, Ground, Run, SmpProcess, run_on
from tests.system.test_addresses import on_several
from tests.system.test_protect import UNIT_BYTES, SmpHere, counted, over

SHARD_BYTES = 200_000


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what earlier tests logged, so that it may be logged again."""
    monkeypatch.setattr(sending, "_episodes", Episodes(sending.log))


@contextmanager
def relays(peer: SmpProcess, count: int, **spoiling: list[int]) -> Iterator[list[Relay]]:
    """`count` relays to a peer."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(relaying(peer.bulk, **{name: list(values) for name, values in spoiling.items()}))
            for _ in range(count)
        ]


@contextmanager
def job(ground: Ground, count: int) -> Iterator[tuple[SmpHere, SmpProcess, Run]]:
    """``node0`` in this process, with `count` links to ``node1``, a process; each has a shard of many units."""
    here = SmpHere(ground, {"HOLDFAST_LINKS": str(count)})
    peer = ground.smp("node1")
    try:
        yield here, peer, run_on([here, peer], [[SHARD_BYTES]] * 2)
    finally:
        here.smp.close()


def protect_until(run: Run, done: Callable[[], object], step: int = 1) -> int:
    """Protect snapshots, from `step` on, until something has happened on every way, since the others may be so quick
    that one finds no unit left; returns the last step."""
    run.protect(step)
    while not done():
        assert step < 100
        step += 1
        run.protect(step)
    return step


@pytest.mark.parametrize(("links", "ways"), [(1, 1), (3, 1), (2, 3), (4, 2)])
def test_every_unit_arrives_once_over_all_ways(ground: Ground, links: int, ways: int) -> None:
    with job(ground, links) as (_, peer, run), relays(peer, ways) as between:
        over(run, node1=tuple(relay.address for relay in between))
        snapshot = run.protect(1)
        assert run.outcomes(snapshot) == {PROTECTED}
        sent = counted(run, "dp0", "bytes_sent")
        assert sent == run.layout.shard_bytes("dp0")
        protect_until(run, lambda: all(relay.connections for relay in between[:links]), 2)
        assert not any(relay.connections for relay in between[links:])
        assert [trainer.client.scrub()["damaged"] for trainer in run] == [0, 0]


def test_a_way_that_ends_in_the_middle_costs_nothing_and_is_told_once(
    ground: Ground, caplog: pytest.LogCaptureFixture
) -> None:
    with job(ground, 3) as (_, peer, run), relays(peer, 2) as whole, relaying(peer.bulk, cut_after=[5000]) as cut:
        over(run, node1=(whole[0].address, cut.address, whole[1].address))
        cut.once = True
        with caplog.at_level(logging.INFO):
            last = protect_until(run, lambda: cut.cuts)
            run.protect(last + 1)
        assert cut.cuts == 1
        told = [record.getMessage() for record in caplog.records if "is broken" in record.getMessage()]
        assert len(told) == 1 and "node1" in told[0] and "take over" in told[0]
        assert cut.connections == 1, "it is left alone for a while"
        assert [trainer.client.scrub()["damaged"] for trainer in run] == [0, 0]


def test_a_way_that_works_again_is_told_and_could_be_told_of_anew(
    ground: Ground, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "AVOIDED_S", 0.0)
    with job(ground, 2) as (_, peer, run), relays(peer, 1) as (whole,), relaying(peer.bulk, cut_after=[5000]) as cut:
        over(run, node1=(whole.address, cut.address))
        with caplog.at_level(logging.INFO):
            last = protect_until(run, lambda: cut.cuts)
            protect_until(run, lambda: "works again" in caplog.text, last + 1)
        told = [record.getMessage() for record in caplog.records if "a connection to node1" in record.getMessage()]
        assert ["is broken" in text for text in told] == [True, False]
        assert "works again" in told[1]


def test_all_ways_that_end_are_made_again_by_the_last(ground: Ground) -> None:
    with job(ground, 3) as (_, peer, run), relays(peer, 3, cut_after=[UNIT_BYTES, 3 * UNIT_BYTES]) as between:
        over(run, node1=tuple(relay.address for relay in between))
        snapshot = run.protect(1)
        assert run.outcomes(snapshot) == {PROTECTED}
        assert sum(relay.cuts for relay in between) >= 3
        assert counted(run, "dp0", "reconnects") >= 1


def test_a_unit_that_is_damaged_on_one_of_the_ways_is_sent_again(ground: Ground) -> None:
    with job(ground, 2) as (_, peer, run), relays(peer, 2, flips=[7]) as between:
        over(run, node1=tuple(relay.address for relay in between))
        protect_until(run, lambda: all(relay.spoilt for relay in between))
        assert [relay.spoilt for relay in between] == [1, 1]
        assert counted(run, "dp1", "units_damaged") == 2
        assert [trainer.client.scrub()["damaged"] for trainer in run] == [0, 0]


def test_who_is_told_of_a_new_epoch_stops_on_every_way(ground: Ground) -> None:
    with job(ground, 3) as (here, _, run):
        over(run)
        run.take(1)
        over(run)
        assert run.outcomes(run.protect(1)) == {PROTECTED}
        assert here.end()


def test_links_are_a_whole_number_or_left_to_the_machine() -> None:
    assert LINKS.value({"HOLDFAST_LINKS": "3"}) == 3
    assert 1 <= LINKS.value({}) <= 4
    with pytest.raises(ConfigError, match=f"1 to {MAX_LINKS}"):
        LINKS.value({"HOLDFAST_LINKS": str(MAX_LINKS + 1)})


def test_what_comes_back_comes_over_every_address(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Address] = []

    def noting(address: Address, *arguments: Any, **options: Any) -> SocketStream:
        asked.append(address)
        return connect(address, *arguments, **options)

    here, peer = SmpHere(ground, {}), on_several(ground, 2, name="node1")
    try:
        run = run_on([here, peer], [[SHARD_BYTES]] * 2)
        over(run)
        run.protect(1)
        plan = run.plan()
        monkeypatch.setattr(links, "connect", noting)
        found = run["dp0"].client.recover(plan.sources, "dp1")
        assert found.how == "fetched"
        assert set(asked) >= set(run.layout.node("node1").bulk_addresses)
    finally:
        here.smp.close()
