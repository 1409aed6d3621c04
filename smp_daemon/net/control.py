"""Who may make gRPC calls. Every method is guarded before its request is even read, so that none can be forgotten.

With a token each call carries a signature (`shared.signatures`) as metadata, and so does its reply. Certificates are
checked by gRPC, and the name in them here.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import unquote

import grpc

from holdfast.smp_daemon.net.authenticator import Complaints
from holdfast.smp_daemon.shared.credentials import Credentials
from holdfast.smp_daemon.shared.errors import ProtocolError
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.signatures import Signer, Verifier, WrongServer
from holdfast.smp_daemon.shared.uids import may_come

CALL_KEY, SERVER_KEY, REPLY_KEY = "holdfast-call-bin", "holdfast-server-bin", "holdfast-reply-bin"
LONGEST_CALL_S = 24 * 3600
"""A call whose deadline is later has none, as far as anybody cares."""

log = get_log(__name__)


class Guard(grpc.ServerInterceptor):  # type: ignore[type-arg]  # not so when it runs
    """Refuses calls of those who may not make any."""

    def __init__(self, credentials: Credentials, job: str) -> None:
        self._credentials = credentials
        self._verifier = Verifier(credentials.token, job) if credentials.token else None
        self._complaints = Complaints()
        self.listens_at = ("0.0.0.0", 0)

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """The method's handler, guarded; called by gRPC."""
        handler = continuation(details)
        if handler is None or handler.unary_unary is None:
            return None

        def guarded(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
            sign = value(context.invocation_metadata(), CALL_KEY)
            try:
                self._check(details.method, sign, context)
                request = next(requests, b"")  # it is read from here on
                if self._verifier is not None:
                    self._verifier.verify_request(request, sign)
            except ProtocolError as error:
                if not isinstance(error, WrongServer):
                    self._complaints.note(_host(context.peer()), error)
                if self._verifier is not None:
                    context.set_trailing_metadata(((SERVER_KEY, self._verifier.name),))
                context.abort(grpc.StatusCode.UNAUTHENTICATED, f"not let in: {error}")
            reply: bytes = handler.unary_unary(request, context)
            if self._verifier is not None:
                context.set_trailing_metadata(((REPLY_KEY, self._verifier.sign_reply(sign, reply)),))
            return reply

        return grpc.stream_unary_rpc_method_handler(guarded)

    def _check(self, method: str, sign: bytes, context: grpc.ServicerContext) -> None:
        if context.time_remaining() > LONGEST_CALL_S:
            raise ProtocolError("it has no deadline")
        if not self._credentials:
            peer = _address(context.peer())
            try:
                known = peer is None or may_come(peer, self.listens_at)
            except OSError as error:
                raise ProtocolError(f"whose process it is could not be asked: {error}") from error
            if not known:
                raise ProtocolError("it is another user's process")
        if self._credentials.tls is not None:
            names: Any = context.auth_context().get("x509_subject_alternative_name", [])
            if self._credentials.tls.name.encode() not in names:
                raise ProtocolError(f"its certificate is not for {self._credentials.tls.name!r}")
        if self._verifier is not None:
            self._verifier.verify(method, sign)


def learn(signer: Signer, address: str, call: Any) -> bool:
    """Whether a server refused a call because its name was not known: now it is, and the call can be made again."""
    if call.code() is not grpc.StatusCode.UNAUTHENTICATED:
        return False
    return signer.learn(address, value(call.trailing_metadata(), SERVER_KEY))


def value(metadata: Sequence[tuple[str, Any]] | None, key: str) -> bytes:
    """What is said under `key`; empty if nothing is."""
    for name, said in metadata or ():
        if name == key and isinstance(said, bytes):
            return said
    return b""


def _address(peer: str) -> tuple[str, int] | None:
    """Of ``ipv4:127.0.0.1:4711``, as gRPC names it; None if it is of no such kind. Raises `ProtocolError`."""
    kind, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    if kind == "ipv4" and port.isdigit():
        return host, int(port)
    if kind == "ipv6" and not ipaddress.ip_address(host.strip("[]")).is_loopback:
        return None
    raise ProtocolError(f"nobody can say whose process is at {peer}")


def _host(peer: str) -> str:
    return unquote(peer).rpartition(":")[0]
