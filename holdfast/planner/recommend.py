"""Recommends code, interval, levels and spare nodes from costs and failures. Pure; results depend on the seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast.planner.codes import Code, Domains, candidates, judge
from holdfast.planner.costs import Costs
from holdfast.planner.montecarlo import Played, play
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.limits import MIN_SLOTS
from holdfast.snapshot.interval.checks import positive, within
from holdfast.snapshot.interval.failures import DAY_S, FailureModel, spare_nodes
from holdfast.snapshot.interval.periods import LONGEST_STEPS, Interval, choose_interval
from holdfast.snapshot.interval.waste import Level, best_periods, first_order, lost, overhead
from holdfast.snapshot.step.ledger import parity_slots

CLOSE = 2e-4
"""Plans whose effective training time ratios differ by no more than this count as equal: the simpler one wins, or the
one of least memory."""

ROUGH = 0.05
"""Waste above which first order is not trusted. Its error is of the order of the waste squared; below this waste, it
moves no interval by a tenth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The user's requirements.

    Attributes:
        overhead_budget: largest share of training time for snapshots; None: any.
        memory_budget: largest shared memory of a node in bytes; None: any.
        target_survival: least probability that state in memory survives 30 days.
        code: a fixed (k, m), where (0, 0) is no parity; None: choose one.
        repair_window_s: time until a lost node's bytes are protected again; None: the time to rebuild and encode.
        node_repair_s: time until a node that was taken out is back.
        longest_steps: largest number of steps between snapshots.
        seed: seed of the Monte Carlo simulation.

    Raises:
        ConfigError: a value is out of its range.
    """

    overhead_budget: float | None = 0.01
    memory_budget: float | None = None
    target_survival: float = 0.999
    code: tuple[int, int] | None = None
    repair_window_s: float | None = None
    node_repair_s: float = DAY_S
    longest_steps: int = LONGEST_STEPS
    seed: int = 1

    def __post_init__(self) -> None:
        if self.overhead_budget is not None and not 0 < self.overhead_budget < 1:
            raise ConfigError(
                f"an overhead budget of {self.overhead_budget:g}: give a fraction between 0 and 1, such as 0.01"
            )
        if self.memory_budget is not None:
            positive("the memory budget", self.memory_budget, " bytes")
        within("the target survival", self.target_survival, 0.0, 1.0)
        if self.repair_window_s is not None:
            positive("the repair window", self.repair_window_s, " s")
        positive("the time to repair a node", self.node_repair_s, " s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """A plan, and what to expect from it.

    Attributes:
        periods: steps between snapshots, between encoded ones and between persisted ones, as far as they exist.
        levels: cost of each level, and the failures that it serves.
        interval: the exact single-level optimum for all levels that memory serves, and what bounds it.
        overhead: visible cost over useful work, without failures.
        waste: share of wall time lost, including to failures, to first order. lost: the share lost to each class.
        played: effective training time ratio by Monte Carlo.
        memory_bytes: shared memory of a node.
        network_rate, storage_rate: mean bytes per second that a node sends to other nodes and to storage.
        spares: number of spare nodes.
        others: every code that was judged, with its memory per node in bytes.
        met: whether the target survival is reached.
        gain: share of time gained by not encoding every snapshot; 0 if every snapshot is encoded.
        why: the reasons, in sentences.
    """

    nodes: int
    code: Code
    periods: tuple[int, ...]
    levels: tuple[Level, ...]
    interval: Interval
    overhead: float
    waste: float
    lost: tuple[float, ...]
    played: Played
    memory_bytes: float
    network_rate: float
    storage_rate: float
    spares: int
    step_s: float
    seed: int
    others: tuple[tuple[Code, float], ...]
    met: bool
    gain: float = 0.0
    why: tuple[str, ...] = ()

    @property
    def encode_every(self) -> int:
        """One of this many snapshots is encoded; 0: none."""
        return self.periods[1] // self.periods[0] if self.code.parity else 0

    @property
    def persist_every(self) -> int:
        """One of this many snapshots is persisted; 0: none."""
        return self.periods[-1] // self.periods[0] if self.levels[-1].name == "beyond" else 0

    def to_json(self) -> dict[str, Any]:
        """As plain values: bytes, seconds, shares. `encode_every` and `persist_every` count snapshots; 0: never."""
        sizes = self.code.sizes if self.code.parity else ()
        return {
            "interval_steps": self.periods[0],
            "interval_s": self.periods[0] * self.step_s,
            "k": self.code.data,
            "m": self.code.parity,
            "encode_every": self.encode_every,
            "persist_every": self.persist_every,
            "overhead": self.overhead,
            "ettr": self.played.mean,
            "memory_bytes_per_node": self.memory_bytes,
            "survival_30d": self.code.survival,
            "why": list(self.why),
            "ettr_error": self.played.error,
            "ettr_first_order": 1.0 - self.waste,
            "lost": {level.name: share for level, share in zip(self.levels, self.lost, strict=True)},
            "lost_s_per_day": (1.0 - self.played.mean) * DAY_S,
            "groups": [[size, sizes.count(size)] for size in sorted(set(sizes))],
            "spare_nodes": self.spares,
            "network_bytes_per_s_per_node": self.network_rate,
            "storage_bytes_per_s_per_node": self.storage_rate,
            "target_met": self.met,
            "seed": self.seed,
        }


def recommend(costs: Costs, model: FailureModel, nodes: int, domains: Domains, targets: Targets) -> Recommendation:
    """The plan of most useful work within the targets; of plans that are `CLOSE`, the one of least memory.

    Codes that exceed the memory budget are rejected. Of the others, those that reach the target survival are compared;
    if none does, those with the best survival are, and `met` is False. Each code gets its best periods to first order.
    The winner's periods are then refined by Monte Carlo.

    Raises:
        ConfigError: no code fits the memory budget, no interval is feasible, or a number is out of its range.
    """
    codes = [targets.code] if targets.code is not None else candidates(nodes)
    windows = {m: targets.repair_window_s or costs.rebuild_s + m * costs.encode_s for _, m in codes}
    judged = [judge(k, m, nodes, model, domains, windows[m]) for k, m in codes]
    fitting = [code for code in judged if memory(costs, code) <= (targets.memory_budget or float("inf"))]
    if not fitting:
        least = min(memory(costs, code) for code in judged)
        fewer = "fewer slots or " if costs.slots > MIN_SLOTS else ""
        raise ConfigError(
            f"a memory budget of {targets.memory_budget:,.0f} bytes a node: the least that is possible with "
            f"{costs.slots} "
            f"slots is {least:,.0f}; give as much, or use {fewer}more nodes"
        )
    good = [code for code in fitting if code.survival >= targets.target_survival]
    best = max(code.survival for code in fitting)
    plans = [_plan(costs, code, model, nodes, targets) for code in good or [c for c in fitting if c.survival >= best]]
    least = min(plan.waste for plan in plans)
    close = [plan for plan in plans if plan.waste <= least + CLOSE]
    chosen = min(close, key=lambda p: (memory(costs, p.code, p.encode_every), p.waste))
    periods, played = _refine(chosen, costs, targets)
    levels = chosen.levels
    periods_s = [p * costs.step_s for p in periods]
    code = chosen.code
    persisted = levels[-1].name == "beyond"
    return Recommendation(
        nodes=nodes,
        code=code,
        periods=periods,
        levels=levels,
        interval=from_memory(levels, costs, targets),
        overhead=overhead(levels, periods_s),
        waste=first_order(levels, periods_s),
        lost=lost(levels, periods_s),
        played=played,
        memory_bytes=memory(costs, code, chosen.encode_every),
        network_rate=code.parity * costs.state_bytes / periods_s[1] if code.parity else 0.0,
        storage_rate=costs.state_bytes / periods_s[-1] if persisted else 0.0,
        spares=spare_nodes(model, nodes, targets.node_repair_s),
        step_s=costs.step_s,
        seed=targets.seed,
        others=tuple((other, memory(costs, other)) for other in judged),
        met=bool(good),
        gain=chosen.gain,
    )


def memory(costs: Costs, code: Code, encode_every: int = 1) -> float:
    """Shared memory of a node in bytes: ``slots S (1 + m/k)``; less if not every snapshot is encoded, since that needs
    fewer parity slots."""
    parities = parity_slots(costs.slots, encode_every)
    return costs.state_bytes * (costs.slots + parities * (code.memory - 1))


def levels_of(costs: Costs, code: Code, model: FailureModel, nodes: int) -> tuple[Level, ...]:
    """The levels, each with the job's rate of failures that need it. Shocks that the code survives are memory
    losses."""
    rates = model.job(nodes)
    if not code.parity:
        return costs.levels(0, rates["process"], rates["memory"] + rates["shock"], rates["beyond"])
    survived = rates["memory"] + rates["shock"] - code.loss_rate
    return costs.levels(code.parity, rates["process"], max(0.0, survived), code.loss_rate + rates["beyond"])


def from_memory(levels: Sequence[Level], costs: Costs, targets: Targets) -> Interval:
    """The exact best interval if every snapshot is encoded, and what bounds it (`choose_interval`)."""
    kept = [level for level in levels if level.name != "beyond"]
    return choose_interval(
        step_s=costs.step_s,
        cost_s=sum(level.cost_s for level in kept),
        failure_rate=sum(level.rate for level in kept),
        commit_s=costs.commit_s,
        encode_s=kept[-1].latency_s - costs.commit_s,
        slots=max(2, costs.slots - costs.persists),
        budget=targets.overhead_budget,
        longest=targets.longest_steps,
    )


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A code and its best periods. For `gain` see `Recommendation`."""

    code: Code
    levels: tuple[Level, ...]
    periods: tuple[int, ...]
    waste: float
    gain: float

    @property
    def encode_every(self) -> int:
        """One of this many snapshots is encoded; 1 without parity."""
        return self.periods[1] // self.periods[0] if self.code.parity else 1


