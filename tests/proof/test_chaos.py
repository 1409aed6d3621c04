"""Chaos: scenarios on real processes, how they are read and drawn, and how verdicts are reached."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast import ConfigError, DeadlineExceeded, HoldfastError
from holdfast.chaos import faults as product
from holdfast.chaos.cluster import History, Restart
from holdfast.chaos.user import command as user_command
from holdfast.cli.main import main
from holdfast.planner.profiles import PROFILES
from tests.proof.chaos.__main__ import line, make_parser, shard
from tests.proof.chaos.actions import ACTIONS
from tests.proof.chaos.campaign import Campaign, summary
from tests.proof.chaos.checks import CHECKS
from tests.proof.chaos.faults import CATALOGUE, Fault, due_at
from tests.proof.chaos.report import markdown, page
from tests.proof.chaos.scenario import (
    ON_THE_NETWORK,
    Scenario,
    built_in,
    campaign,
    choose,
    draw,
    from_json,
    mixed,
    parse,
    replay_command,
    several,
    to_json,
)
from tests.proof.chaos.verdict import judge, lost_protected, torn
from tests.proof.sim import plan as sim_plan
from tests.sampling import chosen

# ---------------------------------------------------------------------- real processes


def covering() -> list[Scenario]:
    """A small set of quick scenarios with every kind of fault and every point of all quick ones, and with every one
    that must not end identically.

    `test_cluster` also loses trainers and nodes at every point.
    """
    quick = [each for each in built_in() if each.quick]
    kept = [each for each in quick if each.expect != "identical"]
    missing = {part for each in quick for part in parts(each)} - {part for each in kept for part in parts(each)}
    while missing:
        kept.append(max(quick, key=lambda each: len(parts(each) & missing)))
        missing -= parts(kept[-1])
    return kept


def parts(scenario: Scenario) -> set[str]:
    return {part for fault in scenario.faults for part in (fault.kind, fault.point)}


@pytest.fixture(scope="module")
def running() -> Iterator[Campaign]:
    with Campaign() as made:
        yield made


@pytest.mark.cluster
@pytest.mark.parametrize("scenario", chosen(built_in(), covering()), ids=lambda each: each.name)
def test_a_scenario_ends_as_it_must(running: Campaign, scenario: Scenario) -> None:
    verdict = running.run(scenario, replay_command(scenario))
    if verdict.skipped:
        pytest.skip(verdict.skipped)
    assert verdict.problems == ()
    assert verdict.injected == verdict.asked > 0 or not scenario.quick


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("seed", "how"), [(1, {}), (2, {"double": True}), (3, {"beyond": True}), (4, {"announced": True})]
)
def test_a_drawn_scenario_ends_as_it_must(running: Campaign, seed: int, how: dict[str, Any]) -> None:
    verdict = running.run(draw(seed, 2, **how), "")
    assert verdict.problems == ()


@pytest.mark.cluster
@pytest.mark.proves("demo")
def test_at_the_default_settings_it_is_as_exact_and_told_how_often_snapshots_were_taken(running: Campaign) -> None:
    verdict = running.run(draw(4, 3, defaults=True), "")
    assert verdict.problems == ()
    assert verdict.interval >= 1 and verdict.held_up is not None
    assert not verdict.checks["again"]


@pytest.mark.cluster
@pytest.mark.parametrize(("name", "status"), [("smp-crashes", -signal.SIGSEGV), ("smp-terminated", -signal.SIGTERM)])
def test_an_smp_ends_by_the_signal_that_it_was_sent(running: Campaign, name: str, status: int) -> None:
    (scenario,) = choose(name)
    verdict = running.run(scenario, "")
    assert verdict.problems == ()
    assert [event["status"] for event in verdict.history.of("smp-ended")] == [status]


@pytest.mark.cluster
def test_the_command_writes_reports_and_replays_what_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scenarios = tmp_path / "mine.toml"
    scenarios.write_text(
        '[fine]\nwhat = "a kill"\nsteps = 6\nfault = [{kind = "kill-trainer", targets = [1], step = 4}]\n'
        '[hopeless]\nwhat = "too much"\nsteps = 6\nfault = [{kind = "lose-node", targets = [0, 1], step = 4}]\n'
    )
    files = [str(tmp_path / name) for name in ("report.json", "report.html", "report.md")]
    assert (
        main(["run", str(scenarios), "--json", files[0], "--html", files[1], "--markdown", files[2]], make_parser())
        == 1
    )
    report = json.loads(Path(files[0]).read_text())
    assert (report["scenarios"], report["failed"], report["faults_asked"], report["faults_injected"]) == (2, 1, 3, 3)
    assert report["replay"] == ["python -m tests.proof.chaos run hopeless"]
    assert re.search(r"rank[0-2]: \S*Unrecoverable", report["cases"][1]["problems"][0])
    assert report["cases"][0]["failure"] == ""
    assert "--- smp.log of node2" in report["cases"][1]["failure"]
    Checker().feed(Path(files[1]).read_text())
    assert "| hopeless | lose-node 0+1 |" in Path(files[2]).read_text()
    capsys.readouterr()
    assert main(["replay", files[0]], make_parser()) == 1
    assert "FAILED hopeless" in capsys.readouterr().out


class Checker(HTMLParser):
    """Checks that every element that is opened is closed, and that nothing is loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href"} & {name for name, _ in attrs}
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


