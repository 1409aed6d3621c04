"""What to do: interval, code, `protect_every`, slots, memory and SMP cores of a job. Pure; results depend on the seed.

The interval is the trainers' own: `trainer_interval` asks the rule that they follow, with what they would measure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.planner.checks import positive, within
from holdfast.planner.costs import Costs
from holdfast.planner.failures import DAY_S, FailureModel, spare_nodes
from holdfast.planner.montecarlo import Played, play
from holdfast.planner.periods import LONGEST_STEPS, slots_needed, young
from holdfast.planner.survival import Code, Domains, candidates, judge
from holdfast.planner.waste import ENCODE_EVERY, Level, first_order, lost, overhead
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.failures import NODE_LOST
from holdfast.smp_daemon.shared.limits import MAX_GENERATIONS
from holdfast.snapshot.interval.rule import Spacing, choose
from holdfast.snapshot.resume.arrange import Protection
from holdfast.snapshot.step.ledger import parity_slots

CLOSE = 1e-3
"""Plans that lose no more than this share of the time more than the best one count as equal. Of these the one is
recommended that protects most snapshots, then the one of fewest SMP cores, then the one of least memory."""

SAFE = 1.1
"""If no plan reaches the target survival, those of at most this many times the least risk are compared."""

CORES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Numbers of cores to consider for the SMP of a node."""

SLOTS = (2, 3, 4)
DEFAULT_SLOTS = 3
"""The hook's default."""

OLD_STEPS = 10**12
"""Age of a job, in steps, at which its interval no longer depends on its age."""

