"""``holdfast demo`` on real megatron-core, and its verdict."""

from __future__ import annotations

import copy
import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from holdfast import ConfigError
from holdfast.chaos.cluster import TARGET, History, VirtualCluster
from holdfast.chaos.demo import JOB, Account, DemoPlan, Kill, account
from holdfast.chaos.demo_view import show
from holdfast.chaos.differences import compare
from holdfast.chaos.launcher import Launcher
from holdfast.cli.demo import _kills
from holdfast.cli.main import main, make_parser
from holdfast.smp_daemon.shared.processes import HOME
from tests.sampling import chosen
from tests.scripts import completed
from tests.smp_kit import Watched

KILLS = (Kill("trainer", (1,), 3), Kill("node", (2,), 5))
PLAN = DemoPlan(nodes=4, ranks_per_node=1, steps=6, seed=7, protect="3+1", kills=KILLS)


def cluster(launcher: Launcher, *, snapshots: bool, protect: str = PLAN.protect) -> VirtualCluster:
    args = {"job": JOB, "seed": PLAN.seed, "steps": PLAN.steps, "hook": {"protect": protect}, "snapshots": snapshots}
    args["drain"] = True  # its steps take no time, so a busy machine may not protect each within the next one
    return VirtualCluster(
        launcher, nodes=4, ranks_per_node=1, target=TARGET, args=args, job="demo", smps=snapshots, deadline_s=120
    )


@pytest.fixture(scope="module")
def undisturbed(launcher: Launcher) -> History:
    return cluster(launcher, snapshots=False).run()


@pytest.fixture(scope="module")
def disturbed(launcher: Launcher) -> History:
    run = cluster(launcher, snapshots=True)
    run.kill_trainer(1, at="train.step", step=3)
    run.kill_node(2, at="train.step", step=5)
    return run.run()


@pytest.mark.cluster
@pytest.mark.proves("demo", "no-disk")
def test_a_megatron_gpt_survives_a_trainer_and_a_node_bit_for_bit(undisturbed: History, disturbed: History) -> None:
    result = account(PLAN, undisturbed, disturbed, seconds=1.0)
    assert result.identical, result.difference
    assert result.held
    assert [recovery.kill.kind for recovery in result.recoveries] == ["trainer", "node"]
    assert [recovery.bytes_fetched > 0 for recovery in result.recoveries] == [False, True]
    assert all(recovery.lost_steps in (0, 1) for recovery in result.recoveries)
    assert result.disk_bytes_written == 0


@pytest.mark.cluster
@pytest.mark.parametrize("protect", chosen(["2+2", "copies:2"], ["2+2"]))  # `test_cluster` tests the codes
def test_a_megatron_gpt_survives_two_nodes_at_once_bit_for_bit(
    launcher: Launcher, undisturbed: History, protect: str
) -> None:
    run = cluster(launcher, snapshots=True, protect=protect)
    run.kill_node(1, 2, at="train.step", step=4)
    plan = replace(PLAN, protect=protect, kills=(Kill("node", (1, 2), 4),))
    result = account(plan, undisturbed, run.run(), seconds=1.0)
    assert result.identical, result.difference
    assert result.held
    assert str(result.recoveries[0].kill) == "nodes 1+2"


@pytest.mark.cluster
def test_dropout_makes_the_random_generators_matter(undisturbed: History) -> None:
    digests = {event["digests"]["tracker.model-parallel-rng"] for event in undisturbed.of("end")}
    assert len(digests) == 2  # one for each of two tensor-parallel ranks


@pytest.mark.cluster
def test_a_single_bit_of_difference_is_found(undisturbed: History, disturbed: History) -> None:
    for kind, name in (("step", "loss"), ("end", "scheduler")):
        changed = copy.deepcopy(disturbed)
        event = changed.of(kind)[-1]
        event = event if kind == "step" else event["digests"]
        last = event[name]
        event[name] = last[:3] + ("0" if last[3] != "0" else "1") + last[4:]
        assert compare(undisturbed, changed)
        assert not account(PLAN, undisturbed, changed, seconds=1.0).held


@pytest.mark.cluster
def test_a_missing_step_or_state_is_found(undisturbed: History, disturbed: History) -> None:
    for kind in ("step", "end"):
        changed = copy.deepcopy(disturbed)
        last = changed.of(kind)[-1]
        changed.events = [
            e
            for e in changed.events
            if (e["kind"], e.get("rank"), e.get("step")) != (kind, last["rank"], last.get("step"))
        ]
        assert compare(undisturbed, changed)


