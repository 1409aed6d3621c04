"""Authenticates gRPC calls. An interceptor asks the SMP's gate before any request is read, so none can be forgotten.

With a token, each call carries a signature (`shared.handshake`) in its metadata, and so does its reply. gRPC verifies
certificates; this module checks the name in them.

gRPC accepts connections itself, and keeps those that only speak HTTP/2 for ever. So `Strangers` finds those whose peers
authenticate no call among the sockets of this process, and shuts them down; to gRPC that looks as if they had hung up.
"""

from __future__ import annotations

import ipaddress
import os
import resource
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc

from holdfast.smp_daemon.net.gate import PLACES, Gate
from holdfast.smp_daemon.shared.errors import ProtocolError
from holdfast.smp_daemon.shared.handshake import HANDSHAKE_DEADLINE_S, Signer, Verifier, WrongServer
from holdfast.smp_daemon.shared.limits import MAX_CONNECTIONS
from holdfast.smp_daemon.shared.messages import LONGEST_S
from holdfast.smp_daemon.shared.sources import Address
from holdfast.smp_daemon.shared.uids import SCARCE

CALL_KEY, SERVER_KEY, REPLY_KEY = "holdfast-call-bin", "holdfast-server-bin", "holdfast-reply-bin"
LONGEST_CALL_S = LONGEST_S + 3600.0
"""A call with a later deadline is refused as if it had none. Whoever asks for as long as a message may say waits a
little longer for the answer, and gRPC rounds a day to minutes."""

ANY = "0.0.0.0"
OWN_FILES = Path("/proc/self/fd")
SHARE_OF_FILES = 4
"""gRPC may take one of so many of the descriptors that this process may have. The others are for trainers, raw bytes
and files."""


class Guard(grpc.ServerInterceptor):  # type: ignore[type-arg]  # not so when it runs
    """Refuses calls that are not authenticated. gRPC calls it in many threads."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        token = gate.credentials.token
        self._verifier = Verifier(token, gate.job) if token else None
        self.listens_at = (ANY, 0)
        self._lock = threading.Lock()  # guards `_admitted`; no other lock is taken under it
        self._admitted: set[Address] = set()

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """The guarded handler of a method. Called by gRPC."""
        handler = continuation(details)
        if handler is None or handler.unary_unary is None:
            return None

        def guarded(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
            sign, peer = value(context.invocation_metadata(), CALL_KEY), address_of(context.peer())
            try:
                self._check(details.method, sign, context, peer)
                request = next(requests, b"")  # gRPC reads the request only now
                if self._verifier is not None:
                    self._verifier.verify_request(request, sign)
            except ProtocolError as error:
                if not isinstance(error, WrongServer):
                    self.gate.complain(peer[0] if peer else "a caller that has hung up", error)
                if self._verifier is not None:
                    context.set_trailing_metadata(((SERVER_KEY, self._verifier.name),))
                context.abort(grpc.StatusCode.UNAUTHENTICATED, f"not let in: {error}")
            if peer is not None:
                with self._lock:
                    self._admitted.add(peer)
            reply: bytes = handler.unary_unary(request, context)
            if self._verifier is not None:
                context.set_trailing_metadata(((REPLY_KEY, self._verifier.sign_reply(sign, reply)),))
            return reply

        return grpc.stream_unary_rpc_method_handler(guarded)

    def newly_admitted(self) -> set[Address]:
        """The addresses from which calls were let in since this was asked last."""
        with self._lock:
            peers, self._admitted = self._admitted, set()
        return peers

    def _check(self, method: str, sign: bytes, context: grpc.ServicerContext, peer: Address | None) -> None:
        if context.time_remaining() > LONGEST_CALL_S:
            raise ProtocolError("it has no deadline")
        if peer is None:
            raise ProtocolError("it has hung up")
        names: Any = context.auth_context().get("x509_subject_alternative_name", [])
        try:
            self.gate.check(peer, self.listens_at, [name.decode(errors="replace") for name in names])
        except OSError as error:
            raise ProtocolError(f"the user of the calling process could not be looked up: {error}") from error
        if self._verifier is not None:
            self._verifier.verify(method, sign)


def learn(signer: Signer, address: str, call: Any) -> bool:
    """Learn a server's name from its refusal of `call`. Returns whether it gave one, so that a retry makes sense."""
    if call.code() is not grpc.StatusCode.UNAUTHENTICATED:
        return False
    return signer.learn(address, value(call.trailing_metadata(), SERVER_KEY))


