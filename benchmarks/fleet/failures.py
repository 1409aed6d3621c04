"""Draws a trace of failures from rates and a seed. The same trace is used for every strategy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from holdfast.planner.failures import DAY_S
from holdfast.planner.profiles import FailureProfile
from holdfast.smp_daemon.shared.errors import ConfigError

DRAIN = 0.30
"""Share of failures after which the host must be replaced while its memory is still readable, such as a bad GPU or NIC.
28 to 33 % by the causes of Llama 3 and FT-HSDP; Unicron has 37 %."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One interruption.

    Attributes:
        kind: ``process``: processes die; ``drain``: the host must be replaced, but its memory can still be read;
            ``memory``: the host's memory is lost; ``shock``: the memory of a whole rack is lost.
        nodes: the places in the job that the failure hits.
    """

    at_s: float
    kind: str
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FailureProcess:
    """Rates of failures. The kinds are independent of each other.

    Attributes:
        rate: interruptions per 1,000 node-days.
        drain, memory, shock: shares of these kinds; the rest is ``process``.
        shape: Weibull shape of the times between two failures of a kind anywhere in the job; 1 is Poisson, less gives
            bursts. It does not change the mean.
    """

    rate: float
    drain: float = 0.0
    memory: float = 0.0
    shock: float = 0.0
    shape: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.rate < math.inf:
            raise ConfigError(f"a rate of {self.rate} failures per 1,000 node-days: use a number of 0 or more")
        if not min(self.drain, self.memory, self.shock) >= 0 or not self.drain + self.memory + self.shock <= 1 + 1e-9:
            raise ConfigError(
                f"shares {self.drain} (drain), {self.memory} (memory), {self.shock} (shock): none may be less than 0, "
                "and together no more than 1"
            )
        if not 0.1 <= self.shape <= 10:
            raise ConfigError(f"a Weibull shape of {self.shape}: use 0.1 to 10; 1 is Poisson")

    @classmethod
    def of(cls, profile: FailureProfile, *, drain: float = DRAIN, shape: float = 1.0) -> FailureProcess:
        """The rates of a published study."""
        return cls(profile.rate, min(drain, profile.process), profile.memory, profile.shock, shape)

    @property
    def shares(self) -> dict[str, float]:
        """The share of each kind."""
        rest = max(0.0, 1 - self.drain - self.memory - self.shock)
        return {"process": rest, "drain": self.drain, "memory": self.memory, "shock": self.shock}

    def mtbf_s(self, nodes: int) -> float:
        """Mean time between two failures of a job of `nodes` nodes, in seconds."""
        return DAY_S * 1000 / (self.rate * nodes) if self.rate else math.inf

    def trace(self, nodes: int, rack: int, seconds: float, seed: str) -> list[Failure]:
        """All failures of the first `seconds`, ordered by time. Each `rack` consecutive nodes form a rack."""
        found = []
        for kind, share in self.shares.items():
            if not share or not self.rate:
                continue
            random = Random(f"{seed}/{kind}")
            mean = self.mtbf_s(nodes) / share
            scale = mean / math.gamma(1 + 1 / self.shape)
            at_s = random.weibullvariate(scale, self.shape)
            while at_s < seconds:
                node = random.randrange(nodes)
                first = node // rack * rack
                hit = tuple(range(first, min(first + rack, nodes))) if kind == "shock" else (node,)
                found.append(Failure(at_s, kind, hit))
                at_s += random.weibullvariate(scale, self.shape)
        return sorted(found, key=lambda failure: (failure.at_s, failure.kind))