@pytest.mark.cluster
def test_the_command_prints_an_account_and_writes_json() -> None:
    done = completed(
        [sys.executable, "-m", "holdfast.cli", "demo", "--ranks", "1", "--steps", "5", "--json", "-"],
        timeout=200,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["identical"] is True
    assert result["steps"] == 5
    assert result["disk_bytes_written"] == 0
    assert [r["kind"] for r in result["recoveries"]] == ["trainer", "node"]
    for recovery in result["recoveries"]:
        assert recovery["lost_steps"] in (0, 1)
        assert list(recovery["phases"]) == ["detect", "restart", "plan", "fetch", "load", "first_step"]
    assert "identical" in done.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": 3, "ranks_per_node": 1}, "even number"),
        ({"steps": 0}, "--steps 0"),
        ({"kills": (Kill("trainer", (9,), 3),)}, "trainers 0 to 3"),
        ({"kills": (Kill("node", (4,), 3),)}, "nodes 0 to 3"),
        ({"kills": (Kill("node", (1,), 1),)}, "from 2 to 6"),
        ({"kills": (Kill("node", (1,), 3), Kill("node", (2,), 3))}, "different steps"),
        ({"kills": (Kill("node", (1, 2), 3),)}, "the loss of 1 "),
        ({"kills": (Kill("node", (1, 1), 3),), "protect": "2+2"}, "target .* twice"),
        ({"protect": "none"}, "the loss of 0"),
        ({"nodes": 1, "ranks_per_node": 4, "kills": (Kill("node", (0,), 3),)}, r"3\+1 needs 4 nodes.* 1"),
    ],
)
def test_an_impossible_demo_is_refused(changes: dict[str, object], message: str) -> None:
    fields = {name: getattr(PLAN, name) for name in DemoPlan.__slots__}
    with pytest.raises(ConfigError, match=message):
        DemoPlan(**(fields | changes))


@pytest.mark.parametrize(
    ("options", "kills"),
    [
        ([], "--kill trainer:3@6 --kill node:2@12"),
        (["--nodes", "2", "--steps", "10"], "--kill trainer:1@3 --kill node:1@6"),
        (["--kill", "node:0+3@4", "--kill", "trainer:1+2+5@9"], "--kill node:0+3@4 --kill trainer:1+2+5@9"),
    ],
)
def test_what_is_killed_is_as_the_options_say(options: list[str], kills: str) -> None:
    assert " ".join(kill.option for kill in _kills(make_parser().parse_args(["demo", *options]))) == kills


@pytest.mark.parametrize(
    ("nodes", "protect", "code"), [(4, "auto", "3+1"), (4, "2+2", "2+2"), (4, "copies:2", "1+2"), (9, "auto", "3+1")]
)
def test_the_code_in_effect_is_said(nodes: int, protect: str, code: str) -> None:
    plan = DemoPlan(nodes, 2, 4, 1, protect, ())
    assert plan.code == code
    console = Console(record=True, width=80, file=io.StringIO())
    show(console, Account(plan, True, "", [2.0, 1.0], [], 0, [], [], 1.0, 1, None))
    said = f"protect {code}" if code == protect else f"protect {code} ({protect})"
    assert said in " ".join(console.export_text().split())


def test_an_error_that_an_smp_did_not_expect_is_said_and_breaks_the_promise() -> None:
    plan = DemoPlan(4, 2, 4, 1, "auto", ())
    good = Account(plan, True, "", [2.0, 1.0], [], 0, [], [], 1.0, 1, None)
    bad = replace(good, tracebacks=["smp0: ValueError: wrong"])
    console = Console(record=True, width=80, file=io.StringIO())
    show(console, bad)
    assert (good.held, bad.held) == (True, False)
    assert "smp0: ValueError: wrong" in " ".join(console.export_text().split())


@pytest.mark.parametrize("text", ["node:1+@3", "node:+1@3", "node:1", "rack:1@3", "node:1@x"])
def test_a_kill_that_says_nothing_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--kill", text]) == 2
    said = capsys.readouterr().err
    assert f"'{text}'" in said and "trainer:RANK@STEP" in said and "node:INDEX@STEP" in said


def test_a_gpu_that_is_not_there_is_said_before_anything_starts() -> None:
    """Tests see no GPU, even on a machine that has one."""
    with pytest.raises(ConfigError, match=r"--device cuda: .*no GPU"):
        Launcher([], device="cuda")


def test_ctrl_c_does_not_wait_for_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "endless.py").write_text("import signal\nsignal.pause()\n")
    monkeypatch.setenv("PYTHONPATH", f"{HOME}:{tmp_path}")
    launcher = Launcher(["endless"])
    waits = Watched(monkeypatch, launcher._process, "wait")
    launcher.close()
    assert len(waits.calls) == 1, "the first was in vain"


def test_on_a_gpu_each_rank_trains_a_whole_model_so_that_ranks_may_share_one() -> None:
    fields = {name: getattr(PLAN, name) for name in DemoPlan.__slots__}
    shared = DemoPlan(**(fields | {"nodes": 3, "device": "cuda", "kills": KILLS[:1], "protect": "auto"}))
    assert shared.options == {"tensor": 1, "distributed": False}
    assert PLAN.options == {}
    with pytest.raises(ConfigError, match=r"1 ranks: .*2 or more"):
        DemoPlan(**(fields | {"nodes": 1, "device": "cuda", "kills": (), "protect": "none"}))