def value(metadata: Sequence[tuple[str, Any]] | None, key: str) -> bytes:
    """The binary value of `key`; empty if there is none."""
    for name, said in metadata or ():
        if name == key and isinstance(said, bytes):
            return said
    return b""


def ipv4(host: str, port: int) -> Address:
    """An address of a socket, as IPv4 if it is that mapped to IPv6: gRPC makes such sockets."""
    mapped = getattr(ipaddress.ip_address(host), "ipv4_mapped", None)
    return str(mapped or host), port


def address_of(peer: str) -> Address | None:
    """(host, port) of a peer that gRPC names like ``ipv4:127.0.0.1:4711``. None if gRPC names no address, as it does
    where the peer has hung up before it was asked for.
    """
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return ipv4(host.strip("[]"), int(port)) if host and port.isdecimal() else None


def most_connections() -> int:
    """How many connections the gRPC port takes at a time. gRPC closes others at once."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if limit == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, limit // SHARE_OF_FILES)


class Strangers:
    """The connections to one gRPC port that have not authenticated a call. Not thread-safe.

    One is ended if it is another user's, after `HANDSHAKE_DEADLINE_S`, or, the oldest first, if there are more than
    `PLACES`. A peer of the job that kept a connection unused for that long opens another with its next call.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._since: dict[int, float] = {}
        """When each stranger was first seen, by the inode of its socket. The oldest comes first."""
        self._others: set[int] = set()
        """Inodes of this process's other sockets, which are not looked at again."""

    def end(self) -> int:
        """End the connections that are due. Returns how many. Does not block.

        Raises:
            OSError: no descriptor is left to look with.
        """
        now_s, ended = time.monotonic(), 0
        here: set[int] = set()
        admitted, surplus = self._guard.newly_admitted(), set(list(self._since)[:-PLACES])
        for path in OWN_FILES.iterdir():
            sock = _copy(path, self._others, here)
            if sock is None:
                continue
            with sock:
                inode, peer = os.fstat(sock.fileno()).st_ino, self._caller(sock)
                if peer is None or peer in admitted:
                    self._others.add(inode)
                    continue
                since_s = self._since.setdefault(inode, now_s)
                if why := self._why(peer, now_s - since_s, inode in surplus):
                    self._guard.gate.complain(peer[0], why)
                    with suppress(OSError):  # it has hung up meanwhile
                        sock.shutdown(socket.SHUT_RDWR)
                    ended += 1
        self._others &= here
        self._since = {inode: since_s for inode, since_s in self._since.items() if inode in here - self._others}
        return ended

    def _caller(self, sock: socket.socket) -> Address | None:
        """Who has connected to the port through this socket; None if it is another kind of socket."""
        if sock.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        try:
            ours, peer = (ipv4(*address[:2]) for address in (sock.getsockname(), sock.getpeername()))
        except OSError:  # it listens, or has been closed
            return None
        host, port = self._guard.listens_at
        return peer if ours[1] == port and host in (ours[0], ANY) else None

    def _why(self, peer: Address, waited_s: float, is_surplus: bool) -> str:
        """Why a stranger is ended now; empty if it is not."""
        if self._guard.gate.is_of_another_user(peer, self._guard.listens_at, certainly=True):
            return "it is another user's process"
        if is_surplus:
            return f"it has authenticated no call, and {PLACES} more have come since"
        late = waited_s >= HANDSHAKE_DEADLINE_S
        return f"it has authenticated no call within {HANDSHAKE_DEADLINE_S:.0f} s" if late else ""


def _copy(path: Path, known: set[int], here: set[int]) -> socket.socket | None:
    """A descriptor of our own of the socket at `path` in `OWN_FILES`, whose inode is added to `here`. It goes on to
    mean this socket if another thread closes the original. None if `path` is no socket, or one that is known.
    """
    try:
        status = path.stat()
        if not stat.S_ISSOCK(status.st_mode):
            return None
        here.add(status.st_ino)
        if status.st_ino in known:
            return None
        copy = os.dup(int(path.name))
    except OSError as error:
        if error.errno in SCARCE:
            raise
        return None  # another thread has closed it
    try:
        return socket.socket(fileno=copy)
    except OSError:  # closed and opened again in between, as something else
        os.close(copy)
        return None
