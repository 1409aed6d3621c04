"""What a process lacks that an SMP refuses, and the error that says so. Pure."""

from __future__ import annotations

import re
from enum import StrEnum

import grpc

from holdfast.smp_daemon.shared.errors import HoldfastError, SmpUnavailable, VersionMismatch


class Refusal(StrEnum):
    """What a process lacks that an SMP does not let in. As text: ``refused: token``."""

    TOKEN = "token"
    CERTIFICATE = "certificate"
    PERMISSION = "permission"
    VERSION = "version"

    def __str__(self) -> str:
        return f"refused: {self.value}"

    @property
    def fix(self) -> str:
        """What to do about it."""
        return FIXES[self]


FIXES = {
    Refusal.TOKEN: "HOLDFAST_TOKEN_FILE and the job's id must be the same here and there",
    Refusal.CERTIFICATE: "HOLDFAST_TLS_CERT, HOLDFAST_TLS_KEY and HOLDFAST_TLS_CA must be set here and there, with "
    "certificates for HOLDFAST_TLS_NAME of one CA: `holdfast doctor` checks those of one node",
    Refusal.PERMISSION: "it is another user's: run this as the user who runs the job, or as root",
    Refusal.VERSION: "here and there must be versions of holdfast that understand each other",
}

SAID = {
    Refusal.CERTIFICATE: re.compile(r"certificate|\bssl|\btls|handshake failed", re.IGNORECASE),
    Refusal.TOKEN: re.compile(r"signed|token"),
    Refusal.PERMISSION: re.compile(r"another user's|the user of"),
}
"""What an SMP says to a process that it does not let in, and gRPC of a handshake that failed. The first that matches
counts: a certificate is looked at before a token."""

CUT_OFF = re.compile(r"failed to connect.*Socket closed", re.DOTALL)
"""What gRPC says if the connection was made, and ended before the first byte: the other side wants certificates."""


class Refused(SmpUnavailable):
    """An SMP runs there and does not let this process in; `refusal` is what this process lacks."""

    def __init__(self, who: str, refusal: Refusal) -> None:
        super().__init__(f"{who}: {refusal}: {refusal.fix}")
        self.refusal = refusal


def refusal_of(error: HoldfastError) -> Refusal | None:
    """What this process lacks, by the error of a question to an SMP; None: no SMP refuses it."""
    if isinstance(error, VersionMismatch):
        return Refusal.VERSION
    return error.refusal if isinstance(error, Refused) else None


def refusal_in(call: grpc.Call) -> Refusal | None:
    """The same by a call that failed."""
    text = str(call.details())
    if call.code() is grpc.StatusCode.UNAVAILABLE:
        return Refusal.CERTIFICATE if CUT_OFF.search(text) or SAID[Refusal.CERTIFICATE].search(text) else None
    if call.code() is not grpc.StatusCode.UNAUTHENTICATED:
        return None
    return next((refusal for refusal, said in SAID.items() if said.search(text)), None)
