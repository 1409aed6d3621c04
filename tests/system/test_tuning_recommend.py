"""The recommendation, and the command that prints it."""

from __future__ import annotations

import inspect
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.main import main
from holdfast.planner.costs import Assumptions, Costs, assume
from holdfast.planner.failures import DAY_S, FailureModel, from_profile
from holdfast.planner.plan import (
    CLOSE,
    CORES,
    DEFAULT_SLOTS,
    Recommendation,
    Targets,
    candidates_of,
    levels_of,
    memory,
    recommend,
)
from holdfast.planner.profiles import profile
from holdfast.planner.rates import SmpRates
from holdfast.planner.reasons import reasons, survival_text
from holdfast.planner.survival import Domains, candidates, judge
from holdfast.planner.waste import first_order, overhead
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.failures import NODE_LOST
from holdfast.smp_daemon.shared.settings import MTBF
from holdfast.snapshot.interval.rule import choose
from holdfast.snapshot.options import Options
from tests.scripts import python
from tests.unit.test_tuning_measured import FULL

MODEL = from_profile(profile("ft-hsdp"))
COSTS = assume(Assumptions(step_s=12.0, state_bytes=98e9))
CHEAP = replace(COSTS, encode_cost_s=0.0)
"""So that every snapshot is protected."""
LABELLED = Domains(2, "labelled")
JOB = ["plan", "--step", "12s", "--state", "98GB", "--nodes", "64"]


def found(nodes: int = 64, domains: Domains = LABELLED, costs: Costs = COSTS, **targets: Any) -> Recommendation:
    return recommend({1.0: costs}, MODEL, nodes, domains, Targets(**targets))


def planned(tmp_path: Path, *options: str) -> dict[str, Any]:
    file = tmp_path / "plan.json"
    assert main([*options, "--json", str(file)]) == 0
    plan: dict[str, Any] = json.loads(file.read_text())
    return plan


def test_the_least_memory_that_survives_is_taken() -> None:
    result = found(costs=CHEAP, target_survival=0.9999)
    code = result.setting.code
    assert result.met and code.survival >= 0.9999
    assert result.setting.memory_bytes == pytest.approx(2 * 98e9 * (1 + code.parity / code.data))
    assert found(costs=CHEAP, target_survival=0.99999999).setting.memory_bytes > result.setting.memory_bytes


def test_without_labels_more_parity_is_taken() -> None:
    assert found().setting.code.parity == 1
    assert found(domains=Domains(2, "neighbours")).setting.code.parity == 2
    assert found(domains=Domains(4, "neighbours")).setting.code.parity == 4


def test_a_memory_budget_is_kept_or_refused() -> None:
    tight = found(memory_budget=212e9, target_survival=0.999999999)
    assert tight.setting.memory_bytes <= 212e9
    assert not tight.met
    with pytest.raises(ConfigError, match=r"least .* 196,000,000,000"):
        found(memory_budget=190e9)


@pytest.mark.parametrize("budget", [0.01, 0.002, 0.0005])
def test_an_overhead_budget_is_kept(budget: float) -> None:
    result = found(nodes=1024, overhead_budget=budget, code=(6, 2))
    assert result.overhead <= budget + 1e-12
    periods = [p * COSTS.step_s for p in result.setting.periods]
    assert result.overhead == pytest.approx(overhead(result.setting.levels, periods))
    assert result.setting.waste == pytest.approx(first_order(result.setting.levels, periods))


def test_a_tighter_overhead_budget_loses_more_to_failures() -> None:
    free, tight = (found(nodes=1024, overhead_budget=budget, code=(6, 2)) for budget in (0.01, 0.0005))
    assert tight.setting.periods[0] > free.setting.periods[0]
    assert tight.played.mean < free.played.mean


def test_more_nodes_take_snapshots_more_often() -> None:
    intervals = [found(nodes=nodes, costs=CHEAP, code=(6, 2)).setting.periods[0] for nodes in (8, 128, 2048)]
    assert intervals == sorted(intervals, reverse=True)
    assert intervals[0] > 3 * intervals[2]


@pytest.mark.parametrize("every", [1, 6])
@pytest.mark.parametrize("nodes", [8, 512])
def test_the_interval_is_the_one_that_trainers_choose(nodes: int, every: int) -> None:
    """The hook's own rule, told the same costs and rates, asks for the same number of steps."""
    encode = (0.0, 0.5) if every == 1 else (60.0, 30.0)
    costs = replace(COSTS, snapshot_cost_s=0.5, encode_cost_s=encode[0], encode_s=encode[1])
    result = found(nodes=nodes, costs=costs, code=(7, 1), overhead_budget=None)
    setting, rates = result.setting, MODEL.job(nodes)
    restored = sum(rates.values()) - rates["beyond"]
    # A failure that takes a node's memory loses half of as many intervals as are protected together.
    counted = restored * (1 + NODE_LOST * (setting.encode_every - 1))
    cost_s = 0.5 + encode[0] / setting.encode_every
    wish = choose(step_s=costs.step_s, cost_s=cost_s, failure_rate=counted, budget=None, done=10**9)
    assert setting.interval == wish and setting.periods[0] == wish.steps
    assert (every > 1) == (setting.encode_every > 1)