def _plan(costs: Costs, code: Code, model: FailureModel, nodes: int, targets: Targets) -> _Candidate:
    levels = levels_of(costs, code, model, nodes)
    limits = costs.limits(code.parity, targets.overhead_budget, targets.longest_steps)
    all_, some = (best_periods(levels, each) for each in (replace(limits, encode_every=(1,)), limits))
    waste, less = (first_order(levels, [p * costs.step_s for p in periods]) for periods in (all_, some))
    if waste - less <= CLOSE:
        return _Candidate(code, levels, all_, waste, 0.0)
    return _Candidate(code, levels, some, less, waste - less)


def _refine(plan: _Candidate, costs: Costs, targets: Targets) -> tuple[tuple[int, ...], Played]:
    """Simulate the plan; if its waste is above `ROUGH`, also its feasible neighbours, and theirs, with the same
    failures. A neighbour wins only if it is better by two standard errors."""
    limits = costs.limits(plan.code.parity, targets.overhead_budget, targets.longest_steps)
    best, played = plan.periods, play(plan.levels, plan.periods, costs.step_s, seed=targets.seed)
    known, centre = {best}, None
    while plan.waste > ROUGH and centre != best:
        centre = best
        for factor in (0.5, 0.7, 1.4, 2.0):
            first = max(1, round(centre[0] * factor))
            periods = tuple(first * (p // centre[0]) for p in centre)
            spent = overhead(plan.levels, [p * costs.step_s for p in periods])
            affordable = spent <= (targets.overhead_budget or 1.0) + 1e-12
            if periods in known or not affordable or not limits.feasible(periods):
                continue
            known.add(periods)
            other = play(plan.levels, periods, costs.step_s, seed=targets.seed)
            if other.mean > played.mean + 2.0 * (other.error**2 + played.error**2) ** 0.5:
                best, played = periods, other
    return best, played