NODE_REPAIR_S = DAY_S
"""Time until a node that was taken out is back, which the number of spare nodes depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The user's requirements.

    Attributes:
        overhead_budget: largest share of training time for snapshots; None: any.
        memory_budget: largest shared memory of a node in bytes; None: any.
        target_survival: least probability that state in memory survives 30 days.
        code: a fixed (k, m), where (0, 0) is no parity; None: choose one.
        generations: protected snapshots that are kept.
        seed: seed of the Monte Carlo simulation.

    Raises:
        ConfigError: a value is out of its range.
    """

    overhead_budget: float | None = 0.01
    memory_budget: float | None = None
    target_survival: float = 0.999
    code: tuple[int, int] | None = None
    generations: int = 1
    seed: int = 1

    def __post_init__(self) -> None:
        if self.overhead_budget is not None and not 0 < self.overhead_budget < 1:
            raise ConfigError(
                f"an overhead budget of {self.overhead_budget:g}: give a fraction between 0 and 1, such as 0.01"
            )
        if self.memory_budget is not None:
            positive("the memory budget", self.memory_budget, " bytes")
        within("the target survival", self.target_survival, 0.0, 1.0)
        within("the number of generations", self.generations, 1, MAX_GENERATIONS)
        within("the seed", self.seed, 0, 2**63)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to run a job, and what it loses.

    Attributes:
        cores: cores of a node's SMP; 0 if a profile measured with an unknown number.
        slots: slots per shard, as the hook's option counts them: further generations and storage take more.
        encode_every: one of this many snapshots is protected.
        interval: what the trainers choose with this.
        levels: cost of each level, and the failures that it serves.
        periods: steps between snapshots, between protected ones and between persisted ones, as far as they exist.
        memory_bytes: shared memory of a node.
        waste: share of wall time lost, including to failures, to first order.
    """

    cores: float
    code: Code
    slots: int
    encode_every: int
    interval: Spacing
    levels: tuple[Level, ...]
    periods: tuple[int, ...]
    memory_bytes: float
    waste: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A way to protect a job: what it takes and what it survives."""

    name: str
    code: Code
    slots: int
    memory_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """A plan, and what to expect from it.

    Attributes:
        setting: what to do.
        overhead: visible cost over useful work, without failures.
        lost: the share of wall time lost to each class of failures, to first order.
        played: effective training time ratio by Monte Carlo.
        network_rate, storage_rate: mean bytes per second that a node sends to other nodes and to storage.
        spares: number of spare nodes.
        compared: what the hook's defaults, and two parity units, take and survive.
        met: whether the target survival is reached.
        gain: share of time that protecting fewer snapshots gains over protecting each; 0 if each is.
        why: the reasons, in sentences.
    """

    nodes: int
    setting: Candidate
    costs: Costs
    overhead: float
    lost: tuple[float, ...]
    played: Played
    network_rate: float
    storage_rate: float
    spares: int
    seed: int
    compared: tuple[Compared, ...]
    met: bool
    gain: float = 0.0
    why: tuple[str, ...] = ()

    @property
    def encode_every(self) -> int:
        """One of this many snapshots is protected; 0: none."""
        return self.setting.encode_every if self.setting.code.parity else 0

    @property
    def persist_every(self) -> int:
        """One of this many snapshots is persisted; 0: none."""
        setting = self.setting
        return setting.periods[-1] // setting.periods[0] if setting.levels[-1].name == "beyond" else 0

    @property
    def interval_s(self) -> float:
        """Seconds of training between two snapshots."""
        return self.setting.periods[0] * self.costs.step_s

    @property
    def going_back_s(self) -> tuple[float, ...]:
        """For each class of failures that is survived, the work that one costs on average, without the restart: half a
        period, and the time until a snapshot counts."""
        step_s = self.costs.step_s
        return tuple(
            period * step_s / 2 + level.latency_s
            for level, period in zip(self.setting.levels, self.setting.periods, strict=True)
        )

    def to_json(self) -> dict[str, Any]:
        """As plain values: bytes, seconds, shares. `encode_every` and `persist_every` count snapshots; 0: never."""
        setting, costs = self.setting, self.costs
        code, sizes = setting.code, setting.code.sizes if setting.code.parity else ()
        names = [level.name for level in setting.levels]
        return {
            "interval_steps": setting.periods[0],
            "interval_s": self.interval_s,
            "k": code.data,
            "m": code.parity,
            "encode_every": self.encode_every,
            "persist_every": self.persist_every,
            "overhead": self.overhead,
            "ettr": self.played.mean,
            "memory_bytes_per_node": setting.memory_bytes,
            "survival_30d": code.survival,
            "why": list(self.why),
            "ettr_error": self.played.error,
            "ettr_first_order": 1.0 - setting.waste,
            "lost": dict(zip(names, self.lost, strict=True)),
            "lost_s_per_day": (1.0 - self.played.mean) * DAY_S,
            "groups": [[size, sizes.count(size)] for size in sorted(set(sizes))],
            "spare_nodes": self.spares,
            "network_bytes_per_s_per_node": self.network_rate,
            "storage_bytes_per_s_per_node": self.storage_rate,
            "target_met": self.met,
            "seed": self.seed,
            "slots": setting.slots,
            "smp_cores": setting.cores or None,
            "going_back_s": dict(zip(names, self.going_back_s, strict=True)),
            "sizes": {
                "node_bytes": costs.state_bytes,
                "arena_bytes": setting.memory_bytes,
                "commit_s": costs.commit_s,
                "encode_s": code.parity * costs.encode_s,
                "protected_s": costs.commit_s + code.parity * costs.encode_s,
            },
            "compared": [
                {
                    "name": each.name,
                    "k": each.code.data,
                    "m": each.code.parity,
                    "slots": each.slots,
                    "memory_bytes_per_node": each.memory_bytes,
                    "survival_30d": each.code.survival,
                }
                for each in self.compared
            ],
        }


