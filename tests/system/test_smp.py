"""SMPs as real processes: sealing and parity, fencing, adoption after SIGKILL, and recovery of what was lost."""

from __future__ import annotations

import os
import queue
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.smp_daemon.answers import MAX_DIGESTS
from holdfast.smp_daemon.net.peers import PeerClient
from holdfast.smp_daemon.ops.overview import look
from holdfast.smp_daemon.ops.status import take_statuses
from holdfast.smp_daemon.service import SocketListener, bind_unix
from holdfast.smp_daemon.shared.board import Board, SnapshotOutcome
from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.errors import (
    ArenaInUse,
    ArenaTooSmall,
    ConfigError,
    DamagedSnapshot,
    HoldfastError,
    NoFreeSlot,
    ProtocolError,
    SmpUnavailable,
    StaleEpoch,
    Unrecoverable,
    VersionMismatch,
)
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.paths import socket_path
from holdfast.smp_daemon.shared.plain import decode_digested
from holdfast.smp_daemon.shared.records import digest, digest_units, write_json
from holdfast.smp_daemon.shared.slotfile import write_stamp
from holdfast.smp_daemon.shared.spawn import smp_command
from holdfast.smp_daemon.shared.transport import Message, SocketStream, call, connect
from holdfast.smp_daemon.shared.versions import PROTOCOL_VERSION, RELEASE, spoken
from tests.deadlines import DEADLINE_S, await_that
from tests.scripts import started
from tests.smp_kit import (
    JOB,
    PROTECTED,
    Ground,
    LeftBehind,
    Run,
    SmpProcess,
    Trainer,
    flip_a_byte,
    limited,
    memory_of,
    mounted,
    parities_by_xor,
    parity_file,
    parity_units,
    playground,
    read_line,
    record_of,
    refusal,
    run_on,
    shard_file,
)
from tests.system.test_regroup import layout_of
from tests.unit.test_reconciler import full

SHORT_S = 0.5
"""How long a test waits to see that something does not happen. No test uses it to wait for something to happen."""


@pytest.fixture(scope="module")
def lone() -> Iterator[SmpProcess]:
    """One SMP for all tests that need a single call; each enters an epoch of its own."""
    with playground() as ground:
        yield ground.smp()


def next_run_on(smp: SmpProcess, coord: str = "dp0") -> Run:
    trainer = Trainer(smp, coord)
    return Run([trainer]).start(trainer.client.inventory().epoch + 1)


def bytes_of(run: Run, coord: str, snapshot: SnapshotId) -> bytes:
    return run[coord].image(snapshot)


# ---------------------------------------------------------------------- sealing and parity


class TestASealedSnapshotIsProtected:
    @pytest.mark.parametrize(
        ("sizes", "protect"),
        [
            pytest.param([[4000], [4000]], "auto", id="two nodes"),
            pytest.param([[9000], [9000], [9000]], "2+1", id="three nodes"),
            pytest.param([[9000, 9000], [9000, 9000], [9000, 9000], [9000, 9000]], "3+1", id="four nodes, two shards"),
            pytest.param([[20_000, 900], [10], [7777, 5000, 3]], "2+1", id="uneven shards"),
            pytest.param([[3000], [9000], [12_000], [2000]], "1+1", id="two groups"),
            pytest.param([[3000], [9000], [12_000], [2000]], "2+1", id="four nodes, stripes on three"),
            pytest.param([[3000], [9000], [12_000]], "copies:1", id="three nodes, copies"),
        ],
    )
    def test_on_every_node_and_its_parity_is_the_xor_of_its_group(
        self, ground: Ground, sizes: list[list[int]], protect: str
    ) -> None:
        smps = ground.smps(len(sizes))
        run = run_on(smps, sizes, protect=protect)
        for step in (1, 2, 3, 4):
            run.protect(step)
        snapshot = run.snapshot(4)
        assert run.layout.parity == 1
        for group, members in enumerate(run.layout.groups):
            tag = run.layout.tag(group)
            found = {p: parity_units(smps[i], snapshot, tag, p) for p, i in enumerate(members)}
            assert found == parities_by_xor(run, group, snapshot)
        for smp, row in zip(smps, run.layout.nodes, strict=True):
            for shard in row.shards:
                assert shard_file(smp, snapshot, shard.coord).read_bytes() == bytes_of(run, shard.coord, snapshot)

    def test_the_inventory_lists_what_a_node_holds(self, ground: Ground) -> None:
        _, run = ground.job([[100], [100]])
        first = run.protect(1)
        second = run.protect(2)
        held = run.inventories()
        assert [inventory.node for inventory in held] == ["node0", "node1"]
        assert [inventory.shards for inventory in held] == [{(first, c), (second, c)} for c in ("dp0", "dp1")]
        tag = run.layout.tag(0)
        assert [inventory.parities for inventory in held] == [{(first, tag, p), (second, tag, p)} for p in (0, 1)]
        assert all(inventory.layouts == {(1, 0): run.layout} and inventory.protected == first for inventory in held)

    def test_the_inventory_tells_how_many_trainers_are_connected(self, ground: Ground) -> None:
        smp = ground.smp()
        clients = [smp.client() for _ in range(3)]
        assert [client.inventory().trainers for client in clients] == [3] * 3
        clients[0].close()
        ended = ground.meanwhile(await_that, lambda: clients[1].inventory().trainers == 2)
        assert ended.result(DEADLINE_S)
        clients[0].reconnect()
        assert clients[1].inventory().trainers == 3

    def test_without_parity_a_node_protects_itself_only(self, ground: Ground) -> None:
        smps, run = ground.job([[100], [100]], protect="none")
        run["dp0"].take(run.snapshot(1))
        assert run["dp0"].outcome(run.snapshot(1)) is PROTECTED
        assert not list(smps[0].arena.glob("*.parity"))


