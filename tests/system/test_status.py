"""What operators see: which step is safe against what; ``holdfast status`` and ``top``; the page, and the metrics."""

from __future__ import annotations

import io
import itertools
import json
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from http.client import HTTPConnection
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from holdfast import __version__
from holdfast.cli import status
from holdfast.cli.main import main, make_parser
from holdfast.cli.output import NO_ANSWER
from holdfast.cli.status import render
from holdfast.ec import Stripes
from holdfast.report import say
from holdfast.smp_daemon.ops.metrics import GAUGES, VIEWS, exposition, sees_the_job
from holdfast.smp_daemon.ops.overview import Overview, look
from holdfast.smp_daemon.ops.status import Status
from holdfast.smp_daemon.ops.web import is_local, page
from holdfast.smp_daemon.recovery.redundancy import MOST_TRIED, redundancies, safest
from holdfast.smp_daemon.shared.addresses import parse_http
from holdfast.smp_daemon.shared.counters import COUNTS, Counters
from holdfast.smp_daemon.shared.errors import ConfigError, HoldfastError, ProtocolError
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.limits import MAX_SAYING
from holdfast.smp_daemon.shared.paths import Owner
from holdfast.smp_daemon.shared.plan import plan_restore
from holdfast.smp_daemon.shared.runs import runs_in_reach
from holdfast.smp_daemon.shared.stragglers import Own
from holdfast.smp_daemon.shared.versions import PROTOCOL_VERSION
from holdfast.smp_daemon.watchdog.liveness import Health, WatchedTrainer
from tests.deadlines import DEADLINE_S
from tests.smp_kit import JOB, Ground, Run, SmpProcess, owner_of, run_on, suspend
from tests.system.test_regroup import SNAPSHOT, everything, layout_of

ROOT = Path(__file__).parents[2]
SIZES = [[3000], [3000], [2000], [4000]]


def status_of(number: int, leases: dict[str, float]) -> Status:
    """The status of one of many nodes."""
    inventory = Inventory(f"node{number}", f"10.0.{number // 250}.{number % 250}", 41234, 41235, trainers=8)
    counters = dict.fromkeys(Counters().read(), 0)
    return Status(inventory, 1, 1.0, "/arena", 64 * 10**9, 0, {}, 10**9, (), counters, leases=leases, lease_s=30.0)


def many_that_miss_one() -> Overview:
    statuses = tuple(status_of(number, {"node128": 16.0 + number / 100}) for number in range(128))
    return Overview("job", statuses, (), ())


def test_however_many_see_that_a_peer_is_late_it_is_one_line() -> None:
    overview = many_that_miss_one()
    (trouble,), (seen,) = overview.troubles, overview.statuses[3].troubles
    assert re.search("node128 is late to 128 .* 17.3 s", trouble)
    assert re.search("node128 is late to node3: .* 16.0 s", seen)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_status_fits_80_columns_and_a_pipe(terminal: bool) -> None:
    owner = Owner(1, 1, "job", "node0", "127.0.0.1", 1, 2, 3)
    out = io.StringIO()
    say(Console(file=out, width=80, force_terminal=terminal, no_color=True), render([(owner, many_that_miss_one())]))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).splitlines()
    rows = [line for line in lines if line.startswith("node")]
    assert len(rows) == 129 and max(map(len, lines)) <= 80
    assert rows[128].split() == ["node127", "10.0.0.127:41234", "8", "-", "64", "GB", "1", "GB", "0"]
    assert not [line for line in lines if line != line.rstrip()]


def test_a_rank_that_keeps_the_others_waiting_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    statuses = []
    for number in range(4):
        own = Own(1.0, 0.4 if number == 2 else 0.02, 0.5)
        trainer = WatchedTrainer(f"dp{number}", 1, 5, Health.ALIVE, "step", 0.1, 60.0, own)
        statuses.append(replace(status_of(number, {}), trainers=(trainer,)))
    overview = Overview("job", tuple(statuses), (), ())
    (text,) = overview.stragglers
    assert re.match("trainer dp2 on node2 .* 400 ms reading data", text)
    assert overview.to_json()["stragglers"] == [text]
    Console().print(render([(Owner(1, 1, "job", "node0", "127.0.0.1", 1, 2, 3), overview)]))
    assert "dp2 on node2" in capsys.readouterr().out
    metrics = exposition("job", statuses[2], overview).decode()
    assert 'holdfast_stragglers{job="job",node="node2"} 1.0' in metrics
    assert 'holdfast_own_work_seconds{job="job",node="node2"} 0.5' in metrics


# ---------------------------------------------------------------------- what is safe against what


