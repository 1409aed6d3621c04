"""The rates that a plan assumes of an SMP, what it says about them, and which improvement it says is worth buying."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fleet.__main__ import make_parser
from holdfast import ConfigError
from holdfast.cli.main import main
from holdfast.planner.advice import advice
from holdfast.planner.rates import FORMAT, KIND, LAST, NodeRates, SmpRates, basis
from holdfast.planner.sizing import PRESETS, Machine, ModelJob, Sizes, size
from holdfast.snapshot.resume.arrange import Protection
from tests.unit.test_tuning_measured import RUN

ROOT = Path(__file__).parents[2]
RATES = NodeRates(
    date="2026-11-20T12:00:00+00:00",
    cpu_model="Some CPU",
    cores=4,
    copy=6e9,
    digest=10e9,
    send=5e9,
    receive=4e9,
    fold=8e9,
    protect=2e9,
    smp_cores=1.5,
)


def node_file(path: Path, **changes: Any) -> Path:
    """A file as ``bench node`` would have written it."""
    rates = {name: getattr(RATES, name) for name in RATES.__slots__}
    path.write_text(json.dumps({"kind": KIND, "format": FORMAT, "rates": rates} | changes))
    return path


def test_an_smp_does_so_much_for_each_core_and_no_more_than_the_network() -> None:
    smp = SmpRates(rates=RATES)
    assert (smp.cores, smp.digest, smp.network, smp.limit) == (1.5, 15e9, 3e9, "cores")
    more = replace(smp, given_cores=8)
    assert (more.cores, more.digest, more.network, more.limit) == (8, 80e9, 16e9, "cores")
    wired = replace(more, line_rate=12e9)
    assert (wired.protect, wired.network, wired.limit) == (16e9, 12e9, "network")
    assert replace(wired, line_rate=20e9).limit == "cores"
    assert SmpRates(rates=replace(RATES, smp_cores=0.4)).cores == 1, "others kept it from a whole core"


def test_what_the_user_says_wins() -> None:
    smp = SmpRates(rates=RATES, line_rate=1e9, given_network=40e9, given_digest=7e9)
    assert (smp.network, smp.digest, smp.limit) == (40e9, 7e9, "given")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"given_cores": 0.0}, "the cores of an SMP is 0: give more than 0"),
        ({"given_network": 0.0}, "the network rate is 0 bytes per second"),
        ({"given_digest": -1.0}, "the digest rate is -1 bytes per second"),
        ({"line_rate": 0.0}, "the line rate is 0 bytes per second"),
        ({"line_rate": math.nan}, "the line rate is nan bytes per second"),
    ],
)
def test_no_rate_is_0(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SmpRates(**changes)


def said(smp: SmpRates, here: int = 4) -> str:
    return " ".join(basis(smp, here))


def test_it_is_said_what_the_rates_rest_on() -> None:
    assert "Rates are as last measured (2026-11-20, Some CPU, 4 cores), since there is no --measured" in said(
        SmpRates(rates=RATES)
    )
    text = said(SmpRates(rates=RATES, file="node.json"))
    assert "Rates are from node.json (2026-11-20, Some CPU, 4 cores)" in text
    assert "2 GB/s protected and 10 GB/s digested" in text
    assert (
        "A core needs 0.50 s for each GB that is protected: 0.20 to send, 0.25 to receive, 0.10 to digest, 0.12" in text
    )
    assert "it has 1.5 cores (--smp-cores says how many it may use)" in text
    assert "Protecting sends 3 GB/s out of a node: what the SMP's cores can do" in text
    assert "NOTE" not in text


def test_it_is_said_what_limits() -> None:
    smp = SmpRates(rates=RATES, given_cores=4)
    assert "8 GB/s out of a node: the SMP's cores limit it; the network cards would do 9 GB/s" in said(
        replace(smp, line_rate=9e9)
    )
    assert "7 GB/s out of a node: its network cards (--line-rate) limit it, for those cores would do 8 GB/s" in said(
        replace(smp, line_rate=7e9)
    )
    assert "25 GB/s out of a node, as --network-rate says; those cores would do 8 GB/s" in said(
        replace(smp, given_network=25e9)
    )
    assert "it has 4 cores (--smp-cores)" in said(smp)


def test_another_machine_and_cores_that_were_not_measured_are_said() -> None:
    text = said(SmpRates(rates=RATES, file="node.json"), here=96)
    assert "NOTE: node.json was measured on a machine with 4 cores, and this one has 96" in text
    assert "NOTE" not in said(SmpRates(rates=RATES), here=96), "nobody says that what is built in is of this machine"
    assert "NOTE: 4 cores were measured, and not 16: the plan assumes that each of them is as fast" in said(
        SmpRates(rates=RATES, given_cores=16)
    )


def sized(step_s: float = 0.0) -> Callable[[SmpRates, int], Sizes]:
    """50 GB a node, in groups of 8."""
    job = ModelJob(PRESETS["70b"], nodes=16, step_s=step_s)
    return lambda smp, parity: size(
        job, Machine(network_rate=smp.network, digest_rate=smp.digest), Protection(8 - parity, parity)
    )


def advised(smp: SmpRates, parity: int = 1, step_s: float = 0.0) -> list[str]:
    return list(advice(smp, parity, step_s, sized(step_s)))


def times(sentence: str) -> tuple[float, float]:
    """The seconds in "in x s instead of y s"."""
    found = re.search(r"in ([\d.]+) s instead of ([\d.]+) s", sentence)
    assert found is not None, sentence
    return float(found[1]), float(found[2])


def test_where_cores_limit_more_cores_are_advised() -> None:
    smp = SmpRates(rates=RATES, given_cores=4)
    first, second = advised(smp)
    assert first.startswith("Cores limit: with 16 cores for the SMP instead of 4 the snapshot is protected in ")
    sooner, now = times(first)
    assert now == pytest.approx(sized()(smp, 1).protected_s, rel=0.01)
    assert sooner == pytest.approx(sized()(replace(smp, given_cores=16), 1).protected_s, rel=0.01)
    assert second.startswith("Interval: every snapshot is protected if one is taken every ")


def test_no_more_cores_are_advised_than_the_network_has_use_for() -> None:
    first = advised(SmpRates(rates=RATES, given_cores=4, line_rate=13e9))[0]
    assert first.startswith("Cores limit: with 7 cores for the SMP instead of 4 ")
    assert first.endswith("; then the network cards limit.")


def test_where_the_network_limits_cards_are_advised() -> None:
    first = advised(SmpRates(rates=RATES, given_cores=40, line_rate=13e9))[0]
    assert first.startswith("Network cards limit, and 7 cores fill them: with twice as many, 26 GB/s, the snapshot is ")
    sooner, now = times(first)
    assert sooner < now


def test_a_rate_that_was_given_is_what_limits() -> None:
    first = advised(SmpRates(rates=RATES, given_network=5e9))[0]
    sooner, now = times(first)
    assert first.startswith("--network-rate limits: at twice 5 GB/s ") and sooner < now


def test_fewer_parities_are_faster_and_survive_less() -> None:
    _, second, _ = advised(SmpRates(rates=RATES), parity=2)
    sooner, now = times(second)
    assert second.startswith("m: with m = 1 instead of 2, and one loss less survived, ") and sooner < now


def test_how_often_each_snapshot_is_protected_follows_from_the_step() -> None:
    smp = SmpRates(rates=RATES, given_cores=4)
    steps = sized(2.0)(smp, 1).interval_steps
    last = advised(smp, step_s=2.0)[-1]
    found = re.fullmatch(
        rf"Interval: a snapshot can be protected every {steps} steps; at every step with (\d+) cores.", last
    )
    assert found is not None
    cores = int(found[1])
    assert sized(2.0)(replace(smp, given_cores=cores), 1).interval_steps == 1
    assert sized(2.0)(replace(smp, given_cores=cores - 1), 1).interval_steps > 1
    assert advised(smp, step_s=60.0)[-1] == "Interval: a snapshot can be protected at every step."
    wired = advised(replace(smp, line_rate=1e9), step_s=2.0)[-1]
    assert wired.endswith("at every step by no number of cores alone.")


def test_without_parity_there_is_nothing_to_buy() -> None:
    assert advised(SmpRates(), parity=0) == []


def test_what_is_assumed_is_what_the_last_result_says() -> None:
    path = ROOT / "benchmarks/results" / f"node-{LAST.date}.json"
    measured = NodeRates.from_json(json.loads(path.read_text()))
    assert replace(measured, date=LAST.date) == LAST, f"planner.rates.LAST is not of {path.name}"
    newest = max(found.stem for found in path.parent.glob("node-*.json"))
    assert path.stem == newest, "planner.rates.LAST is not of the newest result"


def plan_of(*options: str, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    assert main(["plan", "--model", "70b", "--nodes", "16", *options, "--json", "-"]) == 0
    told = capsys.readouterr()
    [row] = json.loads(told.out)
    return row, " ".join(told.err.split())


def test_plan_takes_rates_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = node_file(tmp_path / "node.json")
    row, text = plan_of("--measured", str(file), "--smp-cores", "4", capsys=capsys)
    node = row["sizes"]["node_bytes"]
    assert row["sizes"]["encode_s"] == pytest.approx(node / 8e9)
    assert row["sizes"]["seal_s"] == pytest.approx(node / 40e9)
    assert row["rates"]["source"] == str(file) and row["rates"]["limit"] == "cores"
    assert f"Rates are from {file} (2026-11-20, Some CPU, 4 cores)" in text
    assert " ".join(row["advice"]) in text and row["advice"][0].startswith("Cores limit: with 16 cores")
    row, _ = plan_of("--measured", str(file), "--network-rate", "25GB/s", capsys=capsys)
    assert row["sizes"]["encode_s"] == pytest.approx(node / 25e9)
    row, _ = plan_of("--measured", str(file), "--offload", capsys=capsys)
    assert row["sizes"]["copy_s"] == pytest.approx(node / 6e9)


def test_plan_without_a_file_assumes_what_was_measured_and_not_line_rate(capsys: pytest.CaptureFixture[str]) -> None:
    row, text = plan_of("--line-rate", "50GB/s", capsys=capsys)
    assert row["sizes"]["encode_s"] == pytest.approx(row["sizes"]["node_bytes"] / SmpRates().protect)
    assert SmpRates().protect == LAST.protect * max(1, LAST.smp_cores)
    assert "since there is no --measured" in text and "the network cards would do 50 GB/s" in text


def test_tune_takes_a_profile_a_machine_or_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = node_file(tmp_path / "node.json")
    job = ["tune", "--step", "12s", "--state", "98GB", "--nodes", "128", "--mtbf", "1000d"]
    assert main([*job, "--measured", str(file), "--json", "-"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["rates"]["network_rate"] == 3e9
    assert f"Rates are from {file}" in told.err
    assert main([*job, "--json", "-"]) == 0
    assert "since there is no --measured" in capsys.readouterr().err
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(replace(RUN, parity=0, data=0, encode_s=0.0).to_json()))
    both = ["tune", "--nodes", "128", "--measured", str(profile), "--measured", str(file)]
    assert main([*both, "--json", "-"]) == 0
    assert f"Rates are from {file}" in capsys.readouterr().err, "encoding was not measured"
    profile.write_text(json.dumps(RUN.to_json()))
    assert main([*both, "--json", "-"]) == 0
    assert "Rates are" not in capsys.readouterr().err, "all was measured, and no rate was used"
    assert main([*both, "--measured", str(profile)]) == 2
    assert f"--measured {profile}: there is a profile already" in capsys.readouterr().err
    assert main([*job, "--measured", str(file), "--measured", str(file)]) == 2
    assert "there are rates of a machine already" in capsys.readouterr().err


def test_simulate_takes_rates_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = node_file(tmp_path / "node.json")
    fleet = ["--gpus", "128", "--days", "2", "--seeds", "1", "--strategies", "holdfast", "--protect", "7+1"]
    every = {}
    for options in ([], ["--measured", str(file)], ["--measured", str(file), "--smp-cores", "64"]):
        assert main([*fleet, *options, "--json", "-"], make_parser()) == 0
        told = capsys.readouterr()
        result = json.loads(told.out)
        every[len(options)] = result["rows"][0]["every"]
        assert ("since there is no --measured" in told.err) == (not options)
    assert every[4] < every[2], "64 cores protect sooner than 1.5"


@pytest.mark.parametrize("command", ["plan", "tune"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "something else"}, "it was not written by holdfast bench node --json"),
        ({"format": FORMAT + 1}, f"its format is {FORMAT + 1}, and this version reads {FORMAT}: measure anew"),
        ({"rates": None}, "it was measured with --smps-only"),
        ({"rates": {"cores": 2}}, "it is damaged: .*missing required field"),
        ({"rates": {"protect": "fast"}}, "it is damaged: "),
    ],
)
def test_a_file_that_is_another_is_refused(
    command: str, changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = node_file(tmp_path / "node.json", **changes)
    assert main([command, "--measured", str(file)]) == 2
    assert re.search(f"--measured {file}: {message}", capsys.readouterr().err)


@pytest.mark.parametrize("command", ["plan", "tune"])
def test_a_file_that_is_no_json_is_refused(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "node.json"
    file.write_bytes(b"\xff{")
    assert main([command, "--measured", str(file)]) == 2
    assert f"--measured {file}: it cannot be read as JSON" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "tune"])
@pytest.mark.parametrize("text", ["0", "-1", "many", "nan", "inf"])
def test_a_number_of_cores_that_is_none_is_refused(command: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, f"--smp-cores={text}"]) == 2
    assert f"--smp-cores: '{text}' is not a number of cores" in capsys.readouterr().err
