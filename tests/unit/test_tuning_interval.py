"""The best interval: published points, identities, and brute force."""

from __future__ import annotations

import math
import random

import pytest

from benchmarks.exact_interval import daly, expected_time, optimal
from holdfast.planner.periods import slots_needed, young

MINUTE = 60.0


@pytest.mark.parametrize(
    ("mtbf_min", "published", "ours", "exact"),
    [(24 * 60, 117, 116.69, 116.690), (6 * 60, 57, 56.71, 56.714), (15, 9.1, 9.14, 9.1665)],
)
def test_dalys_published_points_come_out(mtbf_min: float, published: float, ours: float, exact: float) -> None:
    found = daly(5 * MINUTE, mtbf_min * MINUTE) / MINUTE
    assert found == pytest.approx(ours, abs=0.005)
    assert round(found, 1 if published < 10 else 0) == published
    assert optimal(5 * MINUTE, mtbf_min * MINUTE) / MINUTE == pytest.approx(exact, abs=0.001)


def test_daly_takes_the_mtbf_where_a_snapshot_costs_twice_as_much() -> None:
    assert daly(200.0, 100.0) == 100.0
    assert daly(199.0, 100.0) < 100.0


@pytest.mark.parametrize("cost", [0.01, 0.3, 1.0, 3.0, 30.0, 300.0])
def test_the_optimum_follows_from_the_inverse_of_w_exp_w(cost: float) -> None:
    w = optimal(cost, 1.0) - 1.0
    assert -1.0 <= w <= 0.0
    assert w * math.exp(w) == pytest.approx(-math.exp(-cost - 1.0), rel=1e-12)


@pytest.mark.parametrize(("cost", "mtbf"), [(0.01, 1e5), (5.0, 900.0), (300.0, 400.0), (2.0, 0.5)])
def test_the_optimum_is_where_time_per_work_is_least(cost: float, mtbf: float) -> None:
    best = optimal(cost, mtbf)

    def per_work(work: float) -> float:
        return expected_time(work, cost, mtbf, restart_s=77.0) / work

    assert per_work(best) < min(per_work(best * 0.99), per_work(best * 1.01))


@pytest.mark.parametrize("cost", [1e-12, 1e-9, 1e-6, 1e-3])
def test_the_optimum_is_youngs_for_tiny_costs_without_cancellation(cost: float) -> None:
    ratio = math.sqrt(2 * cost)  # for an MTBF of 1 s; the next term is -cost / 3 * 2
    assert optimal(cost, 1.0) == pytest.approx(ratio - 2 * cost / 3, rel=max(1e-9, cost))
    assert young(cost, 1.0) == pytest.approx(ratio)


@pytest.mark.parametrize("cost", [1e-13, 1e-10, 4.9e-7, 5.1e-7, 1e-5])
def test_the_optimum_solves_its_equation_to_nine_digits(cost: float) -> None:
    """``y + log(1 - y) = -c/M`` for ``y = tau/M``: the derivative of time per work, as a series for small y."""
    y = optimal(cost, 1.0)
    assert sum(y**n / n for n in range(2, 9)) == pytest.approx(cost, rel=1e-9, abs=0)


def test_an_expected_time_beyond_all_floats_is_infinite() -> None:
    assert expected_time(1e6, 0.0, 1.0) == math.inf


def slots_in_use(interval: int, commit: int, encode: int, every: int, count: int = 240) -> int:
    """The most slots held at once, counted tick by tick. A snapshot holds its slot from its boundary until it is
    neither the newest sealed one, nor the newest protected one, nor about to become either."""
    most = 0
    for now in range(interval * count // 2, interval * count):
        taken = [i for i in range(count) if i * interval < now]
        sealed = max((i for i in taken if i * interval + commit < now), default=-1)
        protected = max((i for i in taken if i % every == 0 and i * interval + commit + encode < now), default=-1)
        held = {i for i in taken if i > sealed} | {sealed, protected}
        held |= {i for i in taken if i % every == 0 and i > protected}
        most = max(most, len(held))
    return most


def test_a_slow_encoding_of_few_snapshots_takes_a_fourth_slot() -> None:
    assert slots_in_use(3, 2, 7, 3, count=30) == slots_needed(3, 2, 7, encode_every=3) == 4
    assert slots_in_use(6, 2, 7, 3, count=30) == slots_needed(6, 2, 7, encode_every=3) == 3


@pytest.mark.parametrize("seed", range(8))
def test_slots_suffice_in_a_tick_by_tick_count(seed: int) -> None:
    draw = random.Random(seed)
    interval, every = draw.randint(3, 9), draw.choice([1, 1, 2, 3])
    commit = draw.randint(1, interval)
    encode = draw.randint(1, every * interval)
    needed = slots_needed(interval, commit, encode, encode_every=every)
    used = slots_in_use(interval, commit, encode, every, count=30)
    assert used <= needed <= used + 1, (interval, commit, encode, every)
