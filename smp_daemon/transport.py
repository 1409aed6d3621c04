"""Messages over sockets: a JSON object and, if any, raw bytes. The only module that touches a stream socket.

Frame: magic ``HFST``, length of the JSON (4 bytes), length of the raw bytes (8 bytes), both little endian; then
the JSON; then the bytes, straight from and into the caller's memory. A reply that carries ``error`` becomes an
exception again on the asking side.
"""

from __future__ import annotations

import json
import logging
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from smp_daemon.errors import (
    BY_NAME,
    ConfigError,
    DeadlineExceeded,
    HoldfastError,
    ProtocolError,
    SmpUnavailable,
)
from smp_daemon.limits import CALL_DEADLINE_S, MAX_MESSAGE_BYTES, MAX_SOCKET_PATH_BYTES, MAX_UNIT_BYTES
from smp_daemon.logs import Episodes, about, get_log

Message = dict[str, Any]
_FRAME = struct.Struct("<4sIQ")
_MAGIC = b"HFST"
_encode = json.JSONEncoder(separators=(",", ":")).encode  # `json.dumps` would make an encoder for each message
_decode = json.JSONDecoder().decode
ACCEPT_AGAIN_S = 0.5

log = get_log(__name__)


class Stream(Protocol):
    """One ordered two-way connection. Not thread-safe."""

    def send(self, message: Message, payload: memoryview | None = None) -> None:
        """Send a message and, if given, raw bytes. Blocks until handed to the network; may raise as `receive`."""
        ...

    def receive(self) -> tuple[Message, int] | None:
        """The next message and how many raw bytes follow it (0 if none); None if the other side is gone.

        Raises:
            DeadlineExceeded: nothing came in time.
            ProtocolError: what came is no message, or larger than the limits.
            SmpUnavailable: the connection broke in the middle.
        """
        ...

    def receive_into(self, payload: memoryview) -> None:
        """Fill `payload` with the raw bytes that follow the last message; raises as `receive`."""
        ...

    def set_deadline(self, seconds: float | None) -> None:
        """How long each further call may wait for the network."""
        ...

    def close(self) -> None:
        """End the connection; harmless if it is over."""
        ...


class SocketStream:
    """`Stream` over a connected TCP or unix socket."""

    def __init__(self, sock: socket.socket, deadline_s: float | None = CALL_DEADLINE_S) -> None:
        self._sock = sock
        self._use = _Use(sock)
        sock.settimeout(deadline_s)

    def send(self, message: Message, payload: memoryview | None = None) -> None:
        body = _encode(message).encode()
        if len(body) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {len(body)} bytes; the limit is {MAX_MESSAGE_BYTES}")
        with self._use:
            self._sock.sendall(_FRAME.pack(_MAGIC, len(body), payload.nbytes if payload else 0) + body)
            if payload:
                self._sock.sendall(payload)

    def receive(self) -> tuple[Message, int] | None:
        head = bytearray(_FRAME.size)
        with self._use:
            first = self._sock.recv_into(head)
            if first == 0:
                return None
            if first < len(head):
                self._fill(memoryview(head)[first:])
            magic, length, payload = _FRAME.unpack(head)
            if magic != _MAGIC:
                raise ProtocolError("this is not a holdfast message")
            if length > MAX_MESSAGE_BYTES or payload > MAX_UNIT_BYTES:
                raise ProtocolError(f"a message of {length} + {payload} bytes is above the limits")
            body = bytearray(length)
            self._fill(memoryview(body))
        try:
            message = _decode(str(body, "utf-8"))
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"a message is not JSON: {error}") from error
        if not isinstance(message, dict):
            raise ProtocolError("a message is not a JSON object")
        return message, payload

    def receive_into(self, payload: memoryview) -> None:
        with self._use:
            self._fill(payload)

    def _fill(self, buffer: memoryview) -> None:
        while buffer:
            count = self._sock.recv_into(buffer)
            if count == 0:
                raise SmpUnavailable("the connection ended in the middle of a message")
            buffer = buffer[count:]

    def set_deadline(self, seconds: float | None) -> None:
        with self._use:
            self._sock.settimeout(seconds)

    def close(self) -> None:
        self._use.end()

    @property
    def closed(self) -> bool:
        """Whether this side has closed it."""
        return self._use.over


