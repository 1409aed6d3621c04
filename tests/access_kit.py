"""Tokens and certificates for tests, and an environment that contains them."""

from __future__ import annotations

import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.smp_daemon.shared.credentials import (
    TLS_ENVS,
    TOKEN_ENV,
    TOKEN_FILE_ENV,
    current,
)
from holdfast.smp_daemon.shared.settings import TLS_NAME
from tests.deadlines import DEADLINE_S

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command makes the certificates")


@contextmanager
def credentials(environment: dict[str, str]) -> Iterator[None]:
    """Give this process and its children these credentials and no others for a ``with`` block."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (TOKEN_FILE_ENV, TOKEN_ENV, TLS_NAME.variable, *TLS_ENVS):
            patch.delenv(name, raising=False)
        for name, value in environment.items():
            patch.setenv(name, value)
        current.cache_clear()
        try:
            yield
        finally:
            current.cache_clear()


def token_file(path: Path, token: str | None = None, mode: int = 0o600) -> dict[str, str]:
    """Write a token file, by default with a new token; return the environment that names it."""
    path.write_text((token or secrets.token_hex(32)) + "\n")
    path.chmod(mode)
    return {TOKEN_FILE_ENV: str(path)}


class Authority:
    """A certificate authority for tests."""

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True)
        self.path = path
        self._made = 0
        _openssl(*_new_key(path / "ca.key"), "-x509", "-subj", "/CN=authority", "-out", str(path / "ca.pem"))

    def environment(self, name: str = TLS_NAME.default, days: int = 2) -> dict[str, str]:
        """Issue a certificate for a DNS name; return the environment that names it."""
        self._made += 1
        cert, key, request = (self.path / f"{self._made}.{kind}" for kind in ("pem", "key", "csr"))
        _openssl(*_new_key(key), "-subj", "/CN=smp", "-out", str(request))
        names = self.path / f"{self._made}.names"
        names.write_text(f"subjectAltName=DNS:{name}\n")
        _openssl(
            *(
                "x509",
                "-req",
                "-in",
                str(request),
                "-CA",
                str(self.path / "ca.pem"),
                "-CAkey",
                str(self.path / "ca.key"),
            ),
            *("-set_serial", str(self._made), "-days", str(days), "-extfile", str(names), "-out", str(cert)),
        )
        return dict(zip(TLS_ENVS, (str(cert), str(key), str(self.path / "ca.pem")), strict=True))


def _new_key(path: Path) -> list[str]:
    path.touch(mode=0o600)
    return [*("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"), "-keyout", str(path)]


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=DEADLINE_S)
