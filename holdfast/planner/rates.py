"""How fast an SMP is per core: as ``holdfast bench node`` measured it on a node, or as the project last measured it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from holdfast.planner.checks import positive
from holdfast.smp_daemon.shared.errors import ConfigError, ProtocolError
from holdfast.smp_daemon.shared.plain import from_plain
from holdfast.smp_daemon.shared.quantities import amount

KIND = "holdfast bench node"
FORMAT = 1
"""Version of the file's format; other versions are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRates:
    """Bytes per second and core, as measured on a machine.

    Attributes:
        date, cpu_model, cores: when and on what machine the rates were measured.
        copy, digest, send, receive, fold: the rate of each part by itself.
        protect: the rate at which a node's state is protected, from sealed to parity committed, with one parity unit
            per stripe. Includes all that the node receives, digests and folds for others meanwhile.
        smp_cores: number of cores that one SMP kept busy while protecting.
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
        """Raises `ConfigError` if a number is not more than 0."""
        for field in fields(self)[2:]:
            positive(f"rates of a node: {field.name}", getattr(self, field.name))

    def __str__(self) -> str:
        """When and on what machine the rates were measured."""
        return f"{self.date[:10]}, {self.cpu_model}, {self.cores} core{'s' * (self.cores > 1)}"

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """The rates from the JSON of ``holdfast bench node``. Raises `ConfigError` if `data` is anything else."""
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
"""The rates to use without a file: benchmarks/results/node-2026-11-24.json, by `make bench-node`; a test compares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmpRates:
    """What the SMP of a node can do: the rate of its cores, but no more than the network carries. Rates are bytes/s.

    Attributes:
        rates: rates per core.
        file: the file they come from; empty for `LAST`.
        given_cores: number of cores that the SMP may use. None: as many as it kept busy in the measurement, but at
            least 1, since other processes may have needed that machine's cores.
        line_rate: rate out of all network cards of the node together; infinite if it is not known.
    """

    rates: NodeRates = LAST
    file: str = ""
    given_cores: float | None = None
    line_rate: float = math.inf

    def __post_init__(self) -> None:
        """Raises `ConfigError` if a number is not more than 0."""
        if self.given_cores is not None:
            positive("the cores of an SMP", self.given_cores)
        if not self.line_rate > 0:
            raise ConfigError(f"the line rate is {self.line_rate:g} bytes per second: give more than 0")

    @property
    def cores(self) -> float:
        """Number of cores that the SMP uses."""
        return self.given_cores or max(1.0, self.rates.smp_cores)

    @property
    def digest(self) -> float:
        """Rate at which a snapshot is sealed."""
        return self.rates.digest * self.cores

    @property
    def protect(self) -> float:
        """Rate at which the SMP's cores can protect: send, and receive, digest and fold for others."""
        return self.rates.protect * self.cores

    @property
    def network(self) -> float:
        """Rate at which encoding sends out of a node."""
        return min(self.line_rate, self.protect)

    @property
    def limit(self) -> str:
        """What limits `network`: ``cores`` or ``network`` cards."""
        return "network" if self.line_rate < self.protect else "cores"

    def with_cores(self, cores: float) -> SmpRates:
        """The same SMP with `cores` cores."""
        return replace(self, given_cores=cores)

    def to_json(self) -> dict[str, Any]:
        """The JSON object that ``--json`` writes: the rates in use, and where they come from."""
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
    """Sentences on what a plan's rates are based on. Pure.

    Args:
        here: number of cores of the machine that runs the planner.
    """
    rates = smp.rates
    source = f"from {smp.file} ({rates})" if smp.file else f"as last measured ({rates}), since there is no --measured"
    yield f"Rates are {source}: a core digests {amount(rates.digest)}/s and protects {amount(rates.protect)}/s."
    parts = {"to send": rates.send, "to receive": rates.receive, "to digest": rates.digest, "to fold": rates.fold}
    other = 1e9 / rates.protect - sum(1e9 / each for each in parts.values())
    yield (
        f"A core needs {1e9 / rates.protect:.2f} s to protect a GB: "
        + ", ".join(f"{1e9 / each:.2f} s {what}" for what, each in parts.items())
        + f", {max(0.0, other):.2f} s other."
    )
    text = f"With {count_cores(smp.cores)} an SMP sends {amount(smp.network)}/s out of its node"
    if smp.limit == "network":
        yield f"{text}: the network cards (--line-rate) are the limit; the cores would do {amount(smp.protect)}/s."
    elif smp.line_rate < math.inf:
        yield f"{text}: the cores are the limit; the network cards would carry {amount(smp.line_rate)}/s."
    else:
        yield f"{text}, if the network cards carry it: set --line-rate."
    if smp.file and here != rates.cores:
        yield (
            f"NOTE: {smp.file} was measured with {rates.cores} cores, and this machine has {here}: measure on a node "
            "of the job."
        )
    if smp.cores > rates.cores:
        yield (
            f"NOTE: measured with {count_cores(rates.cores)}; the plan assumes that {smp.cores:g} cores are "
            f"{smp.cores / rates.cores:.3g} times as fast."
        )


def count_cores(count: float) -> str:
    """A number of cores as text."""
    return f"{count:.3g} core{'s' * (count != 1)}"