def test_what_is_predicted_is_what_is_played() -> None:
    result = found(nodes=512, code=(6, 2))
    waste = result.setting.waste
    assert 1 - waste == pytest.approx(result.played.mean, abs=4 * result.played.error + 0.03 * waste)


def test_trainers_begin_a_snapshot_when_the_one_before_is_protected() -> None:
    setting = found(nodes=2048, costs=CHEAP, code=(6, 2)).setting
    assert (setting.encode_every, setting.interval.limit, setting.slots) == (1, "protect", 2)
    protect_s = CHEAP.commit_s + 2 * CHEAP.encode_s
    assert setting.periods[0] == math.ceil(protect_s / 12.0) + 1


@pytest.mark.parametrize("nodes", [8, 64, 128])
def test_no_other_interval_loses_noticeably_less(nodes: int) -> None:
    setting = found(nodes=nodes, costs=CHEAP, code=(6, 2)).setting
    every = setting.encode_every

    def waste(steps: int) -> float:
        return first_order(setting.levels, [steps * 12.0, steps * every * 12.0])

    assert setting.waste == waste(setting.periods[0])
    assert setting.waste <= 1.01 * min(waste(steps) for steps in range(2, 1001))


def test_where_first_order_is_far_off_it_is_said() -> None:
    """A snapshot of 5 minutes, a failure every 15: half of all time is lost."""
    costs = replace(COSTS, step_s=1.0, snapshot_cost_s=300.0, commit_s=300.0, restart_s=0.0)
    model = FailureModel(1 / 900, 0.0, 0.0, 0.0, "test")
    result = recommend({1.0: costs}, model, 1, LABELLED, Targets(overhead_budget=None))
    assert "played failures" in " ".join(reasons(result, model, LABELLED, Targets()))


def test_failures_of_all_classes_are_counted_once() -> None:
    rates = MODEL.job(64)
    stored = replace(COSTS, persist_s=98.0)
    for data, parity in ((6, 2), (7, 1), (0, 0)):  # two neighbours that fail together are too many for 7+1
        code = judge(data, parity, 64, MODEL, Domains(), 600.0)
        levels = levels_of(stored, code, MODEL, 64)
        assert sum(level.rate for level in levels) == pytest.approx(sum(rates.values()))


def test_where_encoding_is_dear_one_in_several_snapshots_is_protected() -> None:
    dear = replace(COSTS, encode_s=20.0, encode_cost_s=20.0, snapshot_cost_s=0.01)
    result = found(costs=dear)
    setting = result.setting
    assert result.encode_every > 1 and result.gain > 0
    assert setting.periods[1] == result.encode_every * setting.periods[0]
    assert (setting.slots, setting.memory_bytes) == (3, memory(dear, setting.code, 3, result.encode_every))
    said = " ".join(reasons(result, MODEL, LABELLED, Targets()))
    assert f"one in {result.encode_every} snapshots" in said and f"{result.gain:.2%} more" in said


def test_of_plans_that_lose_as_little_the_one_of_fewest_cores_is_taken() -> None:
    by_cores = {
        cores: assume(Assumptions(step_s=12.0, state_bytes=98e9, copy_rate=smp.digest, network_rate=smp.network))
        for cores in CORES
        for smp in [SmpRates(given_cores=cores)]
    }
    targets = Targets(code=(6, 2))
    for nodes in (8, 128, 1024):
        chosen = recommend(by_cores, MODEL, nodes, LABELLED, targets).setting
        others = [
            each
            for cores, costs in by_cores.items()
            for each in candidates_of(cores, costs, MODEL, nodes, LABELLED, targets)
        ]
        close = [each for each in others if each.waste <= min(other.waste for other in others) + CLOSE]
        assert chosen in close
        assert chosen.encode_every == min(each.encode_every for each in close)
        assert chosen.cores == min(each.cores for each in close if each.encode_every == chosen.encode_every)


def test_storage_takes_a_slot_and_an_interval_of_its_own() -> None:
    stored = found(costs=assume(Assumptions(step_s=12.0, state_bytes=98e9, persist_rate=1e9)), code=(6, 2))
    without = found(code=(6, 2))
    assert stored.setting.memory_bytes == without.setting.memory_bytes + 98e9
    assert stored.persist_every >= 1 and without.persist_every == 0
    assert "HOLDFAST_PERSIST=URL HOLDFAST_PERSIST_EVERY=" in " ".join(reasons(stored, MODEL, LABELLED, Targets()))
    assert "ends the run" in " ".join(reasons(without, MODEL, LABELLED, Targets()))


