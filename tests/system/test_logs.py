"""The log: programs can read its lines, each line names its process, and a repeated event is logged once."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.smp_daemon.shared import logs
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.logs import MAX_EPISODES, Episodes, Formatter, about, chosen_format, get_log, identify
from holdfast.smp_daemon.shared.settings import LOG
from tests.scripts import python
from tests.smp_kit import Ground, SmpProcess

FIELDS = {"time", "level", "job", "node", "epoch", "step", "at", "msg"}


def parse_line(line: str) -> dict[str, Any]:
    """The fields of a line of either kind; in logfmt, all values but None are texts. Raises `ValueError`."""
    if line.startswith("{"):
        found: dict[str, Any] = json.loads(line)
        return found
    fields: dict[str, Any] = {}
    decoder = json.JSONDecoder()
    at = 0
    while at < len(line):
        name, equals, _ = line[at:].partition("=")
        at += len(name) + 1
        if not equals or not name or " " in name:
            raise ValueError(f"no field at {line[at:][:40]!r}")
        if line[at : at + 1] == '"':
            fields[name], at = decoder.raw_decode(line, at)
        else:
            value = line[at:].partition(" ")[0]
            fields[name] = None if value == "-" else value
            at += len(value)
        if at < len(line) and line[at] != " ":
            raise ValueError(f"no space after {name}")
        at += 1
    return fields


class Lines(logging.Handler):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.setFormatter(Formatter(kind))
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture(params=["logfmt", "json"])
def lines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lines]:
    monkeypatch.setattr(logs, "_identity", {})
    handler, logger = Lines(request.param), logging.getLogger("a test")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)


def test_a_line_says_who_and_about_what(lines: Lines) -> None:
    epoch = 3
    identify(job="run", node="node1", epoch=lambda: epoch)
    log = get_log("a test")
    log.warning('%s is "late"\nand how = \t', "dp0", extra=about(SnapshotId(2, 7), coord="dp0", times=4))
    log.info("nothing in particular")
    first, second = map(parse_line, lines.lines)
    assert first | {"time": ""} == {
        "time": "",
        "level": "warning",
        "job": "run",
        "node": "node1",
        "epoch": first["epoch"],
        "step": first["step"],
        "at": "a test",
        "msg": 'dp0 is "late"\nand how = \t',
        "coord": "dp0",
        "times": first["times"],
    }
    assert (int(first["epoch"]), int(first["step"]), int(first["times"])) == (2, 7, 4)
    assert int(second["epoch"]) == 3 and second["step"] is None
    assert all("\n" not in line for line in lines.lines)


def test_a_trainers_line_has_its_rank_and_coordinate(lines: Lines) -> None:
    identify(job="run", node="node1", epoch=lambda: 3, step=lambda: 12, rank=5, coord="pp0-dp1")
    get_log("a test").error("no snapshot")
    found = parse_line(lines.lines[0])
    assert (found["coord"], int(found["rank"]), int(found["step"])) == ("pp0-dp1", 5, 12)


def test_a_line_of_another_library_says_who_too(lines: Lines) -> None:
    identify(job="run", node="node1")
    logging.getLogger("a test").warning("what others say")
    assert parse_line(lines.lines[0])["job"] == "run"


def test_a_trace_stands_on_the_same_line(lines: Lines) -> None:
    try:
        raise ValueError("of a bug")
    except ValueError:
        get_log("a test").exception("it failed")
    assert "ValueError: of a bug" in parse_line(lines.lines[0])["trace"]


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,9}", fullmatch=True), st.none() | st.text(max_size=20), min_size=1))
def test_every_text_comes_back(fields: dict[str, Any]) -> None:
    line = " ".join(f"{name}={logs._quoted(value)}" for name, value in fields.items())
    assert parse_line(line) == fields
    assert line.isprintable()


@pytest.mark.parametrize("line", ["no field", "a=1 b", '="x"', 'a="1"b=2'])
def test_what_is_no_line_is_refused(line: str) -> None:
    with pytest.raises(ValueError):
        parse_line(line)


def test_a_wrong_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG.variable, "yaml")
    with pytest.raises(ConfigError, match=r"HOLDFAST_LOG: 'yaml': .*logfmt"):
        chosen_format()


def test_unknown_fields_of_every_line_are_refused() -> None:
    with pytest.raises(ValueError, match="colour"):
        identify(colour="blue")


@pytest.mark.parametrize("bar", [False, True], ids=["alone", "with a progress bar"])
def test_a_trainer_without_logging_shows_whose_warning_it_is(bar: bool) -> None:
    """And says nothing of what is normal; a job that has set up logging gets every line once, in its own form."""
    code = f"""
import logging, sys, types
if {bar}:
    shown = types.SimpleNamespace(write=lambda text, file: print(">", text, file=file))
    sys.modules["tqdm"] = types.SimpleNamespace(tqdm=shown)
