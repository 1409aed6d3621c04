"""Authenticates gRPC calls. An interceptor asks the SMP's gate before any request is read, so none can be forgotten.

With a token, each call carries a signature (`shared.signatures`) in its metadata, and so does its reply. gRPC verifies
certificates; this module checks the name in them.
"""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import unquote

import grpc

from holdfast.smp_daemon.net.gate import Gate
from holdfast.smp_daemon.shared.errors import ProtocolError
from holdfast.smp_daemon.shared.signatures import Signer, Verifier, WrongServer
from holdfast.smp_daemon.shared.sources import Address

CALL_KEY, SERVER_KEY, REPLY_KEY = "holdfast-call-bin", "holdfast-server-bin", "holdfast-reply-bin"
LONGEST_CALL_S = 24 * 3600
"""A call with a later deadline is refused as if it had none."""


class Guard(grpc.ServerInterceptor):  # type: ignore[type-arg]  # not so when it runs
    """Refuses calls that are not authenticated. gRPC calls it in many threads."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        token = gate.credentials.token
        self._verifier = Verifier(token, gate.job) if token else None
        self.listens_at = ("0.0.0.0", 0)
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
    """Learn a server's name from its refusal of `call`. Returns whether it is new, so that a retry makes sense."""
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
