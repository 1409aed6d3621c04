"""``holdfast bench node``: what it measures, counts and shows. No test here depends on the speed of the machine."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast import ConfigError
from holdfast.bench.cluster import NodeRecovered, Protected, cpu_seconds
from holdfast.bench.floor import PIECE_BYTES, Carried, Floor, Wires
from holdfast.bench.node import (
    NodeBenchmark,
    NodeReport,
    Setup,
    Turn,
    protect_rate,
    recover_rate,
    setups,
    summary,
    tables,
)
from holdfast.bench.parts import PARTS, PartRate, SocketRate, certificates, measure_parts, measure_sockets
from holdfast.planner.rates import NodeRates
from holdfast.smp_daemon.shared.credentials import TLS_ENVS, load
from holdfast.smp_daemon.shared.errors import HoldfastError
from tests.access_kit import needs_openssl
from tests.scripts import completed, started
from tests.smp_kit import read_line

ROOT = Path(__file__).parents[2]
MACHINE = {"cpu_model": "Some CPU", "cores": 2, "memory_bytes": 1 << 34, "kernel": "6.1"}
SETUP = Setup(2, 4, tls=False)
COUNT = 10**9


def turn(*, plain_s: float = 0.5, folded_s: float = 0.8, this_s: float = 1.0, against_s: float = 4.0) -> Turn:
    """One GB. Carrying takes one processor second per second of wall time; protecting, with two SMPs, two."""
    return Turn(
        Carried(COUNT, plain_s, [plain_s / 2, plain_s / 2]),
        Carried(COUNT, folded_s, [folded_s / 2, folded_s / 2]),
        {
            "this": Protected(COUNT, 0.1, 0.2, this_s, 2 * this_s),
            "against": Protected(COUNT, 0.1, 0.3, against_s, 2 * against_s),
        },
    )


def report(**changes: Any) -> NodeReport:
    row = protect_rate(SETUP, "this", [turn()])
    parts = [PartRate(part, 1, 4e9, 4e9, 8e9, 0.5) for part in PARTS]
    sockets = [SocketRate(1, False, 3e9, 6e9, 5e9), SocketRate(1, True, 1e9, 2e9, 2e9)]
    made = NodeReport(
        date="2026-11-24T12:00:00+00:00",
        release="1",
        machine=MACHINE,
        load=(0.1, 2.0),
        seed=7,
        against="old",
        rates=summary("2026-11-24", MACHINE, parts, sockets, [row]),
        parts=parts,
        sockets=sockets,
        protect=[row, protect_rate(SETUP, "against", [turn()])],
        recover=[recover_rate(row, [NodeRecovered(COUNT, 0.5, 0.4, [], [])])],
        notes=["something is left out"],
    )
    return replace(made, **changes)


def test_it_measures_itself_against_a_checkout_and_writes_json_and_markdown(tmp_path: Path) -> None:
    kept, written = tmp_path / "node.md", tmp_path / "node.json"
    done = completed(
        [
            *(sys.executable, "-m", "benchmarks.node", "--quick", "--against", str(ROOT)),
            *("--json", str(written), "--markdown", str(kept)),
        ],
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(written.read_text())
    assert {row["part"] for row in result["parts"]} == {*PARTS}
    assert {row["threads"] for row in result["parts"]} == {1, result["machine"]["cores"]}
    assert [(row["code"], row["nodes"], row["connections"]) for row in result["protect"]] == [
        ("this", 2, 1),
        ("against", 2, 1),
    ]
    for row in result["protect"]:
        assert row["bytes"] == 2 * (24 << 20)
        assert row["throughput_ratio"] > 0 and row["cpu_ratio"] > 0
        assert row["cpu_s_per_gb"] > 0 < row["seal_cpu_s_per_gb"]
    assert [row["code"] for row in result["recover"]] == ["this", "against"]
    rates = NodeRates.from_json(result)
    assert rates.cores == len(os.sched_getaffinity(0))
    for text in (done.stdout, kept.read_text()):
        assert result["date"] in text and "SMPs protect a snapshot" in text and "x CPU against" in text


def test_a_row_is_of_medians_and_its_ratios_are_those_of_rounds() -> None:
    turns = [turn(), turn(this_s=2.0, plain_s=4.0, folded_s=1.0, against_s=2.0), turn(this_s=9.0, plain_s=9.0)]
    row = protect_rate(SETUP, "this", turns)
    assert (row.bytes_per_s, row.plain_bytes_per_s) == (COUNT / 2.0, COUNT / 4.0)
    assert row.throughput_ratio == 1.0, "of 0.5, 2 and 1"
    assert row.cpu_s_per_gb == 4.0
    assert row.cpu_ratio == 4.0, "of 2 / 0.8, 4 / 1 and 18 / 0.8"
    assert row.smp_cores == 1.0
    assert row.seal_cpu_s_per_gb == 0.2
    assert (row.throughput_gain, row.cpu_gain) == (1.0, 1.0), "of 4, 1 and 4 / 9; of 1/4, 1 and 9/4"
    assert protect_rate(SETUP, "against", turns).throughput_gain is None
    alone = [replace(each, protected={"this": each.protected["this"]}) for each in turns]
    assert protect_rate(SETUP, "this", alone).throughput_gain is None


def test_what_comes_back_is_beside_the_same_floor() -> None:
    row = protect_rate(SETUP, "this", [turn()])
    found = recover_rate(row, [NodeRecovered(COUNT, s, 0.4, [], []) for s in (0.2, 0.5, 9.0)])
    assert (found.bytes_per_s, found.throughput_ratio, found.cpu_ratio) == (2e9, 1.0, 0.5)


def test_the_summary_takes_the_best_number_of_connections_and_the_worst_of_smps() -> None:
    base = protect_rate(SETUP, "this", [turn()])
    rows = [
        replace(base, cpu_s_per_gb=1.0),
        replace(base, cpu_s_per_gb=0.5, smp_cores=0.7),
        replace(base, nodes=4, cpu_s_per_gb=2.0),
        replace(base, nodes=4, cpu_s_per_gb=0.8, smp_cores=0.6),
        replace(base, cpu_s_per_gb=9.0, tls=True, nodes=4),
        replace(base, cpu_s_per_gb=9.0, code="against", nodes=4),
    ]
    parts = [PartRate(part, threads, 9e9, 9e9 / threads, 1e9, 1.0) for part in PARTS for threads in (2, 1)]
    sockets = [SocketRate(1, False, 1e9, 3e9, 2e9), SocketRate(2, False, 1e9, 2e9, 4e9), SocketRate(1, True, 1, 9e9, 1)]
    found = summary("today", MACHINE, parts, sockets, rows)
    assert (found.protect, found.smp_cores) == (1.25e9, 0.6)
    assert (found.copy, found.digest, found.fold) == (4.5e9, 4.5e9, 4.5e9), "of two threads"
    assert (found.send, found.receive) == (3e9, 4e9), "without TLS"


def test_tls_is_measured_with_the_fewest_smps() -> None:
    plan = NodeBenchmark(nodes=(2, 4), connections=(1, 4))
    assert [str(each) for each in setups(plan, tls=True)] == [
        "2 SMPs, 1 connection",
        "2 SMPs, 4 connections",
        "4 SMPs, 1 connection",
        "4 SMPs, 4 connections",
        "2 SMPs, 1 connection, TLS",
        "2 SMPs, 4 connections, TLS",
    ]
    assert not [each for each in setups(plan, tls=False) if each.tls]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": (3,)}, "3 nodes: .* 2 or 4"),
        ({"shard_bytes": 1 << 20}, "--shard of 1,048,576 .* 3,145,728"),
        ({"rounds": 0}, "1 round or"),
        ({"against": Path("/")}, "--against /: .* holdfast/smp_daemon"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NodeBenchmark(**changes)


def test_tables_show_every_row_and_leave_out_what_was_not_measured() -> None:
    found = {table.heading: table for table in tables(report())}
    assert len(found) == 4
    assert all(len(row) == len(table.columns) for table in found.values() for row in table.rows)
    assert found["SMPs protect a snapshot"].rows[0] == [
        *("this", "2, 1+1", "4", "1.00", "0.50", "0.80", "2.000", "0.800", "2.50", "0.200", "4.00", "0.25")
    ]
    assert found["SMPs protect a snapshot"].rows[1][-2:] == ["–", "–"]
    assert found["sockets on loopback, GB/s"].rows[1] == ["1, TLS", "1.00", "2.00", "2.00"]
    alone = replace(report(), protect=[replace(report().protect[0], throughput_gain=None, cpu_gain=None)], parts=[])
    assert [table.heading for table in tables(alone)] == [*found][1:]
    assert "x CPU against" not in [name for table in tables(alone) for name in table.columns]


@pytest.mark.parametrize("oneway", [True, False])
def test_plain_sockets_carry_every_byte_and_say_what_each_process_took(oneway: bool) -> None:
    wires = Wires(3 if not oneway else 2, 2, 2 * PIECE_BYTES, oneway=oneway)
    assert wires.total_bytes == (2 if oneway else 3 * 2 * 2) * 2 * PIECE_BYTES
    with Floor(wires, os.environ) as floor:
        for kind in ("plain", "folded", "plain"):
            carried = floor.round(kind)
            assert carried.bytes == wires.total_bytes
            assert len(carried.cpu_s) == wires.processes
            assert sum(carried.cpu_s) > 0 and 0 < carried.seconds < 60
        floor._processes[0].kill()
        with pytest.raises(HoldfastError, match="ended, with status -9"):
            [floor.round("plain") for _ in range(2)]


@needs_openssl
def test_tls_is_the_projects_with_certificates_of_the_environment_or_of_its_own(tmp_path: Path) -> None:
    made = certificates({}, tmp_path)
    assert certificates(made, tmp_path / "nowhere") == {}, "there are some"
    assert load(made).tls is not None
    [row] = measure_sockets((1,), PIECE_BYTES, 1, os.environ | made, tls=True)
    assert row.tls and min(row.bytes_per_s, row.send_bytes_per_core_s, row.receive_bytes_per_core_s) > 0


def test_without_openssl_no_certificate_is_made_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=f"{TLS_ENVS[0]}.* openssl makes no"):
        certificates({}, tmp_path)


def test_parts_are_measured_with_one_thread_and_with_all() -> None:
    found = measure_parts(2, 1, 8 << 20)
    assert [(row.part, row.threads) for row in found] == [(part, n) for n in (1, 2) for part in PARTS]
    assert all(0 < row.bytes_per_s <= 1.05 * row.threads * row.bytes_per_core_s for row in found)


def test_processor_time_of_another_process_is_that_of_all_its_threads() -> None:
    code = (
        "import threading, time\n"
        "def burn():\n"
        "    while time.thread_time() < 0.1: pass\n"
        "threads = [threading.Thread(target=burn) for _ in range(2)]\n"
        "[thread.start() for thread in threads]; [thread.join() for thread in threads]\n"
        "print(time.process_time(), flush=True); input()"
    )
    with started([sys.executable, "-c", code]) as process:
        said = float(read_line(process.stdout))
        found = cpu_seconds(process.pid)
        assert 0.2 <= said <= found < said + 0.1
        assert time.process_time() == pytest.approx(cpu_seconds(os.getpid()), abs=0.05)
