"""Authenticates TCP connections to an SMP before any message is read or memory is allocated for one.

With a token or certificates, every peer that has them is admitted. Without, loopback admits only processes of this user
or root, and other addresses (``--insecure``) admit every peer. At most `PLACES` connections are authenticated at a
time, and `PLACES_OF_SOURCE` from one address. A new one replaces the oldest, so silent peers cannot keep others out.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from holdfast.smp_daemon.shared.credentials import Credentials
from holdfast.smp_daemon.shared.errors import ProtocolError
from holdfast.smp_daemon.shared.handshake import HANDSHAKE_DEADLINE_S, NoToken, check_client
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.system import MACHINE, System
from holdfast.smp_daemon.shared.transport import frame
from holdfast.smp_daemon.shared.uids import SCARCE

PLACES = 64
PLACES_OF_SOURCE = 16
ASK_AGAIN_S = 0.2
PENALTY_S = 1.0
"""How long a refused connection keeps its place before it is closed."""

MAX_DISCARDED_BYTES = 1 << 16
COMPLAIN_EVERY_S = 60.0
MAX_SOURCES = 1024

log = get_log(__name__)


class Complaints:
    """Logs refused connections: per address the first, then at most one every `COMPLAIN_EVERY_S`. Thread-safe."""

    def __init__(self, system: System = MACHINE) -> None:
        self._system = system
        self._lock = system.Lock()  # guards `_said`; no other lock is taken under it
        self._said: dict[str, tuple[float, int]] = {}

    def note(self, source: str, why: object) -> bool:
        """Count a refusal, and log it if one is due. Returns whether it was logged."""
        now_s = self._system.monotonic()
        with self._lock:
            at, count = self._said.pop(source, (float("-inf"), 0))
            due = now_s - at >= COMPLAIN_EVERY_S
            self._said[source] = (now_s, 0) if due else (at, count + 1)
            while len(self._said) > MAX_SOURCES:
                del self._said[next(iter(self._said))]
        if due:
            more = f" ({count} more since the last time)" if count else ""
            log.warning("a connection from %s was not let in: %s%s", source, why, more)
        return due


class Authenticator:
    """Authenticates connections. Each connection's own thread calls `enter`."""

    def __init__(self, credentials: Credentials, job: str, system: System = MACHINE) -> None:
        self._credentials = credentials
        self._job = job
        self._system = system
        # Guards `_entering`, together with `_closed`, as in `SocketListener`. Threads of connections hold it briefly,
        # never during a handshake; no other lock is taken under it.
        self._lock = system.Lock()
        self._entering: dict[int, tuple[str, socket.socket]] = {}
        self._closed = system.Event()
        self._complaints = Complaints(system)

    def enter(self, sock: socket.socket) -> socket.socket | None:
        """The socket to use in place of `sock`; None if the connection was refused, and `sock` is closed.

        Blocks for at most twice `HANDSHAKE_DEADLINE_S` plus `PENALTY_S`. Of what a refused peer goes on to send, reads
        at most `MAX_DISCARDED_BYTES`.
        """
        if not self._credentials:
            return self._of_this_user(sock)
        source = str(sock.getpeername()[0])
        with self._place(source, sock) as number:
            try:
                sock.settimeout(HANDSHAKE_DEADLINE_S)
                tls = self._credentials.tls
                if tls is not None:
                    secured = tls.server.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                    with self._lock:
                        self._entering[number] = source, secured
                    sock = secured
                    secured.do_handshake()
                    check_name(secured.getpeercert(), tls.name)
                if self._credentials.token:
                    check_client(sock, self._credentials.token, self._job)
                return sock
            except (ProtocolError, EOFError, OSError) as error:
                self._complaints.note(source, error)
                if isinstance(error, NoToken):
                    _say(
                        sock,
                        "SmpUnavailable",
                        "this SMP requires a token: set HOLDFAST_TOKEN_FILE to the token file of the job",
                    )
                _punish(sock)
                return None

    def close(self) -> None:
        """End every connection that is being authenticated."""
        with self._lock:
            self._closed.set()
            for _, sock in self._entering.values():
                _end(sock)

    def _of_this_user(self, sock: socket.socket) -> socket.socket | None:
        limit = self._system.monotonic() + HANDSHAKE_DEADLINE_S
        while True:
            try:
                if self._system.is_of_this_user(sock):
                    return sock
                self._complaints.note(str(sock.getpeername()[0]), "it is another user's process")
            except OSError as error:
                if error.errno in SCARCE and self._system.monotonic() < limit and not self._closed.wait(ASK_AGAIN_S):
                    continue
                log.debug("a connection ended at once: %s", error)
            sock.close()
            return None

    @contextmanager
    def _place(self, source: str, sock: socket.socket) -> Iterator[int]:
        number = id(sock)
        with self._lock:
            mine = [each for each, (of, _) in self._entering.items() if of == source]
            too_many = max(0, len(mine) - PLACES_OF_SOURCE + 1), max(0, len(self._entering) - PLACES + 1)
            for oldest in [*mine[: too_many[0]], *list(self._entering)[: too_many[1]]]:
                _end(self._entering.pop(oldest, ("", sock))[1])
            self._entering[number] = source, sock
            if self._closed.is_set():
                _end(sock)
        try:
            yield number
        finally:
            with self._lock:
                self._entering.pop(number, None)


def _punish(sock: socket.socket) -> None:
    """Close a connection after a delay that slows down guessing. Until then read on, so the peer gets our answer."""
    limit, left = time.monotonic() + PENALTY_S, MAX_DISCARDED_BYTES
    with suppress(OSError):
        while left > 0 and (wait_s := limit - time.monotonic()) > 0:
            sock.settimeout(wait_s)
            got = len(socket.socket.recv(sock, min(left, 4096)))  # raw bytes, past TLS
            left -= got
            if not got:
                break
    with suppress(OSError):
        sock.close()


def _say(sock: socket.socket, error: str, message: str) -> None:
    with suppress(OSError):
        sock.sendall(frame({"error": error, "message": message}))


def check_name(certificate: object, name: str) -> None:
    """Raises `ProtocolError` unless `certificate`, from `ssl.SSLSocket.getpeercert`, carries the DNS name `name`."""
    names = certificate.get("subjectAltName", ()) if isinstance(certificate, dict) else ()
    if ("DNS", name) not in names:
        raise ProtocolError(f"its certificate is not for {name!r} but for {[text for _, text in names]}")


def _end(sock: socket.socket) -> None:
    with suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
