"""Failure rates by class, from a published profile, an MTBF, or a job's own incidents. Pure.

Classes are those of `planner.profiles`, and *beyond*: the memory of the whole job is lost at once, as in a
power cut or at the end of an allocation. No code helps against that.
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import NormalDist

from holdfast.planner.checks import not_negative, positive
from holdfast.planner.profiles import PROFILES, FailureProfile
from holdfast.smp_daemon.shared.errors import ConfigError

DAY_S = 86400.0

CLASSES = ("process", "memory", "shock", "beyond")

BEYOND_S = 90 * DAY_S
"""Assumed time between losses of the whole job's memory. No study reports it; Llama 3's 54 days had three interruptions
that needed manual repair."""

PRIOR_EVENTS = 4.0
"""Weight of the prior: that of a log of the time in which the prior expects this many failures. It is the shape of the
Gamma distribution with the mean and the variance of the rates of the five `PROFILES`."""

DRAINED = 0.37
"""Share of failures after which the node is taken out (Unicron, arXiv 2401.00134)."""

MEMORY_CAUSES = frozenset(
    {"power supply", "chassis", "io board", "cpu", "system memory", "kernel fault", "system reboot", "cooling"}
)
"""Published causes that take the host's memory with them at once; all other published ones leave it readable."""


@dataclass(frozen=True, slots=True)
class FailureModel:
    """Rates per second.

    Attributes:
        process, memory: per node.
        shock: shocks per node of the job: a job of N nodes has N times as many.
        beyond: for the whole job, whatever its size.
        source: where the rates come from.

    Raises:
        ConfigError: a rate is negative.
    """

    process: float
    memory: float
    shock: float
    beyond: float
    source: str

    def __post_init__(self) -> None:
        for name in CLASSES:
            not_negative(f"the rate of {name} failures", getattr(self, name), " per second")

    def job(self, nodes: int) -> dict[str, float]:
        """Rates of a job of `nodes` nodes, by class. Linear in the nodes, which is too optimistic for 10,000s of them:
        at 100,000 GPUs an MTBF of 18 minutes was seen, where a line through 32,768 gives 50 (FT-HSDP)."""
        return {
            "process": self.process * nodes,
            "memory": self.memory * nodes,
            "shock": self.shock * nodes,
            "beyond": self.beyond,
        }


def from_profile(profile: FailureProfile, mtbf_s: float | None = None) -> FailureModel:
    """Rates from a profile; with `mtbf_s`, the MTBF of one node, only the shares of the classes are the profile's.

    Raises:
        ConfigError: the time is not positive.
    """
    if mtbf_s is not None:
        positive("the MTBF of a node", mtbf_s, " s")
    rate = 1.0 / (mtbf_s or profile.node_mtbf_s())
    source = (
        profile.source if mtbf_s is None else f"an MTBF of {mtbf_s / DAY_S:g} d a node, shared out as in {profile.name}"
    )
    return FailureModel(rate * profile.process, rate * profile.memory, rate * profile.shock, 1.0 / BEYOND_S, source)


@dataclass(frozen=True, slots=True)
class Incident:
    """One interruption: its time, in seconds from any origin, and its class."""

    time_s: float
    kind: str


@dataclass(frozen=True, slots=True)
class Estimate:
    """A model learnt from a log, and how many incidents of each class that had."""

    model: FailureModel
    events: dict[str, int]


def parse_log(text: str) -> tuple[Incident, ...]:
    """Parse incidents from CSV with a header.

    Columns: ``time`` (ISO 8601), or one of ``time_s``, ``time_h``, ``time_d`` (numbers); ``class`` (process,
    memory, shock, beyond), or ``cause`` (a cause that `PROFILES` name, in any case); optionally ``nodes``: how many
    nodes a memory loss hit at once; more than one make it a shock. Other columns are ignored.

    Raises:
        ConfigError: the log is empty, or a line cannot be read; the message says which, and why.
    """
    try:
        return _incidents(csv.DictReader(io.StringIO(text), skipinitialspace=True))
    except csv.Error as error:
        raise ConfigError(f"failure log: it is not CSV: {error}; look for a quote that is not closed") from error


def _incidents(reader: csv.DictReader[str]) -> tuple[Incident, ...]:
    columns = [name.strip() for name in reader.fieldnames or ()]
    reader.fieldnames = columns
    times = [name for name in columns if name in ("time", *_TIME_UNITS)]
    kinds = [name for name in columns if name in ("class", "cause")]
    if len(times) != 1 or not kinds:
        raise ConfigError(
            f"failure log: the header is {columns}: it needs one of time, time_s, time_h, time_d, and class or cause"
        )
    incidents = tuple(_incident(reader.line_num, row, times[0]) for row in reader)
    if not incidents:
        raise ConfigError("failure log: it has no incidents: give at least one line, or use a profile")
    return incidents


