"""Guessing a token, replaying an overheard handshake, and being in the middle of one without knowing the token."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from holdfast.smp_daemon.net.control import CALL_KEY
from holdfast.smp_daemon.net.gate import PENALTY_S
from holdfast.smp_daemon.net.peers import METHOD
from holdfast.smp_daemon.shared.credentials import current
from holdfast.smp_daemon.shared.errors import HoldfastError, SmpUnavailable
from holdfast.smp_daemon.shared.handshake import (
    MAC_BYTES,
    MAGIC,
    NAME_BYTES,
    SIGN_BYTES,
    prove_to_server,
)
from holdfast.smp_daemon.shared.transport import call, connect
from tests.access_kit import credentials, token_file
from tests.deadlines import DEADLINE_S
from tests.smp_kit import JOB, SmpProcess, playground, run_on
from tests.system.attacks.victim import HELD, dial, frame, say_control, tell

GUESSES = 24
HELLO_BYTES = len(MAGIC) + NAME_BYTES
"""Length of the first message of a server, which anybody gets."""


class Guarded:
    """Two SMPs that require a token, and a snapshot on them."""

    def __init__(self, smps: list[SmpProcess], environment: dict[str, str]) -> None:
        self.smps = smps
        self.environment = environment
        self.run = run_on(smps, [[3000], [3000]])
        self.snapshot = self.run.protect(1)

    def serves(self) -> None:
        """A client with the token is served, and all shards are intact."""
        with credentials(self.environment):
            stream = connect(self.smps[0].bulk, 10.0, JOB)
            assert "bytes" in call(stream, HELD)[0]
            stream.close()
        plan = self.run.plan()
        for trainer in self.run:
            assert trainer.recover(plan).view == trainer.image(self.snapshot)


@pytest.fixture(scope="module")
def module_guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    environment = token_file(tmp_path_factory.mktemp("token") / "token")
    with playground() as ground, credentials(environment):
        yield Guarded(ground.smps(2), environment)


@pytest.fixture
def guarded(module_guarded: Guarded) -> Iterator[Guarded]:
    yield module_guarded
    module_guarded.serves()


def guess(smp: SmpProcess) -> float:
    """Seconds until a wrong guess is refused."""
    began = time.monotonic()
    with dial(smp.bulk) as sock, pytest.raises(SmpUnavailable):
        prove_to_server(sock, secrets.token_bytes(32), JOB)
    return time.monotonic() - began


def test_guesses_are_wrong_slow_and_logged_once(guarded: Guarded) -> None:
    smp = guarded.smps[0]
    with ThreadPoolExecutor(8) as threads:
        taken = list(threads.map(lambda _: guess(smp), range(GUESSES)))
    assert min(taken) > PENALTY_S / 2
    assert (smp.arena / "smp.log").read_text().count("not let in") == 1


@pytest.mark.proves("other-hosts")
def test_messages_without_a_token_are_not_read(guarded: Guarded) -> None:
    heard = tell(guarded.smps[0].bulk, frame(b'{"op":"shard","job":"testrun"}') + bytes(1 << 12), end=False)
    assert heard.startswith(MAGIC) and len(heard) == HELLO_BYTES, "a name of its own, and the end"


def test_who_has_forgotten_the_token_is_told_so(guarded: Guarded) -> None:
    with credentials({}), pytest.raises(SmpUnavailable, match="HOLDFAST_TOKEN_FILE"):
        call(connect(guarded.smps[0].bulk, 10.0, JOB), HELD)


def test_who_shows_a_token_where_none_is_known_is_told_so_at_once(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other side ends the connection; after a deadline this side would say something else."""
    monkeypatch.setattr("holdfast.smp_daemon.shared.handshake.HANDSHAKE_DEADLINE_S", DEADLINE_S)
    with playground() as ground:
        with credentials({}):
            smp = ground.smp()
        with credentials(guarded.environment), pytest.raises(SmpUnavailable, match="HOLDFAST_TOKEN_FILE"):
            connect(smp.bulk, DEADLINE_S, JOB)


