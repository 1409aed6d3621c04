"""Kills and freezes at every named point of the protocol, on real processes: a restart brings back one whole step."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.chaos.accounting import beyond_access_times, wait_until_dead
from holdfast.chaos.cluster import History, JobFailed, VirtualCluster
from holdfast.chaos.launcher import Launcher
from holdfast.chaos.node import VirtualNode
from holdfast.chaos.runner import Event, Wiring
from holdfast.smp_daemon.shared.paths import arena_base
from tests.proof.chaos.cluster import ChaosCluster
from tests.proof.chaos.faults import Fault
from tests.proof.chaos.network.namespaces import unavailable

pytestmark = pytest.mark.cluster
STEPS = 9


def make(launcher: Launcher, *, nodes: int = 3, ranks: int = 1, **options: Any) -> ChaosCluster:
    place: Callable[[int, int], int] | None = options.pop("place", None)
    on_event: Callable[[Event], None] = options.pop("on_event", lambda event: None)
    environment = options.pop("environment", {})
    args = {"steps": options.pop("steps", STEPS), "skew": options.pop("skew", 1000), "options": options}
    args["environment"] = environment
    return ChaosCluster(
        launcher,
        nodes=nodes,
        ranks_per_node=ranks,
        target="tests.jobs:stamped",
        args=args,
        deadline_s=90,
        place=place,
        on_event=on_event,
    )


def assert_whole(history: History, ranks: int, *, least: int, steps: int = STEPS) -> None:
    """Each start is from one step, the same on every rank and not older than `least`; and the job reached its end."""
    for generation in range(1, len(history.restarts) + 1):
        started = history.of("started", generation=generation)
        if len(started) < ranks:
            continue  # killed again during the start
        step = started[0]["step"]
        assert step >= least
        assert [event["stamps"] for event in started] == [[float(step)]] * ranks
    ends = history.of("end")
    assert [event["stamps"] for event in ends] == [[float(steps)]] * ranks
    assert history.leaks == []
    assert history.disk_bytes_written == 0


@pytest.mark.parametrize("point", ["copy.before", "copy.middle", "copy.done", "train.step"])
@pytest.mark.proves("any-instruction", "trainers-die")
def test_a_trainer_killed_at_any_point_of_a_copy_leaves_a_whole_step(launcher: Launcher, point: str) -> None:
    cluster = make(launcher)
    cluster.kill_trainer(1, at=point, step=5)
    history = cluster.run()
    assert_whole(history, 3, least=3)
    assert {e["how"] for e in history.of("started", generation=1)} == {"held"}


@pytest.mark.parametrize(
    "point", ["copy.before", "copy.middle", "copy.done", "train.step", "seal.done", "encode.middle"]
)
@pytest.mark.proves("nodes-are-lost")
def test_a_node_lost_at_any_point_is_rebuilt(launcher: Launcher, point: str) -> None:
    cluster = make(launcher)
    cluster.kill_node(1, at=point, step=5)
    history = cluster.run()
    assert_whole(history, 3, least=3)
    assert sorted(e["how"] for e in history.of("started", generation=1)) == ["held", "held", "rebuilt"]


@pytest.mark.parametrize("options", [{}, {"protect_every": 2}, {"every": 3}])
@pytest.mark.proves("drained-while-it-trains")
def test_a_node_that_is_drained_while_the_job_trains_costs_no_step(launcher: Launcher, options: dict[str, Any]) -> None:
    cluster = make(launcher, steps=16, **options)
    cluster.drain_node(1, at="train.step", step=4)
    history = cluster.run()
    (drained,) = history.of("drained")
    last = max(event["step"] for event in history.of("step", generation=0))
    assert_whole(history, 3, least=last, steps=16)
    assert {event["step"] for event in history.of("started", generation=1)} == {last}
    assert drained["result"]["snapshot"][1] == last
    assert sorted(drained["result"]["holders"]) == ["node0", "node2"]
    assert sorted(e["how"] for e in history.of("started", generation=1)) == ["fetched", "held", "held"]


def test_a_trainer_that_is_told_by_a_signal_ends_at_a_boundary_with_the_others(launcher: Launcher) -> None:
    cluster = make(launcher, steps=16, environment={"HOLDFAST_LEAVE_ON": "TERM"})
    cluster.add(Fault("rank1", "train.step", 4, "term-trainer", (1,)))
    history = cluster.run()
    last = max(event["step"] for event in history.of("step", generation=0))
    assert_whole(history, 3, least=last, steps=16)
    assert {event["step"] for event in history.of("started", generation=1)} == {last}
    assert all(event["status"] != -signal.SIGTERM for event in history.of("exit", generation=0))


@pytest.mark.parametrize("protect", ["2+2", "copies:2"])
@pytest.mark.proves("nodes-are-lost")
def test_two_nodes_of_one_group_lost_at_once_are_within_two_parities(launcher: Launcher, protect: str) -> None:
    cluster = make(launcher, nodes=4, protect=protect)
    cluster.kill_node(1, 2, at="train.step", step=6)
    history = cluster.run()
    assert_whole(history, 4, least=3)
    assert sorted(e["how"] for e in history.of("started", generation=1)) == ["held", "held", "rebuilt", "rebuilt"]


@pytest.mark.parametrize(("protect", "lost"), [("2+2", (0, 1, 3)), ("auto", (1, 2))])
@pytest.mark.proves("too-many-are-lost")
def test_more_nodes_of_one_group_than_it_has_parities_are_beyond_them_and_the_error_names_them(
    launcher: Launcher, protect: str, lost: tuple[int, ...]
) -> None:
    cluster = make(launcher, nodes=4, protect=protect)
    cluster.kill_node(*lost, at="train.step", step=6)
    names = ", ".join(f"node{number}" for number in lost)
    with pytest.raises(JobFailed, match=rf"Unrecoverable: step \d+ .* {names}"):
        cluster.run()


@pytest.mark.proves("sealed-only")
def test_an_unfinished_encoding_is_never_used(launcher: Launcher) -> None:
    cluster = make(launcher)
    cluster.freeze("smp0", at="encode.middle", step=4)
    cluster.kill_node(1, at="train.step", step=6)
    history = cluster.run()
    assert_whole(history, 3, least=3)
    assert history.of("started", generation=1)[0]["step"] == 3


@pytest.mark.proves("sealed-only")
def test_a_sealed_but_unencoded_step_survives_the_trainer_but_not_the_node(launcher: Launcher) -> None:
    cluster = make(launcher)
    cluster.freeze("smp2", at="seal.done", step=4)
    cluster.kill_trainer(0, at="train.step", step=5)
    history = cluster.run()
    assert_whole(history, 3, least=3)


@pytest.mark.parametrize(("nodes", "loses"), [(3, False), (4, True)])
@pytest.mark.proves("renumbered")
def test_ranks_renumbered_over_the_nodes_find_their_shards(launcher: Launcher, nodes: int, loses: bool) -> None:
    """Also if a node is lost at once."""
    cluster = make(launcher, nodes=nodes, place=lambda generation, rank: (rank + generation) % nodes)
    (cluster.kill_node if loses else cluster.kill_trainer)(2 * loses, at="train.step", step=5)
    history = cluster.run()
    assert_whole(history, nodes, least=3)
    assert sorted(e["how"] for e in history.of("started", generation=1)) == ["fetched"] * 3 + ["rebuilt"] * loses


@pytest.mark.proves("repaired-parity")
def test_a_second_node_may_be_lost_once_the_first_is_repaired(launcher: Launcher) -> None:
    cluster = make(launcher, nodes=4)
    cluster.kill_node(0, at="train.step", step=5)
    cluster.kill_node(2, at="repair_parity.done", by="smp0")
    history = cluster.run()
    assert len(history.restarts) == 2
    assert_whole(history, 4, least=3)


def test_a_job_that_fails_says_which_smp_had_ended_by_itself(launcher: Launcher) -> None:
    def crash(event: Event) -> None:
        if event["kind"] == "step" and event["step"] == 4 and event["rank"] == 1:
            node = cluster._nodes[1]
            os.kill(node.pid, signal.SIGSEGV)
            wait_until_dead(node.pid, 10)

    cluster = make(launcher, on_event=crash)
    cluster.kill_trainer(0, at="train.step", step=6)
    # faulthandler prints "Current thread" only if the signal reached a thread of Python.
    with pytest.raises(JobFailed, match=r"(?s)node1 .*status -11.*Segmentation fault.*0x\w+"):
        cluster.run()


@pytest.mark.proves("an-smp-dies")
def test_an_smp_that_dies_is_replaced_in_its_arena_without_the_trainers_noticing(launcher: Launcher) -> None:
    cluster = make(launcher)
    cluster.kill_smp(1, at="train.step", step=4)
    history = cluster.run()
    assert history.restarts == []
    assert_whole(history, 3, least=0)
    assert max(e["protected"] or 0 for e in history.of("step")) > 4


def test_two_trainers_on_a_node_and_uneven_shards(launcher: Launcher) -> None:
    cluster = make(launcher, nodes=3, ranks=2)
    cluster.kill_trainer(4, at="copy.middle", step=3)
    cluster.kill_node(0, at="train.step", step=7)
    history = cluster.run()
    assert_whole(history, 6, least=1)
    assert len(history.restarts) == 2


def test_a_job_that_fails_by_itself_leaves_nothing_and_shows_its_log(launcher: Launcher) -> None:
    cluster = make(launcher, protect="nonsense")
    with pytest.raises(JobFailed, match="protect='nonsense': say 'auto'"):
        cluster.run()
    assert not list(arena_base().glob(f".virtual-{os.getpid()}-*"))


def test_a_fault_that_never_happens_is_an_error(launcher: Launcher) -> None:
    cluster = make(launcher, steps=2)
    cluster.kill_trainer(0, at="train.step", step=99)
    with pytest.raises(Exception, match="ended before"):
        cluster.run()


def test_access_times_are_no_writes_and_snapshots_would_be() -> None:
    assert [beyond_access_times(count) for count in (0, 4096, 16 * 4096, 17 * 4096)] == [0, 0, 0, 17 * 4096]


@pytest.mark.proves("no-disk")
def test_a_job_that_writes_to_disk_is_noticed(launcher: Launcher, tmp_path: Path) -> None:
    cluster = VirtualCluster(
        launcher,
        nodes=1,
        ranks_per_node=1,
        target="tests.jobs:writes",
        args={"path": str(tmp_path / "file")},
        smps=False,
    )
    assert cluster.run().disk_bytes_written >= 1 << 20


def replicas(launcher: Launcher, *, snapshots: bool) -> VirtualCluster:
    """Two replicas: with more, DDP adds gradients in another order in the first step after a start than later."""
    return VirtualCluster(
        launcher,
        nodes=2,
        ranks_per_node=1,
        target="tests.jobs:replicated",
        args={"steps": STEPS, "snapshots": snapshots},
        smps=snapshots,
    )


def test_replicas_keep_one_copy_among_them_and_each_gets_all_of_it_back(launcher: Launcher) -> None:
    undisturbed = replicas(launcher, snapshots=False).run().of("end")
    cluster = replicas(launcher, snapshots=True)
    cluster.kill_trainer(1, at="train.step", step=4)
    cluster.kill_node(1, at="train.step", step=7)
    history = cluster.run()
    for generation in (1, 2):
        started = history.of("started", generation=generation)
        assert len({(event["step"], event["digest"]) for event in started}) == 1
        assert started[0]["step"] >= 2
    ends = history.of("end")
    assert len(ends) == len(undisturbed) == 2
    assert {event["digest"] for event in [*ends, *undisturbed]} == {ends[0]["digest"]}
    assert {event["rank"]: event["random"] for event in ends} == {e["rank"]: e["random"] for e in undisturbed}
    assert all(event["parts"] for event in ends)
    assert history.leaks == []


@pytest.mark.skipif(bool(unavailable()), reason=f"no network namespaces here: {unavailable()}")
def test_what_replicas_hold_alike_enters_each_node_once(launcher: Launcher) -> None:
    """Two nodes with two replicas each. Each replica has a quarter, so half of the state must enter each node, once."""
    cluster = ChaosCluster(
        launcher, nodes=2, ranks_per_node=2, target="tests.jobs:spread_over_nodes", args={"steps": 3}, wired=True
    )
    cluster.kill_trainer(0, at="train.step", step=3)
    history = cluster.run()
    started = history.of("started", generation=1)
    assert len(started) == 4
    assert len({(event["step"], event["digest"]) for event in started}) == 1
    assert started[0]["step"] >= 1
    for event in started:
        assert 0.48 < event["received"] / event["state"] < 0.65, [e["received"] / e["state"] for e in started]
    assert history.leaks == []


def test_an_smp_that_does_not_end_by_its_signal_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.chaos.node.SIGNAL_DEADLINE_S", 0.2)
    node = VirtualNode(0, 0, "127.0.0.91", arena_base() / f"outlives-{os.getpid()}", "outlives")
    try:
        node.launch(Wiring("", []))
        node.wait_ready()
        os.kill(node.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, node.pid, os.WSTOPPED)  # all its threads have stopped
        assert node.end_smp(signal.SIGTERM) == -signal.SIGKILL
        assert node.end_smp(signal.SIGTERM) is None
    finally:
        node.close()
        shutil.rmtree(node.memory.parent, ignore_errors=True)
