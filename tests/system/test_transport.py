"""Messages over sockets: what a stream promises, and an SMP that is sent nonsense on every one of its sockets."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import socket
import struct
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.smp_daemon.answers import checked_peer
from holdfast.smp_daemon.net.peers import PeerClient
from holdfast.smp_daemon.service import Conversation, Smp, SocketListener, bind_tcp, bind_unix
from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.errors import (
    BY_NAME,
    ConfigError,
    DeadlineExceeded,
    HoldfastError,
    ProtocolError,
    SmpUnavailable,
    StaleEpoch,
)
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.limits import (
    CALL_DEADLINE_S,
    MAX_COUNT,
    MAX_MESSAGE_BYTES,
    MAX_SOCKET_PATH_BYTES,
    MAX_UNIT_BYTES,
)
from holdfast.smp_daemon.shared.paths import socket_path
from holdfast.smp_daemon.shared.plain import to_plain
from holdfast.smp_daemon.shared.records import digest
from holdfast.smp_daemon.shared.transport import Message, SocketStream, call, connect, receive_reply
from holdfast.smp_daemon.storage.receiving import buffers_for
from tests.deadlines import DEADLINE_S
from tests.smp_kit import IN_THREADS, JOB, Ground, Run, SmpProcess, Trainer, limited, playground, run_on
from tests.system.attacks.victim import ask_control, frame, tell

SOON_S = 0.05
"""A deadline that is meant to expire."""

MAGIC = b"HFST"


@pytest.fixture(scope="module")
def smp() -> Iterator[SmpProcess]:
    """One SMP that is sent all the nonsense of this module. The ground notices if it runs into a bug."""
    with playground() as ground:
        yield ground.smp()


def said(message: Any) -> bytes:
    return frame(json.dumps(message).encode())


INCOMPRESSIBLE = random.Random(1).randbytes(MAX_MESSAGE_BYTES).hex()
"""Two hexadecimal digits per byte, without a pattern: longer than the limit in any encoding."""


class Notice(Exception):
    """Raised by the handler of a signal."""


@contextmanager
def noticing() -> Iterator[None]:
    """SIGUSR1 raises `Notice` in the main thread during this block."""

    def handler(number: int, frame: object) -> None:
        raise Notice

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


# ---------------------------------------------------------------------- a stream


class Pair:
    """Two ends of one connection: a stream, and the bare socket at its other end."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        mine, self.bare = socket.socketpair()
        self.bare.settimeout(DEADLINE_S)
        self.stream = SocketStream(mine, deadline_s)

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stream.close()
        self.bare.close()

    def hear(self, data: bytes, *, end: bool = False) -> None:
        """Send `data` to the stream, and end the connection if `end`."""
        self.bare.sendall(data)
        if end:
            self.bare.shutdown(socket.SHUT_WR)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Pair() as pair:
        yield pair


