"""A table of simulations: each strategy at each size of the job, over several seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.fleet.engine import FleetOutcome, simulate
from benchmarks.fleet.failures import Failure, FailureProcess
from benchmarks.fleet.job import SPARES_PER_NODE, STORAGE_RATE_PER_GPU, FleetJob, Site, restart_s
from benchmarks.fleet.strategies import Strategy
from holdfast.planner.failures import DAY_S
from holdfast.smp_daemon.shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sweep:
    """What to simulate.

    Attributes:
        gpus: sizes of the job.
        spares: numbers of spare machines; None: `SPARES_PER_NODE` of the nodes, at least one.
        job, site: all other parameters. Their nodes, time to restart, spares and storage rate are replaced by those
            that follow from the size.
        storage_rate: bytes per second; None: `STORAGE_RATE_PER_GPU`.
        restart_s: seconds; None: computed from the size by the function `restart_s`.
        seeds: number of runs of each combination; run i has the failures of ``seed/i``, whatever the strategy.
    """

    gpus: tuple[int, ...]
    strategies: tuple[Strategy, ...]
    failures: FailureProcess
    days: float = 90.0
    spares: tuple[int | None, ...] = (None,)
    job: FleetJob = FleetJob(nodes=1)  # noqa: RUF009
    site: Site = Site()  # noqa: RUF009
    storage_rate: float | None = None
    restart_s: float | None = None
    seeds: int = 5
    seed: int = 1234

    def __post_init__(self) -> None:
        if not self.gpus or not self.strategies or not self.spares or self.seeds < 1:
            raise ConfigError("there is nothing to simulate: name at least one size, strategy, number of spares, seed")
        if not 0 < self.days <= 36_500:
            raise ConfigError(f"{self.days} days: use more than 0, and no more than 36500")
        for gpus in self.gpus:
            if gpus < 1 or gpus % self.job.gpus_per_node:
                raise ConfigError(f"{gpus} GPUs do not make nodes of {self.job.gpus_per_node} each: use a multiple")

    def job_of(self, gpus: int) -> FleetJob:
        """The job on `gpus` GPUs."""
        restart = restart_s(gpus) if self.restart_s is None else self.restart_s
        return replace(self.job, nodes=gpus // self.job.gpus_per_node, restart_s=restart)

    def site_of(self, gpus: int, spares: int | None) -> Site:
        """The site of the job on `gpus` GPUs, with `spares` spares."""
        chosen = max(1, math.ceil(gpus // self.job.gpus_per_node * SPARES_PER_NODE)) if spares is None else spares
        storage = STORAGE_RATE_PER_GPU * gpus if self.storage_rate is None else self.storage_rate
        return replace(self.site, spares=chosen, storage_rate=storage)


@dataclass(frozen=True, slots=True)
class SeedMean:
    """A mean over seeds, and its standard error, which is None with a single seed."""

    mean: float
    error: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> SeedMean:
        """The mean of `values`, one for each seed."""
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        return cls(statistics.fmean(values), error)


@dataclass(frozen=True, slots=True)
class SweepRow:
    """The result of one strategy at one size. Bytes are per node. `save` to `waiting` are shares of all time; with
    `ettr` they add up to 1.

    Attributes:
        strategy: its name; if several numbers of spares are simulated, with the number that was requested.
        every: steps between snapshots or checkpoints; 0: none are made.
        ettr: effective training time ratio.
        lost_steps, restarts: numbers over the whole time.
        stored: number of restarts that loaded from storage, or began at step 0.
        longest_s: the longest time without training.
        memory_bytes: memory reserved for copies.
        network_bytes: bytes sent to other nodes for each save. network_rate: the same per second, on average.
        storage_rate: bytes per second that all nodes together send to storage, on average.
    """

    gpus: int
    nodes: int
    strategy: str
    spares: int
    every: int
    ettr: SeedMean
    lost_steps: SeedMean
    restarts: SeedMean
    stored: SeedMean
    save: SeedMean
    lost: SeedMean
    recovery: SeedMean
    waiting: SeedMean
    longest_s: SeedMean
    memory_bytes: float
    network_bytes: float
    network_rate: float
    storage_rate: float


def run(sweep: Sweep, tell: Callable[[SweepRow], None] = lambda row: None) -> list[SweepRow]:
    """Simulate all combinations, and call `tell` with each row as soon as it is done.

    Raises:
        ConfigError: a strategy is impossible at a size.
    """
    rows = []
    for gpus in sweep.gpus:
        seconds = sweep.days * DAY_S
        nodes = gpus // sweep.job.gpus_per_node
        traces = [
            sweep.failures.trace(nodes, sweep.site.rack, seconds, f"{sweep.seed}/{index}")
            for index in range(sweep.seeds)
        ]
        for spares in sweep.spares:
            for strategy in sweep.strategies:
                rows.append(_row(sweep, gpus, spares, strategy, traces))
                tell(rows[-1])
    return rows


def _row(
    sweep: Sweep, gpus: int, spares: int | None, strategy: Strategy, traces: Sequence[Sequence[Failure]]
) -> SweepRow:
    job, site = sweep.job_of(gpus), sweep.site_of(gpus, spares)
    design = strategy.design(job, site, sweep.failures.mtbf_s(job.nodes))
    outcomes = [simulate(job, site, design, trace, sweep.days * DAY_S) for trace in traces]

    def over(value: Callable[[FleetOutcome], float]) -> SeedMean:
        return SeedMean.of([value(outcome) for outcome in outcomes])

    sent = next((save.every for save in design.saves if save.protected_s < math.inf), 1)
    stored = [save for save in design.saves if save.persisted_s < math.inf]
    return SweepRow(
        gpus=gpus,
        nodes=job.nodes,
        strategy=strategy.name + _spares(sweep, spares),
        spares=site.spares,
        every=design.saves[0].every if design.saves else 0,
        ettr=over(lambda o: o.ettr),
        lost_steps=over(lambda o: o.lost_steps),
        restarts=over(lambda o: o.restores.total()),
        stored=over(lambda o: o.restores["persisted"] + o.restores["start"]),
        save=over(lambda o: o.save_s / o.wall_s),
        lost=over(lambda o: o.lost_s / o.wall_s),
        recovery=over(lambda o: o.recovery_s / o.wall_s),
        waiting=over(lambda o: o.waiting_s / o.wall_s),
        longest_s=over(lambda o: o.longest_s),
        memory_bytes=design.memory_bytes,
        network_bytes=design.network_bytes,
        network_rate=design.network_bytes / (sent * job.step_s),
        storage_rate=sum(job.nodes * design.storage_bytes / (save.every * job.step_s) for save in stored),
    )


def _spares(sweep: Sweep, spares: int | None) -> str:
    if len(sweep.spares) == 1 or spares is None:
        return ""
    return f", {spares or 'no'} spare{'s' * (spares != 1)}"
