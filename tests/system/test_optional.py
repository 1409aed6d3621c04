"""Optional parts of an SMP never end a job: they are left out, or placed elsewhere, and operators are told."""

from __future__ import annotations

import errno
import os
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.main import main
from holdfast.smp_daemon.ops import web as web_module
from holdfast.smp_daemon.ops.overview import look
from holdfast.smp_daemon.ops.status import Status
from holdfast.smp_daemon.persist.persister import TierState
from holdfast.smp_daemon.service import Smp
from tests.deadlines import DEADLINE_S, await_that
from tests.smp_kit import IN_THREADS, JOB, Ground, Run, SmpProcess, owner_of, run_on
from tests.system.test_persister import persist


@pytest.fixture
def taken() -> Iterator[int]:
    """A loopback port on which somebody else listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(1)
        yield sock.getsockname()[1]


def started(ground: Ground, *options: str, directory_as_log: bool = False, log: str = "") -> tuple[SmpProcess, Run]:
    """An SMP with these options, and a job on it that has protected a snapshot."""
    smp = ground.prepare()
    if directory_as_log:
        (smp.arena / "smp.log").mkdir(parents=True)
    if log:
        smp.arena.mkdir(parents=True)
        (smp.arena / "smp.log").symlink_to(log)
    for path in (smp.arena, smp.arena.parent):
        if path.exists():
            path.chmod(0o700)
    smp.launch("--priority", "normal", *options).wait_ready().wait_settled()
    run = run_on([smp], [[3000]])
    run.protect(1)
    return smp, run


def status_of(smp: SmpProcess) -> Status:
    (status,) = look(JOB, smp.control).statuses
    return status


def metrics_at(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S) as answer:
        text: str = answer.read().decode()
        return text


# ---------------------------------------------------------------------- the page's port


def test_a_port_that_is_taken_moves_the_page(ground: Ground, taken: int, capsys: pytest.CaptureFixture[str]) -> None:
    smp, run = started(ground, "--http", str(taken))
    owner = owner_of(smp.arena)
    assert owner.http_port not in (0, taken)
    (said,) = status_of(smp).impaired
    assert f":{owner.http_port}/, not at 127.0.0.1:{taken}" in said
    assert said in " ".join(line.replace("\\", "") for line in (smp.arena / "smp.log").read_text().splitlines())
    assert 'holdfast_impaired_parts{job="testrun",node="node0"} 1.0' in metrics_at(owner.http_port)
    assert main(["status", "--arena", str(ground.base)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"http://127.0.0.1:{owner.http_port}/" in shown and f"not at 127.0.0.1:{taken}" in shown
    run.protect(2)


def test_a_successor_takes_the_port_once_it_is_free(ground: Ground) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(1)
        port = sock.getsockname()[1]
        smp, _ = started(ground, "--http", str(port))
    smp.kill()
    smp.launch("--priority", "normal", "--http", str(port)).wait_ready().wait_settled()
    owner = owner_of(smp.arena)
    assert owner.http_port == port
    assert status_of(smp).impaired == ()


def test_an_address_of_another_machine_is_no_reason_to_end(ground: Ground) -> None:
    smp, run = started(ground, "--http", "192.0.2.1:9411")
    assert "not at 192.0.2.1:9411" in status_of(smp).impaired[0]
    run.protect(2)


def test_without_any_port_there_is_no_page_and_the_job_goes_on(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(web_module, "_Server", refuse)
    prepared = ground.prepare()
    smp = Smp(prepared.job, prepared.name, prepared.arena, prepared.host, environment=IN_THREADS)
    try:
        assert web_module.show(smp, ("127.0.0.1", 0)) is None
        assert smp.owner.http_port == 0
        (said,) = smp.impaired
        assert "no /metrics" in said and os.strerror(errno.EMFILE) in said
    finally:
        smp.stop(remove=True)
        smp.close()


def test_a_page_that_cannot_be_made_is_an_error_of_its_own(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = ground.prepare()
    smp = Smp(prepared.job, prepared.name, prepared.arena, prepared.host, environment=IN_THREADS)
    web = web_module.show(smp, ("127.0.0.1", 0))
    assert web is not None
    try:
        monkeypatch.setattr(web_module, "exposition", lambda *arguments: 1 / 0)
        with pytest.raises(urllib.error.HTTPError, match="500"):
            metrics_at(web.port)
        with urllib.request.urlopen(f"http://127.0.0.1:{web.port}/status.json", timeout=DEADLINE_S) as answer:
            assert answer.status == 200
    finally:
        web.close()
        smp.stop(remove=True)
        smp.close()


def test_other_machines_are_given_metrics_alone(ground: Ground) -> None:
    here = own_address()
    if here is None:
        pytest.skip("this machine has no address but loopback")
    smp, _ = started(ground, "--http", f"0.0.0.0:{free_port()}")
    owner = owner_of(smp.arena)
    assert owner.url == f"http://127.0.0.1:{owner.http_port}/"
    for path, expected in (("/metrics", 200), ("/", 403), ("/status.json", 403)):
        with socket.create_connection((here, owner.http_port), DEADLINE_S) as sock:
            sock.sendall(f"GET {path} HTTP/1.1\r\nHost: {here}:{owner.http_port}\r\nConnection: close\r\n\r\n".encode())
            assert sock.recv(1 << 16).startswith(f"HTTP/1.1 {expected} ".encode()), path
    with urllib.request.urlopen(owner.url, timeout=DEADLINE_S) as answer:
        assert answer.status == 200


def own_address() -> str | None:
    """An address of this machine other than loopback; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))
        except OSError:
            return None
        address: str = sock.getsockname()[0]
        return None if address.startswith("127.") else address


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("0.0.0.0", 0))
        port: int = sock.getsockname()[1]
        return port