def recommend(
    costs: Mapping[float, Costs], model: FailureModel, nodes: int, domains: Domains, targets: Targets
) -> Recommendation:
    """The plan to recommend: see `CLOSE`.

    Codes that exceed the memory budget are rejected. Of the others, those that reach the target survival are compared;
    if none does, those that survive about best (`SAFE`), and `met` is False.

    Args:
        costs: what snapshots cost, for each number of SMP cores to consider.

    Raises:
        ConfigError: no code fits the memory budget, no interval is feasible, or a number is out of its range.
    """
    found = [
        each
        for cores, costs_s in costs.items()
        for each in candidates_of(cores, costs_s, model, nodes, domains, targets)
    ]
    if not found:
        some = next(iter(costs.values()))
        raise ConfigError(
            f"no interval is feasible: copying takes {some.commit_s:g} s and encoding {some.encode_s:g} s for each "
            "parity unit; use more nodes, more SMP cores or a smaller state"
        )
    fitting = [each for each in found if each.memory_bytes <= (targets.memory_budget or math.inf)]
    if not fitting:
        least = min(each.memory_bytes for each in found)
        raise ConfigError(
            f"a memory budget of {targets.memory_budget:,.0f} bytes a node: the least that is possible is "
            f"{least:,.0f}; give as much, or use more nodes"
        )
    met = [each for each in fitting if each.code.survival >= targets.target_survival]
    least_risk = min(each.code.risk for each in fitting)
    good = met or [each for each in fitting if each.code.risk <= SAFE * least_risk]
    least_waste = min(each.waste for each in good)
    close = [each for each in good if each.waste <= least_waste + CLOSE]
    chosen = min(close, key=lambda each: (each.encode_every, each.cores, round(each.memory_bytes), each.waste))
    each_encoded = [
        each.waste for each in good if (each.cores, each.code, each.encode_every) == (chosen.cores, chosen.code, 1)
    ]
    costs_s = costs[chosen.cores]
    periods_s = [period * costs_s.step_s for period in chosen.periods]
    persisted = chosen.levels[-1].name == "beyond"
    return Recommendation(
        nodes=nodes,
        setting=chosen,
        costs=costs_s,
        overhead=overhead(chosen.levels, periods_s),
        lost=lost(chosen.levels, periods_s),
        played=play(chosen.levels, chosen.periods, costs_s.step_s, seed=targets.seed),
        network_rate=chosen.code.parity * costs_s.state_bytes / periods_s[1] if chosen.code.parity else 0.0,
        storage_rate=costs_s.state_bytes / periods_s[-1] if persisted else 0.0,
        spares=spare_nodes(model, nodes, NODE_REPAIR_S),
        seed=targets.seed,
        compared=tuple(compare(chosen, costs_s, model, nodes, domains, targets)),
        met=bool(met),
        gain=max(0.0, min(each_encoded, default=chosen.waste) - chosen.waste) if chosen.encode_every > 1 else 0.0,
    )


def candidates_of(
    cores: float, costs: Costs, model: FailureModel, nodes: int, domains: Domains, targets: Targets
) -> Iterator[Candidate]:
    """Every way to run the job with `cores` cores for an SMP in which no snapshot is skipped and encoding keeps up."""
    for k, m in [targets.code] if targets.code is not None else candidates(nodes):
        code = judge(k, m, nodes, model, domains, window(costs, m))
        levels = levels_of(costs, code, model, nodes)
        for slots in SLOTS:
            for every in ENCODE_EVERY if m else (1,):
                interval = trainer_interval(costs, m, every, model.job(nodes), targets.overhead_budget)
                if not _keeps_up(costs, m, every, slots, interval.steps):
                    continue
                periods = _periods(levels, interval.steps, every, costs, targets.overhead_budget)
                yield Candidate(
                    cores=cores,
                    code=code,
                    slots=slots,
                    encode_every=every,
                    interval=interval,
                    levels=levels,
                    periods=periods,
                    memory_bytes=memory(costs, code, slots, every, targets.generations),
                    waste=first_order(levels, [period * costs.step_s for period in periods]),
                )


