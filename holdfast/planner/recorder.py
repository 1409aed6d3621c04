"""Makes a `Measured` profile from every rank's recording of its steps and snapshots. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from holdfast.planner.measured import Measured
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.plain import decode_json
from holdfast.snapshot.interval.recording import RankRecording


def read(text: str | bytes) -> Measured:
    """The profile of a job, from what its ranks recorded. Raises `ProtocolError`, or as `merge`."""
    return merge(decode_json(list[RankRecording], text, "what the ranks of a job recorded"))


def merge(parts: Sequence[RankRecording]) -> Measured:
    """The profile of a job: step times are means over the ranks, a snapshot's phases are those of the slowest rank.

    Raises:
        ConfigError: too little was recorded: too few steps, or no snapshot became protected on all ranks.
    """
    first = parts[0].place
    timings = [{timing.step: timing for timing in part.timings} for part in parts]
    common = sorted(
        set.intersection(*(set(part) & set(seen.stalls) for part, seen in zip(timings, parts, strict=True)))
    )
    baseline = [fmean(steps) for steps in zip(*(part.baseline for part in parts), strict=True)]
    overlapped = [fmean(steps) for steps in zip(*(part.overlapped for part in parts), strict=True)]
    if len(baseline) < 2 or len(overlapped) < 2 or not common:
        raise ConfigError(
            f"{len(baseline)} baseline steps, {len(overlapped)} overlapped ones and {len(common)} protected snapshots "
            "were recorded: at least 2, 2 and 1 make a profile; let it run for more steps"
        )

    def slowest(name: str) -> float:
        return fmean(max(getattr(seen[step], name) for seen in timings) for step in common)

    state: dict[str, int] = {}
    for part in parts:
        state[part.place.node] = state.get(part.place.node, 0) + part.place.shard_bytes
    snapshots = len(parts[0].stalls)
    return Measured(
        step_s=fmean(baseline),
        snapshot_step_s=fmean(overlapped),
        stall_s=fmean(max(part.stalls[step] for part in parts) for step in parts[0].stalls),
        copy_s=slowest("copy_s"),
        seal_s=slowest("seal_s"),
        encode_s=slowest("encode_s") if first.parity else 0.0,
        state_bytes=max(state.values()),
        slots=first.slots,
        parity=first.parity,
        data=first.data,
        interval_steps=math.ceil((len(baseline) + len(overlapped)) / snapshots),
        quiet_steps=len(baseline),
        busy_steps=len(overlapped),
        snapshots=snapshots,
        nodes=len(state),
        step_sd_s=stdev(baseline),
        snapshot_step_sd_s=stdev(overlapped),
    )
