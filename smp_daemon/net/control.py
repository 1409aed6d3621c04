"""Who may make gRPC calls. Every method is guarded before its request is even read, so that none can be forgotten.

With a token each call carries, as metadata, HMAC-SHA256 over the job, the method, the digest of the request, which
server it is for and a number that this caller uses once; the reply is signed too. A server's name is drawn when it
starts, and a caller that does not know it learns it from the refusal of its first call. So nothing that was overheard
can be said again, to any server, and clocks play no part. Certificates are checked by gRPC, and the name in them here.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import itertools
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

import grpc

from holdfast.smp_daemon.net.authenticator import Complaints
from holdfast.smp_daemon.shared.credentials import Credentials
from holdfast.smp_daemon.shared.errors import ProtocolError
from holdfast.smp_daemon.shared.handshake import derive, mac
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.uids import may_come

CALL_KEY, SERVER_KEY, REPLY_KEY = "holdfast-call-bin", "holdfast-server-bin", "holdfast-reply-bin"
NAME_BYTES, COUNT_BYTES, DIGEST_BYTES, MAC_BYTES = 16, 8, 32, 32
WINDOW = 1024
"""How far calls of one caller may overtake each other."""

MAX_CALLERS = 4096
LONGEST_CALL_S = 24 * 3600
"""A call whose deadline is later has none, as far as anybody cares."""

log = get_log(__name__)


class WrongServer(ProtocolError):
    """The caller has the token, and does not know this server yet, or only its predecessor."""


class Once:
    """Remembers which numbers a caller has used. Those that are `WINDOW` below its highest count as used."""

    def __init__(self) -> None:
        self._highest = -1
        self._used = 0

    def use(self, number: int) -> bool:
        """Whether this is the first time."""
        if number > self._highest:
            self._used = self._used << min(number - self._highest, WINDOW) & (1 << WINDOW) - 1 | 1
            self._highest = number
            return True
        below = self._highest - number
        if below >= WINDOW or self._used >> below & 1:
            return False
        self._used |= 1 << below
        return True


class Signed(NamedTuple):
    """What is said of a call, and signed: of which caller, its how manyth, for which server, with what request."""

    caller: bytes
    number: int
    server: bytes
    digest: bytes

    @classmethod
    def read(cls, sign: bytes) -> Signed:
        """What is said there; nothing is verified. Raises `ProtocolError` if it is too short or too long."""
        numbered, named = NAME_BYTES + COUNT_BYTES, 2 * NAME_BYTES + COUNT_BYTES
        if len(sign) != named + DIGEST_BYTES + MAC_BYTES:
            raise ProtocolError("it is not signed")
        number = int.from_bytes(sign[NAME_BYTES:numbered], "big")
        return cls(sign[:NAME_BYTES], number, sign[numbered:named], sign[named:-MAC_BYTES])

    def by(self, key: bytes, method: str) -> bytes:
        """With the signature of who has the key."""
        said = self.caller + self.number.to_bytes(COUNT_BYTES, "big") + self.server + self.digest
        return said + mac(key, b"call", method.encode(), said)


class Verifier:
    """A server's side of the token. Thread-safe."""

    def __init__(self, token: bytes, job: str) -> None:
        self._key = derive(token, "control", job)
        self._lock = threading.Lock()  # guards name and callers, of all threads that serve calls; innermost
        self._callers: OrderedDict[bytes, Once] = OrderedDict()
        self.name = secrets.token_bytes(NAME_BYTES)

    def verify(self, method: str, sign: bytes) -> None:
        """Raises `ProtocolError` unless a call is signed by who has the token, for this server, and is new."""
        signed = Signed.read(sign)
        with self._lock:
            if not hmac.compare_digest(sign, signed.by(self._key, method)):
                raise ProtocolError("it is not signed with this job's token")
            if signed.server != self.name:
                raise WrongServer("it is not for this server as it is now")
            if signed.caller not in self._callers and len(self._callers) >= MAX_CALLERS:
                self._callers.clear()
                self.name = secrets.token_bytes(NAME_BYTES)  # or those forgotten could be repeated
                raise WrongServer("callers are forgotten: say it again")
            if not self._callers.setdefault(signed.caller, Once()).use(signed.number):
                raise ProtocolError("it was said before")

    def verify_request(self, request: bytes, sign: bytes) -> None:
        """Raises `ProtocolError` unless this is the request of the call that was signed so, and verified."""
        if Signed.read(sign).digest != _digest(request):
            raise ProtocolError("the request is not the one that was signed")

    def sign_reply(self, sign: bytes, reply: bytes) -> bytes:
        """What shows the caller that the reply is from who has the token, and to its call."""
        return mac(self._key, b"reply", sign, reply)


class Signer:
    """A caller's side of the token. Thread-safe."""

    def __init__(self, token: bytes, job: str) -> None:
        self._key = derive(token, "control", job)
        self._name = secrets.token_bytes(NAME_BYTES)
        self._numbers = itertools.count()
        self._servers: dict[str, bytes] = {}

    def sign(self, address: str, method: str, request: bytes) -> bytes:
        """For one call, once."""
        server = self._servers.get(address, bytes(NAME_BYTES))
        return Signed(self._name, next(self._numbers), server, _digest(request)).by(self._key, method)

    def learn(self, address: str, call: Any) -> bool:
        """Whether a server refused a call because its name was not known: now it is, and the call can be made again."""
        if call.code() is not grpc.StatusCode.UNAUTHENTICATED:
            return False
        name = _value(call.trailing_metadata(), SERVER_KEY)
        if len(name) != NAME_BYTES or self._servers.get(address) == name:
            return False
        self._servers[address] = name
        return True

    def is_genuine(self, sign: bytes, call: Any, reply: bytes) -> bool:
        """Whether a reply comes from who has the token, and is to that call."""
        said = _value(call.trailing_metadata(), REPLY_KEY)
        return hmac.compare_digest(said, mac(self._key, b"reply", sign, reply))


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
            sign = _value(context.invocation_metadata(), CALL_KEY)
            try:
                self._check(details.method, sign, context)
                request = next(requests, b"")  # it is read from here on
                if self._verifier is not None:
                    self._verifier.verify_request(request, sign)
            except ProtocolError as error:
                if not isinstance(error, WrongServer):
                    self._complaints.note(_host(context.peer()), error, time.monotonic())
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


def _digest(request: bytes) -> bytes:
    return hashlib.sha256(request).digest()


def _value(metadata: Sequence[tuple[str, Any]] | None, key: str) -> bytes:
    for name, value in metadata or ():
        if name == key and isinstance(value, bytes):
            return value
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