# ---------------------------------------------------------------------- the log


def test_a_log_that_cannot_be_opened_goes_to_standard_error(ground: Ground) -> None:
    smp, run = started(ground, directory_as_log=True)
    (said,) = status_of(smp).impaired
    assert f"{smp.arena / 'smp.log'} cannot be written: {os.strerror(errno.EISDIR)}" in said
    assert "parity is" in (ground.base / "node0.stderr").read_text()
    assert any("cannot be written" in event.text for event in status_of(smp).events)
    run.protect(2)
    run["dp0"].client.finish(run.epoch)
    assert smp.wait_end() == 0
    assert not smp.arena.exists()


def test_a_full_disk_under_the_log_is_told_and_training_goes_on(ground: Ground) -> None:
    smp, run = started(ground, log="/dev/full")
    assert any(os.strerror(errno.ENOSPC) in how for how in status_of(smp).impaired)
    told = [event.text for event in status_of(smp).events if "cannot be written" in event.text]
    assert len(told) == 1, "it is said once, however many lines are lost"
    run.protect(2)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_log_without_permission_is_told(ground: Ground) -> None:
    target = ground.base / "somebody-elses.log"
    target.touch(0o400)
    smp, run = started(ground, log=str(target))
    assert "Permission denied" in status_of(smp).impaired[0]
    run.protect(2)


# ---------------------------------------------------------------------- the persist tier


@pytest.mark.parametrize(
    ("place", "why"), [("/nowhere/at/all", "not a directory that is there"), ("memory://b", "process's memory")]
)
def test_a_doubtful_place_is_told_before_a_job_comes(ground: Ground, place: str, why: str) -> None:
    smp = ground.prepare()
    smp.launch("--persist", place).wait_ready()
    await_that(lambda: any(why in line for line in look(JOB, smp.control).tiers))


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("file", "not a directory"),
        ("nowhere", "not a directory that is there"),
        ("sftp://holdfast.invalid/x", "cannot be"),
        ("nosuch://bucket/x", "nosuch://bucket/x cannot"),
    ],
)
def test_a_place_that_cannot_be_had_persists_nothing_and_says_so(
    ground: Ground, tmp_path: Path, place: str, why: str
) -> None:
    if "://" not in place:
        (tmp_path / "file").touch()
        place = str(tmp_path / place)
    smp, run = started(ground, "--persist", place, "--persist-every", "0.1s")
    persist(run, run.protect(2))
    tiers: list[TierState] = []

    def failed() -> bool:
        tiers.extend(status.tier for status in look(JOB, smp.control).statuses if status.tier is not None)
        return bool(tiers[-1].problem)

    await_that(failed)
    assert re.search(why, tiers[-1].problem)
    assert not (tmp_path / "nowhere").exists(), "what belongs on a storage that is not mounted is not on another disk"
    owner = owner_of(smp.arena)
    assert 'holdfast_persist_failing{job="testrun",node="node0"} 1.0' in metrics_at(owner.http_port)
    run.protect(3)