def span(incidents: Sequence[Incident]) -> float:
    """The time that a log of n incidents covers: the seconds from the first to the last, times ``(n + 1) / (n - 1)``.

    This assumes that the log begins and ends one mean distance away from them. Raises `ConfigError` if all incidents
    have the same time.
    """
    first, last = min(i.time_s for i in incidents), max(i.time_s for i in incidents)
    if last <= first:
        raise ConfigError(
            f"failure log: {len(incidents)} incidents at one time do not say how long the log is: give "
            f"--log-span, such as 90d"
        )
    return (last - first) * (len(incidents) + 1) / (len(incidents) - 1)


def learn(incidents: Sequence[Incident], nodes: int, span_s: float, prior: FailureModel) -> Estimate:
    """Rates by class from a log of a job of `nodes` over `span_s`, shrunk towards the prior (Gamma-Poisson).

    The prior of a rate is Gamma with shape ``a = rate b``. ``b`` node-seconds, common to the classes of single nodes,
    is the exposure in which the prior expects `PRIOR_EVENTS` of them in total; for *beyond*, one. After n events in an
    exposure e the posterior is Gamma with shape ``a + n`` and rate ``b + e``, of mean ``(a + n) / (b + e)``: a short
    log moves it little, a long one dominates.

    Raises:
        ConfigError: `nodes` is below 1, or `span_s` not positive.
    """
    if nodes < 1:
        raise ConfigError(f"failure log: of {nodes} nodes: give 1 or more")
    positive("failure log: its span", span_s, " s")
    events = Counter(incident.kind for incident in incidents)
    total = prior.process + prior.memory + prior.shock
    rates = {}
    for kind in CLASSES:
        single = kind != "beyond"
        before = getattr(prior, kind)
        expected, rate = (PRIOR_EVENTS, total) if single else (1.0, prior.beyond)
        weight = expected / rate if rate else 0.0
        rates[kind] = (before * weight + events[kind]) / (weight + span_s * (nodes if single else 1))
    source = f"{len(incidents)} incidents of {nodes} nodes in {span_s / DAY_S:.3g} d, shrunk towards {prior.source}"
    return Estimate(FailureModel(**rates, source=source), {kind: events[kind] for kind in CLASSES})


def spare_nodes(model: FailureModel, nodes: int, repair_s: float, confidence: float = 0.99) -> int:
    """Fewest spares so that, with probability `confidence`, no more nodes are away at once than there are spares.

    Nodes are taken out after memory losses and shocks, or after `DRAINED` of all failures, whichever is more, and come
    back after `repair_s`; the number of nodes away is Poisson. ByteRobust (SOSP 2025) sizes its standbys by the same
    quantile: 4 per 1,024.
    """
    away = nodes * repair_s * max(DRAINED * (model.process + model.memory + model.shock), model.memory + model.shock)
    if away > 500.0:  # the normal quantile; exp(-away) would be 0
        return math.ceil(away + NormalDist().inv_cdf(confidence) * math.sqrt(away))
    term = total = math.exp(-away)
    spares = 0
    while total < confidence:
        spares += 1
        term *= away / spares
        total += term
    return spares


_TIME_UNITS = {"time_s": 1.0, "time_h": 3600.0, "time_d": DAY_S}

_PUBLISHED = {cause.lower() for profile in PROFILES.values() for cause, _ in profile.causes}


def _incident(line: int, row: dict[str, str | None], column: str) -> Incident:
    value = (row[column] or "").strip()
    time_s = _iso(line, value) if column == "time" else _number(line, column, value) * _TIME_UNITS[column]
    kind = _kind(line, (row.get("class") or "").strip().lower(), (row.get("cause") or "").strip().lower())
    nodes = _number(line, "nodes", text) if (text := (row.get("nodes") or "").strip()) else 1.0
    if nodes < 1 or nodes != int(nodes):
        raise ConfigError(f"failure log, line {line}: nodes is {nodes:g}: give a whole number from 1 on")
    return Incident(time_s, "shock" if kind == "memory" and nodes > 1 else kind)


def _iso(line: int, value: str) -> float:
    try:
        if value.replace(".", "").isdigit():
            raise ValueError("a plain number")
        return datetime.fromisoformat(value).timestamp()
    except ValueError as error:
        raise ConfigError(
            f"failure log, line {line}: time is {value!r} ({error}): give ISO 8601 such as 2026-01-31T12:00:00 "
            f"in every line, "
            "or name the column time_s, time_h or time_d and give numbers; not both"
        ) from error


def _number(line: int, name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise ConfigError(f"failure log, line {line}: {name} is {value!r}: give a number from 0 on, without a unit")
    return number


def _kind(line: int, name: str, cause: str) -> str:
    if name in CLASSES:
        return name
    if not name and cause in _PUBLISHED:
        return "memory" if cause in MEMORY_CAUSES else "process"
    raise ConfigError(
        f"failure log, line {line}: {name or cause!r} is not a class of failures: use {', '.join(CLASSES)}, or a "
        f"published "
        f"cause such as {', '.join(sorted(MEMORY_CAUSES))}"
    )
