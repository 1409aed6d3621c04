"""The best time between snapshots of one level, computed exactly. Pure; cheap enough to run every few minutes.

All rates are failures per second of the whole job; all intervals are useful work, in seconds or in steps. For several
levels see `planner.waste`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast.planner.checks import not_negative, positive

LONGEST_STEPS = 1_000_000
"""Maximum interval, for jobs that fail so rarely that hardly any interval is too long."""


def young(cost_s: float, mtbf_s: float) -> float:
    """``sqrt(2 cost mtbf)`` (Young, CACM 17(9), 1974): the first-order optimum for ``cost << mtbf``."""
    return math.sqrt(2.0 * cost_s * mtbf_s)


def daly(cost_s: float, mtbf_s: float) -> float:
    """Daly's higher-order optimum (FGCS 22(3), 2006): ``sqrt(2cM) (1 + sqrt(c/2M)/3 + (c/2M)/9) - c`` for ``c < 2M``,
    and M for all larger costs."""
    if cost_s >= 2.0 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2.0 * mtbf_s)
    return young(cost_s, mtbf_s) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - cost_s


def _one_plus_w(x: float, root: float) -> float:
    """``1 + W0(x)`` for ``-1/e <= x <= 0``, to 1e-10 of itself; W0 is the principal branch of Lambert's W.

    `root` is ``sqrt(2 (e x + 1))``, passed in so that nothing cancels near the branch point x = -1/e. There the series
    in `root` is used, elsewhere Halley's method (both in Corless et al., "On the Lambert W function", Adv. Comput.
    Math. 5, 1996).
    """
    if root < 1e-3:
        return root * (
            1.0 + root * (-1.0 / 3.0 + root * (11.0 / 72.0 + root * (-43.0 / 540.0 + root * 769.0 / 17280.0)))
        )
    w = -1.0 + root - root * root / 3.0
    for _ in range(50):
        power = math.exp(w)
        error = w * power - x
        step = error / (power * (w + 1.0) - (w + 2.0) * error / (2.0 * w + 2.0))
        w -= step
        if abs(step) <= 4e-16 * (1.0 + abs(w)):
            break
    return 1.0 + w


def expected_time(work_s: float, cost_s: float, mtbf_s: float, restart_s: float = 0.0) -> float:
    """Expected wall time until `work_s` and the snapshot after it are done, with exponential failures that also strike
    during snapshots and restarts: ``M exp(R/M) (exp((work + cost) / M) - 1)`` (Daly 2006); inf if it overflows."""
    try:
        return mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((work_s + cost_s) / mtbf_s)
    except OverflowError:
        return math.inf


def optimal(cost_s: float, mtbf_s: float) -> float:
    """Useful work between two snapshots, in seconds, that minimises expected wall time. Exact for exponential failures.

    The minimum of `expected_time` per work: ``M (1 + W0(-exp(-c/M - 1)))``, whatever a restart takes. With ``u = c/M``
    the argument is just above the branch point ``-1/e``, by the fraction ``1 - exp(-u)`` of it. The code computes that
    fraction, so that nothing cancels if costs are tiny.

    Raises:
        ConfigError: the cost is negative or the MTBF not positive.
    """
    not_negative("the cost of a snapshot", cost_s, " s")
    positive("the MTBF", mtbf_s, " s")
    u = cost_s / mtbf_s
    return mtbf_s * _one_plus_w(-math.exp(-u - 1.0), math.sqrt(-2.0 * math.expm1(-u)))


def slots_needed(
    interval_s: float, commit_s: float, encode_s: float, *, encode_every: int = 1, persist_s: float = 0.0
) -> int:
    """How many slots a shard needs so that no snapshot is skipped for lack of a free one.

    A slot is freed when the next younger snapshot of its kind is protected. If every snapshot is encoded, a slot is
    held for one interval plus the time to protect, so ``1 + ceil(protect / interval)`` slots are needed. If only some
    are encoded, three are: for the protected snapshot, the newest sealed one and the one being written; and a fourth if
    encoding takes so long that the one being encoded is none of these. A persist that takes longer than an interval
    holds one more.
    """
    protect_s = commit_s + encode_s
    if encode_every == 1:
        needed = 1 + max(1, math.ceil(protect_s / interval_s - 1e-9))
    else:
        needed = 3 + (encode_s > 0 and protect_s > 2 * interval_s)
    return needed + (persist_s > interval_s)


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval, and what keeps it from being shorter.

    Attributes:
        steps: steps between snapshots.
        ideal_s: the exact optimum without any limits, in seconds of work; inf if nothing fails.
        bound: ``"optimum"``; ``"step"``: the optimum is shorter than the shortest interval allowed; ``"slots"``: a slot
            must be free and encoding keep up; ``"budget"``: the overhead budget; ``"longest"``: the longest allowed.
    """

    steps: int
    ideal_s: float
    bound: str


