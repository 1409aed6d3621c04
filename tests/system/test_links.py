"""Connections to other SMPs: their traffic is counted, in order, and broken ones are not used again."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from holdfast.smp_daemon.net.links import Links
from holdfast.smp_daemon.service import SocketListener, bind_tcp
from holdfast.smp_daemon.shared.counters import Counters
from holdfast.smp_daemon.shared.errors import (
    BY_NAME,
    DeadlineExceeded,
    HoldfastError,
    ProtocolError,
    SmpUnavailable,
)
from holdfast.smp_daemon.shared.messages import PeerRequest
from holdfast.smp_daemon.shared.sources import Address
from holdfast.smp_daemon.shared.transport import Message, SocketStream
from tests.deadlines import DEADLINE_S
from tests.smp_kit import Ground

SOON_S = 0.05
"""A deadline that is meant to expire."""


class Asked(PeerRequest, tag="asked", kw_only=True):
    """A request that is answered with its number and `length` bytes of `fill`, or with an error."""

    job: str = ""
    number: int | None = None
    length: int | None = None
    fill: int | None = None
    error: str | None = None


class Peer:
    """Stands in for another SMP: answers with ``length`` raw bytes of ``fill``, or with the requested error."""

    def __init__(self, host: str) -> None:
        self.heard: list[tuple[Message, bytes]] = []
        self.ended_ones = threading.Semaphore(0)
        self.connections = 0
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.listener = SocketListener(bind_tcp(host, 0), self._converse)
        self.address: Address = (host, self.listener.port)

    def _converse(self, sock: socket.socket) -> Peer:
        self.connections += 1
        return self

    def answer(self, message: Message, payload: int, stream: SocketStream) -> tuple[Message, memoryview | None]:
        unit = memoryview(bytearray(payload))
        stream.receive_into(unit)
        self.heard.append((message, bytes(unit)))
        assert self.may_answer.wait(DEADLINE_S)
        if "error" in message:
            raise BY_NAME[message["error"]](f"as number {message['number']} asked for")
        reply = {"number": message.get("number")}
        return reply, memoryview(bytes([message.get("fill", 0)]) * message["length"]) if "length" in message else None

    def ended(self) -> None:
        self.ended_ones.release()

    def close(self) -> None:
        self.may_answer.set()
        self.listener.close()


@pytest.fixture
def peer(ground: Ground) -> Iterator[Peer]:
    peer = Peer(ground.host())
    yield peer
    peer.close()


other = peer
"""Another one."""


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def links(counters: Counters) -> Iterator[Links]:
    with closing(Links(counters, DEADLINE_S)) as links:
        yield links


def room(length: int) -> memoryview:
    return memoryview(bytearray(length))


def counted(counters: Counters) -> tuple[int, int]:
    """Bytes sent and received, after checking that nothing else was counted."""
    counts = counters.read()
    sent, received = counts.pop("bytes_sent"), counts.pop("bytes_received")
    assert not any(counts.values())
    return sent, received


class TestWhatGoesOverThem:
    def test_arrives_and_is_answered(self, links: Links, peer: Peer) -> None:
        assert links.call(peer.address, Asked(number=7)) == {"number": 7}
        out = room(5)
        assert links.call(peer.address, Asked(number=8, length=5, fill=3), out) == {"number": 8}
        assert bytes(out) == b"\3" * 5
        links.send(peer.address, Asked(number=9), memoryview(b"unit"))
        assert links.receive(peer.address) == {"number": 9}
        assert [unit for _, unit in peer.heard] == [b"", b"", b"unit"]

    def test_is_not_waited_for_once_another_thread_interrupts(self, links: Links, peer: Peer) -> None:
        peer.may_answer.clear()
        links.send(peer.address, Asked(number=1))
        try:
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(links.receive, peer.address)
                links.interrupt()
                with pytest.raises(SmpUnavailable):
                    waiting.result(DEADLINE_S)
        finally:
            peer.may_answer.set()
        assert links.call(peer.address, Asked(number=2)) == {"number": 2}

    def test_is_counted(self, links: Links, peer: Peer, counters: Counters) -> None:
        links.call(peer.address, Asked(number=1))
        assert counted(counters) == (0, 0)
        links.send(peer.address, Asked(number=2), memoryview(bytes(1000)))
        assert counted(counters) == (1000, 0)
        links.receive(peer.address)
        links.call(peer.address, Asked(number=3, length=70), room(70))
        links.send(peer.address, Asked(number=4), memoryview(b""))
        links.receive(peer.address)
        assert counted(counters) == (1000, 70)

    def test_uses_one_connection_for_each_address(self, links: Links, peer: Peer, other: Peer) -> None:
        for number in range(3):
            assert links.call(peer.address, Asked(number=number)) == {"number": number}
            assert links.call(other.address, Asked(number=-number)) == {"number": -number}
        assert (peer.connections, other.connections) == (1, 1)

    def test_may_be_sent_before_earlier_replies_have_come_which_come_in_order(self, links: Links, peer: Peer) -> None:
        peer.may_answer.clear()
        for number in range(20):
            links.send(peer.address, Asked(number=number, length=number, fill=number), memoryview(b"x" * number))
        peer.may_answer.set()
        for number in range(20):
            out = room(number)
            assert links.receive(peer.address, out) == {"number": number}
            assert bytes(out) == bytes([number]) * number
        assert [message["number"] for message, _ in peer.heard] == list(range(20))
        assert peer.connections == 1

    def test_is_over_when_they_are_closed(self, counters: Counters, peer: Peer) -> None:
        with closing(Links(counters)) as links:
            links.call(peer.address, Asked(number=1))
        assert peer.ended_ones.acquire(timeout=DEADLINE_S)
        links.close()


class TestAnErrorReply:
    def test_takes_its_turn_among_the_others_and_is_not_counted(
        self, links: Links, peer: Peer, counters: Counters
    ) -> None:
        links.send(peer.address, Asked(number=0, length=3, fill=7))
        links.send(peer.address, Asked(number=1, error="StaleEpoch"), memoryview(bytes(100)))
        links.send(peer.address, Asked(number=2, error="DamagedSnapshot"))
        links.send(peer.address, Asked(number=3, length=2, fill=9))
        first, last = room(3), room(2)
        assert links.receive(peer.address, first) == {"number": 0}
        for number, kind in ((1, "StaleEpoch"), (2, "DamagedSnapshot")):
            with pytest.raises(BY_NAME[kind], match=f"as number {number} "):
                links.receive(peer.address, room(1000))
        assert links.receive(peer.address, last) == {"number": 3}
        assert (bytes(first), bytes(last)) == (b"\7\7\7", b"\x09\x09")
        assert (peer.connections, counted(counters)) == (1, (100, 5))


class TestAReplyOfAnotherLength:
    @pytest.mark.parametrize(
        ("length", "out"), [(5, 4), (3, 4), (1 << 20, 4), (5, None), (5, 0), (0, 4), (None, 4)], ids=str
    )
    def test_ends_the_connection_and_is_not_counted(
        self, links: Links, peer: Peer, counters: Counters, length: int | None, out: int | None
    ) -> None:
        links.send(peer.address, Asked(number=1, length=length))
        links.send(peer.address, Asked(number=2))
        place = room(out) if out is not None else None
        expected = f"sent {length or 0} bytes where {out or 0} were expected"
        with pytest.raises(ProtocolError, match=expected):
            links.receive(peer.address, place)
        assert peer.ended_ones.acquire(timeout=DEADLINE_S)
        assert place is None or bytes(place) == bytes(place.nbytes), "something was written"
        assert counted(counters) == (0, 0)
        with pytest.raises(SmpUnavailable, match="is over"):
            links.receive(peer.address)

    def test_leaves_nothing_behind_for_the_next(self, links: Links, peer: Peer) -> None:
        with pytest.raises(ProtocolError):
            links.call(peer.address, Asked(number=1, length=1000), room(10))
        out = room(10)
        assert links.call(peer.address, Asked(number=2, length=10, fill=1), out) == {"number": 2}
        assert bytes(out) == b"\1" * 10
        assert peer.connections == 2

    def test_leaves_other_connections_alone(self, links: Links, peer: Peer, other: Peer) -> None:
        links.send(other.address, Asked(number=5))
        with pytest.raises(ProtocolError):
            links.call(peer.address, Asked(number=1, length=1), room(2))
        assert links.receive(other.address) == {"number": 5}


class TestAConnectionThatBreaks:
    def test_before_anything_was_sent_there_is_no_reply(self, links: Links, peer: Peer) -> None:
        with pytest.raises(SmpUnavailable, match="is over"):
            links.receive(peer.address)

    def test_that_was_dropped_takes_its_replies_with_it(self, links: Links, peer: Peer) -> None:
        links.send(peer.address, Asked(number=1))
        links.drop(peer.address)
        links.drop(peer.address)
        with pytest.raises(SmpUnavailable, match="is over"):
            links.receive(peer.address)
        assert links.call(peer.address, Asked(number=2)) == {"number": 2}

    def test_is_made_anew_for_the_next_message(self, links: Links, ground: Ground) -> None:
        host = ground.host()
        first = Peer(host)
        assert links.call(first.address, Asked(number=1)) == {"number": 1}
        first.close()
        with pytest.raises(SmpUnavailable):
            links.call(first.address, Asked(number=2))
        second = SocketListener(bind_tcp(host, first.address[1]), first._converse)
        try:
            assert links.call(first.address, Asked(number=3)) == {"number": 3}
        finally:
            second.close()

    def test_that_says_nothing_is_not_waited_for_beyond_the_deadline(self, counters: Counters, peer: Peer) -> None:
        peer.may_answer.clear()
        with closing(Links(counters, SOON_S)) as links:
            with pytest.raises(DeadlineExceeded):
                links.call(peer.address, Asked(number=1))
            links._deadline_s = DEADLINE_S
            peer.may_answer.set()
            assert links.call(peer.address, Asked(number=2)) == {"number": 2}, "the late reply to 1 was taken for it"
        assert peer.connections == 2

    @pytest.mark.parametrize(
        ("ending", "error"),
        [("silence", DeadlineExceeded), ("end", SmpUnavailable), ("noise", ProtocolError)],
    )
    def test_in_the_middle_of_raw_bytes_or_by_what_is_no_message_is_not_used_again(
        self, counters: Counters, ground: Ground, ending: str, error: type[HoldfastError]
    ) -> None:
        """Late bytes of a unit must not be taken for a message; here they even look like one."""
        with socket.create_server((ground.host(), 0)) as server, ThreadPoolExecutor(1) as threads:
            server.settimeout(DEADLINE_S)
            serving = threads.submit(half_an_answer_and_then_a_trap, server, ending)
            with closing(Links(counters, SOON_S if ending == "silence" else DEADLINE_S)) as links:
                address = server.getsockname()[:2]
                with pytest.raises(error, match="holdfast message" if ending == "noise" else ""):
                    links.call(address, Asked(number=1), room(1000))
                links._deadline_s = DEADLINE_S
                assert links.call(address, Asked(number=2)) == {"number": 2}
                assert counted(counters) == (0, 0)
            serving.result(DEADLINE_S)


def half_an_answer_and_then_a_trap(server: socket.socket, ending: str) -> None:
    """Send half a unit or noise on the first connection, and later a valid message instead of the rest; answer on the
    second."""
    first = accept(server)
    assert first.receive() is not None
    noise = b"GARBAGE AND NOISE." * 10
    first._sock.sendall(noise if ending == "noise" else frame_of({"number": 1}, 1000) + bytes(500))
    if ending == "end":
        first.close()
    second = accept(server)
    assert (second.receive() or ({}, 0))[0]["number"] == 2
    try:
        first.send({"number": "the trap"})
    except HoldfastError:
        pass  # the client has already closed it, which is even better
    second.send({"number": 2})
    first.close()
    assert second.receive() is None
    second.close()


def accept(server: socket.socket) -> SocketStream:
    return SocketStream(server.accept()[0], DEADLINE_S)


def frame_of(message: Message, payload: int) -> bytes:
    """A message as on the wire, with raw bytes announced that come later."""
    mine, other = socket.socketpair()
    with mine, other:
        SocketStream(mine, DEADLINE_S).send(message)
        frame = other.recv(4096)
    return frame[:8] + payload.to_bytes(8, "little") + frame[16:]
