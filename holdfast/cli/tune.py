"""``holdfast tune``: how often to take snapshots and how to protect them, from measured costs and failure rates."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from holdfast.cli import plots
from holdfast.cli.arguments import input_file, output_file, rate, size, some_time
from holdfast.cli.output import add_json, console_of, write_json
from holdfast.cli.rates import add_rates, read_measured, say_basis, smp_of
from holdfast.planner.codes import PLACEMENTS, Domains
from holdfast.planner.costs import Assumptions, Costs, assume, from_measured
from holdfast.planner.rates import SmpRates
from holdfast.planner.reasons import reasons
from holdfast.planner.recommend import Recommendation, Targets, recommend
from holdfast.report import say
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.quantities import amount, duration
from holdfast.snapshot.interval.failures import (
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
        epilog="Measured: holdfast profile -- torchrun ... train.py, then holdfast tune --measured profile.json. "
        "Assumed: holdfast tune --step 12s --state 98GB --nodes 128 --mtbf 1000d",
    )
    job = tune.add_argument_group("the job")
    job.add_argument(
        "--measured",
        type=input_file,
        action="append",
        default=[],
        metavar="FILE",
        help="profile of a run, by holdfast profile, or rates of a machine, by holdfast bench node; give it twice for "
        "both",
    )
    job.add_argument(
        "--step", type=some_time, metavar="TIME", help="a step without snapshots, such as 12s; without a profile"
    )
    job.add_argument("--state", type=size, metavar="SIZE", help="of one node, such as 98GB; without a profile")
    job.add_argument("--nodes", type=int, metavar="N", help="(default: those of the profile, or 8)")
    job.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="(default 8)")
    job.add_argument("--slots", type=int, default=3, metavar="N", help="for each shard (default 3); without a profile")
    rates = tune.add_argument_group("rates of the machine, where nothing was measured")
    for option, default, meaning in (
        ("--device-rate", "25GB/s", "one GPU to host memory"),
        ("--persist-rate", "1GB/s", "a node to storage; 0: no such tier"),
    ):
        rates.add_argument(option, type=rate, default=default, metavar="RATE", help=f"{meaning} (default {default})")
    add_rates(rates, "--copy-rate")
    rates.add_argument(
        "--interference",
        default="5%",
        metavar="SHARE",
        help="how much copying, encoding and persisting slow down training while they last (default 5%%)",
    )
    failures = tune.add_argument_group("what fails, and how long it takes to come back")
    names = ", ".join(PROFILES)
    failures.add_argument("--failures", default="ft-hsdp", metavar="NAME", help=f"of {names} (default ft-hsdp)")
    failures.add_argument(
        "--mtbf",
        type=some_time,
        metavar="TIME",
        help="mean time between failures of one node, such as 1000d or 36h; --failures then only says what fails",
    )
    failures.add_argument(
        "--log", type=input_file, metavar="CSV", help="own incidents: time and class or cause; see docs/tuning.md"
    )
    failures.add_argument("--log-nodes", type=int, metavar="N", help="nodes of the job of the log (default --nodes)")
    failures.add_argument(
        "--log-span", type=some_time, metavar="TIME", help="what the log covers, such as 90d (default: from its lines)"
    )
    failures.add_argument(
        "--domain-nodes", type=int, default=2, metavar="N", help="nodes that fail together, as a rack (default 2)"
    )
    failures.add_argument(
        "--placement", default="neighbours", metavar="HOW", help=f"{', '.join(PLACEMENTS)} (default neighbours)"
    )
    for option, default, meaning in (
        ("--beyond", "90d", "between losses of the whole job's memory"),
        ("--restart", "5min", "from dead processes to the next step"),
        ("--rebuild", "10min", "from a lost node to the next step"),
        ("--node-repair", "1d", "until a node that was taken out is back"),
    ):
        failures.add_argument(
            option, type=some_time, default=default, metavar="TIME", help=f"{meaning} (default {default})"
        )
    failures.add_argument(
        "--repair-window",
        type=some_time,
        metavar="TIME",
        help="until a lost node's bytes are protected again (default: rebuilt, encoded)",
    )
    aims = tune.add_argument_group("what is wanted")
    aims.add_argument("--overhead-budget", default="1%", metavar="SHARE", help="of training time; 0: any (default 1%%)")
    aims.add_argument(
        "--memory-budget",
        type=size,
        default="0",
        metavar="SIZE",
        help="shared memory of a node, such as 400GB; 0: any (default)",
    )
    aims.add_argument(
        "--target-survival",
        default="0.999",
        metavar="SHARE",
        help="of what is in memory, for 30 days (default 0.999)",
    )
    aims.add_argument(
        "--protect",
        default="choose",
        metavar="CODE",
        help="choose, or k+m such as 6+2, copies:r, auto, none (default choose)",
    )
    report = tune.add_argument_group("the answer")
    report.add_argument("--seed", type=int, default=1, metavar="N", help="of the Monte Carlo (default 1)")
    report.add_argument(
        "--plot", type=output_file, metavar="FILE", help="also draw waste and survival, as SVG (extra: plots)"
    )
    add_json(report)
    tune.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Run the command."""
    if parsed.seed < 0:
        raise ConfigError(f"--seed {parsed.seed}: give 0 or more")
    plots.check_plots(parsed.plot)
    profiled, smp = _measured(parsed)
    costs, measured_nodes = _costs(parsed, profiled, smp)
    nodes = parsed.nodes if parsed.nodes is not None else measured_nodes
    if nodes < 1:
        raise ConfigError(f"--nodes {nodes}: give 1 or more")
    model = _failures(parsed, nodes)
    domains = Domains(parsed.domain_nodes, parsed.placement)
    targets = _targets(parsed, nodes)
    found = recommend(costs, model, nodes, domains, targets)
    found = replace(found, why=tuple(reasons(found, costs, model, domains, targets, duration, amount)))
    console = console_of(parsed)
    show(console, found, costs)
    if profiled is None or not profiled.parity:  # otherwise encoding was measured, not computed
        console.print()
        say_basis(console, smp)
    if parsed.plot:
        plots.write(plots.draw_tune(found, costs), parsed.plot)
    write_json(parsed.json, found.to_json() | {"rates": smp.to_json()})
    return 0