class _Use:
    """Calls under way on a socket that another thread may end.

    Those are woken at once, and the last of them gives the descriptor back: were it closed before, its number could
    be another file's by the time a thread on its way into the kernel waits on it, and that thread would wait for ever.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.over = False
        self._sock = sock
        self._calls = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            if self.over:
                raise SmpUnavailable("the connection was closed")
            self._calls += 1

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._lock:
            self._calls -= 1
            if self.over:
                self._release()
        if isinstance(error, OSError):
            raise _mapped(error) from error

    def end(self) -> None:
        with self._lock:
            if not self.over:
                self.over = True
                with suppress(OSError):  # the other side was faster
                    self._sock.shutdown(socket.SHUT_RDWR)
                self._release()

    def _release(self) -> None:
        if not self._calls:
            self._sock.close()


def _mapped(error: OSError) -> HoldfastError:
    """What a socket raised, as our exception."""
    if isinstance(error, TimeoutError):
        return DeadlineExceeded("the other side did not answer in time")
    return SmpUnavailable(f"the connection broke: {error}")


def connect(address: tuple[str, int] | Path, deadline_s: float = CALL_DEADLINE_S) -> SocketStream:
    """Connect to a TCP address or a unix socket.

    Raises:
        SmpUnavailable: nobody listens there.
        DeadlineExceeded: no answer within `deadline_s`.
    """
    unix = isinstance(address, Path)
    target = str(address) if isinstance(address, Path) else address
    sock = socket.socket(socket.AF_UNIX if unix else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.settimeout(deadline_s)
        try:
            sock.connect(target)
        except OSError as error:
            raise _mapped(error) from error
        except (OverflowError, TypeError, ValueError) as error:
            raise SmpUnavailable(f"{target!r} is no address: {error}") from error
        if not unix:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return SocketStream(sock, deadline_s)
    except BaseException:
        sock.close()
        raise


def call(stream: Stream, message: Message, payload: memoryview | None = None) -> tuple[Message, int]:
    """Send a message and wait for its reply: the reply, and how many raw bytes follow it.

    Raises:
        HoldfastError: the error that the other side replied with, or what `Stream.receive` raises.
    """
    try:
        stream.send(message, payload)
    except (SmpUnavailable, DeadlineExceeded):
        stream.close()
        raise
    return receive_reply(stream)


def receive_reply(stream: Stream) -> tuple[Message, int]:
    """Wait for the reply to the oldest message that has none yet: the reply, and how many raw bytes follow it.

    Raises:
        HoldfastError: the error that the other side replied with, or what `Stream.receive` raises.
    """
    try:
        reply = stream.receive()
        if reply is None:
            raise SmpUnavailable("the SMP closed the connection")
    except (SmpUnavailable, DeadlineExceeded, ProtocolError):
        stream.close()  # an answer that comes late must not be taken for the next one's
        raise
    if "error" in reply[0]:
        raise BY_NAME.get(str(reply[0]["error"]), HoldfastError)(str(reply[0].get("message")))
    return reply


class Conversation(Protocol):
    """What a listener does with one connection, in a thread of its own."""

    def answer(self, message: Message, payload: int, stream: Stream) -> tuple[Message, memoryview | None]:
        """The reply to one message; must consume its `payload` bytes. A `HoldfastError` becomes an error reply."""
        ...

    def ended(self) -> None:
        """The other side is gone."""
        ...


class Listener:
    """Accepts connections and runs a `Conversation` for each, one thread per connection."""

    def __init__(self, sock: socket.socket, converse: Callable[[socket.socket], Conversation]) -> None:
        self._sock = sock
        self._converse = converse
        self._live: dict[SocketStream, None] = {}
        """In the order in which they came, so that they always end in that order too."""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._episodes = Episodes(log)
        self._thread = threading.Thread(target=self._accept, name="accept", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The TCP port listened on."""
        return int(self._sock.getsockname()[1])

    def close(self) -> None:
        """Stop listening and end every connection."""
        with self._lock:
            self._closed.set()
            live = list(self._live)
        try:
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes `accept`; without it the socket would go on listening
        except OSError:
            pass
        self._thread.join()
        self._sock.close()
        for stream in live:
            stream.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, _ = self._sock.accept()
            except OSError as error:
                if not self._closed.is_set():
                    text = "a connection could not be accepted: %s"
                    self._episodes.begin("accept", text, error, level=logging.ERROR)
                self._closed.wait(ACCEPT_AGAIN_S)  # out of files or of memory, as a rule: others may free some
                continue
            self._episodes.end("accept", "connections are accepted again")
            threading.Thread(target=self._serve, args=(sock,), name="connection", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        stream = SocketStream(sock, deadline_s=None)
        with self._lock:
            self._live[stream] = None
            if self._closed.is_set():
                stream.close()
        conversation = None
        try:
            conversation = self._converse(sock)
            while (received := stream.receive()) is not None:
                reply: Message
                try:
                    reply, payload = conversation.answer(*received, stream)
                except HoldfastError as error:
                    reply, payload = {"error": type(error).__name__, "message": str(error)}, None
                stream.send(reply, payload)
        except (HoldfastError, OSError) as error:  # the socket may be closed under us at any moment
            if not self._closed.is_set():
                extra = about(error=type(error).__name__)
                self._episodes.begin("connection", "connection ended: %s", error, extra=extra)
        else:
            self._episodes.end("connection", "connections end well again")
        finally:
            with self._lock:
                self._live.pop(stream, None)
            stream.close()
            if conversation is not None:
                conversation.ended()


def bind_unix(path: Path) -> socket.socket:
    """A unix socket listening at `path`, for this user only.

    Raises:
        ConfigError: the path is too long for a unix socket.
    """
    if len(str(path).encode()) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"{path} is longer than the {MAX_SOCKET_PATH_BYTES} bytes a unix socket allows: "
            "choose a shorter HOLDFAST_ARENA or job id"
        )
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(path))
    path.chmod(0o600)
    sock.listen(128)
    return sock


def bind_tcp(host: str, port: int) -> socket.socket:
    """A TCP socket listening on `host`; port 0 takes a free one.

    Raises:
        ConfigError: the port is taken or the address is not this machine's.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.bind((host, port))
        sock.listen(128)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"the SMP cannot listen on {host}:{port}: {error.strerror}; choose another with --host or --bulk-port"
        ) from error
    return sock
