"""Messages over sockets: a JSON object and, optionally, raw bytes. `smp_daemon.service` listens for connections.

Frame: magic ``HFST``, length of the JSON (4 bytes), length of the raw bytes (8 bytes), both little endian; then
the JSON; then the raw bytes, sent from and received into the caller's memory. A reply that carries ``error`` becomes an
exception again on the asking side.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import os
import select
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from holdfast.smp_daemon.shared import xxh3
from holdfast.smp_daemon.shared.errors import (
    BY_NAME,
    DeadlineExceeded,
    HoldfastError,
    ProtocolError,
    SmpUnavailable,
)
from holdfast.smp_daemon.shared.handshake import MAGIC as TOKEN_MAGIC
from holdfast.smp_daemon.shared.handshake import show_credentials
from holdfast.smp_daemon.shared.limits import (
    CALL_DEADLINE_S,
    MAX_MESSAGE_BYTES,
    MAX_UNIT_BYTES,
)
from holdfast.smp_daemon.shared.plain import pack, unpack
from holdfast.smp_daemon.shared.system import MACHINE, Network
from holdfast.smp_daemon.shared.uids import peer_of

Message = dict[str, Any]
"""A message as it arrives; `messages` has its types."""

Outbound = msgspec.Struct | Message
_FRAME = struct.Struct("<4sIQ")
_MAGIC = b"HFST"
FIRST_PIECE_BYTES = 1 << 16
ASKED_EVERY_S = 1.0
"""How often `patience` is asked during a wait, in seconds."""

CUT_OFF = "the connection ended in the middle of a message"
WaitCallback = Callable[[float], None]
"""Called once a second with the seconds that a call has waited for the network. An exception that it raises ends the
wait."""

PIECE_BYTES = 256 << 10
"""Bytes digested at a time: fewer than a core's own cache holds."""


def is_compiled() -> bool:
    """Whether `receive` is available."""
    return _library() is not None


def receive(sock: socket.socket, payload: memoryview, timeout_s: float) -> tuple[int, int]:
    """Fill `payload` from a kernel socket. Blocks; other Python threads keep running.

    Returns:
        How many bytes arrived, and their xxh3-64. Fewer than `payload` holds if the other side closed the connection.

    Raises:
        OSError: the connection broke; `TimeoutError` if not all bytes arrived within `timeout_s`.
    """
    library = _library()
    assert library is not None
    function, hash_functions = library
    digest = ctypes.c_uint64()
    target = ctypes.c_char.from_buffer(payload) if payload.nbytes else None
    place = ctypes.addressof(target) if target is not None else None
    count = function(
        sock.fileno(), place, payload.nbytes, PIECE_BYTES, int(timeout_s * 1e3), hash_functions, ctypes.byref(digest)
    )
    if count < 0:
        raise TimeoutError if count == -errno.ETIMEDOUT else OSError(-count, os.strerror(-count))
    return count, digest.value


@cache
def _library() -> tuple[Any, Any] | None:
    """The compiled function, and the table of xxHash functions that it takes; None if either is missing."""
    found = importlib.util.find_spec("holdfast.smp_daemon.shared._receive")
    functions = xxh3.functions()
    if found is None or found.origin is None or functions is None:
        return None
    function = ctypes.CDLL(found.origin).holdfast_receive
    function.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_uint64),
    ]
    function.restype = ctypes.c_longlong
    return function, functions


