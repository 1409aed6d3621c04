"""How likely state in memory survives lost nodes, with k+m codes or copies: at once, over time, by shocks. Pure.

A group of `size` nodes *tolerates* m losses: k+m in groups of k + m nodes or more; r copies count as 1+(r-1). Rates are
per second, of a node or of the job. The *window* is the time after a loss during which a group tolerates fewer further
losses: to detect the loss, replace the node, decode and encode again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from holdfast.ec import plan_groups
from holdfast.planner.checks import not_negative, within
from holdfast.planner.failures import DAY_S, FailureModel
from holdfast.smp_daemon.shared.errors import ConfigError

SURVIVAL_S = 30 * DAY_S
"""The time that survival is computed for, in seconds."""

LARGEST_GROUP = 16
"""Largest k + m to try. Rebuilding one node keeps all other nodes of its group busy."""

MOST_PARITY = 4

PLACEMENTS = ("labelled", "neighbours", "random")


@dataclass(frozen=True, slots=True)
class Domains:
    """Which nodes fail together.

    Attributes:
        nodes: number of nodes that one shock hits; Meta RSC's racks hold 2.
        placement: ``labelled``: groups are planned with `HOLDFAST_DOMAINS`, so that a domain has at most m nodes in a
            group if possible; ``neighbours``: nodes have no labels, and neighbours form groups and fail together;
            ``random``: the nodes that fail together are at random places.

    Raises:
        ConfigError: the number of nodes is less than 1, or the placement is unknown.
    """

    nodes: int = 2
    placement: str = "neighbours"

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise ConfigError(f"{self.nodes} nodes fail together: give 1 or more")
        if self.placement not in PLACEMENTS:
            raise ConfigError(f"{self.placement!r} is not a placement: choose one of {', '.join(PLACEMENTS)}")


@dataclass(frozen=True, slots=True)
class Code:
    """A code k+m in a job: its groups, and how often more is lost than it covers.

    Attributes:
        data, parity: k and m; 0 and 0 without parity.
        sizes: number of nodes in each group.
        fatal: share of shocks that lose data.
        loss_rate: how often data is lost by node losses and shocks, per second, in the whole job.
    """

    data: int
    parity: int
    sizes: tuple[int, ...]
    fatal: float
    loss_rate: float

    @property
    def memory(self) -> float:
        """Bytes in memory for each byte of a snapshot: 1 + m/k."""
        return 1.0 + self.parity / self.data if self.parity else 1.0

    @property
    def survival(self) -> float:
        """Probability that memory keeps the data for `SURVIVAL_S`."""
        return survive(self.loss_rate, SURVIVAL_S)

    @property
    def risk(self) -> float:
        """1 - survival, exact even where it is too small to subtract from 1 in a float."""
        return -math.expm1(-self.loss_rate * SURVIVAL_S)

    def __str__(self) -> str:
        return f"{self.data}+{self.parity}" if self.parity else "none"


def judge(data: int, parity: int, nodes: int, model: FailureModel, domains: Domains, window_s: float) -> Code:
    """Compute what k+m survives in a job of `nodes` nodes, if a lost node's bytes are protected again after `window_s`.

    Raises:
        ConfigError: the code needs more nodes than the job has, or a number is out of its range.
    """
    if nodes < 1:
        raise ConfigError(f"{nodes} nodes: give 1 or more")
    not_negative("the repair window", window_s, " s")
    rates = model.job(nodes)
    if not parity:
        return Code(0, 0, (1,) * nodes, 1.0, rates["memory"] + rates["shock"])
    within("k", data, 1, 254)
    within("k + m", data + parity, 2, 255)
    if data + parity > nodes:
        raise ConfigError(
            f"{data}+{parity} needs {data + parity} nodes, and there are {nodes}: give k + m of 2 to {nodes}, "
            f"or more nodes"
        )
    sizes = _sizes(nodes, data + parity)
    fatal = _fatal(sizes, parity, min(domains.nodes, nodes), domains.placement, model.memory, window_s)
    rate = job_loss_rate(sizes, parity, model.memory, window_s) + rates["shock"] * fatal
    return Code(data, parity, sizes, fatal, rate)


def candidates(nodes: int) -> list[tuple[int, int]]:
    """All (k, m) to try for a job of `nodes` nodes; (0, 0) is no parity."""
    return [(0, 0)] + [
        (k, m)
        for m in range(1, MOST_PARITY + 1)
        for k in range(1, min(LARGEST_GROUP, nodes) - m + 1)
        if k >= m or k == 1  # with 1 < k < m, a larger k takes less memory; k = 1 is plain copies
    ]


@lru_cache(maxsize=256)
def _sizes(nodes: int, group: int) -> tuple[int, ...]:
    """Sizes of the groups that a job of `nodes` nodes has. Cached: a plan asks for the same ones many times."""
    return tuple(len(each) for each in plan_groups(nodes, group))


def _fatal(sizes: Sequence[int], parity: int, hit: int, placement: str, rate: float, window_s: float) -> float:
    if placement == "labelled":
        return shock_spread(sizes, parity, hit, rate, window_s)
    return (shock_neighbours if placement == "neighbours" else shock_random)(sizes, parity, hit)


def simultaneous(sizes: Sequence[int], tolerated: int, lost: int) -> float:
    """Probability that no group loses data if `lost` nodes, chosen uniformly, are lost at once.

    Of all ``C(N, f)`` ways to choose them, those with at most m in each group are counted by the coefficient of ``x^f``
    in the product over groups of ``sum_{j <= m} C(n, j) x^j``. For m = 1 and equal groups that is ``n^f C(G, f)``.
    Exact, in whole numbers.

    Args:
        sizes: number of nodes in each group.

    Raises:
        ValueError: more nodes are lost than exist.
    """
    nodes = sum(sizes)
    if not 0 <= lost <= nodes:
        raise ValueError(f"{lost} nodes lost of {nodes}")
    ways = [1] + [0] * lost
    for size, times in _runs(sizes):
        ways = _times(
            ways, _power([math.comb(size, j) for j in range(min(tolerated, size, lost) + 1)], times, lost), lost
        )
    return float(Fraction(ways[lost], math.comb(nodes, lost)))


def loss_rate(size: int, tolerated: int, rate: float, window_s: float) -> float:
    """How often one group loses data, per second, if repairs run in parallel and take `window_s` each on average.

    Engset's loss formula: nodes are sources, repairs are servers, and data is lost by a failure that finds all m
    servers busy. With ``x = rate w`` it is ``n C(n - 1, m) rate x^m / sum_{j <= m} C(n, j) x^j``: the first-order rate,
    divided by a sum that is close to 1 where failures are rare. It holds for any distribution of repair times. A group
    that starts again with all nodes up after a loss loses data slightly less often than that.
    """
    if tolerated >= size:
        return 0.0
    x = rate * window_s
    return loss_rate_first_order(size, tolerated, rate, window_s) / sum(
        math.comb(size, j) * x**j for j in range(tolerated + 1)
    )


def loss_rate_first_order(size: int, tolerated: int, rate: float, window_s: float) -> float:
    """`loss_rate` to first order, for ``size rate w << 1``, as usually quoted: ``n C(n - 1, m) rate^(m + 1) w^m``.
    Too high where nodes fail often."""
    if tolerated >= size:
        return 0.0
    return size * math.comb(size - 1, tolerated) * rate ** (tolerated + 1) * window_s**tolerated


def job_loss_rate(sizes: Sequence[int], tolerated: int, rate: float, window_s: float) -> float:
    """How often any group loses data, per second."""
    return sum(times * loss_rate(size, min(tolerated, size - 1), rate, window_s) for size, times in _runs(sizes))


def survive(rate: float, seconds: float) -> float:
    """Probability that an event with rate `rate` does not happen for `seconds`: ``exp(-rate t)``."""
    return math.exp(-rate * seconds)


def shock_spread(sizes: Sequence[int], tolerated: int, hit: int, rate: float, window_s: float) -> float:
    """Probability that a shock loses data if its `hit` nodes are spread over the groups as evenly as possible, which is
    what planning with labels of domains achieves.

    A group loses at most ``j = ceil(hit / G)`` nodes, which is fatal if j > m. Otherwise data is lost only if
    ``a = m - j + 1`` other nodes of the group are lost in the same window. That has the probability
    ``C(n - j, a) (a + 1) (rate w)^a``: the volume of the times at which a failures and the shock lie within one window.
    """
    groups = len(sizes)
    if hit <= 0:
        return 0.0
    each = -(-hit // groups)
    if each > tolerated:
        return 1.0
    alone = 1.0
    for index, size in enumerate(sorted(sizes, reverse=True)[:hit]):
        taken = hit // groups + (index < hit % groups)
        others = tolerated - taken + 1
        volume = (others + 1) * (rate * window_s) ** others
        alone *= 1.0 - min(1.0, math.comb(size - taken, others) * volume)
    return 1.0 - alone


def shock_random(sizes: Sequence[int], tolerated: int, hit: int) -> float:
    """Probability that a shock loses data if it hits `hit` nodes, chosen uniformly. Exact."""
    return 1.0 - simultaneous(sizes, tolerated, min(hit, sum(sizes)))


def shock_neighbours(sizes: Sequence[int], tolerated: int, hit: int) -> float:
    """Probability that a shock loses data if neighbours form groups and fail together, as without labels of domains: 1
    if a group tolerates fewer losses than it has nodes among those hit, 0 if not."""
    return float(any(min(hit, size) > min(tolerated, size - 1) for size in sizes))


def _runs(sizes: Iterable[int]) -> list[tuple[int, int]]:
    """Pairs of (size, number of groups of that size)."""
    return sorted(Counter(sizes).items())


def _times(one: Sequence[int], other: Sequence[int], degree: int) -> list[int]:
    """Product of two polynomials up to x^degree."""
    product = [0] * (degree + 1)
    for i, a in enumerate(one):
        for j, b in enumerate(other[: degree + 1 - i]):
            product[i + j] += a * b
    return product


def _power(base: Sequence[int], exponent: int, degree: int) -> list[int]:
    """A polynomial to a power, up to x^degree."""
    result, square = [1], list(base)
    while exponent:
        if exponent & 1:
            result = _times(result, square, degree)
        square = _times(square, square, degree)
        exponent >>= 1
    return result
