"""Where the time of a run goes: every second is accounted for once, whatever happens in between."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.smp_daemon.shared.goodput import PARTS, UNTOLD, Spent
from holdfast.smp_daemon.shared.plain import decode_json, encode_json

TIMES = st.floats(-100.0, 1000.0)
BEGUN = Spent(since=1000.0, until=1000.0)


def trained(spent: Spent, steps: int, step_s: float = 10.0, stall_s: float = 1.0) -> Spent:
    for _ in range(steps):
        spent = spent.stepped(spent.until + step_s, stall_s)
    return spent


def total(spent: Spent) -> float:
    return float(sum(getattr(spent, name) for name in PARTS))


def test_steps_count_less_what_snapshots_took_of_them() -> None:
    spent = trained(BEGUN, 20)
    assert (spent.steps, spent.stall, spent.count) == (180.0, 20.0, 20)
    assert spent.effective() == pytest.approx(0.9)


def test_a_restart_divides_the_gap_into_what_it_went_into() -> None:
    carried = trained(BEGUN, 20)  # until 1200; then three more steps of 10 s, which are done again
    spent = carried.restarted(began=1260.0, asked=1290.0, loaded=1295.0, again=3)
    assert (spent.repeated, spent.detecting, spent.starting, spent.loading) == (30.0, 30.0, 30.0, 5.0)
    assert (spent.again, spent.until) == (3, 1295.0)
    assert trained(spent, 3).steps == carried.steps + 27.0, "the steps that are done again count once"


def test_a_process_that_survived_was_not_started() -> None:
    spent = trained(BEGUN, 20).restarted(began=900.0, asked=1290.0, loaded=1295.0, again=0)
    assert (spent.detecting, spent.starting, spent.loading) == (90.0, 0.0, 5.0)


def test_time_passes_while_nothing_trains() -> None:
    spent = trained(BEGUN, 20)
    assert spent.effective(1400.0) == pytest.approx(180 / 400)
    assert spent.effective(1100.0) == spent.effective(), "a clock may be behind"
    assert "50.0% into no training" in spent.sentence(1400.0)


def test_what_nobody_has_told_is_nothing() -> None:
    assert UNTOLD.effective(1e9) is None
    assert UNTOLD.sentence(1e9) == ""


@given(st.lists(st.tuples(TIMES, TIMES, TIMES, TIMES, st.integers(0, 50)), max_size=8))
def test_every_second_is_accounted_for_once(events: list[tuple[float, float, float, float, int]]) -> None:
    """Whatever clocks say, and in whatever order."""
    spent = BEGUN
    for began, asked, loaded, step_s, again in events:
        at = spent.until
        spent = spent.restarted(at + began, at + asked, at + loaded, again).stepped(spent.until + step_s, 3.0)
        assert all(getattr(spent, name) >= 0 for name in PARTS)
        assert total(spent) == pytest.approx(spent.until - spent.since)
    assert decode_json(Spent, encode_json(spent), "") == spent
    assert all(isinstance(each, float) for each in spent.scalars().values())