from holdfast.smp_daemon.shared.logs import get_log, log_here
log_here(job="a"), log_here(job="a")
log = get_log("holdfast.here")
log.info("normal"), log.warning("%s is odd", "this")
logging.basicConfig(format="mine %(name)s %(message)s")
log.warning("that, too")
"""
    done = python(code)
    assert done.stderr.splitlines() == [f"{'> ' if bar else ''}holdfast: this is odd", "mine holdfast.here that, too"]


class TestWhatGoesOnFailing:
    def test_is_logged_when_it_begins_and_when_it_is_over(self, lines: Lines) -> None:
        now = 100.0
        episodes = Episodes(get_log("a test"), clock=lambda: now)
        for _ in range(1000):
            episodes.begin("a", "%s is away", "node1", extra=about(peer="node1"))
        episodes.begin("b", "another")
        now += 7.5
        for _ in range(3):
            episodes.end("a", "%s is back", "node1", extra=about(peer="node1"))
        found = [parse_line(line) for line in lines.lines]
        assert [each["msg"] for each in found] == ["node1 is away", "another", "node1 is back"]
        assert (int(found[2]["times"]), float(found[2]["for_s"]), found[2]["peer"]) == (1000, 7.5, "node1")

    def test_is_logged_again_when_it_begins_again(self, lines: Lines) -> None:
        episodes = Episodes(get_log("a test"))
        for _ in range(2):
            assert episodes.begin("a", "away")
            episodes.end("a", "back")
        assert len(lines.lines) == 4

    def test_may_be_logged_again_every_so_often(self, lines: Lines) -> None:
        now = 100.0
        episodes = Episodes(get_log("a test"), clock=lambda: now, every_s=60.0)
        for _ in range(2):
            assert episodes.begin("a", "%s is away", "node1")
            for _ in range(4):
                now += 14.0
                assert not episodes.begin("a", "%s is away", "node1")
            now += 4.0
        assert [parse_line(line)["msg"] for line in lines.lines] == [
            "node1 is away",
            "node1 is away (5 times in the last 60 s)",
        ]

    def test_is_logged_again_when_it_becomes_worse(self, lines: Lines) -> None:
        episodes = Episodes(get_log("a test"))
        levels = [logging.INFO, logging.WARNING, logging.WARNING, logging.INFO]
        assert [episodes.begin("a", "away", level=level) for level in levels] == [True, True, False, False]

    def test_takes_little_memory_whatever_fails(self, lines: Lines) -> None:
        episodes = Episodes(get_log("a test"))
        for key in range(2 * MAX_EPISODES):
            episodes.begin(key, "away")
        assert len(episodes._going_on) == MAX_EPISODES


# ---------------------------------------------------------------------- real SMPs


def log_of(smp: SmpProcess) -> list[dict[str, Any]]:
    return [parse_line(line) for line in (smp.arena / "smp.log").read_text().splitlines()]


@pytest.mark.parametrize("kind", ["logfmt", pytest.param("json", marks=pytest.mark.slow)])
def test_an_smp_whose_peer_is_away_says_so_once(ground: Ground, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv(LOG.variable, kind)
    monkeypatch.setenv("HOLDFAST_REGROUP_AFTER", "500ms")  # the SMPs check their group ten times a second
    smps, run = ground.job([[3000]] * 3, protect="2+1")
    run.protect(1)
    smps[2].lose()
    epoch = 1
    for step in range(2, 8):  # one snapshot after another fails
        for coord in ("dp0", "dp1"):
            run[coord].write(SnapshotId(epoch, step), run.kept, run.protected)
            run[coord].seal(SnapshotId(epoch, step))
        run["dp0"].client.await_outcome(SnapshotId(epoch, step), 1.5)
    found = log_of(smps[0])
    assert found and all(line.keys() >= FIELDS for line in found)
    assert {(line["job"], line["node"]) for line in found} == {(smps[0].job, "node0")}
    repeated = Counter((line["at"], line["msg"]) for line in found)
    assert max(repeated.values()) == 1, repeated
    by_peer = Counter(
        (line["at"], str(line.get("peer")))
        for line in found
        if line["at"] == "holdfast.smp_daemon.recovery.inventories"
    )
    assert all(count == 1 for count in by_peer.values()), by_peer
    failed = [line for line in found if line["at"] == "holdfast.smp_daemon.storage.job_state"]
    assert len(failed) <= 1
    assert all(int(line["epoch"]) == epoch and line["step"] is not None for line in failed)
    assert len(found) < 20, found


@pytest.mark.needs("torch")
def test_a_trainer_logs_only_if_it_is_asked_to(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    smp = ground.smp()
    script = (
        "import logging, torch\n"
        "from holdfast import InMemorySnapshot\n"
        "model = torch.nn.Linear(3, 3)\n"
        "optim = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        f"with InMemorySnapshot(model, optim, job={smp.job!r}, start=False) as snap:\n"
        "    for _ in range(2):\n"
        "        model(torch.ones(1, 3)).sum().backward()\n"
        "        optim.step()\n"
        "    logging.getLogger('holdfast.snapshot.hook').warning('of a test')\n"
    )
    environment = {"HOLDFAST_ARENA": str(smp.arena.parent), LOG.variable: "json"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    done = python(script)
    [line] = [json.loads(each) for each in done.stderr.splitlines() if "of a test" in each]
    assert (line["job"], line["node"], line["rank"], line["step"]) == (smp.job, "node0", 0, 2)
    assert line["epoch"].partition("-")[0] == "1", "of the first start"
    assert line["coord"] and line["msg"] == "of a test"
