"""The options that say how fast an SMP is, shared by all commands that plan."""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.cli.arguments import checked, input_file, rate
from holdfast.planner.costs import INTERFERENCE
from holdfast.planner.rates import KIND, NodeRates, SmpRates
from holdfast.smp_daemon.shared.errors import ConfigError


@checked
def _cores(text: str) -> float:
    try:
        count = float(text)
    except ValueError:
        count = math.nan
    if not 0 < count < math.inf:
        raise ConfigError(f"{text!r} is not a number of cores: give one such as 4")
    return count


@checked
def share(text: str) -> float:
    """A share such as ``1%`` or ``0.01``."""
    try:
        value = float(text[:-1]) / 100.0 if text.endswith("%") else float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"{text!r}: give 0 to 1, or 0% to 100%, such as 0.01 or 1%")
    return value


def add_rates(options: Any) -> None:
    """Add the options to a parser or an argument group."""
    options.add_argument(
        "--smp-cores",
        type=_cores,
        metavar="N",
        help="cores that the SMP of a node may use (default: as many as are worth it)",
    )
    options.add_argument(
        "--line-rate",
        type=rate,
        metavar="RATE",
        help="rate of all network cards of a node together, which limits protecting (default: no limit known)",
    )


def add_interference(options: Any) -> None:
    """Add ``--interference``."""
    options.add_argument(
        "--interference",
        type=share,
        default=f"{INTERFERENCE:.0%}",
        metavar="SHARE",
        help="of the time of copying, sending and persisting that training loses; holdfast profile measures it on your "
        f"job (default {INTERFERENCE:.0%}".replace("%", "%%")
        + ", assumed)",
    )


def add_measured(options: Any) -> None:
    """Add ``--measured``, for the measured rates of a machine."""
    options.add_argument(
        "--measured",
        type=input_file,
        metavar="FILE",
        help=f"rates of a machine, as {KIND} --json FILE wrote them (default: those that were measured last)",
    )


def smp_of(parsed: argparse.Namespace, measured: Path | None) -> SmpRates:
    """The rates that the options give. Raises `ConfigError` if the file is of another kind, or a rate is 0."""
    smp = SmpRates(
        given_cores=parsed.smp_cores,
        line_rate=math.inf if parsed.line_rate is None else parsed.line_rate,
    )
    if measured is None:
        return smp
    try:
        data = read_measured(measured)
        if isinstance(data, dict) and "kind" not in data and "snapshot_step_s" in data:
            raise ConfigError("it is a profile of a job, by holdfast profile: give it with --profile")
        return replace(smp, file=str(measured), rates=NodeRates.from_json(data))
    except ConfigError as error:
        raise ConfigError(f"--measured {measured}: {error}") from error


def read_measured(path: Path) -> Any:
    """Read a JSON file. Raises `ConfigError` if it cannot be read as JSON."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:  # `UnicodeDecodeError` is a `ValueError`
        raise ConfigError(f"it cannot be read as JSON: {error}") from error


def cores_here() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0))
