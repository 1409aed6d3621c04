"""The best time between snapshots of one level, computed exactly. Pure.

All rates are failures per second of the whole job; all intervals are useful work, in seconds.
"""

from __future__ import annotations

import math

from holdfast.planner.checks import not_negative, positive
from holdfast.planner.periods import young


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
