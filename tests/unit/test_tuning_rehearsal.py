"""Simulated months: ``every="auto"`` against the best fixed interval and Daly's; the simulation against a formula."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.rehearsal import Climate, by_daly, draw, play_fixed, play_rule
from holdfast.planner.failures import DAY_S

CLIMATE = Climate(step_s=60.0)
SEEDS = (1, 2, 3)


@pytest.fixture(scope="module")
def wasted() -> dict[str, float]:
    """Seconds wasted over all seeds: by auto, by the best fixed interval of each month, and by Daly's formula."""
    found = {"auto": 0.0, "best": 0.0, "visible": 0.0, "whole": 0.0}
    for seed in SEEDS:
        weather = draw(CLIMATE, seed)
        found["auto"] += play_rule(weather, seed).total
        found["best"] += min(play_fixed(weather, interval).total for interval in (1, 2, 3, 4, 5, 7))
        found["visible"] += play_fixed(weather, by_daly(weather, whole=False)).total
        found["whole"] += play_fixed(weather, by_daly(weather, whole=True)).total
    return found


def test_auto_is_within_three_percent_of_the_best_fixed_interval_of_each_month(
    wasted: dict[str, float],
) -> None:
    assert wasted["auto"] <= 1.03 * wasted["best"]


def test_auto_is_better_than_dalys_interval(wasted: dict[str, float]) -> None:
    assert wasted["auto"] < wasted["visible"]
    assert wasted["auto"] < 0.9 * wasted["whole"]


def test_without_weather_what_is_wasted_is_what_the_formula_says() -> None:
    """To first order: ``c/T + rate (T/2 + latency + R)``, of useful and of wall time."""
    calm = replace(CLIMATE, month_s=900 * DAY_S, steps=1.0, costs=1.0, failures=1.0, noise=0.0)
    weather = draw(calm, 4)
    found = play_fixed(weather, 4)
    rate = len(weather.failures) / calm.month_s
    assert rate == pytest.approx(1 / calm.mtbf_s, rel=0.1)
    aged_s = calm.commit_s + calm.memory * calm.encode_s
    lost = rate * (4 * calm.step_s / 2 + aged_s)
    assert found.snapshots / calm.month_s == pytest.approx(calm.cost_s / (4 * calm.step_s), rel=0.03)
    assert found.lost / calm.month_s == pytest.approx(lost, rel=0.06)
    mean_s = (1 - calm.memory) * calm.restart_s[0] + calm.memory * calm.restart_s[1]
    assert found.restarts / calm.month_s == pytest.approx(rate * mean_s, rel=0.06)


def test_the_same_seed_is_the_same_month() -> None:
    week = replace(CLIMATE, month_s=7 * DAY_S)
    first, second, other = (draw(week, seed) for seed in (1, 1, 2))
    assert first == second != other
    assert play_rule(first, 1) == play_rule(second, 1) != play_rule(first, 2)


def test_a_snapshot_without_a_free_slot_is_not_taken() -> None:
    slow = replace(CLIMATE, encode_s=200.0, steps=1.0, costs=1.0)
    weather = draw(slow, 1)
    possible = slow.cost_s * slow.month_s / slow.step_s
    assert play_fixed(weather, 1).snapshots == pytest.approx(possible / 2, rel=0.1)  # two snapshots in 3.5 steps
    assert play_fixed(weather, 3).snapshots == pytest.approx(possible / 3, rel=0.1)  # every snapshot that is due
