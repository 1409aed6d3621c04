"""The rates that a plan assumes of an SMP, what it says about them, and the files that they are read from."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fleet.__main__ import make_parser
from holdfast import ConfigError
from holdfast.cli.main import main
from holdfast.planner.rates import FORMAT, KIND, LAST, NodeRates, SmpRates, basis
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"given_cores": 0.0}, "cores .*is 0"),
        ({"line_rate": 0.0}, "line rate is 0"),
        ({"line_rate": math.nan}, "rate is nan"),
    ],
)
def test_no_rate_is_0(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SmpRates(**changes)


def said(smp: SmpRates, here: int = 4) -> str:
    return " ".join(basis(smp, here))


def test_it_is_said_what_the_rates_rest_on() -> None:
    text = said(SmpRates(rates=RATES))
    assert "(2026-11-20, Some CPU, 4 cores)" in text and "--measured" in text
    text = said(SmpRates(rates=RATES, file="node.json"))
    assert "from node.json (2026-11-20, Some CPU, 4 cores)" in text
    assert "digests 10 GB/s" in text and "protects 2 GB/s" in text
    # 0.20 s to send, 0.25 to receive, 0.10 to digest and 0.125 to fold are more than the 0.5 s that were measured
    spent = ("0.50 s to protect", "0.20 s to send", "0.25 s to receive", "0.10 s to digest", "0.00 s other")
    assert all(each in text for each in (*spent, "1.5 cores", "sends 3 GB/s"))
    assert "NOTE" not in text


def test_it_is_said_what_limits() -> None:
    smp = SmpRates(rates=RATES, given_cores=4)
    cores, network = said(replace(smp, line_rate=9e9)), said(replace(smp, line_rate=7e9))
    assert "8 GB/s" in cores and "cores are the" in cores and "9 GB/s" in cores
    assert "7 GB/s" in network and "(--line-rate) are the limit" in network and "8 GB/s" in network


def test_another_machine_and_cores_that_were_not_measured_are_said() -> None:
    text = said(SmpRates(rates=RATES, file="node.json"), here=96)
    assert "NOTE: node.json " in text and " 4 cores" in text and "96" in text
    assert "NOTE" not in said(SmpRates(rates=RATES), here=96), "nobody says that what is built in is of this machine"
    text = said(SmpRates(rates=RATES, given_cores=16))
    assert "measured with 4 cores" in text and "16 cores are 4 times" in text


def test_what_is_assumed_is_what_the_last_result_says() -> None:
    path = ROOT / "benchmarks/results" / f"node-{LAST.date}.json"
    measured = NodeRates.from_json(json.loads(path.read_text()))
    assert replace(measured, date=LAST.date) == LAST, f"planner.rates.LAST is not of {path.name}"
    newest = max(found.stem for found in path.parent.glob("node-*.json"))
    assert path.stem == newest, "planner.rates.LAST is not of the newest result"


def planned(*options: str, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    assert main(["plan", "--step", "12s", "--model", "70b", "--nodes", "16", *options, "--json", "-"]) == 0
    told = capsys.readouterr()
    return json.loads(told.out), " ".join(told.err.split())


def test_plan_takes_rates_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = node_file(tmp_path / "node.json")
    plan, text = planned("--measured", str(file), "--smp-cores", "4", capsys=capsys)
    sizes = plan["sizes"]
    assert sizes["encode_s"] == pytest.approx(plan["m"] * sizes["node_bytes"] / 8e9)
    assert sizes["commit_s"] == pytest.approx(sizes["node_bytes"] * (1 / 40e9 + 1 / 200e9))
    assert plan["rates"]["source"] == str(file) and plan["rates"]["limit"] == "cores"
    assert plan["smp_cores"] == 4
    assert f"from {file} (2026-11-20, Some CPU, 4 cores)" in text


def test_plan_without_a_file_assumes_what_was_measured_and_not_line_rate(capsys: pytest.CaptureFixture[str]) -> None:
    plan, text = planned("--line-rate", "50GB/s", "--smp-cores", "1", capsys=capsys)
    sizes = plan["sizes"]
    assert sizes["encode_s"] == pytest.approx(plan["m"] * sizes["node_bytes"] / SmpRates().protect)
    assert SmpRates().protect == LAST.protect * max(1, LAST.smp_cores)
    assert "as last measured" in text and "50 GB/s" in text
    wired, _ = planned("--line-rate", "1GB/s", "--smp-cores", "1", capsys=capsys)
    assert wired["rates"]["limit"] == "network" and wired["sizes"]["encode_s"] > sizes["encode_s"]


def test_plan_takes_a_profile_a_machine_or_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, profile = node_file(tmp_path / "node.json"), tmp_path / "profile.json"
    both = ["plan", "--nodes", "128", "--profile", str(profile), "--measured", str(file)]
    profile.write_text(json.dumps(replace(RUN, parity=0, data=0, encode_s=0.0).to_json()))
    assert main([*both, "--json", "-"]) == 0
    assert f"from {file}" in capsys.readouterr().err, "encoding was not measured"
    profile.write_text(json.dumps(RUN.to_json()))
    assert main([*both, "--json", "-"]) == 0
    assert "Rates are" not in capsys.readouterr().err, "all was measured, and no rate was used"


def test_a_profile_and_rates_that_are_mixed_up_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, profile = node_file(tmp_path / "node.json"), tmp_path / "profile.json"
    profile.write_text(json.dumps(RUN.to_json()))
    assert main(["plan", "--measured", str(profile)]) == 2
    assert "give it with --profile" in capsys.readouterr().err
    assert main(["tune", "--profile", str(file)]) == 2
    assert "give it with --measured" in capsys.readouterr().err
    assert main(["plan", "--profile", str(profile), "--step", "12s"]) == 2
    assert "together with --profile" in capsys.readouterr().err


def test_simulate_takes_rates_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = node_file(tmp_path / "node.json")
    fleet = ["--gpus", "128", "--days", "2", "--seeds", "1", "--strategies", "holdfast", "--protect", "7+1"]
    every = {}
    for options in ([], ["--measured", str(file)], ["--measured", str(file), "--smp-cores", "64"]):
        assert main([*fleet, *options, "--json", "-"], make_parser()) == 0
        told = capsys.readouterr()
        result = json.loads(told.out)
        every[len(options)] = result["rows"][0]["every"]
        assert ("as last measured" in told.err) == (not options)
    assert every[4] < every[2], "64 cores protect sooner than 1.5"


def test_a_plan_counts_state_that_replicas_hold_alike_once(capsys: pytest.CaptureFixture[str]) -> None:
    def planned(*options: str) -> dict[str, Any]:
        assert main(["plan", "--step", "12s", "--nodes", "8", *options, "--json", "-"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    shared, alone = planned("--state", "80GB", "--replicas", "8"), planned("--state", "10GB")
    assert shared["memory_bytes_per_node"] == alone["memory_bytes_per_node"]
    assert any("8 nodes hold alike" in reason for reason in shared["why"])
    assert not any("hold alike" in reason for reason in alone["why"])
    assert main(["plan", "--step", "12s", "--state", "80GB", "--nodes", "8", "--replicas", "9"]) == 2
    assert "--replicas 9" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "tune"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "something else"}, "bench node --json"),
        ({"format": FORMAT + 1}, f"format is {FORMAT + 1}, .* {FORMAT}:"),
        ({"rates": None}, "--smps-only"),
        ({"rates": {"cores": 2}}, "damaged: .*missing required"),
        ({"rates": {"protect": "fast"}}, "damaged: "),
    ],
)
def test_a_file_that_is_another_is_refused(
    command: str, changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = node_file(tmp_path / "node.json", **changes)
    assert main([command, "--measured", str(file)]) == 2
    assert re.search(f"--measured {file}: .*{message}", capsys.readouterr().err)


@pytest.mark.parametrize("command", ["plan", "tune"])
def test_a_file_that_is_no_json_is_refused(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "node.json"
    file.write_bytes(b"\xff{")
    assert main([command, "--measured", str(file)]) == 2
    assert re.search(f"--measured {file}: .*JSON", capsys.readouterr().err)


@pytest.mark.parametrize("command", ["plan", "tune"])
@pytest.mark.parametrize("text", ["0", "-1", "many", "nan", "inf"])
def test_a_number_of_cores_that_is_none_is_refused(command: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, f"--smp-cores={text}"]) == 2
    assert f"--smp-cores: '{text}' is not" in capsys.readouterr().err
