"""Proof of credentials: the signatures of calls to an SMP, and the handshake on a connection for raw bytes, before
either side trusts a byte from the other.

A signature is proof that a call comes from a holder of the job's token, is for this server, and is new: an HMAC-SHA256
over the job, the operation (a gRPC method, or a connection for raw bytes), the digest of the request, the name of the
server and a number that this caller uses once. The reply is signed too. A server draws a random name, and tells it to
callers that do not know it. So an overheard call cannot be replayed to any server, and clocks play no part. The token
is never sent; signatures are compared in constant time.

A connection for raw bytes is TLS if there are certificates, and each side checks the other's. With a token, each then
proves to the other that it has the same one::

    client                                server
    ``HFA2``                       ->
                                   <-     ``HFA2``, a name drawn for this connection (16 bytes)
    signature for it (104 bytes)   ->     ends the connection if it is wrong
                                   <-     signature of the reply (32 bytes)

Both begin without waiting for the other. So if one side has no token, the other's first bytes tell it at once.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import secrets
import socket
import threading
import time
from collections import OrderedDict
from typing import NamedTuple

from holdfast.smp_daemon.shared.credentials import Credentials
from holdfast.smp_daemon.shared.errors import ProtocolError, SmpUnavailable

MAGIC = b"HFA2"
METHOD = "raw bytes"
HANDSHAKE_DEADLINE_S = 5.0
"""Timeout for a handshake, in seconds: two short messages. Whoever takes longer holds a thread of the other side that
an honest caller could use."""

NAME_BYTES, COUNT_BYTES, DIGEST_BYTES, MAC_BYTES = 16, 8, 32, 32
SIGN_BYTES = 2 * NAME_BYTES + COUNT_BYTES + DIGEST_BYTES + MAC_BYTES
WINDOW = 1024
"""By how many numbers calls of one caller may overtake each other."""

MAX_CALLERS = 4096


class WrongServer(ProtocolError):
    """The caller has the token, but does not know this server's current name."""


class UsedNumbers:
    """The numbers that one caller has used. Those `WINDOW` or more below its highest count as used. Not thread-safe."""

    def __init__(self) -> None:
        self._highest = -1
        self._used = 0

    def use(self, number: int) -> bool:
        """Mark a number as used. Returns whether this is its first use."""
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
    """The signed fields of a call: the caller, the number of the call, the server, and the digest of the request."""

    caller: bytes
    number: int
    server: bytes
    digest: bytes

    @classmethod
    def read(cls, sign: bytes) -> Signed:
        """Parse a signature without verifying it. Raises `ProtocolError` if it is too short or too long."""
        numbered, named = NAME_BYTES + COUNT_BYTES, 2 * NAME_BYTES + COUNT_BYTES
        if len(sign) != SIGN_BYTES:
            raise ProtocolError("it is not signed")
        number = int.from_bytes(sign[NAME_BYTES:numbered], "big")
        return cls(sign[:NAME_BYTES], number, sign[numbered:named], sign[named:-MAC_BYTES])

    def by(self, key: bytes, method: str) -> bytes:
        """The fields, followed by their signature with `key`."""
        said = self.caller + self.number.to_bytes(COUNT_BYTES, "big") + self.server + self.digest
        return said + mac(key, b"call", method.encode(), said)


class Verifier:
    """A server's side of the token. Thread-safe."""

    def __init__(self, token: bytes, job: str) -> None:
        self._key = _key(token, job)
        self._lock = threading.Lock()  # guards `name` and `_callers`; threads that serve calls take it; innermost
        self._callers: OrderedDict[bytes, UsedNumbers] = OrderedDict()
        self.name = secrets.token_bytes(NAME_BYTES)

    def verify(self, method: str, sign: bytes) -> None:
        """Raises `ProtocolError` unless a call is signed with the job's token, is for this server, and is new."""
        signed = Signed.read(sign)
        with self._lock:
            if not hmac.compare_digest(sign, signed.by(self._key, method)):
                raise ProtocolError("it is not signed with this job's token")
            if signed.server != self.name:
                raise WrongServer("it is signed for another server, or an earlier run of this one")
            if signed.caller not in self._callers and len(self._callers) >= MAX_CALLERS:
                self._callers.clear()
                self.name = secrets.token_bytes(NAME_BYTES)  # else calls of forgotten callers could be replayed
                raise WrongServer("callers are forgotten: say it again")
            if not self._callers.setdefault(signed.caller, UsedNumbers()).use(signed.number):
                raise ProtocolError("it is a replay of an earlier call")

    def verify_request(self, request: bytes, sign: bytes) -> None:
        """Raises `ProtocolError` unless `request` belongs to the call with that signature, which `verify` checked."""
        if Signed.read(sign).digest != _digest(request):
            raise ProtocolError("the request is not the one that was signed")

    def sign_reply(self, sign: bytes, reply: bytes) -> bytes:
        """Proof for the caller that `reply` comes from a holder of the token, and answers its call."""
        return mac(self._key, b"reply", sign, reply)


