"""Signatures of calls to an SMP: proof that a call comes from a holder of the job's token, is for this server, and is
new.

A signature is an HMAC-SHA256 over the job, the operation (a gRPC method, or a connection for raw bytes), the digest of
the request, the name of the server and a number that this caller uses once. The reply is signed too. A server draws a
random name, and tells it to callers that do not know it. So an overheard call cannot be replayed to any server, and
clocks play no part. The token is never sent; signatures are compared in constant time.
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
        """Note the name that a server has given. Returns whether it is new."""
        if len(name) != NAME_BYTES or self._servers.get(address) == name:
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
