"""The recommendation, the command, and its plot."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from holdfast.cli.main import main
from holdfast.cli.tune import survival_text
from holdfast.planner.codes import Domains, candidates, judge
from holdfast.planner.costs import Assumptions, assume
from holdfast.planner.curves import nines
from holdfast.planner.montecarlo import play
from holdfast.planner.reasons import reasons
from holdfast.planner.recommend import CLOSE, ROUGH, Recommendation, Targets, levels_of, memory, recommend
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.snapshot.interval.failures import DAY_S, FailureModel, from_profile
from holdfast.snapshot.interval.profiles import profile
from holdfast.snapshot.interval.waste import first_order, overhead
from tests.deadlines import DEADLINE_S
from tests.unit.test_tuning_measured import FULL

MODEL = from_profile(profile("ft-hsdp"))
COSTS = assume(Assumptions(step_s=12.0, state_bytes=98e9))
LABELLED = Domains(2, "labelled")
JOB = ["tune", "--step", "12s", "--state", "98GB", "--nodes", "64"]


def found(nodes: int = 64, domains: Domains = LABELLED, **targets: Any) -> Recommendation:
    return recommend(COSTS, MODEL, nodes, domains, Targets(**targets))


def test_the_least_memory_that_survives_is_taken() -> None:
    result = found(target_survival=0.9999)
    assert result.met
    assert result.code.survival >= 0.9999
    for code, size in result.others:
        if code.survival >= 0.9999:
            assert size >= result.memory_bytes - 1
    assert found(target_survival=0.99999999).memory_bytes > result.memory_bytes
    assert result.memory_bytes == pytest.approx(3 * 98e9 * (1 + result.code.parity / result.code.data))


def test_without_labels_more_parity_is_taken() -> None:
    assert found().code.parity == 1
    assert found(domains=Domains(2, "neighbours")).code.parity == 2
    assert found(domains=Domains(4, "neighbours")).code.parity == 4


def test_a_memory_budget_is_kept_or_refused() -> None:
    tight = found(memory_budget=320e9, target_survival=0.99999999)
    assert tight.memory_bytes <= 320e9
    assert not tight.met
    assert tight.code.survival == max(code.survival for code, size in tight.others if size <= 320e9)
    with pytest.raises(ConfigError, match="the least that is possible with 3 slots is 294,000,000,000"):
        found(memory_budget=290e9)


@pytest.mark.parametrize("budget", [0.01, 0.002, 0.0005])
def test_an_overhead_budget_is_kept(budget: float) -> None:
    result = found(nodes=1024, overhead_budget=budget, code=(6, 2))
    assert result.overhead <= budget + 1e-12
    periods = [p * COSTS.step_s for p in result.periods]
    assert result.overhead == pytest.approx(overhead(result.levels, periods))
    assert result.waste == pytest.approx(first_order(result.levels, periods))


def test_a_tighter_overhead_budget_loses_more_to_failures() -> None:
    free, tight = (found(nodes=1024, overhead_budget=budget, code=(6, 2)) for budget in (0.01, 0.0005))
    assert tight.periods[0] > free.periods[0]
    assert tight.played.mean < free.played.mean


def test_more_nodes_take_snapshots_more_often() -> None:
    intervals = [found(nodes=nodes, code=(6, 2)).periods[0] for nodes in (8, 128, 2048)]
    assert intervals == sorted(intervals, reverse=True)
    assert intervals[0] > 3 * intervals[2]


def test_what_is_predicted_is_what_is_played() -> None:
    result = found(nodes=512, code=(6, 2))
    assert 1 - result.waste == pytest.approx(result.played.mean, abs=4 * result.played.error + 0.03 * result.waste)


def test_where_first_order_is_far_off_what_is_played_decides() -> None:
    """Daly's hardest point: a snapshot of 5 minutes, a failure every 15. Young says 735 s, the exact optimum is 550."""
    costs = replace(COSTS, step_s=1.0, snapshot_cost_s=300.0, commit_s=300.0, persist_s=0.0, restart_s=0.0)
    model = FailureModel(1 / 900, 0.0, 0.0, 0.0, "test")
    result = recommend(costs, model, 1, LABELLED, Targets(overhead_budget=None))
    assert 500 < result.periods[0] < 600