class Signer:
    """A caller's side of the token. Thread-safe."""

    def __init__(self, token: bytes, job: str) -> None:
        # Needs no lock: threads share only the counter and the dict, and each operation on those is atomic.
        self._key = _key(token, job)
        self._name = secrets.token_bytes(NAME_BYTES)
        self._numbers = itertools.count()
        self._servers: dict[str, bytes] = {}

    def sign(self, address: str, method: str, request: bytes) -> bytes:
        """The signature of one call, to be used once."""
        server = self._servers.get(address, bytes(NAME_BYTES))
        return Signed(self._name, next(self._numbers), server, _digest(request)).by(self._key, method)

    def learn(self, address: str, name: bytes) -> bool:
        """Note the name that a server has given. Returns whether it is one: another thread may have noted it before."""
        if len(name) != NAME_BYTES:
            return False
        self._servers[address] = name
        return True

    def is_genuine(self, sign: bytes, proof: bytes, reply: bytes) -> bool:
        """Whether a reply with that proof comes from a holder of the token and answers the call signed with `sign`."""
        return hmac.compare_digest(proof, mac(self._key, b"reply", sign, reply))


def mac(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 over `parts`, each preceded by its length, so that different lists of parts never look the same."""
    return hmac.digest(key, b"".join(len(part).to_bytes(8, "big") + part for part in parts), "sha256")


def _key(token: bytes, job: str) -> bytes:
    return mac(token, b"holdfast-2", job.encode())


def _digest(request: bytes) -> bytes:
    return hashlib.sha256(request).digest()


def show_credentials(sock: socket.socket, credentials: Credentials, job: str) -> socket.socket:
    """The client's part. Returns the connection to use: `sock`, or TLS around it. If it fails, `sock` is closed.

    Raises:
        SmpUnavailable: the other side has another token, another job, or no token.
        OSError: it has not the right certificate, or the connection ended or took too long.
    """
    try:
        if credentials.tls is not None:
            sock = credentials.tls.client.wrap_socket(sock, server_hostname=credentials.tls.name)
        if credentials.token:
            prove_to_server(sock, credentials.token, job)
        return sock
    except BaseException:
        sock.close()
        raise


def prove_to_server(sock: socket.socket, token: bytes, job: str) -> None:
    """The client's part of the token. Blocks for at most `HANDSHAKE_DEADLINE_S`. Raises as `show_credentials`."""
    limit = time.monotonic() + HANDSHAKE_DEADLINE_S
    signer = Signer(token, job)
    try:
        sock.sendall(MAGIC)
        hello = _exactly(sock, len(MAGIC) + NAME_BYTES, limit)
        _check_magic(hello[: len(MAGIC)])
        signer.learn("", hello[len(MAGIC) :])
        sign = signer.sign("", METHOD, b"")
        sock.sendall(sign)
        if not signer.is_genuine(sign, _exactly(sock, MAC_BYTES, limit), b""):
            raise SmpUnavailable("the process that answers there does not know this job's token")
    except (ProtocolError, EOFError) as error:
        raise SmpUnavailable(
            "the other side closed the connection when it was offered a token: every SMP of a job, and every process "
            "that connects to one, needs the same HOLDFAST_TOKEN_FILE and job id"
        ) from error


def check_client(sock: socket.socket, token: bytes, job: str) -> None:
    """The server's part of the token. Blocks for at most `HANDSHAKE_DEADLINE_S`, and reads 108 bytes.

    Raises:
        ProtocolError: the client offers no token, or another one.
        EOFError, OSError: the connection ended, or took too long.
    """
    limit = time.monotonic() + HANDSHAKE_DEADLINE_S
    verifier = Verifier(token, job)
    sock.sendall(MAGIC + verifier.name)
    _check_magic(_exactly(sock, len(MAGIC), limit))
    sign = _exactly(sock, SIGN_BYTES, limit)
    verifier.verify(METHOD, sign)
    sock.sendall(verifier.sign_reply(sign, b""))


def _check_magic(said: bytes) -> None:
    if said != MAGIC:
        raise ProtocolError("it offers no token")


def _exactly(sock: socket.socket, count: int, limit: float) -> bytes:
    """The next `count` bytes. They must all arrive by `limit` (`time.monotonic`), however slowly each comes."""
    data = bytearray(count)
    view = memoryview(data)
    while view:
        left = limit - time.monotonic()
        if left <= 0:
            raise TimeoutError("it took too long to show that it has the token")
        sock.settimeout(left)
        got = sock.recv_into(view)
        if got == 0:
            raise EOFError("the connection ended before it was known whose it is")
        view = view[got:]
    return bytes(data)
