"""The reasons for a plan, in sentences. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from holdfast.planner.failures import DAY_S, FailureModel
from holdfast.planner.plan import CLOSE, Recommendation, Targets, window
from holdfast.planner.profiles import PUBLISHED, profile
from holdfast.planner.rates import count_cores
from holdfast.planner.survival import Code, Domains, judge
from holdfast.smp_daemon.shared.quantities import amount, duration

FEW = 0.05
"""If first order and Monte Carlo differ by more than this share of the waste, the reasons say so."""

NAMES = {"process": "process", "memory": "one node's memory", "shock": "several nodes", "beyond": "whole job"}


def reasons(
    found: Recommendation, model: FailureModel, domains: Domains, targets: Targets, replicas: int = 1
) -> Iterator[str]:
    """A sentence or two for each decision. `replicas`: number of nodes that hold the same state."""
    yield _failures(found, model)
    if model.source != profile(PUBLISHED).source and (rate := model.process + model.memory + model.shock):
        yield f"trainers expect as many failures if they are told: set HOLDFAST_MTBF={1 / rate / 3600:.0f}h"
    yield _interval(found, targets)
    yield _slots(found)
    if found.setting.code.parity:
        yield _encoding(found)
    if replicas > 1:
        yield _replicas(found, replicas)
    yield from _code(found, model, domains, targets)
    yield _cores(found)
    yield _persisting(found)
    first, second = found.setting.waste, 1.0 - found.played.mean
    if abs(first - second) > FEW * second:
        yield f"first order predicts a loss of {first:.2%}, {found.played.events:,} played failures show {second:.2%}"
    if found.costs.assumed:
        yield f"assumed, not measured: {', '.join(found.costs.assumed)}; measure with holdfast profile, for --profile"


def survival_text(risk: float) -> str:
    """1 - risk as a percentage with as many nines as it has, up to 99.9999 %."""
    if risk < 1e-6:
        return "over 99.9999 %"
    return f"{100.0 * (1.0 - risk):.{2 if risk >= 1e-3 else 4}f} %"


def _seldom(seconds: float) -> str:
    """A long time as text."""
    return duration(seconds) if seconds < 1000 * DAY_S else f"{seconds / DAY_S / 365:.0f} years"


def _failures(found: Recommendation, model: FailureModel) -> str:
    rates = {kind: rate for kind, rate in model.job(found.nodes).items() if rate}
    if not rates:
        return "nothing fails"
    each = ", ".join(f"{NAMES[kind]} {_seldom(1 / rate)}" for kind, rate in rates.items())
    return f"a failure every {duration(1 / sum(rates.values()))}: {each} ({model.source})"


def _interval(found: Recommendation, targets: Targets) -> str:
    costs, parity = found.costs, found.setting.code.parity
    cost_s = costs.snapshot_cost_s + parity * costs.encode_cost_s / found.setting.encode_every
    why = {
        "optimum": "the interval that loses least, by Young's formula, as trainers compute it",
        "longest": "trainers take one at least this often, although a longer interval would lose less",
        "budget": f"more often would take over {targets.overhead_budget or 0:.2%} of the time, the overhead budget",
        "protect": "trainers begin the next one when this one is protected",
        "young": "the job is young",
    }[found.setting.interval.limit]
    return f"a snapshot costs {duration(cost_s)} of training, every {duration(found.interval_s)}: {why}"


def _slots(found: Recommendation) -> str:
    protect_s = found.costs.commit_s + found.setting.code.parity * found.costs.encode_s
    done = "protected" if found.setting.code.parity else "sealed"
    return f"{found.setting.slots} slots: a snapshot is {done} after {duration(protect_s)}, so none is skipped"


def _encoding(found: Recommendation) -> str:
    encode_s = duration(found.setting.code.parity * found.costs.encode_s)
    if found.encode_every == 1:
        return (
            f"every snapshot is protected, which takes {encode_s}; protecting fewer gains under {CLOSE:.1%} of the time"
        )
    return (
        f"one in {found.encode_every} snapshots is protected ({encode_s}): a crash needs only a sealed one. To protect "
        f"each would lose {found.gain:.2%} more"
    )


def _replicas(found: Recommendation, replicas: int) -> str:
    share, code = found.costs.state_bytes, found.setting.code
    parity = f"and parity adds {amount(share * code.parity / code.data)}" if code.parity else "without parity"
    return (
        f"of the state that {replicas} nodes hold alike each copies its share, {amount(share)}, {parity}. Whole copies "
        f"on every replica need no parity, but {amount(share * replicas)} a node. Neither is needed where survivors "
        "keep their processes and send their live state, as torchft does"
    )


def _cores(found: Recommendation) -> str:
    cores = found.setting.cores
    if not cores:
        return "SMP cores: as many as the profile was measured with"
    return f"{count_cores(cores)} for the SMP, kept free of trainers: more would gain under {CLOSE:.1%} of the time"


def _persisting(found: Recommendation) -> str:
    last = found.setting.levels[-1]
    if last.name != "beyond":
        return (
            "without storage, a loss that memory does not survive ends the run, which the training time above leaves "
            "out. With HOLDFAST_PERSIST=URL it costs half of HOLDFAST_PERSIST_EVERY, and a slot more "
            f"({amount(found.costs.state_bytes)}): see --persist-rate"
        )
    every = duration(found.setting.periods[-1] * found.costs.step_s).replace(" ", "")
    often = f"expected once in {_seldom(1 / last.rate)}" if last.rate else "not expected at all"
    return (
        f"persisted for what memory does not survive, {often}: set "
        f"HOLDFAST_PERSIST=URL HOLDFAST_PERSIST_EVERY={every}. A persist costs {duration(last.cost_s)} of training"
    )


def _code(found: Recommendation, model: FailureModel, domains: Domains, targets: Targets) -> Iterator[str]:
    code = found.setting.code
    if found.nodes == 1:
        yield "one node has no other to protect it: snapshots survive the death of processes only"
        return
    window_s = window(found.costs, code.parity)
    target, repair = f"{100 * targets.target_survival:.6g} %", f"repair in {duration(window_s)}"
    if targets.code is not None:
        name, reaches = code if code.parity else "no parity", "reaches" if found.met else "misses"
        yield f"{name} {reaches} the target of surviving 30 days with {target} ({repair})"
        return
    if not found.met:
        yield (
            f"no code survives 30 days with {target}; {code} is among the best ({repair}). Allow more memory, set "
            "HOLDFAST_DOMAINS (--placement labelled), use more nodes or storage"
        )
    else:
        yield f"{code} uses least memory of the codes that survive 30 days with {target} ({repair})"
    yield from _domains(code, model, domains, found.nodes, window_s, targets)


def _domains(
    code: Code, model: FailureModel, domains: Domains, nodes: int, window_s: float, targets: Targets
) -> Iterator[str]:
    """What labels of domains would change."""
    if not code.parity or not model.shock:
        return
    if domains.placement == "labelled":
        yield f"groups keep the {domains.nodes} nodes that fail together apart: set HOLDFAST_DOMAINS on each"
        return
    labelled = replace(domains, placement="labelled")
    for parity in range(1, code.parity):
        fewer = judge(code.data + code.parity - parity, parity, nodes, model, labelled, window_s)
        if fewer.survival >= targets.target_survival:
            yield (
                f"m is {code.parity} because {domains.nodes} neighbours may fail together; with HOLDFAST_DOMAINS set "
                f"(--placement labelled), {fewer} survives with {survival_text(fewer.risk)}"
            )
            return
