"""Who may talk to an SMP: one `Gate` for its gRPC port and its ports for raw bytes.

With a token or certificates, every peer that has them is let in. Without, loopback lets in only processes of this user
or root, and other addresses (``--insecure``) let in every peer. `net.control` asks the gate about each gRPC call;
connections for raw bytes pass it before any message is read or memory is allocated for one.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from holdfast.smp_daemon.shared.credentials import Credentials
from holdfast.smp_daemon.shared.errors import ProtocolError
from holdfast.smp_daemon.shared.handshake import HANDSHAKE_DEADLINE_S, check_client
from holdfast.smp_daemon.shared.logs import Episodes, get_log
from holdfast.smp_daemon.shared.sources import Address
from holdfast.smp_daemon.shared.system import MACHINE, Threads
from holdfast.smp_daemon.shared.uids import SCARCE, uid_of

PLACES = 64
"""Number of connections that may be authenticated at a time. A new one replaces the oldest, so that silent peers cannot
keep others out."""

PLACES_OF_SOURCE = 16
"""How many of these may come from one address."""

ASK_AGAIN_S = 0.2
"""Pause before the kernel is asked again who connects, if this process is out of descriptors, in seconds."""
PENALTY_S = 1.0
"""How long a refused connection keeps its place before it is closed."""

MAX_DISCARDED_BYTES = 1 << 16
COMPLAIN_EVERY_S = 60.0
"""The log names a refused address once in so many seconds: whoever is refused tries again and again."""

log = get_log(__name__)


class Gate:
    """Decides who may talk to an SMP, and logs refusals. Thread-safe; each connection's own thread calls `admit`."""

    def __init__(self, credentials: Credentials, job: str, threads: Threads = MACHINE) -> None:
        self.credentials = credentials
        self.job = job
        self._threads = threads
        # Guards `_entering`, together with `_closed`, as in `SocketListener`. Threads of connections hold it briefly,
        # never during a handshake; no other lock is taken under it.
        self._lock = threads.Lock()
        self._entering: dict[socket.socket, str] = {}
        """The connections that are being authenticated, the oldest first, with the address that each comes from."""
        self._closed = threads.Event()
        self._refusals = Episodes(log, threads.monotonic, COMPLAIN_EVERY_S)

    def check(self, peer: Address, ours: Address, names: Collection[str] = ()) -> None:
        """Check what is known of a peer before it shows a token: whose process it is, and its certificate.

        Args:
            names: the DNS names in the certificate.

        Raises:
            ProtocolError: it is refused.
            OSError: no descriptor is left to find out.
        """
        tls = self.credentials.tls
        if tls is not None and tls.name not in names:
            raise ProtocolError(f"its certificate is not for {tls.name!r} but for {sorted(names)}")
        if self.is_of_another_user(peer, ours, certainly=False):
            raise ProtocolError("it is another user's process, or has closed it already")

    def is_of_another_user(self, peer: Address, ours: Address, *, certainly: bool) -> bool:
        """Whether a peer is another user's process where only this user's may come: listening on loopback alone does
        not keep other users of this machine out. Raises `OSError` as `check`.

        Args:
            certainly: if the kernel does not tell whose it is, it is not; else it is.
        """
        if self.credentials or not ipaddress.ip_address(peer[0]).is_loopback:
            return False
        uid = uid_of(peer, ours)
        return not certainly if uid is None else uid not in (os.getuid(), 0)

    def complain(self, source: str, why: object) -> bool:
        """Log that a peer at the address `source` is refused, at most once every `COMPLAIN_EVERY_S` for each address.
        Returns whether it was logged."""
        return self._refusals.begin(source, "a connection from %s was not let in: %s", source, why)

    def admit(self, sock: socket.socket) -> socket.socket | None:
        """The socket to use in place of `sock`; None if the connection was refused, and `sock` is closed.

        Blocks for at most twice `HANDSHAKE_DEADLINE_S` plus `PENALTY_S`. Of what a refused peer goes on to send, reads
        at most `MAX_DISCARDED_BYTES`. Raises `OSError` if the connection has ended already.
        """
        peer, ours = sock.getpeername()[:2], sock.getsockname()[:2]
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a peer that loses power does not hang up
        if not self.credentials:
            return self._of_this_user(sock, peer, ours)
        tls, token = self.credentials.tls, self.credentials.token
        if tls is not None:  # sends and reads nothing yet
            sock = tls.server.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        with self._place(peer[0], sock):
            try:
                sock.settimeout(HANDSHAKE_DEADLINE_S)
                if isinstance(sock, ssl.SSLSocket):
                    sock.do_handshake()
                    self.check(peer, ours, _names(sock))
                if token:
                    check_client(sock, token, self.job)
                return sock
            except (ProtocolError, EOFError, OSError) as error:
                self.complain(peer[0], error)
                _punish(sock)
                return None

    def close(self) -> None:
        """End every connection that is being authenticated."""
        with self._lock:
            self._closed.set()
            for sock in self._entering:
                _end(sock)

    def _of_this_user(self, sock: socket.socket, peer: Address, ours: Address) -> socket.socket | None:
        limit = self._threads.monotonic() + HANDSHAKE_DEADLINE_S
        while True:
            try:
                self.check(peer, ours)
                return sock
            except ProtocolError as error:
                self.complain(peer[0], error)
            except OSError as error:
                if error.errno in SCARCE and self._threads.monotonic() < limit and not self._closed.wait(ASK_AGAIN_S):
                    continue
                log.debug("a connection ended at once: %s", error)
            sock.close()
            return None

    @contextmanager
    def _place(self, source: str, sock: socket.socket) -> Iterator[None]:
        with self._lock:
            mine = [each for each, of in self._entering.items() if of == source]
            too_many = max(0, len(mine) - PLACES_OF_SOURCE + 1), max(0, len(self._entering) - PLACES + 1)
            for oldest in dict.fromkeys((*mine[: too_many[0]], *list(self._entering)[: too_many[1]])):
                del self._entering[oldest]
                _end(oldest)
            self._entering[sock] = source
            if self._closed.is_set():
                _end(sock)
        try:
            yield
        finally:
            with self._lock:
                self._entering.pop(sock, None)


def _names(sock: ssl.SSLSocket) -> list[str]:
    alternatives: Any = (sock.getpeercert() or {}).get("subjectAltName", ())
    return [text for kind, text in alternatives if kind == "DNS"]


def _punish(sock: socket.socket) -> None:
    """Close a connection after a delay that slows down guessing. Until then read on: whoever closes a connection that
    has bytes unread resets it, and the peer may lose what it was sent."""
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


def _end(sock: socket.socket) -> None:
    with suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
