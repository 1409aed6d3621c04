"""The reasons for a recommendation, in sentences. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from holdfast.planner.codes import Code, Domains, judge
from holdfast.planner.costs import Costs
from holdfast.planner.recommend import Recommendation, Targets
from holdfast.snapshot.interval.failures import FailureModel

Show = Callable[[float], str]

FEW = 0.05
"""If first order and Monte Carlo differ by more than this share of the waste, the reasons say so."""


def reasons(
    found: Recommendation,
    costs: Costs,
    model: FailureModel,
    domains: Domains,
    targets: Targets,
    duration: Show,
    amount: Show,
) -> Iterator[str]:
    """One sentence for each decision. `duration` and `amount` print seconds and bytes."""
    yield _failures(found, model, duration)
    yield _interval(found, costs, targets, duration)
    if found.code.parity:
        yield _encoding(found, costs, duration)
    yield _persisting(found, duration)
    yield from _code(found, costs, model, domains, targets, duration, amount)
    first, second = found.waste, 1.0 - found.played.mean
    if abs(first - second) > FEW * second:
        events = f"{found.played.events:,} failures that were played"
        yield f"first order is inaccurate here: it predicts a loss of {first:.2%}, and {events} show {second:.2%}"
    if costs.assumed:
        yield f"not measured but assumed: {', '.join(costs.assumed)}; holdfast profile measures it, for --measured"


def _failures(found: Recommendation, model: FailureModel, duration: Show) -> str:
    rates = model.job(found.nodes)
    names = {
        "process": "of processes",
        "memory": "of a node's memory",
        "shock": "of several nodes at once",
        "beyond": "of all",
    }
    each = ", ".join(f"{names[kind]} {duration(1 / rate)}" for kind, rate in rates.items() if rate)
    total = sum(rates.values())
    return (
        f"a failure every {duration(1 / total)} on {found.nodes} nodes: {each} ({model.source})"
        if total
        else "nothing fails"
    )


def _interval(found: Recommendation, costs: Costs, targets: Targets, duration: Show) -> str:
    best = found.interval
    cost_s = sum(level.cost_s for level in found.levels if level.name != "beyond")
    budget = targets.overhead_budget
    chosen = f"a snapshot costs {duration(cost_s)} of training, encoded; if each is, "
    ideal = "nothing is lost" if best.ideal_s == float("inf") else f"cost and loss balance at {duration(best.ideal_s)}"
    limit = {
        "optimum": "and that is feasible",
        "step": "less than a step",
        "slots": f"but {costs.slots} slots and the rates of encoding and persisting allow no less than this",
        "budget": f"but the overhead budget of {budget or 0:.2%} allows no less than this",
        "longest": "so it is taken as rarely as is allowed",
    }[best.bound]
    shortest = ""
    if best.bound == "optimum" and budget:
        steps = max(1, -int(-cost_s // (budget * costs.step_s)))
        shortest = f"; the budget of {budget:.2%} would allow every {duration(steps * costs.step_s)}"
    return chosen + f"{ideal} by Lambert's W, {limit}{shortest}"


def _encoding(found: Recommendation, costs: Costs, duration: Show) -> str:
    encode_s = duration(found.code.parity * costs.encode_s)
    if not found.gain:
        return f"every snapshot is encoded, which takes {encode_s} beside training; encoding fewer gains under 0.02 %"
    every = found.encode_every
    return (
        f"one in {every} snapshots is encoded ({encode_s} beside training), with protect_every={every}: a crash of "
        f"processes needs only sealed ones. Taking fewer and encoding each would lose {found.gain:.2%} more"
    )


def _persisting(found: Recommendation, duration: Show) -> str:
    last = found.levels[-1]
    if last.name != "beyond":
        return "there is no storage tier: a loss beyond parity ends the run"
    if not last.rate:
        return "persisted as rarely as is allowed: nothing is beyond parity"
    every = duration(found.periods[-1] * found.step_s).replace(" ", "")
    return (
        f"persisted for what memory does not survive, once in {duration(1 / last.rate)}; a persist takes "
        f"{duration(last.cost_s)} of training. SMPs do it with HOLDFAST_PERSIST=URL HOLDFAST_PERSIST_EVERY={every}. "
        "Losses of the whole job's memory are in this, not in 'survives 30 days'"
    )


def _code(
    found: Recommendation,
    costs: Costs,
    model: FailureModel,
    domains: Domains,
    targets: Targets,
    duration: Show,
    amount: Show,
) -> Iterator[str]:
    code = found.code
    if found.nodes == 1:
        yield "one node has no other to protect it: snapshots survive the death of processes only"
        return
    window_s = targets.repair_window_s or costs.rebuild_s + code.parity * costs.encode_s
    if not found.met:
        yield (
            f"the target of {targets.target_survival:g} is missed: {code} is the best of those that fit; shorten "
            f"the repair "
            f"window of {duration(window_s)}, allow more memory or label what fails together"
        )
    elif targets.code is None:
        less = [other for other, _ in found.others if other.parity < code.parity]
        best = max(less, key=lambda other: other.survival) if less else None
        rest = f"; with m = {best.parity} the best is {best.survival:.6g}" if best else ""
        yield (
            f"{code} is the least memory ({amount(found.memory_bytes)}) within 0.02 % of the most useful work, "
            f"of all that "
            f"survive 30 days with {targets.target_survival:g} at a repair window of {duration(window_s)}{rest}"
        )
    yield from _domains(code, model, domains, found.nodes, window_s)


def _domains(code: Code, model: FailureModel, domains: Domains, nodes: int, window_s: float) -> Iterator[str]:
    """What labels of domains would change."""
    if not code.parity or not model.shock:
        return
    if domains.placement == "labelled":
        yield f"groups keep the {domains.nodes} nodes that fail together apart; they must carry HOLDFAST_DOMAINS"
        return
    labelled = replace(domains, placement="labelled")
    for parity in range(1, code.parity):
        fewer = judge(code.data + code.parity - parity, parity, nodes, model, labelled, window_s)
        if fewer.survival >= code.survival or fewer.survival >= 0.999:
            yield (
                f"m is {code.parity} because {domains.nodes} nodes fail together and carry no labels; with "
                f"HOLDFAST_DOMAINS and --placement labelled {fewer} survives with {fewer.survival:.6g}"
            )
            return
