"""Advice on how to protect snapshots sooner, or more often: what to buy, and what to change. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from holdfast.planner.rates import SmpRates
from holdfast.planner.sizing import Sizes
from holdfast.smp_daemon.shared.quantities import amount, duration

MORE = 4
"""The advice shows this many times as many cores, unless fewer fill the network."""

MOST_CORES = 256
"""The largest number of cores to consider for an SMP."""

Sized = Callable[[SmpRates, int], Sizes]
"""Computes the sizes of the job with the given SMP rates and number of parity units per stripe."""


def advice(smp: SmpRates, parity: int, step_s: float, sized: Sized) -> Iterator[str]:
    """Sentences on what limits protection: cores or network cards, m, and the interval. No sentences without parity.

    Args:
        parity: m in effect.
        step_s: duration of a step of the job; 0 if it is not known.
    """
    if parity:
        yield _faster(smp, parity, sized)
        if parity > 1:
            fewer = f"with m = {parity - 1} instead of {parity}, and one loss less survived"
            yield f"m: {fewer}, {_instead(sized(smp, parity), sized(smp, parity - 1))}."
        yield _interval(smp, parity, step_s, sized)


def _faster(smp: SmpRates, parity: int, sized: Sized) -> str:
    now = sized(smp, parity)
    if smp.limit == "given":
        return f"--network-rate limits: at twice {amount(smp.network)}/s {_instead(now, sized(_doubled(smp), parity))}."
    if smp.limit == "network":
        enough = math.ceil(smp.line_rate / smp.rates.protect)
        return (
            f"Network cards limit, and {_cores(enough)} fill them: with twice as many, {amount(2 * smp.line_rate)}/s, "
            f"{_instead(now, sized(_doubled(smp), parity))}."
        )
    fills = math.ceil(smp.line_rate / smp.rates.protect) if smp.line_rate < math.inf else MOST_CORES
    more = min(max(fills, math.ceil(smp.cores)), math.ceil(MORE * smp.cores))
    text = f"Cores limit: with {_cores(more)} for the SMP instead of {smp.cores:.3g} "
    text += _instead(now, sized(smp.with_cores(more), parity))
    return f"{text}; then the network cards limit." if more == fills and smp.line_rate < math.inf else f"{text}."


def _doubled(smp: SmpRates) -> SmpRates:
    given = smp.given_network
    return replace(smp, line_rate=2 * smp.line_rate, given_network=2 * given if given else None)


def _instead(now: Sizes, then: Sizes) -> str:
    return f"the snapshot is protected in {duration(then.protected_s)} instead of {duration(now.protected_s)}"


def _interval(smp: SmpRates, parity: int, step_s: float, sized: Sized) -> str:
    now = sized(smp, parity)
    if not step_s:
        return f"Interval: every snapshot is protected if one is taken every {duration(now.interval_s)} or more rarely."
    if now.interval_steps == 1:
        return "Interval: a snapshot can be protected at every step."
    text = f"Interval: a snapshot can be protected every {now.interval_steps} steps; at every step"
    for cores in range(math.ceil(smp.cores) + 1, MOST_CORES + 1) if smp.limit == "cores" else ():
        if sized(smp.with_cores(cores), parity).interval_steps == 1:
            return f"{text} with {_cores(cores)}."
    return f"{text} by no number of cores alone."


def _cores(count: int) -> str:
    return f"{count} core{'s' * (count != 1)}"
