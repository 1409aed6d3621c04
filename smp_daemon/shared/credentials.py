"""Credentials by which the SMPs of a job authenticate each other: a shared token, certificates, or both. Each process
reads them once.

``HOLDFAST_TOKEN_FILE`` names a file that only this user may read (or ``HOLDFAST_TOKEN`` is the token itself);
``HOLDFAST_TLS_CERT``, ``HOLDFAST_TLS_KEY`` and ``HOLDFAST_TLS_CA`` name PEM files. SECURITY.md says what each protects.
"""

from __future__ import annotations

import ipaddress
import os
import ssl
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.settings import TLS_CA, TLS_CERT, TLS_KEY, TLS_NAME, TOKEN, TOKEN_FILE

TOKEN_FILE_ENV, TOKEN_ENV = TOKEN_FILE.variable, TOKEN.variable
TLS_ENVS = tuple(each.variable for each in (TLS_CERT, TLS_KEY, TLS_CA))
MIN_TOKEN_BYTES, MAX_TOKEN_BYTES = 16, 4096
MAX_PEM_BYTES = 1 << 20
TURNS = 8
"""More than a handshake of two sides that take turns needs."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Mutual TLS: both sides show a certificate signed by `ca` that carries `name` as a DNS name.

    Attributes:
        cert, key, ca: contents of the PEM files.
        server, client: contexts for bulk connections.
    """

    name: str
    cert: bytes
    key: bytes = field(repr=False)
    ca: bytes
    server: ssl.SSLContext
    client: ssl.SSLContext


@dataclass(frozen=True, slots=True)
class Credentials:
    """The credentials of a process; empty if SMPs do not authenticate each other."""

    token: bytes = field(default=b"", repr=False)
    tls: Tls | None = None

    def __bool__(self) -> bool:
        return bool(self.token or self.tls)

    @property
    def kind(self) -> str:
        """Which credentials these are, in words."""
        return " and ".join([*(["token"] if self.token else []), *(["mTLS"] if self.tls else [])]) or "none"


@lru_cache(1)
def current() -> Credentials:
    """The credentials of this process, from its environment. Raises `ConfigError` as `load`."""
    return load(os.environ)


def load(environment: Mapping[str, str]) -> Credentials:
    """The credentials that an environment names. Raises `ConfigError` if a file cannot be read, or others can read a
    secret one."""
    return Credentials(_token(environment), _tls(environment))


def access_of(hosts: Sequence[str], insecure: bool, credentials: Credentials) -> str:
    """How an SMP that listens on `hosts` controls access: the kind of its credentials, ``loopback``, or ``insecure``.

    Raises:
        ConfigError: access from other hosts would be open to anyone, and `insecure` is False.
    """
    if credentials:
        return credentials.kind
    away = [host for host in hosts if not ipaddress.ip_address(host).is_loopback]
    if away and not insecure:
        raise ConfigError(
            f"{away[0]} is not a loopback address, and traffic between SMPs is neither encrypted nor authenticated: "
            "say --insecure on a network that only this job's nodes can reach, or better set HOLDFAST_TOKEN_FILE, or "
            f"{', '.join(TLS_ENVS)} (see SECURITY.md)"
        )
    return "insecure" if away else "loopback"


def _token(environment: Mapping[str, str]) -> bytes:
    file = TOKEN_FILE.value(environment)
    if file:
        token, source = _read_secret(Path(file), TOKEN_FILE_ENV, MAX_TOKEN_BYTES).strip(), f"{TOKEN_FILE_ENV}={file}"
    else:
        token, source = os.fsencode(TOKEN.value(environment)), TOKEN_ENV
        if not token:
            return b""
    if not MIN_TOKEN_BYTES <= len(token) <= MAX_TOKEN_BYTES:
        raise ConfigError(
            f"the token of {source} has {len(token)} bytes; use {MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES}, at random: "
            "`python -c 'import secrets; print(secrets.token_hex(32))'`"
        )
    return token


def _tls(environment: Mapping[str, str]) -> Tls | None:
    files = [each.value(environment) for each in (TLS_CERT, TLS_KEY, TLS_CA)]
    if not any(files):
        return None
    if not all(files):
        raise ConfigError(f"mTLS needs all of {', '.join(TLS_ENVS)}: set all of them, or none")
    cert, key, ca = map(Path, files)
    name = TLS_NAME.value(environment)
    secret = _read_secret(key, TLS_ENVS[1], MAX_PEM_BYTES)
    try:
        return Tls(
            name,
            cert.read_bytes(),
            secret,
            ca.read_bytes(),
            _context(True, cert, key, ca),
            _context(False, cert, key, ca),
        )
    except OSError as error:  # `ssl.SSLError` is one
        raise ConfigError(f"{cert}, {key} and {ca} are not a certificate, a key and a CA in PEM: {error}") from error


def _context(server: bool, cert: Path, key: Path, ca: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.options |= getattr(ssl, "OP_ENABLE_KTLS", 0)  # since Python 3.12, if the kernel supports it
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(cert, key, password="")  # refuse a key with a password instead of prompting for it
    context.load_verify_locations(ca)
    if server:
        context.num_tickets = 0  # connections are long-lived, so sessions are never resumed
    return context


def _read_secret(path: Path, variable: str, limit: int) -> bytes:
    """The contents of a secret file. Raises `ConfigError` unless it is this user's (or root's), closed to others, and
    within `limit`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"{variable}={path} cannot be read: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o077:
            raise ConfigError(f"{variable}={path} must be a file of this user that nobody else can read: chmod 600 it")
        data = os.read(fd, limit + 1)
    finally:
        os.close(fd)
    if len(data) > limit:
        raise ConfigError(f"{variable}={path} is longer than {limit} bytes")
    return data


def check_certificates(tls: Tls) -> datetime:
    """When the certificate expires. Blocks for a few milliseconds, and uses no network.

    Raises:
        ConfigError: another node with the same CA and name would refuse the certificate: it is not for that name, not
            signed by that CA, not valid now, or not for both sides of a connection.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = tls.client.wrap_bio(to_client, to_server, server_hostname=tls.name)
    server = tls.server.wrap_bio(to_server, to_client, server_side=True)
    try:
        for turn in range(2 * TURNS):
            try:
                (client, server)[turn % 2].do_handshake()
            except ssl.SSLWantReadError:
                continue  # the other side's turn
        shown = client.getpeercert() or {}
        return datetime.fromtimestamp(ssl.cert_time_to_seconds(str(shown["notAfter"])), UTC)
    except (ssl.SSLError, ValueError) as error:
        why = getattr(error, "verify_message", "") or str(error)
        raise ConfigError(
            f"other nodes would refuse the certificate of {TLS_ENVS[0]}: {why}: it must be valid, signed by the CA of "
            f"{TLS_ENVS[2]}, and for the DNS name {tls.name!r} of {TLS_NAME.variable}"
        ) from error