def test_each_generation_takes_a_slot_more_than_the_option_says() -> None:
    one, three = (found(costs=CHEAP, code=(7, 1), generations=count) for count in (1, 3))
    assert one.setting.slots == three.setting.slots == 2
    assert one.setting.memory_bytes == pytest.approx(98e9 * 2 * 8 / 7)
    assert three.setting.memory_bytes == pytest.approx(98e9 * 4 * 8 / 7)


@pytest.mark.parametrize(("nodes", "word"), [(8, "misses"), (64, "reaches")])
def test_it_is_said_whether_a_code_of_ones_own_reaches_the_target(nodes: int, word: str) -> None:
    said = reasons(found(nodes=nodes, code=(7, 1)), MODEL, LABELLED, Targets(code=(7, 1)))
    assert f"7+1 {word} the target" in " ".join(said)


def test_one_node_keeps_only_processes() -> None:
    result = found(nodes=1)
    assert (result.setting.code.parity, result.encode_every, result.network_rate) == (0, 0, 0.0)
    assert candidates(1) == [(0, 0)]
    assert {k + m for k, m in candidates(3)} <= {0, 2, 3}


def test_a_code_of_ones_own_is_judged_not_chosen() -> None:
    assert str(found(code=(6, 2)).setting.code) == "6+2"
    with pytest.raises(ConfigError, match=r"6\+2 needs 8 nodes.* 4: .* 2 to 4"):
        found(nodes=4, code=(6, 2))


def test_the_defaults_of_the_hook_are_compared_with_two_parity_units() -> None:
    result = found(nodes=128, domains=Domains())
    ours, defaults, two = result.compared
    assert (ours.code, ours.slots) == (result.setting.code, result.setting.slots)
    assert (str(defaults.code), defaults.slots) == ("7+1", DEFAULT_SLOTS)
    assert defaults.memory_bytes == pytest.approx(98e9 * 3 * 8 / 7)
    assert defaults.code.survival < 0.95 < 0.999 < two.code.survival and two.code.parity == 2
    assert inspect.signature(Options).parameters["slots"].default == DEFAULT_SLOTS


@pytest.mark.parametrize(("nodes", "times"), [(2, 6.0), (4, 4.0), (8, 3 * 8 / 7)])
def test_the_defaults_take_as_much_memory_as_the_hook_reserves(nodes: int, times: float, tmp_path: Path) -> None:
    plan = planned(tmp_path, "plan", "--model", "70b", "--nodes", str(nodes), "--step", "12s")
    defaults = next(each for each in plan["compared"] if "defaults" in each["name"])
    assert defaults["memory_bytes_per_node"] == pytest.approx(times * plan["sizes"]["node_bytes"])


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ({"overhead_budget": 1.5}, "overhead budget of 1.5"),
        ({"memory_budget": -1.0}, "memory budget is -1"),
        ({"target_survival": 2.0}, "target survival is 2"),
        ({"generations": 0}, "generations is 0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_impossible_wishes_are_refused(targets: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Targets(**targets)


def test_the_command_says_what_to_do_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = planned(tmp_path, *JOB)
    printed = capsys.readouterr().out
    table = printed[: printed.index("Why")]
    for word in ("interval", "protect", "protect_every", "slots", "memory", "SMP cores", "storage", "spare nodes"):
        assert re.search(rf"^{word} ", table, re.M), word
    for word in ("the hook's defaults", "with m = 2", "survives 30 days", "seed 1"):
        assert word in table
    assert "assumed" in printed
    promised = "interval_steps interval_s k m encode_every persist_every overhead ettr memory_bytes_per_node"
    assert list(data)[:11] == [*promised.split(), "survival_30d", "why"]
    assert data["interval_s"] == 12 * data["interval_steps"]
    assert data["k"] >= data["m"] == 2
    assert sum(size * count for size, count in data["groups"]) == 64
    assert data["memory_bytes_per_node"] == pytest.approx(data["slots"] * 98e9 * (1 + data["m"] / data["k"]))
    assert 0.98 < data["ettr"] < 1 and data["lost_s_per_day"] == pytest.approx((1 - data["ettr"]) * DAY_S)
    tuned = planned(tmp_path, "tune", *JOB[1:])
    assert tuned == data, "tune is the same command"


def test_the_tables_fit_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*JOB, "--persist-rate", "1GB/s", "--generations", "3"]) == 0
    parts = capsys.readouterr().out.split("\n\n")
    for part in (parts[0], parts[2], parts[3]):  # the others are prose, which a pipe gets as it is
        assert max(map(len, part.splitlines())) <= 80


