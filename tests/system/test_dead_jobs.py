"""A job that is dead or has lost a node is not shown as healthy, and Prometheus has what it needs to alert."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path

import pytest

from holdfast.cli.main import main
from holdfast.smp_daemon.ops.overview import Overview, look
from tests.deadlines import DEADLINE_S
from tests.scripts import completed
from tests.smp_kit import JOB, Ground, SmpProcess, run_on
from tests.system.test_regroup import finish, leave, started
from tools.alerts.record import EVERY_S, FAULT_AT, RECORDINGS, SCENES, shorten

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy" / "alerts.yml"

promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: apt-get install prometheus)"
)


@pytest.fixture
def regrouping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_REGROUP_AFTER", "200ms")


def until(smp: SmpProcess, what: str) -> Overview:
    """The SMP's overview of the job, as soon as one of its alarms contains `what`."""
    limit = time.monotonic() + DEADLINE_S
    while True:
        overview = look(JOB, smp.control)
        if any(what in trouble for trouble in overview.alarms):
            return overview
        assert time.monotonic() < limit, overview.alarms


# ---------------------------------------------------------------------- what the status shows


def test_trainers_that_are_gone_are_missed(ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    smps = ground.smps(2)
    assert look(JOB, smps[0].control).is_well, "nobody misses the trainers of a job that has not begun"
    run = run_on(smps, [[3000], [3000]])
    run.protect(1)
    where = ["status", "--arena", str(ground.base)]
    assert look(JOB, smps[0].control).trainerless_s == 0
    assert main(where) == 0
    capsys.readouterr()
    leave(run)
    overview = until(smps[0], "does not train")
    assert not overview.is_well and overview.trainerless_s
    assert main(where) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"no trainer .* \d+ s: ", shown)


def test_a_successor_misses_trainers_that_went_before_it_came(ground: Ground) -> None:
    [smp], run = ground.job([[3000]])
    run.protect(1)
    leave(run)
    smp.restart()
    assert until(smp, "does not train").trainerless_s


