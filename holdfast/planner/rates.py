"""How fast an SMP is for each core: as ``holdfast bench node`` measured it, or as it was when it was last measured."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self

from holdfast.smp_daemon.shared.errors import ConfigError, ProtocolError
from holdfast.smp_daemon.shared.plain import from_plain
from holdfast.snapshot.interval.checks import positive

KIND = "holdfast bench node"
FORMAT = 1
"""Version of the file; another one is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRates:
    """Bytes per second and core, as measured on a machine.

    Attributes:
        date, cpu_model, cores: when, and on what.
        copy, digest, send, receive, fold: of each part by itself.
        protect: of a node's state, from sealed to parity committed with one parity unit a stripe: what it sends, and
            what it receives, digests and folds for others meanwhile.
        smp_cores: that one SMP kept busy with that.
    """

    date: str
    cpu_model: str
    cores: int
    copy: float
    digest: float
    send: float
    receive: float
    fold: float
    protect: float
    smp_cores: float

    def __post_init__(self) -> None:
        """Raises `ConfigError` if one is not more than 0."""
        for field in fields(self)[2:]:
            positive(f"rates of a node: {field.name}", getattr(self, field.name))

    def __str__(self) -> str:
        """When, and on what."""
        return f"{self.date[:10]}, {self.cpu_model}, {self.cores} core{'s' * (self.cores > 1)}"

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Of what ``holdfast bench node`` wrote. Raises `ConfigError` if it is anything else."""
        if not isinstance(data, dict) or data.get("kind") != KIND:
            raise ConfigError(f"it was not written by {KIND} --json")
        if data.get("format") != FORMAT:
            raise ConfigError(f"its format is {data.get('format')!r}, and this version reads {FORMAT}: measure anew")
        if data.get("rates") is None:
            raise ConfigError("it was measured with --smps-only, and lacks the parts: measure without")
        try:
            return from_plain(cls, data["rates"], "rates of a node")
        except ProtocolError as error:
            raise ConfigError(f"it is damaged: {error}; measure anew") from error
