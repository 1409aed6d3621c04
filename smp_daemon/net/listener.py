"""Listening sockets: each connection has a thread, which runs a `Conversation`."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from holdfast.smp_daemon.shared.errors import ConfigError, HoldfastError
from holdfast.smp_daemon.shared.limits import MAX_CONNECTIONS, MAX_SOCKET_PATH_BYTES
from holdfast.smp_daemon.shared.logs import Episodes, about, get_log
from holdfast.smp_daemon.shared.settings import HOST
from holdfast.smp_daemon.shared.system import MACHINE, Network
from holdfast.smp_daemon.shared.transport import Message, Outbound, SocketStream

ACCEPT_AGAIN_S = 0.5
"""Pause before another `accept` if one has failed, in seconds: a loop without one would take a whole core."""

log = get_log(__name__)


class Conversation(Protocol):
    """What a listener does with one connection, in the connection's own thread."""

    def answer(self, message: Message, payload: int, stream: SocketStream) -> tuple[Outbound, memoryview | None]:
        """The reply to one message; must consume its `payload` bytes. A `HoldfastError` becomes an error reply."""
        ...

    def ended(self) -> None:
        """The connection has ended."""
        ...


class SocketListener:
    """Accepts connections and runs a `Conversation` for each, one thread per connection, `MAX_CONNECTIONS` at most."""

    def __init__(
        self,
        sock: socket.socket,
        converse: Callable[[socket.socket], Conversation],
        admit: Callable[[socket.socket], socket.socket | None] | None = None,
        network: Network = MACHINE,
    ) -> None:
        """`admit`: see `Gate.admit`; None: all connections are let in. Whoever owns the gate closes it."""
        self._network = network
        self._sock = sock
        self._converse = converse
        self._gate = admit
        self._live: dict[SocketStream, None] = {}
        """In the order of arrival, so that `close` ends them in a fixed order."""
        # Guards `_live` together with `_closed`: a connection is either in `_live` when `close` looks, or sees
        # `_closed`. The thread of each connection takes it at its start and end. Under it, only the lock of a stream is
        # taken.
        self._lock = network.Lock()
        self._closed = network.Event()
        self._episodes = Episodes(log)
        self._thread = self._network.Thread(target=self._accept, name="accept", daemon=True)
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
                self._closed.wait(ACCEPT_AGAIN_S)  # usually out of files or memory, which others may free
                continue
            self._episodes.end("accept", "connections are accepted again")
            if len(self._live) >= MAX_CONNECTIONS:
                text = "a connection was closed: there are %d already"
                self._episodes.begin("full", text, MAX_CONNECTIONS, level=logging.ERROR)
                sock.close()
                continue
            self._episodes.end("full", "there is room for connections again")
            self._network.Thread(target=self._admit, args=(sock,), name="connection", daemon=True).start()

    def _admit(self, sock: socket.socket) -> None:
        try:
            admitted = sock if self._gate is None else self._gate(sock)
        except OSError:  # the connection has ended already
            sock.close()
            return
        if admitted is not None:
            self._serve(admitted)

    def _serve(self, sock: socket.socket) -> None:
        stream = SocketStream(sock, None, self._network)
        with self._lock:
            self._live[stream] = None
            if self._closed.is_set():
                stream.close()
        conversation = None
        try:
            conversation = self._converse(sock)
            while (received := stream.receive()) is not None:
                reply: Outbound
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


def bind_unix(path: Path, network: Network = MACHINE) -> socket.socket:
    """A unix socket listening at `path`, for this user only.

    Raises:
        ConfigError: the path is too long for a unix socket.
    """
    if len(os.fsencode(str(path))) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"{path} is longer than the {MAX_SOCKET_PATH_BYTES} bytes a unix socket allows: "
            "choose a shorter HOLDFAST_ARENA or job id"
        )
    path.unlink(missing_ok=True)
    sock = network.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(path))
    path.chmod(0o600)
    sock.listen(128)
    return sock


def bind_tcp(host: str, port: int, network: Network = MACHINE) -> socket.socket:
    """A TCP socket listening on `host`; port 0 takes a free one.

    Raises:
        ConfigError: the port is taken or the address is not this machine's.
    """
    sock = network.socket(socket.AF_INET, socket.SOCK_STREAM)
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


def check_own(hosts: Sequence[str], network: Network) -> None:
    """Raises `ConfigError` if any of these addresses does not belong to this machine."""
    for host in hosts:
        sock = network.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.bind((host, 0))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}, from {HOST.called} ({error.strerror}): use addresses of this machine, which "
                "`ip -brief addr` lists"
            ) from error
        finally:
            sock.close()