class SocketStream:
    """One ordered two-way connection, over TCP or a unix socket. Not thread-safe, except `close`.

    Attributes:
        patience: called while a call sends or waits for a message; None: the deadline alone decides. Not called over
            TLS.
        goes_on: called when no message has begun to arrive by the deadline: whether to wait as long once more. None:
            never.
    """

    def __init__(
        self, sock: socket.socket, deadline_s: float | None = CALL_DEADLINE_S, network: Network = MACHINE
    ) -> None:
        self._sock = sock
        self._monotonic = network.monotonic
        self._use = _Use(sock, network)
        self._deadline_s = deadline_s
        self.patience: WaitCallback | None = None
        self.goes_on: Callable[[], bool] | None = None
        self._is_plain = type(sock) is socket.socket  # neither TLS nor a simulation's
        sock.settimeout(deadline_s)

    def send(self, message: Outbound, payload: memoryview | None = None) -> None:
        """Send a message and, if given, raw bytes. Blocks until the network has taken them; raises as `receive`."""
        data = frame(message, payload.nbytes if payload else 0)
        with self._use:
            if not payload:
                self._send_all(data)
                return
            self._send_all(data, socket.MSG_MORE)  # else these few bytes wake the other side
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
        """Wait until the socket is ready, and call `patience` meanwhile. Raises `TimeoutError` after the deadline."""
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
        """The next message and how many raw bytes follow it (0 if none); None if the other side is gone.

        Raises:
            DeadlineExceeded: nothing came in time.
            ProtocolError: the data is not a message, or exceeds the limits.
            SmpUnavailable: the connection broke in the middle.
        """
        head = bytearray(_FRAME.size)
        with self._use:
            self._await(select.POLLIN)
            first = self._begin(head)
            if first == 0:
                return None
            if self._deadline_s is None:  # the wait for a message has no limit, but the wait for its rest has
                self._sock.settimeout(CALL_DEADLINE_S)
            if first < len(head) and not head.startswith(TOKEN_MAGIC):  # whoever offers a token says no more for now
                self._fill(memoryview(head)[first:])
            length, payload = _lengths(head)
            body = bytearray()
            while len(body) < length:  # allocates at most twice what has arrived
                start = len(body)
                body += bytes(min(length - start, max(start, FIRST_PIECE_BYTES)))
                self._fill(memoryview(body)[start:])
            if self._deadline_s is None:
                self._sock.settimeout(None)
        return unpack(dict[str, Any], body, "a JSON object, as messages are"), payload

    def _begin(self, head: bytearray) -> int:
        while True:
            try:
                return self._sock.recv_into(head)
            except TimeoutError:
                if self.goes_on is None or not self.goes_on():
                    raise

    def receive_into(self, payload: memoryview) -> int:
        """Fill `payload` with the raw bytes after the last message. Returns their xxh3-64; raises as `receive`."""
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
            if buffer and self._monotonic() > limit:  # the sender trickles bytes to keep us waiting
                raise TimeoutError

    def set_deadline(self, seconds: float | None) -> None:
        """Set how long each further call may wait for the network. None: a call may wait for a message for ever."""
        self._deadline_s = seconds
        with self._use:
            self._sock.settimeout(seconds)

    def close(self) -> None:
        """Close the connection, from any thread; harmless if it is closed already."""
        self._use.end()

    @property
    def closed(self) -> bool:
        """Whether this side has closed the connection."""
        return self._use.over


class _Use:
    """Counts the calls in progress on a socket, which another thread may end.

    `end` wakes these calls at once, and the last of them closes the descriptor. If the descriptor were closed earlier,
    its number could belong to another file by the time a thread on its way into the kernel waits on it, and that thread
    would wait for ever.
    """

    def __init__(self, sock: socket.socket, network: Network) -> None:
        self.over = False
        self._sock = sock
        self._shutdown = network.shutdown
        self._calls = 0
        self._lock = network.Lock()  # guards the count of calls and `over`; never held while a call blocks

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
                with suppress(OSError):  # the other side has closed it already
                    self._shutdown(self._sock, socket.SHUT_RDWR)  # `SSLSocket.shutdown` would drop TLS during a call
                self._release()

    def _release(self) -> None:
        if not self._calls:
            self._sock.close()


def frame(message: Outbound, payload: int = 0) -> bytes:
    """A message encoded for the wire, without its `payload` raw bytes. Raises `ProtocolError` if it is too long."""
    body = pack(message)
    return _FRAME.pack(_MAGIC, len(body), payload) + body