@pytest.mark.parametrize(
    ("nodes", "data", "parity"), [(4, 2, 2), (4, 3, 1), (3, 2, 1), (8, 2, 2), (5, 3, 2), (1, 1, 0)]
)
@pytest.mark.parametrize("gone", [0, 1, 2])
def test_as_many_losses_are_stood_as_restores_can_be_planned_after(
    nodes: int, data: int, parity: int, gone: int
) -> None:
    layout = layout_of(nodes, data, parity)
    held = everything(layout, but=[f"node{i}" for i in range(min(gone, nodes - 1))])
    found = safest(redundancies(held))
    assert found is not None
    names = [inventory.node for inventory in held]
    survived = -1
    for losses in range(min(parity, len(held)) + 1):
        if not all(_can_be_had(held, lost) for lost in combinations(names, losses)):
            break
        survived = losses
    assert found.tolerates == survived
    silent = {name for group in found.groups for name in group.silent}
    assert silent == {f"node{i}" for i in range(nodes)} - set(names)


def test_what_parity_surely_covers_is_not_tried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a hundred nodes any three may be lost in 161,700 ways, and each takes milliseconds."""
    monkeypatch.setattr(Stripes, "decodable", lambda *lost: pytest.fail("it is tried out"))
    found = safest(redundancies(everything(layout_of(100, 64, 4, least=300_000))))
    assert found is not None and found.tolerates == MOST_TRIED


def _can_be_had(held: Sequence[Inventory], lost: Sequence[str]) -> bool:
    left = [inventory for inventory in held if inventory.node not in lost]
    try:
        return plan_restore(left, None) is not None
    except HoldfastError:
        return False


def test_the_older_snapshot_counts_while_the_newer_is_not_encoded_yet() -> None:
    layout = layout_of(4, 2, 2)
    newer = SnapshotId(SNAPSHOT.epoch, SNAPSHOT.step + 1)
    held = [_with_shards(each, newer) for each in everything(layout)]
    new, old = redundancies(held)
    assert (new.snapshot, new.tolerates, old.tolerates) == (newer, 0, 2)
    assert safest([new, old]) is old
    assert safest([]) is None


def test_a_restart_may_choose_all_that_is_whole_but_the_newest() -> None:
    protected, sealed = SNAPSHOT, SnapshotId(SNAPSHOT.epoch, SNAPSHOT.step + 1)
    held = [_with_shards(each, sealed) for each in everything(layout_of(4, 2, 2))]
    status = status_of(0, {})
    several = tuple(replace(status, inventory=each) for each in held)
    assert Overview("run", several, (), (), runs=tuple(runs_in_reach(held))).older == [protected]


def _with_shards(inventory: Inventory, snapshot: SnapshotId) -> Inventory:
    data = inventory.to_plain()
    data["shards"] += [(snapshot, coord) for _, coord in inventory.shards]
    return Inventory.read(data)


def test_what_is_shown_of_a_large_job_is_small() -> None:
    layout = layout_of(512, 6, 2, per_node=8)
    held = everything(layout, but={"node300"})
    counters = Counters().read()
    statuses = tuple(Status(each, 1, 1.0, "/arena", 1, 0, {}, 1, (), counters) for each in held)
    overview = Overview("job", statuses, ("node300",), tuple(redundancies(held)))
    assert re.search(f"step {SNAPSHOT.step} .*safe .* 1 node", overview.sentence())
    assert len(json.dumps(overview.to_json())) < 1_500_000
    whole = json.dumps(statuses[0].to_plain())
    brief = json.dumps(statuses[0].to_plain({layout.digest}))
    assert len(brief) < 3_000 < 100_000 < len(whole)
    assert Status.read(json.loads(brief), {layout.digest: layout}) == statuses[0]
    with pytest.raises(ProtocolError, match="not an inventory"):
        Status.read(json.loads(brief))


# ---------------------------------------------------------------------- real SMPs


@pytest.fixture
def smps(ground: Ground) -> list[SmpProcess]:
    return ground.smps(4)


@pytest.fixture
def job(smps: list[SmpProcess]) -> Run:
    run = run_on(smps, SIZES, protect="2+2")
    run.protect(12339)
    run.protect(12340)
    return run


def fetch(smp: SmpProcess, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    url = f"http://127.0.0.1:{owner_of(smp.arena).http_port}{path}"
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def test_losses_are_told_as_they_come(ground: Ground, smps: list[SmpProcess], job: Run) -> None:
    def seen() -> Overview:
        return look(JOB, smps[3].control)

    assert re.match("step 12,340 .*safe .* 2 nodes; ", seen().sentence())
    for losses, said in enumerate(["any 1 node", "node loss would", "cannot be restored"]):
        smps[losses].lose()
        overview = seen()
        assert said in overview.sentence()
        assert list(overview.silent) == [smp.name for smp in smps[: losses + 1]]
    status = overview.statuses[0]
    assert Status.read(json.loads(json.dumps(status.to_plain()))) == status


def test_what_a_trainer_says_is_shown(ground: Ground, smps: list[SmpProcess], job: Run) -> None:
    client = job["dp1"].client
    client.say("a snapshot every 51 steps: cost and loss balance")
    client.say("a snapshot every 18 steps: " + "because " * 1000)
    said = look(JOB, smps[0].control).to_json()["nodes"][1]["said"]
    assert said.startswith("a snapshot every 18 ")
    assert len(said) == MAX_SAYING


def test_the_commands_say_it_too(
    ground: Ground,
    smps: list[SmpProcess],
    job: Run,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where = ["--arena", str(ground.base), "--job", JOB]
    report = tmp_path / "status.json"
    assert main(["status", *where, "--json", str(report)]) == 0
    assert "any 2 nodes" in " ".join(capsys.readouterr().out.split())
    (said,) = json.loads(report.read_text())
    assert [node["inventory"]["node"] for node in said["nodes"]] == [smp.name for smp in smps]
    with monkeypatch.context() as patched, pytest.raises(ValueError):  # "top" goes on until it cannot sleep
        patched.setattr(status, "LOOK_EVERY_S", -1.0)
        status.show_top(make_parser().parse_args(["top", *where]))
    assert "12,340" in capsys.readouterr().out
    smps[0].lose()
    assert main(["status", *where]) == 1
    assert "silent" in capsys.readouterr().out
    assert main(["status", "--arena", str(tmp_path)]) == 1
    assert "no job" in capsys.readouterr().out


def test_the_page_and_what_it_asks_for(smps: list[SmpProcess], job: Run) -> None:
    status, headers, body = fetch(smps[1], "/")
    assert (status, body) == (200, page())
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert not re.findall(rb"(?:src|href)\s*=|https?://", body)  # it loads nothing from elsewhere
    status, _, body = fetch(smps[1], "/status.json")
    assert status == 200
    said: dict[str, Any] = json.loads(body)
    assert said["snapshots"][0]["tolerates"] == 2
    assert len(said["nodes"]) == 4
    assert fetch(smps[1], "/etc/passwd")[0] == 404
    assert fetch(smps[1], "/healthz")[::2] == (200, b"ok\n")
    for path in ("/", "/status.json", "/metrics", "/healthz"):
        assert fetch(smps[1], path, Host="rebound.example:80")[0] == 403


@pytest.mark.parametrize("path", ["/", "/metrics", "/healthz", "/nothing"])
def test_a_head_is_answered_as_a_get_without_the_body(smps: list[SmpProcess], path: str) -> None:
    owner = owner_of(smps[1].arena)
    with closing(HTTPConnection("127.0.0.1", owner.http_port, timeout=DEADLINE_S)) as connection:
        found = []
        for method in ("HEAD", "GET", "HEAD"):  # on one connection, where an unread body corrupts what follows
            connection.request(method, path)
            answer = connection.getresponse()
            found.append((answer.status, answer.getheader("Content-Type"), len(answer.read())))
    asked, got, again = found
    assert asked == again == (*got[:2], 0)
    assert got[2] > 0


def test_an_smp_that_is_stuck_is_not_healthy(smps: list[SmpProcess]) -> None:
    owner = owner_of(smps[1].arena)
    suspend(owner.pid)
    with pytest.raises(TimeoutError):
        urllib.request.urlopen(f"http://127.0.0.1:{owner.http_port}/healthz", timeout=0.2)
    smps[1].restart()
    assert fetch(smps[1], "/healthz")[0] == 200


@pytest.mark.parametrize("words", [["drain", "node0"], ["give-up", "0badcafe"]])
def test_a_job_whose_smps_are_stuck_is_not_taken_for_none(
    ground: Ground, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    smps = ground.smps(2)
    for smp in smps:
        suspend(smp.owner.pid)
    assert main([*words, "--arena", str(ground.base)]) == NO_ANSWER
    assert f"the SMP {smps[-1].owner.pid} does not answer" in capsys.readouterr().err


def test_its_health_asks_nobody_else(smps: list[SmpProcess]) -> None:
    for other in smps[1:]:
        suspend(other.owner.pid)
    assert fetch(smps[0], "/healthz")[::2] == (200, b"ok\n")


def test_metrics_are_what_dashboard_and_alerts_ask_for(smps: list[SmpProcess], job: Run) -> None:
    status, _, body = fetch(smps[2], "/metrics")
    assert status == 200
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    untold = {"holdfast_effective_fraction"}  # by trainers that keep no account
    assert families.keys() == {*GAUGES, *(f"holdfast_{name}" for name in COUNTS)} - untold
    (stands,) = families["holdfast_tolerated_node_failures"].samples
    assert (stands.value, stands.labels) == (2, {"job": JOB, "node": "node2"})
    exported = {sample.name for family in families.values() for sample in family.samples}
    for file in ("grafana.json", "alerts.yml"):
        asked = set(re.findall(r"\bholdfast_\w+", (ROOT / "deploy" / file).read_text()))
        assert asked
        assert asked <= exported
    (build,) = families["holdfast_build_info"].samples
    assert build.labels == {"job": JOB, "node": "node2", "version": __version__, "protocol": str(PROTOCOL_VERSION)}


# ---------------------------------------------------------------------- where it listens


def test_an_smp_that_comes_back_shows_itself_where_it_did(ground: Ground) -> None:
    smp = ground.smp()
    before = owner_of(smp.arena)
    assert before.http_port > 0
    smp.kill()
    smp.restart()
    after = owner_of(smp.arena)
    assert after.http_port == before.http_port


def test_it_may_be_off_or_on_a_port_of_ones_own(ground: Ground) -> None:
    off = ground.prepare("node7").launch("--http", "off").wait_ready()
    assert off.owner.http_port == 0
    assert parse_http("off") is None
    assert parse_http("auto") == ("127.0.0.1", 0)
    assert parse_http("9411") == ("127.0.0.1", 9411)
    assert parse_http("0.0.0.0:9411") == ("0.0.0.0", 9411)
    for bad in ("0", "65536", "http", "-1", ":9411", "host:9411", "10.0.0.1:", "10.0.0.1:0"):
        with pytest.raises(ConfigError, match="from 1 to 65535"):
            parse_http(bad)


@pytest.mark.parametrize("host", ["localhost", "localhost:80", "127.0.0.1:8080", "127.3.4.5", "[::1]:80", "[::1]"])
def test_this_machine_may_be_asked_for(host: str) -> None:
    assert is_local(host)


@pytest.mark.parametrize("host", ["", "example.org", "localhost.example.org", "10.0.0.1:80", "127.0.0.1.example.org"])
def test_another_name_may_not(host: str) -> None:
    assert not is_local(host)


def test_what_is_no_status_is_refused() -> None:
    with pytest.raises(ProtocolError, match="not an inventory"):
        Status.read({})


@pytest.mark.parametrize("count", [1, 4, 16, 17, 2048])
def test_some_smps_spread_over_the_nodes_say_how_the_whole_job_is(count: int) -> None:
    layout = layout_of(count, 1, 1)
    known = {(layout.epoch, layout.revision): layout}
    views = [i for i, node in enumerate(layout.nodes) if sees_the_job(Inventory(node.name, "h", 1, 2, layouts=known))]
    assert min(count, VIEWS // 2) <= len(views) <= VIEWS
    assert max(b - a for a, b in itertools.pairwise([*views, count])) <= -(-count // VIEWS), "they stand far apart"
    assert sees_the_job(Inventory("spare", "h", 1, 2, layouts=known)) and sees_the_job(Inventory("idle", "h", 1, 2))


def test_how_often_the_job_is_protected_is_a_metric_once_a_trainer_has_said_so(ground: Ground) -> None:
    (smp,) = smps = ground.smps(1)
    run = run_on(smps, [[900]])
    for step, next_s in ((1, 0.0), (2, 54321.5)):
        snapshot = run.snapshot(step)
        run["dp0"].write(snapshot)
        run["dp0"].seal(snapshot, next_s=next_s)
        [status] = look(JOB, smp.control).statuses
        [value] = re.findall(r"^holdfast_safe_interval_seconds\S* (\S+)$", exposition(JOB, status, None).decode(), re.M)
        assert float(value) == next_s


def test_the_others_say_how_they_are_themselves(ground: Ground) -> None:
    smp = ground.smp()
    [status] = look(JOB, smp.control).statuses
    own = exposition(JOB, status, None).decode()
    whole = exposition(JOB, status, look(JOB, smp.control)).decode()
    assert "holdfast_up_seconds{" in own and "holdfast_silent_nodes{" not in own
    assert {line.split("{")[0] for line in whole.splitlines()} > {line.split("{")[0] for line in own.splitlines()}