# ---------------------------------------------------------------------- scenarios


def test_there_are_enough_of_them() -> None:
    scenarios = built_in()
    assert len({each.name for each in scenarios}) == len(scenarios) >= 70
    quick = [each for each in scenarios if each.quick]
    assert len(quick) >= 25 and sum(each.asked for each in quick) >= 60
    assert {fault.kind for each in scenarios for fault in each.faults} == ACTIONS.keys()
    assert all(each.what for each in scenarios)


def test_each_backend_injects_kinds_of_the_catalogue() -> None:
    assert set(user_command.KINDS) == product.CATALOGUE.keys()
    assert ACTIONS.keys() | {*sim_plan.KINDS} < CATALOGUE.keys()


def test_the_campaign_is_large_enough() -> None:
    scenarios = campaign()
    again = [
        f for s in scenarios for f in s.faults if f.point in ("restore.before", "restore.middle", "rebuild.middle")
    ]
    assert sum(each.asked for each in scenarios) >= 2000
    assert len(again) >= 300
    assert sum(each.beyond_parity for each in scenarios) >= 100
    turns = [[fault.kind == "drain-node" for fault in each.faults] for each in scenarios]
    assert turns.count([True, False, True, False]) >= 30


def test_the_same_seed_draws_the_same_scenario() -> None:
    ways: list[dict[str, Any]] = [{}, {"double": True}, {"beyond": True}, {"announced": True}, {"defaults": True}]
    ways.append({"profile": PROFILES["ft-hsdp"]})
    for how in ways:
        assert draw(5, 3, **how) == draw(5, 3, **how)
        assert draw(5, 3, **how) != draw(6, 3, **how)


def test_several_are_drawn_as_was_asked_for() -> None:
    assert list(several(3, 4, 2, double=True)) == [draw(seed, 2, double=True) for seed in range(3, 7)]
    assert all(each.beyond_parity for each in several(1, 5, 2, beyond=True))
    assert list(several(1, 3, 2, profile=PROFILES["rsc-1"])) == [
        draw(seed, 2, profile=PROFILES["rsc-1"]) for seed in (1, 2, 3)
    ]
    assert list(several(1, 30, 4)) == list(mixed(1, 30))


def test_drawn_scenarios_survive_json() -> None:
    for scenario in [*mixed(0, 40), *built_in()]:
        assert from_json(json.loads(json.dumps(to_json(scenario)))) == scenario