def _lengths(head: bytearray) -> tuple[int, int]:
    magic, length, payload = _FRAME.unpack(head)
    if magic == TOKEN_MAGIC:
        raise SmpUnavailable("the other side has a token, but this side has none: set HOLDFAST_TOKEN_FILE on both")
    if magic != _MAGIC:
        raise ProtocolError("this is not a holdfast message")
    if length > MAX_MESSAGE_BYTES or payload > MAX_UNIT_BYTES:
        raise ProtocolError(f"a message of {length} + {payload} bytes is above the limits")
    return length, payload


def _mapped(error: OSError) -> HoldfastError:
    if isinstance(error, TimeoutError):
        return DeadlineExceeded("the other side did not answer in time")
    return SmpUnavailable(f"the connection broke: {error}")


def connect(
    address: tuple[str, int] | Path,
    deadline_s: float = CALL_DEADLINE_S,
    job: str = "",
    network: Network = MACHINE,
    source: str = "",
) -> SocketStream:
    """Connect to a TCP address or a unix socket. Over TCP both sides show their credentials, if this process has any.

    Args:
        job: the job of the SMP that is expected there.
        source: local address to connect from; empty: the system chooses.

    Raises:
        SmpUnavailable: nothing listens there, the other side has not this job's credentials, or the process behind a
            unix socket is another user's.
        DeadlineExceeded: no answer within `deadline_s`.
    """
    unix = not isinstance(address, tuple)
    target = address if isinstance(address, tuple) else str(address)
    sock = network.socket(socket.AF_UNIX if unix else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.settimeout(deadline_s)
        try:
            if source:
                sock.bind((source, 0))
            sock.connect(target)
        except OSError as error:
            raise _mapped(error) from error
        except (OverflowError, TypeError, ValueError) as error:
            raise SmpUnavailable(f"{target!r} is not an address: {error}") from error
        if unix:
            _check_server(sock, target)
            return SocketStream(sock, deadline_s, network)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            sock = show_credentials(sock, network.credentials(), job)
        except OSError as error:
            raise _mapped(error) from error
        return SocketStream(sock, deadline_s, network)
    except BaseException:
        sock.close()
        raise


def _check_server(sock: socket.socket, path: object) -> None:
    pid, uid = peer_of(sock)
    if uid not in (os.getuid(), 0):
        raise SmpUnavailable(
            f"{path} is served by process {pid} of user {uid}, not by this user's SMP: remove the socket"
        )


def call(stream: SocketStream, message: Outbound, payload: memoryview | None = None) -> tuple[Message, int]:
    """Send a message and wait for its reply. Returns the reply and how many raw bytes follow it.

    An exception before the reply has arrived, from a signal handler for example, closes the connection: the next call
    would take this reply for its own. Only a message that is too long leaves the connection open.

    Raises:
        HoldfastError: the error that the other side replied with, or what `SocketStream.receive` raises.
    """
    try:
        stream.send(message, payload)
        reply = _next_reply(stream)
    except ProtocolError:
        raise  # the message is too long and was not sent, or `_next_reply` has closed the connection
    except BaseException:
        stream.close()
        raise
    checked_reply(reply[0])
    return reply


def receive_reply(stream: SocketStream) -> tuple[Message, int]:
    """Wait for the reply to the oldest unanswered message. Returns the reply and how many raw bytes follow it.

    An exception before it has arrived closes the connection; see `call`.

    Raises:
        HoldfastError: the error that the other side replied with, or what `SocketStream.receive` raises.
    """
    reply = _next_reply(stream)
    checked_reply(reply[0])
    return reply


def _next_reply(stream: SocketStream) -> tuple[Message, int]:
    try:
        reply = stream.receive()
        if reply is None:
            raise SmpUnavailable("the SMP closed the connection")
        return reply
    except BaseException:
        stream.close()
        raise


def checked_reply(reply: Message) -> Message:
    """Return `reply`, or raise the error that it carries."""
    if "error" in reply:
        raise BY_NAME.get(str(reply["error"]), HoldfastError)(str(reply.get("message")))
    return reply