def trainer_interval(
    costs: Costs, parity: int, every: int, rates: Mapping[str, float], budget: float | None
) -> Spacing:
    """The interval that the trainers of a job settle on, by the rule that they follow, once the job is old enough.

    As they do, it takes the cost of a snapshot as the mean over `every` snapshots, of which one is encoded, and counts
    a failure that needs a protected snapshot `every` times, as it loses half of as many intervals. A snapshot that will
    be encoded begins after a step in which none was worked on; where that decides, the limit is ``protect``.

    Args:
        rates: failures of the job per second, by class; those that no memory survives do not count.
    """
    restored = sum(rate for kind, rate in rates.items() if kind != "beyond")
    wish = choose(
        step_s=costs.step_s,
        cost_s=costs.snapshot_cost_s + parity * costs.encode_cost_s / every,
        failure_rate=max(restored * (1 + NODE_LOST * (every - 1)), 1e-300),
        budget=budget,
        done=OLD_STEPS,
    )
    busy_s = costs.commit_s + parity * costs.encode_s if every == 1 else costs.commit_s
    least = math.ceil(busy_s / costs.step_s) + 1
    return Spacing(least, "protect") if least > wish.steps else wish


def _keeps_up(costs: Costs, parity: int, every: int, slots: int, steps: int) -> bool:
    interval_s, encode_s = steps * costs.step_s, parity * costs.encode_s
    needed = slots_needed(interval_s, costs.commit_s, encode_s, encode_every=every)
    return interval_s >= costs.commit_s and every * interval_s >= encode_s and needed <= slots


def _periods(levels: Sequence[Level], steps: int, every: int, costs: Costs, budget: float | None) -> tuple[int, ...]:
    """Steps between snapshots of each level. The persisted one follows Young's formula, but is no more frequent than a
    persist lasts, or than the budget leaves room for."""
    periods = [steps, steps * every][: sum(level.name != "beyond" for level in levels)]
    if levels[-1].name != "beyond":
        return tuple(periods)
    beyond, unit_s = levels[-1], periods[-1] * costs.step_s
    left = (budget or 1.0) - overhead(levels[:-1], [period * costs.step_s for period in periods])
    least_s = max(costs.persist_s, beyond.cost_s / left if left > 0 else 0.0)
    ideal_s = young(beyond.cost_s, 1 / beyond.rate) if beyond.rate else math.inf
    most = max(1, LONGEST_STEPS // periods[-1])
    return *periods, periods[-1] * int(min(most, max(1, math.ceil(least_s / unit_s - 1e-9), ideal_s // unit_s)))


def window(costs: Costs, parity: int) -> float:
    """Time until a lost node's bytes are protected again: it is replaced, rebuilt and encoded."""
    return costs.rebuild_s + parity * costs.encode_s


def memory(costs: Costs, code: Code, slots: int, encode_every: int = 1, generations: int = 1) -> float:
    """Shared memory of a node in bytes: a slot of the state for each slot, and parity of m/k of it for each parity
    slot. Every generation beyond the first takes one more slot, and so does a snapshot that is written to storage."""
    kept = slots + generations - 1
    parities = parity_slots(kept, encode_every, generations)
    return costs.state_bytes * (kept + parities * (code.memory - 1) + costs.persists)


def levels_of(costs: Costs, code: Code, model: FailureModel, nodes: int) -> tuple[Level, ...]:
    """The levels, each with the job's rate of failures that need it. Shocks that the code survives are memory
    losses."""
    rates = model.job(nodes)
    if not code.parity:
        return costs.levels(0, rates["process"], rates["memory"] + rates["shock"], rates["beyond"])
    survived = rates["memory"] + rates["shock"] - code.loss_rate
    return costs.levels(code.parity, rates["process"], max(0.0, survived), code.loss_rate + rates["beyond"])


def compare(
    chosen: Candidate, costs: Costs, model: FailureModel, nodes: int, domains: Domains, targets: Targets
) -> Iterator[Compared]:
    """What is recommended, what the hook does if it is told nothing, and what two parity units would give."""
    yield Compared(name="recommended", code=chosen.code, slots=chosen.slots, memory_bytes=chosen.memory_bytes)
    for name, parity in (("the hook's defaults", 1), ("with m = 2", 2)):
        protection = Protection(0, parity).for_nodes(nodes)
        if protection.data + parity > nodes:
            continue
        code = judge(protection.data, parity, nodes, model, domains, window(costs, parity))
        bytes_ = memory(costs, code, DEFAULT_SLOTS, 1, targets.generations)
        yield Compared(name=name, code=code, slots=DEFAULT_SLOTS, memory_bytes=bytes_)
