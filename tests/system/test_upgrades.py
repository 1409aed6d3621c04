"""Versions of holdfast that meet: neighbours work together, others refuse each other before anything is done.

The other version is a copy of this one's code, with other numbers in `smp_daemon.shared.versions`. Its SMPs are
processes of that copy.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.chaos.launcher import Launcher
from holdfast.cli.main import main
from holdfast.smp_daemon.net.links import Links
from holdfast.smp_daemon.net.peers import PeerClient
from holdfast.smp_daemon.ops.overview import look
from holdfast.smp_daemon.recovery.inventories import gather_inventories
from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.counters import Counters
from holdfast.smp_daemon.shared.errors import VersionMismatch, failure_of
from holdfast.smp_daemon.shared.messages import AskShard, Hello, Ping
from holdfast.smp_daemon.shared.plain import from_plain
from holdfast.smp_daemon.shared.versions import (
    ARENA_FORMAT,
    OLDEST_PROTOCOL,
    PROTOCOL_VERSION,
    RELEASE,
    UNSAID,
    check_range,
    spoken,
)
from tests.proof.crash_kit import Job, job
from tests.smp_kit import JOB, Ground, SmpProcess, owner_of, run_on

pytestmark = pytest.mark.smps(own_python=True, HOLDFAST_REJOIN="1")

ROOT = Path(__file__).parents[2]
NEXT, AFTER = PROTOCOL_VERSION + 1, PROTOCOL_VERSION + 2


class Installation:
    """A copy of holdfast as another version."""

    def __init__(self, folder: Path, release: str, **numbers: int) -> None:
        """`numbers`: values for constants of `versions`, such as ``PROTOCOL_VERSION=5``."""
        self._folder = folder
        ignored = shutil.ignore_patterns("__pycache__", "*.html", "*.png", "*.c")
        shutil.copytree(ROOT / "holdfast", folder / "holdfast", ignore=ignored)
        shutil.copy(ROOT / "smp_daemon/ops/page.html", folder / "holdfast/smp_daemon/ops")
        path = folder / "holdfast/smp_daemon/shared/versions.py"
        text = re.sub(r"^RELEASE = .*$", f"RELEASE = {release!r}", path.read_text(), flags=re.MULTILINE)
        for name, number in numbers.items():
            text, count = re.subn(rf"^{name} = \d+$", f"{name} = {number}", text, flags=re.MULTILINE)
            assert count == 1, name
        path.write_text(text)

    def replace(self, smp: SmpProcess, monkeypatch: pytest.MonkeyPatch) -> SmpProcess:
        """Kill an SMP, and launch one of this version in its arena, without waiting until it serves."""
        smp.kill()
        with monkeypatch.context() as changed:
            changed.setenv("PYTHONPATH", str(self._folder))
            changed.setenv("PYTHONSAFEPATH", "1")
            return smp.launch()


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher(["tests.proof.crash_jobs"]) as made:
        yield made


@pytest.fixture(scope="module")
def neighbour(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """The release after this one, which still speaks this one's protocol."""
    return Installation(tmp_path_factory.mktemp("next"), "9.1.0", PROTOCOL_VERSION=NEXT)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """A later release, which does not."""
    return Installation(tmp_path_factory.mktemp("after"), "9.2.0", PROTOCOL_VERSION=AFTER, OLDEST_PROTOCOL=NEXT)


# ---------------------------------------------------------------------- which versions may meet


@pytest.mark.parametrize("said", [spoken(), (OLDEST_PROTOCOL, AFTER), (0, OLDEST_PROTOCOL), (PROTOCOL_VERSION, NEXT)])
def test_ranges_with_a_protocol_in_common_meet(said: tuple[int, int]) -> None:
    assert failure_of(lambda: check_range("node7", said, "9.1.0"), VersionMismatch) is None


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ((NEXT, AFTER), f"{NEXT} to {AFTER}; .*is newer"),
        ((0, OLDEST_PROTOCOL - 1), " 0 to .*is older"),
        ((AFTER, AFTER), rf"node7 runs holdfast 9\.9\.0, .* {AFTER}; .* {RELEASE},"),
    ],
)
def test_others_are_told_what_both_are_and_what_to_do(said: tuple[int, int], text: str) -> None:
    with pytest.raises(VersionMismatch, match=rf"{text}.*same version"):
        check_range("node7", said, "9.9.0")


def test_who_names_no_protocol_speaks_that_of_the_first_release() -> None:
    assert from_plain(Hello, {"op": "hello", "job": "j"}).speaks == UNSAID
    assert from_plain(Ping, {"op": "ping", "job": "j"}).speaks == UNSAID
    assert failure_of(lambda: check_range("node7", UNSAID), VersionMismatch) is None


# ---------------------------------------------------------------------- under a running job


