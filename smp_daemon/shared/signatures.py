"""One signature for whatever is shown to an SMP: that it comes from who has the job's token, for this server, once.

It is HMAC-SHA256 over the job, what is done (a gRPC method, or a connection for raw bytes), the digest of the request,
which server it is for and a number that this caller uses once; the reply is signed too. A server draws its name, and
says it to whoever does not know it. So nothing that was overheard can be said again, to any server, and clocks play no
part. The token is never sent; signatures are compared in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import secrets
import threading
from collections import OrderedDict
from typing import NamedTuple

from holdfast.smp_daemon.shared.errors import ProtocolError

NAME_BYTES, COUNT_BYTES, DIGEST_BYTES, MAC_BYTES = 16, 8, 32, 32
SIGN_BYTES = 2 * NAME_BYTES + COUNT_BYTES + DIGEST_BYTES + MAC_BYTES
WINDOW = 1024
"""How far calls of one caller may overtake each other."""

MAX_CALLERS = 4096


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
        if len(sign) != SIGN_BYTES:
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
        self._key = _key(token, job)
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
        self._key = _key(token, job)
        self._name = secrets.token_bytes(NAME_BYTES)
        self._numbers = itertools.count()
        self._servers: dict[str, bytes] = {}

    def sign(self, address: str, method: str, request: bytes) -> bytes:
        """For one call, once."""
        server = self._servers.get(address, bytes(NAME_BYTES))
        return Signed(self._name, next(self._numbers), server, _digest(request)).by(self._key, method)

    def learn(self, address: str, name: bytes) -> bool:
        """Note the name that a server says it has; whether it is news."""
        if len(name) != NAME_BYTES or self._servers.get(address) == name:
            return False
        self._servers[address] = name
        return True

    def is_genuine(self, sign: bytes, proof: bytes, reply: bytes) -> bool:
        """Whether a reply with that proof comes from who has the token, and is to what was signed so."""
        return hmac.compare_digest(proof, mac(self._key, b"reply", sign, reply))


def mac(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 over `parts`, each with its length before it, so that no two lists of parts are alike."""
    return hmac.digest(key, b"".join(len(part).to_bytes(8, "big") + part for part in parts), "sha256")


def _key(token: bytes, job: str) -> bytes:
    return mac(token, b"holdfast-2", job.encode())


def _digest(request: bytes) -> bytes:
    return hashlib.sha256(request).digest()
