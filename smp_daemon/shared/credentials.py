"""What SMPs of a job know each other by: a token that all of them have, certificates, or both. Read once a process.

``HOLDFAST_TOKEN_FILE`` names a file that nobody else may read (or ``HOLDFAST_TOKEN`` is the token itself);
``HOLDFAST_TLS_CERT``, ``HOLDFAST_TLS_KEY`` and ``HOLDFAST_TLS_CA`` name PEM files. SECURITY.md says what each protects.
"""

from __future__ import annotations

import ipaddress
import os
import ssl
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from holdfast.smp_daemon.shared.errors import ConfigError

TOKEN_FILE_ENV, TOKEN_ENV = "HOLDFAST_TOKEN_FILE", "HOLDFAST_TOKEN"
TLS_ENVS = ("HOLDFAST_TLS_CERT", "HOLDFAST_TLS_KEY", "HOLDFAST_TLS_CA")
TLS_NAME_ENV = "HOLDFAST_TLS_NAME"
DEFAULT_NAME = "holdfast-smp"
MIN_TOKEN_BYTES, MAX_TOKEN_BYTES = 16, 4096
MAX_PEM_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Tls:
    """Mutual TLS: both sides show a certificate of `ca` that carries `name` as a DNS name.

    Attributes:
        cert, key, ca: PEM.
        server, client: for bulk connections.
    """

    name: str
    cert: bytes
    key: bytes = field(repr=False)
    ca: bytes
    server: ssl.SSLContext
    client: ssl.SSLContext


@dataclass(frozen=True, slots=True)
class Credentials:
    """Of this process; empty if SMPs do not ask each other."""

    token: bytes = field(default=b"", repr=False)
    tls: Tls | None = None

    def __bool__(self) -> bool:
        return bool(self.token or self.tls)

    @property
    def kind(self) -> str:
        """For people."""
        return " and ".join([*(["token"] if self.token else []), *(["mTLS"] if self.tls else [])]) or "none"


@lru_cache(1)
def current() -> Credentials:
    """This process's, from its environment. Raises `ConfigError`."""
    return load(os.environ)


def load(environment: Mapping[str, str]) -> Credentials:
    """What an environment names. Raises `ConfigError` if that cannot be read, or others can read what is secret."""
    return Credentials(_token(environment), _tls(environment))


def access_of(hosts: Sequence[str], insecure: bool, credentials: Credentials) -> str:
    """How an SMP that listens on `hosts` tells friend from foe: its credentials, ``loopback``, or ``insecure``.

    Raises:
        ConfigError: not at all, and nobody has asked for that.
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
    file = environment.get(TOKEN_FILE_ENV)
    if file:
        token, source = _read_secret(Path(file), TOKEN_FILE_ENV, MAX_TOKEN_BYTES).strip(), f"{TOKEN_FILE_ENV}={file}"
    else:
        token, source = environment.get(TOKEN_ENV, "").strip().encode(), TOKEN_ENV
        if not token:
            return b""
    if not MIN_TOKEN_BYTES <= len(token) <= MAX_TOKEN_BYTES:
        raise ConfigError(
            f"the token of {source} has {len(token)} bytes; use {MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES}, at random: "
            "`python -c 'import secrets; print(secrets.token_hex(32))'`"
        )
    return token


def _tls(environment: Mapping[str, str]) -> Tls | None:
    files = [environment.get(name) for name in TLS_ENVS]
    if not any(files):
        return None
    if not all(files):
        raise ConfigError(f"mTLS takes all of {', '.join(TLS_ENVS)}, or none")
    cert, key, ca = (Path(str(file)) for file in files)
    name = environment.get(TLS_NAME_ENV) or DEFAULT_NAME
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
        raise ConfigError(f"{cert}, {key} and {ca} are no certificate, key and authority in PEM: {error}") from error


def _context(server: bool, cert: Path, key: Path, ca: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.options |= getattr(ssl, "OP_ENABLE_KTLS", 0)  # from Python 3.12 on, where the kernel has it
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(cert, key, password="")  # a key with a password is refused, not asked for on a terminal
    context.load_verify_locations(ca)
    if server:
        context.num_tickets = 0  # connections are kept: there is nothing to resume
    return context


def _read_secret(path: Path, variable: str, limit: int) -> bytes:
    """Raises `ConfigError` unless the file is this user's (or root's) and nobody else can read it."""
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