@pytest.mark.parametrize(
    ("scenario", "command"),
    [
        (draw(7, 3), "python -m tests.proof.chaos run --seed 7 --faults 3"),
        (draw(7, 3, double=True), "python -m tests.proof.chaos run --seed 7 --faults 3 --double"),
        (draw(7, 2, beyond=True), "python -m tests.proof.chaos run --seed 7 --faults 2 --beyond"),
        (draw(7, 4, announced=True), "python -m tests.proof.chaos run --seed 7 --faults 4 --announced"),
        (draw(7, 4, profile=PROFILES["rsc-1"]), "python -m tests.proof.chaos run --seed 7 --faults 4 --profile rsc-1"),
        (choose("pause")[0], "python -m tests.proof.chaos run pause"),
    ],
    ids=lambda value: value.name if isinstance(value, Scenario) else "",
)
def test_each_has_a_command_that_runs_it_again(scenario: Scenario, command: str) -> None:
    assert replay_command(scenario) == command


def test_what_strikes_a_recovery_waits_for_what_it_is_to_recover_from() -> None:
    first, again, second, more = faults = [
        Fault("rank1", "copy.done", 4, "lose-node", (1,)),
        Fault("smp1", "rebuild.middle", None, "lose-node", (0,)),
        Fault("rank0", "copy.middle", 8, "lose-node", (0,)),
        Fault("smp0", "rebuild.middle", None, "lose-node", (4,)),
    ]
    assert due_at(faults, "smp1", "rebuild.middle", 3) == []
    first.fired_at = 1.0
    assert due_at(faults, "smp1", "rebuild.middle", 3) == [again]
    again.fired_at = 2.0
    assert due_at(faults, "smp0", "rebuild.middle", 3) == []  # node 0 is being rebuilt in the recovery from `first`
    assert due_at(faults, "rank0", "copy.middle", 8) == [second]
    second.fired_at = 3.0
    assert due_at(faults, "smp0", "rebuild.middle", 7) == [more]


def test_some_of_what_is_drawn_is_on_the_network() -> None:
    drawn = [draw(seed, 4) for seed in range(400)]
    assert 20 <= sum(each.wired for each in drawn) <= 60
    assert {fault.kind for each in drawn if each.wired for fault in each.faults} >= ON_THE_NETWORK.keys()
    assert not any(draw(seed, 4, double=True).wired or draw(seed, 2, beyond=True).wired for seed in range(50))


@pytest.mark.cluster
def test_what_this_machine_cannot_do_is_left_out_and_says_why(
    running: Campaign, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.proof.chaos.network.namespaces.unavailable", lambda: "needs a wire")
    monkeypatch.setattr("tests.proof.chaos.network.clocks.unavailable", lambda: "needs a compiler")
    for name, reason in (("partitioned", "needs a wire"), ("a-clock-jumps-ahead", "needs a compiler")):
        assert running.run(choose(name)[0], "").skipped == reason


def test_a_profile_draws_failures_as_often_as_its_study_saw_them() -> None:
    mix = PROFILES["ft-hsdp"]
    kinds = [fault.kind for seed in range(400) for fault in draw(seed, 4, profile=mix).faults]
    lost = sum(kind == "lose-node" for kind in kinds) / len(kinds)
    assert lost == pytest.approx(mix.memory + mix.shock, abs=0.03)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "not valid TOML"),
        ("[a]\nsize = 3", r"unknown keys \['size'\]"),
        ("[a]\nwhat = ''\nfault = [{kind = 'burn'}]", "'burn': .*kill-trainer"),
        ("[a]\nwhat = ''\nfault = [{kind = 'lose-node', targets = [3]}]", r"lose-node of .* below 3"),
        (
            "[a]\nwhat = ''\nfault = [{kind = 'lose-packets', targets = [0]}]",
            "amount = 0: choose 1 to 90",
        ),
        (
            "[a]\nwhat = ''\nfault = [{kind = 'partition', targets = [0]}]",
            "partition with for_s = 0.0",
        ),
        ("[a]\nwhat = ''\nexpect = 'luck'", "'luck': .*persisted"),
        ("[a]\nwhat = ''\nprotect = 'x'", "protect='x'"),
        ("[a]\nfault = []", "missing"),
        ("a = 3", "not a table"),
    ],
)
def test_a_bad_file_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(text, "mine.toml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nonsense"], "scenario 'nonsense'"),
        (["run", "--double"], "drawn scenarios"),
        (["run", "pause", "--seed", "1"], "'pause', or --seed"),
        (["run", "--seed", "1", "--faults", "0"], "0 faults: choose 1 to 20"),
        (["run", "--seed", "1", "--count", "0"], "--count 0"),
        (["run", "--seed", "1", "--profile", "x"], "'x' is not"),
        (["run", "/no/such.toml"], "cannot be read"),
        (["replay", "/no/such.json"], "not a file"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments, make_parser()) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_the_list_names_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json", "-"], make_parser()) == 0
    assert {each["name"] for each in json.loads(capsys.readouterr().out)} == {each.name for each in built_in()}


