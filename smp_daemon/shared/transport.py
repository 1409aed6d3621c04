"""Messages over sockets: a JSON object and, if any, raw bytes. Listening is `smp_daemon.net.listener`.

Frame: magic ``HFST``, length of the JSON (4 bytes), length of the raw bytes (8 bytes), both little endian; then
the JSON; then the bytes, straight from and into the caller's memory. A reply that carries ``error`` becomes an
exception again on the asking side.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec
import xxhash

from holdfast.smp_daemon.shared.credentials import Credentials
from holdfast.smp_daemon.shared.errors import (
    BY_NAME,
    DeadlineExceeded,
    HoldfastError,
    ProtocolError,
    SmpUnavailable,
)
from holdfast.smp_daemon.shared.handshake import MAGIC as TOKEN_MAGIC
from holdfast.smp_daemon.shared.handshake import prove_to_server
from holdfast.smp_daemon.shared.limits import (
    CALL_DEADLINE_S,
    MAX_MESSAGE_BYTES,
    MAX_UNIT_BYTES,
)
from holdfast.smp_daemon.shared.plain import pack, unpack
from holdfast.smp_daemon.shared.receive import PIECE_BYTES, is_compiled, receive
from holdfast.smp_daemon.shared.system import MACHINE, System
from holdfast.smp_daemon.shared.uids import peer_of

Message = dict[str, Any]
"""As it comes; what it must be, `messages` says."""

Outbound = msgspec.Struct | Message
_FRAME = struct.Struct("<4sIQ")
_MAGIC = b"HFST"
FIRST_PIECE_BYTES = 1 << 16
ASKED_EVERY_S = 1.0
CUT_OFF = "the connection ended in the middle of a message"


class MessageStream(Protocol):
    """One ordered two-way connection. Not thread-safe."""

    def send(self, message: Outbound, payload: memoryview | None = None) -> None:
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

    def receive_into(self, payload: memoryview) -> int:
        """Fill `payload` with the raw bytes that follow the last message; their xxh3-64. Raises as `receive`."""
        ...

    def set_deadline(self, seconds: float | None) -> None:
        """How long each further call may wait for the network."""
        ...

    def close(self) -> None:
        """End the connection; harmless if it is over."""
        ...


Patience = Callable[[float], None]
"""Called once a second with how long a call has waited for the network, in seconds. What it raises ends the wait."""


class SocketStream:
    """`MessageStream` over a connected TCP or unix socket.

    Attributes:
        patience: of calls that send, or wait for a message; None: they wait until the deadline. Not asked over TLS.
    """

    def __init__(
        self, sock: socket.socket, deadline_s: float | None = CALL_DEADLINE_S, system: System = MACHINE
    ) -> None:
        self._sock = sock
        self._monotonic = system.monotonic
        self._use = _Use(sock, system)
        self._deadline_s = deadline_s
        self.patience: Patience | None = None
        self._is_plain = type(sock) is socket.socket  # the kernel's alone: not TLS's, nor a simulation's
        sock.settimeout(deadline_s)

    def send(self, message: Outbound, payload: memoryview | None = None) -> None:
        data = frame(message, payload.nbytes if payload else 0)
        with self._use:
            if not payload:
                self._send_all(data)
                return
            self._send_all(data, socket.MSG_MORE)  # or the other side is woken for these few bytes
            self._send_all(payload)

    def _send_all(self, data: bytes | memoryview, flags: int = 0) -> None:
        if not self._is_plain:
            self._sock.sendall(data)
        elif self.patience is None:
            self._sock.sendall(data, flags)
        else:
            left = memoryview(data)
            while left:
                self._await(select.POLLOUT)
                with suppress(BlockingIOError):
                    left = left[self._sock.send(left, flags | socket.MSG_DONTWAIT) :]

    def _await(self, event: int) -> None:
        """Until the socket is ready, as patiently as `patience` says. Raises `TimeoutError` after the deadline."""
        if self.patience is None or not self._is_plain:
            return
        ready, began = select.poll(), self._monotonic()
        ready.register(self._sock, event)
        while not ready.poll(ASKED_EVERY_S * 1e3):
            waited_s = self._monotonic() - began
            if self._deadline_s is not None and waited_s > self._deadline_s:
                raise TimeoutError
            self.patience(waited_s)

    def receive(self) -> tuple[Message, int] | None:
        head = bytearray(_FRAME.size)
        with self._use:
            self._await(select.POLLIN)
            first = self._sock.recv_into(head)
            if first == 0:
                return None
            if self._deadline_s is None:  # a message may be waited for without end, the rest of one may not
                self._sock.settimeout(CALL_DEADLINE_S)
            if first < len(head):
                self._fill(memoryview(head)[first:])
            length, payload = _lengths(head)
            body = bytearray()
            while len(body) < length:  # takes no more memory than twice what has come
                start = len(body)
                body += bytes(min(length - start, max(start, FIRST_PIECE_BYTES)))
                self._fill(memoryview(body)[start:])
            if self._deadline_s is None:
                self._sock.settimeout(None)
        return unpack(dict[str, Any], body, "a JSON object, as messages are"), payload

    def receive_into(self, payload: memoryview) -> int:
        timeout_s = self._deadline_s or CALL_DEADLINE_S
        with self._use:
            if self._is_plain and is_compiled():
                count, digest = receive(self._sock, payload, timeout_s)
                if count < payload.nbytes:
                    raise SmpUnavailable(CUT_OFF)
                return digest
            limit, hasher = self._monotonic() + timeout_s, xxhash.xxh3_64()
            for start in range(0, payload.nbytes, PIECE_BYTES):
                piece = payload[start : start + PIECE_BYTES]
                self._fill(piece, limit)
                hasher.update(piece)
            return hasher.intdigest()

    def _fill(self, buffer: memoryview, limit: float | None = None) -> None:
        limit = limit or self._monotonic() + (self._deadline_s or CALL_DEADLINE_S)
        while buffer:
            count = self._sock.recv_into(buffer)
            if count == 0:
                raise SmpUnavailable(CUT_OFF)
            buffer = buffer[count:]
            if buffer and self._monotonic() > limit:  # it comes byte by byte, to keep us waiting
                raise TimeoutError

    def set_deadline(self, seconds: float | None) -> None:
        self._deadline_s = seconds
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

    def __init__(self, sock: socket.socket, system: System) -> None:
        self.over = False
        self._sock = sock
        self._shutdown = system.socket.shutdown
        self._calls = 0
        self._lock = system.Lock()  # guards the count of calls and `over`; never held while a call blocks

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
                    self._shutdown(self._sock, socket.SHUT_RDWR)  # TLS's own would pull it from under a call
                self._release()

    def _release(self) -> None:
        if not self._calls:
            self._sock.close()


def frame(message: Outbound, payload: int = 0) -> bytes:
    """A message as it stands on the wire, before its `payload` raw bytes. Raises `ProtocolError` if it is too long."""
    body = pack(message)
    return _FRAME.pack(_MAGIC, len(body), payload) + body


def _lengths(head: bytearray) -> tuple[int, int]:
    """Of the JSON and of the raw bytes, checked. Raises `ProtocolError`."""
    magic, length, payload = _FRAME.unpack(head)
    if magic == TOKEN_MAGIC:
        raise ProtocolError(
            "the other side offers a token, and none is asked for here: set HOLDFAST_TOKEN_FILE on both"
        )
    if magic != _MAGIC:
        raise ProtocolError("this is not a holdfast message")
    if length > MAX_MESSAGE_BYTES or payload > MAX_UNIT_BYTES:
        raise ProtocolError(f"a message of {length} + {payload} bytes is above the limits")
    return length, payload


def _mapped(error: OSError) -> HoldfastError:
    """What a socket raised, as our exception."""
    if isinstance(error, TimeoutError):
        return DeadlineExceeded("the other side did not answer in time")
    return SmpUnavailable(f"the connection broke: {error}")


def connect(
    address: tuple[str, int] | Path,
    deadline_s: float = CALL_DEADLINE_S,
    job: str = "",
    system: System = MACHINE,
    source: str = "",
) -> SocketStream:
    """Connect to a TCP address or a unix socket. Over TCP both sides show their credentials, if this process has any.

    Args:
        job: whose SMP is expected there.
        source: address of this machine to connect from; empty: whichever the system chooses.

    Raises:
        SmpUnavailable: nobody listens there, or somebody who is not of this job or, on a unix socket, of this user.
        DeadlineExceeded: no answer within `deadline_s`.
    """
    unix = not isinstance(address, tuple)
    target = address if isinstance(address, tuple) else str(address)
    sock = system.socket(socket.AF_UNIX if unix else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.settimeout(deadline_s)
        try:
            if source:
                sock.bind((source, 0))
            sock.connect(target)
        except OSError as error:
            raise _mapped(error) from error
        except (OverflowError, TypeError, ValueError) as error:
            raise SmpUnavailable(f"{target!r} is no address: {error}") from error
        if unix:
            _check_server(sock, target)
            return SocketStream(sock, deadline_s, system)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            sock = _shown_credentials(sock, job, system.credentials())
        except OSError as error:
            raise _mapped(error) from error
        return SocketStream(sock, deadline_s, system)
    except BaseException:
        sock.close()
        raise


def _shown_credentials(sock: socket.socket, job: str, credentials: Credentials) -> socket.socket:
    """The connection, once both sides know each other; `sock` itself if this process has no credentials."""
    try:
        if credentials.tls is not None:
            sock = credentials.tls.client.wrap_socket(sock, server_hostname=credentials.tls.name)
        if credentials.token:
            prove_to_server(sock, credentials.token, job)
        return sock
    except BaseException:
        sock.close()
        raise


def _check_server(sock: socket.socket, path: object) -> None:
    pid, uid = peer_of(sock)
    if uid not in (os.getuid(), 0):
        raise SmpUnavailable(f"{path} is served by process {pid} of user {uid}, which may be anybody's: remove it")


def call(stream: MessageStream, message: Outbound, payload: memoryview | None = None) -> tuple[Message, int]:
    """Send a message and wait for its reply: the reply, and how many raw bytes follow it.

    Whatever is raised before the reply is here, by the handler of a signal for example, ends the connection: the reply
    would be taken for that of the next call.

    Raises:
        HoldfastError: the error that the other side replied with, or what `MessageStream.receive` raises.
    """
    outstanding = True
    try:
        stream.send(message, payload)
        reply = _next_reply(stream)
        outstanding = False
    except ProtocolError:
        outstanding = False  # the message is too long, and nothing of it was sent; or `_next_reply` has seen to it
        raise
    finally:
        if outstanding:
            stream.close()
    checked_reply(reply[0])
    return reply


def receive_reply(stream: MessageStream) -> tuple[Message, int]:
    """Wait for the reply to the oldest message that has none yet: the reply, and how many raw bytes follow it.

    Whatever is raised before it is here ends the connection; see `call`.

    Raises:
        HoldfastError: the error that the other side replied with, or what `MessageStream.receive` raises.
    """
    reply = _next_reply(stream)
    checked_reply(reply[0])
    return reply


def _next_reply(stream: MessageStream) -> tuple[Message, int]:
    try:
        reply = stream.receive()
        if reply is None:
            raise SmpUnavailable("the SMP closed the connection")
        return reply
    except BaseException:
        stream.close()
        raise


def checked_reply(reply: Message) -> Message:
    """The same. Raises the error that it carries, if it does."""
    if "error" in reply:
        raise BY_NAME.get(str(reply["error"]), HoldfastError)(str(reply.get("message")))
    return reply
