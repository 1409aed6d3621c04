"""Why an SMP that runs does not answer: it refuses this process, and what this process lacks. Pure."""

from __future__ import annotations

import re
from enum import StrEnum

import grpc

from holdfast.smp_daemon.shared.errors import HoldfastError, VersionMismatch


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


def refusal_of(error: HoldfastError) -> Refusal | None:
    """What this process lacks, by the error of a question to an SMP (`PeerClient.ask`); None: no SMP refuses it."""
    if isinstance(error, VersionMismatch):
        return Refusal.VERSION
    cause, text = error.__cause__, str(error)
    if isinstance(cause, grpc.Call):  # as the errors of its calls are
        text = str(cause.details())
        if cause.code() is grpc.StatusCode.UNAVAILABLE:
            refused = CUT_OFF.search(text) or SAID[Refusal.CERTIFICATE].search(text)
            return Refusal.CERTIFICATE if refused else None
        if cause.code() is not grpc.StatusCode.UNAUTHENTICATED:
            return None
    elif "this job's token" not in text:
        return None
    return next((refusal for refusal, said in SAID.items() if said.search(text)), None)
