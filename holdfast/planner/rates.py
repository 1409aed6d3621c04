"""How fast an SMP is for each core: as ``holdfast bench node`` measured it, or as it was when it was last measured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from holdfast.smp_daemon.shared.errors import ConfigError, ProtocolError
from holdfast.smp_daemon.shared.plain import from_plain
from holdfast.smp_daemon.shared.quantities import amount
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


LAST = NodeRates(
    date="2026-11-24",
    cpu_model="AMD EPYC",
    cores=2,
    copy=11.74e9,
    digest=14.15e9,
    send=5.382e9,
    receive=7.275e9,
    fold=10.41e9,
    protect=1.383e9,
    smp_cores=0.3295,
)
"""What is assumed without a file: benchmarks/results/node-2026-11-24.json, by `make bench-node`; a test compares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmpRates:
    """What the SMP of a node can do: so much for each core, and no more than the network carries. Rates are bytes/s.

    Attributes:
        rates: of a core.
        file: where they come from; empty: `LAST`.
        given_cores: that it may use; None: as many as it kept busy when this was measured, and 1 at least: the machine
            may have had others to serve.
        line_rate: out of all network cards of the node together; infinite: not known.
        given_digest, given_network: named by the user, and then they hold, whatever was measured.
    """

    rates: NodeRates = LAST
    file: str = ""
    given_cores: float | None = None
    line_rate: float = math.inf
    given_digest: float | None = None
    given_network: float | None = None

    def __post_init__(self) -> None:
        """Raises `ConfigError` if a number is not more than 0."""
        for name, value, unit in (
            ("the cores of an SMP", self.given_cores, ""),
            ("the digest rate", self.given_digest, " bytes per second"),
            ("the network rate", self.given_network, " bytes per second"),
        ):
            if value is not None:
                positive(name, value, unit)
        if not self.line_rate > 0:
            raise ConfigError(f"the line rate is {self.line_rate:g} bytes per second: give more than 0")

    @property
    def cores(self) -> float:
        """That it uses."""
        return self.given_cores or max(1.0, self.rates.smp_cores)

    @property
    def digest(self) -> float:
        """At which a snapshot is sealed."""
        return self.given_digest or self.rates.digest * self.cores

    @property
    def protect(self) -> float:
        """At which its cores protect: send, and receive, digest and fold for others."""
        return self.rates.protect * self.cores

    @property
    def network(self) -> float:
        """What encoding sends out of a node."""
        return self.given_network or min(self.line_rate, self.protect)

    @property
    def limit(self) -> str:
        """What limits that: ``cores``, ``network``, or what was ``given``."""
        if self.given_network:
            return "given"
        return "network" if self.line_rate < self.protect else "cores"

    def with_cores(self, cores: float) -> SmpRates:
        """The same with so many."""
        return replace(self, given_cores=cores)

    def to_json(self) -> dict[str, Any]:
        """For ``--json``: what was used, and where it comes from."""
        return {
            "source": self.file or "last measured",
            "measured": asdict(self.rates),
            "smp_cores": self.cores,
            "line_rate": self.line_rate if self.line_rate < math.inf else None,
            "digest_rate": self.digest,
            "network_rate": self.network,
            "limit": self.limit,
        }


def basis(smp: SmpRates, here: int) -> Iterator[str]:
    """What a plan's rates rest on, in sentences. Pure.

    Args:
        here: cores of the machine that plans.
    """
    rates = smp.rates
    source = f"from {smp.file} ({rates})" if smp.file else f"as last measured ({rates}), for want of --measured"
    cores = f"{smp.cores:.3g} core{'s' * (smp.cores != 1)}"
    who = "--smp-cores" if smp.given_cores else "--smp-cores says how many it may use"
    yield (
        f"Rates are {source}: for each core of an SMP {amount(rates.protect)}/s protected and {amount(rates.digest)}/s "
        f"digested; it has {cores} ({who})."
    )
    parts = {"to send": rates.send, "to receive": rates.receive, "to digest": rates.digest, "to fold": rates.fold}
    yield (
        f"A core needs {1e9 / rates.protect:.2f} s for each GB that is protected: "
        + ", ".join(f"{1e9 / each:.2f} {what}" for what, each in parts.items())
        + ", and the rest for all else."
    )
    text = f"Protecting sends {amount(smp.network)}/s out of a node"
    if smp.limit == "given":
        yield f"{text}, as --network-rate says; those cores would do {amount(smp.protect)}/s."
    elif smp.limit == "network":
        yield f"{text}: its network cards (--line-rate) limit it, for those cores would do {amount(smp.protect)}/s."
    elif smp.line_rate < math.inf:
        yield f"{text}: the SMP's cores limit it; the network cards would do {amount(smp.line_rate)}/s (--line-rate)."
    else:
        yield f"{text}: what the SMP's cores do, if the network cards do (--line-rate bounds it)."
    if smp.file and here != rates.cores:
        yield (
            f"NOTE: {smp.file} is of a machine with {rates.cores} cores, and this one has {here}: measure on a node of "
            "the job, unless that was one."
        )
    if smp.cores > rates.cores:
        yield (
            f"NOTE: {rates.cores} cores were measured, and not {smp.cores:g}: that each of them does as much is an "
            "assumption; measure on a node of the job."
        )
