"""Failure models: published shares, a user's own logs, spare nodes."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from holdfast.planner.failures import (
    CLASSES,
    DAY_S,
    MEMORY_CAUSES,
    PRIOR_EVENTS,
    FailureModel,
    Incident,
    from_profile,
    learn,
    parse_log,
    span,
    spare_nodes,
)
from holdfast.planner.profiles import PROFILES, profile
from holdfast.smp_daemon.shared.errors import ConfigError

PRIOR = from_profile(profile("llama3"))


@pytest.mark.parametrize("name", ["llama3", "ft-hsdp"])
def test_the_causes_that_take_memory_add_up_to_the_published_share(name: str) -> None:
    causes = profile(name).causes
    taken = sum(count for cause, count in causes if cause.lower() in MEMORY_CAUSES)
    assert taken / sum(count for _, count in causes) == pytest.approx(profile(name).memory)


@pytest.mark.parametrize("name", PROFILES)
def test_rates_by_class_add_up_to_the_profiles(name: str) -> None:
    model = from_profile(profile(name))
    assert (model.process + model.memory + model.shock) * 1000 * DAY_S == pytest.approx(profile(name).rate)


def test_an_mtbf_keeps_the_shares() -> None:
    model = from_profile(profile("llama3"), mtbf_s=1000 * DAY_S)
    assert model.process + model.memory + model.shock == pytest.approx(1 / (1000 * DAY_S))
    assert model.memory / model.process == pytest.approx(PRIOR.memory / PRIOR.process)
    assert model.job(500)["memory"] == pytest.approx(500 * model.memory)
    assert model.job(500)["beyond"] == model.beyond


@pytest.mark.parametrize("mtbf", [0.0, -5.0, float("nan"), float("inf")])
def test_an_impossible_mtbf_is_refused(mtbf: float) -> None:
    with pytest.raises(ConfigError, match="MTBF of a node"):
        from_profile(profile("llama3"), mtbf_s=mtbf)


def test_the_prior_weighs_what_published_rates_say() -> None:
    rates = [each.rate for each in PROFILES.values()]
    assert round((statistics.fmean(rates) / statistics.stdev(rates)) ** 2) == PRIOR_EVENTS


def test_negative_rates_are_refused() -> None:
    with pytest.raises(ConfigError, match="memory failures is -1"):
        FailureModel(0.0, -1.0, 0.0, 0.0, "nowhere")


def test_a_log_is_read_by_class_or_by_cause() -> None:
    by_class = parse_log("time_h, class, nodes\n1, process,\n2, memory, 1\n3, memory, 4\n4, shock,\n5, beyond,\n")
    assert [i.kind for i in by_class] == ["process", "memory", "shock", "shock", "beyond"]
    assert [i.time_s for i in by_class] == [3600.0 * h for h in range(1, 6)]
    by_cause = parse_log("node,time,cause\nn1,2026-01-01T00:00:00,Kernel fault\nn2,2026-01-02T00:00:00,HBM3\n")
    assert [i.kind for i in by_cause] == ["memory", "process"]
    assert by_cause[1].time_s - by_cause[0].time_s == DAY_S


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "header is"),
        ("time,class\n", "no incidents"),
        ("when,class\n1,process\n", r"header .*\['when', 'class'\]"),
        ("time,class\n2026-01-01,process\n36.5,process\n", "line 3: .*'36.5'.*not both"),
        ("time,class\nyesterday,process\n", "line 2: .*'yesterday'"),
        ("time_h,class\n36h,process\n", "line 2: .*'36h'.*a unit"),
        ("time_h,class\n-3,process\n", "line 2: time_h is '-3'"),
        ("time_h,class\n3,bad luck\n", "line 2: 'bad luck'"),
        ("time_h,cause\n3,gremlins\n", "line 2: 'gremlins'"),
        ("time_h,class,nodes\n3,memory,0\n", "line 2: nodes is 0"),
        (f'time_h,cause\n3,"cooling\n{200_000 * "x"}', "not CSV.*quote"),
    ],
)
def test_a_log_that_cannot_be_read_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_log(text)


def test_the_span_of_a_log_follows_from_its_lines() -> None:
    days = tuple(Incident(day * DAY_S, "process") for day in range(11))
    assert span(days) == pytest.approx(12 * DAY_S)  # as many gaps of a day as there are incidents, and one more
    with pytest.raises(ConfigError, match="give --log-span"):
        span(days[:1])


def test_a_short_log_is_believed_little_and_a_long_one_fully() -> None:
    rate = 20 * PRIOR.process
    for years, low, high in ((0.02, 1.0, 2.2), (200.0, 19.0, 20.5)):
        exposure = years * 365 * DAY_S
        count = round(rate * exposure * 8)
        log = [Incident(float(i), "process") for i in range(count)]
        found = learn(log, 8, exposure, PRIOR)
        assert low <= found.model.process / PRIOR.process <= high
        assert found.events["process"] == count


def test_without_incidents_a_class_falls_below_the_prior() -> None:
    found = learn([Incident(0.0, "process")], 1000, 100 * DAY_S, PRIOR)
    assert found.model.memory < PRIOR.memory
    assert found.model.beyond < PRIOR.beyond


def test_shrinkage_is_the_mean_of_the_posterior() -> None:
    """Events and exposures are drawn from the prior. Over logs with 3 memory losses, the mean of the true rates is what
    is learnt."""
    generator = np.random.default_rng(4)
    total = PRIOR.process + PRIOR.memory + PRIOR.shock
    weight, exposure = PRIOR_EVENTS / total, 64 * 200 * DAY_S
    rates = generator.gamma(PRIOR.memory * weight, 1 / weight, 400_000)
    same = rates[generator.poisson(rates * exposure) == 3]
    log = [Incident(0.0, "memory")] * 3
    found = learn(log, 64, 200 * DAY_S, PRIOR).model.memory
    assert abs(found - same.mean()) < 4 * same.std() / len(same) ** 0.5


def test_a_log_of_no_nodes_or_no_time_is_refused() -> None:
    log = [Incident(0.0, "process")]
    with pytest.raises(ConfigError, match="of 0 nodes"):
        learn(log, 0, DAY_S, PRIOR)
    with pytest.raises(ConfigError, match="its span is 0 s"):
        learn(log, 1, 0.0, PRIOR)


def test_spares_are_the_quantile_of_nodes_that_are_away() -> None:
    model = FailureModel(0.0, 1.0 / DAY_S / 1000, 0.0, 0.0, "test")
    generator = np.random.default_rng(3)
    for nodes in (1, 128, 1024, 700_000):
        spares = spare_nodes(model, nodes, DAY_S)
        away = generator.poisson(nodes / 1000, 200_000)
        assert (away <= spares).mean() > 0.989
        assert spares == 0 or (away < spares).mean() < 0.991
    assert set(CLASSES) == set(model.job(1))