class Overheard:
    """A man in the middle of one honest handshake, who records both sides."""

    def __init__(self, smp: SmpProcess) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = self._listening.getsockname()
        self.said = {"client": b"", "server": b""}
        self._smp = smp
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Overheard:
        self._threads.append(threading.Thread(target=self._pass_on))
        self._threads[0].start()
        return self

    def __exit__(self, *exc: object) -> None:
        for thread in self._threads:
            thread.join(DEADLINE_S)
        self._listening.close()

    def _pass_on(self) -> None:
        client, _ = self._listening.accept()
        with client, dial(self._smp.bulk) as server:
            for who, count in (
                *(("client", len(MAGIC)), ("server", HELLO_BYTES)),
                *(("client", SIGN_BYTES), ("server", MAC_BYTES)),
            ):
                source, target = (client, server) if who == "client" else (server, client)
                data = b""
                while len(data) < count:
                    data += source.recv(count - len(data))
                self.said[who] += data
                target.sendall(data)


def overhear(guarded: Guarded) -> dict[str, bytes]:
    with Overheard(guarded.smps[0]) as overheard, credentials(guarded.environment):
        connect(overheard.address, 10.0, JOB).close()
    return overheard.said


def test_a_handshake_that_was_overheard_opens_nothing(guarded: Guarded) -> None:
    said = overhear(guarded)
    assert guarded.environment and current().token not in said["client"] + said["server"], "the token is not sent"
    for smp in guarded.smps:
        heard = tell(smp.bulk, said["client"] + frame(b'{"op":"shard","job":"testrun"}'), end=False)
        assert len(heard) == HELLO_BYTES, "a name of its own, and the end"


def test_an_smp_that_only_repeats_what_another_said_is_not_believed(guarded: Guarded) -> None:
    said = overhear(guarded)
    with socket.create_server(("127.0.0.1", 0)) as listening, credentials(guarded.environment):

        def impostor() -> None:
            client, _ = listening.accept()
            with client:
                client.sendall(said["server"])
                while client.recv(1 << 12):
                    pass

        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(SmpUnavailable, match="this job's token"):
            connect(listening.getsockname(), 10.0, JOB)
        thread.join(DEADLINE_S)


ODD = (MAGIC, MAGIC + bytes(32), MAGIC + bytes(104), b"HFA1" + bytes(104), b"\x16\x03\x01" * 30)


@pytest.mark.parametrize("hello", ODD)
def test_odd_handshakes_end(guarded: Guarded, hello: bytes) -> None:
    assert len(tell(guarded.smps[0].bulk, hello)) == HELLO_BYTES


@pytest.mark.parametrize("sign", [b"", bytes(104), bytes(103), bytes(4096), b"\x17" * 104])
def test_grpc_calls_without_a_right_signature_are_refused(guarded: Guarded, sign: bytes) -> None:
    body = b'{"op":"ping","job":"testrun"}'
    with pytest.raises(grpc.RpcError) as refused:
        say_control(guarded.smps[0].control, body, ((CALL_KEY, sign),))
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.proves("other-hosts")
def test_requests_of_strangers_are_not_read(guarded: Guarded) -> None:
    """A call is refused by its headers. Reading 8 MiB of body for each of 64 concurrent calls would take half a GiB."""
    with grpc.insecure_channel("{}:{}".format(*guarded.smps[0].control)) as channel:
        read = threading.Event()

        def said() -> Iterator[bytes]:
            read.wait(DEADLINE_S)  # the body is sent only after the answer has arrived
            yield bytes(100)

        with pytest.raises(grpc.RpcError) as refused:
            channel.stream_unary(METHOD, None, None)(said(), timeout=DEADLINE_S)
        read.set()
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_token_of_another_job_is_not_this_ones(guarded: Guarded, tmp_path: Path) -> None:
    """Even if the bytes of the token are the same: the proof covers the token and the job."""
    with credentials(guarded.environment), pytest.raises(HoldfastError):
        call(connect(guarded.smps[0].bulk, 10.0, "otherjob"), HELD)