def choose_interval(
    *,
    step_s: float,
    cost_s: float,
    failure_rate: float,
    commit_s: float = 0.0,
    encode_s: float = 0.0,
    slots: int = 3,
    budget: float | None = 0.01,
    shortest: int = 1,
    longest: int = LONGEST_STEPS,
) -> Interval:
    """The best interval between snapshots if every snapshot is encoded. Takes microseconds; no state.

    The result is the whole number of steps next to the exact optimum (`optimal`) with the least expected wall time,
    raised if need be until it is feasible: a slot is free, encoding keeps up, and the visible cost stays within
    `budget`. A longer step, a higher cost or a lower rate never makes the interval shorter in seconds. The same
    arguments give the same answer on every rank, so agree on the arguments, or on the answer, before using it.

    Args:
        step_s: duration of a step without any snapshot, in seconds; more than 0.
        cost_s: training time that one snapshot takes, copy and encoding together. A measured cost may be below 0, which
            counts as 0; then the interval is as short as slots allow, since nothing is gained by waiting.
        failure_rate: failures per second of the whole job that are restored from memory, of all classes. 0: none are
            expected, and snapshots that cost something are taken every `longest` steps.
        commit_s: from the boundary until the snapshot is sealed.
        encode_s: from there until it is protected; 0 if nothing is encoded.
        slots: slots per shard, 2 or more.
        budget: largest fraction of training time that snapshots may take; None or 0: any.
        shortest, longest: bounds in steps. `longest` wins over everything else, even over `shortest`.

    Raises:
        ConfigError: `step_s` is not positive, or the rate negative.
    """
    positive("the time of a step", step_s, " s")
    not_negative("the failure rate", failure_rate, " per second")
    cost = max(0.0, cost_s)
    lower = {
        "step": max(1, shortest),
        "slots": _ceil(max(commit_s, encode_s, _protect(commit_s, encode_s, slots)) / step_s),
    }
    if budget:
        lower["budget"] = _ceil(cost / (budget * step_s))
    ideal_s = optimal(cost, 1.0 / failure_rate) if failure_rate else math.inf
    steps = _round(ideal_s, step_s, cost, failure_rate) if failure_rate and cost else (longest if cost else 1)
    bound = "optimum"
    for name, least in lower.items():
        if least > steps or (name == "step" and least == steps and ideal_s < step_s):
            steps, bound = least, name
    return Interval(longest, ideal_s, "longest") if steps >= longest else Interval(steps, ideal_s, bound)


def _protect(commit_s: float, encode_s: float, slots: int) -> float:
    """Shortest interval at which `slots` suffice if each snapshot is encoded; inverse of `slots_needed`."""
    return (commit_s + encode_s) / (positive("the number of slots less one", slots - 1))


def _round(ideal_s: float, step_s: float, cost_s: float, rate: float) -> int:
    """The neighbour of the optimum, in whole steps, with less time per work, which has a single minimum."""
    low = max(1, int(min(ideal_s / step_s, LONGEST_STEPS)))
    return min((low, low + 1), key=lambda k: expected_time(k * step_s, cost_s, 1.0 / rate) / (k * step_s))


def _ceil(ratio: float) -> int:
    return max(1, math.ceil(ratio - 1e-9))