class TestAStream:
    @pytest.mark.parametrize("length", [0, 1, 4096, 3 << 20])
    def test_carries_messages_and_raw_bytes_in_order(self, pair: Pair, length: int) -> None:
        other = SocketStream(pair.bare, DEADLINE_S)
        payload = bytes(i % 251 for i in range(length))
        with ThreadPoolExecutor(1) as threads:
            sending = threads.submit(pair.stream.send, {"unit": 7}, memoryview(payload))
            assert other.receive() == ({"unit": 7}, length)
            into = memoryview(bytearray(length + 2))
            other.receive_into(into[1 : length + 1])
            assert bytes(into) == b"\0" + payload + b"\0"
            sending.result(DEADLINE_S)
        pair.stream.send({"next": ["ä", None, 1 << 63]})
        assert other.receive() == ({"next": ["ä", None, 1 << 63]}, 0)

    def test_keeps_its_descriptor_while_a_call_is_under_way(self, pair: Pair) -> None:
        with pair.stream._use:
            pair.stream.close()
            assert pair.stream.closed
            assert pair.stream._sock.fileno() >= 0  # otherwise the call could wait on whatever gets that number next
        assert pair.stream._sock.fileno() < 0
        with pytest.raises(SmpUnavailable, match="closed"):
            pair.stream.receive()

    @pytest.mark.parametrize("answer", [b"", said({"number": 1})[:20]])
    def test_whose_call_is_interrupted_is_over(self, pair: Pair, answer: bytes) -> None:
        """Otherwise the reply that is still to come would be taken for that of the next call."""

        def interrupt() -> None:
            pair.bare.recv(1000)
            pair.hear(answer)
            os.kill(os.getpid(), signal.SIGUSR1)

        with noticing(), ThreadPoolExecutor(1) as threads:
            asked = threads.submit(interrupt)
            with pytest.raises(Notice):
                call(pair.stream, {"number": 1})
            asked.result(DEADLINE_S)
        assert pair.stream.closed
        with pytest.raises(SmpUnavailable, match="closed"):
            call(pair.stream, {"number": 2})

    def test_goes_on_after_an_error_that_was_replied_and_a_message_that_is_too_long(self, pair: Pair) -> None:
        with pytest.raises(ProtocolError, match="the limit"):
            call(pair.stream, {"text": INCOMPRESSIBLE})
        pair.hear(said({"error": "StaleEpoch", "message": "over"}) + said({"number": 2}))
        with pytest.raises(StaleEpoch):
            call(pair.stream, {"number": 1})
        assert call(pair.stream, {"number": 2}) == ({"number": 2}, 0)

    def test_puts_parts_together(self, pair: Pair) -> None:
        data = said({"op": "inventory"})
        with ThreadPoolExecutor(1) as threads:
            receiving = threads.submit(pair.stream.receive)
            for i in range(len(data)):
                pair.hear(data[i : i + 1])
            assert receiving.result(DEADLINE_S) == ({"op": "inventory"}, 0)

    def test_knows_the_end_from_a_break_in_the_middle(self) -> None:
        data = said({"op": "inventory"})
        for length in range(len(data)):
            with Pair() as pair:
                pair.hear(data[:length], end=True)
                if length == 0:
                    assert pair.stream.receive() is None
                else:
                    with pytest.raises(SmpUnavailable, match="middle of a message"):
                        pair.stream.receive()

    def test_knows_a_break_in_raw_bytes(self, pair: Pair) -> None:
        pair.hear(frame(b"{}", payload=100) + bytes(99), end=True)
        assert pair.stream.receive() == ({}, 100)
        with pytest.raises(SmpUnavailable, match="middle of a message"):
            pair.stream.receive_into(memoryview(bytearray(100)))

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (frame(b"{}", magic=b"HTTP"), "holdfast message"),
            (frame(b"{}", length=MAX_MESSAGE_BYTES + 1), "above the limits"),
            (frame(b"{}", length=0xFFFF_FFFF), "above the limits"),
            (frame(b"{}", payload=MAX_UNIT_BYTES + 1), "above the limits"),
            (frame(b"{}", payload=(1 << 64) - 1), "above the limits"),
            (frame(b""), "JSON object"),
            (frame(b"{"), "JSON object"),
            (frame(b"\xff\xfe\xfd"), "JSON object"),
            (frame(b"[" * 100_000), "JSON object"),
            (frame(b"1" * 10_000), "JSON object"),
            (frame(b"[1]"), "JSON object"),
            (frame(b'"op"'), "JSON object"),
            (frame(b"null"), "JSON object"),
        ],
    )
    def test_takes_nothing_for_a_message_that_is_none(self, pair: Pair, data: bytes, message: str) -> None:
        with ThreadPoolExecutor(1) as threads:
            hearing = threads.submit(pair.hear, data)
            with pytest.raises(ProtocolError, match=message):
                pair.stream.receive()
            pair.stream.close()
            hearing.exception(DEADLINE_S)

    def test_sends_nothing_of_a_message_that_is_too_large(self, pair: Pair) -> None:
        with pytest.raises(ProtocolError, match="the limits are"):
            pair.stream.send({"text": INCOMPRESSIBLE})
        pair.stream.send({"small": 1})
        assert pair.bare.recv(1000) == said({"small": 1}).replace(b": ", b":").replace(b"\x0c", b"\x0b")

    def test_waits_no_longer_than_its_deadline(self) -> None:
        with Pair(SOON_S) as pair:
            for receive in (pair.stream.receive, lambda: pair.stream.receive_into(memoryview(bytearray(1)))):
                with pytest.raises(DeadlineExceeded):
                    receive()
            with pytest.raises(DeadlineExceeded):
                for _ in range(1000):
                    pair.stream.send({}, memoryview(bytes(1 << 20)))
            pair.stream.set_deadline(None)
            pair.hear(said({"late": 1}))
            assert pair.stream.receive() == ({"late": 1}, 0)

    def test_that_was_closed_is_unavailable_and_may_be_closed_again(self, pair: Pair) -> None:
        pair.stream.close()
        pair.stream.close()
        for use in (pair.stream.receive, lambda: pair.stream.send({}), lambda: pair.stream.set_deadline(1)):
            with pytest.raises(SmpUnavailable):
                use()