@pytest.mark.usefixtures("regrouping")
def test_a_lost_node_is_still_lost_after_the_others_have_regrouped(
    ground: Ground, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    smps, _ = started(ground, 4, "3+1", "regroup.done")
    began_s = time.monotonic()
    smps[1].lose()
    finish(ground, smps, [0, 2, 3])
    moved_s = time.monotonic() - began_s
    overview = until(smps[0], "node1 is lost")
    assert (overview.lost, overview.silent, overview.is_well) == (("node1",), (), False)
    assert "any 1 node" in overview.sentence()
    assert overview.safest is not None
    sealed_s = overview.age_s(overview.safest)
    assert sealed_s is not None and sealed_s >= moved_s, "a snapshot is no younger for being moved"
    report = tmp_path / "status.json"
    assert main(["status", "--arena", str(ground.base), "--json", str(report)]) == 1
    assert re.search(r"^node1\s+lost", capsys.readouterr().out, re.MULTILINE)
    (said,) = json.loads(report.read_text())
    assert said["lost"] == ["node1"] and said["trainerless_s"] > 0
    smps[0].restart()
    assert look(JOB, smps[0].control).lost == ("node1",), "a successor knows it, too"


@pytest.mark.usefixtures("regrouping")
def test_a_node_that_came_back_is_not_lost(ground: Ground) -> None:
    smps, _ = started(ground, 4, "3+1", "regroup.done")
    smps[3].kill()
    finish(ground, smps, [0, 1, 2])
    until(smps[0], "node3 is lost")
    smps[3].launch().wait_ready()
    finish(ground, smps, [0, 1, 2, 3])
    assert look(JOB, smps[0].control).lost == ()


def test_a_node_that_was_drained_is_missed_by_nobody(ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    smps, _ = started(ground, 4, "3+1")
    assert main(["drain", "node2", "--arena", str(ground.base / "node0"), "--job", JOB]) == 0
    assert smps[2].wait_end() == 0
    overview = look(JOB, smps[0].control)
    assert (overview.lost, overview.silent) == ((), ())
    assert len(overview.statuses) == 3


# ---------------------------------------------------------------------- alerts, from recordings

EXPECTED: dict[str, set[str]] = {
    "healthy": set(),
    "one-node": set(),
    "node-lost": {"HoldfastNodeLost", "HoldfastNoTrainer", "HoldfastSnapshotOld"},
    "trainers-died": {"HoldfastNoTrainer", "HoldfastSnapshotOld"},
    "trainer-hangs": {"HoldfastTrainerHung", "HoldfastSnapshotOld"},
    "smp-died": {"HoldfastSmpDown", "HoldfastNodeSilent", "HoldfastNotSafe"},
    "job-ended": set(),
    "bits-flip": {"HoldfastMemoryDamaged"},
    "storage-fails": {"HoldfastNotPersisted"},
    "port-taken": {"HoldfastImpaired"},
}
"""The alerts that fire at the end of each recording."""


def test_every_fault_is_recorded_and_every_alert_fires_for_one() -> None:
    assert {path.stem for path in RECORDINGS.glob("*.txt")} == EXPECTED.keys() == SCENES.keys()
    named = set(re.findall(r"- alert: (\w+)", ALERTS.read_text()))
    assert named == set().union(*EXPECTED.values())


@promtool
def test_each_fault_alerts_as_it_should(tmp_path: Path) -> None:
    """Nothing fires before the fault, and at the end of its recording exactly the alerts in `EXPECTED` do."""
    firing = 'count by (alertname) (ALERTS{alertstate="firing"}) > bool 0'
    plays: list[dict[str, object]] = []
    for fault, expected in EXPECTED.items():
        lines = (RECORDINGS / f"{fault}.txt").read_text().splitlines()
        end = int(re.findall(r"of (\d+)$", lines[1])[0]) - 1
        samples = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(expected)]
        plays.append(
            {
                "name": fault,
                "interval": f"{EVERY_S}s",
                "input_series": [{"series": name, "values": values} for name, values in map(_series, lines[2:])],
                "promql_expr_test": [
                    {"expr": firing, "eval_time": f"{(FAULT_AT - 1) * EVERY_S}s", "exp_samples": []},
                    {"expr": firing, "eval_time": f"{end * EVERY_S}s", "exp_samples": samples},
                ],
            }
        )
    tests = {"rule_files": [str(ALERTS)], "evaluation_interval": f"{EVERY_S}s", "tests": plays}
    file = tmp_path / "tests.yml"
    file.write_text(json.dumps(tests))  # JSON is also YAML
    done = completed(["promtool", "test", "rules", str(file)])
    assert done.returncode == 0, done.stdout + done.stderr


@promtool
@pytest.mark.parametrize(("interval_s", "age_s", "fires"), [(0, 1000, True), (4000, 7900, False), (4000, 8100, True)])
def test_a_snapshot_is_old_by_the_jobs_own_interval(interval_s: int, age_s: int, fires: bool, tmp_path: Path) -> None:
    """A large job takes a snapshot an hour, and nobody is to be called for that."""
    series = {"holdfast_safe_age_seconds": age_s, "holdfast_safe_interval_seconds": interval_s}
    play(tmp_path, ALERTS.read_text(), "HoldfastSnapshotOld", series, fires=fires)


@promtool
@pytest.mark.parametrize(
    ("wanted", "tolerated", "fires"),
    [(0, 0, False), (0, -1, True), (1, 0, True), (1, 1, False), (2, 1, False), (None, 0, True)],
)
def test_a_job_is_not_safe_by_what_it_is_to_survive(
    wanted: int | None, tolerated: int, fires: bool, tmp_path: Path
) -> None:
    """A job on one node pages nobody, unless its snapshots are lost. An SMP of an older version says less."""
    series = {"holdfast_tolerated_node_failures": tolerated}
    series |= {} if wanted is None else {"holdfast_wanted_node_failures": wanted}
    play(tmp_path, ALERTS.read_text(), "HoldfastNotSafe", series, fires=fires)


@promtool
@pytest.mark.parametrize(
    ("option", "value", "alert", "series"),
    [
        ("--old", "2h", "HoldfastSnapshotOld", {"holdfast_safe_age_seconds": 7000}),
        ("--idle", "1h", "HoldfastNoTrainer", {"holdfast_trainerless_seconds": 3000}),
    ],
)
def test_the_times_of_alerts_are_options(
    option: str, value: str, alert: str, series: dict[str, int], tmp_path: Path
) -> None:
    play(tmp_path, ALERTS.read_text(), alert, series, fires=True)
    assert main(["deploy", "prometheus", "--to", str(tmp_path), option, value]) == 0
    play(tmp_path, (tmp_path / "alerts.yml").read_text(), alert, series, fires=False)


def play(folder: Path, rules: str, alert: str, series: dict[str, int], *, fires: bool) -> None:
    """Have promtool check whether `alert` fires after ten minutes of these values."""
    (folder / "rules.yml").write_text(rules)
    played = [{"series": f'{name}{{exported_job="a"}}', "values": f"{value}x40"} for name, value in series.items()]
    expr = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})'
    samples = [{"labels": "{}", "value": 1}] if fires else []
    check = {"expr": expr, "eval_time": "10m", "exp_samples": samples}
    one = {"interval": "30s", "input_series": played, "promql_expr_test": [check]}
    tests = {"rule_files": [str(folder / "rules.yml")], "evaluation_interval": "30s", "tests": [one]}
    file = folder / "tests.yml"
    file.write_text(json.dumps(tests))
    done = completed(["promtool", "test", "rules", str(file)])
    assert done.returncode == 0, done.stdout + done.stderr


def _series(line: str) -> tuple[str, str]:
    name, _, values = line.rpartition(": ")
    return name, values


def test_values_that_repeat_are_written_once() -> None:
    values = ["_", "_", "0", "1", "1", "1", "stale", "_", "2"]
    assert shorten(values) == "_x2 0 1x2 stale _ 2"
