"""``holdfast chaos run --seed N -- COMMAND``: what is drawn, how it is judged, and a real job under torchrun."""

from __future__ import annotations

import json
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.audit import Notes, Values, read
from holdfast.chaos.faults import CATALOGUE
from holdfast.chaos.user.command import (
    FIRST_STEP,
    IN_A_RECOVERY,
    MOST_WORK_S,
    STEP,
    STEPS_AFTER,
    CommandFault,
    CommandPlan,
    CommandRun,
    CommandVerdict,
    Standstill,
    draw,
    judge,
)
from holdfast.chaos.user.nodes import CommandNode
from holdfast.chaos.user.run import check_one_job
from holdfast.cli.main import main
from holdfast.smp_daemon.shared.errors import ConfigError, HoldfastError
from holdfast.smp_daemon.shared.paths import ARENA_ENV
from tests.proof.chaos.checks import CHECKS

ROOT = Path(__file__).parents[2]


def notes(first: int, last: int, *, epoch: int = 1, protected: int = 0, loss: str = "") -> Notes:
    """The notes of a process that began with `first` and computed up to `last`."""
    values: dict[int, Values] = {step: {"weights": f"w{step}"} for step in range(first, last)}
    computed: dict[int, Values] = {step: {"loss": f"l{step}{loss}"} for step in range(first + 1, last + 1)}
    return Notes(values, computed, epoch, first, pid=epoch, protected=protected)


WHOLE = [notes(0, 10)]


def judged(*ranks: list[Notes], ignore: tuple[str, ...] = (), **seen: Any) -> CommandVerdict:
    """The verdict on ranks that all computed `WHOLE` when undisturbed."""
    plan = CommandPlan(("train",), 0, faults=1, steps=10, ignore=ignore)
    return judge(plan, WHOLE * len(ranks), WHOLE * len(ranks), CommandRun(ranks, **seen))


def breached(verdict: CommandVerdict, check: str, *words: str) -> bool:
    """Whether that check alone is broken, and these words are said of it."""
    return [name for name, _ in verdict.breaches] == [check] and all(word in verdict.breaches[0][1] for word in words)


class TestAJudgement:
    def test_finds_nothing_wrong_with_what_went_on_from_the_protected_step(self) -> None:
        fault = CommandFault("kill-trainer", 0, STEP, 6)
        verdict = judged([notes(0, 6, protected=4), notes(4, 10, epoch=2)], asked=(fault,), injected=(fault,))
        assert (verdict.steps_again, verdict.lost_protected_steps, verdict.breaches) == ((1,), 0, ())
        looked = {"ends": 1, "returns": 2, "result": 1, "together": 2, "kept": 1, "struck": 1, "leaks": 1}
        assert verdict.checks == looked
        assert looked.keys() <= CHECKS.keys()

    def test_does_not_count_what_there_was_nothing_to_look_at_for(self) -> None:
        verdict = judged([notes(0, 10)])
        assert not verdict.checks.keys() & {"kept", "struck"}

    def test_counts_protected_steps_that_did_not_come_back(self) -> None:
        verdict = judged([notes(0, 6, protected=5), notes(3, 10, epoch=2)])
        assert (verdict.steps_again, verdict.lost_protected_steps) == ((2,), 2)
        assert breached(verdict, "kept", "2 protected steps")

    def test_finds_what_was_computed_differently(self) -> None:
        verdict = judged([notes(0, 6), notes(4, 10, epoch=2, loss=" or so")])
        assert breached(verdict, "result", "6 values", "loss of rank 0", "step 5", "computed")

    def test_finds_what_was_restored_differently(self) -> None:
        other = notes(4, 10, epoch=2)
        other.values[4] = {"weights": "of step 3"}
        verdict = judged([notes(0, 6), other])
        assert breached(verdict, "result", "1 values", "weights of rank 0", "step 4", "restored")

    def test_finds_ranks_that_did_not_come_to_the_end(self) -> None:
        assert breached(judged([notes(0, 9)]), "returns", "ranks [0]", "step 10")

    def test_finds_ranks_that_are_missing(self) -> None:
        verdict = judge(CommandPlan(("train",), 0), WHOLE, WHOLE, CommandRun([]))
        assert breached(verdict, "result", "1 ranks", "0 with faults")

    def test_finds_ranks_that_started_at_different_steps(self) -> None:
        verdict = judged([notes(0, 6), notes(4, 10, epoch=2)], [notes(0, 6), notes(5, 10, epoch=2)])
        assert breached(verdict, "together", "[4, 5]")

    def test_leaves_out_what_is_not_to_matter(self) -> None:
        assert not judged([notes(0, 10, loss="!")], ignore=("lo.s",)).breaches

    def test_finds_how_it_ended(self) -> None:
        fault = CommandFault("kill-trainer", 0, STEP, 6)
        assert breached(judged([notes(0, 6)], hang=True), "ends", "600 s")
        assert breached(judged([notes(0, 10)], failure="status 1"), "returns", "status 1")
        assert breached(judged([notes(0, 10)], leaks=("7 sleep",)), "leaks", "7 sleep")
        assert breached(judged([notes(0, 10)], asked=(fault,)), "struck", "1 faults", "0 were")