class TestATrainerThatIsGone:
    def test_a_slot_that_was_given_back_is_taken_again_and_not_sealed_for_the_first_time(
        self, lone: SmpProcess
    ) -> None:
        run = next_run_on(lone)
        snapshot = run.write(1)
        given = run["dp0"].begun[snapshot][0]
        run["dp0"].client.give_back(given)
        again = [run["dp0"].client.take("dp0", ()) for _ in range(3)]
        assert given.file in {slot.file for slot in again}
        with pytest.raises(StaleEpoch, match="being written"):
            run["dp0"].seal(snapshot)
        for slot in again:
            run["dp0"].client.give_back(slot)
        run.protect(2)

    def test_a_trainer_that_comes_back_still_has_the_slot_that_it_had_taken(self, lone: SmpProcess) -> None:
        run = next_run_on(lone)
        snapshot = run.write(1)
        run["dp0"].client.reconnect()
        run["dp0"].seal(snapshot)
        assert (snapshot, "dp0") in run["dp0"].client.inventory().shards

    def test_a_slot_is_sealed_once(self, lone: SmpProcess) -> None:
        run = next_run_on(lone)
        snapshot = run.take(1)
        with pytest.raises(StaleEpoch, match="being written"):
            run["dp0"].seal(snapshot)
        run["dp0"].client.give_back(run["dp0"].begun[snapshot][0])  # as if the answer had been lost
        second = run["dp0"].client.take("dp0", (snapshot,))
        assert second.file != run["dp0"].begun[snapshot][0].file


class TestWhatIsNotASnapshotIsRefused:
    def test_a_slot_stamped_for_another_step_is_refused_and_free(self, lone: SmpProcess) -> None:
        run = next_run_on(lone)
        run.protect(0)
        snapshot = run.snapshot(1)
        slot = run["dp0"].write(snapshot, run.kept)
        write_stamp(slot, SnapshotId(snapshot.epoch, snapshot.step + 6))
        with pytest.raises(ProtocolError, match="stamped step 7 "):
            run["dp0"].seal(snapshot)
        assert run["dp0"].outcome(snapshot) is SnapshotOutcome.FAILED
        assert run["dp0"].client.inventory().shards == {(run.snapshot(0), "dp0")}
        for step in (2, 3, 4):
            run.protect(step)

    def test_as_soon_as_files_can_be_written_again_snapshots_are_taken_again(self, lone: SmpProcess) -> None:
        """However many have failed: first the record of what is protected cannot be written, then their own."""
        trainer = Trainer(lone, "dp0")
        run = Run([trainer], slots=2).start(trainer.client.inventory().epoch + 1)
        run.protect(0)
        with limited(resource.RLIMIT_FSIZE, 0, lone.process.pid):
            for step in (1, 2, 3, 4):
                snapshot = run.write(step)
                with pytest.raises(ArenaTooSmall):
                    trainer.seal(snapshot)
                assert trainer.outcome(snapshot) is SnapshotOutcome.FAILED
                trouble = look(JOB, lone.control).troubles[0]
                assert f"{snapshot} failed" in trouble and "dp0 is not sealed" in trouble
        for step in (5, 6, 7):
            run.protect(step)
        assert not [trouble for trouble in look(JOB, lone.control).troubles if "failed" in trouble]

    def test_a_shard_that_the_layout_does_not_have_is_refused(self, lone: SmpProcess) -> None:
        run = next_run_on(lone)
        with pytest.raises(ProtocolError, match="'dp5' is not part"):
            run["dp0"].client.take("dp5", [])

    def test_numbers_beyond_all_reason_are_refused(self, lone: SmpProcess) -> None:
        run = next_run_on(lone)
        with pytest.raises(ProtocolError):
            run["dp0"].client.join(1 << 63)
        assert run["dp0"].client.inventory().epoch == run.epoch
        run.protect(1)

    def test_a_snapshot_before_the_layout_is_refused(self, lone: SmpProcess) -> None:
        trainer = Trainer(lone, "dp0")
        epoch = trainer.client.inventory().epoch + 1
        trainer.client.join(epoch)
        with pytest.raises(ProtocolError, match="not configured"):
            trainer.write(SnapshotId(epoch, 1))

    def test_another_layout_in_the_same_epoch_is_refused(self, lone: SmpProcess) -> None:
        run = next_run_on(lone)
        run["dp0"].client.configure(run.layout)
        with pytest.raises(ProtocolError, match="another layout"):
            run["dp0"].client.configure(replace(run.layout, slots=run.layout.slots + 1))

    @pytest.mark.parametrize("change", [{"job": "otherun"}, {"nodes": "another"}])
    def test_a_layout_that_is_not_for_this_node_is_refused(self, lone: SmpProcess, change: dict[str, str]) -> None:
        trainer = Trainer(lone, "dp0")
        run = Run([trainer])
        layout = run.start(trainer.client.inventory().epoch + 1).layout
        nodes = tuple(replace(node, name="elsewhere") for node in layout.nodes)
        layout = replace(layout, epoch=layout.epoch + 1, job=change.get("job", layout.job))
        layout = replace(layout, nodes=nodes) if "nodes" in change else layout
        trainer.client.join(layout.epoch)
        with pytest.raises(ProtocolError, match=r"serves job|not part of"):
            trainer.client.configure(layout)