# ---------------------------------------------------------------------- verdicts

KILL = Fault("rank0", "train.step", 2, "kill-trainer", (0,))
CLOCK = {"enter": 2.5, "plan": 2.6, "fetch": 2.7, "load": 2.8}
ONE = Scenario("one", "one kill", (KILL,), nodes=1, steps=3)


def run_of(
    *, restored: int = 1, protected: int = 1, loss: str = "0x1p+0", digest: str = "a", how: str = "held"
) -> History:
    """A run that was killed in step 2 and continues from step `restored`."""
    history = History()
    history.events = [
        {"kind": "started", "rank": 0, "generation": 0, "step": 0, "how": "", "at": 0.0},
        {"kind": "step", "rank": 0, "generation": 0, "step": 1, "loss": "0x1p+0", "protected": protected, "at": 1.0},
        {"kind": "fault", "fault": "kill-trainer", "targets": [0], "generation": 0, "step": 2, "at": 2.0},
        {"kind": "started", "rank": 0, "generation": 1, "step": restored, "how": how, "at": 3.0, "clock": CLOCK},
        *(
            {"kind": "step", "rank": 0, "generation": 1, "step": s, "loss": loss, "protected": None, "at": 3.0 + s}
            for s in range(restored + 1, 4)
        ),
        {"kind": "end", "rank": 0, "generation": 1, "digests": {"x": digest}, "at": 9.0},
    ]
    history.restarts = [Restart([KILL], 2.0, 2.1, 2.2)]
    return history


def undisturbed() -> History:
    history = History()
    history.events = [
        *({"kind": "step", "rank": 0, "generation": 0, "step": s, "loss": "0x1p+0", "at": s} for s in (1, 2, 3)),
        {"kind": "end", "rank": 0, "generation": 0, "digests": {"x": "a"}, "at": 9.0},
    ]
    return history


def verdict_on(history: History, failure: HoldfastError | None = None, scenario: Scenario = ONE, **more: Any) -> Any:
    return judge(scenario, undisturbed(), history, failure, more.get("leaks", ()), 1.0, "again")


def test_a_run_that_went_as_it_must_has_no_problems() -> None:
    verdict = verdict_on(run_of())
    assert verdict.problems == () and verdict.replay == ""
    assert (verdict.asked, verdict.injected, verdict.restarts, verdict.steps_again) == (1, 1, 1, (0,))


@pytest.mark.parametrize(
    ("history", "failure", "scenario", "problem"),
    [
        (run_of(loss="0x1p+1"), None, ONE, "rank 0 at step 2"),
        (run_of(digest="b"), None, ONE, "rank 0 differs: x"),
        (run_of(restored=0), None, ONE, "1 protected steps"),
        (run_of(restored=0, protected=0), None, replace(ONE, again=0), "1 finished steps"),
        (run_of(how="repaired"), None, ONE, "shard was damaged"),
        (run_of(), None, replace(ONE, faults=(KILL, KILL)), "2 faults"),
        (run_of(), DeadlineExceeded("60 s"), ONE, "did not end"),
        (run_of(), HoldfastError("StateMismatchError: x"), ONE, "it failed: StateMismatchError: x"),
        (run_of(), None, replace(ONE, expect="unrecoverable"), "nothing had happened"),
        (run_of(), HoldfastError("OSError: x"), replace(ONE, expect="unrecoverable"), "not with Unrecoverable"),
    ],
)
def test_each_breach_is_a_problem(
    history: History, failure: HoldfastError | None, scenario: Scenario, problem: str
) -> None:
    verdict = verdict_on(history, failure, scenario)
    assert not verdict.held and verdict.replay == "again"
    assert any(problem in each for each in verdict.problems), verdict.problems