class TestADraw:
    def test_is_the_same_for_the_same_seed(self) -> None:
        assert draw(7, 5, 4, 20) == draw(7, 5, 4, 20) != draw(8, 5, 4, 20)

    @pytest.mark.parametrize("seed", range(20))
    def test_has_so_many_faults_of_known_kinds_in_steps_that_come_one_after_another(self, seed: int) -> None:
        single, double = draw(seed, 5, 4, 20), draw(seed, 5, 4, 20, double=True)
        assert [fault.step for fault in single] == sorted({fault.step for fault in single})
        assert all(FIRST_STEP <= fault.step < 20 - STEPS_AFTER and fault.rank < 4 for fault in single)
        first = [fault for fault in double if fault.point not in IN_A_RECOVERY]
        assert len(single) == len(first) == 5
        assert len(double) == 5 + sum(CATALOGUE[fault.kind].ends_job for fault in first)

    def test_kills_others_only_if_there_are_any(self) -> None:
        assert not any(fault.kind == "kill-other" for seed in range(50) for fault in draw(seed, 5, 4, 20))
        assert any(fault.kind == "kill-other" for seed in range(50) for fault in draw(seed, 5, 4, 20, other=True))

    def test_of_too_many_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"11 faults .*1 to 10"):
            CommandPlan(("train",), 1, faults=11)


class TestAFault:
    def test_is_due_from_its_step_on(self) -> None:
        fault = CommandFault("kill-trainer", 1, "copy.middle", 5)
        assert fault.matches(1, "copy.middle", 6)
        assert fault.matches(None, "copy.middle", 5)
        assert not any(
            fault.matches(*each) for each in [(0, "copy.middle", 5), (1, "copy.middle", 4), (1, "copy.done", 5)]
        )

    def test_in_a_recovery_is_due_in_the_next_step_if_there_is_nothing_to_restore(self) -> None:
        fault = CommandFault("kill-trainer", 0, "restore.middle", 5)
        assert fault.matches(0, "restore.middle", 2)
        assert fault.matches(0, "train.step", 1)
        assert not fault.matches(0, "restore.before", 2)


def test_notes_of_a_process_that_was_killed_while_it_wrote_do_not_spoil_the_next(tmp_path: Path) -> None:
    lines = [
        '{"epoch": 1, "start": 0, "pid": 5}',
        '{"step": 1, "computed": {"lo',
        "",
        '{"epoch": 2, "start": 1, "pid": 6}',
    ]
    (tmp_path / "rank0.jsonl").write_text("\n".join(lines) + "\n")
    (ranks,) = read(tmp_path)
    assert [(each.epoch, each.pid) for each in ranks] == [(1, 5), (2, 6)]


@pytest.mark.cluster
def test_a_job_under_torchrun_is_killed_over_and_over_and_ends_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shm: Path
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv(ARENA_ENV, str(shm))
    report = tmp_path / "report.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = ["--seed", "0", "--faults", "1", "--double", "--steps", "8", "--deadline", "90s", "--json", str(report)]
    status = main(["chaos", "run", *options, "--", *launcher, "-m", "tests.proof.jobs.acp_sgd"])
    found: dict[str, Any] = json.loads(report.read_text())
    assert status == 0, found["problems"]
    assert found["faults_asked"] == found["faults_injected"] == len(found["injected"]) == 2
    assert found["starts"] == 3
    assert found["values_compared"] > 300
    assert list(shm.iterdir()) == []