# ---------------------------------------------------------------------- who may write


class TestFencing:
    def test_a_trainer_of_another_job_is_refused(self, lone: SmpProcess) -> None:
        with pytest.raises(ConfigError, match=r"'testrun', not 'otherun': .*HOLDFAST_JOB"):
            SmpClient(lone.arena, "otherun")

    def test_a_trainer_of_another_version_is_refused(self, lone: SmpProcess, monkeypatch: pytest.MonkeyPatch) -> None:
        newer = (PROTOCOL_VERSION + 1, PROTOCOL_VERSION + 2)
        monkeypatch.setattr("holdfast.smp_daemon.shared.client.spoken", lambda: newer)
        with pytest.raises(VersionMismatch, match=f"protocols {newer[0]} to {newer[1]};"):
            SmpClient(lone.arena, lone.job)

    def test_without_an_smp_a_trainer_is_told_how_to_start_one(self, ground: Ground) -> None:
        with pytest.raises(SmpUnavailable, match=r"python -m holdfast\.smp_daemon"):
            SmpClient(ground.base / "nowhere", "testrun")

    def test_a_dead_smp_is_unavailable_and_not_waited_for(self, ground: Ground) -> None:
        smp = ground.smp()
        client = smp.client()
        assert client.connection is not None
        smp.kill()
        assert client.connection is None, "its end is seen without a call"
        with pytest.raises(SmpUnavailable):
            client.inventory()
        with pytest.raises(SmpUnavailable):
            SmpClient(smp.arena, smp.job)


