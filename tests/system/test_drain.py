"""A node that is to be taken away: its data is moved first, and nothing is left half done if a node dies meanwhile."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest

from holdfast.cli.drain import sentence
from holdfast.cli.main import main
from holdfast.smp_daemon.coding.moving import Monitor
from holdfast.smp_daemon.coding.regroup import Drained, moved, plan_regroup
from holdfast.smp_daemon.net.peers import PeerClient
from holdfast.smp_daemon.ops.overview import look
from holdfast.smp_daemon.shared.addresses import parse_spares
from holdfast.smp_daemon.shared.errors import ConfigError, SmpUnavailable, Unrecoverable
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.paths import read_owner
from holdfast.smp_daemon.shared.plain import decode_json, encode_json
from holdfast.smp_daemon.shared.plan import plan_restore
from holdfast.smp_daemon.shared.sources import Address
from holdfast.smp_daemon.shared.starts import Start
from holdfast.smp_daemon.shared.system import MACHINE
from holdfast.smp_daemon.storage.store import Store
from tests.deadlines import DEADLINE_S, await_that
from tests.smp_kit import JOB, Ground, Trainer, stopped
from tests.system.test_regroup import SNAPSHOT, carried_out, come_back, everything, layout_of, leave, planned, started

SLOW = pytest.mark.slow


def with_leaving(inventories: Sequence[Inventory], names: Collection[str]) -> list[Inventory]:
    return [replace(inventory, leaving=inventory.node in names) for inventory in inventories]


class TestThePlan:
    @pytest.mark.parametrize(
        ("nodes", "data", "parity"),
        [(4, 3, 1), (4, 2, 2), (5, 2, 1), (6, 4, 2), (2, 1, 1), (4, 1, 1), (12, 2, 1), (3, 3, 0)],
    )
    def test_whoever_leaves_the_others_hold_everything_and_are_protected(
        self, nodes: int, data: int, parity: int
    ) -> None:
        layout = layout_of(nodes, data, parity)
        names = [node.name for node in layout.nodes]
        for count in (1, 2):
            for gone in combinations(names, count):
                if nodes - count < 1:
                    continue
                held = with_leaving(everything(layout), gone)
                assert moved(held) is None
                regrouping = planned(held)
                assert not {node.name for node in regrouping.layout.nodes} & set(gone)
                assert sorted(regrouping.layout.coords) == sorted(layout.coords)
                after = with_leaving(carried_out(held, regrouping), gone)
                done = moved(after)
                assert done is not None
                assert done.snapshot == SNAPSHOT
                assert not set(done.holders) & set(gone)
                assert plan_regroup(after) is None
                rest = [inventory for inventory in after if inventory.node not in gone]
                assert done.tolerates >= min(parity, len(rest) - 1)
                for lost in combinations(rest, min(done.tolerates, 2)):
                    assert plan_restore([inv for inv in rest if inv not in lost], layout.coords) is not None

    def test_groups_without_the_one_that_leaves_are_left_alone(self) -> None:
        layout = layout_of(12, 2, 1)
        regrouping = planned(with_leaving(everything(layout), {"node4"}))
        assert len(regrouping.nodes) == 5

    def test_a_spare_takes_over_all_that_the_one_that_leaves_held(self) -> None:
        layout = layout_of(4, 3, 1, per_node=2)
        spare = Inventory("spare", "10.0.0.9", 1, 2, epoch=SNAPSHOT.epoch)
        held = with_leaving([*everything(layout), spare], {"node2"})
        regrouping = planned(held)
        assert [shard.coord for shard in regrouping.layout.node("spare").shards] == ["dp4", "dp5"]

    def test_a_spare_changes_nothing_where_nobody_leaves(self) -> None:
        layout = layout_of(4, 3, 1)
        assert plan_regroup([*everything(layout), Inventory("spare", "10.0.0.9", 1, 2, epoch=SNAPSHOT.epoch)]) is None

    def test_the_loss_of_another_is_planned_around(self) -> None:
        layout = layout_of(5, 3, 1)
        held = with_leaving(everything(layout, but={"node0"}), {"node3"})
        regrouping = planned(held)
        assert {node.name for node in regrouping.layout.nodes} == {"node1", "node2", "node4"}
        assert moved(with_leaving(carried_out(held, regrouping), {"node3"})) is not None

    def test_a_node_that_is_needed_for_what_is_lost_may_not_go(self) -> None:
        held = with_leaving(everything(layout_of(4, 3, 1), but={"node0", "node1"}), {"node3"})
        with pytest.raises(Unrecoverable, match="others back"):
            moved(held)

    def test_where_nothing_was_ever_held_it_may(self) -> None:
        empty = moved([Inventory("node0", "10.0.0.1", 1, 2, leaving=True)])
        assert empty is not None
        assert empty.snapshot is None


def test_a_spare_is_an_address() -> None:
    assert parse_spares("") == ()
    assert parse_spares("10.0.0.7:4711, host:1") == (("10.0.0.7", 4711), ("host", 1))
    for bad in ("10.0.0.7", ":1", "host:0", "host:65536", "host:http"):
        with pytest.raises(ConfigError, match="say HOST:PORT"):
            parse_spares(bad)


def test_the_sentence_says_what_the_others_stand() -> None:
    done = Drained(SNAPSHOT, ("node0", "node2"), 1)
    assert re.search("by node0, node2, .*safe .* 1 more ", sentence("node1", done))
    assert "would lose it" in sentence("node1", replace(done, tolerates=0))
    assert "2 more nodes" in sentence("node1", replace(done, tolerates=2))
    assert "no snapshot" in sentence("node1", replace(done, snapshot=None))
    assert decode_json(Drained, encode_json(done), "") == done


# ---------------------------------------------------------------------- real SMPs


def drain(ground: Ground, *arguments: str) -> int:
    return main(["drain", "--arena", str(ground.base), *arguments])


class TestANodeThatIsDrained:
    @pytest.mark.parametrize(
        ("nodes", "protect", "leaver"),
        [(4, "3+1", 1), pytest.param(5, "3+2", 0, marks=SLOW), pytest.param(3, "copies:1", 2, marks=SLOW)],
    )
    @pytest.mark.proves("a-node-must-go")
    def test_is_not_missed_and_neither_is_one_more(
        self, ground: Ground, nodes: int, protect: str, leaver: int, capsys: pytest.CaptureFixture[str]
    ) -> None:
        smps, run = started(ground, nodes, protect)
        assert drain(ground, f"node{leaver}", "--json", "-") == 0
        report = json.loads(capsys.readouterr().out)
        assert report["snapshot"] == list(run.protected or ())
        assert report["holders"] == [f"node{i}" for i in range(nodes) if i != leaver]
        assert smps[leaver].wait_end() == 0
        assert not smps[leaver].arena.exists(), "its memory is free for another job"
        other = (leaver + 1) % nodes
        smps[other].lose()
        come_back(run, smps, [leaver, other])

    @pytest.mark.proves("a-node-must-go")
    def test_leaves_its_bytes_to_a_spare(self, ground: Ground) -> None:
        smps, run = started(ground, 4, "3+1")
        spare = ground.smp("spare")
        assert drain(ground, "node2", "--to", "{}:{}".format(*spare.control)) == 0
        held = {coord for snapshot, coord in spare.client().inventory().shards if snapshot == run.protected}
        assert held == {"dp2"}
        smps[2].lose()
        smps[0].lose()
        spare.name, smps[2] = "node2", spare  # the rank of node2 continues there
        come_back(run, smps, [0])

    @pytest.mark.parametrize("deadline", ["10min", "24h"])
    def test_in_a_job_without_parity_leaves_its_bytes_too(self, ground: Ground, deadline: str) -> None:
        smps, run = started(ground, 3, "none")
        assert drain(ground, "node0", "--deadline", deadline) == 0
        smps[0].lose()
        come_back(run, smps, [0])

    def test_without_anybody_else_stays(self, ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
        (smp,), _ = started(ground, 1, "auto")
        assert drain(ground, "node0") == 2
        assert "no other SMP" in capsys.readouterr().err
        assert not smp.client().inventory().leaving

    def test_goes_at_once_if_its_run_is_given_up(self, ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
        (smp,), run = started(ground, 1, "auto")
        assert run.protected is not None
        assert main(["give-up", "--arena", str(ground.base)]) == 0
        capsys.readouterr()
        assert drain(ground, "node0", "--deadline", "10s", "--json", "-") == 0
        assert json.loads(capsys.readouterr().out)["snapshot"] is None
        assert smp.wait_end() == 0

    def test_trainers_hold_still_for_as_long_as_the_bytes_of_the_node_may_take(
        self, ground: Ground, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _, run = ground.job([[3000], [3000]], protect="1+1")
        client, sent = run["dp0"].client, list[Any]()
        monkeypatch.setattr(client, "_call", lambda message, deadline_s: sent.append((message.deadline_s, deadline_s)))
        for length in (1000, 10**12):
            with (client.arena / "slot.of-a-large-node").open("wb") as file:
                file.truncate(length)
            client.leave(DEADLINE_S)
        (least, waits), (most, longest) = sent
        assert least < waits < 1000
        assert 10_000 < most < longest

    def test_asks_trainers_to_end_and_hands_over_while_they_hold_still(self, ground: Ground) -> None:
        smps, run = ground.job([[3000 + i] for i in range(3)], protect="2+1")
        run.protect(1)
        run.protect(2)
        trainer = run["dp1"]
        draining = ground.meanwhile(drain, ground, "node1")
        await_that(lambda: trainer.client.board.leaving)
        assert not run["dp0"].client.board.leaving
        trainer.client.leave(DEADLINE_S)
        held = {coord for name in ("dp0", "dp2") for _, coord in run[name].client.inventory().shards}
        assert held == {"dp0", "dp1", "dp2"}
        leave(run)
        assert draining.result(DEADLINE_S) == 0
        assert smps[1].wait_end() == 0
        smps[2].lose()
        come_back(run, smps, [1, 2])

    def test_stays_if_the_job_starts_with_it_again(self, ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
        _, run = ground.job([[3000]] * 2)
        run.protect(1)
        draining = ground.meanwhile(drain, ground, "node1")
        client = run["dp1"].client
        await_that(lambda: client.board.leaving)
        client.join(run.epoch + 1, Start(run.epoch + 1, 1))
        assert draining.result(DEADLINE_S) == 2
        assert "started again with node1" in capsys.readouterr().err
        assert not client.inventory().leaving

    def test_waits_for_the_job_to_stop_if_asked_to(self, ground: Ground) -> None:
        smps, run = ground.job([[3000]] * 3, protect="2+1")
        run.protect(1)
        run.protect(2)
        waiting = ground.meanwhile(drain, ground, "node1", "--wait")
        await_leaving(run["dp1"])
        assert look(JOB, smps[0].control).leaving == ["node1"]
        leave(run)
        assert waiting.result(DEADLINE_S) == 0
        assert smps[1].wait_end() == 0

    def test_that_nobody_knows_is_an_error(self, ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
        started(ground, 2, "auto")
        assert drain(ground, "node7") == 3
        assert "there are node0, node1" in capsys.readouterr().err
        assert drain(ground, "node1", "--at", "127.0.0.1:1") == 2
        assert "--at needs --job" in capsys.readouterr().err
        assert drain(ground, "node1", "--job", "job", "--at", "127.0.0.1:1,127.0.0.1:2") == 2
        assert "2 SMPs: name one" in capsys.readouterr().err


def test_a_drain_takes_at_most_as_long_as_its_message_may_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", "node0", "--deadline", "25h"]) == 2
    assert "--deadline: '25h' is longer" in capsys.readouterr().err


class Silent(PeerClient):
    """A client whose peers never answer."""

    def ask(self, address: Address, *arguments: object, **more: object) -> NoReturn:
        raise SmpUnavailable(f"{address} does not answer")


def test_a_drain_that_reaches_no_node_of_the_layout_is_an_error() -> None:
    store = SimpleNamespace(
        node="spare", job="job", network=MACHINE, state=SimpleNamespace(newest_layout=lambda: layout_of(2, 1, 1))
    )
    with Silent("job") as peers:
        monitor = Monitor(cast(Store, store), peers, 0.0, lambda: 0)
        try:
            with pytest.raises(SmpUnavailable, match="layout answers: node0, node1"):
                monitor.move((), DEADLINE_S, still=False)
        finally:
            monitor.close()


def await_leaving(trainer: Trainer) -> None:
    """Block until the SMP of a trainer says that it is leaving; each poll is a request with a reply."""
    await_that(lambda: trainer.client.inventory().leaving)


class TestInTheMiddleOfADrain:
    @pytest.mark.parametrize("point", ["regroup.adopt", pytest.param("regroup.encode", marks=SLOW)])
    def test_another_may_be_lost(self, ground: Ground, point: str) -> None:
        smps, run = started(ground, 5, "3+2", at={3: point})
        draining = ground.meanwhile(drain, ground, "node1")
        ground.points.wait("node3", point, 2)
        smps[3].lose()
        assert draining.result(DEADLINE_S) == 0
        smps[1].lose()
        smps[4].lose()
        come_back(run, smps, [1, 3, 4])

    @pytest.mark.parametrize("leaver", [pytest.param(0, marks=SLOW), 2])
    @pytest.mark.parametrize("point", [pytest.param("regroup.adopt", marks=SLOW), "regroup.encode"])
    def test_the_leaving_one_may_be_lost(self, ground: Ground, leaver: int, point: str) -> None:
        smps, run = started(ground, 4, "3+1", at={1: point})
        draining = ground.meanwhile(drain, ground, f"node{leaver}")
        held = ground.points.wait("node1", point, 2)
        smps[leaver].lose()
        held.go()
        assert draining.result(DEADLINE_S) == 4
        come_back(run, smps, [leaver])

    @SLOW
    def test_the_one_in_charge_may_be_lost(self, ground: Ground) -> None:
        smps, run = started(ground, 5, "3+1", at={0: "regroup.encode"})
        draining = ground.meanwhile(drain, ground, "node2")
        ground.points.wait("node0", "regroup.encode", 2)
        smps[0].lose()
        assert draining.result(DEADLINE_S) == 0
        smps[2].lose()
        come_back(run, smps, [0, 2])

    @SLOW
    def test_one_that_is_silent_is_not_put_in_charge(self, ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
        """As one that has lost power: its connections are still there."""
        monkeypatch.setenv("HOLDFAST_REGROUP_AFTER", "1h")
        smps, run = started(ground, 4, "3+1")
        await_that(
            lambda: any(
                "node0" in each.leases for each in look(JOB, smps[2].control).statuses if each.inventory.node == "node2"
            )
        )
        with stopped(smps[0]):
            assert drain(ground, "node2", "--deadline", "30s") == 0
        smps[0].lose()
        smps[2].lose()
        come_back(run, smps, [0, 2])


class TestSigterm:
    def test_drains_and_then_ends(self, ground: Ground) -> None:
        smps, run = started(ground, 4, "3+1")
        smps[0].process.send_signal(signal.SIGTERM)
        assert smps[0].wait_end() == 0
        smps[0].lose()
        smps[3].lose()
        come_back(run, smps, [0, 3])

    def test_of_one_with_nothing_to_move_ends_it_at_once(self, ground: Ground) -> None:
        smp = ground.smp()
        smp.process.send_signal(signal.SIGTERM)
        assert smp.wait_end() == 0
        assert read_owner(smp.arena) is not None

    def test_ends_it_within_its_grace_whatever_trainers_do(
        self, ground: Ground, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOLDFAST_GRACE", "1s")
        smps, run = ground.job([[3000]] * 2)
        snapshot = run.protect(1)
        smps[0].process.send_signal(signal.SIGTERM)
        assert smps[0].wait_end() == 0
        smps[0].launch().wait_ready()
        assert (snapshot, "dp0") in smps[0].client().inventory().shards

    def test_twice_ends_it_at_once(self, ground: Ground) -> None:
        smps, run = ground.job([[3000]] * 2)
        run.protect(1)
        smps[0].process.send_signal(signal.SIGTERM)
        await_leaving(run["dp0"])
        smps[0].process.send_signal(signal.SIGTERM)
        assert smps[0].process.wait(DEADLINE_S) == 0

    def test_without_grace_is_what_it_is_to_others(self, ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOLDFAST_GRACE", "0")
        smp = ground.smp()
        smp.process.send_signal(signal.SIGTERM)
        assert smp.wait_end() == -signal.SIGTERM
