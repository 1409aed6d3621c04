"""Two processes prove to each other that they have the same token, before either trusts a byte from the other.

::

    client                                server
    ``HFA2``                       ->
                                   <-     ``HFA2``, a name drawn for this connection (16 bytes)
    signature for it (104 bytes)   ->     ends the connection if it is wrong
                                   <-     signature of the reply (32 bytes)

The signatures are the same as those of gRPC calls, see `shared.signatures`.
"""

from __future__ import annotations

import socket
import time

from holdfast.smp_daemon.shared.errors import ProtocolError, SmpUnavailable
from holdfast.smp_daemon.shared.signatures import MAC_BYTES, NAME_BYTES, SIGN_BYTES, Signer, Verifier

MAGIC = b"HFA2"
METHOD = "raw bytes"
HANDSHAKE_DEADLINE_S = 5.0


class NoToken(ProtocolError):
    """The other side offers no token, although one is required."""


def prove_to_server(sock: socket.socket, token: bytes, job: str) -> None:
    """The client's part. Blocks for at most `HANDSHAKE_DEADLINE_S`.

    Raises:
        SmpUnavailable: the other side has another token, another job, or no token.
    """
    limit = time.monotonic() + HANDSHAKE_DEADLINE_S
    signer = Signer(token, job)
    try:
        sock.sendall(MAGIC)
        _check_magic(_exactly(sock, len(MAGIC), limit))
        signer.learn("", _exactly(sock, NAME_BYTES, limit))
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
    """The server's part. Blocks for at most `HANDSHAKE_DEADLINE_S`, and reads 108 bytes.

    Raises:
        ProtocolError: the client offers no token, or another one.
        EOFError, OSError: the connection ended, or took too long.
    """
    limit = time.monotonic() + HANDSHAKE_DEADLINE_S
    verifier = Verifier(token, job)
    _check_magic(_exactly(sock, len(MAGIC), limit))
    sock.sendall(MAGIC + verifier.name)
    sign = _exactly(sock, SIGN_BYTES, limit)
    verifier.verify(METHOD, sign)
    sock.sendall(verifier.sign_reply(sign, b""))


def _check_magic(said: bytes) -> None:
    if said != MAGIC:
        raise NoToken("it offers no token")


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