@pytest.mark.cluster
@pytest.mark.slow
def test_another_process_of_the_command_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    report = tmp_path / "report.json"
    seed = next(seed for seed in range(50) if draw(seed, 1, 1, 8, other=True)[0].kind == "kill-other")
    job = f"{sys.executable} -m tests.proof.jobs.acp_sgd"
    script = f"sleep 97 & helper=$!; {job} & wait -n; status=$?; kill $helper %2; exit $status"
    options = ["--seed", str(seed), "--faults", "1", "--steps", "8", "--other", "97", "--json", str(report)]
    assert main(["chaos", "run", *options, "--", "bash", "-c", script]) == 0
    assert [fault["kind"] for fault in json.loads(report.read_text())["injected"]] == ["kill-other"]


@pytest.mark.cluster
@pytest.mark.slow
def test_a_node_is_lost_under_agents_of_torchrun_and_a_spare_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    for name, value in {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    report = tmp_path / "report.json"
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
    agents = ["--nnodes=3", "--max-restarts=9", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=test"]
    launcher = [sys.executable, "-m", "torch.distributed.run", *agents, "--local-addr=127.0.0.1"]
    options = ["--seed", "1656", "--faults", "2", "--nodes", "3", "--steps", "10", "--json", str(report)]
    assert main(["chaos", "run", *options, "--", *launcher, "-m", "tests.proof.jobs.acp_sgd"]) == 0
    found = json.loads(report.read_text())
    assert [fault["kind"] for fault in found["injected"]] == ["kill-trainer", "lose-node"]
    assert found["epochs"] == 3


class Command:
    """What is seen of a command, each second."""

    def __init__(self) -> None:
        self.trained, self.written, self.worked_s = 100, 0, 7.0

    def seconds_until_it_is_ended(self, each_second: Callable[[Command], None]) -> int:
        standstill = Standstill(30.0, lambda: self.worked_s)
        for second in range(1, 1000):
            if standstill.lasts(self.trained, self.written, 5000.0 + second):
                return second
            each_second(self)
        return 0

    def write(self) -> None:
        self.written += 1

    def train(self) -> None:
        self.trained += 1

    def work(self, share: float) -> None:
        self.worked_s += share


def test_a_command_is_ended_once_it_does_nothing_and_much_later_if_it_works_and_does_not_train() -> None:
    ended_after = [
        Command().seconds_until_it_is_ended(each)
        for each in (lambda it: it.work(0.01), Command.train, Command.write, lambda it: it.work(0.2))
    ]
    assert ended_after == [32, 0, MOST_WORK_S + 2, MOST_WORK_S + 2]


def test_a_command_that_trains_again_has_all_the_time_again() -> None:
    def late(it: Command) -> None:
        it.work(0.5)
        it.trained += it.worked_s == 107.0

    assert Command().seconds_until_it_is_ended(late) == MOST_WORK_S + 202


def test_commands_that_train_side_by_side_are_no_job() -> None:
    alone = [[notes(0, 9, epoch=pid) for pid in (1, 2, 3)]]
    with pytest.raises(HoldfastError, match="did not meet"):
        check_one_job(3, alone)
    check_one_job(1, alone)
    check_one_job(3, [[notes(0, 9, epoch=pid)] for pid in (1, 2, 3)])
    check_one_job(3, [*alone, [notes(0, 9)]])


def test_only_where_there_are_several_nodes_are_they_lost() -> None:
    kinds = {
        several: {fault.kind for seed in range(40) for fault in draw(seed, 3, 4, 12, several=several)}
        for several in (False, True)
    }
    assert kinds[True] == kinds[False] | {"lose-node"}


def test_a_node_runs_one_command_and_ends_all_that_it_started(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    plan = CommandPlan(("bash", "-c", "setsid sleep 97 & exec sleep 98"), 0, nodes=2)
    here, there = CommandNode("node1", tmp_path), CommandNode("node10", tmp_path)
    for node in (here, there):
        assert not node.runs and node.status is None
        node.start(plan, {})
        assert node.runs and node.wait(0) is None
    try:
        assert all(p.environ()["HOLDFAST_NODE"] == "node1" for p in here.processes())
        here.end()
        assert not here.runs and here.status == -signal.SIGKILL and not here.processes()
        assert there.runs
        there.kill()
        assert there.status == -signal.SIGKILL
    finally:
        here.end()
        there.end()
    assert not there.processes()
    with pytest.raises(HoldfastError, match=r"no SMP .* node1"):
        here.smp()


def test_what_is_not_for_a_command_of_ones_own_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "run", "quick", "--", "train"]) == 2
    assert "quick" in capsys.readouterr().err
    assert main(["chaos", "run"]) == 2
    assert "no command given" in capsys.readouterr().err
    assert main(["doctor", "--", "train"]) == 2
    assert "after --: train" in capsys.readouterr().err
