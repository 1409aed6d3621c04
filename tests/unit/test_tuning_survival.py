"""Survival of codes and copies: published numbers, enumeration, and a Monte Carlo."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest

from holdfast.planner.failures import DAY_S
from holdfast.planner.survival import (
    job_loss_rate,
    loss_rate,
    loss_rate_first_order,
    shock_neighbours,
    shock_random,
    shock_spread,
    simultaneous,
    survive,
)


@pytest.mark.parametrize(
    ("nodes", "size", "tolerated", "published"),
    [
        (16, 2, 1, (0.933, 0.800, 0.615)),
        (16, 8, 1, (0.533, 0, 0)),
        (16, 8, 2, (1, 0.800, 0.431)),
        (16, 4, 2, (1, 0.971, 0.892)),
        (16, 8, 4, (1, 1, 1)),
        (16, 16, 4, (1, 1, 1)),
        (128, 2, 1, (0.9921, 0.9764, 0.9529)),
        (128, 8, 1, (0.9449, 0.8399, 0.6988)),
        (128, 8, 2, (1, 0.9974, 0.9898)),
        (128, 16, 2, (1, 0.9869, 0.9516)),
        (128, 8, 3, (1, 1, 0.9999)),
        (1024, 2, 1, (0.9990, 0.9971, 0.9941)),
        (1024, 8, 2, (1, 0.99996, 0.99984)),
    ],
)
def test_the_table_of_codes_and_copies_comes_out(
    nodes: int, size: int, tolerated: int, published: tuple[float, float, float]
) -> None:
    sizes = (size,) * (nodes // size)
    for lost, probability in zip((2, 3, 4), published, strict=True):
        digits = max(3, len(f"{probability}".partition(".")[2]))
        assert simultaneous(sizes, tolerated, lost) == pytest.approx(probability, abs=0.51 * 10**-digits)


def gemini_bound(nodes: int, copies: int, lost: int) -> float:
    """GEMINI's lower bound (Wang et al., SOSP 2023, corollary 1) for `copies` in groups of as many nodes:
    ``1 - N C(N - m, f - m) / (m C(N, f))``, and 1 for fewer than m losses. Exact for f = m."""
    if lost < copies:
        return 1.0
    hit = Fraction(nodes * math.comb(nodes - copies, lost - copies), copies * math.comb(nodes, lost))
    return max(0.0, float(1 - hit))


def test_geminis_published_point_comes_out() -> None:
    assert gemini_bound(16, 2, 2) == pytest.approx(0.933, abs=0.0005)
    assert gemini_bound(16, 2, 1) == 1.0


@pytest.mark.parametrize(("copies", "lost"), [(2, 2), (2, 3), (2, 5), (3, 3), (3, 4)])
def test_geminis_bound_is_below_what_groups_survive(copies: int, lost: int) -> None:
    exact = simultaneous((copies,) * (24 // copies), copies - 1, lost)
    assert gemini_bound(24, copies, lost) <= exact + 1e-12
    if lost == copies:
        assert gemini_bound(24, copies, lost) == pytest.approx(exact)


@pytest.mark.parametrize(("sizes", "tolerated"), [((3, 3, 4), 1), ((5, 6), 2), ((2, 2, 2, 3), 1), ((9,), 3)])
@pytest.mark.parametrize("lost", [0, 1, 2, 4])
def test_simultaneous_losses_agree_with_counting_all_of_them(sizes: tuple[int, ...], tolerated: int, lost: int) -> None:
    group_of = [index for index, size in enumerate(sizes) for _ in range(size)]
    all_ways = list(combinations(range(sum(sizes)), lost))
    fine = sum(
        all([group_of[node] for node in way].count(group) <= tolerated for group in range(len(sizes)))
        for way in all_ways
    )
    assert simultaneous(sizes, tolerated, lost) == pytest.approx(fine / len(all_ways))


def test_more_losses_than_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match="5 nodes lost of 4"):
        simultaneous((2, 2), 1, 5)


@pytest.mark.parametrize(("minutes", "published"), [(10, (9.0e-3, 6.3e-2, 8.5e-6)), (60, (5.4e-2, 0.38, 3.1e-4))])
def test_expected_losses_of_a_thousand_nodes_come_out(minutes: float, published: tuple[float, float, float]) -> None:
    """1,024 nodes, 6.5 losses per 1,000 node-days, 30 days: two copies, 7+1, 6+2."""
    rate = 6.5e-3 / DAY_S
    for (size, tolerated), losses in zip(((2, 1), (8, 1), (8, 2)), published, strict=True):
        found = 30 * DAY_S * 1024 / size * loss_rate_first_order(size, tolerated, rate, minutes * 60)
        assert found == pytest.approx(losses, rel=0.02)
        exact = 30 * DAY_S * job_loss_rate((size,) * (1024 // size), tolerated, rate, minutes * 60)
        assert 0.98 * found < exact < found


def play_group(size: int, tolerated: int, rate: float, *, seed: int, losses: int) -> tuple[float, float]:
    """A group's data losses per second and their standard error, simulated node by node until `losses` were seen.

    Every node that is up fails at `rate`; a failed one is up again, its bytes rebuilt, after exactly a second. When
    more than `tolerated` are down at once the data is lost, and the group starts anew with all nodes up. 512 groups are
    simulated side by side.
    """
    generator = np.random.default_rng(seed)
    groups = np.arange(512)
    now, up_again = np.zeros(len(groups)), np.zeros((len(groups), size))
    lived, seen = 0.0, 0
    while seen < losses:
        gap = generator.exponential(1.0 / (size * rate), len(groups))
        now += gap
        lived += float(gap.sum())
        node = generator.integers(size, size=len(groups))
        fails = up_again[groups, node] <= now
        up_again[groups, node] = np.where(fails, now + 1.0, up_again[groups, node])
        dead = (up_again > now[:, None]).sum(axis=1) > tolerated
        seen += int(dead.sum())
        up_again[dead] = 0.0
    return seen / lived, math.sqrt(seen) / lived


@pytest.mark.parametrize(
    ("size", "tolerated", "rate"), [(8, 0, 0.02), (8, 1, 0.02), (8, 2, 0.02), (4, 2, 0.03), (16, 2, 0.01)]
)
def test_the_loss_rate_agrees_with_what_is_played(size: int, tolerated: int, rate: float) -> None:
    played, error = play_group(size, tolerated, rate, seed=17, losses=1500)
    # In the formula the others stay down when data is lost; a simulated group starts anew, with all nodes up.
    slack = tolerated * size * rate * 0.5 * played
    assert -3 * error < loss_rate(size, tolerated, rate, 1.0) - played < 3 * error + slack


def test_first_order_is_the_limit_of_rare_failures_and_too_high_for_frequent_ones() -> None:
    assert loss_rate(8, 2, 1e-9, 1.0) / loss_rate_first_order(8, 2, 1e-9, 1.0) == pytest.approx(1, rel=1e-6)
    assert loss_rate(8, 2, 0.05, 1.0) < 0.8 * loss_rate_first_order(8, 2, 0.05, 1.0)
    assert loss_rate(3, 3, 1.0, 1.0) == loss_rate_first_order(3, 3, 1.0, 1.0) == 0.0


def test_a_shorter_window_counts_with_the_power_of_the_parity() -> None:
    for m in (1, 2, 3):
        assert loss_rate(8, m, 1e-8, 600.0) / loss_rate(8, m, 1e-8, 60.0) == pytest.approx(10**m, rel=1e-3)


def test_shocks_of_random_nodes_are_simultaneous_losses() -> None:
    assert shock_random((8, 8), 1, 2) == pytest.approx(1 - 0.5333, abs=1e-4)
    assert shock_random((4, 4), 4, 20) == 0.0


def test_shocks_of_neighbours_kill_groups_that_tolerate_fewer() -> None:
    assert [shock_neighbours((8, 8), 2, hit) for hit in (1, 2, 3)] == [0.0, 0.0, 1.0]
    assert shock_neighbours((2, 2), 1, 4) == 1.0


def test_shocks_that_are_spread_cost_data_only_with_others_in_the_window() -> None:
    assert shock_spread((8,) * 4, 1, 8, 0.0, 600.0) == 1.0  # two in each group
    assert shock_spread((8,) * 4, 2, 8, 0.0, 600.0) == 0.0
    assert shock_spread((8,) * 4, 2, 0, 1.0, 600.0) == 0.0


@pytest.mark.parametrize(("tolerated", "hit"), [(1, 1), (2, 1), (2, 2), (3, 2)])
def test_the_chance_of_others_in_the_window_agrees_with_playing_it(tolerated: int, hit: int) -> None:
    """One group of 6. The shock is at 0, its nodes are down until 1; others fail at random times and are down for 1."""
    rate, size, trials = 0.02, 6, 60_000
    draw = random.Random(tolerated * 10 + hit)
    fatal = 0
    for _ in range(trials):
        times = []
        for _node in range(size - hit):
            at = -1.0 + draw.expovariate(rate)
            if at < 1.0:
                times.append(at)
        moments = [0.0, *(t for t in times if t >= 0)]
        fatal += any(hit + sum(t <= now < t + 1.0 for t in times) > tolerated for now in moments)
    error = math.sqrt(max(1, fatal)) / trials
    expected = shock_spread((size,), tolerated, hit, rate, 1.0)
    assert abs(fatal / trials - expected) < 4 * error + 0.08 * expected  # of order size * rate: several others


def test_survival_falls_exponentially() -> None:
    assert survive(0.0, 1e9) == 1.0
    assert survive(1e-3, 1000.0) == pytest.approx(math.exp(-1))