@pytest.mark.cluster
def test_smps_are_upgraded_one_by_one_under_a_running_job(
    ground: Ground, launcher: Launcher, neighbour: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    with job(ground, launcher) as made:
        made.launch()
        made.train()
        made.await_protected(3)
        for smp in (made.victim, made.other):
            neighbour.replace(smp, monkeypatch).wait_ready()
            made.await_protected(_last_step(made) + 2)
            versions = look(JOB, made.victim.control).versions
            assert "9.1.0" in versions and len(versions) == (2 if smp is made.victim else 1)
        made.finish()


@pytest.mark.cluster
def test_and_back_again(
    ground: Ground, launcher: Launcher, neighbour: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job restarts on the newer SMPs, and continues on this version's."""
    with job(ground, launcher) as made:
        for smp in (made.victim, made.other):
            neighbour.replace(smp, monkeypatch).wait_ready()
        made.train()
        made.await_protected(3)
        made.kill_trainers()
        made.train()
        made.wait(lambda: len(made.of("started")) == 4, "the trainers did not start again")
        assert {event["how"] for event in made.of("started")[2:]} == {"held"}
        for smp in (made.victim, made.other):
            smp.restart()
            made.await_protected(_last_step(made) + 2)
        made.finish()


@pytest.mark.cluster
def test_one_that_is_too_new_does_not_end_the_job(
    ground: Ground, launcher: Launcher, stranger: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is protected while it runs. What was is still held, and protection resumes once the right one is back."""
    with job(ground, launcher) as made:
        made.launch()
        made.train()
        made.await_protected(3)
        stranger.replace(made.victim, monkeypatch).wait_ready()
        with pytest.raises(VersionMismatch, match=r"9\.2\.0, .*same version"):
            SmpClient(made.victim.arena, JOB)
        step = _last_step(made)
        made.wait(lambda: _last_step(made) > step + 20, "the job does not go on")
        made.grow()  # needs a new layout, and for that all SMPs
        step = _last_step(made)
        made.wait(lambda: _last_step(made) > step + 20, "the job does not go on with a new layout")
        assert re.search(r"other side .* 9\.2\.0", (ground.base / "rank0.log").read_text()), made.logs()
        made.victim.restart()
        made.await_protected(_last_step(made) + 2)
        made.finish()


def _last_step(made: Job) -> int:
    return int(max(event["step"] for event in made.of("step")))


# ---------------------------------------------------------------------- at connect


def test_smps_refuse_each_other_on_every_path(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    [smp], run = ground.job([[3000]])
    run.protect(1)
    monkeypatch.setattr("holdfast.smp_daemon.shared.messages.spoken", lambda: (NEXT, AFTER))
    text = f"protocols {NEXT} to {AFTER}; .* {re.escape(RELEASE)}, which"
    with PeerClient(JOB) as peers, pytest.raises(VersionMismatch, match=text):
        peers.ping(smp.control, 5.0)
    with closing(Links(Counters())) as links, pytest.raises(VersionMismatch, match=text):
        links.call(smp.bulk, AskShard(job=JOB, coord="dp0"))
    with pytest.raises(VersionMismatch, match=rf"{smp.host}:\d+ .*{text}"):
        gather_inventories(JOB, [smp.control])
    assert look(JOB, smp.control).statuses == ()


def test_a_trainer_refuses_an_smp_that_does_not_ask(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    smp = ground.smp()
    monkeypatch.setattr("holdfast.smp_daemon.shared.versions.spoken", lambda: (NEXT, AFTER))
    with pytest.raises(VersionMismatch, match=rf"{smp.arena} runs holdfast {RELEASE}"):
        SmpClient(smp.arena, JOB)


def test_a_connection_that_was_not_greeted_is_none(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    client = ground.smp().client()
    assert client.connection is not None
    monkeypatch.setattr("holdfast.smp_daemon.shared.versions.spoken", lambda: (NEXT, AFTER))
    with pytest.raises(VersionMismatch):
        client.reconnect()
    assert client.connection is None


def test_an_arena_of_another_format_is_left_alone(
    ground: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = Installation(tmp_path, "9.3.0", ARENA_FORMAT=ARENA_FORMAT + 1)
    smp = ground.prepare()
    later.replace(smp, monkeypatch).wait_ready()
    run = run_on([smp], [[3000]])
    snapshot = run.protect(1)
    smp.kill()
    before = {path.name: path.read_bytes() for path in smp.arena.glob("*.safetensors*")}
    assert before
    smp.launch()
    with pytest.raises(VersionMismatch, match=rf"9\.3\.0 .*format {ARENA_FORMAT + 1}, .*{RELEASE} .*{ARENA_FORMAT}"):
        smp.wait_ready()
    assert {path.name: path.read_bytes() for path in smp.arena.glob("*.safetensors*")} == before
    later.replace(smp, monkeypatch).wait_ready()
    assert (snapshot, "dp0") in SmpClient(smp.arena, JOB).inventory().shards


# ---------------------------------------------------------------------- what operators see


def test_the_version_is_in_the_status(
    ground: Ground, neighbour: Installation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    smps = ground.smps(2)
    run_on(smps, [[3000], [3000]]).protect(1)
    main(["status", "--arena", str(ground.base)])
    assert f"holdfast {RELEASE}" in capsys.readouterr().out
    neighbour.replace(smps[1], monkeypatch).wait_ready()
    assert owner_of(smps[1].arena).version == "9.1.0"
    main(["status", "--arena", str(ground.base)])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{RELEASE} on node0; 9.1.0 on node1" in shown