def test_a_fault_that_did_nothing_is_a_problem() -> None:
    history = run_of()
    for event in history.of("step"):
        event["wall"] = event["at"] + 1000.0
    history.events += [{"kind": "impaired", "fault": "throttle", "packets": packets} for packets in (0, 5)]
    jump = Fault("rank0", "train.step", 1, "jump-clock", (0,), amount=3600)
    problems = " ".join(verdict_on(history, scenario=replace(ONE, faults=(KILL, jump))).problems)
    assert "throttle met no" in problems and "3600 s ahead" in problems
    history.of("step")[-1]["wall"] += 3600.5
    history.events.pop(-2)
    (problem,) = verdict_on(history, scenario=replace(ONE, faults=(KILL, jump))).problems
    assert "2 faults" in problem and "1 were done" in problem


def test_an_smp_that_outlives_its_signal_is_a_problem() -> None:
    history = run_of()
    history.events += [{"kind": "smp-ended", "by": "SIGKILL", "status": -9}]
    history.events += [{"kind": "smp-ended", "by": "SIGTERM", "status": status} for status in (-15, 0, None)]
    assert verdict_on(history).problems == ()
    history.events += [{"kind": "smp-ended", "by": "SIGTERM", "status": -9}]
    assert ["outlived SIGTERM" in each for each in verdict_on(history).problems] == [True]


def test_leaks_and_unexpected_errors_are_problems() -> None:
    history = run_of()
    history.tracebacks = ["smp0: ValueError"]
    verdict = verdict_on(history, leaks=("process 3",))
    assert [each.partition(": ")[2] for each in verdict.problems] == ["process 3", "smp0: ValueError"]


def test_ranks_that_start_at_different_steps_are_torn() -> None:
    history = run_of()
    history.events.append({"kind": "started", "rank": 1, "generation": 1, "step": 2, "how": "held", "at": 3.0})
    assert torn(history).endswith("different steps: [1, 2]")
    assert lost_protected(history) == 0


def test_beyond_parity_a_loud_failure_is_what_must_be() -> None:
    history = run_of()
    history.events = history.events[:3]
    history.restarts = []
    assert verdict_on(history, HoldfastError("Unrecoverable: x"), replace(ONE, expect="unrecoverable")).held


def test_figures_count_what_ran_and_reports_show_it() -> None:
    good, bad = verdict_on(run_of()), verdict_on(run_of(restored=0))
    figures = summary([good, bad], 2.0)
    assert figures == {
        "faults_asked": 2,
        "faults_injected": 2,
        "scenarios": 2,
        "wrong_states": 0,
        "lost_protected_steps": 1,
        "hangs": 0,
        "leaks": 0,
        "failed": 1,
        "seconds": 2.0,
        "replay": ["again"],
        "checks": {check: good.checks[check] + bad.checks[check] for check in CHECKS},
    }
    assert figures["checks"]["result"] == 2
    Checker().feed(page([good, bad], figures))
    assert "1 protected steps" in markdown([good, bad], figures)


def test_shards_are_all_scenarios_together() -> None:
    every = built_in()
    assert sorted(each.name for i in (1, 2, 3) for each in shard(every, f"{i}/3")) == sorted(
        each.name for each in every
    )
    assert shard(every, "1/1") == every
    for bad in ("0/2", "3/2", "1", "a/b", ""):
        with pytest.raises(ConfigError, match=r"--shard .*I/N"):
            shard(every, bad)


def test_what_failed_is_printed_as_it_is() -> None:
    """Errors of other software contain brackets, which rich would take for markup."""
    problem = "dp0: RuntimeError: [/src/transport/pair.cc:537] Connection closed by peer"
    scenario = SimpleNamespace(name="seed-1", beyond_parity=False)
    failed = line(SimpleNamespace(scenario=scenario, skipped="", held=False, problems=[problem]))
    assert failed.plain == f"FAILED seed-1: {problem}"
