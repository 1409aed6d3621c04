"""Every command with bad input: one line for people, one object for ``--json``, one status per kind of error."""

from __future__ import annotations

import argparse
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import ConfigError, HoldfastError, SmpUnavailable
from holdfast.cli.main import main, make_parser
from holdfast.cli.output import (
    FAILED,
    NO_ANSWER,
    NOT_FOUND,
    WRONG,
    EndedBySignal,
    console_of,
    describe,
    json_target,
)
from holdfast.report import Report, say
from holdfast.smp_daemon.shared.errors import NotFound
from tests.deadlines import DEADLINE_S


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder with no job anywhere near."""
    monkeypatch.setenv("HOLDFAST_ARENA", str(tmp_path / "arenas"))
    monkeypatch.delenv("HOLDFAST_JOB", raising=False)
    monkeypatch.chdir(tmp_path)


def leaves() -> Iterator[tuple[list[str], argparse.ArgumentParser]]:
    """Every command, with its parser."""

    def walk(parser: argparse.ArgumentParser, words: list[str]) -> Iterator[tuple[list[str], argparse.ArgumentParser]]:
        inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        if not inner:
            yield words, parser
        for action in inner:
            for name, leaf in action.choices.items():
                yield from walk(leaf, [*words, name])

    return walk(make_parser(), [])


COMMANDS = {" ".join(words): (words, parser) for words, parser in leaves()}
WITH_JSON = [name for name, (_, parser) in COMMANDS.items() if "--json" in parser._option_string_actions]

WITH_JOB = [name for name, (_, parser) in COMMANDS.items() if "--job" in parser._option_string_actions]

BAD: dict[str, tuple[list[str], int, str]] = {
    "demo": (["--nodes", "4", "--protect", "6+2"], WRONG, "6+2 needs 8 nodes"),
    "audit": (["--", "/no/such/python"], WRONG, "/no/such/python cannot be started"),
    "status": (["--job", "nosuch"], NOT_FOUND, "nosuch: there is no arena"),
    "smp start": (["--job", "a/b"], WRONG, "'a/b' cannot be"),
    "smp stop": (["--job", "nosuch"], NOT_FOUND, "nosuch: there is no arena"),
    "smp status": (["--job", "a/b"], WRONG, "'a/b' cannot be"),
    "drain": (["nosuch"], NOT_FOUND, "has a node 'nosuch'"),
    "give-up": (["0badcafe"], NOT_FOUND, "no SMP of any job"),
    "export": (["--job", "nosuch", "out"], NOT_FOUND, "no SMP of job 'nosuch'"),
    "gc": (["--older-than", "soon"], WRONG, "--older-than: 'soon' is not"),
    "doctor": (["--", "train"], WRONG, "no command"),
    "bench node": (["--nodes", "3"], WRONG, "unrecognized arguments: --nodes"),
    "chaos list": (["surplus"], WRONG, "unrecognized arguments: surplus"),
    "chaos run": (["--faults", "x"], WRONG, "--faults: invalid int"),
    "plan": (["--step", "1s", "--model", "nosuch"], WRONG, "--model 'nosuch'"),
    "profile": (["--", "/no/such/python"], WRONG, "/no/such/python cannot be started"),
    "tune": (["--measured", "nosuch.json"], WRONG, "--measured: nosuch.json is not"),
    "deploy": (["nosuch"], WRONG, "invalid choice: 'nosuch'"),
}
"""Wrong arguments for each command."""


def test_every_command_is_here() -> None:
    assert sorted(BAD) == sorted(WITH_JSON)
    assert sorted(COMMANDS) == sorted([*WITH_JSON, "top"])


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_for_people_and_one_object_for_programs(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words, status, message = BAD[name]
    before = COMMANDS[name][0]
    assert main([*before, *words]) == status
    plain = capsys.readouterr()
    assert plain.err.splitlines()[-1].startswith("holdfast: ") and message in plain.err
    assert "Traceback" not in plain.err and "usage:" not in plain.err
    report = tmp_path / "report.json"
    for target in ("-", str(report)):
        assert main([*before, "--json", target, *words]) == status
        told = capsys.readouterr()
        assert told.err.splitlines()[-1] == plain.err.splitlines()[-1]
        said = json.loads(told.out if target == "-" else report.read_text())
        assert said.keys() == {"error"} and said["error"].keys() == {"kind", "message", "status"}
        assert said["error"]["status"] == status and message in said["error"]["message"]


ABSURD = {
    "smp start --job x --port 65536": (WRONG, "--port: '65536'"),
    "smp start --job x --detach --node a/b": (WRONG, "'a/b' cannot be the name of a node"),
    "smp start --job x --deadlines step=5min,step=6min": (WRONG, "step is given twice"),
    "smp start --job x --bulk-port -1": (WRONG, "--bulk-port"),
    "plan --step 1e-300s --state 1GB": (WRONG, "--step: '1e-300s' is next to nothing"),
    "plan --step 1s --state 1e9PB": (WRONG, "--state: '1e9PB' is more than"),
    "plan --step 1s --state 1GB --mtbf 1e300d": (WRONG, "--mtbf: '1e300d' is more than"),
    "plan --step 1s --state 1GB --nodes 1000000000": (WRONG, "--nodes is 1 to"),
    "chaos run --steps 2 -- true": (WRONG, "--steps 2"),
    "chaos run --ignore ( -- true": (WRONG, "--ignore: '('"),
    "audit --ignore ( -- true": (WRONG, "--ignore: '('"),
    "give-up --job x --at 127.0.0.1:1": (NO_ANSWER, "127.0.0.1:1"),
    "drain node --job x --at 127.0.0.1:1": (NO_ANSWER, "127.0.0.1:1"),
}


@pytest.mark.parametrize("line", ABSURD)
def test_an_absurd_value_is_named_before_anything_is_done(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, message = ABSURD[line]
    assert main(line.split()) == status
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("name", WITH_JOB)
@pytest.mark.parametrize("option", ["--job", "--arena"])
def test_an_empty_name_is_not_that_of_any(name: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMANDS[name][0], option, ""]) == WRONG
    assert f"{option}: ''" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_that_is_not_there_is_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, _ = COMMANDS[name]
    needed = {"drain": ["x"], "deploy": ["slurm"]}.get(name, [])
    assert main([*words, *needed, "--no-such-option"]) == WRONG
    said = capsys.readouterr().err
    assert said.startswith("holdfast: ") and "--no-such-option" in said and "--help" in said


FILES = [
    (words, option)
    for words, parser in COMMANDS.values()
    for option, action in parser._option_string_actions.items()
    if action.metavar == "FILE" and option.startswith("--") and option not in ("--measured", "--profile", "--from")
]


@pytest.mark.parametrize(("words", "option"), FILES, ids=lambda value: "".join(value))
def test_a_file_that_cannot_be_written_is_named_before_anything_is_done(
    words: list[str], option: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for path, why in ((tmp_path / "no" / "file", "no directory"), (tmp_path, "is a directory")):
        assert main([*words, option, str(path)]) == WRONG
        said = capsys.readouterr().err
        assert said.startswith(f"holdfast: {option}") and f": {path}" in said
        assert why in said and len(said.splitlines()) == 1


@pytest.mark.parametrize("name", ["status", "top", "smp status", "smp stop", "smp start", "drain", "export", "gc"])
def test_an_arena_that_is_no_directory_is_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    needed = ["node0"] if name == "drain" else []
    assert main([*name.split(), *needed, "--arena", __file__]) == WRONG
    assert f"--arena: {__file__} is not" in capsys.readouterr().err


def test_a_result_that_cannot_be_written_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--step", "1s", "--state", "1GB", "--json", "/dev/full"]) == FAILED
    assert capsys.readouterr().err.splitlines()[-1] == f"holdfast: {os.strerror(errno.ENOSPC)}"


def test_kinds_have_statuses() -> None:
    assert describe(ConfigError("x")) == ("ConfigError", "x", WRONG)
    assert describe(NotFound("x")) == ("NotFound", "x", NOT_FOUND)
    assert describe(SmpUnavailable("x")) == ("SmpUnavailable", "x", NO_ANSWER)
    assert describe(HoldfastError("x")) == ("HoldfastError", "x", FAILED)
    missing = OSError(errno.ENOENT, os.strerror(errno.ENOENT), "/x")
    assert describe(missing) == ("FileNotFoundError", f"/x: {missing.strerror}", WRONG)
    assert describe(EndedBySignal(15)) == ("EndedBySignal", "ended by SIGTERM", 143)
    assert describe(KeyboardInterrupt())[2] == 130
    with pytest.raises(ZeroDivisionError):
        describe(ZeroDivisionError())


def test_where_json_goes_is_read_from_a_command_line_that_is_wrong() -> None:
    assert json_target(["plan", "--nodes", "--json", "-"]) == "-"
    assert json_target(["plan", "--json=x"]) == "x"
    assert json_target(["audit", "--", "train", "--json", "x"]) is None
    assert json_target(["plan", "--json"]) is None
    assert json_target([]) is None


def test_a_json_file_of_the_users_command_is_left_alone(tmp_path: Path) -> None:
    theirs = tmp_path / "results.json"
    theirs.write_text("mine")
    assert main(["audit", "--steps", "1", "python", "train.py", "--json", str(theirs)]) == WRONG
    assert theirs.read_text() == "mine"


TELL = "import os, sys; sys.exit(' '.join(name for name in os.environ if name.startswith('HOLDFAST_')))"
"""A training command that ends at once, and says which variables it has."""


@pytest.mark.needs("torch")
@pytest.mark.parametrize("command", ["audit", "profile", "chaos run"])
def test_a_job_that_is_only_tried_has_nothing_to_do_with_the_real_one(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would go back to what the last trial has persisted, and be refused where nothing is to go back to."""
    for name in ("PERSIST", "REQUIRE", "RUN", "RESTORE_STEP", "GIVE_UP", "MEMORY"):
        monkeypatch.setenv(f"HOLDFAST_{name}", "1GB")
    assert main([*command.split(), "--", sys.executable, "-c", TELL]) == FAILED
    names = set(capsys.readouterr().err.split())
    assert {"HOLDFAST_MEMORY", "HOLDFAST_JOB"} <= names
    assert not names & {f"HOLDFAST_{name}" for name in ("PERSIST", "REQUIRE", "RUN", "RESTORE_STEP", "GIVE_UP")}


