"""Connections that keep others waiting: they send nothing, or one byte at a time."""

from __future__ import annotations

import secrets
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from holdfast.smp_daemon.net import gate
from holdfast.smp_daemon.net.gate import PLACES, PLACES_OF_SOURCE, Gate
from holdfast.smp_daemon.ops.web import MAX_REQUESTS
from holdfast.smp_daemon.shared.credentials import Credentials
from holdfast.smp_daemon.shared.errors import ProtocolError
from holdfast.smp_daemon.shared.handshake import MAGIC, NAME_BYTES, prove_to_server
from holdfast.smp_daemon.shared.transport import SocketStream, call, connect
from tests.access_kit import credentials, token_file
from tests.deadlines import DEADLINE_S
from tests.smp_kit import JOB, owner_of, playground
from tests.system.attacks.victim import HELD, Victim, ask, dial

TOKEN = b"a token of enough bytes"
HELLO_BYTES = len(MAGIC) + NAME_BYTES
"""Length of a server's first message, which anybody gets."""


@pytest.mark.parametrize("count", [100])
def test_connections_that_say_nothing_do_not_keep_others_out(victim: Victim, count: int) -> None:
    with ExitStack() as stack:
        for address in (victim.local, victim.smp.bulk, victim.control):
            for number in range(count):
                sock = stack.enter_context(dial(address))
                sock.sendall(b"HFST\5\0\0"[: number % 8])
        assert "bytes" in ask(victim.smp.bulk, HELD)
        assert victim.run["dp0"].client.inventory().node == "node0"


def test_the_page_serves_others_while_requests_never_end(victim: Victim) -> None:
    owner = owner_of(victim.smp.arena)
    page = ("127.0.0.1", owner.http_port)
    with ExitStack() as stack:
        for _ in range(3 * MAX_REQUESTS):
            stack.enter_context(dial(page)).sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ")
        with dial(page) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            assert sock.recv(1 << 12).startswith(b"HTTP/1.1 200")


def test_a_message_that_comes_byte_by_byte_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte arrives in time, but the message as a whole does not."""
    mine, other = socket.socketpair()
    stream = SocketStream(mine, 0.2)
    stop = threading.Event()

    def drip() -> None:
        other.sendall(b"HFST\xff\0\0\0" + bytes(8))
        while not stop.wait(0.02):
            try:
                other.sendall(b" ")
            except OSError:
                return

    thread = threading.Thread(target=drip)
    thread.start()
    with pytest.raises(Exception, match="answer in time"):
        stream.receive()  # without a deadline for the whole message this would never end
    stop.set()
    stream.close()
    other.close()
    thread.join(DEADLINE_S)


class Door:
    """A gate, and the connections that come to it."""

    def __init__(self) -> None:
        self.gate = Gate(Credentials(TOKEN), JOB)
        self._listening = socket.socket()
        self._listening.bind(("127.0.0.1", 0))
        self._listening.listen(256)
        self.threads: list[threading.Thread] = []
        self.let_in: list[socket.socket] = []

    def come(self) -> socket.socket:
        """A connection that the gate has begun to challenge."""
        sock = dial(self._listening.getsockname())
        accepted, _ = self._listening.accept()
        self.threads.append(threading.Thread(target=self._enter, args=(accepted,)))
        self.threads[-1].start()
        return sock

    def _enter(self, sock: socket.socket) -> None:
        admitted = self.gate.admit(sock)
        if admitted is not None:
            self.let_in.append(admitted)

    def close(self) -> None:
        self.gate.close()
        for thread in self.threads:
            thread.join(DEADLINE_S)
        for sock in self.let_in:
            sock.close()
        self._listening.close()


def heard(sock: socket.socket) -> int:
    """How many bytes arrive before the other side ends the connection."""
    count = 0
    while more := len(sock.recv(1 << 12)):
        count += more
    return count


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    monkeypatch.setattr(gate, "PENALTY_S", 0.05)
    door = Door()
    yield door
    door.close()


def test_the_oldest_of_those_who_say_nothing_gives_way(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a client with the token gets in before any silent connection times out, however many of those there are."""
    monkeypatch.setattr("holdfast.smp_daemon.shared.handshake.HANDSHAKE_DEADLINE_S", DEADLINE_S)
    with ExitStack() as stack:
        silent = [stack.enter_context(door.come()) for _ in range(3 * PLACES_OF_SOURCE)]
        honest = stack.enter_context(door.come())
        prove_to_server(honest, TOKEN, JOB)
        assert len(door.gate._entering) <= PLACES_OF_SOURCE <= PLACES
        assert heard(silent[0]) == HELLO_BYTES, "it was the first to come"


def test_whoever_says_nothing_is_let_go_in_time(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.smp_daemon.shared.handshake.HANDSHAKE_DEADLINE_S", 0.2)
    with door.come() as sock:
        assert heard(sock) == HELLO_BYTES


def test_an_smp_with_a_token_serves_while_it_is_besieged(tmp_path: Path) -> None:
    with (
        playground() as ground,
        credentials(token_file(tmp_path / "token", secrets.token_hex(32))),
        ExitStack() as stack,
    ):
        smp = ground.smp()
        besiegers = [stack.enter_context(dial(smp.bulk)) for _ in range(100)]
        for number, sock in enumerate(besiegers):
            sock.sendall(b"HFA2" + bytes(number % 40))
        # Until all of them have had a place: one that got it later might take the next one's.
        await_ended(besiegers, len(besiegers) - PLACES_OF_SOURCE)
        for _ in range(5):
            stream = connect(smp.bulk, DEADLINE_S, JOB)
            with pytest.raises(ProtocolError, match="holds no shard"):
                call(stream, HELD)
            stream.close()


def await_ended(socks: Sequence[socket.socket], count: int) -> None:
    """Block until the other side has ended so many of the connections."""
    limit, alive = time.monotonic() + DEADLINE_S, list(socks)
    while len(alive) > len(socks) - count:
        ready = select.select(alive, [], [], max(0.0, limit - time.monotonic()))[0]
        assert ready
        alive = [each for each in alive if each not in ready or each.recv(1 << 12)]
