"""A shard is loaded from several SMPs at once: helpers stop in the middle, answers are late, units are damaged."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from holdfast.smp_daemon.recovery.fetch import WORKERS, Fetcher
from holdfast.smp_daemon.service import SocketListener, bind_tcp
from holdfast.smp_daemon.shared.client import RecoveredShard
from holdfast.smp_daemon.shared.counters import Counters
from holdfast.smp_daemon.shared.errors import Unrecoverable
from holdfast.smp_daemon.shared.layout import Layout, Node, Shard, SnapshotId
from holdfast.smp_daemon.shared.limits import CALL_DEADLINE_S
from holdfast.smp_daemon.shared.plan import RestorePlan
from holdfast.smp_daemon.shared.records import digest
from holdfast.smp_daemon.shared.sources import Address, Sources
from holdfast.smp_daemon.shared.transport import Message, SocketStream
from tests.deadlines import DEADLINE_S, await_that
from tests.smp_kit import Ground, Held, Trainer, flip_a_byte, run_on, shard_file, stopped

ELEMENTS = 30_000
SOON_S = CALL_DEADLINE_S
"""Loads must end sooner than this. Waiting for a stopped SMP until a deadline of the network takes longer."""


class Loss:
    """Node 4 of five is lost, and its replacement stops in the middle of its first load."""

    def __init__(self, ground: Ground, protect: str) -> None:
        self.ground = ground
        self.smps = ground.smps(5, rules={4: [("rebuild.middle", 1)]})
        self.run = run_on(self.smps, [[ELEMENTS + i] for i in range(5)], protect=protect)
        self.run.protect(1)
        self.smps[4].lose().launch().wait_ready()
        self.run.trainers["dp4"] = Trainer(self.smps[4], "dp4", ELEMENTS + 4)

    def plan(self) -> RestorePlan:
        plan = self.run.plan()
        self.run.epoch += 1
        self.run.join(self.run.epoch)
        return plan

    def middle(self, plan: RestorePlan, coord: str = "dp4") -> tuple[Future[Any], Held]:
        """Node 4 fetches a shard, and stops in the middle."""
        loading = self.ground.meanwhile(self.run["dp4"].client.recover, plan.sources, coord)
        return loading, self.ground.points.wait("node4", "rebuild.middle", 1)

    def assert_whole(self, shard: RecoveredShard, plan: RestorePlan, coord: str = "dp4") -> None:
        assert shard.view == self.run[coord].image(plan.snapshot)
        assert all(shard.unit(unit).matches() for unit in range(len(shard.digests)))


@pytest.mark.parametrize(("coord", "stops", "how"), [("dp4", 1, "rebuilt"), ("dp0", 0, "fetched")])
@pytest.mark.proves("stragglers")
def test_a_helper_or_a_holder_that_stops_in_the_middle_is_not_waited_for(
    ground: Ground, coord: str, stops: int, how: str
) -> None:
    loss = Loss(ground, "3+2")
    plan = loss.plan()
    loading, held = loss.middle(plan, coord)
    with stopped(loss.smps[stops]):
        began = time.monotonic()
        held.go()
        shard = loading.result(DEADLINE_S)
        assert time.monotonic() - began < SOON_S
    assert shard.how == how
    loss.assert_whole(shard, plan, coord)
    assert how == "fetched" or loss.run[coord].client.counters()["units_requested_again"] > 0


def test_where_all_stop_and_go_on_it_is_finished(ground: Ground) -> None:
    loss = Loss(ground, "3+1")
    plan = loss.plan()
    loading, held = loss.middle(plan)
    with stopped(*loss.smps[:4]) as go_on:
        held.go()
        timer = threading.Timer(3.0, go_on)
        timer.start()
        shard = loading.result(2 * DEADLINE_S)
        timer.join()
    loss.assert_whole(shard, plan)


def test_a_unit_that_is_damaged_at_one_helper_is_had_from_the_others(ground: Ground) -> None:
    loss = Loss(ground, "3+2")
    flip_a_byte(shard_file(loss.smps[1], loss.run.snapshot(1), "dp1"), at=5000)
    plan = loss.plan()
    loading, held = loss.middle(plan)
    held.go()
    loss.assert_whole(loading.result(DEADLINE_S), plan)


def test_a_loss_in_the_middle_that_is_beyond_parity_says_so(ground: Ground) -> None:
    loss = Loss(ground, "4+1")
    plan = loss.plan()
    loading, held = loss.middle(plan)
    loss.smps[1].lose()
    held.go()
    with pytest.raises(Unrecoverable, match=r"stripe \d+ .*: \d units .* 4 are"):
        loading.result(DEADLINE_S)


def test_a_bit_that_flips_in_what_has_come_is_seen(ground: Ground) -> None:
    """A load takes minutes where a node has hundreds of gigabytes."""
    smps = ground.smps(9, rules={8: [("rebuild.middle", 1)]})
    run = run_on(smps, [[ELEMENTS]] * 9, protect="8+1")
    run.protect(1)
    smps[8].lose().launch().wait_ready()
    run.trainers["dp8"] = Trainer(smps[8], "dp8", ELEMENTS)
    plan = run.plan()
    run.join(2)
    loading = ground.meanwhile(run["dp8"].recover, plan)
    held = ground.points.wait("node8", "rebuild.middle", 1)
    (slot,) = smps[8].arena.glob("dp8.*.safetensors")
    come, whole, length = slot.read_bytes(), run["dp8"].image(plan.snapshot), run.layout.unit_bytes
    unit = next(i for i in range(8) if come[i * length :][:length] == whole[i * length :][:length])
    flip_a_byte(slot, at=(unit + 1) * length - 1)
    held.go()
    shard = loading.result(DEADLINE_S)
    assert [i for i in range(len(shard.digests)) if not shard.unit(i).matches()] == [unit]


# ---------------------------------------------------------------------- made-up answers


class Giver:
    """Stands in for an SMP: gives the units that it was made with, those in `at_once` at once, others once `may` is
    set."""

    def __init__(self, host: str, units: Mapping[tuple[str, int], bytes]) -> None:
        self.may = threading.Event()
        self.at_once: set[int] = set()
        self.asked = threading.Semaphore(0)
        self._units = units
        self._listener = SocketListener(bind_tcp(host, 0), lambda sock: self)
        self.address: Address = (host, self._listener.port)

    def answer(self, message: Message, payload: int, stream: SocketStream) -> tuple[Message, memoryview | None]:
        self.asked.release()
        what = message["what"]
        assert what["unit"] in self.at_once or self.may.wait(DEADLINE_S)
        unit = memoryview(self._units[what["op"], what["unit"]])
        sources = {"0": digest(unit)} if what["op"] == "parity_unit" else {}
        return {"digest": digest(unit), "sources": sources}, unit

    def ended(self) -> None:
        """Nothing to clean up."""

    def cut(self) -> None:
        """End all connections, and answer whoever connects from now on."""
        for stream in list(self._listener._live):
            stream.close()
        self.may.set()

    def close(self) -> None:
        self.may.set()
        self._listener.close()


UNIT = 4096
UNITS = 24


@contextmanager
def mirror(
    ground: Ground, first: Mapping[int, bytes], second: Mapping[int, bytes]
) -> Iterator[tuple[Sources, Giver, Giver]]:
    """Two SMPs that give the units of ``dp0``: one holds it, the other its copy, as parity of a mirror."""
    nodes = tuple(Node(f"node{i}", ground.host(), 1, 1, (Shard(f"dp{i}", UNIT * UNITS),), ()) for i in range(2))
    layout = Layout("job", 1, 0, nodes, ((0, 1),), 1, 1, UNIT, 3)
    stripes = layout.stripes(0)
    copies = {stripes.parity_rank(1, stripes.stripe_of(0, i)): i for i in range(UNITS)}
    holder = Giver(ground.host(), {("shard_unit", i): unit for i, unit in first.items()})
    other = Giver(ground.host(), {("parity_unit", rank): second[i] for rank, i in copies.items() if i in second})
    try:
        yield Sources(SnapshotId(1, 1), layout, {"dp0": holder.address}, {0: {1: other.address}}), holder, other
    finally:
        holder.close()
        other.close()


def load(sources: Sources, out: bytearray) -> int:
    """Fetch dp0. Returns the bytes that came for it."""
    with Fetcher(sources, Counters(), by_chain=False) as fetcher:
        fetcher.all(fetcher.shard("dp0", memoryview(out)), UNITS)
        return fetcher.bytes_received


def test_a_late_answer_never_touches_what_is_there(ground: Ground) -> None:
    """The holder answers late, with other units than those that have been written meanwhile."""
    draw = random.Random(1)
    right = {i: draw.randbytes(UNIT) for i in range(UNITS)}
    wrong = {i: draw.randbytes(UNIT) for i in range(UNITS)}
    with mirror(ground, wrong, right) as (sources, holder, other):
        out = bytearray(UNIT * UNITS)
        other.may.set()
        loading = ground.meanwhile(load, sources, out)
        assert holder.asked.acquire(timeout=DEADLINE_S)
        loading.result(SOON_S)
        whole = b"".join(right.values())
        assert out == whole
        threads = [thread for thread in threading.enumerate() if thread.name == "fetch"]
        holder.may.set()
        for thread in threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        assert out == whole


def test_nothing_is_written_once_it_has_failed(ground: Ground) -> None:
    draw = random.Random(2)
    units = {i: draw.randbytes(UNIT) for i in range(UNITS)}
    with mirror(ground, {}, units) as (sources, holder, other):
        holder.close()
        other.close()
        out = bytearray(UNIT * UNITS)
        with pytest.raises(Unrecoverable, match=r"0 units .* 1 are needed"):
            load(sources, out)
        assert not any(out)


def test_connections_that_break_at_the_same_time_are_one_failure_of_their_source(ground: Ground) -> None:
    units = {i: bytes([i]) * UNIT for i in range(UNITS)}
    with mirror(ground, units, {}) as (sources, holder, other):
        other.close()
        out = bytearray(UNIT * UNITS)
        loading = ground.meanwhile(load, sources, out)
        for _ in range(WORKERS):
            assert holder.asked.acquire(timeout=DEADLINE_S)
        holder.cut()
        loading.result(SOON_S)
        assert out == b"".join(units.values())


@pytest.mark.parametrize("threads", range(WORKERS))
def test_where_there_is_no_room_for_all_threads_it_goes_on_with_fewer(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """As where a control group, or the user, has as many as it may have."""
    left = iter(range(threads))
    start = threading.Thread.start

    def may_start(thread: threading.Thread) -> None:
        if thread.name == "fetch" and next(left, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", may_start)
    units = {i: bytes([i]) * UNIT for i in range(UNITS)}
    with mirror(ground, units, units) as (sources, holder, _other):
        holder.may.set()
        out = bytearray(UNIT * UNITS)
        load(sources, out)
        assert out == b"".join(units.values())


def test_connections_and_threads_are_bounded_and_end_with_it(ground: Ground) -> None:
    units = {i: bytes([i]) * UNIT for i in range(UNITS)}
    with mirror(ground, units, units) as (sources, holder, other):
        holder.may.set()
        other.may.set()
        before = threading.active_count()
        out = bytearray(UNIT * UNITS)
        assert load(sources, out) == UNIT * UNITS
        assert out == b"".join(units.values())
        await_that(lambda: not any(thread.name == "fetch" for thread in threading.enumerate()))
        assert threading.active_count() <= before + 16


def test_what_a_bug_raises_ends_the_load(ground: Ground) -> None:
    units = {i: bytes(UNIT) for i in range(UNITS)}

    def broken(digest: int) -> None:
        raise ZeroDivisionError("a bug")

    with mirror(ground, units, units) as (sources, holder, other):
        holder.may.set()
        other.may.set()
        out = memoryview(bytearray(UNIT * UNITS))
        with Fetcher(sources, Counters()) as fetcher, pytest.raises(ZeroDivisionError):
            fetcher.all((replace(unit, came=broken) for unit in fetcher.shard("dp0", out)), UNITS)


def test_a_source_is_not_blamed_for_requests_that_end_as_another_unit_failed(
    ground: Ground, caplog: pytest.LogCaptureFixture
) -> None:
    units = {i: bytes(UNIT) for i in range(UNITS)}

    def broken(digest: int) -> None:
        assert holder.asked.acquire(timeout=DEADLINE_S)  # for the first unit
        assert holder.asked.acquire(timeout=DEADLINE_S)  # for another, whose worker waits
        raise ZeroDivisionError("a bug")

    with mirror(ground, units, units) as (sources, holder, _other):
        holder.at_once.add(0)
        out = memoryview(bytearray(UNIT * UNITS))
        with Fetcher(sources, Counters()) as fetcher, pytest.raises(ZeroDivisionError):
            fetcher.all((replace(unit, came=broken) for unit in fetcher.shard("dp0", out)), UNITS)
        for thread in [thread for thread in threading.enumerate() if thread.name == "fetch"]:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        assert [record for record in caplog.records if record.name.endswith("fetch")] == []
