"""``holdfast tune``: how often to take snapshots, and how to protect them, from what was measured and what fails."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from holdfast.cli import plots
from holdfast.cli.output import add_json, write_json
from holdfast.cli.plan import amount
from holdfast.planner.codes import PLACEMENTS, Domains
from holdfast.planner.costs import Assumptions, Costs, assume, from_measured
from holdfast.planner.reasons import reasons
from holdfast.planner.recommend import Recommendation, Targets, recommend
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.pacer import parse_rate
from holdfast.snapshot.interval.durations import duration, parse_duration
from holdfast.snapshot.interval.failures import (
    BEYOND_S,
    CLASSES,
    DAY_S,
    FailureModel,
    from_profile,
    learn,
    parse_log,
    span,
)
from holdfast.snapshot.interval.measured import Measured
from holdfast.snapshot.interval.profiles import PROFILES, profile
from holdfast.snapshot.resume.arrange import parse_protect


def add(commands: Any) -> None:
    """Add the command to a parser's subcommands."""
    tune = commands.add_parser(
        "tune",
        help="how often to take snapshots and how to protect them, from measured costs and failure rates",
        description="Recommends the interval between snapshots, what to encode and to persist, k + m and spare nodes, "
        "and says what to expect and why. Costs come from a measured profile, or from --step, --state and rates, which "
        "are assumptions. docs/tuning.md derives every formula.",
    )
    tune.add_argument(
        "--measured", type=Path, metavar="FILE", help="profile that a run recorded of its snapshots (JSON)"
    )
    tune.add_argument("--step", help="a step without snapshots, such as 12s or 800ms; without --measured")
    tune.add_argument("--state", help="state of one node, such as 98GB; without --measured")
    tune.add_argument("--nodes", type=int, help="(default: those of the profile, or 8)")
    tune.add_argument("--gpus-per-node", type=int, default=8, help="(default 8)")
    names = ", ".join(PROFILES)
    tune.add_argument("--failures", default="ft-hsdp", metavar="NAME", help=f"published: {names} (default ft-hsdp)")
    tune.add_argument("--mtbf", help="of one node, such as 1000d or 36h; --failures then only says what fails")
    tune.add_argument(
        "--log", type=Path, metavar="CSV", help="own incidents: time and class or cause; see docs/tuning.md"
    )
    tune.add_argument("--log-nodes", type=int, metavar="N", help="nodes of the job of the log (default --nodes)")
    tune.add_argument("--log-span", metavar="TIME", help="what the log covers, such as 90d (default: from its lines)")
    tune.add_argument("--beyond", default="90d", help="time between losses of the whole job's memory (default 90d)")
    tune.add_argument("--domain-nodes", type=int, default=2, help="nodes that fail together, as a rack (default 2)")
    tune.add_argument("--placement", default="neighbours", help=f"{', '.join(PLACEMENTS)} (default neighbours)")
    tune.add_argument("--overhead-budget", default="1%", help="of training time; 0: any (default 1%%)")
    tune.add_argument("--memory-budget", default="0", help="shared memory of a node, such as 400GB; 0: any (default)")
    tune.add_argument("--target-survival", default="0.999", help="of what is in memory, for 30 days (default 0.999)")
    tune.add_argument(
        "--protect", default="choose", help="choose, or k+m such as 6+2, copies:r, auto, none (default choose)"
    )
    tune.add_argument("--slots", type=int, default=3, help="slots for each shard (default 3); without --measured")
    tune.add_argument("--device-rate", default="25GB/s", help="one GPU to host memory (default 25GB/s)")
    tune.add_argument("--copy-rate", default="10GB/s", help="host memory of a node, for digests (default 10GB/s)")
    tune.add_argument("--network-rate", default="25GB/s", help="out of a node, for encoding (default 25GB/s)")
    tune.add_argument("--persist-rate", default="1GB/s", help="a node to storage; 0: no such tier (default 1GB/s)")
    tune.add_argument(
        "--interference", default="5%", help="by which work of ours slows training meanwhile (default 5%%)"
    )
    tune.add_argument("--restart", default="5min", help="from dead processes to the next step (default 5min)")
    tune.add_argument("--rebuild", default="10min", help="from a lost node to the next step (default 10min)")
    tune.add_argument(
        "--repair-window", help="until a lost node's bytes are protected again (default: rebuilt, encoded)"
    )
    tune.add_argument("--node-repair", default="1d", help="until a node that was taken out is back (default 1d)")
    tune.add_argument("--seed", type=int, default=1, help="of the Monte Carlo (default 1)")
    tune.add_argument("--plot", type=Path, metavar="FILE", help="also draw waste and survival, as SVG (extra: plots)")
    add_json(tune)
    tune.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Run the command."""
    if parsed.seed < 0:
        raise ConfigError(f"--seed {parsed.seed}: give 0 or more")
    plots.check_plots(parsed.plot)
    costs, measured_nodes = _costs(parsed)
    nodes = parsed.nodes if parsed.nodes is not None else measured_nodes
    if nodes < 1:
        raise ConfigError(f"--nodes {nodes}: give 1 or more")
    model = _failures(parsed, nodes)
    domains = Domains(parsed.domain_nodes, parsed.placement)
    targets = _targets(parsed, nodes)
    found = recommend(costs, model, nodes, domains, targets)
    found = replace(found, why=tuple(reasons(found, costs, model, domains, targets, duration, amount)))
    show(Console(stderr=parsed.json == "-", highlight=False), found, costs)
    if parsed.plot:
        plots.write(plots.draw_tune(found, costs), parsed.plot)
    write_json(parsed.json, found.to_json())
    return 0


def show(console: Console, found: Recommendation, costs: Costs) -> None:
    """Print what to do, what to expect and why, in one screen."""
    code, step_s = found.code, found.step_s
    every = found.periods[0]
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_row("snapshot", f"every {_count(every, 'step')} ({duration(every * step_s)})")
    table.add_row("encode", _how_often(found.encode_every, found.encode_every * every * step_s))
    table.add_row("persist", _how_often(found.persist_every, found.persist_every * every * step_s))
    table.add_row("protect", f"{code}, {_groups(code.sizes)}" if code.parity else "none: processes only")
    table.add_row("spare nodes", str(found.spares))
    console.print(table)
    played = f"{found.played.mean:.2%}"
    console.print(
        f"\noverhead {found.overhead:.2%}   effective training time {played} ± {found.played.error:.2%} (Monte Carlo, "
        f"seed {found.seed})   first order {max(0.0, 1 - found.waste):.2%}",
        soft_wrap=True,
    )
    console.print(
        f"lost {duration((1 - found.played.mean) * DAY_S)} a day: "
        + ", ".join(f"{level.name} {share:.2%}" for level, share in zip(found.levels, found.lost, strict=True)),
        soft_wrap=True,
    )
    console.print(
        f"memory {amount(found.memory_bytes)} a node   network {amount(found.network_rate)}/s a node   storage "
        f"{amount(found.storage_rate)}/s a node   survives 30 days {survival_text(code.risk)}",
        soft_wrap=True,
    )
    console.print("\nwhy")
    for reason in found.why:
        console.print(f"* {reason}", soft_wrap=True)


def survival_text(risk: float) -> str:
    """1 - risk, legibly: all digits as far as they are few."""
    return f"{1.0 - risk:.5f}" if risk >= 1e-4 else f"1 - {risk:.1e}"


def _count(count: int, noun: str) -> str:
    return noun if count == 1 else f"{count:,} {noun}s"


def _how_often(every: int, seconds: float) -> str:
    return f"every {_count(every, 'snapshot')} ({duration(seconds)})" if every else "never"


def _groups(sizes: tuple[int, ...]) -> str:
    counts = {size: sizes.count(size) for size in sorted(set(sizes))}
    return " and ".join(f"{_count(n, 'group') if n > 1 else 'a group'} of {size} nodes" for size, n in counts.items())


def _costs(parsed: argparse.Namespace) -> tuple[Costs, int]:
    """Costs, and of how many nodes."""
    assumptions = Assumptions(
        step_s=_seconds("--step", parsed.step) if parsed.step else None,
        state_bytes=_bytes("--state", parsed.state) if parsed.state else None,
        gpus_per_node=parsed.gpus_per_node,
        device_rate=parse_rate(parsed.device_rate),
        copy_rate=parse_rate(parsed.copy_rate),
        network_rate=parse_rate(parsed.network_rate),
        persist_rate=parse_rate(parsed.persist_rate),
        interference=_fraction("--interference", parsed.interference),
        restart_s=_seconds("--restart", parsed.restart),
        rebuild_s=_seconds("--rebuild", parsed.rebuild),
        slots=parsed.slots,
    )
    if parsed.measured is None:
        return assume(assumptions), 8
    if parsed.step or parsed.state:
        raise ConfigError(
            f"--step or --state together with --measured {parsed.measured}: the profile has both; drop one"
        )
    try:
        data = json.loads(_read("--measured", parsed.measured))
    except ValueError as error:
        raise ConfigError(f"--measured {parsed.measured}: {error}; give the JSON that a run recorded") from error
    measured = Measured.from_json(data)
    return from_measured(measured, assumptions), measured.nodes


def _failures(parsed: argparse.Namespace, nodes: int) -> FailureModel:
    mtbf_s = _seconds("--mtbf", parsed.mtbf) if parsed.mtbf else None
    beyond_s = _seconds("--beyond", parsed.beyond) if parsed.beyond else BEYOND_S
    prior = from_profile(profile(parsed.failures), mtbf_s, beyond_s)
    if parsed.log is None:
        return prior
    incidents = parse_log(_read("--log", parsed.log))
    span_s = _seconds("--log-span", parsed.log_span) if parsed.log_span else span(incidents)
    estimate = learn(incidents, parsed.log_nodes if parsed.log_nodes is not None else nodes, span_s, prior)
    seen = ", ".join(f"{kind} {estimate.events[kind]}" for kind in CLASSES)
    return replace(estimate.model, source=f"{estimate.model.source} ({seen})")


def _targets(parsed: argparse.Namespace, nodes: int) -> Targets:
    code = None
    if parsed.protect != "choose":
        chosen = parse_protect(parsed.protect).for_nodes(nodes)
        code = (chosen.data, chosen.parity) if chosen.parity and nodes > 1 else (0, 0)
    return Targets(
        overhead_budget=_fraction("--overhead-budget", parsed.overhead_budget) or None,
        memory_budget=_bytes("--memory-budget", parsed.memory_budget) or None,
        target_survival=_fraction("--target-survival", parsed.target_survival),
        code=code,
        repair_window_s=_seconds("--repair-window", parsed.repair_window) if parsed.repair_window else None,
        node_repair_s=_seconds("--node-repair", parsed.node_repair),
        seed=parsed.seed,
    )


def _seconds(option: str, text: str) -> float:
    """More than 0."""
    try:
        seconds = parse_duration(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}; one unit, and more than 0") from error
    if seconds <= 0:
        raise ConfigError(f"{option} {text}: give more than 0")
    return seconds


def _bytes(option: str, text: str) -> float:
    try:
        return parse_rate(text)
    except ConfigError:
        raise ConfigError(f"{option} {text!r}: give bytes, 0 or more, such as 98GB or 1.5TB") from None


def _fraction(option: str, text: str) -> float:
    """From ``1%`` or ``0.01``."""
    try:
        value = float(text[:-1]) / 100.0 if text.endswith("%") else float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"{option} {text}: give 0 to 1, or 0% to 100%, such as 0.01 or 1%")
    return value


def _read(option: str, path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {path}: {error}; give a text file that can be read") from error
