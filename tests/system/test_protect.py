"""Encoding between real SMPs is bounded, paced, given up when it should be, and not stopped by a bad connection."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

from holdfast.smp_daemon.coding import protect
from holdfast.smp_daemon.coding.sending import ATTEMPTS, WINDOW
from holdfast.smp_daemon.service import Smp
from holdfast.smp_daemon.shared.board import MAX_PAUSE_S, Board, SnapshotOutcome
from holdfast.smp_daemon.shared.plan import choose_sources
from tests.deadlines import DEADLINE_S, await_that
from tests.relay import Relay, relaying
from tests.smp_kit import (
    IN_THREADS,
    JOB,
    PROTECTED,
    QUIET,
    Ground,
    Run,
    SmpProcess,
    parities_by_xor,
    parity_units,
    run_on,
    stopped,
)

UNIT_BYTES = 4096


def over(run: Run, **addresses: tuple[tuple[str, int], ...]) -> Run:
    """The same job in its next epoch, with small units, and nodes at these addresses."""
    nodes = []
    for node in run.layout.nodes:
        (host, port), *more = addresses.get(node.name, node.bulk_addresses)
        nodes.append(replace(node, host=host, bulk_port=port, more_bulk=tuple(more)))
    run.epoch += 1
    run.layout = replace(run.layout, epoch=run.epoch, unit_bytes=UNIT_BYTES, nodes=tuple(nodes))
    run.join(run.epoch)
    run.configure(run.layout)
    return run


def counted(run: Run, coord: str, name: str) -> int:
    return run[coord].client.counters()[name]


def through_relays(stack: ExitStack, smps: Sequence[SmpProcess], **spoiling: list[int]) -> dict[str, Relay]:
    copies = {smp.name: {name: list(values) for name, values in spoiling.items()} for smp in smps}
    return {smp.name: stack.enter_context(relaying(smp.bulk, **copies[smp.name])) for smp in smps}


def test_no_more_than_a_window_of_units_is_on_its_way_to_a_peer_that_does_not_answer(ground: Ground) -> None:
    smps = ground.smps(2)
    run = over(run_on(smps, [[50_000]] * 2))
    snapshot = run.write(1)
    run["dp1"].seal(snapshot)
    with stopped(smps[1]):
        run["dp0"].seal(snapshot)
        assert run["dp0"].outcome(snapshot, 1.0) is SnapshotOutcome.PENDING
        assert counted(run, "dp0", "bytes_sent") <= WINDOW * UNIT_BYTES
    assert run.outcomes(snapshot) == {PROTECTED}
    assert counted(run, "dp0", "bytes_sent") == run.layout.shard_bytes("dp0")


def test_every_connection_cut_again_and_again_only_delays(ground: Ground) -> None:
    smps, run = ground.job([[50_000], [40_000], [3_000]], protect="1+2")
    with ExitStack() as stack:
        relays = through_relays(stack, smps, cut_after=[1, 2 * UNIT_BYTES, 5 * UNIT_BYTES + 17, 0])
        over(run, **{name: (relay.address,) for name, relay in relays.items()})
        snapshot = run.protect(1)
        assert sum(relay.cuts for relay in relays.values()) >= 9
    assert sum(counted(run, coord, "reconnects") for coord in run.trainers) >= 9
    accumulated = sum(counted(run, coord, "units_accumulated") for coord in run.trainers)
    assert accumulated >= 2 * sum(-(-run.layout.shard_bytes(coord) // UNIT_BYTES) for coord in run.trainers)
    for trainer in run:
        assert trainer.client.scrub()["damaged"] == 0
    smps[0].lose()
    smps[1].lose()
    assert (snapshot, "dp2") in run["dp2"].client.inventory().shards


@pytest.mark.proves("checked-on-arrival")
def test_a_unit_damaged_on_its_way_is_sent_again(ground: Ground) -> None:
    smps, run = ground.job([[50_000]] * 2)
    with ExitStack() as stack:
        relays = through_relays(stack, smps, flips=[7, 4000])
        over(run, **{name: (relay.address,) for name, relay in relays.items()})
        run.protect(1)
        assert [relay.spoilt for relay in relays.values()] == [2, 2]
    assert [counted(run, coord, "units_damaged") for coord in run.trainers] == [2, 2]
    assert [trainer.client.scrub()["damaged"] for trainer in run] == [0, 0]


def test_a_unit_that_went_bad_before_it_was_sent_is_not_protected(ground: Ground) -> None:
    smps = ground.smps(2, rules={0: [("seal.done", 1)]})
    run = over(run_on(smps, [[50_000]] * 2))
    slots = {trainer.coord: trainer.begin(run.snapshot(1)) for trainer in run}
    for trainer in run:
        slots[trainer.coord][:] = trainer.image(run.snapshot(1))
    run["dp1"].seal(run.snapshot(1))
    sealing = ground.meanwhile(run["dp0"].seal, run.snapshot(1))
    held = ground.points.wait("node0", "seal.done", 1)
    slots["dp0"][-1] ^= 1
    held.go()
    sealing.result(DEADLINE_S)
    assert run["dp0"].outcome(run.snapshot(1)) is SnapshotOutcome.FAILED
    assert run["dp1"].outcome(run.snapshot(1), 0.0) is SnapshotOutcome.PENDING
    assert counted(run, "dp1", "units_damaged") == ATTEMPTS


def test_a_snapshot_that_is_given_up_is_encoded_no_further(ground: Ground) -> None:
    smps = ground.smps(2)
    run = over(run_on(smps, [[50_000]] * 2))
    with stopped(smps[1]):
        run["dp0"].take(run.snapshot(1))
        assert run["dp0"].outcome(run.snapshot(1), 1.0) is SnapshotOutcome.PENDING
        run["dp0"].write(run.snapshot(2))  # keeps no snapshot: step 1 is given up
        assert run["dp0"].outcome(run.snapshot(1)) is SnapshotOutcome.FAILED
    run["dp1"].take(run.snapshot(2))
    run["dp0"].seal(run.snapshot(2))
    assert run.outcomes(run.snapshot(2)) == {PROTECTED}
    assert counted(run, "dp0", "bytes_sent") <= run.layout.shard_bytes("dp0") + WINDOW * UNIT_BYTES


@pytest.mark.parametrize("point", ["parity.accumulated", "parity.complete"])
def test_parity_that_is_computed_again_while_it_is_gathered_is_committed_once(ground: Ground, point: str) -> None:
    """As when a restarted SMP finds its parity missing just when the others resend their units."""
    smps, run = ground.job(
        [[90_000], [70_000], [80_000]], rules={1: [(point, 1), ("repair_parity.taken", 1)]}, protect="2+1"
    )
    snapshot = run.take(1)
    gathered = ground.points.wait("node1", point, 1)
    sources = choose_sources(run.inventories(), snapshot)
    assert sources is not None
    healing = ground.meanwhile(run["dp1"].client.repair_parity, sources, 0, 1)
    taken = ground.points.wait("node1", "repair_parity.taken", 1)
    gathered.go()
    if point == "parity.accumulated":
        ground.points.wait("node1", point, 1).go()  # the remaining units are gathered for nothing
    taken.go()
    healing.result(DEADLINE_S)
    assert run.outcomes(snapshot) == {PROTECTED}
    assert parity_units(smps[1], snapshot, run.layout.tag(0), 1) == parities_by_xor(run, 0, snapshot)[1]
    run.protected = snapshot
    run.protect(2)


def test_units_that_come_while_parity_is_computed_again_take_its_place(ground: Ground) -> None:
    """If both were built in one slot, it would end as neither."""
    smps, run = ground.job(
        [[90_000], [70_000], [80_000]],
        rules={i: [("encode.before", 1), ("repair_parity.taken", 1)] for i in range(3)},
        protect="2+1",
    )
    snapshot = run.take(1)
    senders = [ground.points.wait(name, "encode.before", 1) for name in ("node0", "node1", "node2")]
    sources = choose_sources(run.inventories(), snapshot)
    assert sources is not None
    run["dp1"].client.repair_parity(sources, 0, 1)
    taken = ground.points.wait("node1", "repair_parity.taken", 1)
    for sender in senders:
        sender.go()
    assert run.outcomes(snapshot) == {PROTECTED}
    taken.go()
    run.protected = snapshot
    assert parity_units(smps[1], snapshot, run.layout.tag(0), 1) == parities_by_xor(run, 0, snapshot)[1]
    run.protect(2)
    run.protect(3)


def test_encoding_keeps_to_its_bandwidth(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_BANDWIDTH", "1B/s")  # one unit is sent, and the next an hour later
    smps = ground.smps(2)
    run = over(run_on(smps, [[50_000]] * 2))
    snapshot = run.take(1)
    await_that(lambda: counted(run, "dp0", "bytes_sent"))
    assert run["dp0"].outcome(snapshot, 1.0) is SnapshotOutcome.PENDING
    assert counted(run, "dp0", "bytes_sent") == UNIT_BYTES


# ---------------------------------------------------------------- making way

HOURS_S = 7200.0


class SmpHere(SmpProcess):
    """``node0``, whose SMP runs in threads of this process."""

    def __init__(self, ground: Ground, settings: Mapping[str, str]) -> None:
        super().__init__(ground, "node0", ground.host(), JOB)
        before = set(threading.enumerate())
        environment = {**IN_THREADS, **QUIET, **settings}
        self.smp = Smp(JOB, self.name, self.arena, self.host, environment=environment)
        (self._thread,) = (t for t in threading.enumerate() if t.name == "protect" and t not in before)

    def end(self) -> bool:
        """Close the SMP; return whether its encoding ended then, whatever it was waiting for."""
        self.smp.close()
        self._thread.join(DEADLINE_S)
        return not self._thread.is_alive()


@contextmanager
def job_with(ground: Ground, settings: Mapping[str, str]) -> Iterator[tuple[SmpHere, Run]]:
    """A job on ``node0``, in this process, and ``node1``, a process; each has one shard of many units."""
    here = SmpHere(ground, settings)
    try:
        yield here, over(run_on([here, ground.smp("node1")], [[20_000]] * 2))
    finally:
        here.smp.close()


def test_while_a_trainer_communicates_nothing_is_sent(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protect, "MAX_PAUSE_S", HOURS_S)
    with job_with(ground, {}) as (here, run):
        board = Board(here.arena / "board")
        board.pause(3, time.monotonic() + HOURS_S)
        snapshot = run.take(1)
        await_that(lambda: counted(run, "dp0", "pauses") >= 1)
        assert run["dp0"].outcome(snapshot, 0.2) is SnapshotOutcome.PENDING
        assert counted(run, "dp0", "bytes_sent") == 0
        board.resume(3)
        assert run.outcomes(snapshot) == {PROTECTED}
        assert counted(run, "dp0", "pauses") == 1
        run.protect(2)
        assert counted(run, "dp0", "pauses") == 1


def test_a_pause_begins_between_two_units(ground: Ground) -> None:
    smps = ground.smps(2, rules={0: [("encode.middle", 1)]})
    run = over(run_on(smps, [[20_000]] * 2))
    snapshot = run.take(1)
    held = ground.points.wait("node0", "encode.middle", 1)
    sent = counted(run, "dp0", "bytes_sent")
    assert 0 < sent < run.layout.shard_bytes("dp0")
    began = time.monotonic()
    Board(smps[0].arena / "board").pause(0, began + HOURS_S)
    held.go()
    assert run.outcomes(snapshot) == {PROTECTED}
    assert time.monotonic() - began >= MAX_PAUSE_S
    assert counted(run, "dp0", "pauses") == 1


def test_a_trainer_that_forgot_to_resume_delays_each_snapshot_by_the_longest_pause_and_no_more(ground: Ground) -> None:
    smps = ground.smps(2)
    run = over(run_on(smps, [[20_000]] * 2))
    for smp in smps:
        Board(smp.arena / "board").pause(0, time.monotonic() + HOURS_S)
    for step in (1, 2):
        began = time.monotonic()
        run.protect(step)
        assert time.monotonic() - began >= MAX_PAUSE_S
        assert [counted(run, coord, "pauses") for coord in run.trainers] == [step, step]


def test_a_snapshot_that_is_given_up_is_not_waited_for(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protect, "MAX_PAUSE_S", HOURS_S)
    with job_with(ground, {}) as (here, run):
        Board(here.arena / "board").pause(0, time.monotonic() + HOURS_S)
        run["dp0"].take(run.snapshot(1))
        await_that(lambda: counted(run, "dp0", "pauses") >= 1)
        run["dp0"].take(run.snapshot(2))  # keeps no snapshot: step 1 is given up
        await_that(lambda: counted(run, "dp0", "pauses") >= 2)
        assert counted(run, "dp0", "bytes_sent") == 0
        assert here.end()


def test_an_smp_that_ends_does_not_wait_for_its_bandwidth(ground: Ground) -> None:
    with job_with(ground, {"HOLDFAST_BANDWIDTH": "1B/s"}) as (here, run):
        run.take(1)
        await_that(lambda: counted(run, "dp0", "bytes_sent") >= UNIT_BYTES)
        assert here.end()
