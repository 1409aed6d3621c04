"""``holdfast smp start | stop | status``, as people and supervisors use it."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from holdfast.cli.main import main
from holdfast.cli.output import NO_ANSWER, NOT_FOUND, WRONG
from holdfast.cli.smp import smp_arguments
from holdfast.smp_daemon.__main__ import add_options
from holdfast.smp_daemon.shared import spawn
from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.errors import DeadlineExceeded
from holdfast.smp_daemon.shared.paths import read_owner
from tests.access_kit import credentials, token_file
from tests.deadlines import DEADLINE_S, await_that
from tests.scripts import completed, started
from tests.smp_kit import JOB, DetachedSmp, Ground, Trainer, Watched, end, playground, read_line, run_on, suspend
from tests.unit.test_damage import DAMAGE

QUICK = ("--scrub", "0", "--regroup-after", "0")


@pytest.fixture
def ground(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ground]:
    with playground(own_python=True) as made:
        monkeypatch.setenv("HOLDFAST_ARENA", str(made.base / "arenas"))
        monkeypatch.setenv("HOLDFAST_JOB", JOB)
        monkeypatch.setenv("HOLDFAST_NODE", "node0")
        yield made


def smp(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """Exit status and report of ``holdfast smp ...``."""
    status = main(["smp", *words, "--json", "-"])
    text = capsys.readouterr().out
    return status, json.loads(text) if text else {}


def detached(ground: Ground) -> DetachedSmp:
    """The SMP that `holdfast smp start --detach` started, to run trainers on."""
    return DetachedSmp(ground, ground.base / "arenas" / JOB)


def test_a_day_of_an_smp(ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    assert smp(capsys, "status") == (
        NOT_FOUND,
        {"job": JOB, "arena": str(arena(ground)), "running": False, "answers": False},
    )
    assert smp(capsys, "stop")[0] == NOT_FOUND

    status, said = smp(capsys, "start", "--detach", "--host", ground.host(), *QUICK)
    assert (status, said["started"], said["job"], said["node"]) == (0, True, JOB, "node0")
    status, again = smp(capsys, "start", "--detach", "--host", said["host"], *QUICK)
    assert (status, again["started"], again["pid"]) == (0, False, said["pid"])

    run = run_on([detached(ground)], [[3000]])
    snapshot = run.protect(1)
    status, seen = smp(capsys, "status")
    assert (status, seen["answers"], seen["pid"], seen["bulk_port"]) == (0, True, said["pid"], said["bulk_port"])
    assert seen["status"]["inventory"]["shards"] == [[[1, 1], "dp0"]]

    assert main(["smp", "stop"]) == 2
    assert "trainers have 1 connections" in capsys.readouterr().err
    run["dp0"].client.close()
    status, gone = smp(capsys, "stop")
    assert (status, gone["pid"], gone["kept"]) == (0, said["pid"], True)
    assert smp(capsys, "status")[0] == NOT_FOUND

    smp(capsys, "start", "--detach", "--host", said["host"], *QUICK)
    trainer = Trainer(detached(ground), "dp0")
    assert bytes(trainer.recover(run.plan(trainer.client.inventory())).view) == run["dp0"].image(snapshot)
    assert smp(capsys, "stop", "--force", "--remove") == (
        0,
        {"job": JOB, "pid": trainer.client.pid, "arena": str(arena(ground)), "kept": False},
    )


def test_a_start_finds_the_smp_that_another_starts_at_this_moment(
    ground: Ground, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Watched(monkeypatch, spawn, "launch")
    first = detached(ground)
    first.host, first.rules = ground.host(), [("start.bound", None)]
    first.launch()
    held = ground.points.wait_any("node0", "start.bound")
    second = ground.meanwhile(smp, capsys, "start", "--detach", "--host", first.host, *QUICK)
    assert launch.ended.wait(DEADLINE_S)
    assert not second.done()
    held.go()
    pid = first.wait_ready().owner.pid
    status, said = second.result(DEADLINE_S)
    assert (status, said["started"], said["pid"]) == (0, False, pid)
    assert smp(capsys, "stop", "--remove")[0] == 0


def arena(ground: Ground) -> Path:
    return ground.base / "arenas" / JOB


def test_in_the_foreground_the_process_becomes_the_smp(ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "holdfast.cli", "smp", "start", "--host", ground.host(), *QUICK]
    with started(command) as process:
        assert json.loads(read_line(process.stdout))["ready"]["pid"] == process.pid
        assert smp(capsys, "status")[0] == 0
        again = completed(command)
        assert again.returncode == WRONG and "another SMP owns" in again.stderr
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 128 + signal.SIGINT
    assert smp(capsys, "status")[0] == NOT_FOUND


def test_one_that_is_stopped_by_the_kernel_does_not_answer(
    ground: Ground, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.smp_daemon.recovery.inventories.DEADLINE_S", 0.5)
    _, said = smp(capsys, "start", "--detach", "--host", ground.host(), *QUICK)
    suspend(said["pid"])
    status, seen = smp(capsys, "status")
    assert (status, seen["running"], seen["answers"]) == (NO_ANSWER, True, False)
    overview = ["status", "--job", JOB, "--arena", str(arena(ground).parent)]
    assert main(overview) == 1 and "does not answer" in capsys.readouterr().out
    assert main([*overview, "--json", "-"]) == 1
    assert "no SMP answers" in json.loads(capsys.readouterr().out)[0]["safe"]
    monkeypatch.setattr("holdfast.cli.smp.SmpClient", Mock(side_effect=DeadlineExceeded("it is silent")))
    assert main(["smp", "stop"]) == NO_ANSWER
    assert f"SMP {said['pid']} runs and does not answer: it is silent" in capsys.readouterr().err
    end(psutil.Process(said["pid"]))
    assert main(["export", "--list"]) == NO_ANSWER and "smp start" in capsys.readouterr().err
    assert main(overview) == 1 and "has ended" in capsys.readouterr().out


def test_one_that_does_not_let_it_in_is_not_one_that_does_not_answer(
    ground: Ground, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with credentials(token_file(tmp_path / "token")):
        smp(capsys, "start", "--detach", "--host", ground.host(), *QUICK)
    status, seen = smp(capsys, "status")
    assert (status, seen["running"], seen["answers"], seen["refused"]) == (NO_ANSWER, True, False, "token")
    assert smp(capsys, "stop")[0] == 0, "over its own socket no token is needed"


def test_a_stopped_one_is_named_with_what_to_do(ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    _, said = smp(capsys, "start", "--detach", "--host", ground.host(), *QUICK)
    client = ground.keep(SmpClient(arena(ground), JOB))
    suspend(said["pid"])
    with pytest.raises(DeadlineExceeded, match=f"SMP {said['pid']} of node node0.*kill -CONT {said['pid']}"):
        client.join(1, deadline_s=0.2)
    end(psutil.Process(said["pid"]))


def test_what_a_dead_one_held_can_be_removed(ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    _, said = smp(capsys, "start", "--detach", "--host", ground.host(), *QUICK)
    end(psutil.Process(said["pid"]))
    assert smp(capsys, "stop") == (NOT_FOUND, {"job": JOB, "pid": None, "arena": str(arena(ground)), "kept": True})
    assert read_owner(arena(ground)) is not None
    assert smp(capsys, "stop", "--remove")[1]["kept"] is False
    assert not arena(ground).exists()


LOST = {name: DAMAGE[name] for name in ("gone", "noise", "a directory", "a pipe")}


@pytest.mark.parametrize("lost", LOST)
def test_one_whose_file_is_lost_is_named_and_can_be_stopped(
    ground: Ground, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, lost: str
) -> None:
    path = arena(ground) / "smp.json"
    _, said = smp(capsys, "start", "--detach", "--host", ground.host(), *QUICK)
    suspend(said["pid"])  # or it would write the file again at once
    LOST[lost](path)
    assert main(["smp", "status"]) == 1
    told = capsys.readouterr().err
    assert str(path) in told and str(said["pid"]) in told
    main(["status"])  # names the file, and goes on with the others
    assert lost == "gone" or str(path) in caplog.text
    capsys.readouterr()
    os.kill(said["pid"], signal.SIGCONT)
    await_that(lambda: main(["smp", "status"]) == 0)
    assert read_owner(arena(ground)) is not None, "it has written the file again"
    capsys.readouterr()
    assert smp(capsys, "stop") == (0, {"job": JOB, "pid": said["pid"], "arena": str(arena(ground)), "kept": True})
    assert smp(capsys, "status")[0] == NOT_FOUND
    status, again = smp(capsys, "start", "--detach", "--host", said["host"], *QUICK)
    assert (status, again["started"]) == (0, True)
    assert smp(capsys, "status")[0] == 0
    suspend(again["pid"])
    LOST[lost](path)
    assert main(["gc", "--older-than", "0"]) == 0
    assert f"SMP {again['pid']}" in capsys.readouterr().err
    assert not arena(ground).exists()


@pytest.mark.parametrize("options", [("--port", "{taken}"), ("--bulk-port", "{taken}"), ("--memory", "9TB")])
def test_a_start_that_fails_leaves_nothing(
    ground: Ground, capsys: pytest.CaptureFixture[str], options: tuple[str, str]
) -> None:
    host = ground.host()
    with socket.create_server((host, 0)) as taken:
        words = [word.format(taken=taken.getsockname()[1]) for word in options]
        assert main(["smp", "start", "--detach", "--host", host, *words]) == WRONG
        assert not arena(ground).exists()
        arena(ground).mkdir(mode=0o700)
        assert main(["smp", "start", "--detach", "--host", host, *words]) == WRONG
        assert arena(ground).exists(), "what was there before is not this start's"


def test_every_option_of_an_smp_is_passed_on() -> None:
    parser = ArgumentParser()
    add_options(parser)
    assert smp_arguments(parser.parse_args([]))
    words = ["--insecure", "--detach", "--host", "10.0.0.1", "--grace", "7s", "--bulk-port", "12"]
    passed = smp_arguments(parser.parse_args(words))
    assert set(words) <= set(passed)
    assert parser.parse_args(passed) == parser.parse_args(words)


def test_a_client_that_stops_it_needs_no_trainers(ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    smp(capsys, "start", "--detach", "--host", ground.host(), *QUICK)
    client = SmpClient(arena(ground), JOB)
    client.stop(remove=True, force=False)
    assert not arena(ground).exists()
