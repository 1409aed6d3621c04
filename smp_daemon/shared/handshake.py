"""Shows credentials on a connection for raw bytes, before either side trusts a byte from the other.

With certificates the connection is TLS, and each side checks the other's. With a token, each then proves to the other
that it has the same one::

    client                                server
    ``HFA2``                       ->
                                   <-     ``HFA2``, a name drawn for this connection (16 bytes)
    signature for it (104 bytes)   ->     ends the connection if it is wrong
                                   <-     signature of the reply (32 bytes)

Both begin without waiting for the other. So if one side has no token, the other's first bytes tell it at once. The
signatures are the same as those of gRPC calls, see `shared.signatures`.
"""

from __future__ import annotations

import socket
import time

from holdfast.smp_daemon.shared.credentials import Credentials
from holdfast.smp_daemon.shared.errors import ProtocolError, SmpUnavailable
from holdfast.smp_daemon.shared.signatures import MAC_BYTES, NAME_BYTES, SIGN_BYTES, Signer, Verifier

MAGIC = b"HFA2"
METHOD = "raw bytes"
HANDSHAKE_DEADLINE_S = 5.0
"""Timeout for a handshake, in seconds: two short messages. Whoever takes longer holds a thread of the other side that
an honest caller could use."""


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
