"""Two processes show each other that they have the same token, before either believes a byte of the other.

::

    client                                server
    ``HFA1``, nonce (32 bytes)     ->
                                   <-     ``HFA1``, nonce (32 bytes)
    proof (32 bytes)               ->     ends the connection if it is not right
                                   <-     proof (32 bytes)

A proof is HMAC-SHA256 over who proves (so that none can be sent back to where it came from), the job and both nonces,
never the same twice (so that none can be used again). The token is never sent; proofs are compared in constant time.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time

from holdfast.smp_daemon.shared.errors import ProtocolError, SmpUnavailable

MAGIC = b"HFA1"
NONCE_BYTES = PROOF_BYTES = 32
HELLO_BYTES = len(MAGIC) + NONCE_BYTES
HANDSHAKE_DEADLINE_S = 5.0


class NoToken(ProtocolError):
    """It begins to talk as if nobody asked for a token."""


def mac(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 over `parts`, each with its length before it, so that no two lists of parts are alike."""
    return hmac.digest(key, b"".join(len(part).to_bytes(8, "big") + part for part in parts), "sha256")


def derive(token: bytes, purpose: str, job: str) -> bytes:
    """A key for one purpose and job: what is said under one cannot be used under another."""
    return mac(token, b"holdfast-1", purpose.encode(), job.encode())


def prove_to_server(sock: socket.socket, token: bytes, job: str) -> None:
    """The client's part. Blocks for at most `HANDSHAKE_DEADLINE_S`.

    Raises:
        SmpUnavailable: the other side has another token or job, or none.
    """
    limit = time.monotonic() + HANDSHAKE_DEADLINE_S
    key, nonce = derive(token, "bulk", job), secrets.token_bytes(NONCE_BYTES)
    try:
        sock.sendall(MAGIC + nonce)
        theirs = _hello(_exactly(sock, HELLO_BYTES, limit))
        sock.sendall(_proof(key, b"client", nonce, theirs))
        if not hmac.compare_digest(_exactly(sock, PROOF_BYTES, limit), _proof(key, b"server", nonce, theirs)):
            raise SmpUnavailable("what answers there does not know this job's token")
    except (ProtocolError, EOFError) as error:
        raise SmpUnavailable(
            "the other side ended the connection when it was offered a token: every SMP of a job, and whoever asks "
            "them, needs the same HOLDFAST_TOKEN_FILE and job id"
        ) from error


def check_client(sock: socket.socket, token: bytes, job: str) -> None:
    """The server's part. Blocks for at most `HANDSHAKE_DEADLINE_S`, and reads 68 bytes.

    Raises:
        ProtocolError: it offers no token, or not this one.
        EOFError, OSError: the connection ended, or took too long.
    """
    limit = time.monotonic() + HANDSHAKE_DEADLINE_S
    key, nonce = derive(token, "bulk", job), secrets.token_bytes(NONCE_BYTES)
    theirs = _hello(_exactly(sock, HELLO_BYTES, limit))
    sock.sendall(MAGIC + nonce)
    if not hmac.compare_digest(_exactly(sock, PROOF_BYTES, limit), _proof(key, b"client", theirs, nonce)):
        raise ProtocolError("it has another token, or is of another job")
    sock.sendall(_proof(key, b"server", theirs, nonce))


def _proof(key: bytes, who: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    return mac(key, who, client_nonce, server_nonce)


def _hello(data: bytes) -> bytes:
    if data[: len(MAGIC)] != MAGIC:
        raise NoToken("it offers no token")
    return data[len(MAGIC) :]


def _exactly(sock: socket.socket, count: int, limit: float) -> bytes:
    """The next `count` bytes, all of them by `limit` (`time.monotonic`), however slowly they come."""
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
