"""Units are received and digested in one call of C, byte for byte as in Python."""

from __future__ import annotations

import random
import shutil
import socket
import threading
from collections.abc import Iterator

import pytest
import xxhash

from holdfast.smp_daemon.shared import transport
from holdfast.smp_daemon.shared.errors import DeadlineExceeded, SmpUnavailable
from holdfast.smp_daemon.shared.transport import PIECE_BYTES, SocketStream, is_compiled

LENGTHS = (0, 1, 240, 241, PIECE_BYTES - 1, PIECE_BYTES, 3 * PIECE_BYTES + 17)


@pytest.fixture(params=["compiled", "python"])
def pair(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[socket.socket, SocketStream]]:
    """A bare socket, and the stream at the other end."""
    if request.param == "python":
        monkeypatch.setattr(transport, "is_compiled", lambda: False)
    elif not is_compiled():
        pytest.skip("there is no compiler here")
    bare, other = socket.socketpair()
    stream = SocketStream(other, 30.0)
    yield bare, stream
    bare.close()
    stream.close()


def test_this_installation_has_the_compiled_library() -> None:
    if shutil.which("cc") is None and not is_compiled():
        pytest.skip("there is no compiler here")
    assert is_compiled(), "smp_daemon/shared/receive.c was not compiled: install holdfast again"


def test_without_the_library_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_library", lambda: None)
    assert not is_compiled()


@pytest.mark.parametrize("length", LENGTHS)
def test_what_comes_is_there_with_its_digest_and_no_more(pair: tuple[socket.socket, SocketStream], length: int) -> None:
    bare, stream = pair
    content = random.Random(length).randbytes(length)
    buffer = bytearray(b"x" * (length + 64))
    sending = threading.Thread(target=bare.sendall, args=(content + b"next",))
    sending.start()
    digest = stream.receive_into(memoryview(buffer)[32 : 32 + length])
    sending.join()
    assert digest == xxhash.xxh3_64_intdigest(content)
    assert bytes(buffer) == b"x" * 32 + content + b"x" * 32
    rest = bytearray(4)
    stream.receive_into(memoryview(rest))
    assert rest == b"next"


def test_a_connection_that_ends_in_the_middle_is_told(pair: tuple[socket.socket, SocketStream]) -> None:
    bare, stream = pair
    bare.sendall(bytes(100))
    bare.close()
    with pytest.raises(SmpUnavailable, match="in the middle"):
        stream.receive_into(memoryview(bytearray(101)))


def test_what_does_not_come_is_waited_for_until_the_deadline(pair: tuple[socket.socket, SocketStream]) -> None:
    bare, stream = pair
    stream.set_deadline(0.05)
    bare.sendall(bytes(100))
    with pytest.raises(DeadlineExceeded):
        stream.receive_into(memoryview(bytearray(101)))