class TestACall:
    @pytest.mark.parametrize("kind", list(BY_NAME.values()))
    def test_turns_an_error_reply_into_the_exception_it_names(self, pair: Pair, kind: type[HoldfastError]) -> None:
        pair.hear(said({"error": kind.__name__, "message": "no room"}) + said({"fine": 1}))
        with pytest.raises(kind, match="no room") as caught:
            call(pair.stream, {"op": "seal"})
        assert type(caught.value) is kind
        assert call(pair.stream, {"op": "inventory"}) == ({"fine": 1}, 0)

    @pytest.mark.parametrize("name", ["KeyboardInterrupt", "NeverHeardOf", ["ConfigError"], None, 7])
    def test_turns_an_unknown_error_into_one_of_ours(self, pair: Pair, name: Any) -> None:
        pair.hear(said({"error": name}))
        with pytest.raises(HoldfastError) as caught:
            call(pair.stream, {})
        assert type(caught.value) is HoldfastError

    def test_without_an_answer_is_unavailable(self, pair: Pair) -> None:
        pair.hear(b"", end=True)
        with pytest.raises(SmpUnavailable, match="closed the connection"):
            call(pair.stream, {})

    def test_does_not_take_a_late_answer_for_the_next_ones(self) -> None:
        with Pair(SOON_S) as pair:
            with pytest.raises(DeadlineExceeded):
                call(pair.stream, {"op": "accumulate", "unit": 1})
            try:
                pair.hear(said({"error": "StaleEpoch", "message": "of unit 1"}))
            except BrokenPipeError:
                pass  # the connection is already closed: better still
            with pytest.raises(SmpUnavailable):
                call(pair.stream, {"op": "accumulate", "unit": 2})

    @pytest.mark.parametrize("noise", [b"GARBAGE AND NOISE.", frame(b"{}", length=MAX_MESSAGE_BYTES + 1), frame(b"[]")])
    def test_that_gets_no_message_for_an_answer_ends_the_connection(self, pair: Pair, noise: bytes) -> None:
        pair.hear(noise + said({"fine": 1}))
        with pytest.raises(ProtocolError):
            call(pair.stream, {})
        assert pair.stream.closed
        with pytest.raises(SmpUnavailable):
            call(pair.stream, {})

    def test_may_be_made_before_the_one_before_is_answered(self, pair: Pair) -> None:
        pair.stream.send({"first": 1})
        pair.stream.send({"second": 2})
        pair.hear(said({"number": 1}) + said({"error": "StaleEpoch", "message": "of the second"}))
        assert receive_reply(pair.stream) == ({"number": 1}, 0)
        with pytest.raises(StaleEpoch, match="of the second"):
            receive_reply(pair.stream)
        assert not pair.stream.closed


