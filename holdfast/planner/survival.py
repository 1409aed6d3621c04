"""How likely what is in memory survives the loss of nodes: k+m codes and copies, all at once, over time, by shocks.

A group of `size` nodes *tolerates* m losses: k+m in groups of k + m nodes or more, and r copies as 1+(r-1). Rates
are per node or job and second. The *window* is the time in which a lost node's bytes have fewer companions than
they should: to detect, replace, decode and encode again. All pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction


def simultaneous(sizes: Sequence[int], tolerated: int, lost: int) -> float:
    """Probability that `lost` nodes, any of all alike, gone at once, cost no group its data.

    Of all ``C(N, f)`` ways to choose them, count those with at most m in each group: the coefficient of ``x^f`` in the
    product over groups of ``sum_{j <= m} C(n, j) x^j``. For m = 1 and equal groups that is ``n^f C(G, f)``. Exact, in
    whole numbers.

    Args:
        sizes: nodes of each group.

    Raises:
        ValueError: more nodes are lost than there are.
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
    """Losses of one group's data per second, repairs in parallel, each taking `window_s` on average.

    Engset's loss formula: nodes are sources, repairs are servers, and the failure that finds all m busy is the loss.
    With ``x = rate w`` it is ``n C(n - 1, m) rate x^m / sum_{j <= m} C(n, j) x^j``: the first order, over a sum that is
    close to 1 where failures are rare. It holds for any distribution of repairs. A group that starts with all nodes up
    after its loss is lost a little less often than that.
    """
    if tolerated >= size:
        return 0.0
    x = rate * window_s
    return loss_rate_first_order(size, tolerated, rate, window_s) / sum(
        math.comb(size, j) * x**j for j in range(tolerated + 1)
    )


def loss_rate_first_order(size: int, tolerated: int, rate: float, window_s: float, *, serial: bool = False) -> float:
    """The same for ``size rate w << 1``, as it is usually quoted: ``n C(n - 1, m) rate^(m + 1) w^m``; times m! where
    nodes are repaired strictly one after the other, each in an exponential time. Too high where nodes fail often."""
    if tolerated >= size:
        return 0.0
    orders = math.factorial(tolerated) if serial else 1
    return orders * size * math.comb(size - 1, tolerated) * rate ** (tolerated + 1) * window_s**tolerated


def job_loss_rate(sizes: Sequence[int], tolerated: int, rate: float, window_s: float) -> float:
    """Losses of the data of any group per second."""
    return sum(times * loss_rate(size, min(tolerated, size - 1), rate, window_s) for size, times in _runs(sizes))


def survive(rate: float, seconds: float) -> float:
    """Probability that something that happens at `rate` does not happen for so long: ``exp(-rate t)``."""
    return math.exp(-rate * seconds)


def shock_spread(sizes: Sequence[int], tolerated: int, hit: int, rate: float, window_s: float) -> float:
    """Probability that a shock costs data where its `hit` nodes are spread over the groups as evenly as can be,
    which is what groups do that know their domains.

    Each group it hits loses at most ``j = ceil(hit / G)``: fatal if j > m. If not, it takes ``a = m - j + 1`` other
    nodes
    of the group that are down in the same window: ``C(n - j, a) (a + 1) (rate w)^a``, the volume of times of a failures
    that lie, with the shock, within one window, before or after it.
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
    """Probability that a shock that hits `hit` nodes, any of all alike, costs data. Exact."""
    return 1.0 - simultaneous(sizes, tolerated, min(hit, sum(sizes)))


def shock_neighbours(sizes: Sequence[int], tolerated: int, hit: int) -> float:
    """The same where groups are of neighbours, and neighbours fail together: 1 if a group tolerates less than it has of
    them, 0 if not. What nodes without labels get."""
    return float(any(min(hit, size) > min(tolerated, size - 1) for size in sizes))


def _runs(sizes: Iterable[int]) -> list[tuple[int, int]]:
    """(size, how many groups of it)."""
    counts: dict[int, int] = {}
    for size in sizes:
        counts[size] = counts.get(size, 0) + 1
    return sorted(counts.items())


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
