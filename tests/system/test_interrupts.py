"""Ctrl-C, SIGTERM and a closed terminal end every command at any moment, with the right status and no leftovers."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from holdfast.cli.lifetime import COMMAND_ENV, run_to_the_end
from holdfast.cli.main import main
from holdfast.cli.output import EndedBySignal
from holdfast.scratch import Scratch
from holdfast.smp_daemon.shared.paths import folders_with
from holdfast.smp_daemon.shared.spawn import running_process
from tests.deadlines import DEADLINE_S, await_that
from tests.smp_kit import end

ROOT = Path(__file__).parents[2]
MARK = "HOLDFAST_TEST_MARK"
SLOW_S = 3 * DEADLINE_S
JOB = (sys.executable, "-m", "tests.proof.jobs.acp_sgd")


def _as_from_a_terminal() -> None:
    """If these tests run in the background, signals may be ignored, and their processes would inherit that."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Command:
    """A command as a terminal would start it, with its own process group and its own folder for arenas."""

    def __init__(self, folder: Path, words: tuple[str, ...]) -> None:
        self.arenas = folder
        self._mark = secrets.token_hex(8)
        environment = os.environ | {MARK: self._mark, "HOLDFAST_ARENA": str(folder), "COLUMNS": "80"}
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "holdfast.cli", *words],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=_as_from_a_terminal,
        )
        self.said = ""

    def read_to(self, text: str) -> None:
        """Wait until it has printed `text`."""
        assert self.process.stdout is not None
        while text not in self.said:
            line = self.process.stdout.readline()
            assert line, self.said
            self.said += line

    def end(self, number: signal.Signals) -> int:
        """Signal the whole group, as a terminal does. Returns the exit status once all output has been read."""
        assert self.process.stdout is not None
        os.killpg(self.process.pid, number)
        self.said += self.process.communicate(timeout=SLOW_S)[0]
        return self.process.returncode

    def left(self, but: str | None = None) -> list[psutil.Process]:
        """All processes that it started, directly or indirectly, in any session; not those that have the word `but` on
        their command line."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                ours = process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE
                if ours and but not in process.cmdline():
                    found.append(process)
        return found

    def close(self) -> None:
        for process in self.left():
            with suppress(psutil.Error):
                process.kill()
        self.process.wait(DEADLINE_S)
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(f"/dev/shm/holdfast-test-{os.getpid()}-{secrets.token_hex(4)}")
    yield path
    if path.exists():
        for each in sorted(path.glob("**/*"), reverse=True):
            each.rmdir() if each.is_dir() and not each.is_symlink() else each.unlink()
        path.rmdir()


def check(folder: Path, words: tuple[str, ...], said: str, number: signal.Signals) -> str:
    """Start a command, end it by a signal once it has printed `said`, and look for leftovers; return its output."""
    command = Command(folder, words)
    try:
        command.read_to(said)
        assert command.end(number) == 128 + number, command.said
        assert command.said.rstrip().endswith(f"holdfast: ended by {number.name}"), command.said
        assert "Traceback" not in command.said
        assert [process.cmdline() for process in command.left()] == []
        assert not folder.exists() or [path.name for path in folder.iterdir()] == []
        return command.said
    finally:
        command.close()


DEMO = ("demo", "--nodes", "2", "--ranks", "2", "--steps", "200", "--kill", "trainer:1@3", "--kill", "node:1@6")


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("words", "said", "number"),
    [
        pytest.param(DEMO, "undisturbed run", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(DEMO, "run with kills", signal.SIGINT, marks=pytest.mark.slow),
        (DEMO, "node 1 killed", signal.SIGINT),
        pytest.param(DEMO, "restored after step", signal.SIGTERM, marks=pytest.mark.slow),
        (("chaos", "run", "--seed", "1", "--", *JOB), "undisturbed again", signal.SIGINT),
        pytest.param(("chaos", "run", "--seed", "1", "--", *JOB), "with faults", signal.SIGINT, marks=pytest.mark.slow),
        (("audit", "--", *JOB), "killed", signal.SIGINT),
        pytest.param(("audit", "--", *JOB), "undisturbed", signal.SIGHUP, marks=pytest.mark.slow),
        (("top",), "\n", signal.SIGINT),
    ],
    ids=lambda value: "-".join(value[:2]) if isinstance(value, tuple) else str(value).strip(),
)
def test_a_command_that_a_signal_ends_leaves_nothing(
    folder: Path, words: tuple[str, ...], said: str, number: signal.Signals
) -> None:
    check(folder, words, said, number)


def serving(folder: Path) -> list[psutil.Process]:
    """The SMPs that have an arena below the folder."""
    return list(filter(None, map(running_process, folders_with("smp.json", folder))))


@pytest.mark.cluster
def test_what_a_command_left_that_was_killed_is_seen_by_gc(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = Command(folder, ("audit", "--", *JOB))
    try:
        command.read_to("resumed, and killed")
        os.kill(command.process.pid, signal.SIGKILL)
        command.process.wait(DEADLINE_S)
        # Its job is not its child, and its SMP is detached. A process that ends has no environment any more while it
        # still holds the lock of the folder that it inherited, so it is waited for.
        while others := command.left(but="holdfast.smp_daemon"):
            for process in others:
                end(process)
        # An SMP that was just being started serves its arena by itself, once it has read its modules.
        await_that(lambda: {each.pid for each in command.left()} <= {each.pid for each in serving(folder)})
        assert main(["gc", "--arena", str(folder), "--json", "-"]) == 0
        (found,) = json.loads(capsys.readouterr().out)
        assert Path(found["arena"]).name.startswith(".audit-") and found["removed"]
        assert not command.left()
        assert list(folder.iterdir()) == []
    finally:
        command.close()


# ---------------------------------------------------------------------- how commands are ended


@pytest.mark.parametrize(
    ("module", "question"),
    [
        pytest.param("holdfast.chaos.zygote", "written", marks=pytest.mark.cluster),
        ("tests.proof.chaos.network.forwarder", "hits"),
    ],
)
def test_a_helper_ends_quietly_if_nobody_reads_its_answer(module: str, question: str) -> None:
    """A command that a signal ends closes the sockets of its helpers, whatever they have written to them."""
    ours, theirs = socket.socketpair()
    with theirs:
        helper = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno())], pass_fds=[theirs.fileno()], stderr=subprocess.PIPE
        )
    with helper:
        try:
            ours.sendall(json.dumps({"op": question}).encode() + b"\n")
            assert select.select([ours], [], [], DEADLINE_S)[0]
        finally:
            ours.close()
        assert helper.communicate(timeout=DEADLINE_S)[1] == b""
        assert helper.returncode == 0


def test_a_signal_is_an_exception_and_what_was_started_is_ended(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("HOLDFAST_ARENA", str(folder))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    pids: list[int] = []
    seen: list[BaseException] = []

    def work() -> int:
        Scratch("some").__enter__()
        # No object knows this process, and it has its own session: as if the signal came in the middle of Popen.
        child = "subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=subprocess.DEVNULL)"
        start = f"import subprocess; print({child}.pid, flush=True)"
        done = subprocess.run([sys.executable, "-c", start], stdout=subprocess.PIPE, text=True, check=True)
        pids.append(int(done.stdout))
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("it was not interrupted")

    def failed(error: BaseException) -> int:
        seen.append(error)
        assert not psutil.pid_exists(pids[0]) or psutil.Process(pids[0]).status() == psutil.STATUS_ZOMBIE
        assert list(folder.iterdir()) == []
        os.kill(os.getpid(), signal.SIGINT)  # a second one does nothing
        return 7

    assert run_to_the_end(work, failed) == 7
    assert isinstance(seen[0], EndedBySignal) and seen[0].number == signal.SIGTERM
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert COMMAND_ENV not in os.environ


def test_what_a_command_leaves_on_purpose_stays() -> None:
    process: list[subprocess.Popen[bytes]] = []

    def work() -> int:
        process.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
        return 0

    assert run_to_the_end(work, lambda error: 1) == 0
    assert process[0].poll() is None
    process[0].kill()
    process[0].wait(DEADLINE_S)


def test_signals_that_are_ignored_stay_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def work() -> int:
        os.kill(os.getpid(), signal.SIGHUP)
        return 5

    try:
        assert run_to_the_end(work, lambda error: 1) == 5
    finally:
        signal.signal(signal.SIGHUP, before)