@pytest.mark.parametrize("command", ["plan", "tune"])
@pytest.mark.parametrize(
    ("options", "missing"), [([], "--step"), (["--state", "98GB"], "--step"), (["--step", "12s"], "--state")]
)
def test_without_a_step_or_a_state_the_profile_is_named(
    command: str, options: list[str], missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, *options]) == 2
    error = capsys.readouterr().err
    assert missing in error and "--profile" in error


def test_a_longer_time_to_rebuild_survives_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--protect", "6+2", "--placement", "labelled", "--rebuild"]
    survival = [planned(tmp_path, *JOB, *options, window)["survival_30d"] for window in ("10min", "5h")]
    assert survival[1] < survival[0]
    capsys.readouterr()
    assert main([*JOB, "--rebuild", "5h"]) == 0
    assert "repair in 5 h" in " ".join(capsys.readouterr().out.split())


def test_a_measured_profile_takes_the_place_of_assumptions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile_file = tmp_path / "profile.json"
    profile_file.write_text(json.dumps(replace(FULL, snapshot_step_sd_s=0.2).to_json()))
    assert main(["tune", "--profile", str(profile_file), "--json", "-"]) == 0
    streams = capsys.readouterr()
    assert "on 16 x 8 GPUs" in streams.err
    assert "all times" not in streams.err
    plan = json.loads(streams.out)
    assert plan["memory_bytes_per_node"] >= 2 * 10**10
    assert plan["smp_cores"] is None and plan["job"]["nodes"] == 16


def test_trainers_are_told_of_failures_that_they_would_not_expect(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(JOB) == 0
    assert "HOLDFAST_MTBF" not in capsys.readouterr().out
    assert main([*JOB, "--mtbf", "1000d"]) == 0
    told = re.search(r"HOLDFAST_MTBF=(\w+)", capsys.readouterr().out)
    assert told is not None
    monkeypatch.setenv("HOLDFAST_MTBF", told[1])
    assert MTBF.value() == pytest.approx(1000 * DAY_S)


def test_a_log_moves_the_failure_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.csv"
    log.write_text("time_h,class\n" + "".join(f"{hour},process\n" for hour in range(1, 500)))
    assert main([*JOB, "--log", str(log), "--log-span", "500h"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search("499 incidents .*64 nodes .*20.8 d", printed)
    assert re.search(r"process [23]\.\d+ h", printed)  # hourly in the log, once in 8 days in the prior


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes", "0"], "0 nodes of 8 GPUs"),
        (["--mtbf=-5d"], "--mtbf: '-5d' .*not a time"),
        (["--mtbf", "0d"], "--mtbf: '0d': give more than 0"),
        (["--mtbf", "1000"], "--mtbf: '1000' .*no unit"),
        (["--mtbf", "1d 3h"], "--mtbf: '1d 3h' .*not a time"),
        (["--failures", "mars"], "'mars' .* failure profile: .*llama3"),
        (["--protect", "60+8"], r"60\+8 needs 68 nodes.* 64"),
        (["--state", "98 apples"], "--state: '98 apples'"),
        (["--overhead-budget", "-1%"], "--overhead-budget: '-1%': give 0 to 1"),
        (["--target-survival", "101%"], "--target-survival: '101%': give 0 to 1"),
        (["--generations", "9"], "generations is 9"),
        (["--gpus-per-node", "0"], "64 nodes of 0 GPUs"),
        (["--model", "7b"], "--state and --model both"),
        (["--domain-nodes", "0"], "0 nodes fail"),
        (["--placement", "anywhere"], "'anywhere' .*placement: .*labelled"),
        (["--log", "/does/not/exist"], "--log: /does/not/exist .*not a file"),
        (["--measured", __file__], f"--measured {__file__}: .*JSON"),
        (["--seed", "-1"], "seed is -1"),
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
    assert "no incidents" in capsys.readouterr().err
    log.write_text("time,class\n2026-01-01,process\n17,process\n")
    assert main([*JOB, "--log", str(log)]) == 2
    assert "line 3: time is '17'" in capsys.readouterr().err


def test_a_survival_near_one_is_legible() -> None:
    assert survival_text(0.1) == "90.00 %"
    assert survival_text(4.2e-5) == "99.9958 %"
    assert survival_text(4.1e-10) == "over 99.9999 %"


def test_the_planner_runs_without_torch_and_scipy() -> None:
    code = (
        "import sys; from holdfast.planner import measured, model, reasons\n"
        "print([m for m in ('torch', 'scipy', 'grpc') if m in sys.modules])"
    )
    done = python(code)
    assert done.stdout.strip() == "[]"


def test_help_has_its_options_in_groups_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["tune", "--help"])
    text = capsys.readouterr().out
    for title in ("the job:", "the machine:", "what fails", "what is wanted:"):
        assert title in text
    assert "holdfast plan --model 70b --nodes 8 --step 12s" in " ".join(text.split())