def show(console: Console, found: Recommendation, costs: Costs) -> None:
    """Print what to do, what to expect and why, on one screen."""
    code, step_s = found.code, found.step_s
    every = found.periods[0]
    for name, what in (
        ("snapshot", f"every {_count(every, 'step')} ({duration(every * step_s)})"),
        ("encode", _how_often(found.encode_every, found.encode_every * every * step_s)),
        ("persist", _how_often(found.persist_every, found.persist_every * every * step_s)),
        ("protect", f"{code}, {_groups(code.sizes)}" if code.parity else "none: processes only"),
        ("spare nodes", str(found.spares)),
    ):
        say(console, f"{name:<13}{what}")
    played = f"{found.played.mean:.2%}"
    say(
        console,
        f"\noverhead {found.overhead:.2%}   effective training time {played} ± {found.played.error:.2%} (Monte Carlo, "
        f"seed {found.seed})   first order {max(0.0, 1 - found.waste):.2%}",
    )
    say(
        console,
        f"lost {duration((1 - found.played.mean) * DAY_S)} a day: "
        + ", ".join(f"{level.name} {share:.2%}" for level, share in zip(found.levels, found.lost, strict=True)),
    )
    say(
        console,
        f"memory {amount(found.memory_bytes)} a node   network {amount(found.network_rate)}/s a node   storage "
        f"{amount(found.storage_rate)}/s a node   survives 30 days {survival_text(code.risk)}",
    )
    say(console, "\nwhy")
    for reason in found.why:
        say(console, f"* {reason}")


def survival_text(risk: float) -> str:
    """1 - risk, as a decimal; if the risk is below 1e-4, as the text ``1 - <risk>``."""
    return f"{1.0 - risk:.5f}" if risk >= 1e-4 else f"1 - {risk:.1e}"


def _count(count: int, noun: str) -> str:
    return noun if count == 1 else f"{count:,} {noun}s"


def _how_often(every: int, seconds: float) -> str:
    return f"every {_count(every, 'snapshot')} ({duration(seconds)})" if every else "never"


def _groups(sizes: tuple[int, ...]) -> str:
    counts = {size: sizes.count(size) for size in sorted(set(sizes))}
    return " and ".join(f"{_count(n, 'group') if n > 1 else 'a group'} of {size} nodes" for size, n in counts.items())


def _measured(parsed: argparse.Namespace) -> tuple[Measured | None, SmpRates]:
    """The profile of the job, if ``--measured`` has one, and the rates of the machine."""
    machines = []
    profiled: Measured | None = None
    for path in parsed.measured:
        try:
            data = read_measured(path)
            if isinstance(data, dict) and "kind" in data:
                machines.append(path)
                continue
            if profiled is not None:
                raise ConfigError("there is a profile already: give one")
            profiled = Measured.from_json(data)
        except ConfigError as error:
            raise ConfigError(f"--measured {path}: {error}") from error
    if len(machines) > 1:
        raise ConfigError(f"--measured {machines[1]}: there are rates of a machine already: give one")
    if profiled is not None and (parsed.step or parsed.state):
        raise ConfigError("--step or --state together with a profile in --measured: it has both; drop one")
    return profiled, smp_of(parsed, machines[0] if machines else None)


def _costs(parsed: argparse.Namespace, profiled: Measured | None, smp: SmpRates) -> tuple[Costs, int]:
    """The costs, and the number of nodes that they are for."""
    assumptions = Assumptions(
        step_s=parsed.step,
        state_bytes=parsed.state,
        gpus_per_node=parsed.gpus_per_node,
        device_rate=parsed.device_rate,
        copy_rate=smp.digest,
        network_rate=smp.network,
        persist_rate=parsed.persist_rate,
        interference=_fraction("--interference", parsed.interference),
        restart_s=parsed.restart,
        rebuild_s=parsed.rebuild,
        slots=parsed.slots,
    )
    if profiled is None:
        return assume(assumptions), 8
    return from_measured(profiled, assumptions), profiled.nodes


def _failures(parsed: argparse.Namespace, nodes: int) -> FailureModel:
    prior = from_profile(profile(parsed.failures), parsed.mtbf, parsed.beyond)
    if parsed.log is None:
        return prior
    incidents = parse_log(_read("--log", parsed.log))
    span_s = parsed.log_span or span(incidents)
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
        memory_budget=parsed.memory_budget or None,
        target_survival=_fraction("--target-survival", parsed.target_survival),
        code=code,
        repair_window_s=parsed.repair_window,
        node_repair_s=parsed.node_repair,
        seed=parsed.seed,
    )


def _fraction(option: str, text: str) -> float:
    """Parse a share such as ``1%`` or ``0.01``."""
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