def test_where_first_order_is_rough_nothing_next_to_the_plan_is_clearly_better() -> None:
    model = from_profile(profile("rsc-1"), mtbf_s=10 * DAY_S)
    result = recommend(COSTS, model, 1024, LABELLED, Targets(overhead_budget=None))
    assert result.waste > ROUGH
    limits = COSTS.limits(result.code.parity, None, Targets().longest_steps)
    near = [
        tuple(max(1, round(result.periods[0] * factor)) * (p // result.periods[0]) for p in result.periods)
        for factor in (0.5, 0.7, 1.4, 2.0)
    ]
    feasible = [periods for periods in near if limits.feasible(periods)]
    assert feasible
    for periods in feasible:
        other = play(result.levels, periods, COSTS.step_s, seed=result.seed)
        assert other.mean <= result.played.mean + 3 * (other.error + result.played.error)


def test_failures_of_all_classes_are_counted_once() -> None:
    rates = MODEL.job(64)
    for data, parity in ((6, 2), (7, 1), (0, 0)):  # two neighbours that fail together are too many for 7+1
        code = judge(data, parity, 64, MODEL, Domains(), 600.0)
        levels = levels_of(COSTS, code, MODEL, 64)
        assert sum(level.rate for level in levels) == pytest.approx(sum(rates.values()))


def test_where_encoding_is_dear_one_in_several_snapshots_is_encoded_and_that_is_said() -> None:
    dear = replace(COSTS, encode_s=20.0, encode_cost_s=5.0, snapshot_cost_s=0.01)
    result = recommend(dear, MODEL, 64, LABELLED, Targets())
    assert result.encode_every > 1 and result.gain > CLOSE
    assert result.periods[1] == result.encode_every * result.periods[0]
    assert result.memory_bytes == memory(dear, result.code, result.encode_every)
    said = " ".join(reasons(result, dear, MODEL, LABELLED, Targets(), str, str))
    assert f"one in {result.encode_every} snapshots is encoded" in said
    assert f"protect_every={result.encode_every}" in said and f"would lose {result.gain:.2%} more" in said
    assert "SMPs do it with HOLDFAST_PERSIST=URL" in said


def test_one_node_keeps_only_processes() -> None:
    result = found(nodes=1)
    assert (result.code.parity, result.encode_every, result.network_rate) == (0, 0, 0.0)
    assert candidates(1) == [(0, 0)]
    assert {k + m for k, m in candidates(3)} <= {0, 2, 3}


def test_a_code_of_ones_own_is_judged_not_chosen() -> None:
    result = found(code=(6, 2))
    assert str(result.code) == "6+2"
    assert len(result.others) == 1
    with pytest.raises(ConfigError, match=r"6\+2 needs 8 nodes, and there are 4: give k \+ m of 2 to 4"):
        found(nodes=4, code=(6, 2))


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ({"overhead_budget": 1.5}, "overhead budget of 1.5"),
        ({"memory_budget": -1.0}, "memory budget is -1 bytes"),
        ({"target_survival": 2.0}, "target survival is 2: give 0 to 1"),
        ({"repair_window_s": 0.0}, "repair window is 0 s"),
        ({"node_repair_s": -1.0}, "repair a node is -1 s"),
    ],
)
def test_impossible_wishes_are_refused(targets: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Targets(**targets)


def test_the_command_says_what_to_do_and_why_in_one_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, plot = tmp_path / "tune.json", tmp_path / "tune.svg"
    assert main([*JOB, "--json", str(file), "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) <= 24
    for word in ("snapshot", "encode", "persist", "protect", "spare nodes", "overhead", "memory", "seed 1", "assumed"):
        assert word in printed
    data = json.loads(file.read_text())
    promised = "interval_steps interval_s k m encode_every persist_every overhead ettr memory_bytes_per_node"
    assert list(data)[:11] == [*promised.split(), "survival_30d", "why"]
    assert data["interval_s"] == 12 * data["interval_steps"]
    assert data["k"] >= data["m"] == 2
    assert sum(size * count for size, count in data["groups"]) == 64
    assert data["memory_bytes_per_node"] == pytest.approx(3 * 98e9 * (1 + data["m"] / data["k"]))
    assert 0.98 < data["ettr"] < 1 and data["lost_s_per_day"] == pytest.approx((1 - data["ettr"]) * DAY_S)
    check_plot(plot.read_text())


def check_plot(text: str) -> None:
    """The plot is well-formed, and has everything that was promised."""
    texts = " ".join(element.text or "" for element in ElementTree.fromstring(text).iter())
    for word in ("chosen", "Young", "Daly", "copies:1", "seed 1", "m = 4"):
        assert word in texts, word


def test_a_longer_repair_window_survives_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    survival = {}
    for window in ("10min", "5h"):
        file = tmp_path / f"{window}.json"
        options = ["--protect", "6+2", "--placement", "labelled", "--repair-window", window, "--json", str(file)]
        assert main([*JOB, *options]) == 0
        survival[window] = json.loads(file.read_text())["survival_30d"]
    assert survival["5h"] < survival["10min"]
    capsys.readouterr()
    assert main([*JOB, "--repair-window", "5h"]) == 0
    assert "at a repair window of 5 h" in capsys.readouterr().out


def test_a_measured_profile_takes_the_place_of_assumptions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile_file, plot = tmp_path / "profile.json", tmp_path / "tune.svg"
    profile_file.write_text(json.dumps(replace(FULL, snapshot_step_sd_s=0.2).to_json()))
    assert main(["tune", "--measured", str(profile_file), "--plot", str(plot), "--json", "-"]) == 0
    streams = capsys.readouterr()
    assert "on 16 nodes" in streams.err
    assert "all times" not in streams.err
    assert json.loads(streams.out)["memory_bytes_per_node"] >= 3 * 10**10
    assert ">measured<" in plot.read_text()
    check_plot(plot.read_text())


def test_a_log_moves_the_failure_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.csv"
    log.write_text("time_h,class\n" + "".join(f"{hour},process\n" for hour in range(1, 500)))
    assert main([*JOB, "--log", str(log), "--log-span", "500h"]) == 0
    printed = capsys.readouterr().out
    assert "499 incidents of 64 nodes in 20.8 d" in printed
    assert re.search(r"of processes [23]\.\d+ h", printed)  # hourly in the log, once in 8 days in the prior


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes", "0"], "--nodes 0: give 1 or more"),
        (["--mtbf=-5d"], "--mtbf: '-5d' is not a time: give one such as"),
        (["--mtbf", "0d"], "--mtbf: '0d': give more than 0"),
        (["--mtbf", "1000"], "--mtbf: '1000' has no unit: give a time"),
        (["--mtbf", "1d 3h"], "--mtbf: '1d 3h' is not a time"),
        (["--failures", "mars"], "'mars' is not a failure profile: choose one of llama3"),
        (["--protect", "60+8"], r"60\+8 needs 68 nodes, and there are 64"),
        (["--state", "98 apples"], "--state: '98 apples' is not a size"),
        (["--overhead-budget", "-1%"], "--overhead-budget -1%: give 0 to 1"),
        (["--target-survival", "101%"], "--target-survival 101%: give 0 to 1"),
        (["--slots", "1"], "slots is 1: give 2 to 16"),
        (["--domain-nodes", "0"], "0 nodes fail together: give 1 or more"),
        (["--placement", "anywhere"], "'anywhere' is not a placement: choose one of labelled"),
        (["--log", "/does/not/exist"], "--log: /does/not/exist is not a file"),
        (["--measured", __file__], f"--measured {__file__}: it cannot be read as JSON"),
        (["--seed", "-1"], "--seed -1: give 0 or more"),
    ],
)
def test_bad_input_is_refused_by_value(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = options[0].partition("=")[0]
    before = [*JOB]
    if name in before:
        at = before.index(name)
        del before[at : at + 2]
    assert main([*before, "=".join(options)]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_an_empty_or_mixed_log_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.csv"
    log.write_text("time,class\n")
    assert main([*JOB, "--log", str(log)]) == 2
    assert "it has no incidents" in capsys.readouterr().err
    log.write_text("time,class\n2026-01-01,process\n17,process\n")
    assert main([*JOB, "--log", str(log)]) == 2
    assert "line 3: time is '17'" in capsys.readouterr().err


def test_a_survival_near_one_is_legible() -> None:
    assert survival_text(0.1) == "0.90000"
    assert survival_text(4.1e-10) == "1 - 4.1e-10"
    assert nines(1e-3) == pytest.approx(3)
    assert nines(0.0) == 20


def test_the_tuner_runs_without_torch_and_scipy() -> None:
    code = (
        "import sys; from holdfast.planner import curves, reasons\n"
        "from holdfast.snapshot.interval import measured\n"
        "print([m for m in ('torch', 'scipy', 'grpc') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert done.stdout.strip() == "[]"


def test_help_has_its_options_in_groups_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["tune", "--help"])
    text = capsys.readouterr().out
    for title in ("the job:", "rates of the machine", "what fails", "what is wanted:", "the answer:"):
        assert title in text
    assert "holdfast tune --step 12s --state 98GB --nodes 128 --mtbf 1000d" in " ".join(text.split())
    assert text.partition("options:")[2].partition("\n\n")[0].strip().startswith("-h, --help")


def test_what_is_persisted_is_said_with_what_switches_it_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(JOB) == 0
    output = capsys.readouterr().out
    assert re.search(r"SMPs do it with HOLDFAST_PERSIST=URL HOLDFAST_PERSIST_EVERY=[\d.]+(h|min|d)\.", output)
    assert not [line for line in output.splitlines() if line != line.rstrip()]