class TestPeersOfAnotherJob:
    @pytest.fixture
    def peers(self) -> Iterator[PeerClient]:
        peers = PeerClient(JOB)
        yield peers
        peers.close()

    def test_a_ping_is_answered_to_our_own_only(self, lone: SmpProcess, peers: PeerClient) -> None:
        reply = peers.ping(lone.control, DEADLINE_S)
        assert (reply.job, reply.node) == (lone.job, lone.name)
        with PeerClient("otherun") as others, pytest.raises(ProtocolError, match="'testrun', not 'otherun'"):
            others.ping(lone.control, DEADLINE_S)

    def test_news_of_parity_is_taken_of_our_job_epoch_and_group_only(self, ground: Ground, peers: PeerClient) -> None:
        _, run = ground.job([[100], [100]])
        snapshot = run.write(1)
        run["dp0"].seal(snapshot)
        reasons: queue.Queue[str] = queue.Queue()
        for layout, epoch, reason in (
            (replace(run.layout, job="otherun"), 1, "'testrun', not 'otherun'"),
            (run.layout, 0, "epoch 0 may not write"),
            (run.layout, 2, "epoch 2 may not write"),
        ):
            peers.tell_parity_done(layout, "node1", epoch, snapshot, reasons.put)
            assert reason in reasons.get(timeout=DEADLINE_S)
        other = replace(run.layout, groups=((1, 0),))
        assert other.tag(0) != run.layout.tag(0)
        peers.tell_parity_done(other, "node1", 1, snapshot, reasons.put)
        assert run["dp0"].outcome(snapshot, SHORT_S) is SnapshotOutcome.PENDING
        assert reasons.empty()

    def test_news_for_which_there_is_no_thread_is_not_told(
        self, peers: PeerClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        full(monkeypatch, "tell", 1)
        reasons: list[str] = []
        peers.tell_parity_done(layout_of(2, 1, 1), "node1", 1, SnapshotId(1, 1), reasons.append)
        assert reasons == ["node 'node0' could not be told: can't start new thread"]

    @pytest.mark.parametrize("op", ["accumulate", "fetch"])
    def test_raw_bytes_are_exchanged_with_our_own_only(self, lone: SmpProcess, op: str) -> None:
        run = next_run_on(lone)
        snapshot = run.protect(1)
        numbers = {"epoch": run.epoch, "stripe": 0, "position": 0, "digest": 0}
        what = {"op": "shard_unit", "coord": "dp0", "unit": 0}
        message = {"op": op, "snapshot": snapshot, "tag": run.layout.tag(0), "what": what, **numbers}
        with closing(connect(lone.bulk)) as stream:
            with pytest.raises(ProtocolError, match="'testrun', not 'otherun'"):
                call(stream, {**message, "job": "otherun"}, memoryview(b"unit") if op == "accumulate" else None)
            _, length = call(stream, {**message, "op": "fetch", "job": "testrun"})
            assert length == min(run.layout.unit_bytes, run["dp0"].form.total_bytes)

    def test_a_unit_that_was_refused_leaves_nothing_behind_for_the_next(self, ground: Ground) -> None:
        [smp, _], run = ground.job([[100], [100]])
        snapshot = run.write(1)
        unit = memoryview(bytes_of(run, "dp1", snapshot))[: run.layout.unit_bytes]
        good = accumulate_message(run, snapshot, digest=digest(unit))
        with closing(connect(smp.bulk)) as stream:
            for change in ({"job": "otherun"}, {"epoch": 0}, {"stripe": -1}, {"tag": 7}, {"digest": None}):
                with pytest.raises(HoldfastError):
                    call(stream, {**good, **change}, unit)
            call(stream, good, unit)
            call(stream, good, unit)
        run.seal(snapshot)
        assert run.outcomes(snapshot) == {PROTECTED}
        assert parity_units(smp, snapshot, run.layout.tag(0), 0) == parities_by_xor(run, 0, snapshot)[0]


def accumulate_message(run: Run, snapshot: SnapshotId, **more: int) -> Message:
    """The message that position 1 sends with its unit of stripe 0, for the parity of position 0."""
    return {
        "op": "accumulate",
        "job": run.job,
        "epoch": run.epoch,
        "snapshot": snapshot,
        "tag": run.layout.tag(0),
        "stripe": 0,
        "position": 1,
        "digest": 0,
        **more,
    }


# ---------------------------------------------------------------------- the SMP is killed


class TestAnSmpKilledAndStartedAgain:
    def test_holds_what_was_sealed_on_the_same_ports(self, ground: Ground) -> None:
        smps, run = ground.job([[3000], [3000]])
        snapshot = run.protect(1)
        before = run["dp1"].client.inventory()
        run.write(2)
        smps[1].restart()
        run["dp1"].client.reconnect()
        after = run["dp1"].client.inventory()
        assert (after.control_port, after.bulk_port) == (before.control_port, before.bulk_port)
        assert (after.epoch, after.layouts) == (1, {(1, 0): run.layout})
        assert after.shards == {(snapshot, "dp1")}
        assert after.parities == {(snapshot, run.layout.tag(0), 1)}
        outcomes = [run["dp1"].client.outcome(run.snapshot(step)) for step in (1, 2)]
        assert outcomes == [PROTECTED, SnapshotOutcome.PENDING]
        recovered = run["dp1"].recover(run.plan(after))
        assert (recovered.how, bytes(recovered.view)) == ("held", bytes_of(run, "dp1", snapshot))

    def test_killed_on_its_way_into_an_epoch_it_arrives(self, ground: Ground) -> None:
        smp = ground.smp()
        run_on([smp], [[3000]]).protect(1)
        smp.kill()
        node = decode_digested((smp.arena / "node.json").read_bytes())
        write_json(smp.arena / "node.json", {**node, "epoch": 2})
        smp.launch().wait_ready()
        run = Run([Trainer(smp, "dp0")]).start(2)
        snapshot = run.protect(1)
        assert run["dp0"].client.outcome(snapshot) is PROTECTED
        assert run["dp0"].client.outcome(SnapshotId(1, 1)) is SnapshotOutcome.FAILED

    @pytest.mark.parametrize("at", [-1, 5000], ids=["last byte", "middle"])
    def test_does_not_give_a_shard_that_was_damaged_meanwhile_and_cannot_be_mended(
        self, ground: Ground, at: int
    ) -> None:
        [smp], run = ground.job([[3000]])
        good = run.protect(1)
        bad = run.protect(2)
        path = shard_file(smp, bad, "dp0")
        smp.kill()
        flip_a_byte(path, at)
        smp.launch().wait_ready()
        run["dp0"].client.reconnect()
        inventory = run["dp0"].client.inventory()
        assert inventory.shards == {(good, "dp0"), (bad, "dp0")}, "others might help to repair it"
        with pytest.raises(DamagedSnapshot, match=r"dp0 of .* 2 .*no parity"):
            run["dp0"].recover(run.plan(inventory))
        inventory = run["dp0"].client.inventory()
        assert inventory.shards == {(good, "dp0")}
        assert not record_of(path).exists()
        recovered = run["dp0"].recover(run.plan(inventory))
        assert (recovered.how, bytes(recovered.view)) == ("held", bytes_of(run, "dp0", good))

    def test_serves_before_it_has_read_what_it_adopted_and_hands_out_no_damage_meanwhile(self, ground: Ground) -> None:
        smps, run = ground.job([[3000], [3000], [3000]])
        snapshot, tag = run.protect(1), run.layout.tag(0)
        held_bytes = len(bytes_of(run, "dp1", snapshot)) + sum(map(len, parity_units(smps[1], snapshot, tag, 1)))
        smps[1].kill()
        flip_a_byte(shard_file(smps[1], snapshot, "dp1"))
        smps[1].rules = [("adopt.verify", None)]
        smps[1].launch().wait_ready()
        held = ground.points.wait_any("node1", "adopt.verify")
        run["dp1"].client.reconnect()
        [status] = take_statuses(run.job, [smps[1].control])
        assert status.unverified_bytes == held_bytes
        assert status.to_plain()["verifying"] == status.verifying != ""
        overview = look(run.job, smps[1].control)
        assert overview.newest is not None and overview.newest.snapshot == snapshot, "nothing is lost"
        assert all(word in overview.sentence() for word in ("node1", "verified"))
        plan = run.plan()
        assert (plan.snapshot, plan.decoded, plan.repair) == (snapshot, (), ())
        elsewhere = Trainer(smps[0], "dp1", 3000).recover(plan)
        assert bytes(elsewhere.view) == bytes_of(run, "dp1", snapshot), "a damaged unit was sent as an erasure"
        lent = run["dp1"].client.recover(plan.sources, "dp1", check=False)
        assert not all(lent.unit(unit).matches() for unit in range(len(lent.digests))), (
            "whoever asks for no check checks"
        )
        recovered = run["dp1"].recover(plan)
        assert (recovered.how, bytes(recovered.view)) == ("repaired", bytes_of(run, "dp1", snapshot))
        held.go()
        ground.points.wait_any("node1", "adopt.verify").go()  # its parity
        await_that(lambda: not take_statuses(run.job, [smps[1].control])[0].verifying)
        assert damage_of(run["dp1"]) == (1, 1)


def damage_of(trainer: Trainer) -> tuple[int, int]:
    """Units that a trainer's SMP has found damaged since it started, and how many it has repaired."""
    counts = trainer.client.counters()
    return counts["units_damaged"], counts["units_repaired"]


# ---------------------------------------------------------------------- recovery


class TestALostNode:
    @pytest.mark.parametrize("method", ["chain", "decode"])
    def test_is_rebuilt_by_either_method(self, ground: Ground, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        smps, run = ground.job([[30_000]] * 4, protect="3+1")
        snapshot = run.protect(1)
        smps[1].lose()
        monkeypatch.setenv("HOLDFAST_REBUILD", method)
        spare = ground.smp("spare")
        run.trainers["dp1"] = Trainer(spare, "dp1", 30_000)
        recovered = run["dp1"].recover(run.plan())
        assert (recovered.how, bytes(recovered.view)) == ("rebuilt", bytes_of(run, "dp1", snapshot))
        length = len(recovered.view)
        if method == "chain":
            assert recovered.bytes_fetched == length, "helpers add up, and only the sum comes here"
        else:
            assert 2 * length < recovered.bytes_fetched <= 3 * length
        counts = run["dp1"].client.counters()
        assert counts["bytes_received"] == recovered.bytes_fetched
        assert counts["units_damaged"] == 0


class TestADamagedCopy:
    """A unit that does not match its digest is an erasure, and is recovered from the rest of its stripe."""

    def test_of_its_own_with_too_little_left_to_mend_it_is_dropped_and_the_next_plan_says_so(
        self, ground: Ground
    ) -> None:
        smps, run = ground.job([[9000], [9000], [9000]])
        snapshot = run.protect(1)
        run.write(2)
        run["dp0"].seal(run.snapshot(2))  # this tells its SMP that step 1 is protected
        flip_a_byte(shard_file(smps[1], snapshot, "dp1"))
        smps[2].lose()
        spare = Trainer(ground.smp("spare"), "dp2", 9000)
        plan = run.plan(*(run[coord].client.inventory() for coord in ("dp0", "dp1")), spare.client.inventory())
        assert (plan.snapshot, plan.decoded) == (snapshot, ("dp2",))
        with pytest.raises(DamagedSnapshot, match=r"dp1 of step 1 .*: stripe"):
            run["dp1"].recover(plan)
        inventories = [run["dp0"].client.inventory(), run["dp1"].client.inventory(), spare.client.inventory()]
        assert (snapshot, "dp1") not in inventories[1].shards
        with pytest.raises(Unrecoverable, match=r"step 1 .* node1, node2 .*parity of 1"):
            run.plan(*inventories)

    def test_of_parity_that_was_counted_on_cannot_be_replaced_by_anything_else(self, ground: Ground) -> None:
        smps, run = ground.job([[3000], [3000]])
        snapshot, tag = run.protect(1), run.layout.tag(0)
        run.write(2)
        run["dp0"].seal(run.snapshot(2))  # this tells its SMP that step 1 is protected
        flip_a_byte(parity_file(smps[0], snapshot, tag, 0), 0)
        smps[1].lose()
        spare = Trainer(ground.smp("spare"), "dp1")
        inventories = [run["dp0"].client.inventory(), spare.client.inventory()]
        with pytest.raises(Unrecoverable, match=r"stripe 0 .*: 0 units .* 1 "):
            spare.recover(run.plan(*inventories))
        assert damage_of(run["dp0"]) == (1, 0)
        assert spare.client.inventory().shards == frozenset()


def in_units_of_a_byte(smp: SmpProcess, elements: int) -> Run:
    """A job of one shard in its second epoch, with as many units as bytes."""
    run = run_on([smp], [[elements]])
    run.epoch += 1
    run.layout = replace(run.layout, epoch=run.epoch, unit_bytes=1)
    run["dp0"].client.join(run.epoch)
    run["dp0"].client.configure(run.layout)
    return run


class TestAShardThatIsNotCheckedBeforeItIsGiven:
    """A caller that asks for it unchecked compares each unit with its digest before using it."""

    def test_is_held_as_it_lies_and_mended_in_place_when_it_is_asked_for_again(self, ground: Ground) -> None:
        smps, run = ground.job([[9000]] * 3)
        snapshot = run.protect(1)
        flip_a_byte(shard_file(smps[1], snapshot, "dp1"))
        plan = run.plan()
        client = run["dp1"].client
        given = client.recover(plan.sources, "dp1", check=False)
        assert (given.how, given.bytes_fetched, damage_of(run["dp1"])) == ("held", 0, (0, 0))
        units = range(len(given.digests))
        assert [unit for unit in units if not given.unit(unit).matches()] == [units[-1]]
        repaired = client.recover(plan.sources, "dp1")
        assert (repaired.how, repaired.digests) == ("repaired", given.digests)
        assert all(given.unit(unit).matches() for unit in units), "it is the same memory"
        assert given.view == bytes_of(run, "dp1", snapshot)

    @pytest.mark.parametrize("check", [None, 1, "no", []])
    def test_is_asked_for_by_true_or_false(self, lone: SmpProcess, check: object) -> None:
        run = next_run_on(lone)
        run.protect(1)
        plan = run.plan(run["dp0"].client.inventory())
        with pytest.raises(ProtocolError, match="check"):
            run["dp0"].client.recover(plan.sources, "dp0", check=check)  # type: ignore[arg-type]

    def test_with_more_digests_than_a_message_has_room_for_is_refused_and_the_connection_goes_on(
        self, ground: Ground
    ) -> None:
        run = in_units_of_a_byte(ground.smp(), MAX_DIGESTS // 4)
        run.protect(1)
        client, count = run["dp0"].client, run["dp0"].form.total_bytes
        inventory = client.inventory()
        with pytest.raises(ConfigError, match=rf"dp0 has {count} units .*{MAX_DIGESTS} digests"):
            client.recover(run.plan(inventory).sources, "dp0", check=False)
        assert client.inventory() == inventory

    def test_with_as_many_digests_as_a_message_has_room_for_is_given(self, ground: Ground) -> None:
        run = in_units_of_a_byte(ground.smp(), MAX_DIGESTS // 5)
        image = bytes_of(run, "dp0", run.protect(1))
        client = run["dp0"].client
        shard = client.recover(run.plan(client.inventory()).sources, "dp0", check=False)
        assert 0.95 * MAX_DIGESTS < len(shard.digests) <= MAX_DIGESTS
        assert shard.digests == digest_units(memoryview(image), 1)


# ---------------------------------------------------------------------- memory


class TestRelease:
    def test_the_protected_snapshot_cannot_be_given_up(self, lone: SmpProcess) -> None:
        run = next_run_on(lone)
        first = run.protect(1)
        run["dp0"].write(run.snapshot(2), [], first)
        with pytest.raises(ProtocolError, match=r"step 1 .* be kept"):
            run["dp0"].seal(run.snapshot(2))
        assert (first, "dp0") in run["dp0"].client.inventory().shards

    def test_what_is_not_kept_is_freed_and_what_is_kept_is_not(self, lone: SmpProcess) -> None:
        run = next_run_on(lone)
        first, second, third = (run.snapshot(step) for step in (1, 2, 3))
        for snapshot in (first, second, third):
            run["dp0"].take(snapshot, [first, second])
        with pytest.raises(NoFreeSlot, match=r"step 1 .*step 2 .*step 3 "):
            run["dp0"].write(run.snapshot(4), [first, second, third])
        run["dp0"].write(run.snapshot(4), [first, third])
        assert run["dp0"].client.inventory().shards == {(first, "dp0"), (third, "dp0")}
        assert shard_file(lone, first, "dp0").read_bytes() == bytes_of(run, "dp0", first)

    def test_memory_is_flat_over_fifty_snapshots(self, ground: Ground) -> None:
        smps, run = ground.job([[3000], [5000]])
        memory = set()
        for step in range(50):
            run.protect(1 + step)
            if step >= 2:
                memory.add(tuple(memory_of(smp.arena) for smp in smps))
        assert len(memory) == 1, memory
        slots = 3 * (run["dp0"].form.total_bytes + run.layout.stripes(0).parity_bytes(0))
        assert slots <= memory.pop()[0] <= slots + (64 << 10)

    def test_a_new_layout_gets_its_memory_and_the_old_one_gives_it_back(self, ground: Ground) -> None:
        [smp], small = ground.job([[1000]])
        kept = small.protect(1)
        large = Run([Trainer(smp, "dp0", 9000)])
        large.protected = kept
        large.start(2)
        large.protect(2)
        assert (kept, "dp0") in large["dp0"].client.inventory().shards
        large.protect(3)
        inventory = large["dp0"].client.inventory()
        assert inventory.shards == {(large.snapshot(2), "dp0"), (large.snapshot(3), "dp0")}
        assert list(inventory.layouts) == [(2, 0)]
        lengths = [path.stat().st_size for path in smp.arena.glob("dp0.*.safetensors")]
        assert lengths == [large["dp0"].form.total_bytes] * 3


class TestTooLittleMemory:
    def test_a_layout_that_does_not_fit_is_refused_and_nothing_is_taken(self, ground: Ground) -> None:
        smp = ground.prepare()
        ground.on_end.enter_context(mounted(smp.arena.parent, "1m"))
        smp.launch().wait_ready()
        big = Run([Trainer(smp, "dp0", 200_000)])
        with pytest.raises(ArenaTooSmall, match=r"[\d,]+ bytes more .* [\d,]+ left"):
            big.start()
        assert not list(smp.arena.glob("*.safetensors"))
        fitting = Run([Trainer(smp, "dp0", 10_000)]).start()
        fitting.protect(1)


# ---------------------------------------------------------------------- starting and ending


class TestWhatCannotBeServedIsRefused:
    def start(self, ground: Ground, *more: str, arena: Path | None = None, job: str = "testrun") -> HoldfastError:
        """The error of an SMP that does not start. If an option is given twice, the later one counts."""
        arena = arena or ground.base / "refused" / job
        return refusal([*smp_command(job, "node0", arena, ground.host()), *more])

    @pytest.mark.parametrize("option", ["--port", "--bulk-port"])
    def test_a_port_that_is_taken(self, ground: Ground, option: str) -> None:
        host = ground.host()
        with socket.create_server((host, 0)) as taken:
            port = taken.getsockname()[1]
            error = self.start(ground, option, str(port), "--host", host)
        assert type(error) is ConfigError
        assert f"cannot listen on {host}:{port}" in str(error)
        assert f" {option}" in str(error)

    def test_an_arena_that_another_smp_owns(self, ground: Ground) -> None:
        owner = ground.smp()
        error = self.start(ground, arena=owner.arena)
        assert type(error) is ArenaInUse
        assert f"owns the arena {owner.arena}" in str(error)
        assert owner.client().pid == owner.owner.pid

    @pytest.mark.parametrize("what", ["job", "node"])
    def test_an_arena_of_another(self, ground: Ground, what: str) -> None:
        smp = ground.smp()
        run_on([smp], [[3000]]).protect(1)
        smp.kill()
        option = ["--node", "node7"] if what == "node" else []
        error = self.start(ground, *option, arena=smp.arena, job="otherun" if what == "job" else smp.job)
        assert isinstance(error, ConfigError | ProtocolError)
        assert all(word in str(error) for word in ("'testrun'", "'node0'"))
        assert "holdfast gc" not in str(error)  # it may hold the only copy
        assert ("HOLDFAST_NODE=node0" in str(error)) is (what == "node")
        assert smp.launch().wait_ready().client().inventory().shards == {(SnapshotId(1, 1), "dp0")}

    @pytest.mark.parametrize("host", ["localhost", "256.0.0.1", "node-7", "127.1", ""])
    def test_a_host_that_is_no_address(self, ground: Ground, host: str) -> None:
        error = self.start(ground, "--host", host)
        assert type(error) is ConfigError
        assert repr(host) in str(error) and "IP address" in str(error)

    @pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1"])
    def test_a_host_off_loopback_unless_it_is_asked_for(self, ground: Ground, host: str) -> None:
        error = self.start(ground, "--host", host)
        assert type(error) is ConfigError
        assert "say --insecure" in str(error)

    def test_a_relative_arena_is_taken_from_where_it_was_said(self, ground: Ground) -> None:
        command = [*smp_command("testrun", "node0", Path("here"), ground.host()), "--owner-pid", str(os.getpid())]
        with started(command, cwd=ground.base) as process:
            assert "ready" in read_line(process.stdout)
            client = SmpClient(ground.base / "here", "testrun")
            client.join(1)
            client.finish(1)
            assert process.wait(DEADLINE_S) == 0
        assert not (ground.base / "here").exists()


WAITING = [sys.executable, "-c", "input()"]
"""A process that does nothing."""


class TestTheEnd:
    def test_finish_removes_the_arena_and_ends_the_process(self, ground: Ground) -> None:
        smps, run = ground.job([[3000], [3000]])
        run.protect(1)
        for trainer, smp in zip(run, smps, strict=True):
            trainer.client.finish(1)
            assert not smp.arena.exists()
            assert smp.wait_end() == 0

    def test_finish_turns_away_whoever_is_still_connected(self, ground: Ground) -> None:
        [smp], run = ground.job([[3000]])
        other = smp.client()
        run["dp0"].client.finish(1)
        with pytest.raises(SmpUnavailable):
            other.inventory()
        assert smp.wait_end() == 0

    def test_it_may_be_gone_before_its_answer_is_on_the_way(self, ground: Ground) -> None:
        arena = ground.base / "arena"
        arena.mkdir()
        Board(arena / "board", create=True)
        with started(WAITING) as process:
            listener = SocketListener(bind_unix(socket_path(arena)), lambda sock: Hasty(process))
            with closing(listener):
                SmpClient(arena, "testrun").finish(1)
                assert process.poll() is not None

    def test_when_its_owner_is_gone_it_ends_too(self, ground: Ground) -> None:
        smp = ground.prepare()
        with started(WAITING) as owner:
            smp.owner_pid = owner.pid
            smp.launch().wait_ready()
            run_on([smp], [[3000]]).protect(1)
            owner.kill()
            assert smp.wait_end() == 0
        assert not smp.arena.exists()

    def test_when_its_owner_was_gone_before_it_ends_at_once(self, ground: Ground) -> None:
        with subprocess.Popen([sys.executable, "-c", ""]) as owner:
            owner.wait(DEADLINE_S)
        smp = ground.prepare()
        smp.owner_pid = owner.pid
        smp.launch().wait_ready()
        assert smp.wait_end() == 0
        assert not smp.arena.exists()


class Hasty:
    """An SMP that ends before it answers when it is told to end."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def answer(self, message: Message, payload: int, stream: SocketStream) -> tuple[Message, None]:
        if message["op"] == "finish":
            stream.close()
            self._process.kill()
        said = {"node": "node0", "pid": self._process.pid, "row": None, "speaks": spoken(), "release": RELEASE}
        return said, None

    def ended(self) -> None:
        pass


class TestTheKit:
    def test_it_notices_an_smp_that_is_left(self) -> None:
        ground = Ground(grace_s=0.1)
        smp = ground.prepare()
        command = [*smp_command("testrun", "node0", smp.arena, smp.host), "--owner-pid", str(os.getpid())]
        with started(command) as stray:
            read_line(stray.stdout)
            with pytest.raises(LeftBehind, match=f"process {stray.pid} was left"):
                ground.close()
        assert not ground.base.exists()

    def test_it_notices_an_smp_with_a_bug(self) -> None:
        ground = Ground()
        ground.prepare()
        (ground.base / "node0.stderr").write_text("Traceback (most recent call last):\nKeyError: 'x'\n")
        with pytest.raises(LeftBehind, match="node0: Traceback"):
            ground.close()
        assert not ground.base.exists()

    def test_it_ends_and_removes_what_a_failing_test_has_started(self) -> None:
        with pytest.raises(ZeroDivisionError), playground() as ground:
            smp = ground.smp()
            run_on([smp], [[100]]).write(1)
            _ = 1 / 0
        assert smp.process.returncode is not None
        assert not ground.base.exists()
