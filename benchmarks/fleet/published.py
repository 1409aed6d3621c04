"""Numbers that others have published about large jobs, and what the simulation gives for the same parameters."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from benchmarks.fleet.engine import simulate
from benchmarks.fleet.failures import FailureProcess
from benchmarks.fleet.groups import place
from benchmarks.fleet.job import STORAGE_RATE_PER_GPU, FleetJob, Site, restart_s
from benchmarks.fleet.strategies import DiskAsync, DiskSync, InMemoryCode, PairReplication, Strategy
from holdfast.planner.failures import DAY_S
from holdfast.planner.profiles import PROFILES

RUNS = 6
TRIALS = 20_000


@dataclass(frozen=True, slots=True)
class PublishedPoint:
    """A published number.

    Attributes:
        within: largest allowed difference to the simulation. `why`: the reason for it.
        simulated: simulates the number, from a seed.
        at_least: whether the published number is only a lower bound.
    """

    name: str
    source: str
    published: float
    within: float
    why: str
    simulated: Callable[[int], float]
    at_least: bool = False

    def holds(self, value: float) -> bool:
        """Whether a simulated value agrees."""
        return value >= self.published if self.at_least else abs(value - self.published) <= self.within


def ettr(job: FleetJob, site: Site, failures: FailureProcess, strategy: Strategy, days: float, seed: int) -> float:
    """Mean effective training time ratio over `RUNS` runs."""
    design = strategy.design(job, site, failures.mtbf_s(job.nodes))
    seconds = days * DAY_S
    return statistics.fmean(
        simulate(job, site, design, failures.trace(job.nodes, site.rack, seconds, f"{seed}/{run}"), seconds).ettr
        for run in range(RUNS)
    )


FREE = Site(storage_rate=math.inf, network_rate=math.inf, digest_rate=math.inf)
"""A site where saving and loading take no time, for studies that include them in the time to recover."""


def _rsc(minutes: float) -> Callable[[int], float]:
    job = FleetJob(2000, state_bytes=0.0, detect_s=0.0, restart_s=300.0)
    return lambda seed: ettr(job, FREE, FailureProcess(6.5), DiskSync(round(minutes * 60 / job.step_s)), 60, seed)


def _rsc_large(seed: int) -> float:
    job = FleetJob(12_500, state_bytes=0.0, detect_s=0.0, restart_s=120.0)
    return ettr(job, FREE, FailureProcess(2.34), DiskSync(round(120 / job.step_s)), 30, seed)


def _hours_between(gpus: int) -> Callable[[int], float]:
    days = 16_000_000 / gpus

    def simulated(seed: int) -> float:
        trace = FailureProcess.of(PROFILES["rsc-1"]).trace(gpus // 8, 2, days * DAY_S, f"{seed}/rsc")
        return days * 24 / len(trace)

    return simulated


def _llama_failures(seed: int) -> float:
    process = FailureProcess.of(PROFILES["llama3"])
    return statistics.fmean(len(process.trace(2048, 2, 54 * DAY_S, f"{seed}/{run}")) for run in range(RUNS))


def _llama(seed: int) -> float:
    job = FleetJob(2048, restart_s=restart_s(16_384))
    site = Site(storage_rate=STORAGE_RATE_PER_GPU * 16_384, spares=8)
    return ettr(job, site, FailureProcess.of(PROFILES["llama3"]), DiskAsync(), 54, seed)


def _survives(strategy: str, lost: int) -> Callable[[int], float]:
    groups = place(16, 2, 1, 1, spread=False) if strategy == "pairs" else place(16, 8, 2, 1, spread=False)

    def simulated(seed: int) -> float:
        random = Random(f"{seed}/{strategy}/{lost}")
        return sum(groups.survives(random.sample(range(16), lost)) for _ in range(TRIALS)) / TRIALS

    return simulated


def _hsdp(stall_s: float) -> Callable[[int], float]:
    nodes = 98_304 // 8
    process = FailureProcess(rate=1000 * DAY_S / (18 * 60 * nodes))
    job = FleetJob(nodes, state_bytes=0.0, detect_s=0.0, restart_s=stall_s)
    return lambda seed: ettr(job, FREE, process, InMemoryCode(6, 2, every=1), 20, seed)


def _byte_robust(seed: int) -> float:
    nodes = 9600 // 8
    process = FailureProcess(1000 * 24 / (2.78 * nodes), drain=0.3, memory=0.1)
    job = FleetJob(nodes, restart_s=restart_s(9600))
    site = Site(network_rate=25e9, spares=5, rack=1)  # a card of 200 Gb/s: an assumption
    return ettr(job, site, process, PairReplication(), 90, seed)


_RSC = "Meta RSC (arXiv 2410.21680)"
_HSDP = "FT-HSDP (arXiv 2602.00277)"

POINTS = (
    PublishedPoint(
        "ETTR, 2,000 nodes, checkpoint every 60 min", _RSC, 0.70, 0.03, "its first-order formula gives 0.684", _rsc(60)
    ),
    PublishedPoint(
        "ETTR, 2,000 nodes, checkpoint every 5 min", _RSC, 0.93, 0.01, "its first-order formula gives 0.932", _rsc(5)
    ),
    PublishedPoint(
        *("ETTR, 100,000 GPUs, 2 min to restart, checkpoint every 2 min", _RSC, 0.90, 0.0, "it asks for 0.9"),
        *(_rsc_large, True),
    ),
    PublishedPoint("hours between failures, 16,384 GPUs", _RSC, 1.8, 0.1, "a projection", _hours_between(16_384)),
    PublishedPoint("hours between failures, 131,072 GPUs", _RSC, 0.23, 0.01, "a projection", _hours_between(131_072)),
    PublishedPoint(
        *("failures of 2,048 nodes in 54 days", "Llama 3 (arXiv 2407.21783)", 419, 25, "one run of theirs, Poisson"),
        _llama_failures,
    ),
    PublishedPoint(
        *("ETTR, 2,048 nodes, asynchronous checkpoints", "Llama 3 (arXiv 2407.21783)", 0.90, 0.0, "'over 90 %'"),
        *(_llama, True),
    ),
    PublishedPoint(
        *("16 nodes, pairs, any 2 are lost: survives", "GEMINI (SOSP 2023)", 0.933, 0.005, "sampling"),
        _survives("pairs", 2),
    ),
    PublishedPoint(
        *("ETTR, 98,304 GPUs, a failure every 18 min, cold restart of 900 s", _HSDP, 0.44, 0.02),
        *("no lost work is counted here", _hsdp(900)),
    ),
    PublishedPoint(
        *("ETTR, 98,304 GPUs, a failure every 18 min, a stall of 3 min", _HSDP, 0.80, 0.05),
        *("no lost work is counted here", _hsdp(180)),
    ),
    PublishedPoint(
        *("ETTR, 9,600 GPUs, a failure every 2.78 h, copies every step", "ByteRobust (SOSP 2025)", 0.97, 0.02),
        *("its times to restart are not ours", _byte_robust),
    ),
)