class TestConnecting:
    @pytest.mark.parametrize("address", [("127.0.0.1", 1 << 16), ("127.0.0.1", -1), ("no\0host", 80), ("ä" * 100, 80)])
    def test_to_what_is_no_address_is_unavailable(self, address: tuple[str, int]) -> None:
        with pytest.raises(SmpUnavailable, match="is not an address"):
            connect(address)

    def test_where_nobody_listens_is_unavailable(self, tmp_path: Path, ground: Ground) -> None:
        with socket.create_server((ground.host(), 0)) as gone:
            address = gone.getsockname()[:2]
        for target in (address, tmp_path / "nowhere"):
            with pytest.raises(SmpUnavailable):
                connect(target)

    def test_a_socket_is_for_its_user_only(self, ground: Ground) -> None:
        path = ground.base / "sock"
        path.write_text("left by a predecessor")
        with bind_unix(path):
            assert path.is_socket()
            assert path.stat().st_mode & 0o777 == 0o600
            connect(path).close()

    @pytest.mark.parametrize("length", [MAX_SOCKET_PATH_BYTES, MAX_SOCKET_PATH_BYTES + 1])
    def test_a_path_may_be_as_long_as_the_kernel_allows(self, ground: Ground, length: int) -> None:
        path = ground.base / ("s" * (length - len(str(ground.base)) - 1))
        assert len(str(path)) == length
        if length > MAX_SOCKET_PATH_BYTES:
            with pytest.raises(ConfigError, match="shorter HOLDFAST_ARENA"):
                bind_unix(path)
        else:
            bind_unix(path).close()

    def test_a_port_is_free_again_at_once(self, ground: Ground) -> None:
        host = ground.host()
        listener = SocketListener(bind_tcp(host, 0), lambda sock: Echo())
        port = listener.port
        stream = connect((host, port))
        assert call(stream, {"say": 1}) == ({"say": 1}, 0)
        listener.close()
        bind_tcp(host, port).close()

    def test_a_connection_that_is_accepted_while_the_smp_closes_ends_without_a_bug(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun, closed = threading.Event(), threading.Event()
        bugs: list[BaseException | None] = []
        threads: list[threading.Thread] = []

        def converse(sock: socket.socket) -> Conversation:
            threads.append(threading.current_thread())
            begun.set()
            assert closed.wait(DEADLINE_S)
            checked_peer(sock)
            raise AssertionError("it was not closed")

        monkeypatch.setattr("threading.excepthook", lambda failed: bugs.append(failed.exc_value))
        listener = SocketListener(bind_unix(tmp_path / "smp.sock"), converse)
        stream = connect(tmp_path / "smp.sock")
        assert begun.wait(DEADLINE_S)
        listener.close()
        closed.set()
        threads[0].join(DEADLINE_S)
        stream.close()
        assert not bugs
        stream.close()


# ---------------------------------------------------------------------- a listener


class Echo:
    """Answers with what it is told, or with an error if asked for one."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def answer(self, message: Message, payload: int, stream: SocketStream) -> tuple[Message, memoryview | None]:
        unit = memoryview(bytearray(payload))
        stream.receive_into(unit)
        if "refuse" in message:
            raise StaleEpoch(message["refuse"])
        return message, unit if payload else None

    def ended(self) -> None:
        self.over.set()


class Echoes:
    """A listener on a unix socket, and its conversations."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.conversations: list[Echo] = []
        self.listener = SocketListener(bind_unix(path), self._converse)

    def _converse(self, sock: socket.socket) -> Echo:
        self.conversations.append(Echo())
        return self.conversations[-1]


@pytest.fixture
def echoes(ground: Ground) -> Iterator[Echoes]:
    echoes = Echoes(ground.base / "echoes")
    yield echoes
    echoes.listener.close()


class TestAListener:
    def test_answers_several_at_once(self, echoes: Echoes) -> None:
        streams = [connect(echoes.path) for _ in range(5)]
        for i, stream in enumerate(streams):
            stream.send({"who": i}, memoryview(bytes([i] * 10)))
        for i, stream in reversed(list(enumerate(streams))):
            assert stream.receive() == ({"who": i}, 10)
            unit = bytearray(10)
            stream.receive_into(memoryview(unit))
            assert unit == bytes([i] * 10)
            stream.close()

    def test_tells_a_conversation_that_it_is_over(self, echoes: Echoes) -> None:
        stream = connect(echoes.path)
        call(stream, {})
        stream.close()
        assert echoes.conversations[0].over.wait(DEADLINE_S)

    def test_that_is_closed_ends_its_conversations_and_takes_no_others(self, echoes: Echoes) -> None:
        stream = connect(echoes.path)
        call(stream, {})
        echoes.listener.close()
        assert echoes.conversations[0].over.wait(DEADLINE_S)
        with pytest.raises(SmpUnavailable):
            call(stream, {})
        with pytest.raises(SmpUnavailable):
            call(connect(echoes.path), {})
        assert len(echoes.conversations) == 1


# ---------------------------------------------------------------------- an SMP that is sent nonsense


def local_of(smp: SmpProcess) -> Path:
    return socket_path(smp.arena)


def bulk_of(smp: SmpProcess) -> tuple[str, int]:
    return smp.bulk


def control_of(smp: SmpProcess) -> tuple[str, int]:
    return smp.control


both_sockets = pytest.mark.parametrize("of", [local_of, bulk_of], ids=["local", "bulk"])
every_socket = pytest.mark.parametrize("of", [local_of, bulk_of, control_of], ids=["local", "bulk", "control"])
Address = Callable[[SmpProcess], Any]


def replies(heard: bytes) -> list[Message]:
    """The messages in an SMP's answer."""
    found = []
    while heard:
        length, payload = struct.unpack("<IQ", heard[4:16])
        found.append(json.loads(heard[16 : 16 + length]))
        heard = heard[16 + length + payload :]
    return found


def serves(smp: SmpProcess) -> bool:
    """Whether an SMP answers on every one of its sockets."""
    with closing(SmpClient(smp.arena, smp.job)) as client, closing(connect(smp.bulk)) as stream:
        with PeerClient(smp.job) as peers, pytest.raises(ProtocolError, match="message that is answered"):
            answers = {client.inventory().node, peers.ping(smp.control, CALL_DEADLINE_S).node}
            call(stream, {"op": "?", "job": smp.job, "snapshot": [0, 0]})
    return answers == {smp.name} and smp.process.poll() is None


class TestAnSmpIsToldNonsense:
    @both_sockets
    @pytest.mark.parametrize(
        "data",
        [
            pytest.param(b"GET / HTTP/1.1\r\nHost: smp\r\n\r\n", id="wrong magic"),
            pytest.param(frame(b"{}", length=MAX_MESSAGE_BYTES + 1), id="message above the limit"),
            pytest.param(frame(b"{}", payload=(1 << 64) - 1), id="huge unit"),
            pytest.param(frame(b"not JSON"), id="not JSON"),
            pytest.param(frame(b'{"op": "leave", "deadline_s": Infinity}'), id="infinite"),
            pytest.param(frame(b'{"op": "inventory", "job": "\\ud800"}'), id="half a character"),
        ],
    )
    def test_it_ends_that_connection_and_no_other(self, smp: SmpProcess, of: Address, data: bytes) -> None:
        other, peer = smp.client(), connect(smp.bulk)
        assert tell(of(smp), data, end=False) == b""
        assert other.inventory().node == smp.name
        with pytest.raises(ProtocolError):
            call(peer, {"op": "?"})
        other.close()
        peer.close()
        assert serves(smp)

    @both_sockets
    def test_it_gives_up_on_a_message_that_ends_in_the_middle(self, smp: SmpProcess, of: Address) -> None:
        whole = said({"op": "inventory", "job": smp.job, "snapshot": [1, 1]})
        for length in (1, 4, 15, 16, len(whole) - 1):
            assert tell(of(smp), whole[:length]) == b""
        assert len(replies(tell(of(smp), whole))) == 1
        assert serves(smp)

    def test_it_takes_no_unit_longer_than_the_layouts(self, smp: SmpProcess) -> None:
        trainer = Trainer(smp, "dp0")
        run = Run([trainer]).start(trainer.client.inventory().epoch + 1)
        body = json.dumps({"op": "accumulate", "job": smp.job, "snapshot": [run.epoch, 1]}).encode()
        assert tell(smp.bulk, frame(body, payload=run.layout.unit_bytes + 1), end=False) == b""
        assert serves(smp)

    def test_it_does_not_take_raw_bytes_of_a_trainer_for_a_message(self, smp: SmpProcess) -> None:
        epoch = smp.client().inventory().epoch
        inner = said({"op": "join", "epoch": epoch + 1})
        body = json.dumps({"op": "inventory"}).encode()
        heard = replies(tell(local_of(smp), frame(body, payload=len(inner)) + inner))
        assert [reply.get("error") for reply in heard] in ([], ["ProtocolError"])
        assert smp.client().inventory().epoch == epoch

    @both_sockets
    @pytest.mark.parametrize(
        "message",
        [
            {},
            {"op": None},
            {"op": ["inventory"]},
            {"op": "inventoryx"},
            {"op": "hello"},
            {"op": "seal"},
            {"op": "accumulate"},
        ],
        ids=str,
    )
    def test_what_it_does_not_understand_it_says(self, smp: SmpProcess, of: Address, message: Message) -> None:
        what = {"op": "shard_unit", "coord": "dp0", "unit": 0}
        good = {"op": "fetch", "job": smp.job, "snapshot": [0, 0], "what": what}
        first, second = replies(tell(of(smp), said(message) + said(good)))
        assert first["error"] == "ProtocolError"
        assert second["error"] == ("NotHeld" if of is bulk_of else "ProtocolError")

    @every_socket
    def test_random_bytes_do_not_disturb_it(self, smp: SmpProcess, of: Address) -> None:
        @given(st.binary(max_size=300), st.booleans(), st.booleans())
        def throw(data: bytes, magic: bool, end: bool) -> None:
            if magic and end:
                data = MAGIC + data
            heard = tell(of(smp), data, end=True)
            assert of is control_of or heard == b"" or replies(heard)

        throw()
        assert serves(smp)

    @every_socket
    def test_messages_with_random_fields_are_answered(self, smp: SmpProcess, of: Address) -> None:
        client = smp.client()
        client.join(client.inventory().epoch + 2)

        @given(messages(smp.job))
        def throw(message: Message) -> None:
            if of is control_of:
                ask_control(smp.control, message)
            else:
                assert len(replies(tell(of(smp), said(message)))) == 1

        throw()
        assert serves(smp)

    def test_layouts_that_are_almost_right_are_answered(self, smp: SmpProcess) -> None:
        trainer = Trainer(smp, "dp0")
        run = Run([trainer])
        client = trainer.client

        @given(st.data())
        def throw(data: st.DataObject) -> None:
            layout = to_plain(run.start(client.inventory().epoch + 1).layout)
            client.join(run.epoch + 1)
            spoilt = spoil(data, {**layout, "epoch": run.epoch + 1})
            (reply,) = replies(tell(local_of(smp), said({"op": "configure", "layout": spoilt})))
            assert reply.get("error") in (None, "ProtocolError", "StaleEpoch", "ArenaTooSmall")

        throw()
        assert serves(smp)

    def test_it_serves_again_after_it_has_run_out_of_files(self, ground: Ground) -> None:
        smp = ground.smp().wait_settled()
        client = smp.client()
        open_files = len(list(Path(f"/proc/{smp.process.pid}/fd").iterdir()))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as waiting, ExitStack() as stack:
            with limited(resource.RLIMIT_NOFILE, open_files, smp.process.pid):
                peer = stack.enter_context(closing(connect(smp.bulk, DEADLINE_S)))
                waiting.connect(str(local_of(smp)))
                assert client.inventory().node == smp.name
            waiting.settimeout(DEADLINE_S)
            waiting.sendall(said({"op": "inventory"}))
            assert waiting.recv(4) == MAGIC
            with pytest.raises(ProtocolError):
                call(peer, {"op": "?"})
        assert serves(smp)

    def test_it_serves_again_after_it_has_run_out_of_threads(
        self, ground: Ground, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prepared, start = ground.prepare(), threading.Thread.start
        smp = Smp(JOB, prepared.name, prepared.arena, prepared.host, environment=IN_THREADS)
        prepared.owner = smp.owner

        def refuse(thread: threading.Thread) -> None:
            if thread.name.startswith(("connection", "peer")):
                raise RuntimeError("can't start new thread")
            start(thread)

        with closing(smp), PeerClient(JOB) as peers:
            with monkeypatch.context() as crowded:
                crowded.setattr(threading.Thread, "start", refuse)
                with closing(connect(local_of(prepared), DEADLINE_S)) as refused, pytest.raises(SmpUnavailable):
                    call(refused, {"op": "inventory"})
                with ThreadPoolExecutor(8) as pool:  # several calls at once: several threads
                    answers = list(pool.map(lambda _: peers.ping(prepared.control, DEADLINE_S), range(8)))
                assert {answer.node for answer in answers} == {prepared.name}
            with closing(SmpClient(prepared.arena, JOB)) as client:
                assert client.inventory().node == prepared.name


OPERATIONS = [
    *("hello", "inventory", "join", "configure", "seal", "recover", "repair_parity", "counters"),
    *("scrub", "accumulate", "shard", "fetch", "ping", "parity_done", "status"),
    *("regroup", "enlist", "adopt", "encode", "release"),
]
"""All but ``finish`` and ``drain``, which would be obeyed, and ``await``, which may take an hour."""

FIELDS = [
    *("speaks", "epoch", "layout", "snapshot", "coord", "keep", "protected", "sources", "group", "position"),
    *("stripe", "digest", "unit", "tag", "terms", "length", "check"),
]

numbers = st.sampled_from([-1, 0, 1, 2, 3, 1000, 1 << 31, 1 << 52, 1 << 62, 1 << 63, 1 << 64, 10**30])
scalars = st.one_of(st.none(), st.booleans(), numbers, st.sampled_from([0.5, 1e300]), st.text(max_size=8))
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
snapshots = st.lists(numbers, min_size=2, max_size=2)
coords = st.sampled_from(["dp0", "dp1", "../../escape", "", "a/b"])


terms = st.fixed_dictionaries(
    {},
    optional={
        "at": values | st.tuples(st.sampled_from(["127.0.0.1", "", "no\0host", "ä" * 100]), numbers),
        "factor": numbers,
        "what": values | st.fixed_dictionaries({"op": st.just("shard_unit"), "coord": coords, "unit": numbers}),
    },
)


@st.composite
def messages(draw: st.DrawFn, job: str) -> Message:
    """Objects that look like messages: known operations and known fields, most with nonsense in them."""
    message: Message = {name: draw(values) for name in draw(st.sets(st.sampled_from(FIELDS)))}
    likely: dict[str, st.SearchStrategy[Any]] = dict.fromkeys(
        ("unit", "stripe", "position", "group", "digest"), numbers
    )
    likely |= {"job": st.just(job), "snapshot": snapshots, "coord": coords, "keep": st.lists(snapshots, max_size=3)}
    likely |= {"epoch": numbers, "tag": coords, "length": numbers, "terms": st.lists(terms, max_size=3)}
    for name, strategy in likely.items():
        if draw(st.integers(0, 3)):
            message[name] = draw(strategy)
    if isinstance(message.get("epoch"), int) and 0 <= message["epoch"] <= MAX_COUNT:
        message["epoch"] = 1  # a far later epoch would be obeyed or waited for, and no newer one could begin
    return {"op": draw(st.sampled_from(OPERATIONS)), **message}


def spoil(data: st.DataObject, message: Message, keys: Collection[str] = ()) -> Message:
    """A message with one value, at any depth, replaced, mostly by one of its type, within `keys` if any are given.
    2 GiB is never used, as it is a length that could be reserved."""
    spoilt: Any = json.loads(json.dumps(message))
    inside: Any = spoilt
    while True:
        within = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
        key = data.draw(st.sampled_from(sorted(keys) if keys and inside is spoilt else within))
        if isinstance(inside[key], dict | list) and inside[key] and data.draw(st.booleans()):
            inside = inside[key]
        else:
            alike = {int: numbers, str: st.sampled_from(["dp1", "node1", "127.0.0.1", "", "a/b"]) | st.text(max_size=8)}
            other = st.one_of(*[alike.get(type(inside[key]), values)] * 3, values)
            inside[key] = data.draw(other.filter(lambda value: value != 1 << 31))
            return dict(spoilt)


# ---------------------------------------------------------------------- an SMP that is sent what is almost right


class Protected:
    """Two SMPs that hold a protected snapshot, and valid messages about it."""

    def __init__(self, ground: Ground) -> None:
        self.smps = ground.smps(2)
        self.run = run_on(self.smps, [[3000], [3000]])
        self.snapshot = self.run.protect(1)
        self.client = self.smps[0].client()
        plan = self.run.plan()
        layout = to_plain(self.run.layout)
        both = {"job": self.run.job, "snapshot": self.snapshot, "tag": self.run.layout.tag(0)}
        unit = {"op": "shard_unit", "coord": "dp0", "unit": 0}
        terms = [
            {"at": self.smps[0].bulk, "factor": 1, "what": unit},
            {"at": self.smps[1].bulk, "factor": 7, "what": {**unit, "coord": "dp1"}},
        ]
        self.lengths = [plan_unit(trainer, self.run) for trainer in self.run]
        regrouping = {"job": self.run.job, "epoch": 1, "sources": to_plain(plan.sources), "layout": layout}
        to_trainer = {"sources": to_plain(plan.sources)}
        self.messages: dict[str, Message] = {
            "accumulate": {
                **both,
                "epoch": 1,
                "stripe": 0,
                "position": 1,
                "digest": digest(memoryview(bytes(self.lengths[1]))),
            },
            "fetch shard": {**both, "what": unit},
            "fetch parity": {**both, "what": {"op": "parity_unit", "tag": both["tag"], "position": 0, "unit": 0}},
            "fetch sum": {
                **both,
                "what": {"op": "partial", "terms": terms, "length": max(self.lengths), "position": 1},
            },
            "adopt": regrouping,
            "release": regrouping,
            "recover": {**to_trainer, "coord": "dp0"},
            "repair_parity": {**to_trainer, "group": 0, "position": 0},
        }

    def say(self, message: Message) -> Message:
        """Send a message on a connection of its own, with a unit where one is needed; return the reply."""
        message = {**message, "op": message["op"].partition(" ")[0]}
        if message["op"] in ("adopt", "encode", "release"):
            return ask_control(self.smps[0].control, message)
        local = message["op"] in ("recover", "repair_parity")
        payload = bytes(self.lengths[1]) if message["op"] == "accumulate" else b""
        body = json.dumps(message).encode()
        data = frame(body, payload=len(payload)) + payload
        (reply,) = replies(tell(local_of(self.smps[0]) if local else self.smps[0].bulk, data))
        return reply

    def refused(self, op: str, **changes: Any) -> str:
        """The error message for a valid message with `changes`, which must be refused."""
        reply = self.say({"op": op, **self.messages[op], **changes})
        assert reply["error"] == "ProtocolError", reply
        return str(reply["message"])


def plan_unit(trainer: Trainer, run: Run) -> int:
    """Bytes of the first unit of a trainer's shard."""
    return min(run.layout.unit_bytes, trainer.form.total_bytes)


@pytest.fixture(scope="module")
def protected() -> Iterator[Protected]:
    with playground() as ground:
        yield Protected(ground)


class TestAnSmpIsToldWhatIsAlmostRight:
    @pytest.mark.parametrize(
        "op", ["accumulate", "fetch shard", "fetch parity", "fetch sum", "adopt", "release", "recover"]
    )
    def test_what_is_right_is_done(self, protected: Protected, op: str) -> None:
        """Otherwise the tests below would prove little. All of it is harmless if repeated."""
        assert "error" not in protected.say({"op": op, **protected.messages[op]})

    @pytest.mark.parametrize(
        ("op", "keys"),
        [
            ("accumulate", ["job", "stripe", "position", "digest"]),
            ("fetch shard", []),
            ("fetch parity", []),
            ("fetch sum", []),
            ("adopt", []),
            ("release", []),
            ("recover", []),
            ("repair_parity", []),
        ],
    )
    def test_what_is_almost_right_is_answered_and_spoils_nothing(
        self, protected: Protected, op: str, keys: list[str]
    ) -> None:
        """For ``accumulate``, values that the SMP would wait for are left as they are."""

        @given(st.data())
        def throw(data: st.DataObject) -> None:
            reply = protected.say({**spoil(data, protected.messages[op], keys), "op": op})
            assert reply.get("error") in (None, *BY_NAME)

        throw()
        assert serves(protected.smps[0])
        held = protected.client.inventory()
        assert (protected.snapshot, "dp0") in held.shards
        assert (protected.snapshot, protected.run.layout.tag(0), 0) in held.parities or op == "repair_parity"
        found = protected.client.scrub()
        assert (found["damaged"], found["repaired"]) == (0, 0)

    def test_a_layout_that_is_not_for_this_snapshot_is_not_kept(self, protected: Protected) -> None:
        """A layout of a later epoch would displace the one that the job works with."""
        layout: Message = protected.messages["adopt"]["layout"]
        before = protected.client.inventory().layouts
        for op in ("adopt", "release"):
            assert "not for step 1" in protected.refused(op, layout=dict(layout, epoch=2, revision=1))
            assert "not for step 1" in protected.refused(op, layout=dict(layout, job="otherun", revision=1))
            elsewhere = [dict(node, name=f"other{i}") for i, node in enumerate(layout["nodes"])]
            assert "'node0' is not part" in protected.refused(op, layout=dict(layout, nodes=elsewhere, revision=1))
        assert protected.client.inventory().layouts == before

    def test_parity_is_not_dropped_for_groups_that_were_not_adopted(self, protected: Protected) -> None:
        layout: Message = protected.messages["release"]["layout"]
        nodes = [dict(node, shards=[]) for node in layout["nodes"]]
        for other in (
            dict(layout, groups=[[0], [1]]),
            dict(layout, parity=0, revision=1),
            dict(layout, nodes=nodes, revision=7),
        ):
            assert "no such layout" in protected.refused("release", layout=other)
        assert (protected.snapshot, protected.run.layout.tag(0), 0) in protected.client.inventory().parities

    def test_a_phase_of_another_epoch_is_refused(self, protected: Protected) -> None:
        for op in ("adopt", "encode", "release"):
            for epoch in (0, 2):
                reply = protected.say({**protected.messages["adopt"], "op": op, "epoch": epoch})
                assert reply["error"] == "StaleEpoch"

    @pytest.mark.parametrize(("group", "position"), [(0, 2), (1, 0), (1 << 53, 0), (0, 1 << 53)])
    def test_parity_that_there_is_not_is_not_repaired(self, protected: Protected, group: int, position: int) -> None:
        assert "layout of step 1" in protected.refused("repair_parity", group=group, position=position)

    def test_a_sum_that_could_not_be_had_is_said(self, protected: Protected) -> None:
        sum_of = protected.messages["fetch sum"]["what"]
        both = {name: protected.messages["fetch sum"][name] for name in ("job", "snapshot")}
        first, second = sum_of["terms"]
        for terms, message in (
            ([], "`$.what.terms`"),
            ([first, {**second, "at": ["127.0.0.1"]}], "`$.what.terms[1].at`"),
            ([{**first, "factor": 256}, second], "`$.what.terms[0].factor`"),
            ([{**first, "what": 7}, second], "`$.what.terms[0].what`"),
            ([{**first, "what": {**first["what"], "unit": 1000}}], "there is no unit 1000"),
        ):
            assert message in protected.refused("fetch sum", what={**sum_of, "terms": terms})
        reply = protected.say({"op": "fetch", **both, "what": {**sum_of, "terms": [first], "length": 0}})
        assert "error" not in reply, "a sum of nothing is one too"
        nobody = {**second, "at": ["no\0host", 80]}
        reply = protected.say({"op": "fetch", **both, "what": {**sum_of, "terms": [first, nobody]}})
        assert (reply["error"], "is not an address" in reply["message"]) == ("SmpUnavailable", True)

    def test_units_that_end_in_the_middle_take_no_buffer_with_them(self, protected: Protected) -> None:
        length = protected.lengths[1]
        body = json.dumps({"op": "accumulate", **protected.messages["accumulate"]}).encode()
        for _ in range(2 * buffers_for(1)):
            heard = tell(protected.smps[0].bulk, frame(body, payload=length) + bytes(length - 1))
            assert [reply["error"] for reply in replies(heard)] in ([], ["SmpUnavailable"])
        assert "error" not in protected.say({"op": "accumulate", **protected.messages["accumulate"]})

    def test_a_unit_for_a_group_that_has_no_parity_is_refused(self, ground: Ground) -> None:
        [smp], run = ground.job([[3000]])
        snapshot = run.write(1)
        message = {"op": "accumulate", "job": run.job, "epoch": 1, "snapshot": snapshot, "tag": run.layout.tag(0)}
        stream = connect(smp.bulk)
        with pytest.raises(ProtocolError, match="no parity of group"):
            call(stream, {**message, "stripe": 0, "position": 0, "digest": 0}, memoryview(b"unit"))
        stream.close()


def test_the_codes_own_snapshot_ids_are_pairs_on_the_wire() -> None:
    with Pair() as pair:
        pair.stream.send({"snapshot": SnapshotId(3, 4)})
        assert json.loads(pair.bare.recv(1000)[16:]) == {"snapshot": [3, 4]}


def test_who_knows_that_work_goes_on_waits_beyond_the_deadline() -> None:
    mine, other = socket.socketpair()
    stream, far = SocketStream(mine, 0.05), SocketStream(other)
    asked: list[int] = []

    def goes_on() -> bool:
        asked.append(1)
        if len(asked) == 3:
            far.send({"done": True})
        return len(asked) <= 3

    stream.goes_on = goes_on
    assert stream.receive() == ({"done": True}, 0)
    with pytest.raises(DeadlineExceeded):
        stream.receive()
    stream.close()
    far.close()