def test_a_port_that_is_none_is_told_by_the_doctor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for port in ("99999", "²"):
        monkeypatch.setenv("HOLDFAST_HTTP", port)
        assert main(["doctor"]) == WRONG
        assert f"HOLDFAST_HTTP): '{port}'" in capsys.readouterr().err


def test_a_log_of_failures_may_come_from_a_spreadsheet(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("time_h,class\n1,process\n9,process\n", "utf-8-sig")
    assert main(["plan", "--step", "12s", "--state", "1GB", "--nodes", "2", "--log", str(log)]) == 0


def test_the_bare_command_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == WRONG
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("target", [None, "-"])
def test_brackets_are_printed_as_they_are(target: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    """Paths and errors of other software contain them, and rich would take them for markup."""
    text = "[/src/transport/pair.cc:537] Connection closed by peer [red]"
    table = Report(("what",), [(text,)], heading=text)
    console = console_of(argparse.Namespace(json=target), soft_wrap=True)
    console.print(text)
    say(console, table)
    out, err = capsys.readouterr()
    told, silent = (err, out) if target else (out, err)
    assert silent == ""
    assert told.count(text) == 3


def test_a_reader_that_leaves_ends_a_command_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", "holdfast.cli", "chaos", "list"]
        ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=DEADLINE_S)
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, b"")
