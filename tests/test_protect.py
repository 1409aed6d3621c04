"""Encoding between real SMPs: bounded, paced, given up when it should be, and not stopped by a bad connection."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

from smp_daemon.board import Outcome
from smp_daemon.protect import ATTEMPTS, WINDOW
from tests.relay import Relay, relaying
from tests.smp_kit import DEADLINE_S, PROTECTED, Ground, Run, SmpProcess, playground, run_on

UNIT_BYTES = 4096


@pytest.fixture
def ground() -> Iterator[Ground]:
    with playground() as made:
        yield made


@contextmanager
def stopped(smp: SmpProcess) -> Iterator[None]:
    """A process that does not get to run."""
    os.kill(smp.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(smp.process.pid, signal.SIGCONT)


def anew(run: Run, addresses: dict[str, tuple[str, int]] | None = None) -> Run:
    """The same job in its next epoch, in small units, with some nodes reached at other addresses."""
    nodes = []
    for node in run.layout.nodes:
        host, port = (addresses or {}).get(node.name, node.bulk)
        nodes.append(replace(node, host=host, bulk_port=port))
    run.epoch += 1
    run.layout = replace(run.layout, epoch=run.epoch, unit_bytes=UNIT_BYTES, nodes=tuple(nodes))
    for trainer in run:
        trainer.client.join(run.epoch)
    for trainer in run:
        trainer.client.configure(run.layout)
    return run


def counted(run: Run, coord: str, name: str) -> int:
    return run[coord].client.counters()[name]


def through_relays(stack: ExitStack, smps: Sequence[SmpProcess], **spoiling: list[int]) -> dict[str, Relay]:
    copies = {smp.name: {name: list(values) for name, values in spoiling.items()} for smp in smps}
    return {smp.name: stack.enter_context(relaying(smp.bulk, **copies[smp.name])) for smp in smps}


def test_no_more_than_a_window_of_units_is_on_its_way_to_a_peer_that_does_not_answer(ground: Ground) -> None:
    smps = ground.smps(2)
    run = anew(run_on(smps, [[50_000]] * 2))
    snapshot = run.write(1)
    run["dp1"].seal(snapshot)
    with stopped(smps[1]):
        run["dp0"].seal(snapshot)
        assert run["dp0"].outcome(snapshot, 1.0) is Outcome.PENDING
        assert counted(run, "dp0", "bytes_sent") <= WINDOW * UNIT_BYTES
    assert run.outcomes(snapshot) == {PROTECTED}
    assert counted(run, "dp0", "bytes_sent") == run.layout.shard_bytes("dp0")


def test_every_connection_cut_again_and_again_only_delays(ground: Ground) -> None:
    smps = ground.smps(3)
    run = run_on(smps, [[50_000], [40_000], [3_000]], protect="1+2")
    with ExitStack() as stack:
        relays = through_relays(stack, smps, cut_after=[1, 2 * UNIT_BYTES, 5 * UNIT_BYTES + 17, 0])
        anew(run, {name: relay.address for name, relay in relays.items()})
        snapshot = run.protect(1)
        assert sum(relay.cuts for relay in relays.values()) >= 9
    assert sum(counted(run, coord, "reconnects") for coord in run.trainers) >= 9
    folded = sum(counted(run, coord, "units_folded") for coord in run.trainers)
    assert folded >= 2 * sum(-(-run.layout.shard_bytes(coord) // UNIT_BYTES) for coord in run.trainers)
    for trainer in run:
        assert trainer.client.scrub()["damaged"] == 0
    smps[0].lose()
    smps[1].lose()
    assert (snapshot, "dp2") in run["dp2"].client.inventory().shards


def test_a_unit_damaged_on_its_way_is_sent_again(ground: Ground) -> None:
    smps = ground.smps(2)
    run = run_on(smps, [[50_000]] * 2)
    with ExitStack() as stack:
        relays = through_relays(stack, smps, flips=[7, 4000])
        anew(run, {name: relay.address for name, relay in relays.items()})
        run.protect(1)
        assert [relay.spoilt for relay in relays.values()] == [2, 2]
    assert [counted(run, coord, "units_damaged") for coord in run.trainers] == [2, 2]
    assert [trainer.client.scrub()["damaged"] for trainer in run] == [0, 0]


def test_a_unit_that_went_bad_before_it_was_sent_is_not_protected(ground: Ground) -> None:
    smps = ground.smps(2, rules={0: [("seal.done", 1)]})
    run = anew(run_on(smps, [[50_000]] * 2))
    slots = {trainer.coord: trainer.client.begin(run.snapshot(1), trainer.coord, (), None) for trainer in run}
    for trainer in run:
        slots[trainer.coord][:] = trainer.image(run.snapshot(1))
    run["dp1"].seal(run.snapshot(1))
    sealing = ground.meanwhile(run["dp0"].seal, run.snapshot(1))
    held = ground.points.wait("node0", "seal.done", 1)
    slots["dp0"][-1] ^= 1
    held.go()
    sealing.result(DEADLINE_S)
    assert run["dp0"].outcome(run.snapshot(1)) is Outcome.FAILED
    assert run["dp1"].outcome(run.snapshot(1), 0.0) is Outcome.PENDING
    assert counted(run, "dp1", "units_damaged") == ATTEMPTS


def test_a_snapshot_that_is_given_up_is_encoded_no_further(ground: Ground) -> None:
    smps = ground.smps(2)
    run = anew(run_on(smps, [[50_000]] * 2))
    with stopped(smps[1]):
        run["dp0"].take(run.snapshot(1))
        assert run["dp0"].outcome(run.snapshot(1), 1.0) is Outcome.PENDING
        run["dp0"].write(run.snapshot(2))  # keeps nothing: step 1 is given up
        assert run["dp0"].outcome(run.snapshot(1)) is Outcome.FAILED
    run["dp1"].take(run.snapshot(2))
    run["dp0"].seal(run.snapshot(2))
    assert run.outcomes(run.snapshot(2)) == {PROTECTED}
    assert counted(run, "dp0", "bytes_sent") <= run.layout.shard_bytes("dp0") + WINDOW * UNIT_BYTES


def test_encoding_keeps_to_its_bandwidth(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_BANDWIDTH", "1")  # a byte per second: one unit goes, and the next in an hour
    smps = ground.smps(2)
    run = anew(run_on(smps, [[50_000]] * 2))
    snapshot = run.take(1)
    assert run["dp0"].outcome(snapshot, 1.0) is Outcome.PENDING
    assert counted(run, "dp0", "bytes_sent") == UNIT_BYTES


def test_a_bandwidth_that_is_no_rate_is_refused(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_BANDWIDTH", "fast")
    with pytest.raises(Exception, match="'fast' is not a rate"):
        ground.smp()
